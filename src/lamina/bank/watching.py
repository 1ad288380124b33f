"""`bank.watch` and `bank.stream`: monitors score a text token by token while `generate` writes it."""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from queue import Full, Queue
from threading import Event, Thread, get_ident
from typing import TYPE_CHECKING, Any, Literal, cast, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase, StoppingCriteria

from lamina.bank.detokenizer import Detokenizer
from lamina.bank.generation import GenerateCall, in_callback
from lamina.bank.generation_states import GenerationObserver, TokenBlock
from lamina.bank.listening import check_over, listening
from lamina.bank.monitoring import (
    causal_pass,
    check_monitors,
    check_reads_stepwise,
    check_scores,
    read_tokens,
    stored_monitors,
)
from lamina.bank.prompt_inputs import Prompts, check_prompt_length, encode_prompts, text_tokenizer
from lamina.bank.stack_pass import Inputs, StackPass
from lamina.bank.step import Step
from lamina.errors import ConfigError, check_known
from lamina.layers.preserve import evaluating
from lamina.layers.types import special_ids
from lamina.layers.wrappers import unwrapped
from lamina.monitors.cascade import AnyMonitor, Cascade, start_monitors
from lamina.monitors.reply_drift import DriftWatcher, ReplyFacts
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel

    from lamina.bank.reader_collection import ReaderCollection
    from lamina.layers.types import Tokenizer, WritingModel

Watched = Literal["output", "both"]


@final
class Watch:
    """The scores and flags of the text that is being generated, or was generated last. `bank.watch` yields it.

    If threads generate at the same time, each thread sees its own text. Before the first text, all members but
    `stopping` and `begin` raise ConfigError.
    """

    def __init__(
        self, new_text: Callable[[GenerateCall], _WatchedText], stop: Sequence[str], *, tests_drift: bool
    ) -> None:
        self._new_text, self._stop, self._tests_drift = new_text, stop, tests_drift
        # thread -> its text: threads and tasks that share the context may generate at the same time
        self._texts: dict[int, _WatchedText] = {}
        self._latest: _WatchedText | None = None

    def begin(self, call: GenerateCall) -> _WatchedText:
        """Begin a new text for a call of `generate`, and return it; raise ConfigError if the call cannot be watched."""
        _check_call(call)
        self._latest = self._texts[get_ident()] = self._new_text(call)
        return self._latest

    def _text(self) -> _WatchedText:
        """Return this thread's text, or else the latest text of any thread; raise ConfigError if there is none."""
        return _require_text(self._texts.get(get_ident(), self._latest))

    @property
    def stopping(self) -> StoppingCriteria:
        """A `StoppingCriteria` for `generate(..., stopping_criteria=[watch.stopping])`.

        It ends the sequences that one of the monitors in `stop` has flagged, one token later than the flag. If the
        model's generation config has no end token, transformers continues a flagged sequence until all sequences have
        ended. Raises ConfigError if a drift test is in use.
        """
        if self._tests_drift:
            problem = "drift is tested on whole replies, and a flag that stops a reply cuts it short"
            raise ConfigError(f"bank.watch: {problem}. Leave out drift, or the stopping.")
        return _StopFlagged(self, self._stop)

    def discard(self) -> None:
        """Leave this thread's text out of the drift tests; if it has none, the latest text of any thread.

        No effect after `generate` has returned. Raises ConfigError before the first text.
        """
        self._text().facts.discard()

    @property
    def steps(self) -> list[Step]:
        """The steps of the text so far, one per new token, in a list that grows; ConfigError before the first text."""
        return self._text().steps

    @property
    def flagged_at(self) -> dict[str, list[int | None]]:
        """Monitor name -> index of the first flagged token of each sequence, None if no token of it was flagged.

        Index 0 is the first new token. With `over="both"`, tokens of the prompt count back from -1, its last. The list
        is empty until a token was read. Raises ConfigError before the first text.
        """
        text = self._text()
        rows = 0 if text.flags is None else text.flags.shape[1]
        places: dict[str, list[int | None]] = {name: [None] * rows for name in text.monitor_names}
        for name, row, index in text.places:
            places[name][row] = index
        return places

    @property
    def asked(self) -> dict[str, float]:
        """Cascade name -> fraction of the tokens scored so far that the cascade's second monitor scored.

        With `over="both"` the tokens of the prompt count too. Raises ConfigError before the first text.
        """
        return self._text().asked()

    def is_flagged(self, names: Sequence[str]) -> Bool[Tensor, " sequences"] | None:
        """Return for each sequence of this thread's text whether a monitor in `names` has flagged it, `[sequences]`.

        None if the model has not read a token yet. Raises ConfigError if this thread writes no text at present.
        """
        text = self._texts.get(get_ident())
        # a new thread may get the id of a thread that has ended
        text = _require_text(text if text is not None and text.is_open else None)
        return None if text.flags is None else text.flags[[text.rows.index(name) for name in names]].any(0)


