"""The tasks of a recipe: their data, and what an estimate knows of them without it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, UnknownNameError
from lamina.tasks import kind_of
from lamina.tasks.presets import find_preset
from lamina.tasks.sampling import SampleSize
from lamina.tasks.split import HELD_OUT, Split
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from lamina.recipes.schema import Recipe, TaskRecipe

_TRAINING = {"readers", "epochs", "learning_rate", "subsample"}  # what does not change a task's data
_LOOKED_AT = 2000  # texts whose length is measured


def load_tasks(recipe: Recipe, data: str | Path | None) -> dict[str, list[Task]]:
    """Read the data of a recipe's tasks; what several of them have in common is read once.

    Args:
        recipe: The recipe.
        data: Folder with a subfolder per preset, or (for `files`) the folder they are relative to; None: presets come
            from the hub.

    Returns:
        Name -> the task, or a copy per repeat with the rows of its subsample; repeat r has the seed r.

    Raises:
        LaminaError: If a file, a column or a label does not fit, or a part that is to be scored is missing.
    """
    loaded: dict[str, Task] = {}
    tasks: dict[str, list[Task]] = {}
    for name, body in recipe.tasks.items():
        key = body.model_dump_json(exclude=_TRAINING) + ("" if body.files is None else name)
        if key not in loaded:
            loaded[key] = load_task(name, body, data)
        task, part = loaded[key], recipe.evaluate
        if part is not None and part not in task.splits:
            raise ConfigError(
                f"recipe: evaluate is {part}, but task '{name}' has only {', '.join(task.splits)}. "
                "Give it a test part, set hold_out, or leave evaluate out."
            )
        tasks[name] = repeats(body, task)
    return tasks


def load_task(name: str, recipe: TaskRecipe, data: str | Path | None) -> Task:
    """Read the data of one task of a recipe, without its subsamples."""
    limits: dict[str, Any] = {"limit": recipe.limit}
    if recipe.limit_validation is not None:
        limits["limit_validation"] = recipe.limit_validation
    if recipe.preset is not None:
        folder = None if data is None else Path(data) / find_preset(recipe.preset)[0]
        task = Task.preset(recipe.preset, files=folder, **limits)
    else:
        root = Path(data or ".")
        parts: dict[str, Any] = {
            part: root / path if isinstance(path, str) else tuple(root / file for file in path)
            for part, path in (recipe.files or {}).items()
        }
        columns: dict[str, Any] = {
            key: getattr(recipe, key) for key in ("text", "text_pair", "label", "labels", "problem_type")
        }
        task = Task.from_files(recipe.kind, **parts, **columns, name=name, **limits)
    task = task.masked_lm() if recipe.masked_lm else task
    task = task.held_out() if recipe.hold_out else task
    if recipe.metric is None:
        return task
    if recipe.metric not in task.metrics:
        raise UnknownNameError(op=f"task {name}", got=recipe.metric, known=task.metrics, what="metric")
    return replace(task, metric=recipe.metric)


def repeats(recipe: TaskRecipe, task: Task) -> list[Task]:
    """The task itself, or a copy per repeat with the rows of its subsample; repeat r has the seed r."""
    sample = recipe.subsample
    if sample is None:
        return [task]
    return [task.subsample(**sample.size(), stratified=sample.stratified, seed=seed) for seed in range(sample.repeats)]


@dataclass(frozen=True)
class TaskStats:
    """What an estimate knows of a task: from its data, or as published.

    Attributes:
        kind: As of a task.
        problem_type: As of a task.
        labels: As of a task.
        train: Rows to learn from, in each repeat.
        validation: Rows to validate on.
        test: Rows to test on.
        tokens: Of a usual row.
    """

    kind: str
    problem_type: str
    labels: tuple[str, ...]
    train: int
    validation: int
    test: int
    tokens: float

    @classmethod
    def of(cls, name: str, recipe: TaskRecipe, data: str | Path | None) -> TaskStats:
        """What is known of a task of a recipe.

        Args:
            name: Of the task.
            recipe: Its part of the recipe.
            data: Folder of the data; None: published numbers stand for those of presets.

        Raises:
            LaminaError: If nothing is known of it.
        """
        if data is not None or recipe.preset is None:
            return cls._measured(repeats(recipe, load_task(name, recipe, data))[0])
        _, preset = find_preset(recipe.preset)
        texts = 2 if recipe.masked_lm and preset.columns[1] is not None else 1  # both of a pair become rows
        rows = {part: texts * count for part, count in preset.rows.items()}
        held = round(HELD_OUT * rows["train"])
        if recipe.hold_out or "validation" not in rows:
            rows = {"test": rows.get("validation", 0), **rows, "train": rows["train"] - held, "validation": held}
        train, validation = (
            count if limit is None else min(count, texts * limit)
            for count, limit in ((rows["train"], recipe.limit), (rows["validation"], recipe.limit_validation))
        )
        about = recipe.outline()
        if recipe.subsample is not None:
            classes, _ = kind_of(about.kind).row_classes(about, Split.of(()))
            train = SampleSize(**recipe.subsample.size()).count(len(classes), train)
        sizes = (train, validation, rows.get("test", 0), preset.length / texts)
        return cls(about.kind, about.problem_type, about.labels, *sizes)

    @classmethod
    def _measured(cls, task: Task) -> TaskStats:
        """Of a task that was read; words stand for tokens, of which there are about a third more."""
        train = task.split("train")
        texts = [train.texts[row] for row in range(0, len(train), max(1, len(train) // _LOOKED_AT))]
        pairs = [(text,) if isinstance(text, str) else text for text in texts]
        words = (
            0
            if kind_of(task.kind).processor != "tokenizer"
            else sum(len(part.split()) for pair in pairs for part in pair)
        )
        tokens = 2 + 4 / 3 * words / max(1, len(texts))
        sizes = {part: len(split) for part, split in task.splits.items()}
        return cls(
            task.kind, task.problem_type, tuple(task.labels), len(train), sizes.get("validation", 0),
            sizes.get("test", 0), max(3, tokens),
        )  # fmt: skip
