"""Fold inserted layers into the projections and convolutions before them: same function, original architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lamina.editing.checks import check_editable
from lamina.editing.inserted import InsertedLayer, all_inserted, detach, inserted_in
from lamina.editing.record import Edit, edits, record
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.roles import convolution_weight, family_of, linear_weight

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedModel

_OP = "merge_"


def merge_(model: PreTrainedModel) -> Edit:
    """Fold every inserted layer into the weight and bias of the projection or convolution before it, in place.

    The model has its original parameters and names again and computes the same, up to rounding (1e-5 in float32).

    Args:
        model: A model with inserted layers.

    Returns:
        The record: the names of the changed and of the removed parameters.

    Raises:
        ConfigError: If the model has no inserted layers, one is not linear because its activation is on the output,
            one is a convolution of a kernel above 1, the model is quantised, compiled or offloaded, or a bank reads it.
        UnsupportedModelError: If a projection serves more than the inserted layer sees, or a convolution keeps
            groups of channels apart that the inserted layer mixes.
    """
    check_editable(model, _OP)
    projections = all_inserted(model)
    if not projections:
        raise ConfigError(f"{_OP}: the model has no inserted layers; there is nothing to fold. Use insert_ first.")
    users: dict[int, list[str]] = {}  # by a parameter's identity, the names under which it is used
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name)
    for path, projection in projections.items():
        _check(model, path, projection, users)
    changed: list[str] = []
    with torch.no_grad():
        for path, projection in projections.items():
            changed += _fold(path, projection, _weight_of(model, path, projection))
    inserts = [edit for edit in edits(model) if edit.kind == "insert"]
    names = {edit.stack for edit in inserts}
    layers = sorted({layer for edit in inserts for layer in edit.layers})
    stack = names.pop() if len(names) == 1 else "all"
    return record(model, Edit("merge", stack, tuple(layers), tuple(changed)))


def _check(model: nn.Module, path: str, projection: nn.Module, users: dict[int, list[str]]) -> None:
    for layer in inserted_in(projection):
        _check_layer(model, path, projection, layer)
    _weight_of(model, path, projection)
    others = [name for name in users[id(projection._parameters["weight"])] if name != f"{path}.weight"]
    if any(model.get_submodule(name.rpartition(".")[0]) is not projection for name in others):
        reason = f"'{path}.weight' is also used as {', '.join(others)}, which would change with it"
        hint = "Untie the weights first."
        raise UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)


def _check_layer(model: nn.Module, path: str, projection: nn.Module, layer: InsertedLayer) -> None:
    if not layer.linear:
        raise ConfigError(
            f"{_OP}: the layer inserted after '{path}' has {layer.activation} on its output; only a linear layer "
            "folds into the projection before it. Keep the model as it is, or insert with placement='weight'."
        )
    if any(size > 1 for size in layer.kernel):
        raise ConfigError(
            f"{_OP}: the layer inserted after '{path}' is a convolution of kernel {layer.kernel[0]}; folded, the "
            "kernel before it would have to grow, and even so the edges would differ. "
            "Keep the model as it is, or insert with kernel=1."
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


def _weight_of(model: nn.Module, path: str, projection: nn.Module) -> Float[Tensor, "out ..."]:
    weight = linear_weight(projection)
    if weight is None:
        weight = convolution_weight(projection)
    if weight is None:
        reason = f"'{path}' is no plain linear map or convolution any more"
        hint = "Undo what changed it since the insertion."
        raise UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)
    return weight


def _fold(path: str, projection: nn.Module, weight: Float[Tensor, "out ..."]) -> list[str]:
    bias = projection._parameters.get("bias")
    for layer in inserted_in(projection):
        weight.copy_(_through(layer, weight.flatten(1)).reshape(weight.shape))
        if bias is not None:
            bias.copy_(_through(layer, bias.unsqueeze(-1)).squeeze(-1))
    removed = [
        f"{path}.{name}.weight" for name, child in projection.named_children() if isinstance(child, InsertedLayer)
    ]
    detach(projection)
    return [f"{path}.weight", *([f"{path}.bias"] if bias is not None else []), *removed]


def _through(layer: InsertedLayer, columns: Float[Tensor, "out n"]) -> Float[Tensor, "out n"]:
    """The layer applied to columns of a projection, in float64 and back."""
    matrix = layer.applied_weight().double()
    if layer.axes:  # its kernel is 1
        matrix = matrix.flatten(1)
    if matrix.ndim == 2:
        return (matrix @ columns.double()).to(columns.dtype)
    per_head = columns.double().unflatten(0, matrix.shape[:2])
    return torch.bmm(matrix, per_head).flatten(0, 1).to(columns.dtype)