def _require_text(text: _WatchedText | None) -> _WatchedText:
    """Return `text`; raise ConfigError if it is None: nothing was generated yet."""
    if text is None:
        problem = "no text was written yet in the context that watches. Call model.generate in it"
        rule = "a thread started by hand must run contextvars.copy_context().run"
        raise ConfigError(f"bank.watch: {problem}; {rule}.")
    return text


@final
class _WatchedText(GenerationObserver):
    """The scores and flags of the sequences that one call of `generate` writes.

    Tensors have one row per monitor. The list `rows` holds the monitors' names in the order of the rows; monitors that
    are computed in one operation have neighbouring rows. `monitor_names` holds the names in the caller's order.

    `template` is a pass with the readers of `monitors` (name -> monitor). Special tokens of `tokenizer` are not scored.
    Texts are decoded only if there are both a `tokenizer` and `on_token`. `every`, `on_token` and `drift` are those of
    `ReaderBank.watch`.
    """

    def __init__(
        self,
        template: StackPass,
        monitors: Mapping[str, AnyMonitor],
        call: GenerateCall,
        *,
        every: int,
        on_token: Callable[[Step], None] | None,
        tokenizer: PreTrainedTokenizerBase | None,
        drift: Mapping[str, DriftWatcher],
    ) -> None:
        self.every, self._listeners = every, call.listeners
        self.facts = _RepliesSoFar(drift, {name: monitors[name].readers[0] for name in drift})
        self.is_open = True  # while `generate` writes it
        self.steps: list[Step] = []
        self.places: list[tuple[str, int, int]] = []  # monitor, sequence and token index of every first flag
        self.flags: Tensor | None = None  # [monitors, sequences]; None before the first token was read
        heads = {name: reader.config.head for name, reader in template.readers.items()}
        self._template, self._call, self._on_token = template, call, on_token
        self._special = special_ids(tokenizer)
        # without a callback nobody shows the text while it is generated, so nothing is decoded
        self._detokenizers = None if on_token is None or tokenizer is None else _detokenizers(call, tokenizer)
        self._running = start_monitors(monitors, heads)
        self.rows = [name for names, _ in self._running for name in names]
        self.monitor_names = list(monitors)
        self._monitors = [monitors[name] for name in self.rows]
        limits = [monitor.threshold for monitor in self._monitors]
        # a monitor without a threshold gets NaN, which no score reaches
        self._thresholds = torch.tensor([[math.nan if n is None else n] for n in limits], dtype=torch.float64)
        self._always = list(dict.fromkeys(monitor.readers[0] for monitor in monitors.values()))
        self._is_cascade = [isinstance(monitor, Cascade) for monitor in self._monitors]
        self._scores: Tensor | None = None  # [monitors, sequences], up to the last token that was read
        self._ended = torch.zeros(1, dtype=torch.bool)  # [sequences], True once a sequence has ended
        self._tokens_seen = 0  # new tokens that `_running_sequences` has processed
        self._tokens_read = 0  # tokens that count
        self._tokens_scored = torch.zeros(len(self.rows), dtype=torch.long)  # those with a finite score

    def on_tokens(self, block: TokenBlock) -> None:
        """Score the tokens in `block`, which the model has read, flag sequences, and add a step per new token.

        Padding, special tokens and the token that ends a sequence are not scored.
        """
        tokens, real = block.tokens.cpu(), block.real.cpu()
        is_new = torch.arange(block.first, block.first + tokens.shape[1]) >= block.prompt
        prompt_columns = int((~is_new).sum())
        running, is_last = self._running_sequences(prompt_columns, tokens.shape[1] - prompt_columns)
        real = real & running & ~is_last & ~torch.isin(tokens, self._special)
        values = self._score(block.states, real)
        hits = real & (values >= self._thresholds.unsqueeze(-1))
        for column, (score, hit) in enumerate(zip(values.unbind(-1), hits.unbind(-1), strict=True)):
            if bool(hit.any()):
                first_hit = hit if self.flags is None else hit & ~self.flags
                index = block.first + column - block.prompt
                self.places += [(self.rows[monitor], row, index) for monitor, row in first_hit.nonzero().tolist()]
            self.flags = hit if self.flags is None else self.flags | hit
            self._scores = score
            if is_new[column]:
                self._add_step(tokens[:, column], running[:, column], is_last[:, column])

    def _running_sequences(self, prompt: int, new: int) -> tuple[Tensor, Tensor]:
        """Return two masks `[rows, columns]`: of tokens whose sequence had not ended before, and of those that end it.

        The first `prompt` columns are tokens of the prompt, and `new` columns with new tokens follow. The object stores
        which sequences have ended, for the next call.
        """
        ends = F.pad(self._call.ended(self._tokens_seen, new), (prompt, 0))
        self._tokens_seen += new
        # ended in an earlier call, or at an earlier column: then more ends are counted up to this column than its own
        before = self._ended.unsqueeze(1) | (ends.cumsum(1) - ends.long() > 0)
        self._ended = before[:, -1] | ends[:, -1]
        return ~before, ends

    def _score(
        self, states: Mapping[int, Tensor], real: Bool[Tensor, "rows columns"]
    ) -> Float[Tensor, "monitors rows columns"]:
        """Add tokens to the running scores; return the score of each sequence up to each token.

        The second reader of a cascade runs only for sequences with an unsure token: one at which the first monitor's
        score has reached its threshold, but not `Cascade.sure`. Scores and features also go to the drift tests. Raises
        NotFiniteError if a score is NaN.

        Args:
            states: Layer -> states `[rows, columns, width]`, with one row per sequence.
            real: True at the tokens to score; the result has no meaning at other tokens.
        """
        self._tokens_read += int(real.sum())
        on_features = partial(self.facts.on_features, real) if self.facts.watchers else None
        always = read_tokens(self._template, self._always, states, on_features)

        def get_logits(name: str, rows: Bool[Tensor, " rows"]) -> Tensor:
            if name in always:
                return always[name] if bool(rows.all()) else always[name][rows]
            chosen = {layer: state[rows.to(state.device)] for layer, state in states.items()}
            return read_tokens(self._template, [name], chosen)[name]

        values = torch.cat([running.add(get_logits, real) for _, running in self._running])
        check_scores("bank.watch", self._monitors, values, real)
        if self.facts.watchers:
            self.facts.on_scores({name: values[self.rows.index(name)] for name in self.facts.watchers}, real)
        if any(self._is_cascade):
            self._tokens_scored += (values.isfinite() & real).sum((1, 2))
        return values

    def _add_step(
        self, tokens: Int[Tensor, " rows"], real: Bool[Tensor, " rows"], is_last: Bool[Tensor, " rows"]
    ) -> None:
        """Append a step with the latest scores and flags, and pass it to `on_token`.

        Per sequence, `tokens` has the new token id, `real` whether the sequence was still running, and `is_last`
        whether the token is its last.
        """
        shape = len(self.rows), len(tokens)
        scores = torch.full(shape, torch.nan, dtype=torch.float64) if self._scores is None else self._scores
        flags = torch.zeros(shape, dtype=torch.bool) if self.flags is None else self.flags
        texts = self._texts(tokens.tolist(), real.tolist(), is_last.tolist())
        step = Step(len(self.steps), tokens, real, self._by_name(scores), self._by_name(flags), texts)
        self.steps.append(step)
        if self._on_token is not None:
            with in_callback(self._listeners):
                self._on_token(step)

    def _texts(self, tokens: list[int], real: list[bool], is_last: list[bool]) -> tuple[str, ...] | None:
        """Return the text that a new token adds to each sequence; None if tokens are not decoded.

        `tokens` has one id per sequence. A sequence that had ended before (`real` is False) gets "". One that ends with
        this token (`is_last`) also gets the text that was held back.
        """
        if self._detokenizers is None:
            return None
        rows = zip(self._detokenizers, tokens, real, is_last, strict=True)
        return tuple(
            (row.add(token) + (row.rest() if end else "")) if is_real else "" for row, token, is_real, end in rows
        )

    def _by_name(self, values: Tensor) -> dict[str, Tensor]:
        rows = dict(zip(self.rows, values.unbind(0), strict=True))
        return {name: rows[name] for name in self.monitor_names}

    def on_end(self, new: Int[Tensor, "sequences tokens"]) -> None:
        """Add a step for each column of `new` that has none yet: usually the last one, which the model did not read.

        Such a step has the latest scores and flags, and the callback gets it like every step. Then the complete replies
        are passed to the drift tests. `new` has all new tokens of the text.
        """
        rest = new.cpu()[:, len(self.steps) :]
        if rest.shape[1]:
            running, ends = self._running_sequences(0, rest.shape[1])
            ends[:, -1] = True
            for column in range(rest.shape[1]):
                self._add_step(rest[:, column], running[:, column], ends[:, column])
        self.facts.on_end()

    def close(self) -> None:
        self.is_open = False

    def asked(self) -> dict[str, float]:
        """Return cascade name -> fraction of the scored tokens that the cascade's second monitor scored."""
        counts = zip(self.rows, self._tokens_scored.tolist(), self._is_cascade, strict=True)
        return {name: count / max(1, self._tokens_read) for name, count, is_cascade in counts if is_cascade}


