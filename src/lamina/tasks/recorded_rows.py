"""Examples whose hidden states were recorded in files: their splits, and the inputs for training and scoring."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import numpy as np
import torch

from lamina.data.arrow import Cell
from lamina.data.encode import Encoded, WindowColumns, window_table
from lamina.data.read import Table, read_table
from lamina.data.recorded_states import RecordedStates
from lamina.errors import ConfigError, DataError, check_known
from lamina.tasks.base import PARTS, ColumnSpec, positive_name
from lamina.tasks.kind import TextClassKind
from lamina.tasks.labels import check_names
from lamina.tasks.rows_in_memory import rows_of
from lamina.tasks.split import Split
from lamina.utils import check_type, is_file

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.tasks.base import Kind

# A folder of states whose manifest names a table; or such a folder, and the table or rows that belong to it.
StatesSource: TypeAlias = "str | Path | tuple[str | Path, object]"
_OPTIONS = ("label", "labels", "metric", "positive", "problem_type", "missing_labels", "name")
_OPTIONS += ("limit", "limit_validation", "seed", "stratify")
# Split name -> folder with its states; or the folder of "train".
StatesOfSplits: TypeAlias = "str | Path | Mapping[str, str | Path]"
ROW = "\0row"  # column with the number of each row; no file has it


@final
class RecordedTables(dict[str, Table]):
    """The tables of a task over recorded states: split name -> table of labels with a column `ROW`.

    A cell of `ROW` is "t" and the row's index; if tokens have labels, it is a list with this text for each token.

    Attributes:
        states: Split name -> its recorded states.
        spec: The kind of task, and which column has the labels.
    """

    def __init__(self, tables: Mapping[str, Table], states: Mapping[str, RecordedStates], spec: ColumnSpec) -> None:
        super().__init__(tables)
        self.states, self.spec = states, spec


@final
@dataclass(frozen=True)
class RecordedRow:
    """The `open_text` of a split whose states are `recorded`: a function that names an example in tables of errors."""

    recorded: RecordedStates

    @property
    def digest(self) -> str:
        """A hash of the recorded states."""
        return self.recorded.digest

    def __call__(self, text: str, row: int | str) -> Cell:
        """Return the row's text; if it is empty, a text with the index `row` and the folder of the states.

        For pairs, `row` is the second text, and both are returned.
        """
        return (text, row) if isinstance(row, str) else text or f"row {row} of {self.recorded.folder}"


@final
class StatesInputs:
    """Rows of recorded states for training and scoring. It is a `lamina.tasks.base.Inputs`.

    Args:
        split: A split whose examples are recorded states.
        recorded: The states of all rows; also an attribute.
        with_words: Whether each token has a label.

    Attributes:
        states: The states of the rows, in the form that `Group.states` needs.
        processor: Always None.
        lengths: Number of tokens of each row.
    """

    uncacheable = "the states are recorded"

    def __init__(self, split: Split, recorded: RecordedStates, *, with_words: bool) -> None:
        self._rows = np.array(split.rows["row"], dtype=np.int64)
        self._words = list(split.words or ()) if with_words else None
        self.recorded, self.processor = recorded, None
        self.lengths: Sequence[int] = recorded.lengths[self._rows].tolist()
        self.states = RowsOfStates(recorded, self._rows)

    @property
    def digest(self) -> str:
        """A hash of the recorded states and of the chosen rows."""
        return hashlib.sha256(self.recorded.digest.encode() + self._rows.tobytes()).hexdigest()

    @cached_property
    def encoded(self) -> Encoded:
        """The rows as windows without real token ids (all are 0): each row is one window.

        If tokens have labels, each token counts as a word.
        """
        counts, zeros = list(map(self.recorded.tokens, self._rows.tolist())), [0] * len(self._rows)
        words = [()] * len(counts) if self._words is None else self._words
        columns: WindowColumns = {"input_ids": [[0] * count for count in counts], "stop": counts}
        columns |= {"offsets": [[edge for span in row for edge in span] for row in words]}
        columns |= {"text": list(range(len(counts))), "window": zeros, "start": zeros, "number": zeros}
        return Encoded(window_table(columns))

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return {name: mask `[batch, tokens]`} of the rows with the indices `rows`; `epoch` is not used.

        The name is "attention_mask", with "decoder_" in front for the stack "decoder".
        """
        counts = torch.tensor([self.recorded.tokens(int(self._rows[row])) for row in rows])
        mask = (torch.arange(int(counts.max())) < counts[:, None]).long()
        name = "decoder_attention_mask" if self.recorded.manifest.stack == "decoder" else "attention_mask"
        return {name: mask}


