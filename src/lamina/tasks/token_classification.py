"""The kind of task that asks for a tag of every word, such as named entities."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from lamina.data.read import Table
from lamina.data.windows import IGNORED, word_labels, word_places
from lamina.layers.nan_checks import first_invalid_row
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, LabelledTask, Results, TaskLike, checked_texts
from lamina.tasks.error_examples import error_rows, wrong_spans
from lamina.tasks.inputs import ClassKind, TextInputs, WordTargets
from lamina.tasks.metrics import class_table, score_tags, span_table
from lamina.tasks.spans import Span, span_splits, word_spans
from lamina.tasks.split import Split
from lamina.tasks.tags import both_ends, continued, is_iob, marks_spans, to_iob2


def join(words: Sequence[object]) -> tuple[str, tuple[Span, ...]]:
    """Words with one space between them, and the character span of each."""
    texts = [str(word) for word in words]
    starts = accumulate((len(text) + 1 for text in texts), initial=0)
    return " ".join(texts), tuple((start, start + len(text)) for start, text in zip(starts, texts, strict=False))


@final
class TokenClassificationKind(ClassKind):
    """A tag for every word."""

    name = "token_classification"
    problem_types = {"classification": ("span_f1", "accuracy", "f1")}
    auto_class = "AutoModelForTokenClassification"
    per_token = True
    tags_words = True
    reads_pairs = True
    judges_second = True
    missing = (*ClassKind.missing, "ignore")
    logits_axes = 3
    other_files = "conll"

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Settle the tags, in IOB2 where they mark spans so. CoNLL columns have numbers: words are first, tags last.

        Where the column of texts holds texts and not lists of words, labels are spans; see `span_splits`.
        """
        if all(table.numbered for table in tables.values()):
            text, label = self.usual_columns
            spec = replace(spec, text=0 if spec.text == text else spec.text)
            spec = replace(spec, label=-1 if spec.label == label else spec.label)
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        first = next(iter(tables.values()), None)
        if first is not None and (spec.text_pair is not None or isinstance(first.column(spec.text)[0], str)):
            return span_splits(tables, spec)
        tables = lab.labelled(tables, spec)
        tags = {name: _tags(table, spec) for name, table in tables.items()}
        if spec.labels is None:
            lab.label_source(tables)
        given = set(spec.labels or (tag for sentence in tags["train"] for tag in sentence))
        iob = is_iob(given) and (spec.labels is None or any(label.startswith("B-") for label in given))
        if iob:
            tags = {name: [to_iob2(sentence) for sentence in part] for name, part in tags.items()}
        labels = spec.labels or lab.infer_labels(both_ends(given) if iob else given)
        spec = replace(spec, labels=labels, problem_type="classification")
        return spec, {name: _split(table, spec, tags[name]) for name, table in tables.items()}

    def metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Span F1 only where tags mark spans."""
        known = self.problem_types[problem_type]
        return known if marks_spans(labels) else tuple(name for name in known if name != "span_f1")

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Span types where tags mark spans, so that those of CoNLL-2003 are four, as the papers count; else tags."""
        spans = marks_spans(task.labels)
        types = [label.partition("-")[2] if spans else label for label in task.labels]
        names = tuple(dict.fromkeys(name for name in types if name))
        number = {tag: names.index(name) for tag, name in enumerate(types) if name}
        return names, [tuple(sorted({number[tag] for tag in row if tag in number})) for row in split.labels]

    def targets(self, task: LabelledTask, split: Split, inputs: Any) -> WordTargets:
        """A word's tag at its first token or at all of them, each in the window that shows most around it."""
        others = continued(task.labels) if task.label_all_tokens else None
        return WordTargets(word_labels(inputs.encoded, split.words or (), split.labels, others))

    def results(self, task: TaskLike, split: Split, inputs: Any) -> Results:
        """Logits of every word; to predict, spans with "start" and "end" (characters), "label", "text" and "score"."""
        return _TagResults(task, split, inputs)

    def examples(self, raw: Sequence[Any], processor: Any) -> Split:
        """Texts, or pairs whose second text is tagged; words are found by their letters and signs."""
        texts = checked_texts(raw, pairs=True)
        return Split.of(texts, words=[word_spans(_tagged(text)) for text in texts])


