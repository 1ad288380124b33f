"""Dry runs: build everything a recipe names on the meta device, and say what it would cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from lamina.costs import OWN, Cost, Meter, open_meter
from lamina.data.build import MASKED
from lamina.data.draw import Amount, Classes
from lamina.data.presets import find_preset
from lamina.data.split import HELD_OUT, Split
from lamina.errors import LaminaError
from lamina.members import load_task, plan, trials
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from lamina.data.presets import Preset
    from lamina.data.task import Task
    from lamina.members import Planned
    from lamina.recipe import DrawRecipe, Recipe, TaskRecipe

TRAINING = 3  # a training step takes about three times its forward's operations
STATE_BYTES = 4  # of a state's entries during a pass, and of a weight
CACHED_BYTES = 2  # of one in a cache of states, in half precision


@dataclass(frozen=True)
class DryRun:
    """What a recipe would do, and what that would cost; times and early stops are not known beforehand.

    Attributes:
        model: The base, its parameters, and where its config came from.
        readers: One row per task, method and setting, with how many readers share it ("count"), their parameters,
            operations per text and forward, and the bytes of states that one training step keeps.
        tasks: One row per task: rows to learn from and to validate on, tokens per text, readers, steps per epoch, and
            steps of the whole run (of all draws).
        flops: Operations of the whole run, at most: "base", "readers", and "total".
        weights_bytes: What weights take in single precision, and with them, for all that is trained at once, gradients
            and Adam's two moments.
        cache_bytes: What a cache of all states that are read would take, in half precision; 0 for a trained base.
        notes: What was assumed.
    """

    model: dict[str, Any]
    readers: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    flops: dict[str, int]
    weights_bytes: int
    cache_bytes: int
    notes: list[str]

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


def dry_run(recipe: Recipe, *, data: str | Path | None = None, **options: Any) -> DryRun:
    """Build everything a recipe names on the meta device, and estimate its cost.

    Args:
        recipe: From `load_recipe`.
        data: Folder of the data, as in `run_recipe`; None: published numbers stand for those of presets.
        **options: Override the recipe's `fit` options.

    Raises:
        LaminaError: If the recipe does not fit the model, or nothing is known of a task.
    """
    fit_options = {**recipe.fit, **options}
    notes: list[str] = []
    facts = {name: _facts(name, task, data) for name, task in recipe.tasks.items()}
    if data is None:
        notes.append("rows and lengths are as published; --data counts those of local files")
    planned = plan(recipe, facts, fit_options)
    epochs = {name: one.member.epochs for name, one in planned.items()}
    rates = {name: one.member.learning_rate for name, one in planned.items()}
    chosen = FitOptions.of({**fit_options, "epochs": epochs, "learning_rate": rates})
    masked = any(one.kind == MASKED for one in facts.values())
    meter, source = open_meter(recipe.model, recipe.architecture, revision=recipe.revision, masked=masked)
    if source != OWN:
        notes.append(f"the config of {recipe.model} is {source}")
    limit = chosen.max_length or meter.longest()
    facts = {name: replace(one, tokens=min(one.tokens, limit)) for name, one in facts.items()}
    costs = {name: _cost(meter, one, facts[one.task].tokens) for name, one in planned.items()}
    if not all(cost.counted for cost in costs.values()):
        notes.append("operations marked ~ are two per token and entry of a matrix, the others were counted")
    passes = _passes(recipe, planned, facts)
    return DryRun(
        model={"name": recipe.model, "parameters": meter.size(), "config": source, "trained": recipe.train_base},
        readers=_reader_rows(planned, costs, facts, chosen.batch_size),
        tasks=_task_rows(recipe, planned, facts, passes, chosen.batch_size),
        flops=_flops(recipe, passes, costs, meter),
        weights_bytes=_weights(recipe, costs, meter.size()),
        cache_bytes=0 if recipe.train_base else sum(_cached(one, costs) for one in passes),
        notes=notes,
    )


def _cost(meter: Meter, one: Planned, tokens: int) -> Cost:
    try:
        return meter.reader(one.member.reader, tokens)
    except LaminaError as error:
        error.add_note(f"reader {one.member.name}")
        raise


@dataclass(frozen=True)
class _Pass:
    """Texts that some readers go through together."""

    part: str
    task: str
    rows: int
    tokens: int
    members: tuple[Planned, ...]

    @property
    def epochs(self) -> int:
        """How often the longest of the readers goes through them."""
        return 1 if self.part == "test" else max(one.member.epochs or 0 for one in self.members)


def _passes(recipe: Recipe, planned: Mapping[str, Planned], facts: Mapping[str, Facts]) -> list[_Pass]:
    """Every set of texts, with its readers: those of one draw learn together, and all validate together."""
    found: dict[tuple[object, ...], list[Planned]] = {}
    for name, one in planned.items():
        task = recipe.tasks[one.task]
        texts = task.model_dump_json(exclude={"readers", "epochs", "learning_rate", "draw", "metric"})
        alone = name if recipe.separately else ""
        draw = "" if task.draw is None else task.draw.model_dump_json()
        found.setdefault(("train", texts, draw, one.trial, alone), []).append(one)
        found.setdefault(("validation", texts, alone), []).append(one)
        if recipe.evaluate is not None:
            found.setdefault(("test", texts, alone), []).append(one)
    passes = []
    for (part, *_), members in found.items():
        known = facts[members[0].task]
        rows = {"train": known.rows, "validation": known.validation, "test": known.test}[str(part)]
        passes.append(_Pass(str(part), members[0].task, rows, known.tokens, tuple(members)))
    return passes


def _flops(recipe: Recipe, passes: Iterable[_Pass], costs: Mapping[str, Cost], meter: Meter) -> dict[str, int]:
    base = readers = 0
    for one in passes:
        deepest: dict[str, int] = {}
        for member in one.members:
            cost = costs[member.member.name]
            deepest[cost.stack] = max(cost.layers[-1], deepest.get(cost.stack, 0))
            epochs = 1 if one.part == "test" else member.member.epochs or 0
            readers += (TRAINING if one.part == "train" else 1) * epochs * one.rows * cost.flops
        times = TRAINING if recipe.train_base and one.part == "train" else 1
        base += times * one.epochs * one.rows * meter.pass_flops(one.tokens, deepest)
    return {"base": base, "readers": readers, "total": base + readers}


def _weights(recipe: Recipe, costs: Mapping[str, Cost], base: int) -> int:
    sizes = [cost.parameters for cost in costs.values()]
    trained = max(sizes) if recipe.separately else sum(sizes)
    return STATE_BYTES * (4 * trained + (4 if recipe.train_base else 1) * base)


def _cached(one: _Pass, costs: Mapping[str, Cost]) -> int:
    """Bytes of the states of one set of texts, each layer that is read once."""
    if one.part == "test":
        return 0
    read = {
        (cost.stack, layer): cost.width for m in one.members for cost in [costs[m.member.name]] for layer in cost.layers
    }
    return one.rows * one.tokens * sum(read.values()) * CACHED_BYTES


def _reader_rows(
    planned: Mapping[str, Planned], costs: Mapping[str, Cost], facts: Mapping[str, Facts], batch_size: int
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, one in planned.items():
        settings = {key: value for key, value in one.member.settings.items() if key not in ("method", "seed", "draw")}
        key = json.dumps([one.task, one.member.settings["method"], settings])
        cost, known = costs[name], facts[one.task]
        states = min(batch_size, known.rows) * known.tokens * cost.width * cost.kept * STATE_BYTES
        start = {"task": one.task, "method": one.member.settings["method"], "settings": settings, "count": 0}
        row = rows.setdefault(key, start)
        row["count"] += 1
        row |= {"epochs": one.member.epochs, "layers": len(cost.layers), "parameters": cost.parameters}
        row |= {"flops_per_text": cost.flops, "counted": cost.counted, "states_bytes": states}
    return list(rows.values())


def _task_rows(
    recipe: Recipe, planned: Mapping[str, Planned], facts: Mapping[str, Facts], passes: list[_Pass], batch_size: int
) -> list[dict[str, Any]]:
    rows = []
    for name, known in facts.items():
        draw = recipe.tasks[name].draw
        steps = ceil(known.rows / batch_size)
        own = [one for one in passes if one.part == "train" and one.task == name]
        row = {"task": name, "kind": known.kind, "rows": known.rows, "validation": known.validation}
        row |= {"tokens": known.tokens, "draws": 1 if draw is None else draw.trials}
        row |= {"readers": sum(one.task == name for one in planned.values())}
        row |= {"steps_per_epoch": steps, "steps": sum(steps * one.epochs for one in own)}
        rows.append(row)
    return rows


def _facts(name: str, recipe: TaskRecipe, data: str | Path | None) -> Facts:
    if data is not None or recipe.preset is None:
        return _measured(trials(recipe, load_task(name, recipe, data))[0])
    _, preset = find_preset(recipe.preset)
    rows = dict(preset.rows)
    train = rows["train"]
    held = round(HELD_OUT * train)
    if recipe.hold_out or "validation" not in rows:
        rows = {"test": rows.get("validation", 0), **rows, "train": train - held, "validation": held}
    train = min(rows["train"], recipe.limit or rows["train"])
    validation = min(rows["validation"], recipe.limit_validation or rows["validation"])
    if recipe.draw is not None:
        train = _drawn(recipe.draw, train, preset)
    return Facts(preset.kind, preset.problem, preset.labels, train, validation, rows.get("test", 0), preset.length)


def _drawn(draw: DrawRecipe, rows: int, preset: Preset) -> int:
    """Rows of a draw, as the task itself counts them."""
    classes = Classes.of(preset.kind, preset.problem, preset.labels, Split((), ())).names
    return Amount(**draw.size()).count(len(classes), rows)


def _measured(task: Task) -> Facts:
    """Facts of a task that was read; words stand for tokens, of which there are about a third more."""
    texts = task.split("train").texts
    words = sum(len(part.split()) for text in texts for part in ((text,) if isinstance(text, str) else text))
    tokens = max(3, round(4 / 3 * words / max(1, len(texts))) + 2)
    sizes = {part: len(split) for part, split in task.splits.items()}
    return Facts(
        task.kind, task.problem, task.labels, sizes["train"], sizes.get("validation", 0), sizes.get("test", 0), tokens
    )