@final
@dataclass(frozen=True)
class RowsOfStates:
    """The recorded states of chosen rows; implements `RowStates`.

    Attributes:
        recorded: The states of all rows.
        rows: The indices of the chosen rows, as an array.
        layers: The layers that are read; None: all that were recorded.
        device: The device on which states are returned.
    """

    recorded: RecordedStates
    rows: np.ndarray
    layers: tuple[int, ...] | None = None
    device: torch.device | str = "cpu"

    def longest(self) -> int:
        """Return the number of states of the longest row; 1 if states are pooled."""
        return 1 if self.recorded.manifest.pooling else int(self.recorded.lengths[self.rows].max())

    def batch(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        """Return stack -> layer -> states `[batch, tokens, width]` of the chosen rows at positions `rows`.

        They are float32, padded with zeros on the right. Raises DataError if a state is NaN or infinite.
        """
        return self.recorded.batch([int(self.rows[row]) for row in rows], self.layers, self.device)


def recorded_of(split: Split) -> RecordedStates | None:
    """Return the recorded states of a split's examples; None if a model computes their states."""
    return split.open_text.recorded if isinstance(split.open_text, RecordedRow) else None


def recorded_inputs(split: Split, kind: Kind) -> StatesInputs | None:
    """Return the inputs of a split whose states were recorded, for a task of this kind; None for any other split."""
    recorded = recorded_of(split)
    return None if recorded is None else StatesInputs(split, recorded, with_words=kind.per_token)


def recorded_tables(kind: Kind, sources: Sequence[StatesSource | None], options: Mapping[str, Any]) -> RecordedTables:
    """Read the labels that belong to recorded states, and open the states.

    `kind` is the kind of task. `sources` are those of "train", "validation" and "test": a folder of states, a pair of
    this folder and its table, or None. `options` and the errors are those of `Task.from_states`.
    """
    check_known("task", options, _OPTIONS, "option")
    get = options.get
    for name in ("limit", "limit_validation", "seed"):
        check_type("task", name, get(name), "int | None")
    how = {name: options[name] for name in ("problem_type", "missing_labels", "stratify") if name in options}
    how["positive"] = positive_name(get("positive"))
    labels = check_names(get("labels"))
    label = get("label", "label")
    text = ROW if label == "sentence" else "sentence"  # no text is read, so any other column will do
    spec = ColumnSpec(kind, text, label, labels=labels, all_columns=True, **how)
    by_part = {part: source for part, source in zip(PARTS, sources, strict=True) if source is not None}
    if not by_part:
        raise DataError("task: no states were given; it needs `train`, `validation` or `test`.")
    if not isinstance(kind, TextClassKind):
        got = f"a task of kind {kind} needs the inputs of the model, and states alone were recorded"
        raise ConfigError(f"task: {got}. Train it on the model, or make a task that classifies texts or tokens.")
    tables, states = {}, {}
    for part, source in by_part.items():
        folder, rows = source if isinstance(source, tuple) and len(source) == 2 else (source, None)
        if not isinstance(folder, str | PathLike):
            got = f"the states of {part} are {folder!r:.60}"
            raise ConfigError(f"task: {got}; a folder is needed, or (folder, table) if the labels are elsewhere.")
        states[part] = recorded = RecordedStates.open(folder)
        table = _table(part, recorded, rows, kind, spec)
        if len(table) != len(recorded):
            got = f"{table.path} has {len(table)} rows, and {folder} the states of {len(recorded)}"
            raise DataError(f"task: {got}; they must be the same rows in the same order.", path=table.path)
        texts = (f"t{row}" for row in range(len(recorded)))  # a list of them, one per token, if tokens have labels
        cells = [[text] * recorded.tokens(row) if kind.per_token else text for row, text in enumerate(texts)]
        tables[part] = replace(table, columns={**table.columns, ROW: cells})
    _check_alike(states)
    _check_read_alike("task", states)
    return RecordedTables(tables, states, spec)


def _table(part: str, recorded: RecordedStates, rows: object, kind: Kind, spec: ColumnSpec) -> Table:
    """Return the table with the labels of the split `part`, whose states are `recorded`.

    `rows` is the path of a table, rows in memory (read by `kind` as `spec` says), or None for the table that the
    states' manifest names. Raises DataError if the manifest names none, or the table cannot be read or is empty;
    ConfigError if `rows` have another form.
    """
    if rows is None:
        if (name := recorded.manifest.table) is None:
            got = f"{recorded.folder} names no table with labels"
            raise DataError(f"task: {got}. Give ({part}=(FOLDER, TABLE)), a file or rows with the labels.")
        rows = recorded.folder / name
    if isinstance(rows, str | Path):
        return read_table(rows)
    return kind.from_rows(f"{recorded.folder}/{part}", rows_of(part, rows, spec.label), spec)


def _check_alike(states: Mapping[str, RecordedStates]) -> None:
    """Raise ConfigError if the splits' states differ in stack, depth, width, layers, pooling or model."""
    for (first, one), (second, other) in pairwise(states.items()):
        for fact in ("stack", "depth", "width", "layers", "pooling", "fingerprint"):
            values = [getattr(part.facts, fact) for part in (one, other)]
            if values[0] != values[1]:
                got = f"the {fact} of {first} is {values[0]}, that of {second} is {values[1]}"
                raise ConfigError(f"task: {got}; the states of all parts come from one model.")


def _check_read_alike(op: str, states: Mapping[str, RecordedStates]) -> None:
    """Raise ConfigError, about `op`, if the texts of two splits were read in different ways, where both are known."""
    for (first, one), (second, other) in combinations(states.items(), 2):
        for fact in ("pairs", "max_length", "add_prefix_space"):
            values = [getattr(part.manifest, fact) for part in (one, other)]
            if None not in values and values[0] != values[1]:
                got = f"{fact} is {values[0]} in the states of {first}, and {values[1]} in those of {second}"
                raise ConfigError(f"{op}: {got}; a reader reads all texts in one way. Record one of the two again.")


def build_rows(spec: ColumnSpec, tables: RecordedTables) -> tuple[ColumnSpec, dict[str, Split]]:
    """Make the examples of every split from tables from `recorded_tables`; result and errors as in `Kind.build`."""
    built, splits = spec.kind.build(replace(spec, text=ROW), tables)
    for part, split in splits.items():
        numbers = [int(cast("str", text).partition(" ")[0][1:]) for text in split.texts]  # its texts are cells of `ROW`
        rows: Any = split.rows.remove_columns("text").add_column("row", numbers)  # pyright: ignore[reportArgumentType]
        rows = rows.add_column("text", [""] * len(numbers))
        splits[part] = split.with_examples(rows, RecordedRow(tables.states[part]))
    return replace(built, text=spec.text), splits


def splits_on_states(
    op: str, kind: Kind, splits: Mapping[str, Split], states: StatesOfSplits, label: str | int
) -> dict[str, Split]:
    """Return the splits of a task with recorded states in place of texts. "test" is left out unless `states` names it.

    Args:
        op: The operation and the task, for messages.
        kind: The kind of the task.
        splits: Its splits.
        states: Split name -> folder with its states; or only the folder of "train". A split that is not named, except
            "test", has its states in the folder of "train" too: its rows were held out from the training rows.
        label: The column of the labels. If the states' table has it too, it is used to check the order of the rows.

    Raises:
        ConfigError: If the kind does not classify whole texts, the task has states already, those of "train" are
            missing, a folder is no path, two splits would have the same states, only one of task and states has pairs
            of texts, or the texts of two splits were read in different ways.
        UnknownNameError: If `states` names a split that the task lacks.
        DataError: If the number of rows or the order of the labels differs, or a file does not fit its manifest.
        StoreError: If a folder has no manifest, or the manifest contradicts itself.
    """
    folders: Mapping[str, str | Path] = states if isinstance(states, Mapping) else {"train": states}
    check_known(op, folders, splits, "split")
    if not isinstance(kind, TextClassKind) or kind.per_token or any(map(recorded_of, splits.values())):
        got = f"the task, of kind {kind}, does not classify whole texts, or has states already"
        raise ConfigError(f"{op}: {got}. Task.from_states also reads the states of labelled tokens.")
    if "train" not in folders:
        raise ConfigError(f"{op}: those of 'train' are missing. Give states={{'train': FOLDER, ...}}.")
    if odd := [folder for folder in folders.values() if not isinstance(folder, str | Path)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{op}: got {odd[0]!r}; a folder is needed.")
    opened = {folder: RecordedStates.open(folder) for folder in folders.values()}
    by_split: dict[str, Split] = {}
    used: set[tuple[Path, int]] = set()
    for part in (part for part in splits if part in folders or part != "test"):
        recorded, (count, rows) = opened[folders.get(part, folders["train"])], splits[part].origin
        if count != len(recorded):
            got = f"'{part}' is from {count} rows, and {recorded.folder} has the states of {len(recorded)}"
            raise DataError(f"{op}: {got}; they must be the same rows in the same order.", path=str(recorded.folder))
        if recorded.manifest.pairs not in (None, splits[part].pairs):
            kinds = ("pairs", "single texts") if splits[part].pairs else ("single texts", "pairs")
            got = f"'{part}' has {kinds[0]}, and {recorded.folder} the states of {kinds[1]}"
            raise ConfigError(f"{op}: {got}. Record the texts that the task reads.")
        folder = recorded.folder.resolve()  # it may have two paths
        places = {(folder, row) for row in rows.tolist()}
        if not used.isdisjoint(places):
            raise ConfigError(f"{op}: '{part}' would get those of another split. Give {{'{part}': FOLDER}} too.")
        used |= places
        _check_order(op, splits[part], recorded, label)
        # rows made anew: to add a column to chosen rows, datasets would copy them and show a progress bar
        numbered: Any = Split.of(splits[part].texts).rows.add_column("row", rows.tolist())  # pyright: ignore
        by_split[part] = splits[part].with_examples(numbered, RecordedRow(recorded))
    _check_read_alike(op, {part: opened[folders.get(part, folders["train"])] for part in by_split})
    return by_split


def _check_order(op: str, split: Split, recorded: RecordedStates, label: str | int) -> None:
    """Raise DataError if the column `label` of the states' table shows that its rows are not those of a split.

    Rows with equal cells must have equal labels in the split, and the table must have one row per recorded row. Nothing
    is checked if there is no such table or column. `op` begins the message.
    """
    path = recorded.folder / (recorded.manifest.table or "")
    cells = read_table(path).columns.get(str(label), ()) if recorded.manifest.table and is_file(path) else ()
    if cells and len(cells) != len(recorded):
        got = f"{path} has {len(cells)} rows, and {recorded.folder} the states of {len(recorded)}"
        raise DataError(f"{op}: {got}; a row has one state per layer.", path=str(path))
    seen: dict[str, str] = {}
    for row, learnt in zip(split.origin[1].tolist(), map(repr, split.labels), strict=True) if cells else ():
        if seen.setdefault(repr(cells[row]), learnt) != learnt:
            got = f"row {row} (from 0) of {path} has the label {cells[row]!r}, and the task another"
            raise DataError(f"{op}: {got}; they must be the same rows in the same order.", row=row)
