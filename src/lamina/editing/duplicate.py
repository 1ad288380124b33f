"""Repeat blocks of a stack: as they are, or as identity blocks that change nothing until they are trained."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lamina.editing.block_order import rearrange
from lamina.editing.editable import blocks_of, movable_stack
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError
from lamina.layers.devices import main_device
from lamina.layers.hooks import ContextHooks
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import run_probe
from lamina.layers.roles import family_of
from lamina.layers.stack import own_state
from lamina.utils import check_types

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector

_OP = "duplicate_"
_TOKENS = 7  # length of the input that blocks are tried on


@check_types("duplicate_")
def duplicate_(model: PreTrainedModel, layers: Selector, *, identity: bool = True, stack: str | None = None) -> Edit:
    """Repeat blocks of a stack, in place. Copies of consecutive blocks are placed together after them.

    Block i is layer i, from 1. In a model with 4 blocks, "2-3" gives the order 1, 2, 3, 2, 3, 4, and [1, 3] gives 1, 1,
    2, 3, 3, 4. Copies have weights of their own. If all layers are one block (ALBERT), that block runs more often.

    Args:
        model: A transformers model.
        layers: Layer selector: which blocks are repeated; "all" is every block.
        identity: True: the residual branches of the copies start at zero, so that the model's outputs stay the same
            until the copies are trained. The last weights of each branch are zeroed: the output projections of
            attention and feed-forward network, or a norm that follows them. False: the blocks run twice.
        stack: Name of the stack. None: the only one, or the encoder. A model with towers (CLIP) has no default.

    Returns:
        The edit, with the names of the copies' parameters (none if all layers are one block).

    Raises:
        ConfigError: If layer 0 is selected; if `identity` is True and a block cannot be an identity, for example
            because a norm follows its residual sum (BERT) or all layers are one block; or for the reasons of `keep_`.
            The model is then unchanged.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the stack does not exist.
        UnsupportedModelError: If the model's layers cannot be found.

    Source:
        Kim et al. 2023, "SOLAR 10.7B", arXiv:2312.15166, repeats blocks. Wu et al. 2024, "LLaMA Pro",
        arXiv:2401.02415, adds identity blocks, whose output projections start at zero.
    """
    edited = movable_stack(model, stack, _OP)
    chosen = blocks_of(edited, layers, _OP)
    zeros = _identity_values(model, edited, chosen) if identity else {}
    order: list[int] = []
    for is_chosen, run in groupby(range(1, edited.depth + 1), key=lambda layer: layer in chosen):
        blocks = list(run)
        order += blocks * 2 if is_chosen else blocks
    moved = rearrange(model, edited, order, _OP)
    for place, layer in enumerate(order):
        if layer in zeros and layer in order[:place]:
            parameters = dict(model.get_submodule(f"{moved.path}.{place}").named_parameters())
            with torch.no_grad():
                for name, value in zeros[layer].items():
                    parameters[name].fill_(value)
    settings = {"layers": chosen, "identity": identity, "stack": edited.name, **moved.settings}
    if zeros:  # number of a block -> name of a parameter in it -> its value in the copy
        settings["zeroed"] = {str(layer): values for layer, values in zeros.items()}
    return record(model, Edit("duplicate", edited.name, tuple(chosen), moved.added, settings))


def _identity_values(model: PreTrainedModel, stack: LayerStack, layers: Sequence[int]) -> dict[int, dict[str, float]]:
    """Find values of parameters that make each block return its input; return layer -> parameter name -> value.

    The model runs once on a small probe input, which gives each block's input; a copy of each block is then tried on
    it. First all weights are set to zero (to -1 in norms that scale by 1 + weight). Then the weights get their values
    back one after the other, in the order in which they are used. If the block then changes its input, the weight is
    set to zero again. In the end, the last weights of each residual branch are zero, and all other weights keep their
    values and have non-zero gradients. On the meta device nothing can be tried, and the result is empty. `layers` are
    indices from 1.

    Raises:
        ConfigError: If a block changes its input even if all its weights are zero, layers share a block, or a weight
            that must be zero belongs to other blocks too.
    """
    if len(set(stack.blocks)) < stack.depth:
        problem = "identity is True, but the layers of this model share one block"
        raise ConfigError(f"{_OP}: {problem}. Use identity=False (--repeat).")
    if main_device(model).type == "meta":
        return {}
    calls: dict[nn.Module, tuple[tuple[object, ...], dict[str, object]]] = {}

    def before(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        calls[block] = _plain(args, kwargs)

    zeros: dict[int, dict[str, float]] = {}
    with preserve_model(model):
        with ContextHooks() as hooks:  # removed before blocks are copied
            for layer in layers:
                hooks.add(stack.blocks[layer - 1].register_forward_pre_hook, before, with_kwargs=True)
            run_probe(stack.tower or model, _TOKENS, seed=1)
        for layer in layers:
            block, where = stack.blocks[layer - 1], f"{_OP}: block {layer} of the family '{family_of(model)}'"
            zeros[layer] = _zeros(copy.deepcopy(block), *calls[block], where=where)
    uses = Counter(parameter for block in stack.blocks for parameter in block.parameters())
    for layer, values in zeros.items():
        parameters = dict(stack.blocks[layer - 1].named_parameters())
        if shared := [name for name in values if uses[parameters[name]] > 1]:
            problem = f"block {layer} could only be an identity without '{shared[0]}', which other blocks share"
            raise ConfigError(f"{_OP}: {problem}. Use identity=False (--repeat).")
    return zeros


def _plain(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return a block's arguments for a call without a cache, with tensors copied, because the model may change them."""

    def plain(value: object) -> object:
        if isinstance(value, Tensor):
            return value.clone()
        return None if hasattr(value, "get_seq_length") else value

    without = {"use_cache": False} if "use_cache" in kwargs else {}
    return tuple(map(plain, args)), {**{key: plain(value) for key, value in kwargs.items()}, **without}


