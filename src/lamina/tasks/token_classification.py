"""Classify words, such as named entities: read tags or spans, and predict a tag for every word.

A tag is a label of a word. Tags that mark spans are "O" outside spans, "B-x" at the first word of a span with label x,
and "I-x" inside it.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple, NotRequired, TypeAlias, TypedDict, cast, final
from zlib import crc32

import torch
from torch import Tensor

from lamina.data.encode import Encoded
from lamina.data.read import Table
from lamina.data.windows import IGNORED, deciding_tokens, word_labels
from lamina.errors import DataError
from lamina.heads.base import TaskLike
from lamina.tasks import labels as lab
from lamina.tasks import metrics as score
from lamina.tasks.base import ColumnSpec, LabelledTask
from lamina.tasks.class_results import Comparison, compare_tags, error_rows, first_invalid_row, most_frequent_tag
from lamina.tasks.kind import EncodedInputs, TextClassKind
from lamina.tasks.label_cells import has_several
from lamina.tasks.outputs import ClassRow, Label, Results, WrongAnswer
from lamina.tasks.split import Split, checked_texts
from lamina.tasks.tag_schemes import continued
from lamina.tasks.tagged_examples import span_splits, tag_splits
from lamina.tasks.targets import WordTargets
from lamina.tasks.words import Span, divided, word_spans
from lamina.utils import JSON

PIECES = "pieces"  # the key in the `info` of a reader
Text: TypeAlias = str | tuple[str, str]  # a text, or a pair whose second text is tagged
Key = tuple[int, int, int]  # a token or the checksum of characters, how many words it decides about, and its tag


class WordGroup(NamedTuple):
    """Neighbouring words whose tags are predicted from one token, or a word that the tokenizer drops.

    Attributes:
        first: Index of the first word among the words of all texts.
        size: Number of words.
        token: Id of the token; -1 for a dropped word.
        place: The token's window and its position there; None for a dropped word.
        text: Index of the text.
        written: For several words, a checksum of their characters as a number below -1; else 0.
    """

    first: int
    size: int
    token: int
    place: tuple[int, int] | None
    text: int
    written: int = 0

    def keys(self, tag: int) -> tuple[Key, Key]:
        """Return the keys of `Pieces.tags` for the words' characters and for their token, if the token has `tag`."""
        return (self.written, self.size, tag), (self.token, self.size, tag)


def decided_words(encoded: Encoded, words: Sequence[Sequence[Span]], read: Sequence[Text]) -> list[WordGroup]:
    """Return all words in groups: the words that one token decides, or one dropped word. See `deciding_tokens`.

    `words` are the character ranges of the words of each text in `read`.
    """
    groups: list[WordGroup] = []
    texts = [text for text, row in enumerate(words) for _ in row]
    for number, (text, place) in enumerate(zip(texts, deciding_tokens(encoded, words), strict=True)):
        if groups and place is not None and groups[-1].place == place:
            groups[-1] = groups[-1]._replace(size=groups[-1].size + 1)
        else:
            groups.append(WordGroup(number, 1, -1 if place is None else encoded.token(*place), place, text))
    spans = list(chain.from_iterable(words))
    for at, group in enumerate(groups):
        if group.size > 1:
            characters = slice(spans[group.first][0], spans[group.first + group.size - 1][1])
            groups[at] = group._replace(written=-2 - crc32(tagged_text(read[group.text])[characters].encode()))
    return groups


