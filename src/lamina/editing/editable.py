"""Select the blocks or convolutions that an edit changes, and refuse models that cannot be edited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lamina.editing.record import check_inserted
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import default_stack, select
from lamina.layers.adapters import check_no_adapters
from lamina.layers.preserve import is_compiled
from lamina.layers.roles import convolution_weight, convolutions_of, family_of, linear_weight, modules_at
from lamina.layers.selectors import is_all
from lamina.layers.stack import by_path, own_state
from lamina.layers.wrappers import checked_model

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack


_QUANTISED = "the model is quantised; packed weights cannot be edited. Edit (and merge_) it first."


def check_editable(model: PreTrainedModel, op: str) -> None:
    """Raise ConfigError, whose message begins with `op`, unless a model can be edited in place.

    A model cannot be edited if it is compiled, quantised, offloaded, has adapters, has lost inserted layers, or is not
    a transformers model.
    """
    checked_model(model, op)
    config = getattr(model, "config", None)
    compiled = any(map(is_compiled, model.modules()))
    quantizers = getattr(model, "hf_quantizer", None), getattr(config, "quantization_config", None)
    is_quantized = getattr(model, "is_quantized", False) or any(quantizer is not None for quantizer in quantizers)
    is_placed = hasattr(model, "hf_device_map") or any(hasattr(part, "_hf_hook") for part in model.modules())
    is_offloaded = is_placed and any(parameter.is_meta for parameter in model.parameters())
    problems = (
        (compiled, "the model is compiled, and would still run the old layers. Edit it first, then compile it."),
        (not hasattr(config, "to_dict"), f"got a {type(model).__name__}; edit the transformers model inside it."),
        (is_quantized, _QUANTISED),
        (is_offloaded, "parts of the model are offloaded; an edit there would be lost. Load all of it into memory."),
    )
    for is_problem, text in problems:
        if is_problem:
            raise ConfigError(f"{op}: {text}")
    check_no_adapters(model, op)
    check_inserted(model, op)


def select_blocks(model: PreTrainedModel, layers: object, stack: str | None, op: str) -> tuple[LayerStack, list[int]]:
    """Return the stack that an edit changes, and its layers in ascending order; layer i is `stack.blocks[i - 1]`.

    Args:
        model: The model.
        layers: A layer selector; "all" is every block.
        stack: Name of the stack. None: the only one, or the encoder.
        op: The operation that error messages begin with.

    Raises:
        ConfigError: If `layers` is no valid selector or selects layer 0, the model has several towers and none is
            named, the stack has no module per block, or a selected block also serves as a layer that is not selected.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the stack does not exist.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    edited = default_stack(model, stack, op=op)
    if not edited.blocks:
        problem = f"the {edited.name} stack of the family '{model.config.model_type}' has no module per block"
        hint = "Use a family for which `lamina inspect` shows blocks."
        raise ConfigError(f"{op}: {problem}; its parts are in separate lists. {hint}")
    chosen = blocks_of(edited, layers, op)
    check_shared(edited, chosen, op)
    return edited, chosen


def blocks_of(stack: LayerStack, layers: object, op: str) -> list[int]:
    """Return the numbers of a stack's blocks that a layer selector names, ascending.

    Raises ConfigError if `layers` is no valid selector or selects layer 0, LayerIndexError if a layer does not exist.
    """
    chosen = select("1-" if is_all(layers) else layers, stack.layers, op=op)
    if 0 in chosen:
        raise ConfigError(f"{op}: got layer 0; it is the embeddings, not a block. Use 1..{stack.depth}, or '1-'.")
    return chosen


def movable_stack(model: PreTrainedModel, stack: str | None, op: str) -> LayerStack:
    """Return the stack whose blocks an edit removes, moves or repeats; `stack` and `op` are as in `select_blocks`.

    Raises:
        ConfigError: If the model cannot be edited, the stack has no module per block, or the model has several towers
            and none is named.
        UnknownNameError: If the stack does not exist.
        UnsupportedModelError: If the model's layers cannot be found.
    """
    check_editable(model, op)
    if any(map(has_packed, model.modules())):
        raise ConfigError(f"{op}: {_QUANTISED}")
    return select_blocks(model, "all", stack, op)[0]


def convolution_blocks(model: PreTrainedModel, op: str) -> tuple[str, list[nn.Module]]:
    """Return the name of a model's stack of convolutions, and the list of its blocks; layer i is entry i - 1.

    The blocks are the stages of a convolutional network, or the layers of a speech model's feature encoder. `op` is the
    operation, for messages.

    Raises:
        UnsupportedModelError: If no row of `lamina.layers.roles.CONVOLUTIONS` says where the convolutions are, or the
            row does not fit the model.
    """
    row = convolutions_of(model, op=op)
    return row.stack, modules_at(getattr(model, "base_model", model), row.blocks, family=family_of(model), op=op)


