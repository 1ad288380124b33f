"""Keep layers from being trained, or all but some parts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from lamina.editing.editable import check_editable, check_shared
from lamina.editing.inserted_layer import is_inserted
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import default_stack, select, stacks
from lamina.layers.layer_modules import layer_modules, stack_modules

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector

Parts = Literal["inserted"] | Sequence[str]
"""What is to train, as `freeze_` takes it."""
INSERTED = "inserted"  # the inserted layers, among them
_OP = "freeze_"


def freeze_(
    model: PreTrainedModel,
    layers: Selector = "all",
    stack: str | None = None,
    *,
    train: Parts | None = None,
) -> Edit:
    """Set `requires_grad` to False for layers, in place; or for all of a model but the parts that are named.

    Layer 0 is what the stack computes before its first block: the embeddings, shared ones included (those a head
    uses for its output too). Layer i is block i; the last has the norm after it, where its state is the normed one.
    Poolers and heads belong to no layer and stay as they are, unless `train` is a list.

    Args:
        model: A transformers model.
        layers: Which layers, as a layer selector.
        stack: Name of the stack; None is the only one, or the encoder. With `train`, None is every stack.
        train: "inserted" leaves the inserted layers out of the freeze and makes them trainable, so that they, the
            pooler and the head are all that trains. If layers cannot be read, as in convolutional networks, "all"
            of them are the whole backbone. A list names the parts that train, and freezes everything else, poolers and
            heads too: "inserted" for the inserted layers, and parts of parameters' names, such as "classifier",
            "LayerNorm" or "layer.*.output" ("*" stands for any letters of one name between dots).

    Returns:
        The edit, with the names of the frozen parameters.

    Raises:
        ConfigError: If `train` names nothing or nothing was inserted, a list comes with `layers` or `stack`, the layers
            have no parameters, single layers are named of a stack that has no module per block or shares its blocks,
            or the model cannot be edited.
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If there is no such stack, or no such part to train.
    """
    check_editable(model, _OP)
    spared = _spared(model, train)
    listed = None if train is None or isinstance(train, str) else list(train)
    if listed and (layers != "all" or stack is not None):
        came = f"layers or stack came with train={listed}"
        raise ConfigError(f"{_OP}: {came}; a list freezes all that it does not name. Leave them out.")
    is_every = train is not None and stack is None
    try:
        edited = list(stacks(model).values()) if is_every else [default_stack(model, stack, op=_OP)]
    except UnsupportedModelError:
        if not is_every or layers != "all":
            raise
        edited = []
    numbers = [select(layers, part.layers, op=_OP) for part in edited]
    if listed:
        modules = set(model.modules())
    elif edited:
        modules = set().union(*(_modules(model, part, chosen) for part, chosen in zip(edited, numbers, strict=True)))
    else:
        modules = set(getattr(model, "base_model", model).modules())
    frozen = {parameter for module in modules for parameter in module.parameters(recurse=False)} - spared
    if not frozen | spared:
        raise ConfigError(f"{_OP}: the named layers have no parameters; there is nothing to freeze.")
    for parameter in frozen | spared:
        parameter.requires_grad_(parameter in spared)
    names = tuple(name for name, parameter in model.named_parameters() if parameter in frozen)
    named = sorted(set().union(*numbers))
    name = edited[0].name if len(edited) == 1 else "all"
    settings = {"layers": "all" if layers == "all" else named, "stack": None if is_every else name}
    settings["train"] = listed or train
    return record(model, Edit("freeze", name, tuple(named), names, settings))


def check_parts(train: object) -> None:
    """Raise an error if what is to train has no form that `freeze_` takes; the model is not known yet."""
    if isinstance(train, str) and train != INSERTED:
        raise UnknownNameError(op=_OP, got=train, known=[INSERTED, "a list of parts of the model"], what="train")
    if not isinstance(train, Sequence) or not train or not all(isinstance(part, str) for part in train):
        raise ConfigError(f"{_OP}: train is {train!r}; it is '{INSERTED}', or a list of parts of the model.")


def is_trained(name: str, train: str | Sequence[str] | None) -> bool:
    """Whether a parameter of this name is one that `freeze_` makes trainable, as its `train` says."""
    parts = [train] if isinstance(train, str) else train or ()
    return any(is_inserted(name) if part == INSERTED else _has_part(name, part) for part in parts)


def _has_part(name: str, part: str) -> bool:
    """Whether the names between the dots of `part` stand in a parameter's name, one after the other."""
    names, wanted = name.split("."), part.split(".")
    places = range(len(names) - len(wanted) + 1)
    return any(all(map(fnmatchcase, names[place : place + len(wanted)], wanted)) for place in places)


def _spared(model: PreTrainedModel, train: str | Sequence[str] | None) -> set[nn.Parameter]:
    """The parameters that are to train."""
    if train is None:
        return set()
    check_parts(train)
    parts = [train] if isinstance(train, str) else train
    named = dict(model.named_parameters(remove_duplicate=False))
    for part in parts:
        if any(is_trained(name, [part]) for name in named):
            continue
        if part == INSERTED:
            raise ConfigError(f"{_OP}: train is {train!r}, and the model has no inserted layers. Call insert_ first.")
        known = dict.fromkeys(word for name in named for word in name.split(".") if not word.isdecimal())
        raise UnknownNameError(op=_OP, got=part, known=known, what="part to train")
    return {parameter for name, parameter in named.items() if is_trained(name, parts)}


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
