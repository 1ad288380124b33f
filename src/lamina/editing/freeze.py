"""Keep layers from being trained, or train the inserted ones alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lamina.editing.checks import check_editable, check_shared
from lamina.editing.inserted import InsertedLayer
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers import default_stack, select, stacks
from lamina.layers.layer_modules import layer_modules, stack_modules

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector

_OP = "freeze_"


def freeze_(
    model: PreTrainedModel,
    layers: Selector = "all",
    stack: str | None = None,
    *,
    train: Literal["inserted"] | None = None,
) -> Edit:
    """Set `requires_grad` to False for layers, in place.

    Layer 0 is what the stack computes before its first block: the embeddings, shared ones included (those a head
    uses for its output too). Layer i is block i; the last has the norm after it, where its state is the normed one.
    Poolers and heads belong to no layer and stay as they are.

    Args:
        model: A transformers model.
        layers: Which layers, as a layer selector.
        stack: Name of the stack; None is the only one, or the encoder. With `train`, None is every stack.
        train: "inserted" leaves the inserted layers out of the freeze and makes them trainable, so that they, the
            pooler and the head are all that trains. If layers cannot be read, as in convolutional networks, "all"
            of them are the whole backbone.

    Returns:
        The edit, with the names of the frozen parameters.

    Raises:
        ConfigError: If `train` has another value or nothing was inserted, the layers have no parameters, single layers
            are named of a stack that has no module per block or shares its blocks, or the model cannot be edited.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If there is no such stack.
    """
    check_editable(model, _OP)
    inserted = [module for module in model.modules() if isinstance(module, InsertedLayer)] if train else []
    if train not in (None, "inserted"):
        raise ConfigError(f"{_OP}: train is {train!r}; it is 'inserted' or None.")
    if train and not inserted:
        raise ConfigError(f"{_OP}: train is 'inserted', and the model has no inserted layers. Call insert_ first.")
    is_every = train is not None and stack is None
    try:
        edited = list(stacks(model).values()) if is_every else [default_stack(model, stack, op=_OP)]
    except UnsupportedModelError:
        if not is_every or layers != "all":
            raise
        edited = []
    numbers = [select(layers, part.layers, op=_OP) for part in edited]
    modules = set().union(*(_modules(model, part, chosen) for part, chosen in zip(edited, numbers, strict=True)))
    if not edited:
        modules = set(getattr(model, "base_model", model).modules())
    spared = {parameter for layer in inserted for parameter in layer.parameters()}
    frozen = {parameter for module in modules for parameter in module.parameters(recurse=False)} - spared
    if not frozen | spared:
        raise ConfigError(f"{_OP}: the named layers have no parameters; there is nothing to freeze.")
    for parameter in frozen | spared:
        parameter.requires_grad_(parameter in spared)
    names = tuple(name for name, parameter in model.named_parameters() if parameter in frozen)
    named = sorted(set().union(*numbers))
    name = edited[0].name if len(edited) == 1 else "all"
    settings = {"layers": "all" if layers == "all" else named, "stack": None if is_every else name, "train": train}
    return record(model, Edit("freeze", name, tuple(named), names, settings))


def _modules(model: PreTrainedModel, stack: LayerStack, chosen: list[int]) -> set[nn.Module]:
    """The modules of layers, each with its own parameters."""
    if len(chosen) == stack.layers:
        return stack_modules(model, stack)
    if not stack.blocks:
        raise ConfigError(
            f"{_OP}: single layers of the {stack.name} stack came; it has no module per block, so only all of it can "
            "be frozen. Use layers='all'."
        )
    check_shared(stack, chosen, _OP)
    return set().union(*layer_modules(model, stack, chosen).values())
