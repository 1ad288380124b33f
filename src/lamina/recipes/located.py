"""Errors that know their place in a recipe: raised inside pydantic's checks, told in one sentence with the line."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lamina.errors import ConfigError, DataError, LaminaError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


class YamlFile(NamedTuple):
    """The keys and values of a YAML file, and where they stand."""

    fields: dict[str, Any]
    root: yaml.Node

    def find(self, place: Sequence[object]) -> tuple[int, list[object]]:
        """The line (from 1) of the last key or item of a place that the file has, and the place up to there."""
        node, line, there = self.root, self.root.start_mark.line, []
        for part in place:
            pairs: list[Any] = []
            if isinstance(node, yaml.MappingNode):
                pairs = [pair for pair in node.value if pair[0].value == str(part)]  # the last one is the file's own
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                pairs = [(item, item) for item in node.value[part : part + 1]]
            if not pairs:
                break
            line, node = pairs[-1][0].start_mark.line, pairs[-1][1]
            there.append(part)
        return line + 1, there


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice in a mapping, as written: before keys of other mappings are merged in."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                what = f"line {line}: the key '{key.value}' is also in line {lines[key.value]}"
                raise DataError(f"recipe: {self.name}, {what}.", path=self.name, row=line)
            lines[key.value] = line
        return node


def read_yaml(path: Path) -> YamlFile:
    """Read a recipe's YAML file, or raise a DataError; no code in it is run."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        loader.name = str(path)
        node = loader.get_single_node()
        fields = node and loader.construct_document(node)
    except OSError as error:
        raise DataError(f"recipe: {path} cannot be read ({error.strerror}); it must be a YAML file.") from error
    except LaminaError:
        raise
    except Exception as error:  # constructors raise what they like
        raise DataError(f"recipe: {path} is not YAML; {' '.join(str(error).split())}.", path=str(path)) from error
    if node is None or not isinstance(fields, dict):
        raise DataError(f"recipe: {path} holds no keys; it needs 'model' and 'tasks'.", path=str(path))
    return YamlFile(fields, node)


class Strict(BaseModel):
    """Fields by name; any other key is an error that names the nearest."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                fail(UnknownNameError(op="recipe", got=key, known=cls.model_fields, what="key"), key)
        return given


def fail(error: LaminaError, *place: str | int) -> NoReturn:
    """Raise an error inside a pydantic check, at a place (keys, list positions) below what is checked."""
    kind = PydanticCustomError("lamina", "{error}", {"error": error})
    raise ValidationError.from_exception_data("recipe", [InitErrorDetails(type=kind, loc=place, input=None)])


@contextmanager
def at(*place: str | int, blame: Iterable[str] = ()) -> Iterator[None]:
    """Give errors inside a pydantic check their place, or that of the first key to `blame` there that they name."""
    try:
        yield
    except ValidationError as error:
        (first, *_) = error.errors()
        fail(reason_of(first), *place, *first["loc"])
    except LaminaError as error:
        if isinstance(error, UnknownNameError):
            names = [error.got, error.what, error.op]
        else:
            names = re.findall(r"[\w.]+", "\n".join([str(error), *getattr(error, "__notes__", ())]))
        blamed = [key for key in blame if key in names or key.rpartition(".")[2] in names]
        fail(error, *place, *blamed[:1])


def checked(check: Callable[[Any], Any]) -> AfterValidator:
    """Have pydantic run a check that raises Lamina's errors, which blame keys of the value; the value stays."""

    def run(value: Any) -> Any:
        with at(blame=value if isinstance(value, dict) else ()):
            check(value)
        return value

    return AfterValidator(run)


def reason_of(details: Mapping[str, Any]) -> LaminaError:
    """What one error of pydantic says."""
    error, given = details.get("ctx", {}).get("error"), details["input"]
    if isinstance(error, LaminaError):
        return error
    if details["type"] == "literal_error" and isinstance(given, str):
        known = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        return UnknownNameError(op="recipe", got=given, known=known, what=str(details["loc"][-1]).strip("[]"))
    message = details["msg"].removeprefix("Value error, ")
    return ConfigError(f"{message[0].lower()}{message[1:]}" + ("" if given is None else f", not {given!r}"[:80]))


def raise_first(error: ValidationError, *, op: str, file: YamlFile | None) -> NoReturn:
    """Raise the first thing that is wrong as an error of Lamina's, with its line and place."""
    first = error.errors()[0]
    reason, place = reason_of(first), [part for part in first["loc"] if part != "[key]"]
    if file is not None:
        line, there = file.find(place)
        op, missing = f"{op}, line {line}", first["type"] == "missing"
        place = [*there, *place[len(there) :]] if missing else there
    unknown = isinstance(reason, UnknownNameError)
    if unknown and place[-1:] == [reason.got]:
        place = place[:-1]
    where = f"{op}, {'.'.join(map(str, place))}" if place else op
    raised = ConfigError(f"{where}: {str(reason).rstrip('.')}.")
    if unknown:
        raised = UnknownNameError(op=where, got=reason.got, known=reason.known, what=reason.what)
    for note in getattr(reason, "__notes__", ()):
        raised.add_note(note)
    raise raised from error
