"""The optimizer's parameter groups: which parameters are trained, with which learning rate and weight decay.

A whole model may have a learning rate for each layer (`layer_decay` and `layer_rates`).
"""

from __future__ import annotations

import fnmatch
from contextlib import suppress
from typing import TYPE_CHECKING, TypedDict

import torch

from lamina.editing.inserted_layer import InsertedLayer
from lamina.errors import ConfigError, LayerIndexError
from lamina.layers import select, stacks
from lamina.layers.discovery import layer_modules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from transformers import PreTrainedModel

    from lamina.train.options import FitOptions

HEAD, INSERTED = "head", "inserted"  # keys of `layer_rates`: parameters outside the layers, and inserted layers
_OP = "fit: layer_rates"


class ParameterGroup(TypedDict):
    """Parameters with the same learning rate and weight decay, in the form of torch's optimizers.

    Attributes:
        params: The parameters.
        lr: The highest learning rate of these parameters.
        weight_decay: The weight decay of these parameters.
    """

    params: list[nn.Parameter]
    lr: float
    weight_decay: float


def reader_groups(module: nn.Module, rate: float, options: FitOptions, op: str = "fit") -> list[ParameterGroup]:
    """Return a reader's parameter groups with and without weight decay, with equal learning rates.

    Frozen parameters are in no group, and a group without parameters is left out.

    Args:
        module: The reader.
        rate: Highest learning rate of all parameters.
        options: Options of the run, with the weight decay and the parameters that have it.
        op: The operation, for messages.

    Raises:
        ConfigError: If a pattern of `weight_decay_on` without "!" matches no parameter.
    """
    decayed = decayed_names(module, options, op)
    groups: dict[float, ParameterGroup] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = options.weight_decay if name in decayed else 0.0
            groups.setdefault(decay, ParameterGroup(params=[], lr=rate, weight_decay=decay))["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: -group["weight_decay"])


def decayed_names(module: nn.Module, options: FitOptions, op: str) -> set[str]:
    """Return the names of the parameters in `module` that have weight decay, by the option `weight_decay_on`.

    "all" selects every parameter, and "matrices" selects those with at least two axes. A list holds shell patterns
    (`*`, `?`, `[...]`) for full names. The last pattern that matches a name decides: if it begins with "!", the
    parameter has no weight decay; otherwise it has. A parameter that no pattern matches has none. `op` is the
    operation, for messages.

    Raises:
        ConfigError: If a pattern without "!" matches no parameter.
    """
    named = dict(module.named_parameters())
    if isinstance(options.weight_decay_on, str):
        return {name for name, parameter in named.items() if parameter.ndim >= 2 or options.weight_decay_on == "all"}
    decayed: set[str] = set()
    for pattern in options.weight_decay_on:
        matched = set(fnmatch.filter(named, pattern.removeprefix("!")))
        if not matched and not pattern.startswith("!"):  # an exclusion may match nothing in some readers of the run
            raise ConfigError(
                f"{op}: weight_decay_on names '{pattern}', which matches none of {len(named)} parameters, such as "
                f"'{next(iter(named))}'. Use patterns of full names, as in '*.scores'."
            )
        decayed = decayed - matched if pattern.startswith("!") else decayed | matched
    return decayed


def parameter_groups(model: PreTrainedModel, options: FitOptions, rate: float, op: str) -> list[ParameterGroup]:
    """Return the parameter groups of a whole model, one for each pair of learning rate and weight decay.

    Frozen parameters, and those whose learning rate is 0, are in no group.

    Args:
        model: The model.
        options: Options of the run, with the learning rates of layers.
        rate: Highest learning rate of parameters for which `options` set no rate of their own.
        op: The operation, for messages.

    Raises:
        ConfigError: If no parameter is left, a trained parameter is in float16, or a pattern of `weight_decay_on`
            without "!" matches no parameter.
        LayerIndexError: If the options give a rate to a layer that does not exist.
        UnsupportedModelError: If layers have rates of their own, and the model's layers cannot be found.
    """
    rates, decayed = learning_rates(model, options, rate), decayed_names(model, options, op)
    groups: dict[tuple[float, float], ParameterGroup] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or rates[name] == 0:
            continue
        if parameter.dtype == torch.float16:
            raise ConfigError(
                f"{op}: '{name}' is in float16, in which small steps are lost; trained parameters must be in float32 "
                "or bfloat16. Call model.float(), and set precision='float16' for mixed precision."
            )
        decay = options.weight_decay if name in decayed else 0.0
        empty = ParameterGroup(params=[], lr=rates[name], weight_decay=decay)
        groups.setdefault((rates[name], decay), empty)["params"].append(parameter)
    if not groups:
        raise ConfigError(f"{op}: every parameter is frozen or has the learning rate 0; at least one must be trained.")
    return list(groups.values())


def learning_rates(model: PreTrainedModel, options: FitOptions, rate: float) -> dict[str, float]:
    """Return parameter name -> highest learning rate in the run, for every parameter of a model.

    A parameter that several layers share has the rate of the topmost of them.

    Args:
        model: The model.
        options: Options of the run; `layer_decay` and `layer_rates` are used.
        rate: Learning rate of the top block and of parameters outside the layers.

    Raises:
        LayerIndexError: If `layer_rates` names a layer that does not exist.
        ConfigError: If a key of `layer_rates` is not a layer selector, or is "inserted" and the model has no inserted
            layers.
        UnsupportedModelError: If layers have rates of their own, and the model's layers cannot be found.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = dict.fromkeys(names.values(), rate)
    if options.layer_decay == 1 and not options.layer_rates:
        return rates
    outside_layers = set(rates)
    named = _named_rates(model, options)
    for stack in stacks(model).values():
        for layer, modules in layer_modules(model, stack, range(stack.layers)).items():
            decayed = rate * options.layer_decay ** (stack.depth - layer)
            inside = _names(modules, names)
            outside_layers.difference_update(inside)
            rates |= dict.fromkeys(inside, named.get((stack.name, layer), decayed))
    for key, key_rate in options.layer_rates.items():
        if key == HEAD:
            rates |= dict.fromkeys(outside_layers, key_rate)
        elif key == INSERTED:
            rates |= dict.fromkeys(_inserted(model, names), key_rate)
    return rates


def _named_rates(model: PreTrainedModel, options: FitOptions) -> dict[tuple[str, int], float]:
    """Return (stack, layer) -> learning rate, for the layers that the selectors in `options.layer_rates` name.

    A selector names layers of every stack of the model. Raises LayerIndexError if no stack has such a layer,
    ConfigError if a key is not a selector, and the errors of `stacks`.
    """
    rates: dict[tuple[str, int], float] = {}
    deepest = max(stacks(model).values(), key=lambda stack: stack.layers)
    for key, rate in options.layer_rates.items():
        if key in (HEAD, INSERTED):
            continue
        selector = int(key) if str(key).removeprefix("-").isdecimal() else key
        select(selector, deepest.layers, op=_OP)  # raises if not even the deepest stack has the layer
        for stack in stacks(model).values():
            with suppress(LayerIndexError):  # only a deeper stack has the layer
                rates |= {(stack.name, layer): rate for layer in select(selector, stack.layers, op=_OP)}
    return rates


def _inserted(model: PreTrainedModel, names: dict[int, str]) -> list[str]:
    """Return the names of the inserted layers' parameters; raise ConfigError if the model has none.

    `names` maps a parameter's id to its name.
    """
    inserted = [module for module in model.modules() if isinstance(module, InsertedLayer)]
    if not inserted:
        raise ConfigError(f"{_OP}: '{INSERTED}' has a learning rate; the model has no inserted layers.")
    return _names(inserted, names)


def _names(modules: Iterable[nn.Module], names: dict[int, str]) -> list[str]:
    return [names[id(parameter)] for module in modules for parameter in module.parameters(recurse=False)]
