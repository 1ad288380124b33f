"""Fold inserted layers into the projections and convolutions before them, back to the original architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from lamina.editing.editable import check_editable, plain_weight
from lamina.editing.inserted_layer import InsertedLayer, layers_after, remove_layers_after, unmark_states_of
from lamina.editing.record import Edit, record, recorded
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.discovery import stacks
from lamina.layers.roles import ROLES, OwnPositions, family_of, modules_at
from lamina.layers.stack import by_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float
    from transformers import PreTrainedModel

_OP = "merge_"


def merge_(model: PreTrainedModel) -> Edit:
    """Fold every inserted layer into the weight and bias of the projection or convolution before it, in place.

    Afterwards the model has its original parameters and names, and computes the same outputs up to rounding (1e-5 in
    float32). Layers on the input of a feed-forward network are folded into its first projections.

    In a model such as DeBERTa-v3, the query and key projections also project position embeddings (`share_att_key`).
    There, every block gets separate projections for positions, with the weights from before the merge. The model's
    config says so (`share_att_key=False`), and plain transformers loads the result.

    Args:
        model: A model with inserted layers. If an error is raised, it is unchanged.

    Returns:
        The edit, with the names of the changed, added and removed parameters.

    Raises:
        ConfigError: If the model has no inserted layers, or has lost some; if one is not linear because its activation
            is on the output; if one is a convolution with a kernel above 1; if the model cannot be edited (quantised,
            compiled, offloaded, with adapters).
        UnsupportedModelError: If a projection's weight is computed from others (pruning); if another module uses the
            weight too; if the projection also projects position embeddings, and the family cannot have separate
            projections for them; or if the inserted layer mixes channels that a grouped convolution keeps apart.
    """
    check_editable(model, _OP)
    projections = {path: module for path, module in model.named_modules() if layers_after(module)}
    if not projections:
        raise ConfigError(f"{_OP}: the model has no inserted layers; there is nothing to fold. Use insert_ first.")
    users: dict[nn.Parameter, list[str]] = {}  # parameter -> all names under which the model uses it
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    readers = _projections_after_norms(model)
    changed: list[str] = []
    with torch.no_grad():
        weights = {
            path: _foldable_weights(model, path, projection, readers.get(projection, {path: projection}), users)
            for path, projection in projections.items()
        }
        if any(layer.content_only for projection in projections.values() for layer in layers_after(projection)):
            changed += _untie_positions(model)
        for path, of_path in weights.items():
            projection = projections[path]
            if projection in readers:
                changed += _fold_into_projections(path, projection, of_path)
            else:
                changed += _fold(path, projection, of_path[path])
    inserts = [edit for edit in recorded(model) if edit.kind == "insert"]
    names = {edit.stack for edit in inserts}
    layers = sorted({layer for edit in inserts for layer in edit.layers})
    stack = names.pop() if len(names) == 1 else "all"
    return record(model, Edit("merge", stack, tuple(layers), tuple(changed)))


def _projections_after_norms(model: PreTrainedModel) -> dict[nn.Module, dict[str, nn.Module]]:
    """Return norm -> (path -> projection), for norms that feed nothing but a feed-forward network's first projections.

    The result is {} if `ROLES` names no such norm for the family. Raises UnsupportedModelError if a path that it names
    is not in a block.
    """
    family, readers = family_of(model), dict[nn.Module, dict[str, nn.Module]]()
    roles = ROLES.get(family)
    if roles is None or roles.ffn_norm is None:
        return readers
    paths = {module: path for path, module in by_path(model).items()}
    for block in (block for stack in stacks(model).values() for block in stack.blocks):
        for norm in modules_at(block, roles.ffn_norm, family=family, op=_OP):
            modules = [module for path in roles.ffn_in for module in modules_at(block, path, family=family, op=_OP)]
            readers[norm] = {paths[module]: module for module in modules}
    return readers


def _foldable_weights(
    model: nn.Module,
    path: str,
    projection: nn.Module,
    targets: Mapping[str, nn.Module],
    users: dict[nn.Parameter, list[str]],
) -> dict[str, Float[Tensor, "out ..."]]:
    """Check that the layers inserted after the module at `path` can be folded; return the weights that absorb them.

    The result is path -> weight: the parameter itself or a view of it, to be changed in place.

    `projection` is the module at `path`, a projection, convolution or norm. `targets` is path -> module whose weights
    change: it itself, or the projections that read a norm's output. `users` is parameter -> all its names.

    Raises:
        ConfigError: If an inserted layer cannot be folded.
        UnsupportedModelError: If a module cannot absorb them, or other modules use its weight too.
    """
    layers = layers_after(projection)
    for layer in layers:
        _check_layer(model, path, projection, layer)
    weights: dict[str, Tensor] = {}
    for name, module in targets.items():
        weights[name] = plain_weight(model, name, module, _OP, convolution=layers[0].axes > 0)
        others = [user for user in users[module.get_parameter("weight")] if user != f"{name}.weight"]
        if any(model.get_submodule(other.rpartition(".")[0]) is not module for other in others):
            reason = f"'{name}.weight' is also used as {', '.join(others)}, which would change with it"
            hint = "Untie the weights first."
            raise UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)
    return weights


def _untie_positions(model: PreTrainedModel) -> list[str]:
    """Give each block its own weights for projecting position embeddings, copied from those it shared so far.

    The query and key projections are about to be merged with inserted layers, which positions must not pass through. So
    positions get copies of the projections as they are now, and the config says so. Returns the names of the new
    parameters. Raises UnsupportedModelError, before any change, if a path of the family's row is not in a block.
    """
    family = family_of(model)
    attention = ROLES[family].attention
    shared_by, paths = str(attention.positions_shared_by), {module: path for path, module in by_path(model).items()}
    names: list[str] = []
    places: list[tuple[OwnPositions, nn.Module, nn.Module]] = []
    for block in (block for stack in stacks(model).values() for block in stack.blocks):
        for own in attention.positions_own:
            (shared,) = modules_at(block, getattr(attention, own.role), family=family, op=_OP)
            (owner,) = modules_at(block, own.path.rpartition(".")[0], family=family, op=_OP)
            places.append((own, shared, owner))
    for own, shared, owner in places:
        setattr(owner, shared_by, False)
        unmark_states_of(owner)
        if own.value not in (getattr(model.config, own.setting, None) or ()):
            continue
        weight = shared.get_parameter("weight")
        # without initial values, which would be drawn from torch's global generator
        copy = skip_init(nn.Linear, weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
        copy.load_state_dict({key: shared.get_parameter(key) for key in ("weight", "bias")})
        copy.requires_grad_(weight.requires_grad)
        name = own.path.rpartition(".")[2]
        owner.add_module(name, copy.train(shared.training))
        names += [f"{paths[owner]}.{name}.{key}" for key in ("weight", "bias")]
    setattr(model.config, shared_by, False)
    return names


def _check_layer(model: nn.Module, path: str, projection: nn.Module, layer: InsertedLayer) -> None:
    """Raise an error unless `layer` can be folded into `projection`, which is at `path` of the model.

    It is a ConfigError for a layer that is not linear or has a kernel above 1, else an UnsupportedModelError.
    """
    after = f"{_OP}: the layer inserted after '{path}'"
    if layer.activation is not None and layer.placement == "output":
        rule = "only a linear layer folds into the projection before it"
        raise ConfigError(f"{after} has {layer.activation} on its output; {rule}. Insert with placement='weight'.")
    if layer.axes and (kernel := layer.weight.shape[-1]) > 1:
        rule = "folded, the kernel before it would grow, and the edges would differ"
        raise ConfigError(f"{after} is a convolution of kernel {kernel}; {rule}. Insert with kernel=1.")
    reason, hint = None, "Keep the inserted layers."
    groups = getattr(projection, "groups", 1)
    if layer.axes and groups > 1:
        reason = f"'{path}' keeps {groups} groups of channels apart, and the layer inserted after it mixes them"
    if layer.content_only and not ROLES[family_of(model)].attention.positions_own:
        reason = f"'{path}' also projects position embeddings, which inserted layers do not change"
        hint = "Keep the inserted layers, or insert into 'ffn' only."
    if reason is not None:
        raise UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)


def _fold(path: str, projection: nn.Module, weight: Float[Tensor, "out ..."]) -> list[str]:
    """Fold the inserted layers after the projection at `path` into its `weight` and bias, in place, and remove them.

    Returns the names of the changed and the removed parameters.
    """
    bias = projection._parameters.get("bias")
    for layer in layers_after(projection):
        weight.copy_(_apply_to_columns(layer, weight.flatten(1)).reshape(weight.shape))
        if bias is not None:
            bias.copy_(_apply_to_columns(layer, bias.unsqueeze(-1)).squeeze(-1))
    names = ["weight", *(["bias"] if bias is not None else [])]
    names += [f"{name}.weight" for name in remove_layers_after(projection)]
    return [f"{path}.{name}" for name in names]


def _fold_into_projections(path: str, norm: nn.Module, weights: Mapping[str, Float[Tensor, "out in"]]) -> list[str]:
    """Fold the layers inserted after the norm at `path` into the projections that read it, and remove the layers.

    `weights` is name of a projection -> weight. Returns the names of the changed and the removed parameters.
    """
    for weight in weights.values():
        folded = weight.double()
        for layer in reversed(layers_after(norm)):
            folded = folded @ layer.applied_weight().double()
        weight.copy_(folded.to(weight.dtype))
    removed = [f"{path}.{name}.weight" for name in remove_layers_after(norm)]
    return [*(f"{name}.weight" for name in weights), *removed]


def _apply_to_columns(layer: InsertedLayer, columns: Float[Tensor, "out n"]) -> Float[Tensor, "out n"]:
    """Return an inserted layer's outputs for a weight's columns, computed in float64, in the dtype of `columns`."""
    matrix = layer.applied_weight().double()
    if layer.axes:  # its kernel is 1
        matrix = matrix.flatten(1)
    if matrix.ndim == 2:
        return (matrix @ columns.double()).to(columns.dtype)
    per_head = columns.double().unflatten(0, matrix.shape[:2])
    return torch.bmm(matrix, per_head).flatten(0, 1).to(columns.dtype)
