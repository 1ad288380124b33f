"""Classify words, such as named entities: read tags or spans, and predict a tag for every word.

A tag is a label of a word. Tags that mark spans are "O" outside spans, "B-x" at the first word of a span with label x,
and "I-x" inside it.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NotRequired, TypeAlias, TypedDict, cast, final

import regex
import torch
from torch import Tensor

from lamina.data.read import Table
from lamina.data.windows import IGNORED, word_labels, word_places
from lamina.heads.base import TaskLike
from lamina.layers.nan_checks import first_invalid_row
from lamina.tasks import labels as lab
from lamina.tasks.base import ClassRow, ColumnSpec, Label, LabelledTask, Results, WrongAnswer
from lamina.tasks.class_results import error_rows
from lamina.tasks.comparison import Comparison, compare_tags, most_frequent_tag
from lamina.tasks.inputs import TextInputs, WordTargets
from lamina.tasks.kind import TextClassKind, checked_texts
from lamina.tasks.label_cells import class_name
from lamina.tasks.metrics import class_table, marks_spans, score_tags, span_table
from lamina.tasks.split import Split

Span: TypeAlias = tuple[int, int]  # first character, and the one after the last
Text: TypeAlias = str | tuple[str, str]  # a text, or a pair whose second text is tagged

SPAN_LABEL = "span"  # label of spans without a label, if there is no class name either
_IOB = re.compile(r"O|[BI]-.+")
# A word: letters and digits, which may be joined inside by - ' . , / : (as in U.N., 1996-08-22 or 7:30); or one
# character of a script that puts no spaces between words; or one other sign.
_UNSPACED = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
_LETTERS = rf"(?:(?!{_UNSPACED})[\w\p{{M}}])+"
_WORD = regex.compile(rf"{_UNSPACED}|{_LETTERS}(?:[-'\u2019.,/:]{_LETTERS})*|[^\w\s]")
logger = logging.getLogger(__name__)


class SpanAnswer(TypedDict):
    """A predicted span of a text.

    Attributes:
        start: Position of its first character.
        end: Position after its last character.
        label: Its label; if tags mark no spans, the tag of the word.
        text: Its characters.
        score: Mean probability of the tags of its words.
        error: In tables of wrong predictions, why the span is wrong; see `wrong_spans`.
    """

    start: int
    end: int
    label: str
    text: NotRequired[str]
    score: float
    error: NotRequired[str]


@final
class TokenClassificationKind(TextClassKind):
    """The kind of task that predicts a tag for every word."""

    name = "token_classification"
    problem_types = {"classification": ("span_f1", "accuracy", "f1")}
    auto_class = "AutoModelForTokenClassification"
    per_token = True
    tags_words = True
    reads_pairs = True
    judges_second = True
    missing = (*TextClassKind.missing, "mask", "ignore")
    logits_axes = 3
    other_files = "conll"

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Make the examples of every split, from lists of words and tags or from texts and spans.

        Columns of CoNLL files are numbers: by default the first has the words and the last the tags. If the text column
        has texts and not lists of words, labels are spans; see `span_splits`. IOB1 tags become IOB2. See `Kind.build`
        for arguments, result and errors.
        """
        if all(table.numbered for table in tables.values()):
            text, label = self.usual_columns
            spec = replace(spec, text=0 if spec.text == text else spec.text)
            spec = replace(spec, label=-1 if spec.label == label else spec.label)
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        first = next(iter(tables.values()), None)
        if first is not None and (spec.text_pair is not None or isinstance(first.column(spec.text)[0], str)):
            return span_splits(tables, spec)
        return _tag_splits(lab.labelled(tables, spec), spec)

    def metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the metrics, "span_f1" only if the tags mark spans."""
        known = self.problem_types[problem_type]
        return known if marks_spans(labels) else tuple(name for name in known if name != "span_f1")

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Return the span labels (the tags if these mark no spans), and the ids of those that each example has.

        CoNLL-2003 has four span labels, which is how papers on few-shot learning count its classes.
        """
        spans = marks_spans(task.labels)
        types = [label.partition("-")[2] if spans else label for label in task.labels]
        names = tuple(dict.fromkeys(name for name in types if name))
        number = {tag: names.index(name) for tag, name in enumerate(types) if name}
        return names, [tuple(sorted({number[tag] for tag in row if tag in number})) for row in split.labels]

    def targets(self, task: LabelledTask, split: Split, inputs: TextInputs) -> WordTargets:
        """Return each word's tag for its first token, or with `task.label_all_tokens` for all of its tokens.

        A word that several windows contain has its tag in the window with the most context around it.
        """
        others = continued(task.labels) if task.label_all_tokens else None
        return WordTargets(word_labels(inputs.encoded, split.words or (), split.labels, others))

    def results(self, task: TaskLike, split: Split, inputs: TextInputs) -> Results:
        """Return an empty collection of the logits of every word."""
        return _TagResults(task, split, inputs)

    def examples(self, raw: Sequence[object], processor: object) -> Split:
        """Return the texts or pairs that a user passed to `predict`, split into words at their letters and signs.

        Raises:
            ConfigError: If an example is neither a text nor a pair of texts.
        """
        texts = checked_texts(raw, pairs=True)
        return Split.of(texts, words=[word_spans(_tagged(text)) for text in texts])


