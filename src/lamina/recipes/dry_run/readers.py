"""Dry runs of recipes with readers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from lamina.errors import LaminaError
from lamina.recipes.costs import OWN, Cost, Meter, open_meter
from lamina.recipes.dry_run.facts import CACHED_BYTES, STATE_BYTES, TRAINING, DryRun, Facts
from lamina.recipes.members import plan
from lamina.tasks.kinds import MASKED
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lamina.recipes.members import Planned
    from lamina.recipes.schema import Recipe


def of_readers(recipe: Recipe, facts: Mapping[str, Facts], fit_options: Mapping[str, Any], notes: list[str]) -> DryRun:
    """Build every reader of a recipe on the meta device, and estimate what the run costs.

    Args:
        recipe: With readers.
        facts: Of its tasks.
        fit_options: Of `fit`.
        notes: What was assumed so far.

    Raises:
        LaminaError: If the recipe does not fit the model.
    """
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
