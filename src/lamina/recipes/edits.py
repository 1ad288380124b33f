"""The edits that a recipe names, and the model config in a recipe. Both are checked before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, create_model

from lamina.editing.duplicate import duplicate_
from lamina.editing.freeze import check_parts, freeze_
from lamina.editing.insert import RANDOM, insert_
from lamina.editing.keep import drop_, keep_, truncate_
from lamina.editing.merge import merge_
from lamina.editing.reinit import reinit_
from lamina.errors import ConfigError, LaminaError, LayerIndexError, check_known, convert_errors
from lamina.layers import select
from lamina.recipes.strict_yaml import Strict, checked, error_at
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.editing.record import Edit

Arguments: TypeAlias = "Mapping[str, object]"  # name of a parameter of an edit -> its value, from YAML
# Name of an edit in recipes -> its function. Each changes a model in place and takes the arguments of a recipe.
EDITS: dict[str, Callable[..., Edit]] = {
    edit.__name__.removesuffix("_"): edit
    for edit in (insert_, reinit_, truncate_, keep_, drop_, duplicate_, freeze_, merge_)
}
_MANY = 10_000  # layers of an imaginary model that is deep enough for any selector
# Settings that the models of a family read from their config, although the config's class does not define them.
_MORE_KEYS = {
    "deberta-v2": ("position_buckets", "share_att_key", "norm_rel_ebd"),
    "t5": ("decoder_start_token_id",),
}


def config_of(architecture: Mapping[str, object]) -> PretrainedConfig:
    """Return the model config that a recipe's `architecture` describes: the family ("model_type") and its settings.

    Raises ConfigError if "model_type" is missing or is not a family of transformers, or a value is not allowed;
    UnknownNameError if the family has no such setting.
    """
    from transformers import AutoConfig

    settings = dict(architecture)
    family = settings.pop("model_type", None)
    if family is None:
        raise ConfigError("'architecture' has no 'model_type'; it says which family the settings belong to.")
    if not isinstance(family, str):
        raise ConfigError(f"model_type is {family!r}; it must be the name of a family, such as bert.")
    try:
        default = AutoConfig.for_model(family)
    except ValueError as error:
        raise ConfigError(f"transformers has no family '{family}'; model_type names one.") from error
    known = [*default.to_dict(), *default.attribute_map, *_MORE_KEYS.get(family, ())]
    check_known("recipe", settings, known, "key")
    with convert_errors(lambda reason: ConfigError(reason)):
        return AutoConfig.for_model(family, **settings)


def check_selector(value: object) -> None:
    """Raise ConfigError unless a value has the form of a layer selector; the model may not have such layers."""
    with suppress(LayerIndexError):
        select(value, _MANY, op="layers")


# Name of a type in the signatures of edits -> the check of its values, which pydantic cannot check by itself.
_CHECKED = {"Selector": check_selector, "Parts": lambda value: None if value is None else check_parts(value)}


def _parameters(edit: str) -> dict[str, inspect.Parameter]:
    """Return name -> parameter that a recipe may set for an edit; raise UnknownNameError if there is no such edit."""
    check_known("recipe", [edit], EDITS, "edit")
    parameters = inspect.signature(EDITS[edit]).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in ("model", "generator")}


@cache
def arguments_of(edit: str) -> type[BaseModel]:
    """Return a pydantic model that checks an edit's arguments, which are all optional in it.

    Raises UnknownNameError if there is no such edit.
    """
    types: dict[str, Any] = {
        name: (f"{parameter.annotation} | None", None) for name, parameter in _parameters(edit).items()
    }
    arguments = create_model(edit, __base__=Strict, **types)
    checks = {name: Annotated[object, checked(check)] for name, check in _CHECKED.items()}
    arguments.model_rebuild(_types_namespace={"Literal": Literal, **checks})
    return arguments


def check_named_edit(
    edit: Mapping[str, Arguments | None],
    *,
    op: str = "recipe",
    more: Mapping[str, type[Strict]] = MappingProxyType({}),
) -> None:
    """Check an edit of a recipe, or of a plan of `lamina edit`: one name with its arguments (None: no arguments).

    `more` has the edits that only a plan may have, name -> model of the arguments; it is empty for a recipe. The error
    for an unknown edit begins with `op`. Raises ConfigError unless there is exactly one name; ValidationError if there
    is no such edit, its arguments are not a mapping, or an argument is not allowed.
    """
    if len(edit) != 1:
        raise ConfigError("each edit is one name with its arguments; the next starts with '-'")
    for name, arguments in edit.items():
        with error_at(name):
            check_known(op, [name], [*EDITS, *more], "edit")
            if arguments is not None and not isinstance(arguments, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                rule = "it takes arguments by name, as in 'drop: {layers: 2}', or none"
                raise ConfigError(f"the edit '{name}' has {arguments!r} in place of arguments; {rule}")
            if name in more:
                more[name].model_validate({} if arguments is None else arguments, strict=True)
            else:
                check_edit(name, {} if arguments is None else arguments)


def check_edit(edit: str, arguments: Arguments) -> None:
    """Check the arguments of an edit, as far as that is possible without a model.

    Raises ValidationError if an argument or value does not fit the edit; UnknownNameError if there is no such edit.
    """
    arguments_of(edit).model_validate(dict(arguments), strict=True)


def is_random(edit: str, arguments: Arguments) -> bool:
    """Return whether an edit with these arguments draws random weights, which a seed determines."""
    return edit == "reinit" or (edit == "insert" and arguments.get("init") in RANDOM)


def is_applied(edit: str, arguments: Arguments) -> bool:
    """Return whether an edit is to be applied; False if its layers (`keep` of "truncate") are given as None.

    Raises ConfigError if a required argument is missing, and UnknownNameError if the edit does not exist.
    """
    for name, parameter in _parameters(edit).items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"recipe: {edit} lacks '{name}'; it is required.")
    return arguments.get("keep" if edit == "truncate" else "layers", "") is not None


def apply_edits(model: PreTrainedModel, edits: Sequence[tuple[str, Arguments]], *, seed: int, where: str) -> None:
    """Apply edits to a model, in place and in order. Each edit is a name with its arguments.

    `seed` decides random weights; each edit has its own random numbers. `where` is the source of the edits for
    messages, such as "recipe, methods.new". Raises LaminaError, which names `where` and the edit, if an edit cannot be
    applied to the model. Earlier edits stay applied.
    """
    for number, (name, arguments) in enumerate(edits):
        random = {}
        if "generator" in inspect.signature(EDITS[name]).parameters:
            random["generator"] = torch.Generator().manual_seed(derive_seed(seed, "edit", number))
        try:
            EDITS[name](model, **arguments, **random)
        except LaminaError as error:
            error.add_note(f"{where}, {name}")
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}, {name}: {error}.") from error
