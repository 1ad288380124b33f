"""Estimate what a recipe would train and cost, with models that have no weights and without downloading data."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from lamina.errors import ConfigError, ModelNotFoundError, error_context
from lamina.recipes.edits import config_of
from lamina.recipes.expand import expand_recipe, grid_of
from lamina.recipes.load_tasks import NOT_DATA, check_parts, load_tasks
from lamina.recipes.model_size import EditSize, Sizes
from lamina.recipes.preflight import check_machine, check_model, check_output
from lamina.store import load_config
from lamina.tasks.base import PARTS, TaskOutline
from lamina.tasks.presets import find_preset
from lamina.tasks.split import HELD_OUT, Split
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PretrainedConfig

    from lamina.recipes.model_size import ReaderSize
    from lamina.recipes.report_file import TableRow
    from lamina.recipes.schema import Recipe, TaskRecipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

FORWARD, TRAINING = 2, 6  # operations per parameter and token; the backward pass takes twice as many as the forward
WEIGHT_BYTES = 4  # size of a weight, a gradient or a moment of the optimizer
MOST_READERS = 2000  # readers of an estimate, each of which takes about 10 ms
CACHED_BYTES = 2  # size of a number in a cached hidden state
# Where the config of the model came from: `Estimate.model["config"]`.
OWN, GIVEN = "its own", "that of the recipe, since the hub cannot be reached"


@dataclass(frozen=True)
class Estimate:
    """The estimate of a recipe. Early stopping is not foreseen, so that all numbers are upper limits.

    Operations of a forward pass are 2 x parameters x tokens, and those of a pass with gradients three times as many.
    Not counted are embeddings and, in attention, the products of queries with keys and of weights with values.
    """

    model: TableRow  # "name", "parameters", whether it is "trained", and where its "config" came from
    runs: list[TableRow]  # one row per task, method and setting; "count" is the number of runs that share them
    tasks: list[TableRow]  # one row per task, with its rows, tokens and steps; readers of one run share their steps
    flops: dict[str, int]  # operations of the "base" model that readers share, of the "runs", and in "total"
    memory_bytes: int  # weights, gradients and the optimizer's moments, in single precision
    kept_bytes: int  # what readers store for the gradients of a batch of rows of `max_length`, or of average length
    kept_rows: int  # number of rows of that batch; 0 if whole models are trained, for which this is not estimated
    cache_bytes: int  # all hidden states that readers need, in half precision; 0 if there is no cache
    notes: list[str]  # assumptions that were made


def estimate(
    recipe: Recipe, *, data: str | Path | None = None, output: str | Path | None = None, **options: object
) -> Estimate:
    """Estimate the runs, steps, operations and memory of a recipe, without training or writing anything.

    Args:
        recipe: The recipe, from `load_recipe`.
        data: Folder of the data, as for `run_recipe`. None: presets are not read; their published sizes are used.
        output: The output folder that the training would write to, which is checked. None: no folder.
        **options: Options of `lamina.fit`, as for `run_recipe`.

    Raises:
        ConfigError: If the recipe has more than 2,000 readers that differ in more than their seed.
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
    planned = [_SizedRun(recipe, spec, outlines[spec.task], sizes) for spec in specs.values()]
    folder = None if output is None else Path(output)
    check_output(recipe, specs, folder)
    if source == OWN:  # without the model's files, the recipe will be run on another machine
        check_machine(specs, folder)
        check_model(recipe, specs, {run.spec.name: run.model.model for run in planned}, tasks)
    passes = [] if recipe.methods else _passes(planned, tasks)
    base, runs = sum(shared.flops for shared in passes), sum(run.flops for run in planned)
    kept = max((_reader_memory(shared.runs) for shared in passes if shared.part == "train"), default=None)
    trained, parameters = recipe.train_base or bool(recipe.methods), planned[0].model.parameters
    return Estimate(
        model={"name": recipe.model, "parameters": parameters, "trained": trained, "config": source},
        runs=_rows(planned),
        tasks=[_task_row(name, [run for run in planned if run.spec.task == name], passes) for name in outlines],
        flops={"base": base, "runs": runs, "total": base + runs},
        memory_bytes=_memory(recipe, planned),
        kept_bytes=kept.bytes if kept else 0,
        kept_rows=kept.rows if kept else 0,
        cache_bytes=0 if recipe.train_base else sum(shared.cache_bytes for shared in passes),
        notes=notes,
    )


