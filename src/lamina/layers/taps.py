"""Taps: collect states while a model runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor, nn

from lamina.layers.discovery import default_stack
from lamina.layers.hooks import watch
from lamina.layers.selectors import Selector, select


@contextmanager
def tap(model: nn.Module, layers: Selector = "all", stack: str | None = None) -> Generator[dict[int, Tensor]]:
    """Collect states as the model runs.

    Args:
        model: The model; what it returns stays the same, bit for bit.
        layers: Which layers, as a selector.
        stack: Name of the stack; None is the only one, or the encoder.

    Yields:
        Layer -> its state `[batch, tokens, width]`, filled as the model runs and emptied when a new pass over the
        stack begins, so after `generate` it holds the last pass. States carry gradients if the pass does.

    Raises:
        UnsupportedModelError: If the model's layers cannot be read.
        UnknownNameError: If it has no such stack.
        LayerIndexError: If it has no such layer.
        ConfigError: If `layers` is no selector.
    """
    source = default_stack(model, stack, op="tap")
    states: dict[int, Tensor] = {}
    chosen = select(layers, source.layers, op="tap")
    with watch(source, chosen, states.__setitem__, on_start=lambda _args, _kwargs: states.clear()):
        yield states
