"""Inserted weights: how they start, what training makes of them, and what changed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lamina.editing.editable import convolution_blocks
from lamina.editing.insert import inserted_at_start
from lamina.editing.inserted_layer import PREFIX
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.stack import by_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

STATES = ("start", "trained", "change")
_OP = "inserted weights"


@dataclass(frozen=True, eq=False)
class InsertedWeight:
    """The weight of an inserted layer, on the CPU; of a convolution the middle of its kernel."""

    stack: str
    layer: int  # the block, from 1
    projection: str  # which it follows: its path within the block, such as "attention.self.query"
    start: Float[Tensor, "heads width width"]
    trained: Float[Tensor, "heads width width"]

    def states(self) -> dict[str, Float[Tensor, "heads width width"]]:
        """By their names: "start", "trained", and the difference of the two, "change"."""
        return dict(zip(STATES, (self.start, self.trained, self.trained - self.start), strict=True))


def inserted_weights(model: PreTrainedModel, start: PreTrainedModel | None = None) -> list[InsertedWeight]:
    """The weights of a model's inserted layers, before and after training, in the order of the model.

    Args:
        model: A model with inserted layers, trained since.
        start: The model as it was; None makes the weights again from the record of the edits, with its seeds.

    Raises:
        ConfigError: If a model has no inserted layers, or not those of the other.
    """
    before = {} if start is None else {name: parameter.detach() for name, parameter in start.named_parameters()}
    for edit in (edit for edit in edits(model) if edit.kind == "insert" and start is None):
        before |= inserted_at_start(model, edit)
    modules, places = by_path(model), _places(model)
    weights: list[InsertedWeight] = []
    for name, parameter in model.named_parameters():
        path, _, inserted = name.removesuffix(".weight").rpartition(".")
        if not inserted.startswith(PREFIX):
            continue
        if name not in before:
            raise ConfigError(f"{_OP}: '{name}' has no weight to start from; the two models have other layers.")
        block = max((place for place in places if f"{path}.".startswith(f"{place}.")), key=len)
        stack, layer = places[block]
        matrices = [_matrices(weight, modules[f"{path}.{inserted}"]) for weight in (before[name], parameter)]
        projection = path.removeprefix(f"{block}.") + f" ({inserted})" * (inserted != f"{PREFIX}0")
        weights.append(InsertedWeight(stack, layer, projection, *matrices))
    if not weights:
        raise ConfigError(f"{_OP}: the model has no inserted layers. Use insert_, train it, and do not merge it.")
    return weights


def _places(model: PreTrainedModel) -> dict[str, tuple[str, int]]:
    """Path of a block, or of what has a convolution -> its stack and its number, from 1."""
    blocks: dict[torch.nn.Module, tuple[str, int]] = {}
    with suppress(UnsupportedModelError):
        for name, stack in stacks(model).items():
            for layer, block in enumerate(stack.blocks, 1):
                blocks.setdefault(block, (name, layer))
    with suppress(UnsupportedModelError):
        name, convolutional = convolution_blocks(model, _OP)
        blocks |= {block: (name, layer) for layer, block in enumerate(convolutional, 1)}
    return {path: blocks[module] for path, module in by_path(model).items() if module in blocks}


def _matrices(weight: Tensor, layer: Any) -> Float[Tensor, "heads width width"]:
    weight = weight.detach().float().cpu()
    if layer.axes:
        weight = weight[(..., *[length // 2 for length in weight.shape[2:]])]
    return weight if weight.ndim == 3 else weight[None]


def diagonals(weights: Sequence[InsertedWeight], *, by_layer: bool = False) -> list[dict[str, Any]]:
    """The means of the diagonal and of all other entries, over the layers after each projection or layer by layer.

    Rows have "stack", "layer" (with `by_layer`), "projection", "layers" (how many), "start_diagonal", "start_rest",
    "trained_diagonal" and "trained_rest"; and, of the absolute change, "change_diagonal" and "change_rest".
    """
    groups: dict[tuple[Any, ...], list[InsertedWeight]] = {}
    for weight in weights:
        groups.setdefault((weight.stack, weight.layer if by_layer else None, weight.projection), []).append(weight)
    rows = []
    for (stack, layer, projection), group in groups.items():
        row = {"stack": stack, **({"layer": layer} if by_layer else {}), "projection": projection}
        rows.append({**row, "layers": len(group), **_means(group)})
    return rows


def _means(group: Sequence[InsertedWeight]) -> dict[str, float]:
    means: dict[str, float] = {}
    for state in STATES:
        values = [weight.states()[state] for weight in group]
        values = [value.abs() for value in values] if state == "change" else values
        for place, is_diagonal in (("diagonal", True), ("rest", False)):
            chosen = [value[:, torch.eye(value.shape[-1], dtype=torch.bool) == is_diagonal] for value in values]
            entries = torch.cat([value.flatten() for value in chosen])
            means[f"{state}_{place}"] = float(entries.mean()) if len(entries) else 0.0
    return means


def chosen_weight(
    weights: Sequence[InsertedWeight], layer: int | None = None, projection: str | None = None, stack: str | None = None
) -> InsertedWeight:
    """The first inserted weight of a stack, layer and projection; None is any.

    Raises:
        UnknownNameError: If there is none; it names those that there are.
    """
    for what, wanted in (("stack", stack), ("layer", layer), ("projection", projection)):
        fitting = [weight for weight in weights if wanted is None or _is_called(getattr(weight, what), wanted)]
        if not fitting:
            known = dict.fromkeys(str(getattr(weight, what)) for weight in weights)
            raise UnknownNameError(op=_OP, got=str(wanted), known=known, what=f"{what} with inserted layers")
        weights = fitting
    return weights[0]


def _is_called(name: object, wanted: object) -> bool:
    return name == wanted or str(name).endswith(f".{wanted}")
