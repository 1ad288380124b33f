"""Fold inserted layers into the projections and convolutions before them, back to the original architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lamina.editing.editable import check_editable, plain_weight
from lamina.editing.inserted_layer import InsertedLayer, layers_after, projections_with_layers, remove_layers_after
from lamina.editing.record import Edit, record, recorded
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.roles import family_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedModel

_OP = "merge_"


def merge_(model: PreTrainedModel) -> Edit:
    """Fold every inserted layer into the weight and bias of the projection or convolution before it, in place.

    Afterwards the model has its original parameters and names, and computes the same outputs up to rounding (1e-5 in
    float32).

    Args:
        model: A model with inserted layers.

    Returns:
        The edit, with the names of the changed and the removed parameters.

    Raises:
        ConfigError: If the model has no inserted layers; if one is not linear because its activation is on the output;
            if one is a convolution with a kernel above 1; if the model is quantised, compiled or offloaded.
        UnsupportedModelError: If a projection's weight is also used where the inserted layer does not apply, or the
            inserted layer mixes channels that a convolution keeps in separate groups.
    """
    check_editable(model, _OP)
    projections = projections_with_layers(model)
    if not projections:
        raise ConfigError(f"{_OP}: the model has no inserted layers; there is nothing to fold. Use insert_ first.")
    users: dict[nn.Parameter, list[str]] = {}  # parameter -> all names under which the model uses it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    changed: list[str] = []
    with torch.no_grad():
        weights = {path: _foldable_weight(model, path, projection, users) for path, projection in projections.items()}
        for path, weight in weights.items():
            changed += _fold(path, projections[path], weight)
    inserts = [edit for edit in recorded(model) if edit.kind == "insert"]
    names = {edit.stack for edit in inserts}
    layers = sorted({layer for edit in inserts for layer in edit.layers})
    stack = names.pop() if len(names) == 1 else "all"
    return record(model, Edit("merge", stack, tuple(layers), tuple(changed)))


def _foldable_weight(
    model: nn.Module, path: str, projection: nn.Module, users: dict[nn.Parameter, list[str]]
) -> Float[Tensor, "out ..."]:
    """Return the weight of the projection at `path`, after checking that its inserted layers can be folded into it.

    `users` is parameter -> all its names in the model.

    Raises:
        ConfigError: If an inserted layer cannot be folded.
        UnsupportedModelError: If the projection cannot absorb them, or other modules use its weight too.
    """
    layers = layers_after(projection)
    for layer in layers:
        _check_layer(model, path, projection, layer)
    weight = plain_weight(model, path, projection, _OP, convolution=layers[0].axes > 0)
    others = [name for name in users[projection.get_parameter("weight")] if name != f"{path}.weight"]
    if any(model.get_submodule(name.rpartition(".")[0]) is not projection for name in others):
        reason = f"'{path}.weight' is also used as {', '.join(others)}, which would change with it"
        hint = "Untie the weights first."
        raise UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)
    return weight


def _check_layer(model: nn.Module, path: str, projection: nn.Module, layer: InsertedLayer) -> None:
    """Raise ConfigError or UnsupportedModelError unless `layer` can be folded into the projection at `path`."""
    if layer.activation is not None and layer.placement == "output":
        raise ConfigError(
            f"{_OP}: the layer inserted after '{path}' has {layer.activation} on its output; only a linear layer "
            "folds into the projection before it. Insert with placement='weight'."
        )
    if layer.axes and layer.weight.shape[-1] > 1:
        raise ConfigError(
            f"{_OP}: the layer inserted after '{path}' is a convolution of kernel {layer.weight.shape[-1]}; folded, "
            "the kernel before it would grow, and the edges would differ. Insert with kernel=1."
        )
    groups = getattr(projection, "groups", 1)
    reason, hint = None, "Keep the inserted layers."
    if layer.axes and groups > 1:
        reason = f"'{path}' keeps {groups} groups of channels apart, and the layer inserted after it mixes them"
    if layer.content_only:
        reason = f"'{path}' also projects position embeddings (share_att_key), which inserted layers leave alone"
        hint = "Keep the inserted layers, or insert into 'ffn' only."
    if reason is not None:
        raise UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)


def _fold(path: str, projection: nn.Module, weight: Float[Tensor, "out ..."]) -> list[str]:
    """Fold the inserted layers after a projection into it; return the changed and the removed parameters' names."""
    bias = projection._parameters.get("bias")
    for layer in layers_after(projection):
        weight.copy_(_apply_to_columns(layer, weight.flatten(1)).reshape(weight.shape))
        if bias is not None:
            bias.copy_(_apply_to_columns(layer, bias.unsqueeze(-1)).squeeze(-1))
    names = [
        "weight",
        *(["bias"] if bias is not None else []),
        *(f"{name}.weight" for name in remove_layers_after(projection)),
    ]
    return [f"{path}.{name}" for name in names]


def _apply_to_columns(layer: InsertedLayer, columns: Float[Tensor, "out n"]) -> Float[Tensor, "out n"]:
    """Return an inserted layer applied to the columns of a weight `[out, n]`, computed in float64."""
    matrix = layer.applied_weight().double()
    if layer.axes:  # its kernel is 1
        matrix = matrix.flatten(1)
    if matrix.ndim == 2:
        return (matrix @ columns.double()).to(columns.dtype)
    per_head = columns.double().unflatten(0, matrix.shape[:2])
    return torch.bmm(matrix, per_head).flatten(0, 1).to(columns.dtype)
