"""From tables to the parts of a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import labels as lab
from lamina.tasks.split import Split
from lamina.tasks.tags import both_ends, is_iob, to_iob2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.data.read import Table

SEQUENCE, TOKEN, MASKED = "sequence_classification", "token_classification", "masked_lm"
SUMMARIZATION, TRANSLATION, IMAGE = "summarization", "translation", "image_classification"
GENERATION = (SUMMARIZATION, TRANSLATION)
KINDS = (SEQUENCE, TOKEN, MASKED, *GENERATION, IMAGE)
MASKED_LABELS = ("token",)  # the classes are the model's vocabulary, which no task lists
TEXT_LABELS = ("text",)  # texts are written, which have no classes

METRICS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (SEQUENCE, "classification"): ("accuracy", "f1", "mcc"),
    (SEQUENCE, "regression"): ("pearson", "spearman"),
    (SEQUENCE, "multi_label"): ("f1", "accuracy"),
    (TOKEN, "classification"): ("span_f1", "accuracy", "f1"),
    (MASKED, "classification"): ("perplexity", "accuracy"),
    (SUMMARIZATION, "generation"): ("rougeL", "rouge1", "rouge2", "rougeLsum"),
    (TRANSLATION, "generation"): ("bleu", "chrf"),
    (IMAGE, "classification"): ("accuracy", "f1"),
}
"""Which metrics fit which (kind, problem); the first is the usual one to choose a checkpoint by."""

LOWER = frozenset({"perplexity"})
"""Metrics of which less is better; of all others more is."""


def better(metric: str, new: float, old: float) -> bool:
    """Whether a score beats another; NaN beats nothing, and a tie is not better."""
    return new < old if metric in LOWER else new > old


def one_class(kind: str, problem: str) -> bool:
    """Whether every row has one class."""
    return kind in (SEQUENCE, IMAGE) and problem == "classification"


@dataclass(frozen=True)
class Wanted:
    """Which columns to read, and as what.

    Attributes:
        kind: One of `KINDS`.
        text: Column of the text, of the list of words, or of the picture.
        label: Column of the label, of the list of tags, or of the text that is to be written.
        pair: Column of the second text, if any.
        labels: Class names in the order of their ids; None reads them off the train part.
        problem: "classification", "regression", "multi_label" or "generation"; None reads it off the labels.
    """

    kind: str
    text: str | int
    label: str | int
    pair: str | int | None = None
    labels: tuple[str, ...] | None = None
    problem: str | None = None


def build(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[Wanted, dict[str, Split]]:
    """Read every part.

    Args:
        wanted: The columns; `labels` and `problem` may be left open.
        tables: Part ("train", "validation", "test") to table; the labels are read off "train".

    Returns:
        `wanted` with labels and problem settled, and the parts.

    Raises:
        DataError: If a column is missing, or a cell does not fit.
        UnknownNameError: If the kind or the problem is none there is.
        ConfigError: If labels are named twice, or a kind that reads single texts is to read pairs.
    """
    if wanted.kind not in KINDS:
        raise UnknownNameError(op="task", got=wanted.kind, known=KINDS, what="kind")
    problems = [problem for kind, problem in METRICS if kind == wanted.kind]
    if wanted.problem is not None and wanted.problem not in problems:
        raise UnknownNameError(op="task", got=wanted.problem, known=problems, what="problem")
    _check_labels(wanted.labels)
    if wanted.pair is not None and wanted.kind != SEQUENCE:
        raise ConfigError(
            f"task: text_pair is '{wanted.pair}'; a task of kind {wanted.kind} reads one text a row. "
            "Leave text_pair out."
        )
    return _BUILDERS[wanted.kind](wanted, tables)


def _check_labels(labels: Sequence[str] | None) -> None:
    if labels is not None and (not labels or len(set(labels)) < len(labels)):
        raise ConfigError(
            f"task: labels are {', '.join(labels) or 'none'}; every class has a name of its own. Name each once."
        )


def _first(tables: Mapping[str, Table]) -> Table:
    """The table that labels are read off."""
    if "train" not in tables:
        raise DataError(
            "task: no train file was given, and no labels; one of them says which labels there are. "
            "Name the labels in `labels`."
        )
    return tables["train"]


def _sequence_task(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[Wanted, dict[str, Split]]:
    cells = next(iter(tables.values())).column(wanted.label)
    wanted = replace(wanted, problem=wanted.problem or lab.infer_problem(cells))
    if wanted.labels is None:
        wanted = replace(wanted, labels=_sequence_labels(wanted, tables))
    return wanted, {name: _sequence_split(table, wanted) for name, table in tables.items()}


def _sequence_labels(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[str, ...]:
    if wanted.problem == "regression":
        return (str(wanted.label),)
    cells = _first(tables).column(wanted.label)
    if wanted.problem == "multi_label":
        cells = [part for cell in cells for part in lab.parts(cell)]
    return lab.infer_labels(lab.label_name(cell) for cell in cells)


def _sequence_split(table: Table, wanted: Wanted) -> Split:
    names = wanted.labels or ()
    texts: tuple[Any, ...] = _texts(table, wanted.text)
    if wanted.pair is not None:
        texts = tuple(zip(texts, _texts(table, wanted.pair), strict=True))
    if wanted.problem == "regression":
        return Split(texts, lab.numbers(table, wanted.label))
    if wanted.problem == "multi_label":
        return Split(texts, lab.multi_hot(table, wanted.label, names))
    return Split(texts, lab.class_ids(table, wanted.label, names))


def _texts(table: Table, column: str | int) -> tuple[str, ...]:
    cells = table.column(column)
    for row, cell in zip(table.rows, cells, strict=True):
        if not isinstance(cell, str):
            raise DataError(
                f"task: {table.path} row {row} has no text in column '{column}' but {type(cell).__name__}; "
                "a task of this kind reads text. Name the column that holds it.",
                path=table.path,
                row=row,
                column=str(column),
            )
    return tuple(cells)


def _token_task(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[Wanted, dict[str, Split]]:
    tags = {name: _tags(table, wanted) for name, table in tables.items()}
    if wanted.labels is None:
        _first(tables)
    given = set(wanted.labels or (tag for sentence in tags["train"] for tag in sentence))
    iob = is_iob(given) and (wanted.labels is None or any(label.startswith("B-") for label in given))
    if iob:
        tags = {name: [to_iob2(sentence) for sentence in part] for name, part in tags.items()}
    if wanted.labels is None:
        wanted = replace(wanted, labels=lab.infer_labels(both_ends(given) if iob else given))
    wanted = replace(wanted, problem="classification")
    return wanted, {name: _token_split(table, wanted, tags[name]) for name, table in tables.items()}


def _tags(table: Table, wanted: Wanted) -> list[tuple[str, ...]]:
    """The tags of each row, as names; checked to be as many as the words."""
    out: list[tuple[str, ...]] = []
    words, tags = table.column(wanted.text), table.column(wanted.label)
    for row, some, marks in zip(table.rows, words, tags, strict=True):
        if not isinstance(some, list | tuple) or not isinstance(marks, list | tuple):
            column = wanted.label if isinstance(some, list | tuple) else wanted.text
            raise DataError(
                f"task: {table.path} row {row} has no list in column '{column}'; a token task reads a list of words "
                "and a list of tags. Use JSONL or Parquet with lists, or CoNLL columns.",
                path=table.path,
                row=row,
                column=str(column),
            )
        if len(some) != len(marks):
            raise DataError(
                f"task: {table.path} row {row} has {len(some)} words and {len(marks)} tags; every word has one tag. "
                "Correct this row.",
                path=table.path,
                row=row,
            )
        out.append(tuple(_tag_name(mark, wanted.labels) for mark in marks))
    return out


def _tag_name(mark: object, labels: Sequence[str] | None) -> str:
    """A tag's name; where the labels are given, a whole number may stand for it."""
    if labels is not None and isinstance(mark, int) and 0 <= mark < len(labels) and str(mark) not in labels:
        return labels[mark]
    return lab.label_name(mark)


