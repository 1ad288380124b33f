"""Grids: one reader as a template, and a reader of the same run for every combination of settings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, cast

from lamina.bank import Reader
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.fusion.base import FusionConfig
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lamina.bank import ReaderBank

METHOD = "fusion"
OWN = ("stack", "seed")  # fields of the reader itself
RUN = ("learning_rate", "epochs")  # of its training
_OF_THE_TASK = ("labels", "problem_type")  # fields of a head that no grid may change


@dataclass(frozen=True)
class RunSpec:
    """One thing that is trained: a reader, or a whole model.

    Attributes:
        name: Its name in the bank, in histories and tables.
        task: Name of its task; of a reader of a grid, that of the reader it is made from.
        reader: The reader; None: a whole model.
        settings: What a grid set, by full key ("fusion.alpha").
        learning_rate: Its own, or None: that of the run.
        epochs: Its own, or None: those of the run.
        options: Options of `fit` that it alone is trained with, in recipes.
        edits: Name and arguments of what is done to a whole model beforehand, in recipes.
        repeat: Which subsample of the examples it learns from, from 0, in recipes.
    """

    name: str
    task: str
    reader: Reader | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    epochs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    edits: tuple[tuple[str, dict[str, Any]], ...] = ()
    repeat: int = 0


def expand(reader: Reader, grid: Mapping[str, Sequence[Any]], *, name: str = "reader") -> list[RunSpec]:
    """Make a reader for every combination of a grid's values, the last key's values changing fastest.

    Args:
        reader: The template.
        grid: Key to the values it takes. "fusion.<field>" and "head.<field>" are fields of the two configs ("alpha"
            alone will do where only one has it); "fusion" takes whole methods: names, fields with a "name", or
            configs; "seed" and "stack" belong to the reader, "learning_rate" and "epochs" to its training.
        name: Of the template; readers are called "<name>_0001" and so on.

    Raises:
        UnknownNameError: If a method has no such key.
        ConfigError: If a key has no values, or one cannot be; names the reader.
    """
    methods = [_method(value, name) for value in _values(METHOD, grid[METHOD], name)] if METHOD in grid else None
    axes = _axes(reader, grid, methods, name)
    combinations = list(itertools.product(*axes.values()))
    digits = max(4, len(str(len(combinations))))
    return [
        _spec(reader, dict(zip(axes, values, strict=True)), f"{name}_{number:0{digits}}", name)
        for number, values in enumerate(combinations, start=1)
    ]


def keys_of(fusion: type[Any] | object, head: type[Any] | object) -> list[str]:
    """Every full key that a grid over these two configs may have."""
    parts = [f"fusion.{one.name}" for one in fields(fusion) if one.init]  # pyright: ignore[reportArgumentType]
    parts += [f"head.{one.name}" for one in fields(head) if one.init and one.name not in _OF_THE_TASK]  # pyright: ignore
    return [METHOD, *parts, *OWN, *RUN]


def swept(
    grid: Mapping[str, Sequence[Any]], keys: Sequence[str], sweeps: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, list[Any]], set[str]]:
    """A grid with the keys of a sweep that fit; their values take the place of its own.

    Args:
        grid: Key -> values.
        keys: All keys that there are, in full.
        sweeps: Key, in full or short, to values.

    Returns:
        The grid, and which keys of the sweep fitted.

    Raises:
        ConfigError: If a short key may mean either of two.
    """
    found = {key: list(values) for key, values in grid.items()}
    used: set[str] = set()
    for key, values in sweeps.items():
        if key in keys or any(one.partition(".")[2] == key for one in keys):
            full = full_key(key, keys, "sweep")
            found = {old: kept for old, kept in found.items() if full_key(old, keys, "sweep") != full}
            found[full] = list(values)
            used.add(key)
    return found, used


def full_key(key: str, known: Sequence[str], op: str) -> str:
    """The full form of a key, which may have been given without its "fusion." or "head.".

    Raises:
        UnknownNameError: If there is no such key.
        ConfigError: If the short form may mean either.
    """
    if key in known:
        return key
    meant = [one for one in known if one.partition(".")[2] == key]
    if len(meant) > 1:
        raise ConfigError(f"{op}: '{key}' may mean {' or '.join(meant)}; a key means one of them. Write it in full.")
    if not meant:
        raise UnknownNameError(op=op, got=key, known=known, what="key")
    return meant[0]


def _axes(
    reader: Reader, grid: Mapping[str, Sequence[Any]], methods: list[Any] | None, name: str
) -> dict[str, list[Any]]:
    """Full key -> values; the method first, so that the others' fields are set on it."""
    axes: dict[str, list[Any]] = {} if methods is None else {METHOD: methods}
    for key, values in grid.items():
        if key == METHOD:
            continue
        found = ""
        for fusion in methods or [reader.fusion]:
            op = f"grid of '{name}', {type(fusion).__name__}"
            found = full_key(key, keys_of(fusion, reader.head), op)
        if found in axes:
            raise ConfigError(f"grid of '{name}': '{found}' is there twice; a key has one list.")
        axes[found] = _values(found, values, name)
    return axes


