"""The convolutions of a model, counted: by stages of a convolutional network, or layers of a feature encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.errors import ConfigError, UnknownNameError
from lamina.layers import select
from lamina.layers.roles import convolutions_of, family_of, modules_at
from lamina.layers.stack import by_path

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


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
