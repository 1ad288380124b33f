"""Errors that know their place in a recipe: raised inside pydantic's checks, told in one sentence with the line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lamina.errors import ConfigError, LaminaError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from lamina.recipes.yaml_lines import YamlFile

Place = tuple[str | int, ...]


class Strict(BaseModel):
    """Fields by name; any other key is an error that names the nearest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for key in given:
                if key not in cls.model_fields:
                    fail((key,), UnknownNameError(op="recipe", got=key, known=cls.model_fields, what="key"))
        return given


def fail(place: Place, error: LaminaError) -> NoReturn:
    """Raise an error inside a pydantic check.

    Args:
        place: Keys and list positions below what is checked.
        error: What is wrong there.
    """
    kind = PydanticCustomError("lamina", "{error}", {"error": error})
    raise ValidationError.from_exception_data("recipe", [InitErrorDetails(type=kind, loc=place, input=None)])


def attempt(place: Place, keys: Iterable[str], action: Callable[[], Any]) -> Any:
    """Do something whose errors belong to a place, or to the key there that the error names.

    Args:
        place: Keys and list positions below what is checked.
        keys: What may be blamed: keys of that place.
        action: What is done; its LaminaErrors and pydantic's errors are raised with their place.
    """
    try:
        return action()
    except ValidationError as error:
        (first, *_) = error.errors()
        fail((*place, *first["loc"]), reason_of(first))
    except LaminaError as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        unknown = isinstance(error, UnknownNameError)
        names = (error.got, _what(error), error.op) if unknown else re.findall(r"[\w.]+", told)
        blamed = [key for key in keys if key in names or key.rpartition(".")[2] in names]
        fail((*place, *blamed[:1]), error)


def reason_of(details: Mapping[str, Any]) -> LaminaError:
    """What one error of pydantic says."""
    error, given = details.get("ctx", {}).get("error"), details["input"]
    if isinstance(error, LaminaError):
        return error
    if details["type"] == "literal_error" and isinstance(given, str):
        known = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        return UnknownNameError(op="recipe", got=given, known=known, what=str(details["loc"][-1]).strip("[]"))
    said = details["msg"].removeprefix("Value error, ")
    return ConfigError(f"{said[0].lower()}{said[1:]}" + ("" if given is None else f", not {given!r}"[:80]))


def raise_first(error: ValidationError, *, op: str, file: YamlFile | None = None) -> NoReturn:
    """Raise the first thing that is wrong as an error of Lamina's, with its line and place.

    Args:
        error: All that is wrong.
        op: What is read, such as the path of a recipe.
        file: Where it stands; None: not in a file.

    Raises:
        UnknownNameError: If a name does not exist.
        ConfigError: If a value does not fit.
    """
    first = error.errors()[0]
    reason, place = reason_of(first), [part for part in first["loc"] if part != "[key]"]
    if file is not None:
        line, there = file.find(place)
        op, missing = f"{op}, line {line}", first["type"] == "missing"
        place = [*there, *place[len(there) :]] if missing else there
    if isinstance(reason, UnknownNameError):
        place = place[:-1] if place and place[-1] == reason.got else place
    where = f"{op}, {'.'.join(map(str, place))}" if place else op
    if isinstance(reason, UnknownNameError):
        raised: LaminaError = UnknownNameError(op=where, got=reason.got, known=reason.known, what=_what(reason))
    else:
        raised = ConfigError(f"{where}: {str(reason).rstrip('.')}.")
    for note in getattr(reason, "__notes__", ()):
        raised.add_note(note)
    raise raised from error


def _what(error: UnknownNameError) -> str:
    return str(error).partition(": unknown ")[2].partition(f" '{error.got}'")[0]