def _token_split(table: Table, wanted: Wanted, tags: Sequence[Sequence[str]]) -> Split:
    names = wanted.labels or ()
    index = {name: i for i, name in enumerate(names)}
    texts, spans, ids = [], [], []
    for row, words, marks in zip(table.rows, table.column(wanted.text), tags, strict=True):
        for number, mark in enumerate(marks):
            if mark not in index:
                lab.unknown_label(table, row + number * table.numbered, mark, names, wanted.label)
        text, span = join(words)
        texts.append(text)
        spans.append(span)
        ids.append(tuple(index[mark] for mark in marks))
    return Split(tuple(texts), tuple(ids), tuple(spans))


def _masked_task(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[Wanted, dict[str, Split]]:
    wanted = _without_classes(wanted, MASKED_LABELS, "classification", "the texts' own tokens")
    return wanted, {name: _plain_split(table, wanted) for name, table in tables.items()}


def _without_classes(wanted: Wanted, labels: tuple[str, ...], problem: str, instead: str) -> Wanted:
    """Settle labels and problem of a kind that has no classes, and so takes no labels."""
    if wanted.labels not in (None, labels):
        raise ConfigError(
            f"task: labels are {', '.join(wanted.labels or ())}; a task of kind {wanted.kind} has {instead} in their "
            "place. Leave labels out."
        )
    return replace(wanted, labels=labels, problem=problem)


def _plain_split(table: Table, wanted: Wanted) -> Split:
    """The texts as they are, without their line ends; blank ones are no rows."""
    texts = tuple(text.rstrip("\r\n") for text in _texts(table, wanted.text) if text.strip())
    return Split(texts, (None,) * len(texts))


def _generation_task(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[Wanted, dict[str, Split]]:
    wanted = _without_classes(wanted, TEXT_LABELS, "generation", "texts to write")
    return wanted, {name: _generation_split(table, wanted) for name, table in tables.items()}


def _generation_split(table: Table, wanted: Wanted) -> Split:
    sources, targets = (_texts(table, column) for column in (wanted.text, wanted.label))
    for column, texts in ((wanted.text, sources), (wanted.label, targets)):
        blank = next((row for row, text in zip(table.rows, texts, strict=True) if not text.strip()), None)
        if blank is not None:
            raise DataError(
                f"task: {table.path} row {blank} is blank in column '{column}'; every text has one that it becomes. "
                "Fill it in or leave the row out.",
                path=table.path,
                row=blank,
                column=str(column),
            )
    return Split(sources, targets)


def _image_task(wanted: Wanted, tables: Mapping[str, Table]) -> tuple[Wanted, dict[str, Split]]:
    wanted = replace(wanted, problem="classification")
    if wanted.labels is None:
        wanted = replace(wanted, labels=_sequence_labels(wanted, tables))
    names = wanted.labels or ()
    return wanted, {
        name: Split(tuple(table.column(wanted.text)), lab.class_ids(table, wanted.label, names))
        for name, table in tables.items()
    }


_BUILDERS = {
    SEQUENCE: _sequence_task,
    TOKEN: _token_task,
    MASKED: _masked_task,
    SUMMARIZATION: _generation_task,
    TRANSLATION: _generation_task,
    IMAGE: _image_task,
}


def join(words: Sequence[object]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Words with one space between them, and the character span of each."""
    spans: list[tuple[int, int]] = []
    start = 0
    for word in words:
        end = start + len(str(word))
        spans.append((start, end))
        start = end + 1
    return " ".join(map(str, words)), tuple(spans)
