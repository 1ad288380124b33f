"""Which modules, and so which parameters, make up a layer."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lamina.layers.devices import MetaValues
from lamina.layers.discovery import stacks
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.stack import LayerStack

_TOKENS = 7  # of the input that shows what comes before the blocks


def layer_modules(model: nn.Module, stack: LayerStack, layers: Collection[int]) -> dict[int, set[nn.Module]]:
    """The modules of some layers of a stack, each with its own parameters.

    Layer 0 is what the stack computes before its first block (everything, where there is no module per block); layer i
    is block i; what comes after the last block (a norm) belongs to the last. Poolers and heads belong to none.
    """
    around = _around(model, stack)
    by_layer: dict[int, set[nn.Module]] = {
        layer: set(stack.blocks[layer - 1].modules()) if layer and stack.blocks else set() for layer in layers
    }
    if not by_layer.keys() & {0, stack.depth}:
        return by_layer
    late: set[nn.Module] = _after_blocks(model, stack, around) if stack.blocks else set()
    for module in around:
        layer = stack.depth if module in late else 0
        if layer in by_layer:
            by_layer[layer].add(module)
    return by_layer


def stack_modules(model: nn.Module, stack: LayerStack) -> set[nn.Module]:
    """The modules of all layers of a stack together, each with its own parameters."""
    return {*_blocks(stack), *_around(model, stack)}


def _blocks(stack: LayerStack) -> set[nn.Module]:
    return {module for block in stack.blocks for module in block.modules()}


def _around(model: nn.Module, stack: LayerStack) -> list[nn.Module]:
    """What takes part in a stack's layers without being in a block, nor in the encoder that a decoder looks at."""
    others = _blocks(stack)
    if stack.name == "decoder":
        others |= set(stacks(model)["encoder"].run) - set(stack.scope.modules())
    return [module for module in stack.run if module not in others]


def _after_blocks(model: nn.Module, stack: LayerStack, around: list[nn.Module]) -> set[nn.Module]:
    """Those modules that are first called after the first block has begun, on a tiny input."""
    base = stack.tower or getattr(model, "base_model", model)
    probe = probe_input(base, _TOKENS, seed=1)
    order: list[nn.Module] = []
    with preserve_model(model), MetaValues():
        for module in (*around, stack.blocks[0]):
            module.register_forward_pre_hook(lambda module, _args: order.append(module))
        try:
            base(**probe.inputs)
        except Exception:
            order.clear()
            base(**probe.without_mask().inputs)
    start = order.index(stack.blocks[0])
    return set(order[start:]) - set(order[:start])
