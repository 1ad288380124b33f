"""Estimate what a recipe would train and cost, without weights or data, and choose batches that fit a GPU's memory."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from pydantic import PositiveInt, TypeAdapter

from lamina.errors import ConfigError, ModelNotFoundError, convert_errors
from lamina.recipes.edits import config_of
from lamina.recipes.expand import expand_recipe, grid_of
from lamina.recipes.model_size import (
    Sizes,
    parts,
    reader_batch,
    shared_passes,
    sized_runs,
    training_weights,
    weight_memory,
)
from lamina.recipes.preflight import check_model, check_output, check_packages, load_outlines
from lamina.store import load_config
from lamina.store.files import damaged, read_json, write_json
from lamina.train.bank_runner import free_bytes
from lamina.train.engine import check_device, join_processes
from lamina.train.memory import BatchBytes, RowShape
from lamina.utils import check_type, is_file, least_of_all, local_world_size, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PretrainedConfig

    from lamina.recipes.model_size import SharedPass, SizedRun
    from lamina.recipes.report_file import TableRow
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
        tokens: Tokens of the longest row, which may be an estimate.
        weight_bytes: Weights, gradients and moments.
        row_bytes: What a row keeps for the gradients, in float32.
        asked: Rows of a batch over all processes, and batches per step, in the recipe.
        fitted: The same numbers for batches that fit.
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
    """Return batches that fit a GPU, for each task and method: those of the recipe, or the largest that fit.

    Readers that share passes have one entry, for all of them together. Runs of a method whose rows per step or longest
    rows differ have separate entries. Rows per optimizer step stay as they are. `planned` are all runs, and `tasks` has
    the copies of those tasks whose data was read. `memory_bytes` is the memory of each GPU; 90 % of it may be used.
    Raises ConfigError if not even one row fits.
    """
    batches: list[FittedBatch] = []
    if not recipe.methods:
        for shared in (shared for shared in shared_passes(planned, tasks) if shared.part == "train"):
            weights = weight_memory(recipe, list(shared.runs if recipe.separately else planned))
            batches.append(_fitted(shared.runs, weights, _batch_of_readers(recipe, shared.runs), memory_bytes))
        return batches
    by_method: dict[tuple[str, str, int, int], list[SizedRun]] = {}
    for run in planned:
        key = (run.spec.task, str(run.spec.settings["method"]), run.options.step_size, _longest(run))
        by_method.setdefault(key, []).append(run)
    for (*_, tokens), runs in by_method.items():
        largest = max(runs, key=lambda run: (run.edits.deep, run.added))
        batch = largest.model.activations(largest.spec.edits, RowShape(tokens, largest.target, largest.task.image_size))
        batches.append(_fitted(runs, max(map(training_weights, runs)), batch, memory_bytes))
    return batches


def _batch_of_readers(recipe: Recipe, runs: Sequence[SizedRun]) -> BatchBytes:
    """Return the memory of a batch for readers that share passes; that of the base model counts if it is trained."""
    first, tokens = runs[0], max(map(_longest, runs))
    batch = first.model.kept([run.reader for run in runs if run.reader is not None], tokens)
    if not recipe.train_base:
        return batch
    base = first.model.activations((), RowShape(tokens, image_size=first.task.image_size))
    return batch.plus(base)


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


def _fitted(runs: Sequence[SizedRun], weight_bytes: int, batch: BatchBytes, memory_bytes: int) -> FittedBatch:
    """Return the batch of runs that fits into a GPU's memory: the recipe's own batch if that fits.

    Otherwise it is the largest that keeps the rows of an optimizer step. `weight_bytes` are the weights, gradients and
    moments, and `batch` is what a batch needs besides. Raises ConfigError if not even one row fits.
    """
    first, tokens = runs[0], max(map(_longest, runs))
    options, free = first.options, int(memory_bytes * USED) - weight_bytes
    methods = ", ".join(dict.fromkeys(str(run.spec.settings["method"]) for run in runs))
    if batch.max_rows(free) < 1:
        needed = f"{weight_bytes / GIB:.1f} GiB for weights, gradients and moments"
        row = f"{batch.total(1) / GIB:.2f} GiB for a row of {tokens} tokens"
        raise ConfigError(
            f"fit-memory: task {first.spec.task}, {methods}: a run needs {needed} and {row}; {USED:.0%} of "
            f"{memory_bytes / GIB:.1f} GiB may be used. No batch fits. Use a smaller max_length or a larger GPU, or "
            "train less of the model."
        )
    asked = (options.batch_size, options.gradient_accumulation_steps)
    count = batch.accumulation_steps(options.step_size, free * world_size()) or options.step_size
    fitted = asked if asked[1] >= count else (options.step_size // count, count)
    return FittedBatch(
        task=first.spec.task,
        method=methods,
        tokens=tokens,
        weight_bytes=weight_bytes,
        row_bytes=batch.row,
        asked=asked,
        fitted=fitted,
        runs=tuple(run.spec.name for run in runs),
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
    batches that are saved in its output `folder`, if there are any. Readers that are trained together get the smallest
    batch of them. All processes must call this. Raises ConfigError if not even one row fits, StoreError if the batches
    of the output folder are unreadable, and LaminaError if the model's config cannot be loaded, or a reader or an edit
    does not fit the model.
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
    """Write run name -> `Batches` into the runs' output folder, where `fitted_batches` reads them to resume a run.

    With `resume`, entries of other runs in the file stay; otherwise they are removed. Raises StoreError if the folder
    cannot be written or, with `resume`, the file is damaged.
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
    if device.type == "cpu":  # the processes of a machine share its RAM
        free //= local_world_size()
    return least_of_all(free, device)