@final
@dataclass(frozen=True)
class Pieces:
    """The learnt tags of words that share a token.

    A token may cover several words, for example in Chinese, but gets one tag. Training therefore finds the most
    frequent tags of its words. They are stored unless the further words just continue the first word's span. Tags are
    also stored for the words' characters, if they differ from those of the token.

    Attributes:
        labels: The class names.
        tags: (token id or `WordGroup.written`, number of words, tag of the first word) -> the tags of all the words.
    """

    labels: Sequence[str]
    tags: Mapping[Key, tuple[int, ...]]

    @classmethod
    def learnt(cls, groups: Sequence[WordGroup], labels: Sequence[Sequence[int]], names: Sequence[str]) -> Pieces:
        """Return a `Pieces` with the most frequent tags of words that share a token.

        `groups` is the result of `decided_words`, `labels` has the tags of each text's words, and `names` are the class
        names.
        """
        flat, further = list(chain.from_iterable(labels)), continued(names)
        counts: dict[Key, Counter[tuple[int, ...]]] = defaultdict(Counter)
        keys: dict[Key, Key] = {}  # of characters -> of their token
        for group in groups:
            tags = tuple(flat[group.first : group.first + group.size])
            if group.size > 1 and IGNORED not in tags:
                written, token = group.keys(tags[0])
                keys[written] = token
                counts[written][tags] += 1
                counts[token][tags] += 1
        tags_of: dict[Key, tuple[int, ...]] = {}
        for key, token in [*((token, token) for token in keys.values()), *keys.items()]:
            usual = tags_of.get(token) or _continued_tags(token, further)
            most, times = counts[key].most_common(1)[0]
            if times > counts[key][usual]:
                tags_of[key] = most
        return cls(names, tags_of)

    @classmethod
    def from_json(cls, labels: Sequence[str], saved: JSON) -> Pieces:
        """Build the object from the class names and `saved`, the result of `as_json` (None: there are no tags)."""
        rows = cast("list[list[int]]", saved or [])
        return cls(labels, {(token, len(tags), tags[0]): tuple(tags) for token, *tags in rows})

    def as_json(self) -> JSON:
        """Return a JSON-ready list with a row for each entry of `tags`: the first number of its key, then its value.

        That number is the token id, or the negative number that stands for the words' characters.
        """
        return [[token, *tags] for (token, _, _), tags in self.tags.items()]

    def spread(self, groups: Sequence[WordGroup], tags: list[int], scores: list[float]) -> None:
        """Set the tags of words that share a token or have none, in place.

        Words that share a token get the tags counted in training, or else continue the first word's span. A dropped
        word between two words of one span joins the span; otherwise it keeps its tag.

        Args:
            groups: The words of all texts.
            tags: Id of each word's tag. The first word of a group must have the tag that was predicted for the token.
            scores: Probability of each word's tag; changed in place too.
        """
        further = continued(self.labels)
        for at, group in enumerate(groups):
            words = range(group.first, group.first + group.size)
            if group.size > 1:
                written, token = group.keys(tags[group.first])
                learnt = self.tags.get(written) or self.tags.get(token)
                tags[words.start : words.stop] = learnt or _continued_tags(token, further)
                scores[words.start : words.stop] = [scores[group.first]] * group.size
            elif group.place is None and at and groups[at - 1].text == group.text:
                after = next((later for later in groups[at + 1 :] if later.place is not None), None)
                inside = further[tags[group.first - 1]]
                if after is not None and after.text == group.text and tags[after.first] == inside:
                    tags[group.first], scores[group.first] = inside, scores[group.first - 1]

    def lost(self, groups: Sequence[WordGroup], labels: Sequence[Sequence[int]]) -> int:
        """Return the number of words that get a wrong tag even if the tag of every token is predicted right.

        Arguments as in `learnt`.
        """
        true = list(chain.from_iterable(labels))
        tags = [max(tag, 0) for tag in true]
        for group in groups:
            if group.place is None:
                tags[group.first] = self.labels.index("O") if "O" in self.labels else 0
        self.spread(groups, tags, [1.0] * len(tags))
        return sum(tag != label for tag, label in zip(tags, true, strict=True) if label != IGNORED)


def _continued_tags(key: Key, further: Sequence[int]) -> tuple[int, ...]:
    """Return the tags of a token's words for the case that all belong to the first word's span.

    `key` is a key of `Pieces.tags`, and `further` the result of `continued`.
    """
    _, count, first = key
    return (first, *[further[first]] * (count - 1))


Parts: TypeAlias = Sequence[Sequence[Span]]  # for each word of a text, the words of a plain text inside it
logger = logging.getLogger(__name__)


