"""Read YAML strictly, and turn errors of pydantic into one sentence with the key and the line."""

from __future__ import annotations

import re
import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from lamina.errors import ConfigError, DataError, LaminaError, UnknownNameError, first_line
from lamina.utils import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


_YAML = "tag:yaml.org,2002:"
_TAGS = {f"{_YAML}{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_DEPTH, _MOST_NODES, _MOST_BYTES = 50, 100_000, 1 << 20  # of a recipe


class YamlFile(NamedTuple):
    """The contents of a YAML file, and the nodes that know the lines."""

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
            if not pairs and part == 0:
                continue  # what may be a list is written without one
            if not pairs:
                break
            line, node = pairs[-1][0].start_mark.line, pairs[-1][1]
            there.append(part)
        return line + 1, there


class _Loader(yaml.SafeLoader):
    """Refuses what would be lost, run out of bounds or become an object: all before it is built.

    That is a key that comes twice in a mapping, as written (before keys of other mappings are merged in) or is no name
    or number; aliases that amount to too much, or to themselves; too deep a nesting; and tags, dates included.
    """

    yaml_implicit_resolvers: ClassVar = {  # a date is a text
        first: [rule for rule in rules if not rule[0].endswith(":timestamp")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name, self._depth, self._sizes = name, 0, dict[yaml.Node, int]()

    def compose_node(self, parent: Any, index: Any) -> Any:
        line, is_alias = self.peek_event().start_mark.line + 1, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEPTH:
            raise self.wrong(line, f"it is nested more than {_DEPTH} deep")
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._sizes:
            raise self.wrong(line, "an alias names what it is in")
        if not is_alias:
            parts = [] if isinstance(node, yaml.ScalarNode) else node.value
            parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
            self._sizes[node] = 1 + sum(map(self._sizes.__getitem__, parts))
        if self._sizes[node] > _MOST_NODES:
            raise self.wrong(line, f"with its aliases it has more than {_MOST_NODES:,} values")
        if node.tag not in _TAGS:
            raise self.wrong(line, f"the tag {node.tag.replace(_YAML, '!!')} is not known here")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag.removeprefix(_YAML) not in ("str", "int", "merge"):
                raise self.wrong(line, f"the key {getattr(key, 'value', None)!r} is no name; a name may need quotes")
            if key.value in lines:
                raise self.wrong(line, f"the key '{key.value}' is also in line {lines[key.value]}")
            lines[key.value] = line
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, IndexError) as error:  # numbers of no digits, or of too many
            raise self.wrong(
                node.start_mark.line + 1, f"{node.value[:20]} is no number ({first_line(error)})"
            ) from error

    def wrong(self, line: int, what: str) -> DataError:
        return DataError(f"recipe: {self.name}, line {line}: {what}.", path=self.name, row=line)


def read_yaml(path: Path) -> YamlFile:
    """Read a recipe's YAML file, or raise a DataError; no code in it is run."""
    try:
        node, fields = parse_yaml(read_bytes(path, _MOST_BYTES).decode("utf-8"), str(path))
    except OSError as error:
        raise DataError(f"recipe: {path} cannot be read ({error.strerror}); it must be a YAML file.") from error
    except LaminaError:
        raise
    except Exception as error:  # constructors raise what they like
        raise DataError(f"recipe: {path} is not YAML; {' '.join(str(error).split())}.", path=str(path)) from error
    if node is None or not isinstance(fields, dict):
        raise DataError(f"recipe: {path} holds no keys; it needs 'model' and 'tasks'.", path=str(path))
    return YamlFile(fields, node)


def parse_yaml(text: str, name: str) -> tuple[yaml.Node | None, Any]:
    """Return the node tree and the value of a YAML text; raise a YAMLError or DataError if it cannot be read."""
    loader = _Loader(text, name)
    node = loader.get_single_node()
    return node, node and loader.construct_document(node)


class Strict(BaseModel):
    """Base of all recipe models: an unknown key is an error that suggests the nearest known one."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

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
    """Return one error of pydantic as an error of Lamina."""
    error, given = details.get("ctx", {}).get("error"), details["input"]
    if isinstance(error, LaminaError):
        return error
    if details["type"] == "literal_error" and isinstance(given, str):
        known = re.findall(r"'([^']*)'", details["ctx"]["expected"])
        named = [str(part).strip("[]") for part in details["loc"] if isinstance(part, str)]
        return UnknownNameError(op="recipe", got=given, known=known, what=named[-1] if named else "name")
    message = details["msg"].removeprefix("Value error, ")
    return ConfigError(f"{message[0].lower()}{message[1:]}" + ("" if given is None else f", not {reprlib.repr(given)}"))


def raise_first(error: ValidationError, *, op: str, file: YamlFile | None) -> NoReturn:
    """Raise the first error of pydantic as an error of Lamina, with its line and key."""
    first = error.errors()[0]
    reason, place = reason_of(first), [part for part in first["loc"] if part != "[key]"]
    if file is not None:
        line, there = file.find(place)
        op, missing = f"{op}, line {line}", first["type"] == "missing"
        place = [*there, *place[-1:]] if missing else there
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
