"""Estimate what a recipe would train and cost, with models that have no weights and only local data."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.errors import ModelNotFoundError, error_context
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
    from lamina.recipes.schema import Recipe, TaskRecipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

FORWARD, TRAINING = 2, 6  # operations per parameter and token; gradients take twice a forward's
STATE_BYTES, CACHED_BYTES = 4, 2  # of a weight, and of an entry of a cached state
OWN, GIVEN = "its own", "that of the recipe, since the hub cannot be reached"


@dataclass(frozen=True)
class Estimate:
    """The estimate of a recipe: upper limits, since early stopping cannot be foreseen.

    Operations are 2 x parameters x tokens for a forward, and three times that where there are gradients. Embeddings,
    with which nothing is multiplied, and attention's products of tokens with tokens are left out.
    """

    model: dict[str, Any]  # "name", "parameters", whether it is "trained", and where its "config" came from
    runs: list[dict[str, Any]]  # one row per task, method and setting, for all the runs ("count") that share it
    tasks: list[dict[str, Any]]  # one row per task; readers of one run share their steps
    flops: dict[str, int]  # operations of the "base" that readers share, of the "runs", and "total"
    memory_bytes: int  # of weights, gradients and the optimizer's moments, in single precision
    kept_bytes: int  # that readers keep for the gradients of one batch, of rows of `max_length` or else usual ones
    kept_rows: int  # in that batch; 0 where whole models are trained, of which that is not counted
    cache_bytes: int  # of all states that are read, in half precision; 0 where there is no cache
    notes: list[str]  # what was assumed


def estimate(
    recipe: Recipe, *, data: str | Path | None = None, output: str | Path | None = None, **options: Any
) -> Estimate:
    """Estimate the runs, steps, operations and memory of a recipe; the arguments are those of `run_recipe`.

    What a run would refuse at once is refused here too. Without `data`, published numbers stand for those of presets.
    """
    outlines, tasks = load_outlines(recipe, data)
    specs = expand_recipe(recipe, options, outlines)
    config, source = _config(recipe)
    notes = [] if data is not None else ["rows and lengths are as published; --data counts those of local files"]
    if source != OWN:
        notes.append(f"the config of {recipe.model} is {source}")
    sizes = Sizes(config)
    planned = [_SizedRun(recipe, spec, outlines[spec.task], sizes) for spec in specs.values()]
    folder = None if output is None else Path(output)
    check_output(recipe, specs, folder)
    if source == OWN:  # else it will run where the model is
        check_machine(specs, folder)
        check_model(recipe, specs, {run.spec.name: run.model.model for run in planned}, tasks)
    passes = [] if recipe.methods else _passes(planned)
    base, runs = sum(shared.flops for shared in passes), sum(run.flops for run in planned)
    kept = max((_kept(shared.runs) for shared in passes if shared.part == "train"), default=None)
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


def _config(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """Return the model's config, or without the hub the recipe's `architecture`; and where it came from."""
    try:
        return load_config(recipe.model, revision=recipe.revision), OWN
    except ModelNotFoundError as error:
        if recipe.architecture is None:
            error.add_note("a recipe may carry its model's config as 'architecture', for estimates")
            raise
        return config_of(recipe.architecture), GIVEN


class _SizedRun:
    """A `RunSpec` with the sizes of its model and data; the model is on the meta device."""

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
                heads = [body.outline().kind.base_class for body in recipe.tasks.values()]
                self.model = sizes.model(next((head for head in heads if head != "AutoModel"), "AutoModel"))
                self.reader = self.model.reader(spec.reader)
        longest = int(self.options.max_length or getattr(sizes.config, "max_position_embeddings", None) or 512)
        config = copy.copy(sizes.config)
        if task.image_size is not None:
            config.image_size = task.image_size
        rows = {
            part: kind.model_rows(task.rows.get(part, 0), task.tokens, longest, config, by_row=task.by_row)
            for part in PARTS
        }
        self.rows = {part: count for part, (count, _) in rows.items()}
        self.tokens = rows["train"][1]
        self.target = kind.target_tokens(self.options.max_target_length)
        self.added = self.edits.added
        self.parameters = self.reader.parameters if self.reader else self.model.parameters + self.added
        self.trained = self.parameters - self.edits.frozen
        batches = ceil(self.rows["train"] / self.options.batch_size)
        self.steps_per_epoch = ceil(batches / self.options.gradient_accumulation_steps)
        limit: Any = self.options.max_steps
        given: Any = self.options.epochs  # one number: readers' own epochs are options of theirs here
        self.epochs = given if limit is None else ceil(limit / self.steps_per_epoch)  # that begin
        self.steps = limit or self.epochs * self.steps_per_epoch

    @property
    def learnt(self) -> int:
        """Number of training rows over all epochs."""
        whole, rest = divmod(self.steps, self.steps_per_epoch)
        return whole * self.rows["train"] + rest * self.options.step_size

    @cached_property
    def flops(self) -> int:
        """Operations of the run, without the base model that readers share; generated texts count once per beam."""
        scored = self.epochs * self.rows["validation"] + (self.rows["test"] if self.recipe.evaluate else 0)
        if self.reader is not None:
            return self.parameters * self.tokens * (TRAINING * self.learnt + FORWARD * scored)
        row = self.model.row(self.tokens, self.target) + self.added * self.tokens
        beams = self.options.num_beams if self.target else 1
        return row * ((TRAINING if self.edits.deep else FORWARD) * self.learnt + FORWARD * scored * beams)


class _Pass(NamedTuple):
    """Passes of the base model over the same rows that several readers share."""

    part: str
    task: str  # of the first of them
    steps: int
    flops: int  # of the base
    cache_bytes: int
    runs: Sequence[_SizedRun]


class _Kept(NamedTuple):
    """Memory that readers keep for the gradients of one batch."""

    bytes: int
    rows: int


def _kept(runs: Sequence[_SizedRun]) -> _Kept:
    """Return the memory for the gradients of one batch of runs that share their passes."""
    first, readers = runs[0], [run.reader for run in runs if run.reader is not None]
    rows = min(first.options.batch_size, first.rows["train"])
    kept = first.model.kept(readers, first.options.max_length or first.tokens)
    return _Kept(kept.of(rows), rows)


def _pass(part: str, runs: list[_SizedRun]) -> _Pass:
    """Return the shared passes of some runs over one split.

    The base model runs up to the highest layer that is read, for as many epochs as the longest run. The test split is
    read once.
    """
    first, longest = runs[0], max(runs, key=lambda run: run.epochs)
    readers = [run.reader for run in runs if run.reader is not None]
    deepest: dict[str, int] = {}
    for reader in readers:
        deepest[reader.stack] = max(reader.layers[-1], deepest.get(reader.stack, 0))
    widths = {(reader.stack, layer): reader.width for reader in readers for layer in reader.layers}
    rows = longest.learnt if part == "train" else longest.rows[part] * (1 if part == "test" else longest.epochs)
    times = TRAINING if part == "train" and first.recipe.train_base else FORWARD
    flops = times * rows * longest.tokens * longest.model.up_to(deepest)
    cache_bytes = 0 if part == "test" else first.rows[part] * first.tokens * sum(widths.values()) * CACHED_BYTES
    return _Pass(part, first.spec.task, longest.steps, flops, cache_bytes, runs)


def _passes(planned: Iterable[_SizedRun]) -> list[_Pass]:
    """Group the runs that share passes: runs of one repeat train together, and all runs of a task validate together."""
    passes: dict[tuple[str, ...], list[_SizedRun]] = {}
    for run in planned:
        recipe, spec = run.recipe, run.spec
        task = recipe.tasks[spec.task]
        texts = task.model_dump_json(exclude={*NOT_DATA, "metric"})
        alone = spec.name if recipe.separately else ""
        sample = "" if task.subsample is None else task.subsample.model_dump_json()
        passes.setdefault(("train", texts, alone, sample, str(spec.repeat)), []).append(run)
        for part in ("validation", *([recipe.evaluate] if recipe.evaluate else [])):
            passes.setdefault((part, texts, alone), []).append(run)
    return [_pass(part, runs) for (part, *_), runs in passes.items()]


def _rows(planned: Iterable[_SizedRun]) -> list[dict[str, Any]]:
    """Return a row per task, method and setting, with the number of its runs and their sizes."""
    rows: dict[str, dict[str, Any]] = {}
    for run in planned:
        shared = {"task": run.spec.task, "method": run.spec.settings["method"], "settings": grid_of(run.spec)}
        sizes = {key: getattr(run, key) for key in ("epochs", "steps", "parameters", "added", "trained")}
        row = rows.setdefault(json.dumps(list(shared.values())), {**shared, "count": 0, **sizes, "flops": 0})
        row["count"] += 1
        row["flops"] += run.flops
    return list(rows.values())


def _task_row(name: str, runs: list[_SizedRun], passes: Iterable[_Pass]) -> dict[str, Any]:
    """Return a row about one task: training and validation rows, tokens per row and per generated text, steps."""
    first, together = runs[0], [shared.steps for shared in passes if (shared.part, shared.task) == ("train", name)]
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
        "steps": sum(together if first.reader else (run.steps for run in runs)),
    }


def _memory(recipe: Recipe, planned: list[_SizedRun]) -> int:
    """Return the bytes of weights, gradients and optimizer moments of everything that is trained at the same time."""
    moments = planned[0].options.moments
    if recipe.methods:
        return STATE_BYTES * max(run.parameters + (1 + moments) * run.trained for run in planned)
    together = (max if recipe.separately else sum)(run.trained for run in planned)
    base = planned[0].model.parameters * (2 + moments if recipe.train_base else 1)
    return STATE_BYTES * ((2 + moments) * together + base)


def readable(count: float) -> str:
    """Return a number with three digits and a unit prefix, such as "1.23 G"."""
    power = 0 if count < 1000 else min(int(math.log10(count) / 3 + 1e-9), 8)
    power += power < 8 and count / 1000**power >= 999.5  # which three digits round to the next thousand
    return f"{count / 1000**power:.3g} {' kMGTPEZY'[power]}".strip()


_MEASURED = 2000  # texts whose length is measured


def load_outlines(recipe: Recipe, data: str | Path | None) -> tuple[dict[str, TaskOutline], dict[str, list[Task]]]:
    """Return the outlines of a recipe's tasks with their sizes, and the tasks whose data was read.

    Without a data folder the published sizes of presets are used, and their data is not read.
    """
    local = {name: body for name, body in recipe.tasks.items() if data is not None or body.preset is None}
    tasks = load_tasks(recipe.model_copy(update={"tasks": local}), data)
    outlines: dict[str, TaskOutline] = {}
    for name, body in recipe.tasks.items():
        outlines[name] = _measured(tasks[name][0]) if name in tasks else _published(body)
        check_parts(recipe, name, outlines[name].rows)
    return outlines, tasks


def _published(recipe: TaskRecipe) -> TaskOutline:
    _, preset = find_preset(str(recipe.preset))
    outline = recipe.outline()
    whole = recipe.masked_lm is None or outline.by_row or recipe.pair_separator is not None
    texts = 1 if whole or preset.columns[1] is None else 2  # both of a pair become rows
    rows = {part: texts * count for part, count in preset.rows.items()}
    limits = {"train": recipe.limit, "validation": recipe.limit_validation}
    own = "validation" in rows  # of which there may be less; else the limits are of the parts that are made
    late = {"validation": recipe.limit_validation} if recipe.hold_out else {}  # of the rows that are held out
    rows = _limited(rows, {part: limits[part] for part in limits if part not in late}, texts) if own else rows
    if recipe.hold_out or not own:
        held = round(HELD_OUT * rows["train"])
        test = {"test": rows["validation"]} if "validation" in rows else {}
        rows = {**test, **rows, "train": rows["train"] - held, "validation": held}
    rows = _limited(rows, late if own else limits, texts)
    if recipe.subsample is not None:
        classes, _ = outline.kind.row_classes(outline, Split.of(()))
        rows["train"] = recipe.subsample.size().count(len(classes), rows["train"])
    return replace(outline, rows=rows, tokens=preset.length / texts)


def _limited(rows: Mapping[str, int], limits: Mapping[str, int | None], texts: int) -> dict[str, int]:
    most = {part: texts * limit for part, limit in limits.items() if limit is not None}
    return {part: min(count, most.get(part, count)) for part, count in rows.items()}


def _measured(task: Task) -> TaskOutline:
    """Return the outline of a task from its data; a text has about 4/3 as many tokens as words."""
    train = task.split("train")
    words, texts = 0, range(0, len(train), max(1, len(train) // _MEASURED))
    for row in texts if task.kind.processor == "tokenizer" else ():
        text = train.texts[row]
        words += sum(len(part.split()) for part in ((text,) if isinstance(text, str) else text))
    rows = {part: len(split) for part, split in task.splits.items()}
    tokens = max(3, 2 + 4 / 3 * words / max(1, len(texts)))
    asked = {"by_row": task.by_row, "image_size": task.image_size, "pairs": task.pairs}
    return TaskOutline(task.kind, task.problem_type, tuple(task.labels), rows, tokens, **asked)
