"""Monitors at work: scores of a text while `generate` writes it, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event, get_ident
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from transformers import StoppingCriteria

from lamina.bank.generation import GenerateCall
from lamina.bank.generation_states import Columns, Follower
from lamina.bank.reader import ReaderModule
from lamina.bank.stack_pass import StackPass, run_heads
from lamina.errors import ConfigError, check_known
from lamina.monitors.cascade import AnyMonitor, Cascade, start

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@final
@dataclass(frozen=True)
class Step:
    """A new token of each sequence, and what the monitors say of the text up to and including it; all on the CPU.

    The last token of a sequence is read by no step of the model: it leaves the scores as they were.
    """

    index: int  # of the token, from 0
    tokens: Int[Tensor, " sequences"]  # ids; padding where a sequence has ended
    real: Bool[Tensor, " sequences"]  # False where a sequence had ended before
    scores: Mapping[str, Float[Tensor, " sequences"]]  # by monitor, in float64; NaN before the first token was read
    flagged: Mapping[str, Bool[Tensor, " sequences"]]  # by monitor, whether the sequence is flagged by now


@final
class Watch:
    """What `bank.watch` yields: the monitors' view of the text that is being written, or was last.

    Attributes:
        stopping: A `StoppingCriteria` for `generate(..., stopping_criteria=[watch.stopping])`: it ends the sequences
            that a monitor has flagged, after the token that was chosen meanwhile. If the model's generation config has
            no end token, transformers goes on writing them until all have ended.
        steps: What the monitors said, a `Step` for each new token.
    """

    def __init__(
        self,
        template: StackPass,
        monitors: Mapping[str, AnyMonitor],
        *,
        stop: Sequence[str] | None = None,
        on_token: Callable[[Step], None] | None = None,
        every: int = 1,
    ) -> None:
        self._template, self._monitors, self._on_token, self._every = template, monitors, on_token, every
        self._texts: dict[int, _Text] = {}  # by thread, since tasks of one context may generate at once
        self._latest: _Text | None = None
        self.stopping: StoppingCriteria = _Stopping(self, tuple(monitors if stop is None else stop))

    def begin(self, call: GenerateCall) -> _Text:
        """A call of `generate` begins."""
        _check_call(call)
        self._latest = self._texts[get_ident()] = _Text(
            self._template, self._monitors, call, every=self._every, on_token=self._on_token
        )
        return self._latest

    def _text(self) -> _Text:
        text = self._texts.get(get_ident(), self._latest)
        if text is None:
            raise ConfigError("bank.watch: no text was written yet. Call model.generate in this context.")
        return text

    @property
    def steps(self) -> list[Step]:
        """The steps so far."""
        return self._text().steps

    @property
    def flagged_at(self) -> dict[str, list[int | None]]:
        """By monitor and sequence, the index of the token at which it was flagged; None: it was not.

        Tokens of the prompt have negative ones, -1 the last. In a cascade the second monitor's verdict counts.
        """
        text = self._text()
        rows = 0 if text.flags is None else text.flags.shape[1]
        places: dict[str, list[int | None]] = {name: [None] * rows for name in text.order}
        for monitor, row, index in text.places:
            places[text.names[monitor]][row] = index
        return places

    @property
    def asked(self) -> dict[str, float]:
        """By cascade, the share of the tokens that were read for which its second reader ran."""
        return self._text().asked()

    def is_flagged(self, names: Sequence[str]) -> Bool[Tensor, " sequences"] | None:
        """Whether one of some monitors has flagged each sequence of the text of this thread; None: nothing was read."""
        text = self._text()
        return None if text.flags is None else text.flags[[text.names.index(name) for name in names]].any(0)


@final
class _Text(Follower):
    """One text per sequence, as one call of `generate` writes them."""

    def __init__(
        self,
        template: StackPass,
        monitors: Mapping[str, AnyMonitor],
        call: GenerateCall,
        *,
        every: int,
        on_token: Callable[[Step], None] | None,
    ) -> None:
        self.every, self.steps = every, list[Step]()
        self.places: list[tuple[int, int, int]] = []  # monitor, row and index of the token of every flag
        heads = {name: reader.config.head for name, reader in template.readers.items()}
        self._template, self._on_token, self._working = template, on_token, start(monitors, heads)
        self.names, self.order = [name for names, _ in self._working for name in names], list(monitors)
        thresholds = [monitors[name].threshold for name in self.names]
        self._thresholds = torch.tensor([[math.nan if one is None else one] for one in thresholds], dtype=torch.float64)
        self._always = list(dict.fromkeys(monitor.readers[0] for monitor in monitors.values()))
        self._cascades = [isinstance(monitors[name], Cascade) for name in self.names]
        self.flags: Tensor | None = None  # [monitors, rows]; None while nothing was read
        self._scores: Tensor | None = None  # of the last token that was read
        criteria = [own for own in call.kwargs.get("stopping_criteria") or () if not isinstance(own, Leaving)]
        may_end = bool(criteria or call.option("stop_strings"))  # a sequence without an end token, which is then padded
        self._ends = torch.tensor(_ids(call.option("eos_token_id")), dtype=torch.long)
        self._pads = torch.tensor(_ids(call.option("pad_token_id") if may_end else None), dtype=torch.long)
        self._ended: Tensor | None = None
        self._read = 0  # real tokens
        self._asked = torch.zeros(len(self.names), dtype=torch.long)  # of them those with a score of their own

    def read(self, columns: Columns) -> None:
        """Score some tokens, and tell of those that are new."""
        tokens, real = columns.tokens.cpu(), columns.real.cpu()
        new = torch.arange(columns.first, columns.first + tokens.shape[1]) >= columns.prompt
        own, last = self._own(tokens, new)
        real = real & own & ~last
        values = self._values(columns.states, real)
        hits = real & (values >= self._thresholds.unsqueeze(-1))
        for at, (score, hit) in enumerate(zip(values.unbind(-1), hits.unbind(-1), strict=True)):
            flags = hit if self.flags is None else self.flags | hit
            if bool(hit.any()):
                fresh = hit if self.flags is None else hit & ~self.flags
                index = columns.first + at - columns.prompt
                self.places += [(monitor, row, index) for monitor, row in fresh.nonzero().tolist()]
            self.flags, self._scores = flags, score
            if new[at]:
                self._tell(tokens[:, at], own[:, at])

    def _own(self, tokens: Int[Tensor, "rows columns"], new: Bool[Tensor, " columns"]) -> tuple[Tensor, Tensor]:
        """Which tokens are of sequences that had not ended, and which end one; `[rows, columns]`."""
        if self._ended is None:
            self._ended = torch.zeros(len(tokens), dtype=torch.bool)
        last = torch.isin(tokens, self._ends) & new
        after = torch.isin(tokens, self._pads) & new & ~last
        ends = last | after
        before = self._ended.unsqueeze(1) | (ends.cumsum(1) - ends.long() > 0)
        self._ended = before[:, -1] | ends[:, -1]
        return ~before & ~after, last

    def _values(
        self, states: Mapping[int, Tensor], real: Bool[Tensor, "rows columns"]
    ) -> Float[Tensor, "monitors rows columns"]:
        """The score up to each column."""
        self._read += int(real.sum())
        always = read_tokens(self._template, self._always, states)

        def ask(name: str, rows: Bool[Tensor, " rows"]) -> Tensor:
            if name in always:
                return always[name] if bool(rows.all()) else always[name][rows]
            some = {layer: state[rows.to(state.device)] for layer, state in states.items()}
            return read_tokens(self._template, [name], some)[name]

        values = torch.cat([working.add(ask, real) for _, working in self._working])
        if any(self._cascades):
            self._asked += (values.isfinite() & real).sum((1, 2))
        return values

    def _tell(self, tokens: Int[Tensor, " rows"], real: Bool[Tensor, " rows"]) -> None:
        shape = len(self.names), len(tokens)
        scores = torch.full(shape, torch.nan, dtype=torch.float64) if self._scores is None else self._scores
        flags = torch.zeros(shape, dtype=torch.bool) if self.flags is None else self.flags
        step = Step(len(self.steps), tokens, real, self._named(scores), self._named(flags))
        self.steps.append(step)
        if self._on_token is not None:
            self._on_token(step)

    def _named(self, values: Tensor) -> dict[str, Tensor]:
        rows = dict(zip(self.names, values.unbind(0), strict=True))
        return {name: rows[name] for name in self.order}

    def end(self, new: Int[Tensor, "sequences tokens"]) -> None:
        """Tell of the tokens that no step read."""
        left = new.cpu()[:, len(self.steps) :]
        if left.shape[1]:
            own, _ = self._own(left, torch.ones(left.shape[1], dtype=torch.bool))
            for at in range(left.shape[1]):
                self._tell(left[:, at], own[:, at])

    def asked(self) -> dict[str, float]:
        """By cascade the share of the tokens."""
        counts = zip(self.names, self._asked.tolist(), self._cascades, strict=True)
        return {name: count / max(1, self._read) for name, count, is_cascade in counts if is_cascade}


class _Stopping(StoppingCriteria):
    def __init__(self, watch: Watch, names: tuple[str, ...]) -> None:
        self._watch, self._names = watch, names

    def __call__(self, input_ids: Tensor, scores: Any, **_options: Any) -> Any:  # noqa: ARG002
        flags = self._watch.is_flagged(self._names)
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool) if flags is None else flags.to(input_ids.device)


class Leaving(StoppingCriteria):
    """Ends every sequence once an event is set."""

    def __init__(self, left: Event) -> None:
        self._left = left

    def __call__(self, input_ids: Tensor, scores: Any, **_options: Any) -> Any:  # noqa: ARG002
        """Whether each sequence is to end."""
        return torch.full((len(input_ids),), self._left.is_set(), device=input_ids.device)


@torch.no_grad()
def read_tokens(template: StackPass, names: Sequence[str], states: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """What readers say of each token by itself, by name, on the CPU.

    Args:
        template: A pass over the stack with these readers, all token-wise.
        names: Which of its readers.
        states: Layer -> its states `[rows, tokens, width]`.

    Returns:
        Logits `[rows, tokens, classes]`.
    """
    stack_pass = template.again({name: template.readers[name] for name in names})
    for layer in stack_pass.layers:
        stack_pass.on_state(layer, states[layer])
    return token_logits(stack_pass)


def token_logits(stack_pass: StackPass) -> dict[str, Tensor]:
    """The same, of a pass that has taken its states."""
    features = stack_pass.features()
    rows, count = next(iter(features.values())).shape[:2]
    each = {name: part.flatten(0, 1).unsqueeze(1) for name, part in features.items()}  # every token is a text
    alone = torch.ones(rows * count, 1, dtype=torch.bool, device=next(iter(each.values())).device)
    outputs = run_heads(stack_pass.readers, each, alone, {}, grad=False, together=True)
    logits = [outputs[name].logits.float().reshape(rows, count, -1) for name in each]
    for number, name in enumerate(each):
        if (weights := stack_pass.readers[name].head.log_weights(features[name])) is not None:
            logits[number] = torch.cat([logits[number], weights.float().unsqueeze(-1)], dim=-1)
    parts = torch.cat(logits, dim=-1).cpu().split([part.shape[-1] for part in logits], dim=-1)  # one copy for all
    return dict(zip(each, parts, strict=True))


def check_reader(op: str, name: str, reader: ReaderModule) -> None:
    """Raise ConfigError if what a reader says of a token may depend on other tokens."""
    kinds = {"fusion": type(reader.config.fusion).__name__, "head": type(reader.config.head).__name__}
    for part, module in (("fusion", reader.fusion), ("head", reader.head)):
        if not module.is_token_wise():
            came = f"reader '{name}' has a {part} ({kinds[part]}) that looks at other tokens, later ones too"
            raise ConfigError(
                f"{op}: {came}; a text that is being written has none. Use a token-wise fusion, such as "
                "AdaLayers(positions=False) or ScalarMix(), with TokenClassification(encoder_layers=0) or "
                "SequenceClassification(pooling='mean') or pooling='query'."
            )


def checked_monitors(
    op: str,
    given: Sequence[AnyMonitor | str] | None,
    saved: Mapping[str, AnyMonitor],
    readers: Mapping[str, ReaderModule],
) -> dict[str, AnyMonitor]:
    """Monitors by name, None: all that are saved; an error if one does not exist, or does not fit its reader."""
    if given is None:
        given = list(saved)
    check_known(op, [name for name in given if isinstance(name, str)], saved, "monitor")
    monitors: dict[str, AnyMonitor] = {}
    for entry in given:
        monitor = saved[entry] if isinstance(entry, str) else entry
        name = str(monitor.name)
        if name in monitors:
            raise ConfigError(f"{op}: two monitors are called '{name}'; names tell them apart. Give one name=... .")
        check_known(op, monitor.readers, readers, "reader")
        monitor.check({reader: readers[reader].config.head for reader in monitor.readers})
        for reader in monitor.readers:
            check_reader(op, reader, readers[reader])
        monitors[name] = monitor
    if not monitors:
        raise ConfigError(f"{op}: there is no monitor. Give monitors=[lamina.Monitor(...)].")
    return monitors


def _check_call(call: GenerateCall) -> None:
    """Raise ConfigError if the states of a step are not yet those of the text."""
    if call.beams:
        came = f"generate is called with num_beams={call.option('num_beams')}"
        why = "which text a beam is of is known at its end, so that no token is final while it is written"
        raise ConfigError(f"bank.watch: {came}; {why}. Use one beam, or bank.listen(over='output').")
    if call.assisted:
        came = "generate is called with drafts, which are read before it is known whether they are taken"
        raise ConfigError(f"bank.watch: {came}. Leave them out, or use bank.listen(over='output').")


def _ids(given: Any) -> list[int]:
    """Token ids from one, several or none."""
    return [] if given is None else [int(token) for token in torch.as_tensor(given).flatten()]