class _RepliesSoFar:
    """Collects the scores, lengths and features of the replies of one call of `generate` for drift tests.

    `watchers` is monitor name -> its drift test, and `readers` monitor name -> its reader.
    """

    def __init__(self, watchers: Mapping[str, DriftWatcher], readers: Mapping[str, str]) -> None:
        self.watchers, self._readers = watchers, readers
        self._highest: dict[str, Tensor] = {}  # monitor name -> [sequences]
        # reader name -> sum of its features, [sequences, dim], on the model's device
        self._sums: dict[str, Tensor] = {}
        self._lengths: Tensor | None = None  # [sequences], in tokens that were scored
        self._is_discarded = False

    def on_features(self, real: Bool[Tensor, "rows columns"], features: Mapping[str, Tensor]) -> None:
        """Add each reader's features `[rows, columns, dim]`, where `real` is True, to the reader's sum per sequence."""
        for reader in dict.fromkeys(self._readers.values()):
            own = features[reader].float()
            total = own.masked_fill(~real.to(own.device).unsqueeze(-1), 0).sum(1)  # padding may hold NaN
            self._sums[reader] = total if reader not in self._sums else self._sums[reader] + total

    def on_scores(self, scores: Mapping[str, Tensor], real: Bool[Tensor, "rows columns"]) -> None:
        """Update each monitor's highest score, and the lengths, with scores `[rows, columns]` where `real` is True."""
        counts = real.sum(1)
        self._lengths = counts if self._lengths is None else self._lengths + counts
        for name, own in scores.items():
            best = own.masked_fill(~real, -torch.inf).amax(1)
            self._highest[name] = best if name not in self._highest else torch.maximum(self._highest[name], best)

    def discard(self) -> None:
        self._is_discarded = True

    def on_end(self) -> None:
        """Pass the replies to the drift tests, unless discarded. Replies with NaN or no scored token are left out."""
        if self._is_discarded:
            return
        lengths = [] if self._lengths is None else self._lengths.tolist()
        for name, watcher in self.watchers.items():
            if name in self._highest:
                scores, sums = self._highest[name].tolist(), self._sums[self._readers[name]].cpu()
                for score, length, row in zip(scores, lengths, sums, strict=True):
                    if length and not math.isnan(score) and not bool(row.isnan().any()):
                        watcher.add(ReplyFacts(score, length, row / length))


