"""Grids: one reader as a template, and a reader of the same run for every combination of settings."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, cast

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, LaminaError, UnknownNameError, check_known, error_context
from lamina.fusion import FUSIONS
from lamina.fusion.base import FusionConfig
from lamina.registry import lists_to_tuples
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

METHOD = "fusion"
OWN = ("stack", "seed")  # fields of the reader itself
RUN = ("learning_rate", "epochs")  # of its training
_OF_THE_TASK = ("labels", "problem_type")  # fields of a head that no grid may change
MOST_RUNS = 100_000  # of a grid, and of a recipe


@dataclass(frozen=True)
class RunSpec:
    """One thing that is trained: a reader, or a whole model. The last three fields are of recipes."""

    name: str  # in the bank, in histories and tables
    task: str  # name of its task; of a reader of a grid, that of the reader it is made from
    reader: Reader | None = None  # None: a whole model
    settings: dict[str, Any] = field(default_factory=dict)  # what a grid set, by full key ("fusion.alpha")
    learning_rate: float | None = None  # None: that of the run; also for the epochs
    epochs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # options of `fit` that it alone is trained with
    edits: tuple[tuple[str, dict[str, Any]], ...] = ()  # name and arguments of what is done to a whole model beforehand
    repeat: int = 0  # which subsample of the examples it learns from, from 0

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"reader {self.name}: {', '.join(f'{key}={value}' for key, value in self.settings.items())}"


def expand(reader: Reader, grid: Mapping[str, Sequence[Any]], *, name: str = "reader") -> list[RunSpec]:
    """Make a reader for every combination of a grid's values, the last key's values changing fastest.

    They are called "<name>_0001" and so on. "fusion.<field>" and "head.<field>" are fields of the two configs ("alpha"
    alone will do where only one has it); "fusion" takes whole methods: names, fields with a "name", or configs; "seed"
    and "stack" belong to the reader, "learning_rate" and "epochs" to its training.
    """
    axes = _axes(reader, grid, f"grid of '{name}'")
    check_count(f"grid of '{name}'", axes)
    combinations = list(itertools.product(*axes.values()))
    digits = max(4, len(str(len(combinations))))
    return [
        _spec(reader, dict(zip(axes, values, strict=True)), f"{name}_{number:0{digits}}", name)
        for number, values in enumerate(combinations, start=1)
    ]


def check_count(op: str, grid: Mapping[str, Sequence[Any]]) -> None:
    """Raise ConfigError if a grid has more combinations than are ever run."""
    count = prod(map(len, grid.values()))
    if count > MOST_RUNS:
        raise ConfigError(f"{op}: it has {count:,} settings; a grid has at most {MOST_RUNS:,}.")


def keys_of(fusion: Any, head: Any) -> list[str]:
    """Every full key that a grid over these two configs (or classes of configs) may have."""
    parts = [f"fusion.{field.name}" for field in fields(fusion) if field.init]
    parts += [f"head.{field.name}" for field in fields(head) if field.init and field.name not in _OF_THE_TASK]
    return [METHOD, *parts, *OWN, *RUN]


def swept(
    grid: Mapping[str, Sequence[Any]], keys: Sequence[str], sweeps: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, list[Any]], set[str]]:
    """A grid with the values of a sweep in place of its own, and the keys of the sweep that are among its full keys."""
    changed = {key: list(values) for key, values in grid.items()}
    used = {key for key in sweeps if _meant(key, keys)}
    for key in sweeps:
        if key in used:
            full = full_key(key, keys, "sweep")
            changed = {old: values for old, values in changed.items() if full_key(old, keys, "sweep") != full}
            changed[full] = list(sweeps[key])
    return changed, used


def _meant(key: str, known: Sequence[str]) -> list[str]:
    """The full keys that a key may stand for, which may have been given without its "fusion." or "head."."""
    return [key] if key in known else [full for full in known if full.partition(".")[2] == key]


def full_key(key: str, known: Sequence[str], op: str) -> str:
    """The full form of a key; an error if there is none, or the short form may mean either of two."""
    meant = _meant(key, known)
    if len(meant) > 1:
        raise ConfigError(f"{op}: '{key}' may mean {' or '.join(meant)}; a key means one of them. Write it in full.")
    if not meant:
        raise UnknownNameError(op=op, got=key, known=known, what="key")
    return meant[0]


def _axes(reader: Reader, grid: Mapping[str, Sequence[Any]], op: str) -> dict[str, list[Any]]:
    """Full key -> values; the method first, so that the others' fields are set on it."""
    axes: dict[str, list[Any]] = {}
    if METHOD in grid:
        axes[METHOD] = [_method(value, op) for value in _values(METHOD, grid[METHOD], op)]
    for key in grid:
        if key == METHOD:
            continue
        full = ""
        for fusion in axes.get(METHOD, [reader.fusion]):
            full = full_key(key, keys_of(fusion, reader.head), f"{op}, {type(fusion).__name__}")
        if full in axes:
            raise ConfigError(f"{op}: '{full}' is there twice; a key has one list.")
        axes[full] = _values(full, grid[key], op)
    return axes


