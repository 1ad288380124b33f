"""Learning rates layer by layer: the optimiser's parameter groups."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lamina.editing.inserted import InsertedLayer
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


def parameter_groups(model: PreTrainedModel, options: FitOptions, rate: float, op: str) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: one per learning rate and weight decay.

    Only matrices decay: not biases and norms. What is frozen is in no group.

    Args:
        model: The model.
        options: `layer_decay`, `layer_rates` and `weight_decay`.
        rate: The rate of what has no other.
        op: Named in errors.

    Raises:
        ConfigError: If nothing is to be trained, or the model has no inserted layers and a rate names them.
        LayerIndexError: If a rate names a layer that does not exist.
    """
    rates = learning_rates(model, options, rate)
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or rates[name] == 0:
            continue
        decay = options.weight_decay if parameter.ndim >= 2 else 0.0
        group = groups.setdefault((rates[name], decay), {"params": [], "lr": rates[name], "weight_decay": decay})
        group["params"].append(parameter)
    if not groups:
        raise ConfigError(f"{op}: every parameter is frozen or has the rate 0; at least one must be trained.")
    return list(groups.values())


def learning_rates(model: PreTrainedModel, options: FitOptions, rate: float) -> dict[str, float]:
    """Name of every parameter -> its highest learning rate.

    A parameter that several layers share has the rate of the highest of them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = dict.fromkeys(names.values(), rate)
    if options.layer_decay == 1 and not options.layer_rates:
        return rates
    head = set(rates)
    named = _named_rates(model, options)
    for stack in stacks(model).values():
        layers = {layer: named.get((stack.name, layer)) for layer in range(stack.layers)}
        for layer, modules in layer_modules(model, stack, layers).items():
            own = layers[layer]
            decayed = rate * options.layer_decay ** (stack.depth - layer)
            for name in _names(modules, names):
                head.discard(name)
                rates[name] = decayed if own is None else own
    for key, own in options.layer_rates.items():
        if key == HEAD:
            rates |= dict.fromkeys(head, own)
        elif key == INSERTED:
            rates |= dict.fromkeys(_inserted(model, names), own)
    return rates


def _named_rates(model: PreTrainedModel, options: FitOptions) -> dict[tuple[str, int], float]:
    """(stack, layer) -> the rate that is named for it; a layer number means that layer of every stack."""
    found: dict[tuple[str, int], float] = {}
    for key, rate in options.layer_rates.items():
        if key in (HEAD, INSERTED):
            continue
        selector = int(key) if str(key).removeprefix("-").isdigit() else key
        deepest = max(stacks(model).values(), key=lambda stack: stack.layers)
        select(selector, deepest.layers, op=_OP)
        for stack in stacks(model).values():
            with suppress(LayerIndexError):  # a number that only a deeper stack has
                found |= {(stack.name, layer): rate for layer in select(selector, stack.layers, op=_OP)}
    return found


def _inserted(model: PreTrainedModel, names: dict[int, str]) -> list[str]:
    found = {module for module in model.modules() if isinstance(module, InsertedLayer)}
    if not found:
        raise ConfigError(f"{_OP}: '{INSERTED}' has a rate; the model has no inserted layers.")
    return _names(found, names)


def _names(modules: Iterable[nn.Module], names: dict[int, str]) -> list[str]:
    return [names[id(one)] for module in modules for one in module.parameters(recurse=False)]