def _detokenizers(call: GenerateCall, tokenizer: PreTrainedTokenizerBase) -> list[Detokenizer]:
    """Return a detokenizer for each sequence of a call; in a decoder-only model it knows the sequence's prompt."""
    rows = call.prompts.tolist()
    continues = not call.model.config.is_encoder_decoder
    return [Detokenizer(cast("Tokenizer", tokenizer), row if continues else ()) for row in rows]


class _StopFlagged(StoppingCriteria):
    """A stopping criterion: it ends the sequences that a monitor in `names` has flagged in the text of `watch`."""

    def __init__(self, watch: Watch, names: Sequence[str]) -> None:
        self._watch, self._names = watch, names

    def __call__(self, input_ids: Tensor, scores: object, **_options: object) -> Any:  # noqa: ANN401, ARG002
        flags = self._watch.is_flagged(self._names)
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool) if flags is None else flags.to(input_ids.device)


class StopOnEvent(StoppingCriteria):
    """A stopping criterion that ends every sequence once an event is set.

    Args:
        event: The event.
        on_stop: Called without arguments when this criterion ends the sequences.
    """

    def __init__(self, event: Event, on_stop: Callable[[], None] | None = None) -> None:
        self._event, self._on_stop = event, on_stop

    def __call__(self, input_ids: Tensor, scores: object, **_options: object) -> Any:  # noqa: ANN401, ARG002
        """Return True for every sequence if the event is set, after calling `on_stop`; else False."""
        if (stops := self._event.is_set()) and self._on_stop is not None:
            self._on_stop()
        return torch.full((len(input_ids),), stops, device=input_ids.device)


