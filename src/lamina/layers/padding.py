"""Test whether padding changes the states of real tokens, as in a model that has no attention mask."""

from __future__ import annotations

import inspect
import logging
import weakref
from contextvars import Context

import torch
from torch import nn

from lamina.errors import first_line
from lamina.layers.adapters import backbone, without_wrapper
from lamina.layers.causality import CLOSE, first_states
from lamina.layers.discovery import stacks
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.stack import alike

logger = logging.getLogger(__name__)

_REAL, _PADDED = 6, 12  # length of the row without padding, and with it
_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # backbone -> whether it reads padding


def reads_padding(model: nn.Module) -> bool:
    """Return whether padding after a text changes the states of its tokens by more than rounding.

    The first call runs the model on tiny inputs, with padding, with other padding and without, and then restores it;
    the answer is cached. Models with the attention of torch (SDPA) are not run, unless tokens mix in other parts too.
    False if the model reads no token ids, refuses the inputs, or has no weights (meta device).
    """
    base = backbone(model)
    if base not in _known:
        if any(parameter.is_meta for parameter in base.parameters()):
            return False
        # in a new context, so that hooks of banks that listen to this model do not act on these passes
        _known[base] = not _masks_surely(base) and Context().run(_compare_passes, base)
    return _known[base]


def _masks_surely(model: nn.Module) -> bool:
    """Return whether the model takes a mask, and mixes tokens in torch's attention only, which applies it."""
    mixes = any(isinstance(part, nn.Conv1d) and part.kernel_size != (1,) for part in model.modules())
    mixes = mixes or getattr(model.config, "trigram_input", False)  # MobileBERT joins neighbours
    return _takes_mask(model) and bool(getattr(model, "_supports_sdpa", False)) and not mixes


def _takes_mask(model: nn.Module) -> bool:
    return "attention_mask" in inspect.signature(without_wrapper(model).forward).parameters


def _compare_passes(model: nn.Module) -> bool:
    """Run the model on a row of tokens without padding and with two kinds of it; return whether its states differ.

    Passes of one length sum in the same order, so that half precision shows differences between two kinds of padding.
    """
    try:
        inputs = probe_input(model, _PADDED, 1).inputs
        if "input_ids" not in inputs:
            return False
        stack = next(iter(stacks(model).values()))
        padded = {key: value[:1] for key, value in inputs.items()}
        ids = padded["input_ids"]
        if _takes_mask(model):
            padded["attention_mask"] = (torch.arange(_PADDED) < _REAL).long()[None].to(ids.device)
        other = padded | {"input_ids": torch.cat([ids[:, :_REAL], ids[:, _REAL:].flip(1).roll(1, 1)], dim=1)}
        alone = {key: value[:, :_REAL] if value.shape[1:] == (_PADDED,) else value for key, value in padded.items()}
        with preserve_model(model):
            states, others, without = (first_states(model, stack, rows, _REAL) for rows in (padded, other, alone))
        for layer, state in states.items():
            close = CLOSE.get(state.dtype, 1e-2)
            if not alike(others[layer], state, min(close, 1e-4)) or not alike(without[layer], state, close):
                return True
    except Exception as error:  # models raise many types of errors
        logger.debug("padding: %s was not compared (%s)", type(model).__name__, first_line(error))
    return False
