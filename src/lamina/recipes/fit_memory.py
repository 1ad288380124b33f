"""Choose batch sizes that fit a GPU's memory; gradients are accumulated, so a step keeps its number of rows."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from pydantic import PositiveInt, TypeAdapter
from torch import distributed

from lamina.errors import ConfigError, convert_errors
from lamina.recipes.model_size import Sizes, shared_passes, sized_runs, training_weights, weight_memory
from lamina.store import load_config
from lamina.store.files import damaged, read_json, write_json
from lamina.train.bank_runner import free_bytes
from lamina.train.engine import join_processes
from lamina.train.memory import BatchBytes, RowShape
from lamina.utils import is_file, world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from lamina.recipes.model_size import SizedRun
    from lamina.recipes.schema import Recipe
    from lamina.tasks.base import TaskOutline
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

GIB = 1 << 30
BATCHES = "batches.json"  # in an output folder: the batches of its runs
Batches: TypeAlias = tuple[PositiveInt, PositiveInt]  # rows of a batch, and number of batches per step
USED = 0.9  # share of the memory that is planned for; the rest is for buffers of the libraries
LONGEST = 4  # the longest text of a task is taken to be so many times as long as its average text


@dataclass(frozen=True)
class FittedBatch:
    """The batch size of the runs of a task and method, before and after `fit_batches` fitted it to a GPU's memory.

    Attributes:
        task: The task; `method` names the method, or several whose readers share passes, joined by ", ".
        tokens: Tokens of a row.
        weight_bytes: Weights, gradients and moments.
        row_bytes: What a row keeps for the gradients, in float32.
        asked: The batches in the recipe.
        fitted: Batches that fit.
        runs: Names of the runs.
    """

    task: str
    method: str
    tokens: int
    weight_bytes: int
    row_bytes: int
    asked: Batches
    fitted: Batches
    runs: tuple[str, ...]


def fit_batches(
    recipe: Recipe, planned: Sequence[SizedRun], tasks: Mapping[str, Sequence[Task]], memory_bytes: int
) -> list[FittedBatch]:
    """Return the largest batches that fit a GPU, for each task and method. Rows per optimizer step stay as they are.

    `planned` are all runs, and `tasks` has the copies of those tasks whose data was read. Raises ConfigError if not
    even one row fits; the message says how much it needs. `memory_bytes` is the memory of each GPU.
    """
    return [_fitted(group, memory_bytes) for group in _groups(recipe, planned, tasks)]


@dataclass(frozen=True)
class _Group:
    """Runs that get the same batch, and the memory that they need.

    Attributes:
        runs: The runs.
        tokens: Tokens of a row.
        weight_bytes: Weights, gradients and moments.
        batch: What a batch needs.
    """

    runs: Sequence[SizedRun]
    tokens: int
    weight_bytes: int
    batch: BatchBytes


def _groups(recipe: Recipe, planned: Sequence[SizedRun], tasks: Mapping[str, Sequence[Task]]) -> Iterator[_Group]:
    """Yield groups of runs: the runs of one task and method, or the runs whose readers share passes.

    The memory of a group is that of its largest run. `planned` are all runs, and `tasks` is task name -> copies of the
    task, if its data was read.
    """
    if not recipe.methods:
        for shared in shared_passes(planned, tasks):
            if shared.part == "train":
                together = shared.runs if recipe.separately else planned
                yield _reader_group(recipe, shared.runs, weight_memory(recipe, list(together)))
        return
    by_method: dict[tuple[str, str, int, int], list[SizedRun]] = {}
    for run in planned:
        key = (run.spec.task, str(run.spec.settings["method"]), run.options.step_size, _longest(run))
        by_method.setdefault(key, []).append(run)
    for (*_, tokens), runs in by_method.items():
        largest = max(runs, key=lambda run: (run.edits.deep, run.added))
        batch = largest.model.activations(largest.spec.edits, RowShape(tokens, largest.target, largest.task.image_size))
        yield _Group(runs, tokens, max(map(training_weights, runs)), batch)


def _reader_group(recipe: Recipe, runs: Sequence[SizedRun], weight_bytes: int) -> _Group:
    """Return the group of readers (`runs`) that share passes, with the base model's memory if that is trained too.

    `weight_bytes` is the memory of the weights of the whole bank, which also has the readers of other tasks.
    """
    first, tokens = runs[0], max(map(_longest, runs))
    batch = first.model.kept([run.reader for run in runs if run.reader is not None], tokens)
    if recipe.train_base:
        base = first.model.activations((), RowShape(tokens))
        batch = BatchBytes(batch.fixed + base.fixed, batch.row + base.row)
    return _Group(runs, tokens, weight_bytes, batch)


def _longest(run: SizedRun) -> int:
    """Return the tokens of a run's longest row: the option `max_length` if it is set, otherwise an estimate.

    The estimate is the average times 4 (`LONGEST`), rounded up to a power of two, but no more than the model reads.
    Images and audio have a known size, which is returned instead.
    """
    most = run.max_length
    if run.task.kind.processor != "tokenizer":
        return math.ceil(run.tokens)  # images and audio, whose sizes are known
    if run.options.max_length is not None:
        return most
    return min(most, 2 ** math.ceil(math.log2(LONGEST * run.tokens)))


def _fitted(group: _Group, memory_bytes: int) -> FittedBatch:
    """Return the batch of a group that fits into a GPU's memory: the recipe's own batch if that fits.

    Raises ConfigError if not even one row fits.
    """
    first = group.runs[0]
    options, free = first.options, int(memory_bytes * USED) - group.weight_bytes
    methods = ", ".join(dict.fromkeys(str(run.spec.settings["method"]) for run in group.runs))
    if group.batch.max_rows(free) < 1:
        needed = f"{group.weight_bytes / GIB:.1f} GiB for weights, gradients and moments"
        row = f"{group.batch.total(1) / GIB:.2f} GiB for a row of {group.tokens} tokens"
        raise ConfigError(
            f"fit-memory: task {first.spec.task}, {methods}: a run needs {needed} and {row}; {USED:.0%} of "
            f"{memory_bytes / GIB:.1f} GiB may be used. No batch fits. Use a smaller max_length or a larger GPU, or "
            "train less of the model."
        )
    asked = (options.batch_size, options.gradient_accumulation_steps)
    count = group.batch.accumulation_steps(options.step_size, free * world_size()) or options.step_size
    fitted = asked if asked[1] >= count else (options.step_size // count, count)
    return FittedBatch(
        task=first.spec.task,
        method=methods,
        tokens=group.tokens,
        weight_bytes=group.weight_bytes,
        row_bytes=group.batch.row,
        asked=asked,
        fitted=fitted,
        runs=tuple(run.spec.name for run in group.runs),
    )


def fitted_batches(
    recipe: Recipe,
    specs: Mapping[str, RunSpec],
    outlines: Mapping[str, TaskOutline],
    memory_bytes: int,
    folder: Path | None = None,
) -> dict[str, Batches]:
    """Return run name -> batch size and batches per step that fit a GPU; the rows of an optimizer step stay the same.

    `specs` is run name -> run, and `outlines` is task name -> its number of rows and tokens. A resumed run gets the
    batches that are saved in its output `folder`, because the free memory may have changed since it began. Readers that
    are trained together get the smallest batch of them. All processes must call this. Raises ConfigError if not even
    one row fits, and StoreError if the batches of the output folder are unreadable. Other errors are those of
    `load_config`.
    """
    join_processes()  # `fit_batches` divides rows among all processes, which must have met for that
    known = {} if folder is None else _read_batches(folder)
    batches = {name: known[name] for name, spec in specs.items() if spec.options.get("resume") and name in known}
    left = {name: spec for name, spec in specs.items() if name not in batches}
    if not left:
        return batches
    sizes = Sizes(load_config(recipe.model, revision=recipe.revision))
    for batch in fit_batches(recipe, sized_runs(recipe, left, outlines, sizes), {}, memory_bytes):
        batches |= dict.fromkeys(batch.runs, batch.fitted)
    if not recipe.methods and not recipe.separately:  # readers that share a run share its batches
        batches = dict.fromkeys(batches, min(batches.values()))
    return batches


def save_batches(folder: Path, batches: Mapping[str, Batches], *, resume: bool) -> None:
    """Write the batches of runs into their output folder, where `fitted_batches` reads them when a run is resumed.

    Without `resume`, batches of earlier runs in the folder are forgotten. Raises StoreError if the folder cannot be
    written, or has a damaged file of batches.
    """
    known = _read_batches(folder) if resume else {}
    write_json(folder / BATCHES, {name: list(pair) for name, pair in {**known, **batches}.items()})


def _read_batches(folder: Path) -> dict[str, Batches]:
    """Return run name -> batches saved in an output folder, {} if none; raise StoreError if the file is damaged."""
    if not is_file(path := folder / BATCHES):
        return {}
    with convert_errors(lambda reason: damaged(path, f"does not hold batches ({reason})")):
        return _ADAPTER.validate_python(read_json(path))


_ADAPTER: TypeAdapter[dict[str, Batches]] = TypeAdapter(dict[str, Batches])


def free_memory() -> int:
    """Return the bytes that one process of this run may use: of its GPU's memory or, without a GPU, of the RAM.

    Under `torchrun` all processes must call this; all of them get the smallest number of any process.
    """
    join_processes()  # gives each process its own GPU
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = free_bytes(device)
    if world_size() == 1:
        return free
    if device.type == "cpu":  # the processes of a machine share its RAM
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    least = torch.tensor(free, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return int(least)