def _zeros(block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], *, where: str) -> dict[str, float]:
    """Find the parameters that must be 0 (or -1) so that a block returns its input; return name -> that value.

    The parameters of `block` are set to these values. It is a copy of a model's block, which the model called with
    `args` and `kwargs`. See `_identity_values` for the method. Raises ConfigError, whose message begins with `where`,
    if the block changes its input even if all its weights are zero.
    """
    parameters, order = dict(block.named_parameters()), _in_order_of_use(block, args, kwargs)
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    silent = {name: _silent_value(block, name) for name in order}
    for name in order:
        parameters[name].fill_(silent[name])
    if not _is_identity(block, args, kwargs):
        problem = "changes the state even if all its weights are zero"
        if _ends_in_norm(block, args, kwargs):
            problem = "ends in a norm, so that it returns norm(x) for x even if its residual branches are zero"
        raise ConfigError(f"{where} {problem}. Use identity=False (--repeat), which repeats the block, or insert_.")
    for name in order:
        parameters[name].copy_(values[name])
        if not _is_identity(block, args, kwargs):
            parameters[name].fill_(silent[name])
    return {name: silent[name] for name in order if not torch.equal(parameters[name], values[name])}


def _in_order_of_use(block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[str]:
    """Call a block with `args` and `kwargs`; return its parameters' names in the order of use, unused ones first."""
    called: list[str] = []
    names = {module: name for name, module in block.named_modules() if own_state(module)}
    with ContextHooks() as hooks:
        for module in names:
            hooks.add(module.register_forward_pre_hook, lambda module, _args: called.append(names[module]))
        block(*args, **kwargs)
    place = {name: number for number, name in reversed(list(enumerate(called)))}
    parameters = [name for name, _ in block.named_parameters()]
    return sorted(parameters, key=lambda name: place.get(name.rpartition(".")[0], -1))


def _silent_value(block: nn.Module, name: str) -> float:
    """Return the value of a parameter at which its module returns 0: -1 in a norm that scales by 1 + weight, else 0."""
    owner = block.get_submodule(name.rpartition(".")[0])
    weight = owner._parameters.get("weight")
    if "norm" not in type(owner).__name__.lower() or weight is None or weight.ndim != 1 or not name.endswith("weight"):
        return 0.0
    trial = copy.deepcopy(owner)
    states = torch.randn(1, 2, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    for value in (0.0, -1.0):
        for parameter_name, parameter in trial.named_parameters():
            parameter.fill_(value if parameter_name == "weight" else 0.0)
        try:
            if not trial(states).any():
                return value
        except (RuntimeError, ValueError, TypeError, AttributeError):  # a norm with other arguments or results
            return 0.0
    return 0.0


def _state(values: Sequence[object]) -> Tensor | None:
    return next((v for v in values if isinstance(v, Tensor) and v.ndim == 3 and v.is_floating_point()), None)


def _is_identity(block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Return whether a block, called with `args` and `kwargs`, returns exactly the state that it receives.

    The state is the first float tensor with 3 axes. False if none comes in or out.
    """
    received = _state([*args, *kwargs.values()])
    expected = None if received is None else received.clone()
    output = block(*args, **kwargs)
    returned = _state([output] if isinstance(output, Tensor) else list(output))
    if received is not None and expected is not None:
        received.copy_(expected)  # some blocks change their input in place
    return expected is not None and returned is not None and torch.equal(expected, returned)


def _ends_in_norm(block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    """Call a block with `args` and `kwargs`; return whether the last module with weights that it calls is a norm."""
    last = _in_order_of_use(block, args, kwargs)[-1].rpartition(".")[0]
    return "norm" in type(block.get_submodule(last)).__name__.lower()