MOST_READERS = 2000  # readers of an estimate, each of which takes about 10 ms
# Where the config of the model came from: `Estimate.model["config"]`.
OWN, GIVEN = "its own", "that of the recipe, since the hub cannot be reached"


@dataclass(frozen=True)
class Estimate:
    """The estimate of a recipe. It assumes no early stopping, so all numbers are upper limits.

    A forward pass counts as 2 x parameters x tokens operations, and a pass with gradients as three times as many.
    Not counted are embeddings and, in attention, the products of queries with keys and of the weights with values.

    Attributes:
        model: "name", "parameters", whether it is "trained", and where its "config" came from.
        runs: One row per task, method and setting. "count" is the number of its runs, and "flops" the sum over them;
            other numbers are those of one run.
        tasks: One row per task, with its rows, tokens and steps; tasks that share passes share steps.
        steps: Optimizer steps of all tasks, each shared one counted once.
        flops: Operations: "base" (of the base model, which readers share), "runs" and "total".
        memory_bytes: Most weights, gradients and moments of the optimizer held at a time, in single precision.
        kept_bytes: What readers store for the gradients of the costliest batch. Its rows have `max_length` tokens or,
            if that is not set, the average number.
        kept_rows: Number of rows of that batch; 0 if the recipe has methods, for which this is not estimated.
        parts: What each task and method costs, as `model_size.parts` returns it.
        batches: One dict per `FittedBatch`, with its fields; empty if no GPU memory is given.
        cache_bytes: All hidden states that readers need, in half precision; 0 if the model is trained.
        notes: Assumptions that were made.
    """

    model: TableRow
    runs: list[TableRow]
    tasks: list[TableRow]
    steps: int
    flops: dict[str, int]
    memory_bytes: int
    kept_bytes: int
    kept_rows: int
    parts: list[TableRow]
    batches: list[TableRow]
    cache_bytes: int
    notes: list[str]


