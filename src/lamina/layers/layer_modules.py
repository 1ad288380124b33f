"""Find the modules, and so the parameters, that make up a layer."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lamina.layers.adapters import backbone
from lamina.layers.devices import MetaValues
from lamina.layers.discovery import stacks
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.stack import LayerStack

_TOKENS = 7  # length of the input that shows which modules run before the blocks


def layer_modules(model: nn.Module, stack: LayerStack, layers: Collection[int]) -> dict[int, set[nn.Module]]:
    """Return layer -> its modules (at any depth), for the given layers of a stack, numbered from 0.

    A layer's parameters are those that its modules hold directly, `parameters(recurse=False)`. From layer 1 on, layer i
    is `stack.blocks[i - 1]`. Modules with weights outside the blocks belong to layer 0 (the embeddings), except those
    that are first called after the first block has begun (a final norm): they belong to the last layer. If the stack
    has no module per block, all its modules belong to layer 0. Poolers and heads belong to no layer. The model may be
    run once on a tiny input.
    """
    around = _outside_blocks(model, stack)
    by_layer: dict[int, set[nn.Module]] = {
        layer: set(stack.blocks[layer - 1].modules()) if layer and stack.blocks else set() for layer in layers
    }
    if not by_layer.keys() & {0, stack.depth}:
        return by_layer
    after: set[nn.Module] = _after_blocks(model, stack, around) if stack.blocks else set()
    for module in around:
        layer = stack.depth if module in after else 0
        if layer in by_layer:
            by_layer[layer].add(module)
    return by_layer


def stack_modules(model: nn.Module, stack: LayerStack) -> set[nn.Module]:
    """Return the modules of all layers of a stack, at any depth; see `layer_modules`."""
    return {*_blocks(stack), *_outside_blocks(model, stack)}


def _blocks(stack: LayerStack) -> set[nn.Module]:
    return {module for block in stack.blocks for module in block.modules()}


def _outside_blocks(model: nn.Module, stack: LayerStack) -> list[nn.Module]:
    """Return the modules in `stack.run` that are in no block, in that order; for a decoder, without the encoder's.

    So only modules with weights or adapters of their own are included.
    """
    others = _blocks(stack)
    if stack.name == "decoder":
        others |= set(stacks(model)["encoder"].run) - set(stack.scope.modules())
    return [module for module in stack.run if module not in others]


def _after_blocks(model: nn.Module, stack: LayerStack, around: list[nn.Module]) -> set[nn.Module]:
    """Run a tiny input; return the modules in `around` whose first call comes after the first block has begun."""
    base = stack.tower or backbone(model)
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
