"""The tasks of a recipe with their sizes, from local data or from a preset's published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lamina.recipes.load_tasks import check_parts, load_tasks
from lamina.tasks.base import TaskOutline
from lamina.tasks.presets import find_preset
from lamina.tasks.split import HELD_OUT, Split

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lamina.recipes.schema import Recipe, TaskRecipe
    from lamina.tasks.task import Task

_MEASURED = 2000  # number of texts of each task whose length is measured, about


def load_outlines(recipe: Recipe, data: str | Path | None) -> tuple[dict[str, TaskOutline], dict[str, list[Task]]]:
    """Return task name -> `TaskOutline` with sizes, and task name -> task for the tasks whose data was read.

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
        outlines[name] = measured(tasks[name][0]) if name in tasks else _published(body)
        check_parts(recipe, name, outlines[name].rows)
    return outlines, tasks


def _published(recipe: TaskRecipe) -> TaskOutline:
    """Return the `TaskOutline` of a preset's task from published sizes, with the recipe's limits and held-out rows."""
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
    """Return split name -> number of rows: at most the split's limit in examples, times `texts` rows per example."""
    most = {part: texts * limit for part, limit in limits.items() if limit is not None}
    return {part: min(count, most.get(part, count)) for part, count in rows.items()}


def measured(task: Task) -> TaskOutline:
    """Return the `TaskOutline` of a task with its number of rows and the estimated tokens of an average row.

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
