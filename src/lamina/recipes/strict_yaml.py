"""Read YAML files strictly, and turn pydantic's errors into errors of Lamina that name the line and the key."""

from __future__ import annotations

import re
import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from lamina.errors import ConfigError, DataError, LaminaError, UnknownNameError, first_line
from lamina.utils import read_bytes, similar_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path


# A mapping of a recipe as YAML has it: key -> text, number, boolean, None, list or mapping.
Fields: TypeAlias = dict[str, Any]

_YAML = "tag:yaml.org,2002:"
_TAGS = {f"{_YAML}{kind}" for kind in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}
_MAX_DEPTH = 50  # levels of nesting in a recipe
_MAX_NODES = 100_000  # values in a recipe, where each use of an alias counts as all values that it stands for
_MAX_BYTES = 1 << 20  # size of a recipe


class YamlFile(NamedTuple):
    """The contents of a YAML file (`fields`), and its tree of nodes (`root`), which has the line of each key."""

    fields: Fields
    root: yaml.Node

    def locate(self, path: Sequence[object]) -> tuple[int, list[object]]:
        """Return the line of the value at a path of keys and list indices, and the part of the path that exists.

        If only a part of the path exists, the line is that of its last entry; if none of it exists, that of the first
        key of the file. Lines count from 1. Index 0 is skipped if the file has a single value in place of a list.
        """
        node, line, existing = self.root, self.root.start_mark.line, []
        for part in path:
            pairs: list[tuple[yaml.Node, yaml.Node]] = []
            if isinstance(node, yaml.MappingNode):  # keys that were merged in come first: the last pair is the file's
                pairs = [(key, value) for key, value in node.value if key.value == str(part)]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                pairs = [(item, item) for item in node.value[part : part + 1]]
            if not pairs and part == 0:
                continue
            if not pairs:
                break
            key, node = pairs[-1]
            line = key.start_mark.line
            existing.append(part)
        return line + 1, existing


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses dangerous or ambiguous files with a DataError, before any value is built.

    It refuses keys that a mapping has twice (except keys merged in with `<<`), keys that are neither a string nor a
    whole number, nesting deeper than 50 levels, aliases that stand for more than 100,000 values or contain themselves,
    and all tags that are not plain YAML. Plain words and numbers are read by the core schema of YAML 1.2: `on`, `yes`,
    `1:30`, `1_000` and dates are strings, and `016` is sixteen.
    """

    yaml_implicit_resolvers: ClassVar = {}  # filled below

    def __init__(self, text: str, name: str, op: str) -> None:
        super().__init__(text)
        self.name, self.op, self._depth = name, op, 0
        self._sizes = dict[yaml.Node, int]()  # number of values in each node that is complete, aliases resolved

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Return the next node or None (see PyYAML); raise DataError if it breaks a rule of the class."""
        line, is_alias = self.peek_event().start_mark.line + 1, self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.error(line, f"it is nested more than {_MAX_DEPTH} levels deep")
        node: Any = super().compose_node(parent, index)  # pyright: ignore[reportArgumentType]
        self._depth -= 1
        if is_alias and node not in self._sizes:  # the node that the alias names is not complete yet
            raise self.error(line, "an alias refers to a value that contains it")
        if not is_alias:
            parts = [] if isinstance(node, yaml.ScalarNode) else node.value
            parts = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
            self._sizes[node] = 1 + sum(map(self._sizes.__getitem__, parts))
        if self._sizes[node] > _MAX_NODES:
            raise self.error(line, f"with its aliases it has more than {_MAX_NODES:,} values")
        if node.tag not in _TAGS:
            raise self.error(line, f"the tag {node.tag.replace(_YAML, '!!')} is not known here")
        return node

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        """Return the next mapping of the file; `anchor` is PyYAML's. Raises DataError for a repeated or wrong key."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag.removeprefix(_YAML) not in ("str", "int", "merge"):
                value = getattr(key, "value", None)
                raise self.error(line, f"the key {value!r} is not a name; a name may need quotes")
            name = str(self.construct_object(key)) if key.tag == f"{_YAML}int" else key.value  # 01 and 1 are one key
            if name in lines:
                raise self.error(line, f"the key '{key.value}' is also in line {lines[name]}")
            lines[name] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the Python value of a node; `deep` is PyYAML's. Raises DataError for a malformed number."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, IndexError) as error:  # the text looks like a number, but has no digits, or too many
            reason = f"{node.value[:20]} is not a number ({first_line(error)})"
            raise self.error(node.start_mark.line + 1, reason) from error

    def error(self, line: int, reason: str) -> DataError:
        return DataError(f"{self.op}: {self.name}, line {line}: {reason}.", path=self.name, row=line)


# kind -> (its form in the core schema of YAML 1.2, the characters with which it begins); PyYAML knows those of 1.1
_PLAIN: dict[str, tuple[str, str]] = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "null": (r"~|null|Null|NULL|", "~nN"),
    "merge": (r"<<", "<"),  # from YAML 1.1, still in use everywhere
}
for _kind, (_form, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"{_YAML}{_kind}", re.compile(rf"^(?:{_form})$"), [*_first])
_Loader.yaml_implicit_resolvers.setdefault("", []).append((f"{_YAML}null", re.compile(r"^$")))


# decimal (leading zeros allowed), octal (0o17) or hexadecimal
_Loader.add_constructor(f"{_YAML}int", lambda _, node: int(node.value, {"0o": 8, "0x": 16}.get(node.value[:2], 10)))


def read_yaml(path: Path, keys: str = "'model' and 'tasks'", op: str = "recipe") -> YamlFile:
    """Read a YAML file, such as a recipe; nothing in the file is executed.

    `keys` names what it needs, and `op` says what it is, for messages. Raises DataError if the file cannot be read,
    is larger than 1 MiB, is not YAML, is refused by `_Loader`, or does not hold a mapping. The error begins with `op`
    and names the file, and the line if it is known.
    """
    try:
        node, fields = parse_yaml(read_bytes(path, _MAX_BYTES).decode("utf-8"), str(path), op)
    except OSError as error:
        hint = similar_file(path)
        raise DataError(f"{op}: {path} cannot be read ({error.strerror}); it must be a YAML file.{hint}") from error
    except LaminaError:
        raise
    except Exception as error:  # PyYAML's constructors raise errors of many types
        raise DataError(f"{op}: {path} is not YAML; {' '.join(str(error).split())}.", path=str(path)) from error
    if node is None or not isinstance(fields, dict):
        raise DataError(f"{op}: {path} holds no keys; it needs {keys}, in YAML.", path=str(path))
    return YamlFile(fields, node)


def parse_yaml(text: str, name: str, op: str = "recipe") -> tuple[yaml.Node | None, Any]:
    """Return the node tree and the value of a YAML text; both are None for an empty text.

    Errors begin with `op` and call the text `name`. Raises yaml.YAMLError if the text is not YAML, and DataError if
    `_Loader` refuses the text.
    """
    loader = _Loader(text, name, op)
    node = loader.get_single_node()
    return node, node and loader.construct_document(node)


NAMED = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)  # "x": {"name": "x"}


class Strict(BaseModel):
    """The base class of all pydantic models of recipes: frozen and strict, without unknown keys, NaN or infinity.

    An unknown key raises pydantic's ValidationError around an UnknownNameError that suggests the closest known key.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, fields: object) -> object:
        """Return the fields unchanged; raise ValidationError for the first key that the model does not have."""
        for key in fields if isinstance(fields, dict) else ():
            if key not in cls.model_fields:
                known, see = cls.model_fields, "docs/recipes.md"
                fail(UnknownNameError(op="recipe", got=key, known=known, what="key", see=see), key)
        return fields