class _TagResults(Results[Tensor, list[SpanAnswer]]):
    """Collects the logits of every word. A word without a token is tagged "O", or else with the first tag."""

    def __init__(self, task: TaskLike, split: Split, inputs: TextInputs) -> None:
        self._task, self._split, words = task, split, list(split.words or ())
        self._counts = [len(spans) for spans in words]
        empty = torch.zeros(len(task.labels))
        empty[task.labels.index("O") if "O" in task.labels else 0] = 1.0
        self._logits = empty.repeat(sum(self._counts), 1)
        self._places = word_places(inputs.encoded, words)

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Store the logits of each word, those of its first token, from `[batch, tokens, classes]`."""
        places = [(at, *place) for at, row in enumerate(rows) for place in self._places[row]]
        if places:
            at, position, word = torch.tensor(places).T
            self._logits[word] = outputs.float().cpu()[at, position]

    def first_not_finite(self) -> int | None:
        """Return the index of the first text with a word whose logits are NaN or infinite; None if there is none."""
        word = first_invalid_row(self._logits)
        return None if word is None else bisect_right(list(accumulate(self._counts)), word)

    def guesses(self) -> list[Label]:
        """Return for each text the ids of the predicted tags of its words."""
        return [*self._predicted_tags()]

    def _predicted_tags(self) -> list[tuple[int, ...]]:
        """Return for each text the ids of the predicted tags of its words."""
        return [tuple(tags.tolist()) for tags in self._logits.argmax(-1).split(self._counts)]

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Return metric -> score over the texts that have labels."""
        return score_tags(metrics, *self._both(), self._task.labels)

    def baseline(self, metrics: Sequence[str]) -> tuple[str, dict[str, float]] | None:
        """Return the most frequent tag, and the scores of giving it to every word."""
        always, constant = most_frequent_tag(self._both()[1], self._task.labels)
        return always, score_tags(metrics, constant, self._both()[1], self._task.labels)

    def compare(self, metrics: Sequence[str]) -> Comparison:
        """Return how the scores compare with giving every word the most frequent tag."""
        return compare_tags(metrics, *self._both(), self._task.labels)

    def _both(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the ids of the predicted tags and of the true tags, for the texts that have labels."""
        both = zip(self._predicted_tags(), self._split.labels, strict=True)
        scored = [pair for pair in both if IGNORED not in pair[1]]
        return [guess for guess, _ in scored], [truth for _, truth in scored]

    def per_class(self) -> list[ClassRow]:
        """Return the rows of a table of scores per span label, or per tag if tags mark no spans."""
        labels, (guesses, truths) = self._task.labels, self._both()
        if marks_spans(labels):
            return span_table(guesses, truths, labels)
        guesses, truths = (torch.tensor([tag for row in rows for tag in row]) for rows in (guesses, truths))
        return class_table(guesses, truths, labels)

    def errors(self, count: int) -> list[WrongAnswer]:
        """Return at most `count` texts with wrong spans, the most confident first; see `wrong_spans`."""
        return error_rows(self._wrong(), self._split.texts, count)

    def _wrong(self) -> Iterator[WrongAnswer]:
        """Yield a wrong answer, without its text, for each text with wrong spans; texts without labels are skipped."""
        for row, ((logits, text, words), truth) in enumerate(zip(self._texts(), self._split.labels, strict=True)):
            scores, ids = (values.tolist() for values in logits.softmax(-1).max(-1))
            if ids != list(truth) and IGNORED not in truth:
                both = (spans_of_tags(tags, scores, self._task.labels, text, words) for tags in (truth, ids))
                if (wrong := wrong_spans(row, *both)) is not None:
                    yield wrong

    def _texts(self) -> Iterator[tuple[Tensor, str, Sequence[Span]]]:
        """Yield for each text its words' logits `[words, classes]`, the text, and its words' character ranges."""
        logits = self._logits.split(self._counts)
        return zip(logits, map(_tagged, self._split.texts), self._split.words or (), strict=True)

    def predictions(self) -> list[list[SpanAnswer]]:
        """Return for each text the list of its predicted spans."""
        answers: list[list[SpanAnswer]] = []
        for logits, text, words in self._texts():
            scores, ids = (values.tolist() for values in logits.softmax(-1).max(-1))
            answers.append(spans_of_tags(ids, scores, self._task.labels, text, words))
        return answers


def _tagged(text: Text) -> str:
    """Return the text whose words are tagged: a text itself, or the second text of a pair."""
    return text if isinstance(text, str) else text[1]


def spans_of_tags(
    tags: Sequence[int], scores: Sequence[float], labels: Sequence[str], text: str, words: Sequence[Span]
) -> list[SpanAnswer]:
    """Return the spans that the tags of a text mark; if tags mark no spans, every word is a span.

    Args:
        tags: Id of each word's tag.
        scores: Probability of each word's tag; the score of a span is their mean.
        labels: Names of the tags.
        text: The text.
        words: Character range of each word.
    """
    joins, before = marks_spans(labels), ""
    spans: list[SpanAnswer] = []
    scores_of: list[list[float]] = []  # of the words of each span
    for (start, end), score, number in zip(words, scores, tags, strict=True):
        tag = str(labels[number])
        mark, _, label = tag.partition("-") if joins else ("B", "", tag)
        if mark in "IEL" and label == before:
            spans[-1]["end"] = end
            scores_of[-1].append(score)
        elif mark != "O":
            spans.append({"start": start, "end": end, "label": label, "score": score})
            scores_of.append([score])
        before = "" if mark in "SUEL" else label  # single and end tags (IOBES, BILOU) end their span
    return [
        {
            "start": span["start"],
            "end": span["end"],
            "label": span["label"],
            "text": text[span["start"] : span["end"]],
            "score": sum(own_scores) / len(own_scores),
        }
        for span, own_scores in zip(spans, scores_of, strict=True)
    ]


def wrong_spans(row: int, true: Sequence[SpanAnswer], predicted: Sequence[SpanAnswer]) -> WrongAnswer | None:
    """Return the wrong spans of a text; None if all predicted spans are right.

    The "error" of a span is "missed" (a true span where none was predicted), "extra" (a predicted span where there is
    none), or "wrong" (a true and a predicted span that overlap, but differ in start, end or label). The confidence is
    the highest score of an extra, wrong predicted or missed span.

    Args:
        row: Index of the text.
        true: The true spans; a score is the mean probability of the tags that were predicted for the span's words.
        predicted: The predicted spans; a score is the mean probability of the tags of the span's words.
    """
    right = {_key(span) for span in true} & {_key(span) for span in predicted}
    missed = [_with_error(span, predicted, "missed") for span in true if _key(span) not in right]
    extra = [_with_error(span, true, "extra") for span in predicted if _key(span) not in right]
    if not (missed or extra):
        return None
    confidence = max(span["score"] for span in (*extra, *(span for span in missed if span.get("error") == "missed")))
    return {"row": row, "text": None, "true": missed, "predicted": extra, "confidence": confidence}


def _key(span: SpanAnswer) -> tuple[int, int, str]:
    """Return what equal spans have in common: start, end and label."""
    return span["start"], span["end"], span["label"]


def _with_error(span: SpanAnswer, others: Sequence[SpanAnswer], error: str) -> SpanAnswer:
    """Return a copy of `span` with "error": "wrong" if it overlaps one of the `others`, otherwise `error`."""
    overlaps = any(span["start"] < other["end"] and other["start"] < span["end"] for other in others)
    return {**span, "error": "wrong" if overlaps else error}


# Examples from lists of words and tags


def join(words: Sequence[object]) -> tuple[str, tuple[Span, ...]]:
    """Return words as one text with a space between them, and the character range of each word in the text."""
    texts = [str(word) for word in words]
    starts = accumulate((len(text) + 1 for text in texts), initial=0)
    return " ".join(texts), tuple((start, start + len(text)) for start, text in zip(starts, texts, strict=False))


def _tag_splits(tables: Mapping[str, Table], spec: ColumnSpec) -> tuple[ColumnSpec, dict[str, Split]]:
    """Make the examples of every split from lists of words and tags; see `Kind.build`."""
    tags = {name: _tags(table, spec) for name, table in tables.items()}
    if spec.labels is None:
        lab.label_source(tables)
    names = set(spec.labels or (tag for sentence in tags["train"] for tag in sentence))
    iob = is_iob(names) and (spec.labels is None or any(label.startswith("B-") for label in names))
    if iob:
        tags = {name: [to_iob2(sentence) for sentence in part] for name, part in tags.items()}
    labels = spec.labels or lab.infer_labels(both_ends(names) if iob else names)
    spec = replace(spec, labels=labels, problem_type="classification")
    return spec, {name: _split(table, spec, tags[name]) for name, table in tables.items()}


def _tags(table: Table, spec: ColumnSpec) -> list[tuple[str, ...]]:
    """Return the names of the tags in each row of a table; raise DataError unless every word has one tag."""
    tags: list[tuple[str, ...]] = []
    for row, words, marks in zip(table.rows, table.column(spec.text), table.column(spec.label), strict=True):
        if not isinstance(words, list | tuple) or not isinstance(marks, list | tuple):
            column = spec.label if isinstance(words, list | tuple) else spec.text
            problem = f"has no list in column '{column}'; a token task reads a list of words and a list of tags."
            raise lab.bad_cell(table, row, column, problem)
        if len(words) != len(marks):
            problem = f"has {len(words)} words and {len(marks)} tags; every word has one tag."
            raise lab.bad_cell(table, row, spec.label, problem)
        with lab.cell_errors(table, row, spec.label):
            tags.append(tuple(_tag_name(mark, spec.labels) for mark in marks))
    return tags


def _tag_name(mark: object, labels: Sequence[str] | None) -> str:
    """Return the name of a tag in a file; the tag may be the id of one of `labels`, if no label is a number itself."""
    if labels is not None and isinstance(mark, int) and 0 <= mark < len(labels) and str(mark) not in labels:
        return labels[mark]
    return class_name(mark, labels or ())


def _split(table: Table, spec: ColumnSpec, tags: Sequence[Sequence[str]]) -> Split:
    """Return the examples in a table with the given tags; a tag that is not in `spec.labels` raises a DataError."""
    names = spec.labels or ()
    index = {name: number for number, name in enumerate(names)}
    for row, marks in zip(table.rows, tags, strict=True):
        for number, mark in enumerate(marks):
            if mark not in index:  # in a CoNLL file, every word has a line of its own
                raise lab.unknown_label(table, row + number * table.numbered, spec.label, mark, names)
    joined = [join(words) for words in lab.every_row(table).column(spec.text)]
    ids = (tuple(index[mark] for mark in marks) for marks in tags)
    every = lab.with_gaps(ids, table, lambda row: (IGNORED,) * len(joined[row][1]))
    return Split.of((text for text, _ in joined), every, (spans for _, spans in joined))


def is_iob(tags: Iterable[str]) -> bool:
    """Return whether every tag is `O`, `B-...` or `I-...`, and at least one is not `O`."""
    seen = set(tags)
    return bool(seen - {"O"}) and all(_IOB.fullmatch(tag) for tag in seen)


def to_iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """Return the IOB1 or IOB2 tags of one sentence as IOB2, in which every span begins with `B-`.

    In IOB1 a span begins with `I-` unless it directly follows a span with the same label.
    """
    changed: list[str] = []
    before = ""
    for tag in tags:
        inside = tag[:2] == "I-"
        changed.append(f"B-{tag[2:]}" if inside and tag[2:] != before else tag)
        before = tag[2:]
    return tuple(changed)


def both_ends(labels: Iterable[str]) -> set[str]:
    """Return IOB tags with `B-x` added for every `I-x`, `I-x` for every `B-x`, and `O`."""
    types = {label[2:] for label in labels if label != "O"}
    return {"O"} | {f"{mark}-{type_}" for mark in "BI" for type_ in types}


def continued(labels: Sequence[str]) -> list[int]:
    """Return for each tag the id of the tag that the further tokens of a word with this tag get.

    It is `I-x` for `B-x` if there is a tag `I-x`, otherwise the tag itself.
    """
    number = {label: at for at, label in enumerate(labels)}
    return [number.get(f"I-{label[2:]}", at) if label[:2] == "B-" else at for at, label in enumerate(labels)]


# Examples from texts and spans

LabelledSpan: TypeAlias = tuple[Span, str]


def word_spans(text: str) -> list[Span]:
    """Return the character range (start, end) of every word of a text."""
    return [match.span() for match in _WORD.finditer(text)]


def span_splits(tables: Mapping[str, Table], spec: ColumnSpec) -> tuple[ColumnSpec, dict[str, Split]]:
    """Make the examples of every split from texts and lists of spans; with `spec.text_pair` from pairs of texts.

    A span is a text, which is labelled wherever it occurs; or two character positions, start and end (exclusive); or a
    mapping with "start", "end" and perhaps "label". Every word that shares a character with a span is tagged. The spans
    of a pair are in its second text.

    Returns:
        `spec` with the tags as labels; and split name -> examples.

    Raises:
        DataError: If a cell is not a list of spans; or if a span is not in its text, unless `spec.missing_labels` is
            "ignore", which leaves the words of such rows without labels. The message names row and span.
    """
    tables = lab.labelled(tables, spec, texts=True)
    types = {label.partition("-")[2] for label in spec.labels or () if label != "O"}
    default = next(iter(types)) if len(types) == 1 else SPAN_LABEL
    spans = {part: _spans_of_rows(table, spec, default) for part, table in tables.items()}
    if spec.labels is None:
        lab.label_source(tables)
        seen = {label for row in spans["train"] for _, label in row or ()} or {default}
        spec = replace(spec, labels=lab.infer_labels(both_ends(f"B-{label}" for label in seen)))
    spec = replace(spec, problem_type="classification")
    return spec, {part: _span_split(table, spec, spans[part]) for part, table in tables.items()}


def _labelled_texts(table: Table, spec: ColumnSpec) -> Sequence[str]:
    """Return the column of the texts that have spans: the second texts, if examples are pairs."""
    return lab.texts(table, spec.text if spec.text_pair is None else spec.text_pair)


def _spans_of_rows(table: Table, spec: ColumnSpec, default: str) -> list[list[LabelledSpan] | None]:
    """Return the spans of each row with their labels; None for a row with a span that is not in its text.

    Such rows are counted in a warning if `spec.missing_labels` is "ignore"; otherwise the first of them raises a
    DataError. Spans without a label get the label `default`.
    """
    rows: list[list[LabelledSpan] | None] = []
    without: list[int] = []
    for row, text, cell in zip(table.rows, _labelled_texts(table, spec), table.column(spec.label), strict=True):
        if not isinstance(cell, list | tuple):
            problem = f"has {type(cell).__name__} in column '{spec.label}'; spans are a list, which may be empty."
            raise lab.bad_cell(table, row, spec.label, problem)
        spans: list[LabelledSpan] | None = []
        for span in cell:
            if not isinstance(span, str | Mapping | list | tuple):
                raise lab.bad_cell(
                    table, row, spec.label, f"has {span!r} as a span; a span is a text or two characters."
                )
            places = _places(span, text)
            if not places and spec.missing_labels != "ignore":
                rule = "which is not in its text; give missing_labels='ignore' to leave such rows without labels"
                raise lab.bad_cell(table, row, spec.label, f"has the span {span!r} in column '{spec.label}', {rule}.")
            label = span.get("label", default) if isinstance(span, Mapping) else default
            with lab.cell_errors(table, row, spec.label):
                name = class_name(label)
            spans = [*spans, *((place, name) for place in places)] if places and spans is not None else None
        rows.append(spans)
        without += [row] * (spans is None)
    if without:
        what = "%s: %d of %d rows have a span that is not in their text; their words have no labels (%s)"
        logger.warning(f"task: {what}", table.path, len(without), len(table), lab.listed(without))
    return rows


def _places(span: object, text: str) -> list[Span]:
    """Return the character range of a span in a text, or of each place where it occurs; [] if it does not occur."""
    if isinstance(span, str):
        wanted = span.strip()
        return [match.span() for match in regex.finditer(regex.escape(wanted), text)] if wanted else []
    edges = [span.get("start"), span.get("end")] if isinstance(span, Mapping) else list(cast("Sequence[object]", span))
    if len(edges) == 2:
        start, end = edges
        if isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= len(text):
            return [(start, end)]
    return []


def _span_split(table: Table, spec: ColumnSpec, spans: Sequence[list[LabelledSpan] | None]) -> Split:
    """Return the examples in a table, with tags from the spans of each row; None: the row's words have no labels.

    Raises DataError if a tag is not one of `spec.labels`.
    """
    spans, table = [*lab.with_gaps(spans, table, lambda _: None)], lab.every_row(table)
    texts = _labelled_texts(table, spec)
    words = [word_spans(text) for text in texts]
    number = {label: at for at, label in enumerate(spec.labels or ())}
    tags: list[tuple[int, ...]] = []
    for row, row_words, row_spans in zip(table.rows, words, spans, strict=True):
        names = [] if row_spans is None else list(_tags_of_spans(row_words, row_spans))
        if unknown := [name for name in names if name not in number]:
            raise lab.unknown_label(table, row, spec.label, unknown[0], spec.labels or ())
        tags.append((IGNORED,) * len(row_words) if row_spans is None else tuple(number[name] for name in names))
    pairs = texts if spec.text_pair is None else zip(lab.texts(table, spec.text), texts, strict=True)
    return Split.of(pairs, tags, words)


def _tags_of_spans(words: Sequence[Span], spans: Sequence[LabelledSpan]) -> Iterator[str]:
    """Yield the IOB2 tag of each word, by the first span that shares a character with it."""
    before: LabelledSpan | None = None
    for start, end in words:
        inside = next((span for span in sorted(spans) if span[0][0] < end and start < span[0][1]), None)
        yield "O" if inside is None else f"{'I' if inside == before else 'B'}-{inside[1]}"
        before = inside
