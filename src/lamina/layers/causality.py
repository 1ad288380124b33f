"""Test whether a stack is causal: change later tokens, and compare the states of earlier ones."""

from __future__ import annotations

import weakref
from contextvars import Context

import torch
from torch import Tensor, nn

from lamina.layers.adapters import backbone
from lamina.layers.hooks import watch
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.stack import LayerStack, alike

_TOKENS, _UNCHANGED = 12, 6  # length of the inputs; how many of their first tokens are equal
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative tolerance: kernels may sum in another order
# `scope` of a stack -> whether the stack is causal
_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_causal(model: nn.Module, stack: LayerStack) -> bool:
    """Return whether the state of a token depends only on the tokens up to it, as in a causal language model.

    The first call runs the model twice, on tiny inputs that differ in the second half of their tokens, and leaves the
    model unchanged; errors of these runs pass through. The answer is cached. A stack that reads images or audio, not
    token ids, counts as not causal.
    """
    if stack.scope not in _known:
        base = backbone(model)  # without the head, which may refuse the inputs, say for lack of a padding token
        runnable = base if stack.scope in set(base.modules()) else model
        # in a new context, so that hooks of banks that listen to this model do not act on these passes
        _known[stack.scope] = Context().run(_compare_passes, stack.tower or runnable, stack)
    return _known[stack.scope]


def _compare_passes(model: nn.Module, stack: LayerStack) -> bool:
    """Run the model on two inputs with equal first tokens; return whether the states of these tokens are equal.

    Differences by rounding do not count. Return False if no input is known for the model, or the stack does not read
    token ids.
    """
    try:
        inputs, other = (probe_input(model, _TOKENS, seed).inputs for seed in (1, 2))
    except NoInputError:
        return False
    key = "decoder_input_ids" if stack.name == "decoder" else "input_ids"
    if key not in inputs:
        return False
    inputs |= {name: torch.ones_like(value) for name, value in inputs.items() if name.endswith("attention_mask")}
    changed = torch.cat([inputs[key][:, :_UNCHANGED], other[key][:, _UNCHANGED:]], dim=1)
    with preserve_model(model):
        before, after = (first_states(model, stack, inputs | {key: ids}, _UNCHANGED) for ids in (inputs[key], changed))
    return all(alike(after[layer], state, CLOSE.get(state.dtype, 1e-2)) for layer, state in before.items())


def first_states(model: nn.Module, stack: LayerStack, inputs: dict[str, Tensor], count: int) -> dict[int, Tensor]:
    """Run the model on `inputs`, with torch seeded by 0; return layer -> states of the first `count` tokens.

    The caller restores torch's generators.
    """
    states: dict[int, Tensor] = {}

    def on_state(layer: int, state: Tensor) -> None:
        states[layer] = state[:, :count].clone()

    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    with watch(stack, range(stack.layers), on_state):
        model(**inputs)
    return states
