"""The tasks of a recipe: their data, and what an estimate knows of them without it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, check_known
from lamina.recipes.layout import check_metrics
from lamina.recipes.schema import OF_FILES
from lamina.tasks import kind_of
from lamina.tasks.base import TaskOutline
from lamina.tasks.presets import find_preset
from lamina.tasks.split import HELD_OUT, Split
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Collection

    from lamina.recipes.schema import Recipe, TaskRecipe

logger = logging.getLogger(__name__)

NOT_DATA = {"readers", "epochs", "learning_rate", "subsample"}  # keys of a task that do not change its data
_MEASURED = 2000  # texts whose length is measured


def load_tasks(recipe: Recipe, data: str | Path | None) -> dict[str, list[Task]]:
    """The tasks of a recipe with their data, as `repeats` gives them; what several have in common is read once."""
    loaded: dict[str, Task] = {}
    tasks: dict[str, list[Task]] = {}
    for name, body in recipe.tasks.items():
        key = body.model_dump_json(exclude=NOT_DATA) + ("" if body.files is None else name)
        if key not in loaded:
            loaded[key] = load_task(name, body, data)
        _check_parts(recipe, name, loaded[key].splits)
        check_metrics(recipe, name, loaded[key].metrics)
        tasks[name] = repeats(body, loaded[key])
    return tasks


def _check_parts(recipe: Recipe, name: str, parts: Collection[str]) -> None:
    if recipe.evaluate is not None and recipe.evaluate not in parts:
        raise ConfigError(
            f"recipe: evaluate is {recipe.evaluate}, but task '{name}' has only {', '.join(parts)}. "
            "Give it a test part, set hold_out, or leave evaluate out."
        )


def load_task(name: str, recipe: TaskRecipe, data: str | Path | None) -> Task:
    """Read the data of one task of a recipe, without its subsamples."""
    own = {"limit", "limit_validation", "label_all_tokens", "image_size"}
    given: dict[str, Any] = recipe.model_dump(include=own)
    if recipe.preset is not None:
        folder = None if data is None else Path(data) / find_preset(recipe.preset)[0]
        task = Task.preset(recipe.preset, files=folder, **given)
    else:
        root = Path(data or ".")
        for part, path in (recipe.files or {}).items():
            given[part] = root / path if isinstance(path, str) else tuple(root / file for file in path)
        task = Task.from_files(name=name, **recipe.model_dump(include=OF_FILES), **given)
    task = task if recipe.pair_separator is None else task.join_pairs(recipe.pair_separator)
    task = task if recipe.masked_lm is None else task.masked_lm(rows=recipe.masked_lm.rows)
    task = task.held_out() if recipe.hold_out else task
    if recipe.metric is None:
        return task
    check_known(f"task {name}", [recipe.metric], task.metrics, "metric")
    return replace(task, metric=recipe.metric)


def repeats(recipe: TaskRecipe, task: Task) -> list[Task]:
    """The task itself, or a copy per repeat with the rows of its subsample; repeat r has the seed r."""
    sample = recipe.subsample
    if sample is None:
        return [task]
    size: dict[str, Any] = sample.size().given()
    tasks = [task.subsample(**size, stratified=sample.stratified, seed=seed) for seed in range(sample.repeats)]
    if sample.repeats > 1 and (rows := len(task.split("train"))) == len(tasks[0].split("train")):
        what = "all %d rows are drawn, so its %d repeats have the same rows and differ in their seeds alone"
        logger.warning(f"task %s: {what}", task.name, rows, sample.repeats)
    return tasks


def load_outlines(recipe: Recipe, data: str | Path | None) -> tuple[dict[str, TaskOutline], dict[str, list[Task]]]:
    """What is known of a recipe's tasks, sizes too, and those with data; without a folder presets are as published."""
    local = {name: body for name, body in recipe.tasks.items() if data is not None or body.preset is None}
    tasks = load_tasks(recipe.model_copy(update={"tasks": local}), data)
    outlines: dict[str, TaskOutline] = {}
    for name, body in recipe.tasks.items():
        outlines[name] = _measured(tasks[name][0]) if name in tasks else _published(body)
        _check_parts(recipe, name, outlines[name].rows)
    return outlines, tasks


def _published(recipe: TaskRecipe) -> TaskOutline:
    _, preset = find_preset(str(recipe.preset))
    outline = recipe.outline()
    whole = recipe.masked_lm is None or outline.by_row or recipe.pair_separator is not None
    texts = 1 if whole or preset.columns[1] is None else 2  # both of a pair become rows
    rows = {part: texts * count for part, count in preset.rows.items()}
    if recipe.hold_out or "validation" not in rows:
        held = round(HELD_OUT * rows["train"])
        test = {"test": rows["validation"]} if "validation" in rows else {}
        rows = {**test, **rows, "train": rows["train"] - held, "validation": held}
    for part, limit in (("train", recipe.limit), ("validation", recipe.limit_validation)):
        rows[part] = rows[part] if limit is None else min(rows[part], texts * limit)
    if recipe.subsample is not None:
        classes, _ = kind_of(outline.kind).row_classes(outline, Split.of(()))
        rows["train"] = recipe.subsample.size().count(len(classes), rows["train"])
    return replace(outline, rows=rows, tokens=preset.length / texts)


def _measured(task: Task) -> TaskOutline:
    """Of a task that was read; words stand for tokens, of which there are about a third more."""
    train = task.split("train")
    words, texts = 0, range(0, len(train), max(1, len(train) // _MEASURED))
    for row in texts if kind_of(task.kind).processor == "tokenizer" else ():
        text = train.texts[row]
        words += sum(len(part.split()) for part in ((text,) if isinstance(text, str) else text))
    rows = {part: len(split) for part, split in task.splits.items()}
    tokens = max(3, 2 + 4 / 3 * words / max(1, len(texts)))
    asked = {"by_row": task.by_row, "image_size": task.image_size}
    return TaskOutline(task.kind, task.problem_type, tuple(task.labels), rows, tokens, **asked)