def select_convolutions(
    model: PreTrainedModel, layers: object, stack: str | None, op: str
) -> tuple[str, list[int], dict[str, nn.Module]]:
    """Return what an edit of convolutions changes: the stack's name, the layers (ascending), and path -> convolution.

    `layers` and `op`, and the errors about `layers`, are those of `select_blocks`. Raises UnknownNameError if `stack`
    is not None, "all" or that name, and UnsupportedModelError if the model's convolutions are not known.
    """
    name, blocks = convolution_blocks(model, op)
    if stack not in (None, "all", name):
        raise UnknownNameError(op=op, got=str(stack), known=[name], what="stack of convolutions")
    chosen = select("1-" if is_all(layers) else layers, len(blocks) + 1, op=op)
    if 0 in chosen:
        problem = f"got layer 0; the convolutions of the {name} stack are counted from 1"
        raise ConfigError(f"{op}: {problem}. Use 1..{len(blocks)}.")
    paths = {module: path for path, module in by_path(model).items()}
    row, family = convolutions_of(model, op=op), family_of(model)
    groups = (modules_at(blocks[layer - 1], row.convolution, family=family, op=op) for layer in chosen)
    return name, chosen, {paths[module]: module for group in groups for module in group}


def check_shared(stack: LayerStack, chosen: list[int], op: str) -> None:
    """Raise ConfigError if `chosen` has some, but not all, of the layers that one shared block serves as.

    `chosen` has layer numbers; 0, the embeddings, is ignored.
    """
    named = {stack.blocks[layer - 1] for layer in chosen if layer > 0}
    shared = [layer for layer, block in enumerate(stack.blocks, 1) if block in named and layer not in chosen]
    if shared:
        problem = f"layer {shared[0]} is not named, but a named layer is the same block"
        raise ConfigError(f"{op}: {problem}; the layers of this model share weights. Name all of them, or none.")


def check_weights(model: PreTrainedModel, inside: Collection[nn.Module], op: str) -> None:
    """Raise UnsupportedModelError, about `op`, if a module of `inside` has a packed or computed weight."""
    for path, module in model.named_modules():
        if module not in inside:
            continue
        buffers = {name for name, buffer in module.named_buffers(recurse=False) if _is_packed(buffer)}
        if has_packed(module) or _computed(module) or buffers & own_state(module).keys():  # GPTQ's weights are buffers
            reason = f"'{path}', a {type(module).__name__}, has weights that are packed or computed, not plain ones"
            raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=_PLAIN)


def has_packed(module: nn.Module) -> bool:
    """Return whether a module itself has quantised parameters, or weights that are not tensors (quantised by torch).

    A module that quanto quantises at each call, before its `freeze`, counts too.
    """
    if any(vars(module).get(name) is not None for name in ("weight_qtype", "activation_qtype")):
        return True
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    tensors = {**parameters, **dict(module.named_buffers(recurse=False, remove_duplicate=False))}
    # weights that are spread over devices (DTensor) wrap other tensors too
    packed = [tensor for tensor in parameters.values() if type(tensor.data).__name__ != "DTensor"]
    odd = [name for name in own_state(module) if name not in tensors and not name.endswith("_extra_state")]
    return bool(odd) or any(map(_is_packed, packed))


def _is_packed(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return hasattr(type(tensor), "__tensor_flatten__") or (tensor.ndim > 1 and not is_number)


def _computed(module: nn.Module) -> str | None:
    """Return "weight" or "bias" if a module computes it from other parameters (weight norm, pruning); else None."""
    for name in ("weight", "bias"):
        if isinstance(vars(module).get(name), Tensor) or isinstance(getattr(type(module), name, None), property):
            return name
    return None


_PLAIN = "Merge adapters, undo weight norm, pruning and quantisation, or correct the family's row."


def check_plain(model: nn.Module, path: str, module: nn.Module, op: str) -> None:
    """Raise UnsupportedModelError, about `op`, if `module`, at `path`, computes its weight or bias from others."""
    if (name := _computed(module)) is not None:
        reason = f"'{path}.{name}' is computed from other weights (weight norm, pruning)"
        raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=_PLAIN)


def plain_weight(model: nn.Module, path: str, module: nn.Module, op: str, *, convolution: bool = False) -> Tensor:
    """Return the weight `[out, ...]` of the linear map at `path` of the model, or with `convolution` of a convolution.

    Raises:
        UnsupportedModelError: If the module is anything else, or its weight or bias is packed or computed. The message
            begins with `op`.
    """
    check_plain(model, path, module, op)
    weight = convolution_weight(module) if convolution else linear_weight(module)
    if weight is None or has_packed(module):
        kind = "convolution" if convolution else "linear map"
        packed = "" if weight is None else " whose weight is packed"
        reason = f"'{path}' is a {type(module).__name__}{packed}, not a plain {kind}"
        raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=_PLAIN)
    return weight
