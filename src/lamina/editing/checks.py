"""Models whose layers may not be changed, each refused with the reason before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.errors import ConfigError
from lamina.layers import default_stack, select

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack


def check_editable(model: PreTrainedModel, op: str) -> None:
    """Raise ConfigError unless the layers of a model can be changed in place."""
    parts = (model, *model.modules())
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts):
        raise ConfigError(
            f"{op}: the model is compiled; what was compiled would go on running the old layers. "
            "Edit the model first, then compile it."
        )
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise ConfigError(
            f"{op}: a {type(model).__name__} came; only a transformers model itself can be edited, no wrapper of one. "
            "Load it with AutoModel, and wrap it after the edit."
        )
    quantized = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    if quantized or getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{op}: the model is quantised; its weights are packed and cannot be edited. "
            "Load it without quantisation, edit and save it, then quantise what was saved."
        )
    if hasattr(model, "hf_device_map") and any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"{op}: parts of the model are offloaded; an edit there would be lost. Load it into memory as a whole."
        )


def chosen_blocks(model: PreTrainedModel, layers: object, stack: str | None, op: str) -> tuple[LayerStack, list[int]]:
    """The stack and the layers, ascending, that an edit of blocks names; layer i is the block `stack.blocks[i - 1]`.

    Raises:
        ConfigError: If layer 0 is named, the stack has no module per block, or a block that is named has its weights
            in common with one that is not.
        LayerIndexError: If a layer does not exist.
    """
    found = default_stack(model, stack, op=op)
    if not found.blocks:
        raise ConfigError(
            f"{op}: the {found.name} stack of the family '{model.config.model_type}' has no module per block; its "
            "parts are in separate lists. Use a family for which `lamina inspect` shows blocks."
        )
    chosen = select("1-" if layers == "all" else layers, found.layers, op=op)
    if 0 in chosen:
        raise ConfigError(
            f"{op}: layer 0 came; it is the embeddings, and only blocks can be changed this way. "
            f"Use 1..{found.depth}, or '1-' for all blocks."
        )
    check_shared(found, chosen, op)
    return found, chosen


def check_shared(stack: LayerStack, chosen: list[int], op: str) -> None:
    """Raise ConfigError where a block serves as several layers, and only some of them are named."""
    named = {id(stack.blocks[layer - 1]) for layer in chosen if layer > 0}
    shared = [layer for layer, block in enumerate(stack.blocks, 1) if id(block) in named and layer not in chosen]
    if shared:
        raise ConfigError(
            f"{op}: layer {shared[0]} is not named, and one of those that are is the same block; "
            "the layers of this model share weights. Name all of them, or none."
        )