def _check_call(call: GenerateCall) -> None:
    """Raise ConfigError for beam search and draft tokens: they read tokens that may not be in the final text."""
    if call.beams:
        problem = f"generate is called with num_beams={call.config.num_beams}"
        why = "only at its end is it known which beam wins, so no token is final while the text is written"
        raise ConfigError(f"bank.watch: {problem}; {why}. Use one beam, or bank.listen(over='output').")
    if call.assisted:
        problem = "generate is called with drafts, which are read before it is known whether they are accepted"
        raise ConfigError(f"bank.watch: {problem}. Leave them out, or use bank.listen(over='output').")


@contextmanager
def watch(
    bank: ReaderCollection,
    monitors: Collection[AnyMonitor | str] | Mapping[str, AnyMonitor] | AnyMonitor | str | None,
    over: str,
    *,
    stop: Collection[str] | None,
    on_token: Callable[[Step], None] | None = None,
    every: int = 1,
    drift: Mapping[str, DriftWatcher] | None = None,
) -> Iterator[Watch]:
    """Run monitors on the calls of `generate` inside the `with` block, and yield the `Watch` with their scores.

    `ReaderBank.watch` calls this and documents the arguments and errors.
    """
    op = "bank.watch"
    readers = bank.select(None, op)
    chosen = check_monitors(op, monitors, stored_monitors(readers), readers)
    check_range(op, "every", every, 1)
    check_known(op, [over], get_args(Watched), "over")
    stop = (stop,) if isinstance(stop, str) else stop
    check_known(op, [*(stop or ()), *(drift or ())], chosen, "monitor")
    if drift:
        _check_drift(chosen, over, list(drift))
    needed = {name: readers[name] for monitor in chosen.values() for name in monitor.readers}
    check_reads_stepwise(op, needed)
    # eval mode first: a pass looks at the mode of its readers when it is built
    with evaluating(bank, *([bank.model] if bank.train_base else [])):
        template = causal_pass(bank, op, needed)
        check_over(bank.model, [template], over)
        tokenizer = text_tokenizer(bank)
        options = {"every": every, "on_token": on_token, "tokenizer": tokenizer, "drift": drift or {}}
        new_text = partial(_WatchedText, template, chosen, **options)
        watching = Watch(new_text, tuple(chosen if stop is None else stop), tests_drift=bool(drift))
        with listening(bank, [template], cast("Watched", over), watching.begin):
            yield watching


