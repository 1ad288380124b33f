"""Grids: make one reader per combination of settings, from a reader that serves as template.

All readers of a grid are trained in the same run and share its passes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import prod
from typing import TYPE_CHECKING, cast

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, UnknownNameError, check_known, error_context
from lamina.fusion import FUSIONS
from lamina.fusion.base import FusionConfig
from lamina.registry import lists_to_tuples
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from lamina.utils import JSON, JSONObject

    Config = DataclassInstance | type[DataclassInstance]  # a config, or its class

METHOD = "fusion"  # key whose values are whole fusions
READER_KEYS = ("stack", "seed")  # keys that are fields of the reader itself
RUN_KEYS = ("learning_rate", "epochs")  # keys that are options of the reader's training
_TASK_FIELDS = ("labels", "problem_type")  # fields of a head that follow from the task, so no grid may change them
MOST_RUNS = 100_000  # maximum number of runs of a grid or a recipe


@dataclass(frozen=True)
class RunSpec:
    """The plan for training one learner: a single reader, a reader of a grid, or a whole model.

    Attributes:
        name: Name in the bank, in histories and in tables.
        task: Name under which its task is passed; for a reader from a grid, the name of the grid's template.
        reader: Settings of the reader. None: a whole model is trained.
        settings: Values that a grid set, by full key ("fusion.alpha"), as tables show them.
        learning_rate: Highest learning rate. None: the rate of the training run.
        epochs: Number of epochs. None: the epochs of the training run.
        options: Only in recipes: options of `fit` for this learner alone.
        edits: Only in recipes: names and arguments of the edits that are applied to a whole model before training.
        repeat: Only in recipes: number of the random subset of the examples that the learner is trained on, from 0.
    """

    name: str
    task: str
    reader: Reader | None = None
    settings: JSONObject = field(default_factory=dict)
    learning_rate: float | None = None
    epochs: int | None = None
    options: JSONObject = field(default_factory=dict)
    edits: tuple[tuple[str, dict[str, JSON]], ...] = ()
    repeat: int = 0

    @property
    def title(self) -> str:
        """Name of the learner and its settings in the grid, for messages."""
        return f"reader {self.name}: {', '.join(f'{key}={value}' for key, value in self.settings.items())}"


def expand(reader: Reader, grid: Mapping[str, Sequence[object]], *, name: str = "reader") -> list[RunSpec]:
    """Make a reader for every combination of a grid's values.

    Args:
        reader: The template. Settings that the grid does not set are taken from it.
        grid: Key -> list of values. Keys are "fusion.<field>" and "head.<field>" (or the field alone, if only one of
            the two has it), "fusion" (whole fusions: names, dicts with a "name", or configs), "seed", "stack",
            "learning_rate" and "epochs". Beside "fusion", the other keys must exist for each of these fusions.
        name: Name of the template. The readers are called "<name>_0001", "<name>_0002" ...

    Returns:
        One `RunSpec` per combination. The values of the last key change fastest, and those of "fusion" slowest.

    Raises:
        UnknownNameError: If a key, or a name in a value, does not exist.
        ConfigError: If `grid` is not a mapping; if a key is ambiguous or comes twice; if its values are not a list, are
            empty or have duplicates; if a value does not fit its field; or if there are more than 100,000 combinations.
    """
    axes = _axes(reader, grid, f"grid of '{name}'")
    check_count(f"grid of '{name}'", axes)
    combinations = list(itertools.product(*axes.values()))
    digits = max(4, len(str(len(combinations))))
    return [
        _spec(reader, dict(zip(axes, values, strict=True)), f"{name}_{number:0{digits}}", name)
        for number, values in enumerate(combinations, start=1)
    ]


def check_count(op: str, grid: Mapping[str, Sequence[object]]) -> None:
    """Raise ConfigError, about the operation `op`, if a grid has more than 100,000 combinations."""
    count = prod(map(len, grid.values()))
    if count > MOST_RUNS:
        raise ConfigError(f"{op}: it has {count:,} settings; a grid has at most {MOST_RUNS:,}.")


def keys_of(fusion: Config, head: Config) -> list[str]:
    """Return every full key that a grid may have for readers with this fusion and head.

    The head's labels and problem type are not among them, because they follow from the task.
    """
    parts = [f"fusion.{field.name}" for field in fields(fusion) if field.init]
    parts += [f"head.{field.name}" for field in fields(head) if field.init and field.name not in _TASK_FIELDS]
    return [METHOD, *parts, *READER_KEYS, *RUN_KEYS]


def apply_sweep(
    grid: Mapping[str, Sequence[object]], keys: Sequence[str], sweeps: Mapping[str, Sequence[object]]
) -> tuple[dict[str, list[object]], set[str]]:
    """Return a copy of a grid in which values from the command line (a sweep) replace the grid's own.

    Args:
        grid: Key -> values; it is not changed.
        keys: Every full key that the grid may have; see `keys_of`.
        sweeps: Key, full or short -> values. Keys that the grid cannot have are ignored.

    Returns:
        The new grid, in which the swept keys come last, in full; and the keys of `sweeps` that were used, as given.

    Raises:
        ConfigError: If a short key may mean two full ones, or two sweeps set the same key.
        UnknownNameError: If a sweep is used, and a key of `grid` is not among `keys`.
    """
    full = {key: full_key(key, keys, "sweep") for key in sweeps if _full_keys(key, keys)}
    if not full:  # the grid's own keys, which may be wrong, are left to `expand`
        return {key: list(values) for key, values in grid.items()}, set()
    replaced = set(full.values())
    if len(replaced) < len(full):
        raise ConfigError(
            f"sweep: {', '.join(full)} set {', '.join(sorted(replaced))} more than once. Set each key once."
        )
    changed = {key: list(values) for key, values in grid.items() if full_key(key, keys, "sweep") not in replaced}
    return changed | {full[key]: list(sweeps[key]) for key in full}, set(full)


def _full_keys(key: str, known: Sequence[str]) -> list[str]:
    """Return the keys in `known` that `key` may mean: itself, or with the prefix "fusion." or "head."."""
    return [key] if key in known else [full for full in known if full.partition(".")[2] == key]


def full_key(key: str, known: Sequence[str], op: str) -> str:
    """Return the full form of a key of a grid, such as "fusion.alpha" for "alpha".

    Args:
        key: The key, full or short.
        known: Every full key that the grid may have; see `keys_of`.
        op: The operation, with which error messages begin.

    Raises:
        UnknownNameError: If no known key has this name.
        ConfigError: If the key may mean two known ones.
    """
    candidates = _full_keys(key, known)
    if len(candidates) > 1:
        raise ConfigError(f"{op}: '{key}' may mean {' or '.join(candidates)}; it must mean one. Write it in full.")
    if not candidates:
        see = "fields of the fusion and head, and seed, learning_rate and epochs"
        raise UnknownNameError(op=op, got=key, known=known, what="key", see=see)
    return candidates[0]


def _axes(reader: Reader, grid: Mapping[str, Sequence[object]], op: str) -> dict[str, list[object]]:
    """Check a grid, and return full key -> values. Errors are those of `expand`; most messages begin with `op`.

    The key "fusion" comes first, with configs as values, because other keys set fields of these configs.
    """
    if not isinstance(grid, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{op}: it is {grid!r}; a mapping of keys to lists of values is needed.")
    axes: dict[str, list[object]] = {}
    if METHOD in grid:
        axes[METHOD] = [_fusion_config(value, op) for value in _values(METHOD, grid[METHOD], op)]
    for key in grid:
        if key == METHOD:
            continue
        full = ""
        for fusion in axes.get(METHOD, [reader.fusion]):
            full = full_key(key, keys_of(cast("Config", fusion), reader.head), f"{op}, {type(fusion).__name__}")
        if full in axes:
            raise ConfigError(f"{op}: '{full}' is set twice; a key can have one list only.")
        axes[full] = _values(full, grid[key], op)
    return axes


def _values(key: str, values: object, op: str) -> list[object]:
    """Return the `values` of a grid's `key` as a list, without NumPy's types.

    Raises ConfigError, about the operation `op`, if they are a text, a mapping or no iterable, or if there are none,
    more than 100,000, or two equal ones.
    """
    values = _without_numpy(values)
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(f"{op}: {key} is {values!r}; a grid needs a list of values. Write [{values!r}].")
    listed = [*map(_without_numpy, itertools.islice(values, MOST_RUNS + 1))]
    if len(listed) > MOST_RUNS:
        raise ConfigError(f"{op}: {key} has more than {MOST_RUNS:,} values; a grid has at most {MOST_RUNS:,} settings.")
    check_values(f"{op}: {key}", listed)
    return listed


def check_values(what: str, values: Sequence[object]) -> None:
    """Raise ConfigError, which begins with `what`, if a key of a grid has no values, or two equal ones."""
    if not values:
        raise ConfigError(f"{what} has no values; a grid needs at least one.")
    duplicates = [value for value, count in Counter(map(repr, values)).items() if count > 1]
    if duplicates:
        raise ConfigError(f"{what} has {duplicates[0]} twice; each value is one setting.")


def _without_numpy(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value  # pyright: ignore[reportAttributeAccessIssue]


def _fusion_config(value: object, op: str) -> FusionConfig:
    """Return a fusion's config from its registered name, from a dict with a "name", or from the config itself.

    Raises UnknownNameError for an unknown name or key, and ConfigError for a wrong type or a value that does not fit.
    The message for a wrong type begins with `op`, the operation; that for a wrong value, with the fusion's name.
    """
    value = {"name": value} if isinstance(value, str) else value
    if isinstance(value, Mapping):
        with error_context(f"fusion {dict(value)}", op):
            return FUSIONS.from_dict(dict(value))
    if not isinstance(value, FusionConfig):
        raise ConfigError(f"{op}: fusion is {value!r}; it must be a name, a dict with a name, or a config.")
    return value


def _spec(reader: Reader, settings: Mapping[str, object], name: str, template: str) -> RunSpec:
    """Return the spec of a grid's reader `name`, from the template and its `settings` (full key -> value).

    Raises ConfigError or UnknownNameError if a value does not fit its field; the message names the settings.
    """
    shown = {key: _shown(value) for key, value in settings.items()}
    rate, epochs = cast("float | None", settings.get("learning_rate")), cast("int | None", settings.get("epochs"))
    spec = RunSpec(name, template, reader, shown, learning_rate=rate, epochs=epochs)
    with error_context(spec.title, f"grid of '{template}'"):
        for key, value in settings.items():
            part, _, option = key.partition(".")
            if option:
                reader = replace(reader, **{part: replace(getattr(reader, part), **{option: lists_to_tuples(value)})})
            elif key not in RUN_KEYS:
                reader = replace(reader, **{key: value})
        FitOptions.of({key: value for key, value in settings.items() if key in ("seed", *RUN_KEYS)})
        return replace(spec, reader=reader)


def _shown(value: object) -> JSON:
    """Return a grid's value as tables show it: a config as "Name(field=value)" without its defaults.

    Numbers, texts and None stay, lists are converted entry by entry, and any other value becomes text.
    """
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not is_dataclass(value):
        return str(value)
    kind = cast("type[DataclassInstance]", type(value))
    changed = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(kind) if getattr(value, f.name) != f.default]
    return f"{kind.__name__}({', '.join(changed)})"


def expand_into(
    bank: ReaderBank,
    names: Iterable[str],
    grid: Mapping[str, Mapping[str, Sequence[object]]],
    rates: Mapping[str, float],
    epochs: Mapping[str, int],
) -> dict[str, RunSpec]:
    """Add the readers of grids to a bank, in place. The templates stay. After an error, the bank is as it was.

    Args:
        bank: The bank.
        names: Names of the readers that are trained, templates among them.
        grid: Name of a template -> its grid; see `expand`.
        rates: Name in `names` -> learning rate. Readers of a grid that sets none get the rate of their template.
        epochs: Name in `names` -> number of epochs, as `rates`.

    Returns:
        Reader name -> its `RunSpec`, for every reader that is trained. Templates are not among them.

    Raises:
        UnknownNameError: If `grid` has a template that is not in `names`, or a key or a name in a value does not exist.
        ConfigError: If a grid is not valid, the name of one of its readers is taken, or a reader cannot be built, for
            example because its cutoff (`AdaLayers`) would remove every layer.
    """
    names = list(names)
    if not isinstance(grid, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"fit: grid is {grid!r}; a mapping of readers' names to their grids is needed.")
    check_known("grid", grid, names, "reader")
    specs: list[RunSpec] = []
    for name in names:
        config = bank[name].config
        for spec in expand(config, grid[name], name=name) if name in grid else [RunSpec(name, name, config)]:
            rate = rates[name] if spec.learning_rate is None else spec.learning_rate
            count = epochs[name] if spec.epochs is None else spec.epochs
            specs.append(replace(spec, learning_rate=rate, epochs=count))
    with undo_grid_on_error(bank, ()):
        for spec in specs:
            if spec.task in grid:
                with error_context(spec.title, f"grid of '{spec.task}'"):
                    bank.add(spec.name, cast("Reader", spec.reader))
    return {spec.name: spec for spec in specs}


@contextmanager
def undo_grid_on_error(target: object, templates: Iterable[str]) -> Iterator[Callable[[], None]]:
    """If an error occurs before training begins, remove the readers that were added to a bank inside the `with` block.

    Args:
        target: The bank; a whole model is left alone.
        templates: Names of the templates, which the readers of the grids replace.

    Yields:
        A function without arguments, to call when training begins: it removes the templates from the bank. After that,
        an error leaves the bank as it is.
    """
    bank = target if isinstance(target, ReaderBank) else None
    before = set(() if bank is None else bank)
    begun = False

    def begin() -> None:
        nonlocal begun
        begun = True
        if bank is not None:
            for name in templates:
                bank.remove(name)

    try:
        yield begin
    except BaseException:
        if bank is not None and not begun:
            for name in set(bank) - before:
                bank.remove(name)
        raise
