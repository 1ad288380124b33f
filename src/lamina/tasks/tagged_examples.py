"""Make the examples of tagging tasks: from lists of words and tags, or from texts and spans of characters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeAlias

from lamina.data.read import Table
from lamina.data.windows import IGNORED
from lamina.errors import DataError
from lamina.tasks import labels as lab
from lamina.tasks import span_forms, tag_schemes
from lamina.tasks.base import ColumnSpec
from lamina.tasks.label_cells import LabelCellError, class_name, is_number, plain, shown
from lamina.tasks.metrics import marks_spans
from lamina.tasks.split import Split
from lamina.tasks.words import Span, join, word_spans

logger = logging.getLogger(__name__)
TagNames: TypeAlias = Sequence[Sequence[str | None]]  # for each row the tag of every word; None: no label

# Lists of words and tags


def tag_splits(tables: Mapping[str, Table], spec: ColumnSpec) -> tuple[ColumnSpec, dict[str, Split]]:
    """Make the examples of every split from lists of words and tags; arguments and result as in `Kind.build`.

    Tags that mark spans in a different scheme than IOB2 are rewritten as IOB2, unless `spec.labels` are tags of IOBES
    or BILOU; then IOB2 tags are rewritten like these. A warning tells of tags that mark no spans although one looks
    like "O".

    Raises DataError if words and tags do not match, a tag is not in `spec.labels`, some training tags fit the scheme of
    spans and others do not, or there are neither labels nor training tags.
    """
    lab.warn_of_ids(tables, spec)
    tags = {name: _tags(table, spec) for name, table in tables.items()}
    if spec.labels is None:
        lab.label_source(tables)
    names = spec.labels or tuple(dict.fromkeys(tag for row in tags["train"] for tag in row if tag is not None))
    if not names:
        path = tables["train"].path
        raise DataError(f"task: {path} has no tag in any row of column '{spec.label}'.", path=path)
    scheme = tag_schemes.recognise(names)
    if spec.labels is None and scheme is None:
        _refuse_odd_tag(tables["train"], tags["train"], spec, tag_schemes.odd_tag(names))
    if scheme is None and tag_schemes.has_outside(names):
        what = "task: %s: the tags %s mark no spans, so words are scored one by one; for entities, write B-x, I-x and O"
        logger.warning(what, next(iter(tables.values())).path, lab.listed(names))
    labels = _labels(spec, names, scheme)
    if tag_schemes.is_iob2(labels):
        seen = {tag for part in tags.values() for row in part for tag in row if tag is not None}
        if written := tag_schemes.recognise(seen) or scheme:
            tags = {name: [tag_schemes.to_iob2(row, written) for row in part] for name, part in tags.items()}
    spec = replace(spec, labels=labels, problem_type="classification")
    return spec, {name: _split(table, spec, tags[name]) for name, table in tables.items()}


def _tags(table: Table, spec: ColumnSpec) -> list[tuple[str | None, ...]]:
    """Return the tag names of each row, None for -100.

    Raises DataError unless each row has words with one tag each, and the columns are not confused (`_check_words`).
    """
    tags: list[tuple[str | None, ...]] = []
    _check_words(table, spec)
    cells = [marks for marks in table.column(spec.label) if isinstance(marks, list | tuple)]
    are_ids = all(is_number(mark) for marks in cells for mark in marks)
    labels = spec.labels or ()
    by_id = () if any(map(is_number, labels)) else labels
    for row, words, marks in zip(table.rows, table.column(spec.text), table.column(spec.label), strict=True):
        if not isinstance(words, list | tuple) or not isinstance(marks, list | tuple):
            column = spec.label if isinstance(words, list | tuple) else spec.text
            problem = f"has no list in column '{column}'; a token task reads a list of words and a list of tags."
            raise lab.bad_cell(table, row, column, problem)
        if len(words) != len(marks):
            problem = f"has {len(words)} words and {len(marks)} tags; every word has one tag."
            raise lab.bad_cell(table, row, spec.label, problem)
        if any(word is None or word != word for word in words):  # NaN, which pandas writes for a missing word
            problem = f"has a word that is missing in column '{spec.text}' ({words!r:.60}); every word is a text."
            raise lab.bad_cell(table, row, spec.text, problem)
        with lab.cell_errors(table, row, spec.label):
            tags.append(tuple(_tag_name(mark, labels, by_id, are_ids=are_ids) for mark in marks))
    return tags


def _check_words(table: Table, spec: ColumnSpec) -> None:
    """Raise DataError if the column of words in a CoNLL file holds the numbers of the words, or tags, instead.

    Numbers are an error only in a file with more than two columns. Tags are O, and names that begin with B- or I-; at
    least one begins with B-.
    """
    flat = list(map(str, chain.from_iterable(table.column(spec.text)))) if table.numbered else []
    what = ""
    if len(table.columns) > 2 and all(map(str.isdecimal, flat)):
        what = "numbers, such as those of words or sentences,"
    elif any(word[:2] == "B-" for word in flat) and all(word == "O" or word[:2] in ("B-", "I-") for word in flat):
        what = "tags"
    if what and flat:
        hint = "The words may be in column 1: text=1, or --text 1"
        raise DataError(
            f"task: {table.path} has {what} in column '{spec.text}', not the words. {hint}.",
            path=table.path,
            column=str(spec.text),
        )


def _tag_name(mark: object, labels: Sequence[str], by_id: Sequence[str], *, are_ids: bool) -> str | None:
    """Return the name of a tag in a file; None for -100, which marks a word without a label.

    A tag may be the index of a label in `by_id`, which is () if one of `labels` is a number itself. A text is an index
    only with `are_ids`, that is, if all tags of the table are numbers. Any other text or whole number is a name, also
    one that is not in `labels`. Raises LabelCellError for other values, as `class_name` does.
    """
    if isinstance(mark := plain(mark), list | Mapping):
        raise LabelCellError(shown(mark), "; every word has one tag, a name or a number.")
    can_be_id = not isinstance(mark, bool) and (are_ids or not isinstance(mark, str))
    if can_be_id and is_number(mark) and float(str(mark)).is_integer():
        number = int(float(str(mark)))
        if str(number) not in labels and number == IGNORED:
            return None
        if 0 <= number < len(by_id):
            return by_id[number]
    return class_name(mark, labels)


def _refuse_odd_tag(table: Table, tags: TagNames, spec: ColumnSpec, odd: str | None) -> None:
    """Raise DataError for the first word with the tag `odd`, unless that is None; `tags` has the tags of each row."""
    words = table.column(spec.text) if odd is not None else ()
    for row, sentence, marks in zip(table.rows, words, tags, strict=False):
        if odd in marks:
            number = marks.index(odd)
            got = f"has the tag '{odd}' (word '{sentence[number]}') in column '{spec.label}', and other tags mark spans"
            rule = "all tags must be written alike, such as B-x, I-x and O"
            problem = f"{got}; {rule}. Correct it, or give labels=[...] with all tags."
            raise lab.bad_cell(table, row + number * table.numbered, spec.label, problem)


def _labels(spec: ColumnSpec, names: Sequence[str], scheme: tag_schemes.TagScheme | None) -> tuple[str, ...]:
    """Return the class names of a task.

    `names` are `spec.labels`, which keep their order, or else the tags of the train split, which are then sorted. If
    they mark spans in `scheme` (None: they mark none), they become IOB2 tags; but `spec.labels` stay if all are IOB2,
    IOBES or BILOU tags.
    """
    if scheme is None or (spec.labels is not None and marks_spans(spec.labels)):
        return spec.labels or lab.infer_labels(names)
    labels = tag_schemes.iob2_labels(names, scheme)
    return labels if spec.labels else lab.infer_labels(labels)


def _split(table: Table, spec: ColumnSpec, tags: TagNames) -> Split:
    """Return the examples of `table.whole`; words of rows that are not in the table itself have no label.

    `tags` are the tag names of the rows in the table, None for a word without a label. Warnings name the rows in which
    a span begins at a word without letters or signs, and the rows with a word that looks like a tokenizer's piece.
    Raises DataError for a tag that is not in `spec.labels`.
    """
    ids = _tag_ids(table, spec, tags)
    sentences = zip(table.column(spec.text), tags, strict=True)
    begun = [[word for word, mark in zip(*row, strict=True) if mark and mark[:2] == "B-"] for row in sentences]
    blank = [at for at, words in enumerate(begun) if not all(word_spans(str(word)) for word in words)]
    _warn(table, blank, "a span that begins at a word without letters or signs, which no plain text has")
    pieces = [at for at, words in enumerate(table.column(spec.text)) if any(map(_is_piece, words))]
    _warn(table, pieces, "a word that begins with ## or \u2581, as tokenizers write pieces; plain texts have words")
    joined = [join(words) for words in (table.whole or table).column(spec.text)]
    every = lab.with_gaps(ids, table, lambda row: (IGNORED,) * len(joined[row][1]))
    return Split.of((text for text, _ in joined), every, (words for _, words in joined))


def _tag_ids(table: Table, spec: ColumnSpec, tags: TagNames) -> list[tuple[int, ...]]:
    """Return for each row of the table the ids of its `tags`; -100 for a word whose tag is None.

    If all tags are IOB2, the ends of spans first get the tags that `spec.labels` have for them; see `with_ends`. Raises
    DataError for a tag that is not in `spec.labels`.
    """
    names = spec.labels or ()
    if tag_schemes.is_iob2(chain.from_iterable(filter(None, row) for row in tags)) and marks_spans(names):
        tags = [tag_schemes.with_ends(row, names) for row in tags]
    index: dict[str | None, int] = {None: IGNORED, **{name: number for number, name in enumerate(names)}}
    for row, marks in zip(table.rows, tags, strict=True):
        for number, mark in enumerate(marks):
            if mark not in index:  # in a CoNLL file, every word has a line of its own
                raise lab.unknown_label(table, row + number * table.numbered, spec.label, mark, names)
    return [tuple(index[mark] for mark in marks) for marks in tags]


def _is_piece(word: object) -> bool:
    return len(str(word)) > 2 and str(word).startswith(("##", "\u2581"))


# Texts and spans


class _TaggedText(NamedTuple):
    """The words of a text, as spans of characters, and their IOB2 tags; a word without a label has None."""

    words: list[Span]
    tags: Sequence[str | None]


def span_splits(tables: Mapping[str, Table], spec: ColumnSpec) -> tuple[ColumnSpec, dict[str, Split]]:
    """Make the examples of every split from texts and lists of spans; with `spec.text_pair`, from pairs of texts.

    Every word that shares a character with a span is tagged. `span_forms` describes the forms of spans; if a span is a
    text, it is labelled wherever it occurs as whole words, or else wherever it occurs. The spans of a pair are in its
    second text. `spec.labels` may have labels of spans in place of tags. Spans without a label get
    the label in `spec.labels` if that has only one, or else "span". Rows and splits without labels are treated as in
    `labelled`. A warning says if no training row has a span.

    Returns:
        `spec` with the tags as labels, and split name -> examples.

    Raises:
        DataError: If a cell is not a list of spans; or if a span is not in its text, has no word, shares a word with
            another span, or has several labels. (With `spec.missing_labels` "ignore", the words of a row with such a
            span get no labels instead.) The message names row and span. Also if a label is not in `spec.labels`, or
            there are neither labels nor a train split.
    """
    tables = lab.labelled(tables, spec, texts=True)
    labels = spec.labels
    if labels and not any(label[:2] in ("B-", "I-") for label in labels):
        labels = ("O", *(f"{mark}-{label}" for label in labels if label != "O" for mark in "BI"))
    types = {label.partition("-")[2] for label in labels or () if label != "O"}
    default = next(iter(types)) if len(types) == 1 else tag_schemes.SPAN_LABEL
    rows = {part: _tagged_texts(table, spec, default) for part, table in tables.items()}
    if labels is None:
        declared = lab.label_source(tables).class_names
        seen = {tag for row in rows["train"] for tag in row.tags if tag is not None}
        if not seen - {"O"}:
            what = "task: %s: column '%s' has no span in any row, so readers learn that there are none"
            logger.warning(what, tables["train"].path, spec.label)
        seen |= {f"B-{name}" for key, names in declared.items() if key.startswith(f"{spec.label}.") for name in names}
        labels = lab.infer_labels(tag_schemes.both_ends(seen - {"O"} or {f"B-{default}"}))
    spec = replace(spec, labels=labels, problem_type="classification")
    return spec, {part: _span_split(table, spec, rows[part]) for part, table in tables.items()}


def _labelled_texts(table: Table, spec: ColumnSpec) -> Sequence[str]:
    return lab.texts(table, spec.text if spec.text_pair is None else spec.text_pair)


def _tagged_texts(table: Table, spec: ColumnSpec, default: str) -> list[_TaggedText]:
    """Return the words of each row's text with their tags; `default` is the label of spans without a label.

    Edges of spans count characters. They are read as UTF-16 units instead, with a warning, if no span is wrong in units
    and one of two cases holds. More rows have wrong spans in characters than have cut words in units. Or no span is
    wrong in characters, but words are cut, and none is cut in units. A wrong span raises DataError, as in
    `span_splits`; with `missing_labels` "ignore", the words of its row get no tags, with a warning. A span that cuts
    words tags its whole words, with a warning.
    """
    marks: list[list[span_forms.SpanMark] | span_forms.UnplacedSpanError] = []
    skipped, emptied = 0, 0  # results of Label Studio that are no spans, and rows with no others
    for row, cell in zip(table.rows, table.column(spec.label), strict=True):
        with lab.cell_errors(table, row, spec.label):
            try:
                spans, others = span_forms.read_spans(cell, default)
                marks.append(spans)
                skipped += others
                emptied += others > 0 and not spans
            except span_forms.UnplacedSpanError as error:
                marks.append(error)
    if skipped:
        what = "results of Label Studio in column '%s' are no spans; %d of %d rows have no others, so their words are O"
        logger.warning(f"task: %s: %d {what}", table.path, skipped, spec.label, emptied, len(table))
    texts = _labelled_texts(table, spec)
    rows, problems, cut = _placed(texts, marks, utf16=False)
    again = _placed(texts, marks, utf16=True) if problems or cut else (rows, problems, cut)
    if not again[1] and (len(again[2]) < len(problems) if problems else cut and not again[2]):
        rows, problems, cut = again
        what = "task: %s: the edges of spans in column '%s' fit as UTF-16 units only, and are read as these"
        logger.warning(what, table.path, spec.label)
    if problems and spec.missing_labels != "ignore":
        at, error = next(iter(problems.items()))
        with lab.cell_errors(table, table.rows[at], spec.label):
            raise error
    _warn(table, [*problems], "a span that is not in their text or that tags cannot mark; no word has a label")
    _warn(table, cut, "a span that does not begin and end with a word; the span of its whole words is learnt")
    return rows


def _warn(table: Table, rows: Sequence[int], what: str) -> None:
    """Warn that rows of a table, with the indices `rows`, have `what`, and name them; without rows, log nothing."""
    if rows:
        numbers = lab.listed([table.rows[row] for row in rows])
        logger.warning("task: %s: %d of %d rows have %s (%s)", table.path, len(rows), len(table), what, numbers)


def _placed(
    texts: Sequence[str], marks: Sequence[list[span_forms.SpanMark] | span_forms.UnplacedSpanError], *, utf16: bool
) -> tuple[list[_TaggedText], dict[int, span_forms.SpanError], list[int]]:
    """Return words and tags of each text; index -> error of texts without tags; and indices of texts with cut words.

    `marks` has the spans of each text, or the error that says why they cannot be read. A span cuts a word if it does
    not begin and end with words. With `utf16`, edges of spans count UTF-16 units.
    """
    rows: list[_TaggedText] = []
    problems: dict[int, span_forms.SpanError] = {}
    cut: list[int] = []
    for at, (text, spans) in enumerate(zip(texts, marks, strict=True)):
        words = word_spans(text)
        tags: Sequence[str | None] = [None] * len(words)
        try:
            if isinstance(spans, span_forms.SpanError):
                raise spans
            units = span_forms.utf16_units(text) if utf16 else None
            found = [(place, mark.label) for mark in spans for place in span_forms.places(mark, text, words, units)]
            tags = span_forms.tags_of_spans(text, words, found)
            cut += [at] * span_forms.cuts_word(words, found)
        except span_forms.UnplacedSpanError as error:
            problems[at] = error
        rows.append(_TaggedText(words, tags))
    return rows, problems, cut


def _span_split(table: Table, spec: ColumnSpec, rows: Sequence[_TaggedText]) -> Split:
    """Return the examples of `table.whole` with the tags of the rows in the table; words of other rows have no label.

    Raises DataError for a tag that is not in `spec.labels`.
    """
    ids, every = _tag_ids(table, spec, [row.tags for row in rows]), table.whole or table
    texts = _labelled_texts(every, spec)
    words = [*lab.with_gaps((row.words for row in rows), table, lambda row: word_spans(texts[row]))]
    pairs = texts if spec.text_pair is None else zip(lab.texts(every, spec.text), texts, strict=True)
    return Split.of(pairs, lab.with_gaps(ids, table, lambda row: (IGNORED,) * len(words[row])), words)