class SpanAnswer(TypedDict):
    """A predicted span of a text.

    Attributes:
        start: Offset of its first character.
        end: Offset after its last character.
        label: Its label; if tags mark no spans, the tag of the word.
        text: Its characters.
        score: Mean probability of the predicted tags of its words.
        error: In tables of wrong answers, why it is wrong; see `wrong_spans`.
    """

    start: int
    end: int
    label: str
    text: str
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
    learnt_keys = (PIECES,)
    other_files = "conll"

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Make the examples of every split, from lists of words and tags or from texts and spans.

        Columns of CoNLL files are numbers; by default the first one has the words and the last one the tags. If the
        text column has texts, and neither lists of words nor texts that spell such lists, labels are spans; see
        `span_splits`. Tags that mark spans in other schemes become IOB2; see `tag_splits`. See `Kind.build` for
        arguments, result and errors.
        """
        if all(table.numbered for table in tables.values()):
            text, label = self.usual_columns
            spec = replace(spec, text=0 if spec.text == text else spec.text)
            spec = replace(spec, label=-1 if spec.label == label else spec.label)
            _check_columns(tables)
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        first = next(iter(tables.values()), None)
        text = None if first is None else first.column(spec.text)[0]
        is_list = spec.text_pair is None and isinstance(text, str) and text.lstrip().startswith("[")
        if is_list and has_several(text):  # a list as text, as pandas writes it to CSV files
            tables = lab.as_lists(lab.as_lists(tables, spec), replace(spec, label=spec.text))
        elif spec.text_pair is not None or isinstance(text, str):
            return span_splits(tables, spec)
        return tag_splits(lab.labelled(tables, spec), spec)

    def metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the metrics of a problem type; "span_f1" is among them only if the tags in `labels` mark spans."""
        known = self.problem_types[problem_type]
        return known if score.marks_spans(labels) else tuple(name for name in known if name != "span_f1")

    def further_metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return "subtoken_f1", the macro F1 of all sub-tokens of words."""
        return (score.SUBTOKENS,)

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Return the classes of the task, and for each example the ascending numbers of those that it has.

        The classes are the types of spans, "PER" for "B-PER"; or all tags, if none of them marks a span.
        """
        spans = score.marks_spans(task.labels)
        types = [label.partition("-")[2] if spans else label for label in task.labels]
        names = tuple(dict.fromkeys(name for name in types if name))
        number = {tag: names.index(name) for tag, name in enumerate(types) if name}
        return names, [tuple(sorted({number[tag] for tag in row if tag in number})) for row in split.labels]

    def targets(self, task: LabelledTask, split: Split, inputs: EncodedInputs) -> WordTargets:
        """Return labels for tokens: each word's tag, at the one token from which the word's tag is predicted.

        With `task.label_all_tokens`, all tokens of the word have the tag, continued as I- after B-.

        A word of the data, such as "C++", may be several words when a plain text is tagged. If tags mark spans, each of
        these parts therefore has the word's tag (I- after B-) at its first token. A word in several windows has its tag
        in the window with the most context around it. A warning counts words that cannot get their tag, because they
        share a token with other words or have none.
        """
        words, labels = _plain_words(task, split)
        groups = decided_words(inputs.encoded, words, split.texts)
        if lost := Pieces.learnt(groups, labels, task.labels).lost(groups, labels):
            what = "task: the tags of %d of %d words cannot be told apart: a token of the tokenizer has characters of"
            logger.warning(f"{what} words with other tags, or a word has no token", lost, sum(map(len, words)))
        others = continued(task.labels) if task.label_all_tokens else None
        return WordTargets(word_labels(inputs.encoded, words, labels, others))

    def learnt(self, task: LabelledTask, split: Split, inputs: EncodedInputs) -> dict[str, JSON]:
        """Return for a reader's `info` the most frequent tags of words that share a token, counted in the train split.

        Tags that continue the span of the first word are left out; {} if none remain.
        """
        words, labels = _plain_words(task, split)
        pieces = Pieces.learnt(decided_words(inputs.encoded, words, split.texts), labels, task.labels)
        return {PIECES: pieces.as_json()} if pieces.tags else {}

    def results(self, task: TaskLike, split: Split, inputs: EncodedInputs) -> Results:
        """Return an empty collection that scores the tags of every word, or returns them as predicted spans."""
        return _TagResults(task, split, inputs, _parts(task, split))

    def examples(self, raw: Sequence[object], processor: object) -> Split:
        """Return the texts or pairs `raw`, which a user passed to `predict`, as a split with the words of each text.

        Raises ConfigError if an example is neither a text nor a pair of texts.
        """
        texts = checked_texts(raw, pairs=True)
        return Split.of(texts, words=[word_spans(tagged_text(text)) for text in texts])