class _TagResults(Results):
    """Logits of every word; one that has no token of its own gets the label "O", or else the first."""

    def __init__(self, task: TaskLike, split: Split, inputs: TextInputs) -> None:
        self._task, self._split, words = task, split, list(split.words or ())
        self._counts = [len(spans) for spans in words]
        empty = torch.zeros(len(task.labels))
        empty[task.labels.index("O") if "O" in task.labels else 0] = 1.0
        self._logits = empty.repeat(sum(self._counts), 1)
        self._places = word_places(inputs.encoded, words)

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        places = [(at, *place) for at, row in enumerate(rows) for place in self._places[row]]
        if places:
            at, position, word = torch.tensor(places).T
            self._logits[word] = outputs.float().cpu()[at, position]

    def first_not_finite(self) -> int | None:
        word = first_invalid_row(self._logits)
        return None if word is None else bisect_right(list(accumulate(self._counts)), word)

    def _per_text(self, values: Tensor) -> list[Tensor]:
        return list(values.split(self._counts))

    def guesses(self) -> list[Any]:
        return [tuple(tags.tolist()) for tags in self._per_text(self._logits.argmax(-1))]

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        return score_tags(metrics, *self._both(), self._task.labels)

    def _both(self) -> tuple[list[Any], list[Any]]:
        """Tags as guessed and as they are, of the texts that have labels."""
        both = zip(self.guesses(), self._split.labels, strict=True)
        kept = [pair for pair in both if IGNORED not in pair[1]]
        return [guess for guess, _ in kept], [truth for _, truth in kept]

    def per_class(self) -> list[dict[str, Any]]:
        labels, (guesses, truths) = self._task.labels, self._both()
        if marks_spans(labels):
            return span_table(guesses, truths, labels)
        guesses, truths = (torch.tensor([tag for row in rows for tag in row]) for rows in (guesses, truths))
        return class_table(guesses, truths, labels)

    def errors(self, count: int) -> list[dict[str, Any]]:
        return error_rows(self._wrong(), self._split.texts, count)

    def _wrong(self) -> Iterator[dict[str, Any]]:
        for row, ((logits, text, words), truth) in enumerate(zip(self._texts(), self._split.labels, strict=True)):
            scores, ids = (values.tolist() for values in logits.softmax(-1).max(-1))
            if ids != list(truth) and IGNORED not in truth:
                both = (_spans(tags, scores, self._task.labels, text, words) for tags in (truth, ids))
                if (wrong := wrong_spans(row, *both)) is not None:
                    yield wrong

    def _texts(self) -> Iterator[tuple[Tensor, str, Sequence[Span]]]:
        """The logits, text and words of each text."""
        return zip(self._per_text(self._logits), map(_tagged, self._split.texts), self._split.words or (), strict=True)

    def predictions(self) -> list[Any]:
        answers: list[Any] = []
        for logits, text, words in self._texts():
            scores, ids = (values.tolist() for values in logits.softmax(-1).max(-1))
            answers.append(_spans(ids, scores, self._task.labels, text, words))
        return answers


def _tagged(text: Any) -> str:
    """The text that is tagged: of a pair the second."""
    return text if isinstance(text, str) else text[1]


def _spans(
    tags: Sequence[int], scores: Sequence[float], labels: Sequence[str], text: str, words: Sequence[Span]
) -> list[dict[str, Any]]:
    """Spans of B- and I- tags, with the mean score of their words; for labels that mark no spans, every word."""
    joins, spans, before = marks_spans(labels), [], ""
    for (start, end), score, number in zip(words, scores, tags, strict=True):
        tag = str(labels[number])
        mark, _, label = tag.partition("-") if joins else ("B", "", tag)
        if mark in "IEL" and label == before:
            spans[-1]["end"] = end
            spans[-1]["scores"].append(score)
        elif mark != "O":
            spans.append({"start": start, "end": end, "label": label, "scores": [score]})
        before = "" if mark in "SUEL" else label  # such a tag ends its span
    for span in spans:
        scores = span.pop("scores")
        span |= {"text": text[span["start"] : span["end"]], "score": sum(scores) / len(scores)}
    return spans


def _tags(table: Table, spec: ColumnSpec) -> list[tuple[str, ...]]:
    """The tags of each row, as names: one for every word."""
    tags: list[tuple[str, ...]] = []
    for row, words, marks in zip(table.rows, table.column(spec.text), table.column(spec.label), strict=True):
        if not isinstance(words, list | tuple) or not isinstance(marks, list | tuple):
            column = spec.label if isinstance(words, list | tuple) else spec.text
            problem = f"has no list in column '{column}'; a token task reads a list of words and a list of tags."
            raise lab.bad_cell(table, row, column, problem)
        if len(words) != len(marks):
            problem = f"has {len(words)} words and {len(marks)} tags; every word has one tag."
            raise lab.bad_cell(table, row, spec.label, problem)
        tags.append(tuple(_tag_name(mark, spec.labels) for mark in marks))
    return tags


def _tag_name(mark: object, labels: Sequence[str] | None) -> str:
    """A tag's name; where the labels are given, a whole number may stand for it."""
    if labels is not None and isinstance(mark, int) and 0 <= mark < len(labels) and str(mark) not in labels:
        return labels[mark]
    return lab.label_name(mark)


def _split(table: Table, spec: ColumnSpec, tags: Sequence[Sequence[str]]) -> Split:
    names = spec.labels or ()
    index = {name: number for number, name in enumerate(names)}
    for row, marks in zip(table.rows, tags, strict=True):
        for number, mark in enumerate(marks):
            if mark not in index:
                raise lab.unknown_label(table, row + number * table.numbered, spec.label, mark, names)
    joined = [join(words) for words in table.column(spec.text)]
    ids = (tuple(index[mark] for mark in marks) for marks in tags)
    return Split.of((text for text, _ in joined), ids, (spans for _, spans in joined))
