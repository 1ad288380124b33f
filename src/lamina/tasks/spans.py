"""Labels of token tasks given as spans of characters, and the word tags that they make."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import regex

from lamina.data.read import Table
from lamina.data.windows import IGNORED
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec
from lamina.tasks.split import Split
from lamina.tasks.tags import both_ends

Span = tuple[int, int]
TYPE = "span"  # of spans that have no label of their own
_SHOWN = 10  # rows that a warning names
logger = logging.getLogger(__name__)
# A word: letters and digits that may be joined inside by - ' . , / : (as in U.N., 1996-08-22 or 7:30), one character of
# a script that puts no spaces between words, or one other sign.
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
_LETTERS = rf"(?:(?!{_UNSPACED})[\w\p{{M}}])+"
_WORD = regex.compile(rf"{_UNSPACED}|{_LETTERS}(?:[-'\u2019.,/:]{_LETTERS})*|[^\w\s]")


def word_spans(text: str) -> list[Span]:
    """Character span of every word of a plain text."""
    return [match.span() for match in _WORD.finditer(text)]


def span_splits(tables: Mapping[str, Table], spec: ColumnSpec) -> tuple[ColumnSpec, dict[str, Split]]:
    """Texts, or pairs whose second text is labelled, with spans: settle the tags, and make the examples.

    A span is a text, which is labelled wherever it stands, a pair of characters from which and before which, or an
    object with "start", "end" and perhaps "label". Every word that has a character in a span is tagged. Rows with a
    span that is not in their text are errors, or have no tags at all where `missing_labels` is "ignore".

    Raises:
        DataError: If a cell is no list of spans, or a span is not in its text; names row and span.
    """
    tables = {part: lab.labelled({part: table}, spec, texts=True)[part] for part, table in tables.items()}
    types = {label.partition("-")[2] for label in spec.labels or () if label != "O"}
    usual = next(iter(types)) if len(types) == 1 else TYPE
    found = {part: _found(table, spec, usual) for part, table in tables.items()}
    if spec.labels is None:
        lab.label_source(tables)
        seen = {label for spans in found["train"] for _, label in spans or ()} or {usual}
        spec = replace(spec, labels=lab.infer_labels(both_ends(f"B-{label}" for label in seen)))
    spec = replace(spec, problem_type="classification")
    return spec, {part: _split(table, spec, found[part]) for part, table in tables.items()}


def _labelled_texts(table: Table, spec: ColumnSpec) -> Sequence[str]:
    return lab.texts(table, spec.text if spec.text_pair is None else spec.text_pair)


def _found(table: Table, spec: ColumnSpec, usual: str) -> list[list[tuple[Span, str]] | None]:
    """Per row its spans, with their labels; None where one of them is not in the text and that is to be ignored."""
    rows: list[list[tuple[Span, str]] | None] = []
    without: list[int] = []
    for row, text, cell in zip(table.rows, _labelled_texts(table, spec), table.column(spec.label), strict=True):
        if not isinstance(cell, list | tuple):
            problem = f"has {type(cell).__name__} in column '{spec.label}'; spans are a list, which may be empty."
            raise lab.bad_cell(table, row, spec.label, problem)
        spans: list[tuple[Span, str]] = []
        for span in cell:
            if not isinstance(span, str | Mapping | list | tuple):
                raise lab.bad_cell(table, row, spec.label, f"has {span!r} for a span; that is a text or two places.")
            places = _places(span, text)
            if not places and spec.missing_labels != "ignore":
                rule = "which is not in its text; give missing_labels='ignore' to leave such rows without labels"
                raise lab.bad_cell(table, row, spec.label, f"has the span {span!r} in column '{spec.label}', {rule}.")
            if not places:
                without.append(row)
            label = span.get("label", usual) if isinstance(span, Mapping) else usual
            spans += [(place, lab.label_name(label)) for place in places]
        rows.append(None if without[-1:] == [row] else spans)
    if without := list(dict.fromkeys(without)):
        shown = ", ".join(map(str, without[:_SHOWN])) + ", ..." * (len(without) > _SHOWN)
        what = "%s: %d of %d rows have a span that is not in their text; their words have no labels (%s)"
        logger.warning(f"task: {what}", table.path, len(without), len(table), shown)
    return rows


def _places(span: Any, text: str) -> list[Span]:
    """Where a span is in a text; nowhere if it is not in it."""
    if isinstance(span, str):
        wanted = span.strip()
        return [match.span() for match in regex.finditer(regex.escape(wanted), text)] if wanted else []
    edges: list[Any] = [span.get("start"), span.get("end")] if isinstance(span, Mapping) else list(span)
    if len(edges) == 2 and all(isinstance(edge, int) for edge in edges) and 0 <= edges[0] < edges[1] <= len(text):
        return [(edges[0], edges[1])]
    return []


def _split(table: Table, spec: ColumnSpec, found: Sequence[list[tuple[Span, str]] | None]) -> Split:
    texts: Any = _labelled_texts(table, spec)
    words = [word_spans(text) for text in texts]
    number = {label: at for at, label in enumerate(spec.labels or ())}
    tags = []
    for row, own, spans in zip(table.rows, words, found, strict=True):
        marks = [None] * len(own) if spans is None else list(_tags(own, spans))
        if unknown := [mark for mark in marks if mark is not None and mark not in number]:
            raise lab.unknown_label(table, row, spec.label, unknown[0], spec.labels or ())
        tags.append(tuple(IGNORED if mark is None else number[mark] for mark in marks))
    pairs = texts if spec.text_pair is None else zip(lab.texts(table, spec.text), texts, strict=True)
    return Split.of(pairs, tags, words)


def _tags(words: Sequence[Span], spans: Sequence[tuple[Span, str]]) -> Iterator[str]:
    """A tag per word, of the first span that it has a character of."""
    before: tuple[Span, str] | None = None
    for start, end in words:
        inside = next((span for span in sorted(spans) if span[0][0] < end and start < span[0][1]), None)
        yield "O" if inside is None else f"{'I' if inside == before else 'B'}-{inside[1]}"
        before = inside
