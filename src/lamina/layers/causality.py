"""Whether what a stack computes of a token depends on later tokens: found by changing these."""

from __future__ import annotations

import weakref
from contextvars import Context
from typing import Any, cast

import torch
from torch import Tensor, nn

from lamina.layers.adapters import backbone
from lamina.layers.hooks import watch
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.stack import LayerStack, alike

_TOKENS, _KEPT = 12, 6
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative; kernels may add in another order
_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # scope of a stack -> whether it is


def is_causal(model: nn.Module, stack: LayerStack) -> bool:
    """Whether each state of a stack comes of the tokens up to its own alone, as where text is written token by token.

    The first call runs the model twice on a tiny input, of which the second half of the tokens differs, and leaves it
    as it was. A stack that reads no token ids, such as one of images or sound, is not causal.
    """
    if stack.scope not in _known:
        # in a context of its own, so that whoever listens to the model does not hear it
        base = backbone(model)  # heads may refuse what is put in, as for want of a padding token
        whole = base if stack.scope in set(base.modules()) else model
        _known[stack.scope] = Context().run(_look, stack.tower or whole, stack)
    return _known[stack.scope]


def _look(model: nn.Module, stack: LayerStack) -> bool:
    try:
        inputs, other = (probe_input(model, _TOKENS, seed).inputs for seed in (1, 2))
    except NoInputError:
        return False
    key = "decoder_input_ids" if stack.name == "decoder" else "input_ids"
    if key not in inputs:
        return False
    inputs |= {name: torch.ones_like(value) for name, value in inputs.items() if name.endswith("attention_mask")}
    changed = torch.cat([inputs[key][:, :_KEPT], other[key][:, _KEPT:]], dim=1)
    with preserve_model(model):
        before, after = (_states(model, stack, inputs | {key: ids}) for ids in (inputs[key], changed))
    return all(alike(after[layer], state, _CLOSE.get(state.dtype, 1e-2)) for layer, state in before.items())


def _states(model: nn.Module, stack: LayerStack, inputs: dict[str, Tensor]) -> dict[int, Tensor]:
    """Layer -> the states of the tokens that stay as they are."""
    states: dict[int, Tensor] = {}

    def on_state(layer: int, state: Tensor) -> None:
        states[layer] = state[:, :_KEPT].clone()

    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    with watch(stack, range(stack.layers), on_state):
        cast("Any", model)(**inputs)
    return states