def fail(error: LaminaError, *place: str | int) -> NoReturn:
    """Raise an error of Lamina inside a pydantic validator, as a ValidationError.

    `raise_first` unwraps it. `place` has the keys and list indices that lead from the checked value to the wrong part.
    """
    kind = PydanticCustomError("lamina", "{error}", {"error": error})
    raise ValidationError.from_exception_data("recipe", [InitErrorDetails(type=kind, loc=place, input=None)])


@contextmanager
def error_at(*place: str | int, blame: Iterable[str] = ()) -> Iterator[None]:
    """Turn a LaminaError or ValidationError in the `with` block into a ValidationError that says its place.

    It is for use inside a pydantic validator. Other errors pass through unchanged. Only the first of several errors in
    a ValidationError is kept.

    Args:
        *place: Keys and list indices that lead from the validated value to the part that the `with` block checks.
        blame: Keys of that part. The first of them in the message of a LaminaError is added to the place, so that the
            error shows the line of this key.
    """
    try:
        yield
    except ValidationError as error:
        (first, *_) = error.errors()
        fail(to_lamina_error(first), *place, *first["loc"])
    except LaminaError as error:
        if isinstance(error, UnknownNameError):
            mentioned = [error.got, error.what, error.op]
        else:
            mentioned = re.findall(r"[\w.]+", "\n".join([str(error), *getattr(error, "__notes__", ())]))
        blamed = [key for key in blame if key in mentioned or key.rpartition(".")[2] in mentioned]
        fail(error, *place, *blamed[:1])


