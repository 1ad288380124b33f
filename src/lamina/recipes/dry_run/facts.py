"""What dry runs know of a task beforehand, and what they give."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

from lamina.recipes.members import load_task, trials
from lamina.tasks.kinds import IMAGE, MASKED, MASKED_LABELS
from lamina.tasks.presets import find_preset
from lamina.tasks.sampling import Amount, Classes
from lamina.tasks.split import HELD_OUT, Split

if TYPE_CHECKING:
    from pathlib import Path

    from lamina.recipes.schema import DrawRecipe, TaskRecipe
    from lamina.tasks.task import Task

TRAINING = 3  # a training step takes about three times its forward's operations
STATE_BYTES = 4  # of a state's entries during a pass, and of a weight
CACHED_BYTES = 2  # of one in a cache of states, in half precision


@dataclass(frozen=True)
class DryRun:
    """What a recipe would do, and what that would cost; times and early stops are not known beforehand.

    Attributes:
        model: The base, its parameters, and where its config came from.
        readers: One row per task, method and setting, with how many readers share it ("count"), their parameters,
            operations per text and forward, and the bytes of states that one training step keeps. Of a recipe that
            fine-tunes the model itself, none.
        tasks: One row per task: rows to learn from and to validate on, tokens per text, readers or fine-tuning runs,
            steps per epoch, and steps of the whole run (of all draws).
        flops: Operations of the whole run, at most: "base", "readers", and "total"; or "training", "scoring" and
            "total".
        weights_bytes: What weights take in single precision, and with them, for all that is trained at once, gradients
            and the optimizer's moments.
        cache_bytes: What a cache of all states that are read would take, in half precision; 0 for a trained base.
        notes: What was assumed.
        methods: One row per task, fine-tuned method and setting, with how many runs share it ("count"): steps of each,
            parameters before and after the edits, how many are trained, operations per row and forward, operations
            of all runs, and the bytes of weights, gradients and moments.
    """

    model: dict[str, Any]
    readers: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    flops: dict[str, int]
    weights_bytes: int
    cache_bytes: int
    notes: list[str]
    methods: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What a dry run knows of a task: from its data, or as published.

    Attributes:
        kind: As of a task.
        problem: As of a task.
        labels: As of a task.
        rows: To learn from, in each draw.
        validation: To validate on.
        test: To test on, 0 if nobody asks.
        tokens: Of a typical text.
    """

    kind: str
    problem: str
    labels: tuple[str, ...]
    rows: int
    validation: int
    test: int
    tokens: int


def facts_of(name: str, recipe: TaskRecipe, data: str | Path | None) -> Facts:
    """What is known of a task of a recipe.

    Args:
        name: Of the task.
        recipe: Its part of the recipe.
        data: Folder of the data; None: published numbers stand for those of presets.

    Raises:
        LaminaError: If nothing is known of it.
    """
    if data is not None or recipe.preset is None:
        return _measured(trials(recipe, load_task(name, recipe, data))[0])
    _, preset = find_preset(recipe.preset)
    what = (preset.kind, preset.problem, preset.class_names)
    texts = 1
    if recipe.masked_lm:
        what = (MASKED, "classification", MASKED_LABELS)
        texts = 1 if preset.columns[1] is None else 2  # of a pair both become rows
    rows = {part: texts * count for part, count in preset.rows.items()}
    train = rows["train"]
    held = round(HELD_OUT * train)
    if recipe.hold_out or "validation" not in rows:
        rows = {"test": rows.get("validation", 0), **rows, "train": train - held, "validation": held}
    train, validation = (
        count if limit is None else min(count, texts * limit)
        for count, limit in ((rows["train"], recipe.limit), (rows["validation"], recipe.limit_validation))
    )
    if recipe.draw is not None:
        train = _drawn(recipe.draw, train, *what)
    return Facts(*what, train, validation, rows.get("test", 0), ceil(preset.length / texts))


def _drawn(draw: DrawRecipe, rows: int, kind: str, problem: str, labels: tuple[str, ...]) -> int:
    """Rows of a draw, as the task itself counts them."""
    classes = Classes.of(kind, problem, labels, Split((), ())).names
    return Amount(**draw.size()).count(len(classes), rows)


def _measured(task: Task) -> Facts:
    """Facts of a task that was read; words stand for tokens, of which there are about a third more."""
    texts = () if task.kind == IMAGE else task.split("train").texts
    words = sum(len(part.split()) for text in texts for part in ((text,) if isinstance(text, str) else text))
    tokens = max(3, round(4 / 3 * words / max(1, len(texts))) + 2)
    sizes = {part: len(split) for part, split in task.splits.items()}
    return Facts(
        task.kind, task.problem, task.labels, sizes["train"], sizes.get("validation", 0), sizes.get("test", 0), tokens
    )
