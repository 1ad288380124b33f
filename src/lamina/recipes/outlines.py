"""What an estimate knows of a recipe's tasks, with their data or without it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lamina.recipes.loading import check_parts, load_tasks
from lamina.tasks import kind_of
from lamina.tasks.base import TaskOutline
from lamina.tasks.presets import find_preset
from lamina.tasks.split import HELD_OUT, Split

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lamina.recipes.schema import Recipe, TaskRecipe
    from lamina.tasks.task import Task

_MEASURED = 2000  # texts whose length is measured


def load_outlines(recipe: Recipe, data: str | Path | None) -> tuple[dict[str, TaskOutline], dict[str, list[Task]]]:
    """What is known of a recipe's tasks, sizes too, and those with data; without a folder presets are as published."""
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
        classes, _ = kind_of(outline.kind).row_classes(outline, Split.of(()))
        rows["train"] = recipe.subsample.size().count(len(classes), rows["train"])
    return replace(outline, rows=rows, tokens=preset.length / texts)


def _limited(rows: Mapping[str, int], limits: Mapping[str, int | None], texts: int) -> dict[str, int]:
    most = {part: texts * limit for part, limit in limits.items() if limit is not None}
    return {part: min(count, most.get(part, count)) for part, count in rows.items()}


def _measured(task: Task) -> TaskOutline:
    """Of a task that was read; words stand for tokens, of which there are about a third more."""
    train = task.split("train")
    words, texts = 0, range(0, len(train), max(1, len(train) // _MEASURED))
    for row in texts if kind_of(task.kind).processor == "tokenizer" else ():
        text = train.texts[row]
        words += sum(len(part.split()) for part in ((text,) if isinstance(text, str) else text))
    rows = {part: len(split) for part, split in task.splits.items()}
    tokens = max(3, 2 + 4 / 3 * words / max(1, len(texts)))
    asked = {"by_row": task.by_row, "image_size": task.image_size, "pairs": task.pairs}
    return TaskOutline(task.kind, task.problem_type, tuple(task.labels), rows, tokens, **asked)