class _TagResults(Results[Tensor, list[SpanAnswer]]):
    """Collects the logits of every word: the logits of the one token from which the word's tag is predicted.

    A word without a token starts as "O" (as the first label if there is no "O"). `Pieces.spread` then tags it, and the
    words that share a token. `parts` is the result of `_parts`: a word of the data with several parts gets the tag of
    the first.
    """

    def __init__(self, task: TaskLike, split: Split, inputs: EncodedInputs, parts: Sequence[Parts]) -> None:
        self._task, self._split, words = task, split, _joined(parts)
        # for each text, the indices of the words' first parts in it
        self._first = [list(accumulate(map(len, row[:-1]), initial=0))[: len(row)] for row in parts]
        self._counts = [len(spans) for spans in words]
        empty = torch.zeros(len(task.labels))
        empty[task.labels.index("O") if "O" in task.labels else 0] = 1.0
        self._logits = empty.repeat(sum(self._counts), 1)
        self._places: dict[int, list[tuple[int, int]]] = {}  # window -> positions of tokens, with the words they decide
        self._groups = decided_words(inputs.encoded, words, split.texts)
        for group in self._groups:
            if group.place is not None:
                self._places.setdefault(group.place[0], []).append((group.place[1], group.first))
        self._pieces = Pieces(task.labels, {})
        self._encoded = inputs.encoded
        # window -> the predicted tag of every token, kept only for the metric that needs it
        self._token_tags: dict[int, Tensor] | None = {} if score.SUBTOKENS in getattr(task, "metrics", ()) else None

    def set_learnt(self, info: Mapping[str, JSON]) -> None:
        """Use the tags of words that share a token, counted in training, if a reader's saved `info` has any."""
        self._pieces = Pieces.from_json(self._task.labels, info.get(PIECES))

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Store the logits of the words in the windows numbered `rows`, picked from logits `[batch, tokens, classes]`.

        If "subtoken_f1" is scored, the predicted tag of every token is stored too. `labels` is not used.
        """
        places = [(at, *place) for at, row in enumerate(rows) for place in self._places.get(row, ())]
        if places:
            at, position, word = torch.tensor(places).T
            self._logits[word] = outputs.float().cpu()[at, position]
        if self._token_tags is not None:
            self._token_tags |= zip(rows, outputs.argmax(-1).cpu(), strict=True)

    def first_not_finite(self) -> int | None:
        word = first_invalid_row(self._logits)
        return None if word is None else bisect_right(list(accumulate(self._counts)), word)

    def guesses(self) -> list[Label]:
        return [tags for _, tags in self._decided()]

    def _decided(self) -> Iterator[tuple[list[float], tuple[int, ...]]]:
        """Yield for each text the probabilities and the ids of its words' predicted tags."""
        scores, tags = (values.tolist() for values in self._logits.softmax(-1).max(-1))
        self._pieces.spread(self._groups, tags, scores)
        start = 0
        for places, count in zip(self._first, self._counts, strict=True):
            yield [scores[start + at] for at in places], tuple(tags[start + at] for at in places)
            start += count

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        tags = self._token_tags or {}
        return self._score(metrics, self._both()[0], lambda window, size: tags[window][:size])

    def baseline(self, metrics: Sequence[str]) -> tuple[str, dict[str, float]] | None:
        """Return the split's most frequent true tag, and metric -> score of giving it to every word that has a label.

        The result is never None. Raises the errors of `score_tags`, such as DataError if no word has a label.
        """
        always, constant = most_frequent_tag(self._both()[1], self._task.labels)
        number = list(self._task.labels).index(always)
        return always, self._score(metrics, constant, lambda _, size: torch.full((size,), number))

    def _score(
        self, metrics: Sequence[str], guesses: score.Tags, token_tags: Callable[[int, int], Tensor]
    ) -> dict[str, float]:
        """Return metric -> score of `guesses`, the predicted tags of each text's words that have labels.

        `token_tags(window, count)` returns the predicted tags of the first `count` tokens of a window. Only the
        metric over sub-tokens calls it. For that metric, the true tag of a word's further tokens is the one that
        continues the word's tag (I- for B-).
        """
        labels = self._task.labels
        plain = [name for name in metrics if name != score.SUBTOKENS]
        scores = score.score_tags(plain, guesses, self._both()[1], labels) if plain else {}
        if score.SUBTOKENS in metrics:
            words = _plain_words(self._task, self._split)
            both: list[tuple[Tensor, Tensor]] = []
            for window, row in enumerate(word_labels(self._encoded, *words, continued(labels))):
                true = torch.tensor(row)
                known = true != IGNORED
                both.append((token_tags(window, len(row))[known], true[known]))
            guess, true = (torch.cat(side) for side in zip(*both, strict=True))
            tokens = score.score_classes(["macro_f1"], guess, true, len(labels), positive=None)
            scores[score.SUBTOKENS] = tokens["macro_f1"]
        return {name: scores[name] for name in metrics}

    def compare(self, metrics: Sequence[str]) -> Comparison:
        """Compare those of "span_f1" and "accuracy" that are in `metrics` with giving every word the most frequent tag.

        The intervals come from a bootstrap over texts; see `compare_tags`.
        """
        return compare_tags(metrics, *self._both(), self._task.labels)

    def _both(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the predicted and the true tags of each text, for the words that have labels; () if none has one."""
        return score.labelled_words([tags for _, tags in self._decided()], self._split.labels)

    def per_class(self) -> list[ClassRow]:
        labels, (guesses, truths) = self._task.labels, self._both()
        if score.marks_spans(labels):
            return score.span_table(guesses, truths, labels)
        guesses, truths = (torch.tensor([tag for row in rows for tag in row]) for rows in (guesses, truths))
        return score.class_table(guesses, truths, labels)

    def errors(self, count: int) -> list[WrongAnswer]:
        return error_rows(self._wrong(), self._split.texts, count)

    def _wrong(self) -> Iterator[WrongAnswer]:
        """Yield a record for each text with wrong spans, without the text itself. Words without labels are skipped."""
        texts = zip(self._decided(), self._texts(), self._split.labels, strict=True)
        for row, ((scores, ids), (text, words), truth) in enumerate(texts):
            known = [at for at, tag in enumerate(truth) if tag != IGNORED]
            if any(ids[at] != truth[at] for at in known):
                spans, sure = [words[at] for at in known], [scores[at] for at in known]
                tags = ([truth[at] for at in known], [ids[at] for at in known])
                both = (spans_of_tags(side, sure, self._task.labels, text, spans) for side in tags)
                if (wrong := wrong_spans(row, *both)) is not None:
                    yield wrong

    def _texts(self) -> Iterator[tuple[str, Sequence[Span]]]:
        return zip(map(tagged_text, self._split.texts), self._split.words or (), strict=True)

    def predictions(self) -> list[list[SpanAnswer]]:
        texts = zip(self._decided(), self._texts(), strict=True)
        return [spans_of_tags(ids, scores, self._task.labels, *text) for (scores, ids), text in texts]


def _parts(task: TaskLike, split: Split) -> list[Parts]:
    """Return for each text of a split the parts of each word.

    If the task's tags mark spans, words are divided as the words of a plain text are, for example "(x)" into "(", "x"
    and ")". Otherwise a word is its only part.
    """
    words = list(split.words or ())
    if not score.marks_spans(task.labels):
        return [[[word] for word in row] for row in words]
    return [divided(tagged_text(text), spans) for text, spans in zip(split.texts, words, strict=True)]


def _joined(parts: Sequence[Parts]) -> list[Sequence[Span]]:
    return [[part for word in row for part in word] for row in parts]


def _plain_words(task: TaskLike, split: Split) -> tuple[list[Sequence[Span]], list[Sequence[int]]]:
    """Return for each text of a split the parts of its words (see `_parts`), and one label for each part.

    It is the word's label for the first part, and the one that continues it for the others; -100 if the word has none.
    """
    parts, further = _parts(task, split), continued(task.labels)
    labels = [
        [
            label if at == 0 or label == IGNORED else further[label]
            for label, of_word in zip(row, words, strict=True)
            for at in range(len(of_word))
        ]
        for row, words in zip(split.labels, parts, strict=True)
    ]
    return _joined(parts), [*labels]


def _check_columns(tables: Mapping[str, Table]) -> None:
    """Raise DataError if a CoNLL file has a single column."""
    for table in tables.values():
        if len(table.columns) < 2:
            rule = "a file of words and tags has two or more, divided by tabs or blanks"
            raise DataError(f"task: {table.path} has one column; {rule}.", path=table.path)


def tagged_text(text: Text) -> str:
    """Return the text whose words are tagged: the text itself, or the second of a pair."""
    return text if isinstance(text, str) else text[1]


def spans_of_tags(
    tags: Sequence[int], scores: Sequence[float], labels: Sequence[str], text: str, words: Sequence[Span]
) -> list[SpanAnswer]:
    """Return the spans that the tags of a text's words mark; if `labels` mark no spans, each word is one.

    `tags` are the ids and `scores` the probabilities of the words' tags; the score of a span is the mean. `labels` are
    the tags' names, and `words` the words' ranges of characters.
    """
    joins, before = score.marks_spans(labels), ""
    spans: list[tuple[str, list[int], list[float]]] = []  # label of each span, edges and scores of its words
    for word, probability, number in zip(words, scores, tags, strict=True):
        tag = str(labels[number])
        mark, _, label = tag.partition("-") if joins else ("B", "", tag)
        if mark != "O":
            if mark not in "IEL" or label != before:
                spans.append((label, [], []))
            spans[-1][1].extend(word)
            spans[-1][2].append(probability)
        before = "" if mark in "SUEL" else label  # single and end tags (IOBES, BILOU) end their span
    return [
        {"start": start, "end": end, "label": label, "text": text[start:end], "score": sum(sure) / len(sure)}
        for label, (start, *_, end), sure in spans
    ]


def wrong_spans(row: int, true: Sequence[SpanAnswer], predicted: Sequence[SpanAnswer]) -> WrongAnswer | None:
    """Return a record of the wrong spans of a text; None if all are right.

    Each span in it has an "error": "missed" (a true span where none was predicted), "extra" (a predicted span where
    there is none), or "wrong" (a true and a predicted span overlap, but differ in ends or label). The record's
    confidence is the highest score of the wrong predicted spans and the missed ones.

    Args:
        row: Index of the text.
        true: The true spans. The score of each is the mean probability of the tags that were predicted for its words.
        predicted: The predicted spans, with scores of the same kind.
    """
    right = {_key(span) for span in true} & {_key(span) for span in predicted}
    missed = [_with_error(span, predicted, "missed") for span in true if _key(span) not in right]
    extra = [_with_error(span, true, "extra") for span in predicted if _key(span) not in right]
    if not (missed or extra):
        return None
    confidence = max(span["score"] for span in (*extra, *(span for span in missed if span.get("error") == "missed")))
    return {"row": row, "text": None, "true": missed, "predicted": extra, "confidence": confidence}


def _key(span: SpanAnswer) -> tuple[int, int, str]:
    return span["start"], span["end"], span["label"]


def _with_error(span: SpanAnswer, others: Sequence[SpanAnswer], error: str) -> SpanAnswer:
    overlaps = any(span["start"] < other["end"] and other["start"] < span["end"] for other in others)
    return {**span, "error": "wrong" if overlaps else error}
