"""Grids: one reader as a template, and a member of the same run for every combination of settings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lamina.bank import Reader
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.fusion.base import FusionConfig
from lamina.train.options import FitOptions, each

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task

METHOD = "fusion"
OWN = ("stack", "seed")  # fields of the reader itself
RUN = ("learning_rate", "epochs")  # of its training
_OF_THE_TASK = ("labels", "problem_type")  # fields of a head that no grid may change


@dataclass(frozen=True)
class Member:
    """One reader of a sweep.

    Attributes:
        name: Its name in the bank.
        reader: What is trained.
        settings: What the grid set, by full key ("fusion.alpha").
        learning_rate: Its own, or None: that of the run.
        epochs: Its own, or None: those of the run.
        template: The reader that it is made from.
    """

    name: str
    reader: Reader
    settings: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    epochs: int | None = None
    template: str = ""


class Expanded(NamedTuple):
    """What `fit` needs to know of a sweep; each by reader name, those without a grid among them.

    Attributes:
        tasks: Their tasks.
        epochs: Their epochs.
        learning_rate: Their highest learning rates.
        members: Every reader, with its settings.
    """

    tasks: dict[str, Task]
    epochs: dict[str, int]
    learning_rate: dict[str, float]
    members: dict[str, Member]


def expand(reader: Reader, grid: Mapping[str, Sequence[Any]], *, name: str = "reader") -> list[Member]:
    """Make a member for every combination of a grid's values, the last key's values changing fastest.

    Args:
        reader: The template.
        grid: Key to the values it takes. "fusion.<field>" and "head.<field>" are fields of the two configs ("alpha"
            alone will do where only one has it); "fusion" takes whole methods: names, fields with a "name", or
            configs; "seed" and "stack" belong to the reader, "learning_rate" and "epochs" to its training.
        name: Of the template; members are called "<name>_0001" and so on.

    Raises:
        UnknownNameError: If a method has no such key.
        ConfigError: If a key has no values, or one cannot be; names the member.
    """
    methods = [_method(value, name) for value in _values(METHOD, grid[METHOD], name)] if METHOD in grid else None
    axes = _axes(reader, grid, methods, name)
    combinations = list(itertools.product(*axes.values()))
    digits = max(4, len(str(len(combinations))))
    return [
        _member(reader, dict(zip(axes, values, strict=True)), f"{name}_{number:0{digits}}", name)
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
            raise ConfigError(f"grid of '{name}': '{found}' is there twice; a key has one list. Leave one out.")
        axes[found] = _values(found, values, name)
    return axes


def _values(key: str, values: Any, name: str) -> list[Any]:
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise ConfigError(f"grid of '{name}': {key} is {values!r}; a grid lists the values. Write [{values!r}].")
    listed = list(values)
    if not listed:
        raise ConfigError(f"grid of '{name}': {key} has no values; a grid lists at least one. Add one, or drop it.")
    twice = [value for value, count in Counter(map(repr, listed)).items() if count > 1]
    if twice:
        raise ConfigError(f"grid of '{name}': {key} has {twice[0]} twice; each value makes a member. Leave one out.")
    return listed


def _method(value: Any, name: str) -> Any:
    """A fusion's config from its name, its fields, or itself."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        with _named(f"grid of '{name}'", f"fusion {dict(value)}"):
            return FUSIONS.from_dict({key: _frozen(item) for key, item in value.items()})
    if not isinstance(value, FusionConfig):
        raise ConfigError(
            f"grid of '{name}': fusion is {value!r}; it must be a name, fields with a name, or a config. Change it."
        )
    return value


def _member(reader: Reader, settings: dict[str, Any], member: str, template: str) -> Member:
    made = {part: getattr(reader, part) for part in ("fusion", "head")}
    own: dict[str, Any] = {}
    shown = {key: _shown(value) for key, value in settings.items()}
    with _named(f"grid of '{template}'", f"member {member}: {_listed(shown)}"):
        for key, value in settings.items():
            part, _, option = key.partition(".")
            if key == METHOD:
                made[METHOD] = value
            elif option:
                made[part] = replace(made[part], **{option: _frozen(value)})
            elif key in OWN:
                own[key] = _checked_seed(value) if key == "seed" else value
        extra = {key: settings[key] for key in RUN if key in settings}
        FitOptions(**extra)  # sees that they can be
        return Member(member, replace(reader, **made, **own), shown, template=template, **extra)


def _checked_seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"reader: seed is {value!r}; it must be a whole number. Change it.")
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
        raise ConfigError(f"{op}: {what}; {error}. Correct the value.") from error


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
    bank: ReaderBank, tasks: Mapping[str, Task], grid: Mapping[str, Mapping[str, Sequence[Any]]], options: FitOptions
) -> Expanded:
    """Put the members of grids into a bank, in the places of their templates.

    The bank is left as it was if a member cannot be built, say because its cutoff would remove every layer.

    Args:
        bank: Holds the templates, which are taken out; members start anew from their configs.
        tasks: Reader name -> task.
        grid: Reader name -> its grid; readers without one are trained as they are.
        options: Epochs and learning rates of those that name none.

    Raises:
        UnknownNameError: If a reader or a key does not exist.
        ConfigError: If a value cannot be; names the member.
    """
    for name in grid:
        if name not in tasks:
            raise UnknownNameError(op="grid", got=name, known=tasks, what="reader")
    names = list(tasks)
    epochs, rates = each(options.epochs, names, "epochs"), each(options.learning_rate, names, "learning_rate")
    found: dict[str, Member] = {}
    for name in names:
        made = expand(bank[name].config, grid[name], name=name) if name in grid else None
        found |= {one.name: one for one in made or [Member(name, bank[name].config, template=name)]}
    for name, one in found.items():
        own = one.template
        found[name] = replace(
            one,
            epochs=epochs[own] if one.epochs is None else one.epochs,
            learning_rate=rates[own] if one.learning_rate is None else one.learning_rate,
        )
    _swap(bank, [one for one in found.values() if one.template in grid], list(grid))
    return Expanded(
        {name: tasks[one.template] for name, one in found.items()},
        {name: cast("int", one.epochs) for name, one in found.items()},
        {name: cast("float", one.learning_rate) for name, one in found.items()},
        found,
    )


def _swap(bank: ReaderBank, members: Sequence[Member], templates: Sequence[str]) -> None:
    added: list[str] = []
    try:
        for one in members:
            with _named(f"grid of '{one.template}'", f"member {one.name}: {_listed(one.settings)}"):
                bank.add(one.name, one.reader)
            added.append(one.name)
    except LaminaError:
        for name in added:
            bank.remove(name)
        raise
    for name in templates:
        bank.remove(name)