def _values(key: str, values: Any, op: str) -> list[Any]:
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise ConfigError(f"{op}: {key} is {values!r}; a grid lists the values. Write [{values!r}].")
    listed = list(values)
    if not listed:
        raise ConfigError(f"{op}: {key} has no values; a grid lists at least one.")
    twice = [value for value, count in Counter(map(repr, listed)).items() if count > 1]
    if twice:
        raise ConfigError(f"{op}: {key} has {twice[0]} twice; each value makes a reader.")
    return listed


def _method(value: Any, op: str) -> Any:
    """A fusion's config from its name, its fields, or itself."""
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        with error_context(f"fusion {dict(value)}", op):
            return FUSIONS.from_dict(dict(value))
    if not isinstance(value, FusionConfig):
        raise ConfigError(f"{op}: fusion is {value!r}; it must be a name, fields with a name, or a config.")
    return value


def _spec(reader: Reader, settings: dict[str, Any], name: str, template: str) -> RunSpec:
    shown = {key: _shown(value) for key, value in settings.items()}
    spec = RunSpec(name, template, reader, shown, **{key: settings[key] for key in RUN if key in settings})
    with error_context(spec.title, f"grid of '{template}'"):
        for key, value in settings.items():
            part, _, option = key.partition(".")
            if option:
                reader = replace(reader, **{part: replace(getattr(reader, part), **{option: lists_to_tuples(value)})})
            elif key not in RUN:
                reader = replace(reader, **{key: value})
        FitOptions.of({key: value for key, value in settings.items() if key in ("seed", *RUN)})
        return replace(spec, reader=reader)


def _shown(value: Any) -> Any:
    """A value as it stands in tables: plain, or as it was written."""
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    changed = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(kind) if getattr(value, f.name) != f.default]
    return f"{kind.__name__}({', '.join(changed)})"


def expand_into(
    bank: ReaderBank,
    names: Iterable[str],
    grid: Mapping[str, Mapping[str, Sequence[Any]]],
    rates: Mapping[str, float],
    epochs: Mapping[str, int],
) -> dict[str, RunSpec]:
    """Put the readers of grids into a bank, beside their templates; every reader that is trained, by name.

    The bank is left as it was if one cannot be built, say because its cutoff would remove every layer. Rates and epochs
    are those of readers that name none.
    """
    names = list(names)
    check_known("grid", grid, names, "reader")
    specs: dict[str, RunSpec] = {}
    for name in names:
        config = bank[name].config
        for spec in expand(config, grid[name], name=name) if name in grid else [RunSpec(name, name, config)]:
            rate = rates[name] if spec.learning_rate is None else spec.learning_rate
            rounds = epochs[name] if spec.epochs is None else spec.epochs
            specs[spec.name] = replace(spec, learning_rate=rate, epochs=rounds)
    _add(bank, [spec for spec in specs.values() if spec.task in grid])
    return specs


def _add(bank: ReaderBank, specs: Sequence[RunSpec]) -> None:
    added: list[str] = []
    try:
        for spec in specs:
            with error_context(spec.title, f"grid of '{spec.task}'"):
                bank.add(spec.name, cast("Reader", spec.reader))
            added.append(spec.name)
    except LaminaError:
        for name in added:
            bank.remove(name)
        raise


@contextmanager
def templates_kept(target: object, grid: Iterable[str]) -> Iterator[Callable[[], None]]:
    """Leave a bank as it was if something is wrong before its grids can train; what is yielded ends their templates."""
    bank: Any = target if isinstance(target, ReaderBank) else {}
    there, settled = set(bank), False

    def remove(names: Iterable[str]) -> None:
        for name in names:
            bank.remove(name)

    def settle() -> None:
        nonlocal settled
        settled = True
        remove(grid)

    try:
        yield settle
    except BaseException:
        if not settled:
            remove({*bank} - there)
        raise
