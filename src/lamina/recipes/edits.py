"""The model of a recipe: a config in place of the hub's, and edits, both checked before a model is loaded."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, create_model

from lamina.editing.freeze import check_parts, freeze_
from lamina.editing.insert import insert_
from lamina.editing.merge import merge_
from lamina.editing.reinit import reinit_
from lamina.editing.truncate import truncate_
from lamina.errors import ConfigError, LaminaError, LayerIndexError, check_known, convert_errors
from lamina.layers import select
from lamina.recipes.strict_yaml import Strict, checked
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

EDITS: Any = {edit.__name__.removesuffix("_"): edit for edit in (insert_, reinit_, truncate_, freeze_, merge_)}
_MANY = 10_000  # layers
_MORE_KEYS = {  # what a family's model reads of its config, though the config's class does not name it
    "deberta-v2": ("position_buckets", "share_att_key", "norm_rel_ebd"),
    "t5": ("decoder_start_token_id",),
}


def config_of(architecture: Mapping[str, Any]) -> PretrainedConfig:
    """Return a model's config from a recipe's `architecture`; its key "model_type" names the family."""
    from transformers import AutoConfig

    settings = dict(architecture)
    family = settings.pop("model_type", None)
    if family is None:
        raise ConfigError("'architecture' has no 'model_type'; it says which family the settings are of.")
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
    """Raise ConfigError unless a value is written as a layer selector; the model's depth is not known yet."""
    with suppress(LayerIndexError):
        select(value, _MANY, op="layers")


_CHECKED = {"Selector": check_selector, "Parts": lambda given: None if given is None else check_parts(given)}


def _parameters(edit: str) -> dict[str, inspect.Parameter]:
    check_known("recipe", [edit], EDITS, "edit")
    parameters = inspect.signature(EDITS[edit]).parameters
    return {name: parameter for name, parameter in parameters.items() if name not in ("model", "generator")}


@cache
def arguments_of(edit: str) -> type[BaseModel]:
    """Return a pydantic model of an edit's arguments, all of them optional."""
    types: Any = {name: (f"{parameter.annotation} | None", None) for name, parameter in _parameters(edit).items()}
    arguments = create_model(edit, __base__=Strict, **types)
    checks = {name: Annotated[Any, checked(check)] for name, check in _CHECKED.items()}
    arguments.model_rebuild(_types_namespace={"Literal": Literal, **checks})
    return arguments


def check_edit(edit: str, arguments: Mapping[str, Any]) -> None:
    """Raise a ValidationError if an argument of an edit is unknown or its value is wrong in itself."""
    arguments_of(edit).model_validate(dict(arguments), strict=True)


def is_made(edit: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether an edit is applied: not if its layers are None.

    Raises:
        ConfigError: If a required argument is missing.
    """
    for name, parameter in _parameters(edit).items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"recipe: {edit} was given no '{name}'; it is required.")
    return arguments.get("keep" if edit == "truncate" else "layers", "") is not None


def apply_edits(
    model: PreTrainedModel, edits: Sequence[tuple[str, Mapping[str, Any]]], *, seed: int, where: str
) -> None:
    """Apply edits to a model in place and in order; random weights depend on `seed`, and errors name `where`."""
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
