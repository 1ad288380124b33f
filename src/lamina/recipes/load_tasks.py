"""Load the tasks of a recipe with their data."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, check_known
from lamina.recipes.paper_tables import check_metrics, check_one_metric
from lamina.recipes.schema import FILE_KEYS
from lamina.tasks.presets import find_preset
from lamina.tasks.split import limited
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Collection

    from lamina.recipes.schema import Recipe, TaskRecipe

logger = logging.getLogger(__name__)

NOT_DATA = {"readers", "epochs", "learning_rate", "subsample"}  # keys of a task that do not change its data


def load_tasks(recipe: Recipe, data: str | Path | None) -> dict[str, list[Task]]:
    """Return the tasks of a recipe with their data, a list per task as `repeats` makes it.

    Data that several tasks share is read once. `data` is the folder of the files; None: presets come from the hub.
    """
    loaded: dict[str, Task] = {}
    tasks: dict[str, list[Task]] = {}
    for name, body in recipe.tasks.items():
        key = body.model_dump_json(exclude=NOT_DATA) + ("" if body.files is None else name)
        if key not in loaded:
            loaded[key] = load_task(name, body, data)
        check_parts(recipe, name, loaded[key].splits)
        check_metrics(recipe, name, loaded[key].metrics)
        tasks[name] = repeats(body, loaded[key])
    if len(tasks) == len(recipe.tasks):
        check_one_metric(recipe, {name: own[0].metric for name, own in tasks.items()})
    return tasks


def check_parts(recipe: Recipe, name: str, parts: Collection[str]) -> None:
    """Raise ConfigError if a task does not have the split on which the recipe evaluates."""
    if recipe.evaluate is not None and recipe.evaluate not in parts:
        raise ConfigError(
            f"recipe: evaluate is {recipe.evaluate}, but task '{name}' has only {', '.join(parts)}. "
            "Give it a test part, set hold_out, or leave evaluate out."
        )


def load_task(name: str, recipe: TaskRecipe, data: str | Path | None) -> Task:
    """Return one task of a recipe with its data, before subsampling."""
    own = {"limit", "limit_validation", "label_all_tokens", "image_size"}
    given: dict[str, Any] = recipe.model_dump(include=own)
    limit = given.pop("limit_validation") if recipe.hold_out else None  # of what is held out
    if recipe.preset is not None:
        folder = None if data is None else Path(data) / find_preset(recipe.preset)[0]
        task = Task.preset(recipe.preset, files=folder, **given)
    else:
        root = Path(data or ".")
        for part, path in (recipe.files or {}).items():
            given[part] = root / path if isinstance(path, str) else tuple(root / file for file in path)
        metric = recipe.metric if recipe.masked_lm is None else None
        task = Task.from_files(name=name, metric=metric, **recipe.model_dump(include=FILE_KEYS), **given)
    task = task if recipe.pair_separator is None else task.join_pairs(recipe.pair_separator)
    pairs = any(split.pairs for split in task.splits.values())
    texts = 1 if recipe.masked_lm is None or recipe.masked_lm.rows or not pairs else 2  # both of a pair become rows
    task = task if recipe.masked_lm is None else task.masked_lm(rows=recipe.masked_lm.rows)
    if recipe.hold_out and not (_set_aside(recipe) and "test" in task.splits):
        task = task.held_out(stratify=recipe.stratify)
    if limit is not None:
        validation = limited(task.split("validation"), limit * texts, 0, option="limit_validation")
        task = replace(task, splits={**task.splits, "validation": validation})
    if recipe.metric is None:
        return task
    check_known(f"task {name}", [recipe.metric], task.metrics, "metric")
    return replace(task, metric=recipe.metric)


def _set_aside(recipe: TaskRecipe) -> bool:
    """Return whether the data have no validation split, so that a tenth of the training rows is already used as one."""
    own = (recipe.files or {}) if recipe.preset is None else find_preset(recipe.preset)[1].rows
    return "validation" not in own


def repeats(recipe: TaskRecipe, task: Task) -> list[Task]:
    """Return a list with the task, or with a copy per repeat of its subsample; repeat r is drawn with seed r."""
    sample = recipe.subsample
    if sample is None:
        return [task]
    size: dict[str, Any] = sample.size().given()
    tasks = [task.subsample(**size, stratified=sample.stratified, seed=seed) for seed in range(sample.repeats)]
    if sample.repeats > 1 and (rows := len(task.split("train"))) == len(tasks[0].split("train")):
        what = "all %d rows are drawn, so its %d repeats have the same rows and differ in their seeds alone"
        logger.warning(f"task %s: {what}", task.name, rows, sample.repeats)
    return tasks
