"""The edits that a recipe may name: their arguments, checked before there is a model, and making them."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, create_model

from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.merge import merge_
from lamina.editing.reinit import reinit_
from lamina.editing.truncate import truncate_
from lamina.errors import ConfigError, LaminaError, LayerIndexError, UnknownNameError
from lamina.layers import select
from lamina.recipes.located import Strict
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

EDITS: dict[str, Any] = {
    "insert": insert_,
    "reinit": reinit_,
    "truncate": truncate_,
    "freeze": freeze_,
    "merge": merge_,
}
_LAYERS = {"truncate": "keep"}  # what names the layers of an edit, where it is not "layers"
_GIVEN = ("model", "generator")
_MANY = 10_000  # layers


def check_selector(value: object) -> object:
    """Give a layer selector back.

    Raises:
        ConfigError: If it has none of the forms of a selector.
    """
    with suppress(LayerIndexError):  # how many layers there are is not known yet
        select(value, _MANY, op="layers")
    return value


@cache
def arguments_of(edit: str) -> type[BaseModel]:
    """The arguments of an edit as a pydantic model, none of them required.

    Raises:
        UnknownNameError: If there is no such edit.
    """
    if edit not in EDITS:
        raise UnknownNameError(op="recipe", got=edit, known=EDITS, what="edit")
    parameters = inspect.signature(EDITS[edit]).parameters
    given: dict[str, Any] = {
        name: (f"{one.annotation} | None", None) for name, one in parameters.items() if name not in _GIVEN
    }
    made = create_model(edit, __base__=Strict, **given)
    made.model_rebuild(
        _types_namespace={"Literal": Literal, "Selector": Annotated[Any, AfterValidator(check_selector)]}
    )
    return made


def check_edit(edit: str, arguments: Mapping[str, Any]) -> None:
    """Check an edit and its arguments, as far as that can be done without a model.

    Raises:
        UnknownNameError: If there is no such edit.
        ValidationError: If an argument does not exist or does not fit.
    """
    arguments_of(edit).model_validate(dict(arguments), strict=True)


def missing_arguments(edit: str, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments that an edit needs and was not given."""
    parameters = inspect.signature(EDITS[edit]).parameters
    return [name for name, one in parameters.items() if name not in (*_GIVEN, *arguments) and one.default is one.empty]


def is_left_out(edit: str, arguments: Mapping[str, Any]) -> bool:
    """Whether an edit's layers are None: it is then not made."""
    return arguments.get(_LAYERS.get(edit, "layers"), "") is None


def apply_edits(
    model: PreTrainedModel, edits: Sequence[tuple[str, Mapping[str, Any]]], *, seed: int, where: str
) -> None:
    """Edit a model in place, with random numbers of the seed.

    Args:
        model: The model.
        edits: Name and arguments of each, in their order.
        seed: Of the run.
        where: The place in the recipe, named in errors.

    Raises:
        LaminaError: If an edit does not fit the model.
    """
    for number, (name, arguments) in enumerate(edits):
        function = EDITS[name]
        random = {}
        if "generator" in inspect.signature(function).parameters:
            random["generator"] = torch.Generator().manual_seed(derive_seed(seed, "edit", number))
        try:
            function(model, **arguments, **random)
        except LaminaError as error:
            error.add_note(f"{where}, {name}")
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}, {name}: {error}.") from error
