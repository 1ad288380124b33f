"""Check the output folder, packages, edits and model before runs start, and outline tasks; no weights are loaded."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lamina.data.disk_cache import cache_folder, entries
from lamina.errors import CacheError, ConfigError, error_context, require_packages
from lamina.recipes.load_tasks import check_parts, load_tasks
from lamina.recipes.model_size import Sizes
from lamina.recipes.paper_tables import tasks_share_places
from lamina.store import load_config, load_processor
from lamina.store.bank_folder import claimed_output
from lamina.store.files import claimed
from lamina.store.models import check_weights
from lamina.store.replay import read_record
from lamina.tasks.base import KindedTask, TaskOutline
from lamina.tasks.presets import find_preset
from lamina.tasks.split import HELD_OUT, Split
from lamina.train.groups import groups_of
from lamina.train.learner import parameter_groups
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.recipes.schema import Recipe, TaskRecipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec


_ROWS = 8  # number of rows of each task that are encoded
_MEASURED = 2000  # number of texts of each task whose length is measured, about


def check_output(recipe: Recipe, specs: Mapping[str, RunSpec], folder: Path | None) -> None:
    """Check that a recipe's runs (name -> run) can write to the output folder (None: no output) and use the cache.

    Nothing in the folder is changed; but if a process died while it was replacing files there, that is undone. Raises
    StoreError if the output folder cannot be written, or holds something that would be overwritten, and CacheError
    if `cache` is "on" and the model is trained too, or the cache folder cannot be read.
    """
    is_separate = recipe.separately or recipe.methods
    with nullcontext() if folder is None else claimed(folder) if is_separate else claimed_output(dict(specs), folder):
        for spec in specs.values():
            options = FitOptions.of(spec.options)
            if options.cache == "on" and recipe.train_base:
                raise CacheError("cache: the model is trained too, so its states change. Use cache='auto' or 'off'.")
            if options.cache == "on":
                entries(cache_folder(options.cache_dir))  # raises CacheError if the folder cannot be read


def check_packages(recipe: Recipe, specs: Mapping[str, RunSpec]) -> None:
    """Raise MissingExtraError if a score of the recipe will be a mean, and SciPy, for its interval, is not installed.

    A score is a mean over seeds, over repeats, or over tasks that share a cell or point. `specs` is run name -> run.
    """
    runs = {(spec.settings.get("seed"), spec.settings.get("repeat")) for spec in specs.values()}
    if len(runs) > 1 or tasks_share_places(recipe):
        require_packages("recipe", "metrics", "scipy")


def check_edits(recipe: Recipe, specs: Mapping[str, RunSpec], tasks: Mapping[str, Sequence[KindedTask]]) -> None:
    """Check that the edits of every run can be applied, by applying them to a model without weights.

    `specs` is run name -> run, and `tasks` is task name -> copies of the task; the model's head gets the labels of the
    first. Nothing is checked if the recipe's model was edited before it was saved. Raises LaminaError if the model's
    config cannot be loaded, or an edit cannot be applied.
    """
    edited = [spec for spec in specs.values() if spec.edits]
    if not edited or read_record(recipe.model, recipe.revision)[1]:
        return
    sizes = Sizes(load_config(recipe.model, revision=recipe.revision))
    for spec in edited:
        task = tasks[spec.task][0]
        kind = task.kind
        model = sizes.model(kind.auto_class, task.labels if kind.has_classes else ())
        model.edited(spec.edits, where=f"recipe, methods.{spec.settings['method']}")


class _EncodingRunner(NamedTuple):
    """A stand-in for a runner: it has the model (`base`) and its `processor` to encode examples, and trains nothing."""

    base: PreTrainedModel
    processor: Processor


def check_model(
    recipe: Recipe,
    specs: Mapping[str, RunSpec],
    models: Mapping[str, PreTrainedModel],
    tasks: Mapping[str, list[Task]],
) -> None:
    """Check that the files of a recipe's model are complete, and that each run can start with the model.

    `models` is run name -> the run's model, without weights; `tasks` is task name -> copies of the task, one per repeat
    of its subsample. The parameter names in a run's options are looked up if its model is trained. If its task was
    read, the first training rows of the task's first copy are encoded. Raises LaminaError if weights or the processor
    are missing, or an option or row does not fit. A note of the error names the run.
    """
    first = next(iter(models.values()))
    check_weights(recipe.model, first.config, revision=recipe.revision)
    processor = load_processor(recipe.model, first, revision=recipe.revision)
    if processor is None:
        rule = "one is needed to read examples"
        raise ConfigError(f"recipe: {recipe.model} has no tokenizer or image processor; {rule}.")
    # runs with the same task, options and model would be checked in the same way: only one of them is
    distinct = {repr((spec.task, spec.options, id(models[name]))): name for name, spec in specs.items()}
    for name in distinct.values():
        spec, options = specs[name], FitOptions.of(specs[name].options)
        runner = _EncodingRunner(models[name], processor)
        with error_context(f"run {name}"):
            if recipe.methods or recipe.train_base:
                parameter_groups(models[name], options, 1.0, "fit")
            for task in tasks.get(spec.task, ())[:1]:
                part = task.split("train")
                few = replace(task, splits={"train": part.select_rows(range(min(len(part), _ROWS)))})
                list(groups_of(runner, {spec.task: few}, "train", options))  # pyright: ignore[reportArgumentType]


def load_outlines(recipe: Recipe, data: str | Path | None) -> tuple[dict[str, TaskOutline], dict[str, list[Task]]]:
    """Return task name -> `TaskOutline` with sizes, and the result of `load_tasks` for the tasks whose data was read.

    Tasks that `only` excludes are left out. `data` is the folder of the data, as for `load_tasks`; None: presets are
    not read, and their published sizes are used. Raises ConfigError if the recipe evaluates on a split that a task does
    not have, and the errors of `load_tasks`.
    """
    chosen = recipe.chosen_tasks
    local = {name: body for name, body in chosen.items() if data is not None or body.preset is None}
    tasks = load_tasks(recipe.model_copy(update={"tasks": local}), data)
    outlines: dict[str, TaskOutline] = {}
    for name, body in chosen.items():
        outlines[name] = measured(tasks[name][0]) if name in tasks else _published(body)
        check_parts(recipe, name, outlines[name].rows)
    return outlines, tasks


def _published(recipe: TaskRecipe) -> TaskOutline:
    """Return the `TaskOutline` of a preset's task with the numbers of its rows, computed from published sizes.

    The recipe's limits, held-out rows and subsample count. Raises ConfigError if the subsample does not fit them.
    """
    _, preset = find_preset(str(recipe.preset))
    outline = recipe.outline()
    whole = recipe.masked_lm is None or outline.by_row or recipe.pair_separator is not None
    texts = 1 if whole or preset.columns[1] is None else 2  # each text of a pair becomes a row
    rows = {part: texts * count for part, count in preset.rows.items()}
    limits = {"train": recipe.limit, "validation": recipe.limit_validation}
    most = {part: texts * limit for part, limit in limits.items() if limit is not None}
    if "validation" in rows:  # otherwise rows are held out before they are limited
        rows["train"] = min(rows["train"], most.get("train", rows["train"]))
    if recipe.hold_out or "validation" not in rows:
        held_out = round(HELD_OUT * rows["train"])
        test = {"test": rows["validation"]} if "validation" in rows else {}
        rows = {**test, **rows, "train": rows["train"] - held_out, "validation": held_out}
    rows = {part: min(count, most.get(part, count)) for part, count in rows.items()}
    if recipe.subsample is not None:
        classes, _ = outline.kind.row_classes(outline, Split.of(()))
        rows["train"] = recipe.subsample.size().count(len(classes), rows["train"])
    return replace(outline, rows=rows, tokens=preset.length / texts)


def measured(task: Task) -> TaskOutline:
    """Return the `TaskOutline` of a task with the rows of each split and the estimated tokens of an average row.

    The estimate is 4/3 of the average number of words in a sample of the training texts, plus 2 special tokens, and at
    least 3. It is 3 for images and audio, whose tokens are counted later from their size.
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
