"""Estimate what a recipe would train and cost, using models without weights and downloading no data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, ModelNotFoundError
from lamina.recipes.edits import config_of
from lamina.recipes.expand import expand_recipe, grid_of
from lamina.recipes.fit_memory import fit_batches
from lamina.recipes.model_size import Sizes, parts, reader_batch, shared_passes, sized_runs, weight_memory
from lamina.recipes.preflight import check_machine, check_model, check_output, load_outlines
from lamina.store import load_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PretrainedConfig

    from lamina.recipes.model_size import SharedPass, SizedRun
    from lamina.recipes.report_file import TableRow
    from lamina.recipes.schema import Recipe

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
        runs: One row per task, method and setting; "count" is the number of runs that share them.
        tasks: One row per task, with its rows, tokens and steps; tasks that share passes share steps.
        steps: Optimizer steps of all tasks, each shared one counted once.
        flops: Operations of the "base" model that readers share, of the "runs", and in "total".
        memory_bytes: Weights, gradients and the optimizer's moments, in single precision.
        kept_bytes: What readers store for the gradients of a batch of rows of `max_length`, or of average length.
        kept_rows: Number of rows of that batch; 0 if whole models are trained, for which this is not estimated.
        parts: What each task and method costs, in operations and in hours of one GPU; see `gpu_hours`.
        batches: The fields of `FittedBatch`, for a given GPU memory; empty if none is given.
        cache_bytes: All hidden states that readers need, in half precision; 0 if there is no cache.
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
    outlines, tasks = load_outlines(recipe, data)
    specs = expand_recipe(recipe, options, outlines)
    readers = {replace(spec.reader, seed=0) for spec in specs.values() if spec.reader is not None}
    if len(readers) > MOST_READERS:
        raise ConfigError(
            f"estimate: the recipe has {len(readers):,} readers besides seeds; a dry run builds each of them, "
            f"and takes at most {MOST_READERS:,}. Give fewer values, or train without a dry run."
        )
    config, source = _load_config(recipe)
    notes = [] if data is not None else ["rows and lengths are as published; --data counts those of local files"]
    if source != OWN:
        notes.append(f"the config of {recipe.model} is {source}")
    sizes = Sizes(config)
    planned = sized_runs(recipe, specs, outlines, sizes)
    folder = None if output is None else Path(output)
    check_output(recipe, specs, folder)
    if source == OWN:  # without the model's files, the recipe will be run on another machine
        check_machine(specs, folder)
        check_model(recipe, specs, {run.spec.name: run.model.model for run in planned}, tasks)
    passes = [] if recipe.methods else shared_passes(planned, tasks)
    base, runs = sum(shared.flops for shared in passes), sum(run.flops for run in planned)
    kept = max((reader_batch(shared.runs) for shared in passes if shared.part == "train"), default=None)
    trained, parameters = recipe.train_base or bool(recipe.methods), planned[0].model.parameters
    return Estimate(
        model={"name": recipe.model, "parameters": parameters, "trained": trained, "config": source},
        runs=_rows(planned),
        tasks=[_task_row(name, [run for run in planned if run.spec.task == name], passes) for name in outlines],
        steps=sum(shared.steps for shared in passes if shared.part == "train") or sum(run.steps for run in planned),
        flops={"base": base, "runs": runs, "total": base + runs},
        memory_bytes=weight_memory(recipe, planned),
        kept_bytes=kept.bytes if kept else 0,
        kept_rows=kept.rows if kept else 0,
        parts=parts(planned, passes),
        batches=[] if memory_bytes is None else list(map(asdict, fit_batches(recipe, planned, tasks, memory_bytes))),
        cache_bytes=0 if recipe.train_base else sum(shared.cache_bytes for shared in passes),
        notes=notes,
    )


def _load_config(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """Return a model's config and its origin: OWN (found with the recipe's model) or GIVEN (written in the recipe).

    The recipe's `architecture` is used only if the model is not found (the hub cannot be reached, for example). Raises
    ModelNotFoundError if the model is not found and the recipe has no `architecture`, and the errors of `config_of`.
    """
    try:
        return load_config(recipe.model, revision=recipe.revision), OWN
    except ModelNotFoundError as error:
        if recipe.architecture is None:
            error.add_note("a recipe may carry its model's config as 'architecture', for estimates")
            raise
        return config_of(recipe.architecture), GIVEN


def _rows(planned: Iterable[SizedRun]) -> list[TableRow]:
    """Return the rows of `Estimate.runs`: one per task, method and setting of the runs in `planned`."""
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

    `runs` are all runs of the task. `passes` are the passes that readers share, if any; whole models share none.
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
    """Return a number as text with three digits and a unit prefix, such as "1.23 G"."""
    power = 0 if count < 1000 else min(int(math.log10(count) / 3 + 1e-9), 8)
    power += power < 8 and count / 1000**power >= 999.5  # would be rounded to 1000 of the smaller unit
    return f"{count / 1000**power:.3g} {' kMGTPEZY'[power]}".strip()
