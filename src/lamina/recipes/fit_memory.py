"""Choose batch sizes that fit a GPU's memory; gradients are accumulated, so a step keeps its number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lamina.errors import ConfigError
from lamina.recipes.model_size import Sizes
from lamina.recipes.sized_runs import SizedRun, shared_passes, training_weights, weight_memory
from lamina.train.memory import BatchBytes, RowShape
from lamina.utils import world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lamina.recipes.schema import Recipe
    from lamina.tasks.base import TaskOutline
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

GIB = 1 << 30
USED = 0.9  # share of the memory that is planned for; the rest is for buffers of the libraries
LONGEST = 4  # the longest text of a task is taken to be so many times as long as its average text


@dataclass(frozen=True)
class FittedBatch:
    """The batch of one task's and method's runs, before and after it was fitted to a GPU's memory."""

    task: str
    method: str  # several methods whose readers share passes are joined by ", "
    tokens: int  # tokens of a row
    weight_bytes: int  # weights, gradients and moments
    row_bytes: int  # what a row keeps for the gradients, in float32
    asked: tuple[int, int]  # rows of a batch, and number of batches per step, in the recipe
    fitted: tuple[int, int]  # the same, so that a batch fits
    runs: tuple[str, ...]  # names of the runs


def fit_batches(
    recipe: Recipe, planned: Sequence[SizedRun], tasks: Mapping[str, Sequence[Task]], memory_bytes: int
) -> list[FittedBatch]:
    """Return the largest batches that fit a GPU, with as many rows per optimizer step as the recipe says.

    Args:
        recipe: The recipe.
        planned: All of its runs.
        tasks: Task name -> copies of the task, for the tasks whose data was read.
        memory_bytes: Memory of each GPU.

    Raises:
        ConfigError: If not even one row fits; the message says how much it needs.
    """
    return [_fitted(group, memory_bytes) for group in _groups(recipe, planned, tasks)]


@dataclass(frozen=True)
class _Group:
    """Runs that get the same batch, and the parts of the memory that they need."""

    runs: Sequence[SizedRun]
    tokens: int
    weight_bytes: int
    batch: BatchBytes


def _groups(recipe: Recipe, planned: Sequence[SizedRun], tasks: Mapping[str, Sequence[Task]]) -> Iterator[_Group]:
    """Yield groups of runs: the runs of one task and method, or the runs whose readers share passes.

    The memory of a group is that of its largest run.
    """
    if not recipe.methods:
        for shared in shared_passes(planned, tasks):
            if shared.part == "train":
                yield _reader_group(recipe, shared.runs)
        return
    by_method: dict[tuple[str, str, int], list[SizedRun]] = {}
    for run in planned:
        key = (run.spec.task, str(run.spec.settings["method"]), run.options.step_size)
        by_method.setdefault(key, []).append(run)
    for runs in by_method.values():
        largest = max(runs, key=lambda run: (run.edits.deep, run.added))
        tokens = _longest(largest)
        batch = largest.model.activations(largest.spec.edits, RowShape(tokens, largest.target, largest.task.image_size))
        yield _Group(runs, tokens, training_weights(largest), batch)


def _reader_group(recipe: Recipe, runs: Sequence[SizedRun]) -> _Group:
    """Return the group of readers that share passes. If the base model is trained too, its own memory is included."""
    first, tokens = runs[0], max(map(_longest, runs))
    batch = first.model.kept([run.reader for run in runs if run.reader is not None], tokens)
    if recipe.train_base:
        base = first.model.activations((), RowShape(tokens))
        batch = BatchBytes(batch.fixed + base.fixed, batch.row + base.row)
    return _Group(runs, tokens, weight_memory(recipe, list(runs)), batch)


def _longest(run: SizedRun) -> int:
    """Return the tokens of a run's longest row: `max_length`, or `LONGEST` times the average, as a power of two."""
    most = run.max_length
    if run.task.kind.processor != "tokenizer":
        return math.ceil(run.tokens)  # images and sound, whose sizes are known
    if run.options.max_length is not None:
        return most
    return min(most, 2 ** math.ceil(math.log2(LONGEST * run.tokens)))


def _fitted(group: _Group, memory_bytes: int) -> FittedBatch:
    """Return the batch of a group that fits; ConfigError if none does."""
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


def with_fitted_batches(
    recipe: Recipe,
    specs: Mapping[str, RunSpec],
    outlines: Mapping[str, TaskOutline],
    sizes: Sizes,
    memory_bytes: int,
) -> dict[str, RunSpec]:
    """Return the runs of a recipe with batches that fit; the rows of an optimizer step stay the same.

    Args:
        recipe: The recipe.
        specs: All of its runs by name.
        outlines: Task name -> its number of rows and tokens.
        sizes: Sizes of the recipe's model.
        memory_bytes: Memory of each GPU.

    Raises:
        ConfigError: If not even one row fits.
    """
    planned = [SizedRun(recipe, spec, outlines[spec.task], sizes) for spec in specs.values()]
    fitted = dict(specs)
    for batch in fit_batches(recipe, planned, {}, memory_bytes):
        size, steps = batch.fitted
        changes = {"batch_size": size, "gradient_accumulation_steps": steps}
        fitted |= {name: replace(specs[name], options={**specs[name].options, **changes}) for name in batch.runs}
    if not recipe.methods and not recipe.separately:  # readers that share a run share its batches
        smallest = min(fitted.values(), key=lambda spec: spec.options["batch_size"]).options
        changes = {key: smallest[key] for key in ("batch_size", "gradient_accumulation_steps")}
        fitted = {name: replace(spec, options={**spec.options, **changes}) for name, spec in fitted.items()}
    return fitted
