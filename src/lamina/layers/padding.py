"""Test whether padding changes the states of real tokens, as in a model that has no attention mask."""

from __future__ import annotations

import inspect
import weakref
from contextvars import Context

import torch
from torch import Tensor, nn

from lamina.errors import LaminaError
from lamina.layers.adapters import backbone, without_wrapper
from lamina.layers.discovery import stacks
from lamina.layers.hooks import watch
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.stack import LayerStack, alike

_REAL, _PADDED = 6, 12  # length of the row without padding, and with it
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative tolerance: kernels may sum in another order
_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # backbone -> whether it reads padding


def reads_padding(model: nn.Module) -> bool:
    """Return whether padding after a text changes the states of its tokens by more than rounding.

    The first call for a model runs it twice on tiny inputs, with padding and without, and leaves it unchanged; the
    answer is cached. Models with the attention of torch (SDPA) are not run: they mask padding. False if the model reads
    no token ids or refuses the inputs.
    """
    base = backbone(model)
    if base not in _known:
        # in a new context, so that hooks of banks that listen to this model do not act on these passes
        _known[base] = not _masks_surely(base) and Context().run(_compare_lengths, base)
    return _known[base]


def _masks_surely(model: nn.Module) -> bool:
    return _takes_mask(model) and bool(getattr(model, "_supports_sdpa", False))


def _takes_mask(model: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(without_wrapper(model).forward).parameters


def _compare_lengths(model: nn.Module) -> bool:
    """Run the model on a row of tokens with padding and without; return whether the states of the tokens differ."""
    try:
        inputs = probe_input(model, _PADDED, 1).inputs
        if "input_ids" not in inputs:
            return False
        stack = next(iter(stacks(model).values()))
        padded = {key: value[:1] for key, value in inputs.items()}
        if _takes_mask(model):
            padded["attention_mask"] = (torch.arange(_PADDED) < _REAL).long()[None].to(padded["input_ids"].device)
        ends = {key: value[:, :_REAL] for key, value in padded.items() if value.shape[1:] == (_PADDED,)}
        with preserve_model(model):
            after, before = (_states(model, stack, rows) for rows in (padded, padded | ends))
    except (NoInputError, LaminaError, RuntimeError, ValueError, TypeError):
        return False
    return not all(alike(after[layer], state, _CLOSE.get(state.dtype, 1e-2)) for layer, state in before.items())


def _states(model: nn.Module, stack: LayerStack, inputs: dict[str, Tensor]) -> dict[int, Tensor]:
    """Run the model on `inputs`, with torch seeded by 0; return layer -> states of the first `_REAL` tokens."""
    states: dict[int, Tensor] = {}

    def on_state(layer: int, state: Tensor) -> None:
        states[layer] = state[:, :_REAL].clone()

    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    with watch(stack, range(stack.layers), on_state):
        model(**inputs)
    return states
