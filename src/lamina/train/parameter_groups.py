"""Learning rates layer by layer: the optimiser's parameter groups."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from lamina.editing.inserted_layer import InsertedLayer
from lamina.errors import ConfigError, LayerIndexError
from lamina.layers import select, stacks
from lamina.layers.layer_modules import layer_modules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from transformers import PreTrainedModel

    from lamina.train.options import FitOptions

HEAD, INSERTED = "head", "inserted"
_OP = "fit: layer_rates"


def reader_groups(module: nn.Module, rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of a module with one rate; only matrices decay, not layer scores, biases and norms."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = ((matrices, weight_decay), (others, 0.0))
    return [{"params": params, "lr": rate, "weight_decay": decay} for params, decay in groups if params]


def parameter_groups(model: PreTrainedModel, options: FitOptions, rate: float, op: str) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser, one per learning rate and weight decay; `rate` is that of what has no other.

    Only matrices decay: not biases and norms. What is frozen is in no group.
    """
    rates = learning_rates(model, options, rate)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or rates[name] == 0:
            continue
        if parameter.dtype == torch.float16:
            raise ConfigError(
                f"{op}: '{name}' is in float16, in which steps are lost; what is trained is in float32 or bfloat16. "
                "Call model.float(), and set precision='float16' for mixed precision."
            )
        decay = options.weight_decay if parameter.ndim >= 2 else 0.0
        group = groups.setdefault((rates[name], decay), {"params": [], "lr": rates[name], "weight_decay": decay})
        group["params"].append(parameter)
    if not groups:
        raise ConfigError(f"{op}: every parameter is frozen or has the rate 0; at least one must be trained.")
    return list(groups.values())


def learning_rates(model: PreTrainedModel, options: FitOptions, rate: float) -> dict[str, float]:
    """Name of every parameter -> its highest learning rate; one that layers share has that of the highest layer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = dict.fromkeys(names.values(), rate)
    if options.layer_decay == 1 and not options.layer_rates:
        return rates
    head = set(rates)
    named = _named_rates(model, options)
    for stack in stacks(model).values():
        for layer, modules in layer_modules(model, stack, range(stack.layers)).items():
            decayed = rate * options.layer_decay ** (stack.depth - layer)
            inside = _names(modules, names)
            head.difference_update(inside)
            rates |= dict.fromkeys(inside, named.get((stack.name, layer), decayed))
    for key, own in options.layer_rates.items():
        if key == HEAD:
            rates |= dict.fromkeys(head, own)
        elif key == INSERTED:
            rates |= dict.fromkeys(_inserted(model, names), own)
    return rates


def _named_rates(model: PreTrainedModel, options: FitOptions) -> dict[tuple[str, int], float]:
    """(stack, layer) -> the rate that is named for it; a layer number means that layer of every stack."""
    rates: dict[tuple[str, int], float] = {}
    deepest = max(stacks(model).values(), key=lambda stack: stack.layers)
    for key, rate in options.layer_rates.items():
        if key in (HEAD, INSERTED):
            continue
        selector = int(key) if str(key).removeprefix("-").isdecimal() else key
        select(selector, deepest.layers, op=_OP)
        for stack in stacks(model).values():
            with suppress(LayerIndexError):  # a number that only a deeper stack has
                rates |= {(stack.name, layer): rate for layer in select(selector, stack.layers, op=_OP)}
    return rates


def _inserted(model: PreTrainedModel, names: dict[int, str]) -> list[str]:
    inserted = [module for module in model.modules() if isinstance(module, InsertedLayer)]
    if not inserted:
        raise ConfigError(f"{_OP}: '{INSERTED}' has a rate; the model has no inserted layers.")
    return _names(inserted, names)


def _names(modules: Iterable[nn.Module], names: dict[int, str]) -> list[str]:
    return [names[id(parameter)] for module in modules for parameter in module.parameters(recurse=False)]