def _values(key: str, values: Any, name: str) -> list[Any]:
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise ConfigError(f"grid of '{name}': {key} is {values!r}; a grid lists the values. Write [{values!r}].")
    listed = list(values)
    if not listed:
        raise ConfigError(f"grid of '{name}': {key} has no values; a grid lists at least one.")
    twice = [value for value, count in Counter(map(repr, listed)).items() if count > 1]
    if twice:
        raise ConfigError(f"grid of '{name}': {key} has {twice[0]} twice; each value makes a reader.")
    return listed


def _method(value: Any, name: str) -> Any:
    """A fusion's config from its name, its fields, or itself."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        with _named(f"grid of '{name}'", f"fusion {dict(value)}"):
            return FUSIONS.from_dict({key: _frozen(item) for key, item in value.items()})
    if not isinstance(value, FusionConfig):
        raise ConfigError(f"grid of '{name}': fusion is {value!r}; it must be a name, fields with a name, or a config.")
    return value


def _spec(reader: Reader, settings: dict[str, Any], name: str, template: str) -> RunSpec:
    parts = {part: getattr(reader, part) for part in ("fusion", "head")}
    own: dict[str, Any] = {}
    shown = {key: _shown(value) for key, value in settings.items()}
    with _named(f"grid of '{template}'", f"reader {name}: {_listed(shown)}"):
        for key, value in settings.items():
            part, _, option = key.partition(".")
            if key == METHOD:
                parts[METHOD] = value
            elif option:
                parts[part] = replace(parts[part], **{option: _frozen(value)})
            elif key in OWN:
                own[key] = _checked_seed(value) if key == "seed" else value
        extra = {key: settings[key] for key in RUN if key in settings}
        FitOptions.of(extra)
        return RunSpec(name, template, replace(reader, **parts, **own), shown, **extra)


def _checked_seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"reader: seed is {value!r}; it must be a whole number.")
    return value


@contextmanager
def _named(op: str, what: str) -> Iterator[None]:
    """Name the member in errors of its configs; what Python itself refuses becomes a ConfigError."""
    try:
        yield
    except LaminaError as error:
        error.add_note(what)
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{op}: {what}; {error}.") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> Any:
    """A value as it stands in tables: plain, or as it was written."""
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    changed = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(kind) if getattr(value, f.name) != f.default]
    return f"{kind.__name__}({', '.join(changed)})"


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def expand_into(
    bank: ReaderBank,
    names: Iterable[str],
    grid: Mapping[str, Mapping[str, Sequence[Any]]],
    rates: Mapping[str, float],
    epochs: Mapping[str, int],
) -> dict[str, RunSpec]:
    """Put the readers of grids into a bank, in the places of their templates.

    The bank is left as it was if one cannot be built, say because its cutoff would remove every layer.

    Args:
        bank: Holds the templates, which are taken out; the readers made from them start anew.
        names: The readers that are trained; those without a grid as they are.
        grid: Reader name -> its grid.
        rates: Reader name -> learning rate of those that name none.
        epochs: Reader name -> epochs of those that name none.

    Returns:
        Every reader, by name.

    Raises:
        UnknownNameError: If a reader or a key does not exist.
        ConfigError: If a value is out of range; names the reader.
    """
    names = list(names)
    for name in grid:
        if name not in names:
            raise UnknownNameError(op="grid", got=name, known=names, what="reader")
    specs: dict[str, RunSpec] = {}
    for name in names:
        config = bank[name].config
        for spec in expand(config, grid[name], name=name) if name in grid else [RunSpec(name, name, config)]:
            rate = rates[name] if spec.learning_rate is None else spec.learning_rate
            rounds = epochs[name] if spec.epochs is None else spec.epochs
            specs[spec.name] = replace(spec, learning_rate=rate, epochs=rounds)
    _swap(bank, [spec for spec in specs.values() if spec.task in grid], list(grid))
    return specs


def _swap(bank: ReaderBank, specs: Sequence[RunSpec], templates: Sequence[str]) -> None:
    added: list[str] = []
    try:
        for spec in specs:
            with _named(f"grid of '{spec.task}'", f"reader {spec.name}: {_listed(spec.settings)}"):
                bank.add(spec.name, cast("Reader", spec.reader))
            added.append(spec.name)
    except LaminaError:
        for name in added:
            bank.remove(name)
        raise
    for name in templates:
        bank.remove(name)