def estimate(
    recipe: Recipe,
    *,
    data: str | Path | None = None,
    output: str | Path | None = None,
    memory_bytes: int | None = None,
    **options: object,
) -> Estimate:
    """Return an estimate of the runs, steps, operations and memory of a recipe, without training or writing anything.

    Args:
        recipe: The recipe, from `load_recipe`.
        data: Folder of the data, as for `run_recipe`. None: presets are not read; their published sizes are used.
        output: The output folder that the training would write to, which is checked. None: no folder.
        memory_bytes: Memory of each GPU. Batch sizes that fit are then proposed; other numbers of the estimate stay the
            same. None: no proposals.
        **options: Options of `lamina.fit`, as for `run_recipe`.

    Raises:
        ConfigError: If the recipe has more than 2,000 readers that differ in more than their seed, or not even one row
            fits `memory_bytes`.
        LaminaError: Any error that `run_recipe` raises before training, as far as it can be found without weights.
    """
    check_type("estimate", "recipe", recipe, "Recipe")
    outlines, tasks = load_outlines(recipe, data)
    specs = expand_recipe(recipe, options, outlines)
    readers = {replace(spec.reader, seed=0) for spec in specs.values() if spec.reader is not None}
    if len(readers) > MOST_READERS:
        rule = f"a dry run builds each of them, and takes at most {MOST_READERS:,}"
        got = f"the recipe has {len(readers):,} readers besides seeds"
        raise ConfigError(f"estimate: {got}; {rule}. Give fewer values, or train without a dry run.")
    config, source = _load_config(recipe)
    notes = [] if data is not None else ["rows and lengths are as published; --data counts those of local files"]
    if source != OWN:
        notes.append(f"the config of {recipe.model} is {source}")
    sizes = Sizes(config)
    planned = sized_runs(recipe, specs, outlines, sizes)
    folder = None if output is None else Path(output)
    check_packages(recipe, specs)
    check_output(recipe, specs, folder)
    if source == OWN:  # without the model's files, the recipe will be run on another machine
        for run in planned:
            check_device(run.options, folder)
        check_model(recipe, specs, {run.spec.name: run.model.model for run in planned}, tasks)
    passes = [] if recipe.methods else shared_passes(planned, tasks)
    base, runs = sum(shared.flops for shared in passes), sum(run.flops for run in planned)
    trained_passes = [shared for shared in passes if shared.part == "train"]
    kept_bytes, kept_rows = max((reader_batch(shared.runs) for shared in trained_passes), default=(0, 0))
    trained, parameters = recipe.train_base or bool(recipe.methods), planned[0].model.parameters
    return Estimate(
        model={"name": recipe.model, "parameters": parameters, "trained": trained, "config": source},
        runs=_rows(planned),
        tasks=[_task_row(name, [run for run in planned if run.spec.task == name], passes) for name in outlines],
        steps=sum(shared.steps for shared in trained_passes) or sum(run.steps for run in planned),
        flops={"base": base, "runs": runs, "total": base + runs},
        memory_bytes=weight_memory(recipe, planned),
        kept_bytes=kept_bytes,
        kept_rows=kept_rows,
        parts=parts(planned, passes),
        batches=[] if memory_bytes is None else list(map(asdict, fit_batches(recipe, planned, tasks, memory_bytes))),
        cache_bytes=0 if recipe.train_base else sum(shared.cache_bytes for shared in passes),
        notes=notes,
    )


def _load_config(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """Return a model's config and its origin: OWN (found with the recipe's model) or GIVEN (written in the recipe).

    The recipe's `architecture` is used only if the model is not found (the hub cannot be reached, for example). Raises
    ModelNotFoundError if the model is not found and the recipe has no `architecture`. Other errors are those of
    `load_config` and `config_of`.
    """
    try:
        return load_config(recipe.model, revision=recipe.revision), OWN
    except ModelNotFoundError as error:
        if recipe.architecture is None:
            error.add_note("a recipe may carry its model's config as 'architecture', for estimates")
            raise
        return config_of(recipe.architecture), GIVEN


def _rows(planned: Iterable[SizedRun]) -> list[TableRow]:
    """Return the rows of `Estimate.runs`: one per task, method and setting of the runs in `planned`.

    The sizes in a row are those of one run; "flops" is the sum over its runs.
    """
    rows: dict[str, TableRow] = {}
    for run in planned:
        shared = {"task": run.spec.task, "method": run.spec.settings["method"], "settings": grid_of(run.spec)}
        sizes = {key: getattr(run, key) for key in ("epochs", "steps", "parameters", "added", "trained")}
        row = rows.setdefault(json.dumps(list(shared.values())), {**shared, "count": 0, **sizes, "flops": 0})
        row["count"] += 1
        row["flops"] += run.flops
    return list(rows.values())


def _task_row(name: str, runs: list[SizedRun], passes: Iterable[SharedPass]) -> TableRow:
    """Return one task's row in `Estimate.tasks`.

    `runs` are all runs of the task; rows and tokens are those of the first. `passes` are the passes that readers share,
    if any; whole models share none.
    """
    first = runs[0]
    trained = [shared for shared in passes if shared.part == "train"]
    shared_steps = [shared.steps for shared in trained if any(run.spec.task == name for run in shared.runs)]
    return {
        "task": name,
        "kind": first.task.kind.name,
        "rows": first.rows["train"],
        "validation": first.rows["validation"],
        "tokens": first.tokens,
        "target": first.target,
        "repeats": 1 + max(run.spec.repeat for run in runs),
        "runs": len(runs),
        "steps_per_epoch": first.steps_per_epoch,
        "steps": sum(shared_steps if first.reader else (run.steps for run in runs)),
    }


def readable(count: float) -> str:
    """Return a number as text with three significant digits and a unit prefix, such as "1.23 G"."""
    power = 0 if count < 1000 else min(int(math.log10(count) / 3 + 1e-9), 8)
    power += power < 8 and count / 1000**power >= 999.5  # would be rounded to 1000 of the smaller unit
    return f"{count / 1000**power:.3g} {' kMGTPEZY'[power]}".strip()