def _check_drift(monitors: Mapping[str, AnyMonitor], over: str, names: Sequence[str]) -> None:
    """Raise ConfigError unless the drift of `monitors` can be tested: no cascade among `names`, no prompt in `over`."""
    if over != "output":
        problem = f"drift is tested on replies, and over='{over}' adds the prompt to them"
        raise ConfigError(f"bank.watch: {problem}. Use over='output', or leave out drift.")
    if cascades := [name for name in names if isinstance(monitors[name], Cascade)]:
        problem = f"'{cascades[0]}' is a cascade, which has no sketch to compare replies with"
        raise ConfigError(f"bank.watch: {problem}. Test the drift of a Monitor.")


def stream(
    bank: ReaderCollection,
    model: nn.Module,
    inputs: Prompts,
    new_watch: Callable[..., AbstractContextManager[Watch]],
    *,
    stop: bool,
    options: Inputs,
) -> Iterator[Step]:
    """Return an iterator over the steps of a generation, with the arguments and errors of `ReaderBank.stream`.

    `new_watch` is `bank.watch` with all its arguments but `on_token`. `stop`: whether the monitors may end a sequence.
    """
    model = unwrapped(model)
    if all(part is not model for part in bank.model.modules()):
        problem = f"got a {type(model).__name__} that is not the bank's model or a part of it"
        raise ConfigError(f"bank.stream: {problem}. Give bank.model.")
    if not hasattr(model, "generate"):
        raise ConfigError(f"bank.stream: a {type(model).__name__} writes no text. Give bank.model.")
    prompts, options = encode_prompts(bank, inputs), dict(options)
    if "stop_strings" in options:
        options = {"tokenizer": text_tokenizer(bank), **options}
    criteria = list(cast("Sequence[StoppingCriteria] | None", options.pop("stopping_criteria", None)) or ())

    def write(put: Callable[[Step], None], left: Event) -> None:
        with new_watch(on_token=put) as watching:
            ends = [*criteria, *([watching.stopping] if stop else ()), StopOnEvent(left, watching.discard)]
            cast("WritingModel", model).generate(**prompts, **options, stopping_criteria=ends)

    with new_watch() as watching:  # wrong arguments raise here, and not when the caller asks for the first step
        if stop:
            _ = watching.stopping  # raises ConfigError if a drift test is in use
    check_prompt_length(cast("PreTrainedModel", model), {**options, **prompts})
    return _in_thread(write, bank.device.type)


def _in_thread(write: Callable[[Callable[[Step], None], Event], None], device: str) -> Iterator[Step]:
    """Call `write` in another thread, when the first step is asked for, and yield the steps that it produces.

    `write` is called with a function to which it passes each step, and an event that is set once the caller has left.
    The thread inherits the caller's context variables, and the caller's autocast for devices of type `device`. An error
    in the thread is raised here. Closing the iterator ends the generation and waits for the thread.
    """
    queue: Queue[Step | BaseException | None] = Queue(maxsize=1)  # None: the end
    left, context = Event(), contextvars.copy_context()
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def put(item: Step | BaseException | None) -> None:
        # with a timeout: nobody empties the queue after the caller has left, so a plain `put` would block for ever
        waiting = True
        while waiting and not left.is_set():
            with suppress(Full):
                queue.put(item, timeout=0.1)
                waiting = False

    def run() -> None:
        try:
            with torch.autocast(device, precision, enabled=precision is not None):
                write(put, left)
        except BaseException as error:  # raised again in the caller's thread
            put(error)
        put(None)

    thread = Thread(target=context.run, args=(run,), name="lamina-stream", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        thread.join()
