"""Models whose layers may not be changed, each refused with the reason before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import default_stack, select
from lamina.layers.adapters import check_no_adapters
from lamina.layers.roles import convolution_weight, convolutions_of, family_of, linear_weight, modules_at
from lamina.layers.stack import by_path, own_state
from lamina.layers.wrappers import is_compiled

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack


def check_editable(model: PreTrainedModel, op: str) -> None:
    """Raise ConfigError unless the layers of a model can be changed in place."""
    config = getattr(model, "config", None)
    compiled = any(map(is_compiled, model.modules()))
    quantizers = getattr(model, "hf_quantizer", None), getattr(config, "quantization_config", None)
    is_quantized = getattr(model, "is_quantized", False) or any(quantizer is not None for quantizer in quantizers)
    is_offloaded = hasattr(model, "hf_device_map") and any(parameter.is_meta for parameter in model.parameters())
    problems = (
        (compiled, "the model is compiled, and would go on running the old layers. Edit it first, then compile it."),
        (not hasattr(config, "to_dict"), f"a {type(model).__name__} came; edit the transformers model inside it."),
        (is_quantized, "the model is quantised; packed weights cannot be edited. Edit it first, then quantise it."),
        (is_offloaded, "parts of the model are offloaded; an edit there would be lost. Load all of it into memory."),
    )
    for is_problem, text in problems:
        if is_problem:
            raise ConfigError(f"{op}: {text}")
    check_no_adapters(model, op)


def chosen_blocks(model: PreTrainedModel, layers: object, stack: str | None, op: str) -> tuple[LayerStack, list[int]]:
    """The stack and the layers, ascending, that an edit of blocks names; layer i is the block `stack.blocks[i - 1]`."""
    edited = default_stack(model, stack, op=op)
    if not edited.blocks:
        raise ConfigError(
            f"{op}: the {edited.name} stack of the family '{model.config.model_type}' has no module per block; its "
            "parts are in separate lists. Use a family for which `lamina inspect` shows blocks."
        )
    chosen = select("1-" if layers == "all" else layers, edited.layers, op=op)
    if 0 in chosen:
        raise ConfigError(f"{op}: layer 0 came; it is the embeddings, not a block. Use 1..{edited.depth}, or '1-'.")
    check_shared(edited, chosen, op)
    return edited, chosen


def convolution_blocks(model: PreTrainedModel, op: str) -> tuple[str, list[nn.Module]]:
    """The name of a model's sequence of convolutions, and its blocks: layer i is the i-th, from 1."""
    row = convolutions_of(model, op=op)
    return row.stack, modules_at(getattr(model, "base_model", model), row.blocks, family=family_of(model), op=op)


def chosen_convolutions(
    model: PreTrainedModel, layers: object, stack: str | None, op: str
) -> tuple[str, list[int], dict[str, nn.Module]]:
    """The convolutions that an edit names: the stack they are in, the layers, ascending, and path -> convolution."""
    name, blocks = convolution_blocks(model, op)
    if stack not in (None, "all", name):
        raise UnknownNameError(op=op, got=str(stack), known=[name], what="stack of convolutions")
    chosen = select("1-" if layers == "all" else layers, len(blocks) + 1, op=op)
    if 0 in chosen:
        raise ConfigError(
            f"{op}: layer 0 came; the convolutions of the {name} stack are counted from 1. Use 1..{len(blocks)}."
        )
    paths = {module: path for path, module in by_path(model).items()}
    row, family = convolutions_of(model, op=op), family_of(model)
    groups = (modules_at(blocks[layer - 1], row.convolution, family=family, op=op) for layer in chosen)
    return name, chosen, {paths[module]: module for group in groups for module in group}


def check_shared(stack: LayerStack, chosen: list[int], op: str) -> None:
    """Raise ConfigError where a block serves as several layers, and only some of them are named."""
    named = {stack.blocks[layer - 1] for layer in chosen if layer > 0}
    shared = [layer for layer, block in enumerate(stack.blocks, 1) if block in named and layer not in chosen]
    if shared:
        raise ConfigError(
            f"{op}: layer {shared[0]} is not named, and one of those that are is the same block; the layers of this "
            "model share weights. Name all of them, or none."
        )


def check_weights(model: PreTrainedModel, inside: Collection[nn.Module], op: str) -> None:
    """Raise UnsupportedModelError if some modules have weights that are packed, or computed out of others."""
    for path, module in model.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        weight = getattr(module, "weight", None)
        packed = any(name not in own or _is_packed(own[name]) for name in own_state(module))
        if module in inside and (packed or (isinstance(weight, Tensor) and "weight" not in own)):
            reason = f"'{path}', a {type(module).__name__}, has weights that are packed or computed, not plain ones"
            raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=_PLAIN)


def _is_packed(tensor: Tensor) -> bool:
    return hasattr(type(tensor), "__tensor_flatten__") or (tensor.ndim > 1 and not tensor.is_floating_point())


_PLAIN = "Merge adapters, undo weight norm and quantisation, or correct the family's row."


def plain_weight(model: nn.Module, path: str, module: nn.Module, op: str, *, convolution: bool = False) -> Tensor:
    """The weight `[out, ...]` of a linear map or convolution; UnsupportedModelError unless it is a plain one."""
    weight = convolution_weight(module) if convolution else linear_weight(module)
    if weight is None:
        kind = "convolution" if convolution else "linear map"
        reason = f"'{path}' is a {type(module).__name__}, no plain {kind}"
        raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=_PLAIN)
    return weight
