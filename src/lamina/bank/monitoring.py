"""Monitors of a bank: store them, check which readers they can use, and compute their scores in one plain pass."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lamina.bank.listening import reads_generated_text
from lamina.bank.reader import MONITORS, Info, ReaderModule
from lamina.bank.stack_pass import Inputs, StackPass, attach, run_heads
from lamina.errors import ConfigError, NotFiniteError, check_known, convert_errors
from lamina.layers.causality import is_causal
from lamina.layers.hooks import StopForward, holds_cache, run_until_stopped
from lamina.layers.preserve import evaluating, uncompiled
from lamina.layers.types import special_ids
from lamina.monitors.cascade import AnyMonitor, Cascade, start_monitors
from lamina.monitors.monitor import Monitor

if TYPE_CHECKING:
    from lamina.bank.reader_collection import ReaderCollection
    from lamina.heads.base import AffineMap

Readers = Mapping[str, ReaderModule]
OnFeatures = Callable[[Mapping[str, Tensor]], None]
TokenMaps = Sequence[tuple[list[str], Tensor, Tensor]]  # readers, and the stacked weights and biases of their heads


# Storing monitors with their readers


class _HasInfo(Protocol):
    @property
    def info(self) -> Info: ...


def stored_monitors(readers: Mapping[str, _HasInfo]) -> dict[str, AnyMonitor]:
    """Return name -> monitor, for the monitors in the `info` of `readers`: reader name -> module or saved settings.

    Each monitor names the reader with which it is saved, even if another bank knows that reader by another name. Raises
    ConfigError if a monitor cannot be read, or two readers have monitors of one name.
    """
    monitors: dict[str, AnyMonitor] = {}
    for reader, module in readers.items():
        what = f"the monitors that are saved with reader '{reader}' cannot be read"
        with convert_errors(lambda reason, what=what: ConfigError(f"bank: {what} ({reason}). Calibrate them again.")):
            for name, fields in module.info.get(MONITORS, {}).items():
                if name in monitors:
                    raise ValueError(f"another reader has a monitor '{name}' too")
                # another bank that shares the reader may have stored the name that the reader has there
                if "first" in fields:
                    monitors[name] = Cascade.from_dict({**fields, "second": _of_reader(fields["second"], reader)})
                else:
                    monitors[name] = Monitor.from_dict(_of_reader(fields, reader))
    return monitors


def _of_reader(fields: Info, reader: str) -> Info:
    """Return the fields of a saved monitor with `reader` as the name of its reader, if they have one."""
    return {**fields, "reader": reader} if "reader" in fields else fields


def store_monitor(readers: Readers, monitor: AnyMonitor) -> None:
    """Store a monitor with its reader in `readers`, in place of one of the same name.

    If `check_monitors` raises an error, nothing is changed.
    """
    (name,) = check_monitors("bank.keep_monitor", [monitor], {}, readers)
    if any(name in reader.monitors for reader in readers.values()):
        drop_monitor(readers, name)
    reader = readers[monitor.reader]
    reader.info[MONITORS] = {**reader.monitors, name: monitor.to_dict()}


def drop_monitor(readers: Readers, name: str) -> None:
    """Remove the stored monitor `name` from the readers; raise UnknownNameError if no monitor has this name."""
    stored = [monitor for reader in readers.values() for monitor in reader.monitors]
    check_known("bank.drop_monitor", [name], stored, "monitor")
    for reader in readers.values():
        if name in reader.monitors:
            reader.drop_monitor(name)


# Checks


def check_monitors(
    op: str,
    chosen: Collection[AnyMonitor | str] | Mapping[str, AnyMonitor] | AnyMonitor | str | None,
    stored: Mapping[str, AnyMonitor],
    readers: Readers,
) -> dict[str, AnyMonitor]:
    """Check that each chosen monitor can score a text while it is generated, and return name -> monitor.

    Args:
        op: Operation that error messages begin with.
        chosen: One monitor or several, or names of stored ones. None: all stored ones. In a mapping, the values count,
            and a key whose value is None is the name of a stored monitor.
        stored: Name -> stored monitor.
        readers: Reader name -> module.

    Raises:
        UnknownNameError: If a monitor, a reader or a label does not exist.
        ConfigError: If there is no monitor; if two monitors have the same name; or if a monitor does not fit the head
            of its reader, or its reader fails `check_token_wise`.
    """
    if isinstance(chosen, Mapping):
        chosen = [monitor or name for name, monitor in chosen.items()]  # a dict of None is a set of names
    chosen = list(stored) if chosen is None else [chosen] if isinstance(chosen, str | Monitor | Cascade) else chosen
    check_known(op, [name for name in chosen if isinstance(name, str)], stored, "monitor")
    monitors: dict[str, AnyMonitor] = {}
    for choice in chosen:
        monitor = stored[choice] if isinstance(choice, str) else choice
        name = str(monitor.name)
        if name in monitors:
            raise ConfigError(f"{op}: two monitors are called '{name}'; their names must differ. Give one name=... .")
        check_known(op, monitor.readers, readers, "reader")
        monitor.check({reader: readers[reader].config.head for reader in monitor.readers})
        for reader in monitor.readers:
            check_token_wise(op, reader, readers[reader])
        monitors[name] = monitor
    if not monitors:
        raise ConfigError(f"{op}: there is no monitor. Give monitors=[lamina.Monitor(...)].")
    return monitors


def check_token_wise(op: str, name: str, reader: ReaderModule) -> None:
    """Raise ConfigError, about the operation `op`, if what a reader computes for a token depends on other tokens.

    The head may average over tokens. If it weighs them, its `token_map` must give the log weight as a last output, or
    ConfigError is raised too. `name` is the reader's name.
    """
    kinds = {"fusion": type(reader.config.fusion).__name__, "head": type(reader.config.head).__name__}
    for part, module in (("fusion", reader.fusion), ("head", reader.head)):
        if not module.is_token_wise():
            problem = f"reader '{name}' has a {part} ({kinds[part]}) that looks at other tokens, later ones too"
            raise ConfigError(
                f"{op}: {problem}, which do not exist yet while a text is written. Use a token-wise fusion, such as "
                "AdaLayers(positions=False) or ScalarMix(), with TokenClassification(encoder_layers=0) or "
                "SequenceClassification(pooling='mean') or pooling='query'."
            )
    if not reader.config.head.weighs_tokens:
        return
    token_map, columns = reader.head.token_map(), reader.head.outputs + 1
    if token_map is None or len(token_map.bias) != columns:
        head = f"the head of reader '{name}' ({kinds['head']})"
        problem = f"{head} weighs tokens, so its token_map gives {columns} outputs"
        got = "it is None" if token_map is None else f"it gives {len(token_map.bias)}"
        raise ConfigError(f"{op}: {problem}, the last one the log weight; {got}. See Head.token_map.")


def check_reads_stepwise(op: str, readers: Readers) -> None:
    """Raise ConfigError, about the operation `op`, if one of `readers` cannot read a text while the model writes it.

    That is so if its fusion reads inside the model's blocks. It can score whole texts; see `scores_of_monitors`.
    """
    for name, reader in readers.items():
        if reader.config.fusion.reads_inside:
            problem = f"reader '{name}' reads inside the model's blocks, which is not possible while the model writes"
            raise ConfigError(f"{op}: {problem}. Use a fusion of the layers' states, such as AdaLayers or ScalarMix.")


def causal_pass(bank: ReaderCollection, op: str, readers: Readers) -> StackPass:
    """Return a new `StackPass` of `readers` over the stack of the bank's model that reads the generated text.

    `op` is the operation that error messages begin with. Raises ConfigError if the frozen model has changed, or a
    reader reads a stack that does not read generated text, or whose states depend on later tokens.
    """
    passes = bank.passes(readers, grad=False)
    hint = "Use a causal language model with its head, loaded with head='causal_lm'"
    hint += "; from_pretrained(folder, model) puts a saved bank on it"
    for stack_pass in passes:
        stack, (first, *_) = stack_pass.stack, stack_pass.readers
        what = f"reader '{first}' reads the stack '{stack.name}'"
        if not reads_generated_text(stack_pass, bank.model):
            other = hint if stack.name == "main" else "Use a reader of the stack that does"
            raise ConfigError(f"{op}: {what}, which does not read the generated text. {other}.")
        if not is_causal(bank.model, stack):
            rule = "whose states of a token change with later tokens, which do not exist yet while a text is written"
            raise ConfigError(f"{op}: {what}, {rule}. {hint}.")
    return passes[0]


# Scores


def check_scores(op: str, monitors: Sequence[AnyMonitor], scores: Tensor, counts: Tensor) -> None:
    """Raise NotFiniteError if a monitor's score is NaN at a token that counts: it would never flag the text.

    `scores` has the scores of `monitors`, `[monitors, rows, tokens]`, on the CPU, and `counts`, `[rows, tokens]`, is
    True at the tokens that count. The error has the monitor's name and the row; `op` begins its message.
    """
    bad = scores.isnan() & counts
    if bool(bad.any()):
        number, row, _ = bad.nonzero()[0].tolist()
        monitor = monitors[number]
        name, readers = str(monitor.name), ", ".join(f"'{reader}'" for reader in dict.fromkeys(monitor.readers))
        what = f"monitor '{name}' of reader {readers} gives NaN for text {row} of the batch, counted from 0"
        rule = "a score is a finite number. Load the model in float32 or bfloat16, or train the reader again"
        raise NotFiniteError(f"{op}: {what}; {rule}.", name=name, row=row)


@torch.no_grad()
def scores_of_monitors(
    bank: ReaderCollection,
    monitors: Sequence[AnyMonitor],
    batch: Inputs,
    mask: Tensor | None,
    *,
    finished: bool = False,
    on_features: OnFeatures | None = None,
) -> dict[str, Tensor]:
    """Return monitor name -> scores as `ReaderBank.monitor_scores` returns them, from one pass over one stack.

    Args:
        bank: The bank.
        monitors: The monitors; their readers read the same stack.
        batch: Keyword arguments for the model.
        mask: True at the tokens to score. None: all tokens except special ones. Padding is never scored.
        finished: Whether the texts are complete, so that models whose states change with later tokens are allowed too.
            In such a model, each score depends on the whole text.
        on_features: Called once with a dict, reader name -> features `[batch, tokens, dim]`. None: not called.

    Raises:
        LaminaError: The errors of `ReaderBank.monitor_scores`. A NotFiniteError for a score has the row of the batch.
    """
    op = "bank.monitor_scores"
    named = check_monitors(op, monitors, {}, bank.select(None, op))
    readers = bank.select([reader for monitor in monitors for reader in monitor.readers], op)
    stop = None if holds_cache(batch) else StopForward()
    with evaluating(bank, *([bank.model] if bank.train_base else [])):
        if finished:
            (stack_pass,) = bank.passes(readers, grad=False)
        else:
            stack_pass = causal_pass(bank, op, readers)
        with attach([stack_pass], batch, stop), uncompiled(), bank.eval_pass():
            run_until_stopped(bank.model, batch, stop)
            logits = token_logits(stack_pass, on_features)
    real = torch.ones(next(iter(logits.values())).shape[:2], dtype=torch.bool)
    if mask is not None and mask.shape != real.shape:
        problem = f"the mask is {list(mask.shape)} for texts of {list(real.shape)}"
        raise ConfigError(f"{op}: {problem}; it must be [batch, tokens], like the texts.")
    if mask is None and stack_pass.ids is not None and stack_pass.ids.shape == real.shape:
        mask = ~torch.isin(stack_pass.ids.cpu(), special_ids(bank.processor))
    for part in (stack_pass.mask, mask):
        real = real if part is None else real & part.cpu().bool()
    heads = {name: reader.config.head for name, reader in readers.items()}
    scores: dict[str, Tensor] = {}
    for names, running in start_monitors(named, heads):
        values = running.add(lambda name, rows: logits[name][rows], real)
        check_scores(op, [named[name] for name in names], values, real)
        scores |= dict(zip(names, values, strict=True))
    return scores


@torch.no_grad()
def read_tokens(
    template: StackPass,
    names: Sequence[str],
    states: Mapping[int, Tensor],
    on_features: OnFeatures | None = None,
) -> dict[str, Tensor]:
    """Run token-wise readers on recorded states; return reader name -> logits in the form of `token_logits`.

    Args:
        template: A pass over the stack that has these readers.
        names: The readers to run.
        states: Layer -> states `[rows, tokens, width]`.
        on_features: Called with reader name -> features `[rows, tokens, dim]`. None: not called.
    """
    stack_pass = template.restart({name: template.readers[name] for name in names})
    for layer in stack_pass.layers:
        stack_pass.on_state(layer, states[layer])
    return token_logits(stack_pass, on_features)


@torch.no_grad()
def reader_seconds(bank: ReaderCollection, names: Sequence[str], *, repeats: int = 40) -> dict[str, float]:
    """Measure how long each reader in `names` takes for one generated token; return reader name -> seconds.

    The model is not run: readers read zeros. The result is the median of `repeats` runs, in which the readers take
    turns. Raises UnknownNameError for an unknown reader, and ConfigError as `causal_pass` does.
    """
    times: dict[str, list[float]] = {name: [] for name in names}
    with evaluating(bank):
        op = "bank.monitor_scores"
        template = causal_pass(bank, op, bank.select(names, op))
        weights = bank.model.parameters()
        like = next((weight for weight in weights if weight.is_floating_point()), torch.zeros(()))
        device = "cpu" if like.is_meta else like.device
        state = torch.zeros(1, 1, template.stack.width, dtype=like.dtype, device=device)
        for repeat in range(repeats + 2):
            for name in names:
                start = time.perf_counter()
                read_tokens(template, [name], dict.fromkeys(template.layers, state))
                if repeat > 1:  # the first runs are slower
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) for name, own in times.items()}


def token_logits(
    stack_pass: StackPass, on_features: OnFeatures | None = None, maps: TokenMaps | None = None
) -> dict[str, Tensor]:
    """Return reader name -> logits of each token by itself, `[rows, tokens, classes]`, in float32 on the CPU.

    If the head weighs tokens, a last column holds the logarithm of the token's weight.

    Args:
        stack_pass: A pass that has received all its states; its readers must be token-wise.
        on_features: Called with reader name -> features `[rows, tokens, dim]`, on the model's device. None: not called.
        maps: The result of `token_maps` for these readers, if the caller has stored it. None: it is computed.
    """
    features = stack_pass.features()
    if on_features is not None:
        on_features(features)
    logits: dict[str, Tensor] = {}
    for names, weights, biases in token_maps(stack_pass.readers) if maps is None else maps:
        stacked = torch.stack([features[name] for name in names])  # [readers, rows, tokens, dim]
        mapped = torch.baddbmm(biases, stacked.flatten(1, 2), weights)
        logits |= zip(names, mapped.unflatten(1, stacked.shape[1:3]), strict=True)
    if rest := {name: part for name, part in features.items() if name not in logits}:
        rows, count = next(iter(rest.values())).shape[:2]
        # every token becomes a text of its own, [rows * tokens, 1, dim]: a head that pools then returns its own logits
        single = [part.flatten(0, 1).unsqueeze(1) for part in rest.values()]
        mask = torch.ones(rows * count, 1, dtype=torch.bool, device=single[0].device)
        outputs = run_heads(stack_pass.readers, [([*rest], single)], mask, {}, grad=False, together=True)
        logits |= {name: part.reshape(rows, count, -1) for name, part in outputs.items()}
    columns = [logits[name].float() for name in features]
    # one copy to the CPU for all readers: each copy waits for the GPU
    parts = torch.cat(columns, dim=-1).cpu().split([part.shape[-1] for part in columns], dim=-1)
    return dict(zip(features, parts, strict=True))


def token_maps(readers: Readers) -> TokenMaps:
    """Return groups of readers whose heads are one linear map per token, so that a group can be computed at once.

    Each group has the readers' names, their stacked weights `[readers, dim, outputs]` and their biases `[readers, 1,
    outputs]`. Readers whose head has no `token_map` are left out.
    """
    groups: dict[object, dict[str, AffineMap]] = defaultdict(dict)
    for name, reader in readers.items():
        if (token_map := reader.head.token_map()) is not None:
            weight = token_map.weight
            groups[weight.shape, weight.dtype, weight.device][name] = token_map
    return [
        (
            list(maps),
            torch.stack([token_map.weight.mT for token_map in maps.values()]),
            torch.stack([token_map.bias.unsqueeze(0) for token_map in maps.values()]),
        )
        for maps in groups.values()
    ]
