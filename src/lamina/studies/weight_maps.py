"""The linear maps of a block and what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lamina.layers.roles import ROLES, Attention, family_of, has_path, modules_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack

ANY = "linear"  # the role of all linear maps of a block, where no row says what each is for


def weight_maps(
    model: PreTrainedModel, stack: LayerStack, layer: int, *, op: str
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Role -> the linear maps of a block that serve it."""
    block, family = stack.blocks[layer - 1], family_of(model)
    paths = _role_paths(block, family) if family in ROLES else {}
    for role, role_paths in paths.items():
        weights: dict[str, Tensor] = {}
        for path in role_paths:
            for number, module in enumerate(modules_at(block, path, family=family, op=op)):
                weights |= _weights(module, f"{path}[{number}]")
        if weights:
            yield role, weights
    if not paths and (weights := _weights(block, "")):
        yield ANY, weights


def _role_paths(block: nn.Module, family: str) -> dict[str, tuple[str, ...]]:
    row = ROLES[family]
    paths: dict[str, tuple[str, ...]] = {}
    for prefix, attention in (("", row.attention), ("cross_", row.cross)):
        if isinstance(attention, Attention) and has_path(block, attention.output):
            for path, served in attention.projections().items():
                paths["+".join(f"{prefix}{role}" for role in served)] = (path,)
            paths[f"{prefix}attention_output"] = (attention.output,)
    return {**paths, "ffn_in": row.ffn_in, "ffn_out": (row.ffn_out,)}


def _weights(module: nn.Module, name: str) -> dict[str, Tensor]:
    """The linear maps in a module, itself included; experts keep several in one tensor of three axes."""
    return {
        ".".join(filter(None, (name, path, key))): value.detach()
        for path, part in module.named_modules()
        for key, value in part.named_parameters(recurse=False)
        if not isinstance(part, nn.Embedding) and (value.ndim == 3 or (value.ndim == 2 and key.endswith("weight")))
    }
