"""Load the tasks of a recipe with their data: read files, hold out rows, draw subsamples."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, check_known
from lamina.recipes.paper_tables import check_one_metric
from lamina.recipes.schema import FILE_KEYS, Recipe, TaskRecipe
from lamina.recipes.table_layouts import PARAMETERS
from lamina.tasks.metrics import metrics_of
from lamina.tasks.presets import find_preset
from lamina.tasks.split import limited
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Collection


logger = logging.getLogger(__name__)

NOT_DATA = {"readers", "epochs", "learning_rate", "subsample"}  # keys of a task that do not change its data


def load_tasks(recipe: Recipe, data: str | Path | None) -> dict[str, list[Task]]:
    """Read the data of a recipe's tasks; with `only`, of the tasks that it chooses. Shared data is read once.

    Raises DataError if data cannot be read, or does not fit its task. Raises ConfigError if a task lacks the split on
    which the recipe evaluates, tables would mix tasks with different metrics, or a size or limit is not allowed. Raises
    UnknownNameError if a task does not have a metric that the recipe names, or the train split that it divides;
    MissingExtraError if a package that a task needs is not installed.

    Args:
        recipe: The recipe.
        data: Folder with one subfolder per preset; paths under `files` are relative to this folder. None: presets come
            from the hub, and paths are relative to the working directory.

    Returns:
        Task name -> a list with the task, or with one copy per repeat of its subsample.
    """
    shown = [metric for table in recipe.table for metric in table.metrics]
    shown += [figure.metric for figure in recipe.figure if figure.metric]
    loaded: dict[str, Task] = {}
    tasks: dict[str, list[Task]] = {}
    for name, body in recipe.chosen_tasks.items():
        key = body.model_dump_json(exclude=NOT_DATA) + ("" if body.files is None else name)
        if key not in loaded:
            loaded[key] = load_task(name, body, data)
        check_parts(recipe, name, loaded[key].splits)
        check_known(f"recipe, task {name}", shown, [*loaded[key].metrics, PARAMETERS], "metric")
        tasks[name] = repeats(body, loaded[key])
    check_one_metric(recipe, {name: copies[0].metric for name, copies in tasks.items()})
    return tasks


def check_parts(recipe: Recipe, name: str, parts: Collection[str]) -> None:
    """Raise ConfigError if the recipe evaluates on a split that is not in `parts`, the splits of the task `name`."""
    if recipe.evaluate is not None and recipe.evaluate not in parts:
        problem = f"evaluate is {recipe.evaluate}, but task '{name}' has only {', '.join(parts)}"
        raise ConfigError(f"recipe: {problem}. Give it a test part, set hold_out, or leave evaluate out.")


def load_task(name: str, recipe: TaskRecipe, data: str | Path | None) -> Task:
    """Read one task of a recipe, with its data, limits and held-out rows, but without drawing its subsample.

    `hold_out` changes nothing if the data has a test but no validation split, because rows are then held out anyway.
    `name` is the name of a task from files; a preset has its own. For `data` (the folder of the data) and the errors
    (DataError, ConfigError, UnknownNameError and MissingExtraError) see `load_tasks`.
    """
    options = recipe.model_dump(include={"limit", "limit_validation", "label_all_tokens", "image_size"})
    # rows that are held out below are limited afterwards, not the rows of the original validation split
    limit = options.pop("limit_validation") if recipe.hold_out else None
    if recipe.preset is not None:
        folder = None if data is None else Path(data) / find_preset(recipe.preset)[0]
        task = Task.preset(recipe.preset, files=folder, **options)
    else:
        root = Path(data or ".")
        for part, path in (recipe.files or {}).items():
            options[part] = root / path if isinstance(path, str) else tuple(root / file for file in path)
        metric = recipe.metric if recipe.masked_lm is None else None
        task = Task.from_files(name=name, metric=metric, **recipe.model_dump(include=FILE_KEYS), **options)
    task = task if recipe.pair_separator is None else task.join_pairs(recipe.pair_separator)
    pairs = any(split.pairs for split in task.splits.values())
    # masked language modelling in blocks makes two rows of each pair of texts
    rows_per_example = 1 if recipe.masked_lm is None or recipe.masked_lm.rows or not pairs else 2
    task = task if recipe.masked_lm is None else task.masked_lm(rows=recipe.masked_lm.rows)
    own = (recipe.files or {}) if recipe.preset is None else find_preset(recipe.preset)[1].rows  # splits of the data
    if recipe.hold_out and not ("validation" not in own and "test" in task.splits):
        task = task.held_out(stratify=recipe.stratify)
    if limit is not None:
        validation = limited(task.split("validation"), limit * rows_per_example, 0, option="limit_validation")
        task = replace(task, splits={**task.splits, "validation": validation})
    if recipe.metric is None:
        return task
    further = task.kind.further_metrics(task.problem_type, task.labels)
    check_known(f"task {name}", [recipe.metric], (*task.metrics, *further), "metric")
    metrics = task.metrics
    if recipe.metric in further:
        metrics = metrics_of(task.kind, task.problem_type, task.labels, recipe.metric, task.positive, f"task {name}")
    return replace(task, metric=recipe.metric, metrics=metrics)


def repeats(recipe: TaskRecipe, task: Task) -> list[Task]:
    """Return the subsamples that the recipe of a task asks for, one per repeat; [task] if it asks for none.

    Repeat r, from 0, draws training rows with seed r; other splits stay whole. If each of several repeats has all
    training rows, they are equal, and a warning is logged. Raises ConfigError if the size of the subsample does not
    fit the task, such as rows per class without classes; UnknownNameError if there are no training rows.
    """
    sample = recipe.subsample
    if sample is None:
        return [task]
    size = sample.model_dump(exclude={"repeats"})
    tasks = [task.subsample(**size, seed=seed) for seed in range(sample.repeats)]
    if sample.repeats > 1 and (rows := len(task.split("train"))) == len(tasks[0].split("train")):
        message = "all %d rows are drawn, so its %d repeats have the same rows and differ only in their seeds"
        logger.warning(f"task %s: {message}", task.name, rows, sample.repeats)
    return tasks
