"""Dry runs of recipes that fine-tune the model itself."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers

from lamina.errors import LaminaError
from lamina.layers import stacks
from lamina.layers.discovery import same_stacks
from lamina.recipes.costs import OWN, RowCost, RowSize, open_config, row_cost
from lamina.recipes.dry_run.facts import STATE_BYTES, TRAINING, DryRun, Facts
from lamina.recipes.methods import apply_edits, plan_methods
from lamina.store import empty_model
from lamina.store.models import name_classes
from lamina.tasks.kinds import GENERATION, IMAGE, SEQUENCE, TOKEN
from lamina.train.finetune import HEADS
from lamina.train.options import TuneOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.recipes.methods import Variant
    from lamina.recipes.schema import Recipe


_BY_TOKEN = ("insert", "reinit", "freeze", "merge")  # edits that at most add matrices through which every token goes

_IN_PLACE = ("insert", "reinit", "freeze")  # edits after which the blocks are where they were


class Plain(NamedTuple):
    """A model on the meta device with a head for a task; `key` tells which."""

    key: tuple[object, ...]
    model: PreTrainedModel
    parameters: int


class Edited(NamedTuple):
    """What the edits of a variant do to a model, whatever its head.

    Attributes:
        key: The same for models that do the same products of matrices.
        model: Edited, on the meta device.
        plain: The same before the edits.
        added: Parameters that it has more.
        frozen: How many are not trained.
        deep: Whether one in a layer is trained, so that training goes back through the layers.
        by_token: Whether every token of a text goes once through each added matrix.
    """

    key: tuple[object, ...]
    model: PreTrainedModel
    plain: Plain
    added: int
    frozen: int
    deep: bool
    by_token: bool


def of_methods(recipe: Recipe, facts: Mapping[str, Facts], fit_options: Mapping[str, Any], notes: list[str]) -> DryRun:
    """Edit the model of every fine-tuning run of a recipe on the meta device, and estimate what the run costs.

    Args:
        recipe: With methods.
        facts: Of its tasks.
        fit_options: Of `finetune`.
        notes: What was assumed so far.

    Raises:
        LaminaError: If an edit or an option does not fit the model.
    """
    variants = plan_methods(recipe, fit_options)
    config, source = open_config(recipe.model, recipe.architecture, revision=recipe.revision)
    if source != OWN:
        notes.append(f"the config of {recipe.model} is {source}")
    rows = _rows(recipe, variants, facts, config)
    if not all(row["counted"] for row in rows):
        notes.append("operations marked ~ are counted but for the head, which takes two per entry of its matrices")
    if any(row["input"]["target"] for row in rows):
        notes.append("texts that are written count at their longest; to write one takes a pass of the decoder per beam")
    training, scoring = (sum(row[key] for row in rows) for key in ("training_flops", "scoring_flops"))
    return DryRun(
        model={"name": recipe.model, "parameters": rows[0]["before"], "config": source, "trained": True},
        readers=[],
        tasks=_task_rows(recipe, rows, facts),
        flops={"training": training, "scoring": scoring, "total": training + scoring},
        weights_bytes=max(row["memory_bytes"] for row in rows),
        cache_bytes=0,
        notes=notes,
        methods=rows,
    )


def _rows(
    recipe: Recipe, variants: Mapping[str, Variant], facts: Mapping[str, Facts], config: PretrainedConfig
) -> list[dict[str, Any]]:
    """One row per task, method and setting."""
    rows: dict[str, dict[str, Any]] = {}
    for name, one in variants.items():
        settings = {key: value for key, value in one.settings.items() if key not in ("method", "seed", "draw")}
        key = json.dumps([one.task, one.settings["method"], settings])
        if key not in rows:
            start = {"task": one.task, "method": one.settings["method"], "settings": settings, "count": 0}
            plain = plain_model(config, facts[one.task])
            try:
                edited = edited_model(plain, one)
            except LaminaError as error:
                error.add_note(f"run {name}")
                raise
            size = row_size(facts[one.task], TuneOptions.of(one.options), config)
            rows[key] = start | _row(plain, edited, size, one, facts[one.task])
        rows[key]["count"] += 1
    for row in rows.values():
        tested = facts[row["task"]].test if recipe.evaluate is not None else 0
        row["training_flops"] = row["count"] * row.pop("learnt") * row["flops_per_row"] * row.pop("passes")
        row["scoring_flops"] = row["count"] * (row.pop("scored") + tested) * row.pop("flops_per_scored_row")
    return list(rows.values())


def _row(plain: Plain, edited: Edited, size: RowSize, variant: Variant, known: Facts) -> dict[str, Any]:
    """What one run does and costs."""
    options = TuneOptions.of(variant.options)
    cost = cost_of(plain, edited, size)
    steps, epochs, learnt = _steps(options, known.rows)
    beams = options.beams if size.target else 1
    moments = (1 if options.momentum else 0) if options.optimizer == "sgd" else 2
    parameters = plain.parameters + edited.added
    return {
        "input": size._asdict(),
        "steps_per_epoch": _steps_per_epoch(options, known.rows),
        "steps": steps,
        "epochs": epochs,
        "before": plain.parameters,
        "parameters": parameters,
        "trained": parameters - edited.frozen,
        "flops_per_row": cost.flops,
        "counted": cost.counted,
        "memory_bytes": STATE_BYTES * (parameters + (1 + moments) * (parameters - edited.frozen)),
        "learnt": learnt,
        "passes": TRAINING if edited.deep else 1,
        "scored": epochs * known.validation,
        "flops_per_scored_row": cost.flops + (beams - 1) * cost.decoder,
    }


def _steps_per_epoch(options: TuneOptions, rows: int) -> int:
    return ceil(ceil(rows / options.batch_size) / options.accumulate)


def _steps(options: TuneOptions, rows: int) -> tuple[int, int, int]:
    """Steps, epochs (the last one perhaps a part) and rows of a run."""
    each = _steps_per_epoch(options, rows)
    if options.max_steps is None:
        return options.epochs * each, options.epochs, options.epochs * rows
    whole, rest = divmod(options.max_steps, each)
    return options.max_steps, whole + bool(rest), whole * rows + rest * options.batch_size * options.accumulate


def row_size(known: Facts, options: TuneOptions, config: PretrainedConfig) -> RowSize:
    """How large the rows of a task are for a model.

    Args:
        known: Of the task.
        options: Of the run.
        config: Of the model.
    """
    if known.kind == IMAGE:
        side = getattr(config, "image_size", 224)
        height, width = (side, side) if isinstance(side, int) else side
        return RowSize(pixels=(getattr(config, "num_channels", 3), height, width))
    longest = options.max_length or getattr(config, "max_position_embeddings", None) or known.tokens
    target = options.max_target_length if known.kind in GENERATION else 0
    return RowSize(min(known.tokens, longest), target)


def _task_rows(recipe: Recipe, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Facts]) -> list[dict[str, Any]]:
    found = []
    for name, known in facts.items():
        draw, own = recipe.tasks[name].draw, [row for row in rows if row["task"] == name]
        row = {"task": name, "kind": known.kind, "rows": known.rows, "validation": known.validation}
        row |= {"input": own[0]["input"], "draws": 1 if draw is None else draw.trials}
        row |= {"runs": sum(one["count"] for one in own), "steps_per_epoch": own[0]["steps_per_epoch"]}
        row |= {"steps": sum(one["count"] * one["steps"] for one in own)}
        found.append(row)
    return found


# Models are built, edited and counted once per process: a recipe has many runs of few shapes.

_plain: dict[tuple[object, ...], Plain] = {}
_edited: dict[tuple[object, ...], Edited] = {}
_counted: dict[tuple[object, ...], RowCost] = {}


def plain_model(config: PretrainedConfig, known: Facts) -> Plain:
    """A model with the head for a task.

    Args:
        config: Of the model; stays as it is.
        known: Of the task.
    """
    labels = known.labels if known.kind in (SEQUENCE, TOKEN, IMAGE) else ()
    key = (config.to_json_string(use_diff=False), HEADS[known.kind], len(labels))
    if key not in _plain:
        own = copy.deepcopy(config)
        if labels:
            name_classes(own, labels)
        model = empty_model(own, getattr(transformers, HEADS[known.kind]))
        _plain[key] = Plain(key, model, model.num_parameters())
    return _plain[key]


def edited_model(plain: Plain, variant: Variant) -> Edited:
    """What a variant's edits do to a model.

    Args:
        plain: The model; stays as it is.
        variant: Its edits.

    Raises:
        LaminaError: If an edit does not fit the model.
    """
    *family, _ = plain.key
    key = (*family, json.dumps(variant.edits))
    if key not in _edited:
        model = copy.deepcopy(plain.model)
        _apply(model, plain, variant)
        named = tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
        frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        _edited[key] = Edited(
            key=(*plain.key, named),
            model=model,
            plain=plain,
            added=model.num_parameters() - plain.parameters,
            frozen=frozen,
            deep=not frozen or _trains_layers(model),
            by_token=all(name in _BY_TOKEN for name, _ in variant.edits) and _once(plain.model),
        )
    return _edited[key]


def _apply(model: PreTrainedModel, plain: Plain, variant: Variant) -> None:
    """Edit a copy of a model, edit by edit."""
    for number, edit in enumerate(variant.edits):
        if all(name in _IN_PLACE for name, _ in variant.edits[:number]):
            same_stacks(plain.model, model)  # to look for them again is most of the work
        apply_edits(model, replace(variant, edits=(edit,)))


def _once(model: PreTrainedModel) -> bool:
    """Whether no block serves as several layers."""
    return all(len(set(stack.blocks)) == stack.depth for stack in stacks(model).values())


def _trains_layers(model: PreTrainedModel) -> bool:
    parts = {part for stack in stacks(model).values() for part in (*stack.run, *stack.blocks)}
    return any(parameter.requires_grad for part in parts for parameter in part.parameters())


def cost_of(plain: Plain, edited: Edited, size: RowSize) -> RowCost:
    """Operations of an edited model over one row: those of the model before, and what the edits add.

    Args:
        plain: The model with the head for a task.
        edited: What the edits do to it, perhaps seen on a model with more or fewer classes.
        size: Of the row.
    """
    base = _count(plain.key, plain.model, size)
    if not edited.added:
        return base
    if edited.by_token and not size.target and size.pixels is None:
        return base._replace(flops=base.flops + 2 * edited.added * size.tokens)
    before = _count(edited.plain.key, edited.plain.model, size)
    after = _count(edited.key, edited.model, size)
    more = (after.flops - before.flops, after.decoder - before.decoder)
    return RowCost(base.flops + more[0], base.decoder + more[1], base.counted)


def _count(key: tuple[object, ...], model: PreTrainedModel, size: RowSize) -> RowCost:
    if (key, size) not in _counted:
        _counted[key, size] = row_cost(model, size)
    return _counted[key, size]