def _load_config(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """Return the config of a recipe's model, and where it comes from: OWN or GIVEN.

    If the model is not found (the hub cannot be reached, for example), the recipe's `architecture` is the config.

    Raises:
        ModelNotFoundError: If the model is not found and the recipe has no `architecture`.
    """
    try:
        return load_config(recipe.model, revision=recipe.revision), OWN
    except ModelNotFoundError as error:
        if recipe.architecture is None:
            error.add_note("a recipe may carry its model's config as 'architecture', for estimates")
            raise
        return config_of(recipe.architecture), GIVEN


class _SizedRun:
    """A run of a recipe with its sizes: those of its data, and those of its model, which is on the meta device.

    Attributes:
        recipe: The recipe.
        spec: The run.
        task: The run's task with its number of rows and tokens.
        options: The run's options of `lamina.fit`.
        model: The model.
        reader: The reader; None if the model itself is fine-tuned.
        edits: How the run's edits change the model's size.
        rows: Split -> number of model inputs per epoch. A long text may become several inputs.
        tokens: Tokens of an average training input.
        target: Maximum tokens of a text to generate; 0 if the task generates none.
        added: Number of parameters that edits add.
        parameters: Number of parameters of the reader, or of the edited model.
        trained: Number of parameters that are trained.
        steps_per_epoch: Optimizer steps of an epoch.
        epochs: Number of epochs that begin.
        steps: Optimizer steps of all epochs together.
    """

    reader: ReaderSize | None = None
    edits = EditSize(added=0, frozen=0, deep=True)

    def __init__(self, recipe: Recipe, spec: RunSpec, task: TaskOutline, sizes: Sizes) -> None:
        self.recipe, self.spec, self.task = recipe, spec, task
        self.options, kind = FitOptions.of(spec.options), task.kind
        with error_context(f"run {spec.name}"):
            if spec.reader is None:
                self.model = sizes.model(kind.auto_class, task.labels if kind.has_classes else ())
                self.edits = self.model.edited(spec.edits, where=f"recipe, methods.{spec.settings['method']}")
            else:
                heads = [body.outline().kind.base_class for body in recipe.chosen_tasks.values()]
                self.model = sizes.model(next((head for head in heads if head != "AutoModel"), "AutoModel"))
                self.reader = self.model.reader(spec.reader)
        max_length = int(self.options.max_length or getattr(sizes.config, "max_position_embeddings", None) or 512)
        config = copy.copy(sizes.config)
        if task.image_size is not None:
            config.image_size = task.image_size
        rows = {
            part: kind.model_rows(task.rows.get(part, 0), task.tokens, max_length, config, by_row=task.by_row)
            for part in PARTS
        }
        self.rows = {part: count for part, (count, _) in rows.items()}
        self.tokens = rows["train"][1]
        self.target = self.options.max_target_length if kind.generates else 0
        self.added = self.edits.added
        self.parameters = self.reader.parameters if self.reader else self.model.parameters + self.added
        self.trained = self.parameters - self.edits.frozen
        batches = ceil(self.rows["train"] / self.options.batch_size)
        self.steps_per_epoch = ceil(batches / self.options.gradient_accumulation_steps)
        max_steps = self.options.max_steps
        epochs = cast("int", self.options.epochs)  # never a mapping here: each reader has its own options
        self.epochs = epochs if max_steps is None else ceil(max_steps / self.steps_per_epoch)
        self.steps = max_steps or self.epochs * self.steps_per_epoch

    @property
    def trained_rows(self) -> int:
        """Number of training inputs in all epochs together."""
        whole, rest = divmod(self.steps, self.steps_per_epoch)
        return whole * self.rows["train"] + rest * self.options.step_size

    @cached_property
    def flops(self) -> int:
        """Operations of the run, without the passes of a base model that several readers share.

        A generated text counts once for each beam.
        """
        scored = self.epochs * self.rows["validation"] + (self.rows["test"] if self.recipe.evaluate else 0)
        if self.reader is not None:
            return self.parameters * self.tokens * (TRAINING * self.trained_rows + FORWARD * scored)
        row = self.model.row(self.tokens, self.target) + self.added * self.tokens
        beams = self.options.num_beams if self.target else 1
        return row * ((TRAINING if self.edits.deep else FORWARD) * self.trained_rows + FORWARD * scored * beams)


class _Pass(NamedTuple):
    """All forward passes of the base model over one split, whose states several readers share."""

    part: str  # the split: "train", "validation" or "test"
    task: str  # name of the first reader's task; the others have the same data
    steps: int  # optimizer steps
    flops: int  # operations of the base model
    cache_bytes: int  # size of the hidden states in a cache
    runs: Sequence[_SizedRun]  # the runs of the readers


class _ReaderMemory(NamedTuple):
    """The memory that readers need for the gradients of one batch, in bytes, and the number of rows of this batch."""

    bytes: int
    rows: int


def _reader_memory(runs: Sequence[_SizedRun]) -> _ReaderMemory:
    """Return the memory for the gradients of one batch, for readers that share each pass of the model."""
    first, readers = runs[0], [run.reader for run in runs if run.reader is not None]
    rows = min(first.options.batch_size, first.rows["train"])
    kept = first.model.kept(readers, first.options.max_length or first.tokens)
    return _ReaderMemory(kept.total(rows), rows)


def _pass(part: str, runs: list[_SizedRun]) -> _Pass:
    """Return what the base model computes on one split for several training runs that share its passes.

    The base model is computed up to the highest layer that a reader of these runs needs. There are as many epochs as
    the longest run has; the test split is read once.
    """
    first, longest = runs[0], max(runs, key=lambda run: run.epochs)
    readers = [run.reader for run in runs if run.reader is not None]
    deepest: dict[str, int] = {}
    for reader in readers:
        deepest[reader.stack] = max(reader.layers[-1], deepest.get(reader.stack, 0))
    widths = {(reader.stack, layer): reader.width for reader in readers for layer in reader.layers}
    rows = longest.trained_rows if part == "train" else longest.rows[part] * (1 if part == "test" else longest.epochs)
    times = TRAINING if part == "train" and first.recipe.train_base else FORWARD
    flops = times * rows * longest.tokens * longest.model.up_to(deepest)
    cache_bytes = 0 if part == "test" else first.rows[part] * first.tokens * sum(widths.values()) * CACHED_BYTES
    return _Pass(part, first.spec.task, longest.steps, flops, cache_bytes, runs)


def _passes(planned: Iterable[_SizedRun], tasks: Mapping[str, Sequence[Task]]) -> list[_Pass]:
    """Return all passes of the base model that a recipe needs, each with the runs of readers that share it.

    `tasks` is name -> copies of a task, for the tasks whose data was read. Tasks with equal examples share their
    passes, also if they have other labels; tasks that were not read, if their recipes name the same data. Readers share
    training passes if they learn from the same repeat of a
    subsample, and they always share validation and test passes. If the recipe sets `separately`, nothing is shared.
    """
    passes: dict[tuple[str, ...], list[_SizedRun]] = {}
    named: dict[str, str] = {}
    for run in planned:
        recipe, spec = run.recipe, run.spec
        task = recipe.tasks[spec.task]
        if spec.task not in named:
            named[spec.task] = task.model_dump_json(exclude={*NOT_DATA, "metric"})
        separate = spec.name if recipe.separately else ""
        sample = "" if task.subsample is None else task.subsample.model_dump_json()
        for part in ("train", "validation", *([recipe.evaluate] if recipe.evaluate else [])):
            if spec.task in tasks:
                read = tasks[spec.task][spec.repeat]
                data = (read.kind.inputs, read.split(part).key, str(read.by_row), str(read.image_size))
            else:
                data = (named[spec.task], *((sample, str(spec.repeat)) if part == "train" else ()))
            passes.setdefault((part, separate, *data), []).append(run)
    return [_pass(part, runs) for (part, *_), runs in passes.items()]


def _rows(planned: Iterable[_SizedRun]) -> list[TableRow]:
    """Return the rows of `Estimate.runs`: one per task, method and setting, with its runs, sizes and operations."""
    rows: dict[str, TableRow] = {}
    for run in planned:
        shared = {"task": run.spec.task, "method": run.spec.settings["method"], "settings": grid_of(run.spec)}
        sizes = {key: getattr(run, key) for key in ("epochs", "steps", "parameters", "added", "trained")}
        row = rows.setdefault(json.dumps(list(shared.values())), {**shared, "count": 0, **sizes, "flops": 0})
        row["count"] += 1
        row["flops"] += run.flops
    return list(rows.values())


def _task_row(name: str, runs: list[_SizedRun], passes: Iterable[_Pass]) -> TableRow:
    """Return the row of one task in `Estimate.tasks`.

    `runs` are all runs of the task, and `passes` all passes that readers share; none if whole models are trained.
    """
    first, shared_steps = runs[0], [shared.steps for shared in passes if (shared.part, shared.task) == ("train", name)]
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


def _memory(recipe: Recipe, planned: list[_SizedRun]) -> int:
    """Return the bytes of weights, gradients and optimizer moments that are in memory at the same time.

    They belong to the base model and all readers that are trained together, or to the largest fine-tuned model.
    """
    moments = planned[0].options.moments
    if recipe.methods:
        return WEIGHT_BYTES * max(run.parameters + (1 + moments) * run.trained for run in planned)
    together = (max if recipe.separately else sum)(run.trained for run in planned)
    base = planned[0].model.parameters * (2 + moments if recipe.train_base else 1)
    return WEIGHT_BYTES * ((2 + moments) * together + base)


def readable(count: float) -> str:
    """Return a number with three digits and a unit prefix, such as "1.23 G"."""
    power = 0 if count < 1000 else min(int(math.log10(count) / 3 + 1e-9), 8)
    power += power < 8 and count / 1000**power >= 999.5  # would be rounded to 1000 of the smaller unit
    return f"{count / 1000**power:.3g} {' kMGTPEZY'[power]}".strip()


_MEASURED = 2000  # number of texts of each task whose length is measured, about


def load_outlines(recipe: Recipe, data: str | Path | None) -> tuple[dict[str, TaskOutline], dict[str, list[Task]]]:
    """Return the outlines of a recipe's tasks with their sizes, and the tasks whose data was read; both by name.

    Args:
        recipe: The recipe.
        data: Folder of the data, as for `load_tasks`. None: presets are not read; their published sizes are used.

    Raises:
        DataError: If data cannot be read or used.
        ConfigError: If the recipe evaluates on a split that a task does not have.
    """
    chosen = recipe.chosen_tasks
    local = {name: body for name, body in chosen.items() if data is not None or body.preset is None}
    tasks = load_tasks(recipe.model_copy(update={"tasks": local}), data)
    outlines: dict[str, TaskOutline] = {}
    for name, body in chosen.items():
        outlines[name] = _measured(tasks[name][0]) if name in tasks else _published(body)
        check_parts(recipe, name, outlines[name].rows)
    return outlines, tasks


def _published(recipe: TaskRecipe) -> TaskOutline:
    """Return the outline of a preset's task from its published sizes, with the recipe's limits and held-out rows."""
    _, preset = find_preset(str(recipe.preset))
    outline = recipe.outline()
    whole = recipe.masked_lm is None or outline.by_row or recipe.pair_separator is not None
    texts = 1 if whole or preset.columns[1] is None else 2  # each text of a pair becomes a row
    rows = {part: texts * count for part, count in preset.rows.items()}
    limits = {"train": recipe.limit, "validation": recipe.limit_validation}
    has_validation = "validation" in rows
    # the limit of rows that are held out applies after they are held out; without a validation split, all limits do
    late = {"validation": recipe.limit_validation} if recipe.hold_out else {}
    early = {part: limit for part, limit in limits.items() if part not in late}
    rows = _limited(rows, early, texts) if has_validation else rows
    if recipe.hold_out or not has_validation:
        held_out = round(HELD_OUT * rows["train"])
        test = {"test": rows["validation"]} if has_validation else {}
        rows = {**test, **rows, "train": rows["train"] - held_out, "validation": held_out}
    rows = _limited(rows, late if has_validation else limits, texts)
    if recipe.subsample is not None:
        classes, _ = outline.kind.row_classes(outline, Split.of(()))
        rows["train"] = recipe.subsample.size().count(len(classes), rows["train"])
    return replace(outline, rows=rows, tokens=preset.length / texts)


def _limited(rows: Mapping[str, int], limits: Mapping[str, int | None], texts: int) -> dict[str, int]:
    """Return split -> number of rows, at most the split's limit (in examples) times the rows per example, `texts`."""
    most = {part: texts * limit for part, limit in limits.items() if limit is not None}
    return {part: min(count, most.get(part, count)) for part, count in rows.items()}


def _measured(task: Task) -> TaskOutline:
    """Return the outline of a task with its number of rows, and an estimate of the tokens of an average row.

    The estimate is 4/3 of the average number of words in a sample of the training texts, plus 2 special tokens.
    """
    train = task.split("train")
    words, texts = 0, range(0, len(train), max(1, len(train) // _MEASURED))
    for row in texts if task.kind.processor == "tokenizer" else ():
        text = train.texts[row]
        words += sum(len(part.split()) for part in ((text,) if isinstance(text, str) else text))
    rows = {part: len(split) for part, split in task.splits.items()}
    tokens = max(3, 2 + 4 / 3 * words / max(1, len(texts)))
    return TaskOutline(
        kind=task.kind,
        problem_type=task.problem_type,
        labels=tuple(task.labels),
        rows=rows,
        tokens=tokens,
        by_row=task.by_row,
        image_size=task.image_size,
        pairs=task.pairs,
    )