def checked(check: Callable[[Any], object]) -> AfterValidator:
    """Return a pydantic validator that calls `check` on a value, and returns the value unchanged.

    If `check` raises a LaminaError, a ValidationError is raised in its place. If the value is a mapping and the message
    names one of its keys, the ValidationError reports that key as the place.
    """

    def validate(value: object) -> object:
        with error_at(blame=value if isinstance(value, dict) else ()):
            check(value)
        return value

    return AfterValidator(validate)


def to_lamina_error(details: ErrorDetails) -> LaminaError:
    """Return one entry of `ValidationError.errors()` as a Lamina error.

    If `fail` wrapped an error, that error is returned. A string that is not among the allowed literals becomes an
    UnknownNameError; anything else becomes a ConfigError with pydantic's message and the wrong value.
    """
    context, value = details.get("ctx", {}), details["input"]
    if isinstance(error := context.get("error"), LaminaError):
        return error
    if details["type"] == "literal_error" and isinstance(value, str):
        known = re.findall(r"'([^']*)'", context["expected"])
        keys = [part.strip("[]") for part in details["loc"] if isinstance(part, str)]
        return UnknownNameError(op="recipe", got=value, known=known, what=keys[-1] if keys else "name")
    message = details["msg"].removeprefix("Value error, ")
    whole = isinstance(value, BaseModel) or (details["type"] == "value_error" and isinstance(value, dict))
    shown = "" if value is None or whole else f", not {reprlib.repr(value)}"
    return ConfigError(f"{message[0].lower()}{message[1:]}{shown}")


def raise_first(error: ValidationError, *, op: str, file: YamlFile | None) -> NoReturn:
    """Raise the first error in a ValidationError as a ConfigError or UnknownNameError whose message says where it is.

    The message begins with `op`, such as "recipe cola.yaml", and names the line if there is a `file`.
    """
    first = error.errors()[0]
    # pydantic marks an error in a key itself, not in its value, by an additional part "[key]"
    reason, place = to_lamina_error(first), [part for part in first["loc"] if part != "[key]"]
    if file is not None:
        line, existing = file.locate(place)
        op, is_missing = f"{op}, line {line}", first["type"] == "missing"
        place = [*existing, *place[-1:]] if is_missing else existing
    is_unknown = isinstance(reason, UnknownNameError)
    if is_unknown and place[-1:] == [reason.got]:
        place = place[:-1]  # the message of an unknown name contains the name already
    where = f"{op}, {'.'.join(map(str, place))}" if place else op
    placed = ConfigError(f"{where}: {str(reason).rstrip('.')}.")
    if is_unknown:
        placed = UnknownNameError(op=where, got=reason.got, known=reason.known, what=reason.what, see=reason.see)
    for note in getattr(reason, "__notes__", ()):
        placed.add_note(note)
    raise placed from error
