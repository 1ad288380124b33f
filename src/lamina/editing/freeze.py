"""Freeze layers of a model, or everything except some parts."""

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
from lamina.layers.selectors import is_all
from lamina.utils import check_types

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector

Parts = Literal["inserted"] | Sequence[str]
"""The argument `train` of `freeze_`: the parts of a model that stay trainable."""
INSERTED = "inserted"  # the entry of `Parts` that names the inserted layers
_OP = "freeze_"


@check_types("freeze_")
def freeze_(
    model: PreTrainedModel,
    layers: Selector = "all",
    stack: str | None = None,
    *,
    train: Parts | None = None,
) -> Edit:
    """Freeze layers in place (set `requires_grad` to False), or with `train` everything except the named parts.

    Layer 0 is all that comes before the stack's first block: the embeddings, including weights that a head shares with
    them. Layer i is block i, from 1; the norm after the last block belongs to the last layer. Poolers and heads belong
    to no layer and are not changed, unless `train` is a list. If an error is raised, the model is unchanged.

    Args:
        model: A transformers model.
        layers: Layer selector: which layers to freeze.
        stack: Name of the stack. None: the only one, or the encoder; with `train`, every stack.
        train: The parts that stay trainable. "inserted": all inserted layers become trainable, and the rest of `layers`
            is frozen; poolers and heads stay as they are. (If the model's layers cannot be found, as in convolutional
            networks, `layers="all"` means the whole backbone.) A list: the named parts become trainable, and everything
            else is frozen, including poolers and heads. Entries are "inserted" and parts of parameter names, such as
            "classifier", "LayerNorm" or "layer.*.output" ("*" stands for any text between two dots). None: nothing is
            excepted.

    Returns:
        The edit, which the model records, with the names of the frozen parameters.

    Raises:
        ConfigError: If an argument is not valid; if `train` is empty, or names inserted layers and the model has none;
            if `train` is a list and `layers` or `stack` is given too; if the layers have no parameters; if only some
            layers are selected, and the stack has no module per block; if only some of the layers that share a block
            are selected; if the model has several towers and none is named (without `train`); or if it cannot be edited
            (quantised, compiled, offloaded, with adapters).
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the stack, or a part in `train`, does not exist.
        UnsupportedModelError: If the model's layers cannot be found, unless only `train` is given.
    """
    check_editable(model, _OP)
    trainable = _trainable_parameters(model, train)
    listed = None if train is None or isinstance(train, str) else list(train)
    if listed and (not is_all(layers) or stack is not None):
        problem = f"layers or stack is set beside train={listed}"
        raise ConfigError(f"{_OP}: {problem}; a list freezes all that it does not name. Leave them out.")
    is_every = train is not None and stack is None
    try:
        edited = list(stacks(model).values()) if is_every else [default_stack(model, stack, op=_OP)]
    except UnsupportedModelError:
        if not is_every or not is_all(layers):
            raise
        edited = []
    numbers = [select(layers, part.layers, op=_OP) for part in edited]
    if listed:
        modules = set(model.modules())
    elif edited:
        pairs = zip(edited, numbers, strict=True)
        modules = set().union(*(_modules_of_layers(model, part, chosen) for part, chosen in pairs))
    else:
        modules = set(getattr(model, "base_model", model).modules())
    frozen = {parameter for module in modules for parameter in module.parameters(recurse=False)} - trainable
    if not frozen | trainable:
        raise ConfigError(f"{_OP}: the named layers have no parameters; there is nothing to freeze.")
    for parameter in frozen | trainable:
        parameter.requires_grad_(parameter in trainable)
    names = tuple(name for name, parameter in model.named_parameters() if parameter in frozen)
    named = sorted(set().union(*numbers))
    name = edited[0].name if len(edited) == 1 else "all"
    settings = {"layers": "all" if is_all(layers) else named, "stack": None if is_every else name}
    settings["train"] = listed or train
    return record(model, Edit("freeze", name, tuple(named), names, settings))


def check_parts(train: object) -> None:
    """Raise an error unless `train` is a possible argument of `freeze_` other than None.

    A text other than "inserted" raises UnknownNameError. Anything else that is not a list of texts, or an empty one,
    raises ConfigError.
    """
    if isinstance(train, str) and train != INSERTED:
        raise UnknownNameError(op=_OP, got=train, known=[INSERTED, "a list of parts of the model"], what="train")
    if not isinstance(train, Sequence) or not train or not all(isinstance(part, str) for part in train):
        raise ConfigError(f"{_OP}: train is {train!r}; it is '{INSERTED}', or a list of parts of the model.")


def is_trained(name: str, train: str | Sequence[str] | None) -> bool:
    """Return whether `train`, the argument of `freeze_`, names the parameter with the full name `name`; None: False."""
    parts = [train] if isinstance(train, str) else train or ()
    return any(is_inserted(name) if part == INSERTED else _contains_part(name, part) for part in parts)


def _contains_part(name: str, part: str) -> bool:
    """Return whether `part` matches consecutive words of `name`.

    Dots separate the words, and `*` matches within one word.
    """
    words, patterns = name.split("."), part.split(".")
    starts = range(len(words) - len(patterns) + 1)
    return any(all(map(fnmatchcase, words[start : start + len(patterns)], patterns)) for start in starts)


def _trainable_parameters(model: PreTrainedModel, train: str | Sequence[str] | None) -> set[nn.Parameter]:
    """Return the parameters that `train`, the argument of `freeze_`, names. None: an empty set.

    Raises:
        ConfigError: If `train` is neither a text nor a list of texts, is empty, or names inserted layers and the model
            has none.
        UnknownNameError: If `train` is a text other than "inserted", or names a part that no parameter has.
    """
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
        inserted = [INSERTED] if any(is_trained(name, [INSERTED]) for name in named) else []
        first = [*inserted, *reversed([name for name, _ in model.named_children()])]  # heads come last in a model
        see = f"model.named_parameters(); such as {', '.join(first[:5])}"
        raise UnknownNameError(op=_OP, got=part, known=known, what="part to train", see=see)
    return {parameter for name, parameter in named.items() if is_trained(name, parts)}


def _modules_of_layers(model: PreTrainedModel, stack: LayerStack, chosen: list[int]) -> set[nn.Module]:
    """Return all modules, at any depth, of the chosen layers of a stack.

    Raises:
        ConfigError: If only some layers are chosen, and the stack has no module per block; or if only some of the
            layers that share a block are chosen.
    """
    if len(chosen) == stack.layers:
        return stack_modules(model, stack)
    if not stack.blocks:
        problem = f"got single layers of the {stack.name} stack; it has no module per block"
        raise ConfigError(f"{_OP}: {problem}, so only all of it can be frozen. Use layers='all'.")
    check_shared(stack, chosen, _OP)
    return set().union(*layer_modules(model, stack, chosen).values())
