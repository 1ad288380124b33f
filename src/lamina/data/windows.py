"""Texts as windows of tokens, and the token that stands for each word."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, final

import pyarrow as pa

from lamina.data.arrow import Column, Ragged, dataset_of
from lamina.data.batches import pad
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import datasets
    from torch import Tensor

IGNORED = -100  # the label of tokens that carry none
TOKEN_KEYS = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "token_type_ids": pa.int8()}
_PLACES = {"text": pa.int64(), "window": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "number": pa.int32()}


class Run(NamedTuple):
    """The text's own tokens in one window: positions `start` up to `stop`; the first is the text's token `number`."""

    start: int
    stop: int
    number: int


def window_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Some windows as an Arrow table: the tokens of each, "offsets" as flat edges, "text", "window" and its `Run`."""
    keys = [key for key in TOKEN_KEYS if rows and key in rows[0]] or ["input_ids"]
    lists = {**{key: TOKEN_KEYS[key] for key in keys}, "offsets": pa.int32()}
    schema = pa.schema({**{name: pa.list_(kind) for name, kind in lists.items()}, **_PLACES})
    return pa.Table.from_pylist(rows, schema=schema)


def pairs_of(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Spans from their edges, as lists of lists are stored."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@final
class Encoded:
    """Texts as windows of tokens, in the order of the texts: rows of `window_table`; `truncated` texts lost tokens.

    Arrays with an entry per window are `lengths` in tokens, the `text` it belongs to, and its number `window` in that.
    """

    def __init__(self, rows: pa.Table | datasets.Dataset, truncated: int = 0) -> None:
        self._rows, self.truncated = rows, truncated
        self._table: pa.Table = rows if isinstance(rows, pa.Table) else rows.data.table
        self.keys = tuple(key for key in TOKEN_KEYS if key in rows.column_names)
        self._tokens = {key: Ragged(self._table.column(key)) for key in self.keys}
        self.lengths = self._tokens["input_ids"].lengths
        self.text, self.window = (self._table.column(name).to_numpy() for name in ("text", "window"))

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoded, (self._rows, self.truncated)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return int(self.text[-1]) + 1 if len(self) else 0

    @cached_property
    def offsets(self) -> Column:
        """Per window and token the character span in the (first) text, else (0, 0); empty lists without offsets."""
        rows = dataset_of([self._rows.select(["offsets"])]) if isinstance(self._rows, pa.Table) else self._rows
        return Column(rows, ["offsets"], pairs_of)

    @cached_property
    def runs(self) -> list[Run]:
        """Per window where the tokens of the (first) text are."""
        return list(map(Run, *(self._table.column(name).to_pylist() for name in Run._fields)))

    @cached_property
    def digest(self) -> str:
        """Equal for equal tokens in equal windows."""
        return hashlib.blake2b(b"".join(self._tokens[key].digest() for key in self.keys), digest_size=16).hexdigest()

    def batch(self, rows: Sequence[int], fill: Mapping[str, int]) -> dict[str, Tensor]:
        """Some windows `[batch, tokens]`, at least one, padded on the right with `fill` of their key, or 0."""
        return {key: pad([tokens[row] for row in rows], fill.get(key, 0)) for key, tokens in self._tokens.items()}


def owners(encoded: Encoded) -> list[list[bool]]:
    """Per window and token whether it counts here: every token of a text counts in the one window that sees most.

    Special tokens and second texts count nowhere. What a window sees around a token is the smaller of the counts to
    its left and right; a text's own end is no lack.
    """
    flags = [[False] * length for length in encoded.lengths.tolist()]
    texts = encoded.text.tolist()
    totals = {text: run.number + run.stop - run.start for text, run in zip(texts, encoded.runs, strict=True)}
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for window, (text, run) in enumerate(zip(texts, encoded.runs, strict=True)):
        total = totals[text]
        if run.stop - run.start == total:
            flags[window][run.start : run.stop] = [True] * total
            continue
        ends_here = run.number + run.stop - run.start == total
        for at in range(run.start, run.stop):
            left = total if run.number == 0 else at - run.start
            right = total if ends_here else run.stop - 1 - at
            key = (text, run.number + at - run.start)
            if key not in best or min(left, right) > best[key][0]:
                best[key] = (min(left, right), window, at)
    for _, window, at in best.values():
        flags[window][at] = True
    return flags


class WordToken(NamedTuple):
    """A token that belongs to a word: where it is, the word's number through all texts, whether it is its first."""

    window: int
    position: int
    word: int
    first: bool


def word_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> Iterator[WordToken]:
    """The sub-tokens of all words, window by window, each in the window that owns it.

    A token belongs to the first word whose characters it shares, so spaces inside its span do no harm. A word has none
    if the tokenizer drops it, or reads it as one with the word before. `words` are spans, from left to right.
    """
    if encoded.texts != len(words):
        raise ConfigError(f"word_labels: {encoded.texts} texts and words of {len(words)}; both must be the same rows.")
    words = list(words)
    numbers = [0, *accumulate(map(len, words))]  # of each text's first word
    begun, following = bytearray(numbers[-1]), [0] * len(words)
    texts, runs = encoded.text.tolist(), encoded.runs
    for window, (owned, offsets) in enumerate(zip(owners(encoded), encoded.offsets, strict=True)):
        if len(offsets) != len(owned):
            what = "there are no character offsets; words are found by them"
            raise ConfigError(f"word_labels: {what}. Use a fast tokenizer, and encode with offsets.")
        text = texts[window]
        spans, word = words[text], following[text]
        for at in range(runs[window].start, runs[window].stop):
            start, stop = offsets[at]
            while owned[at] and word < len(spans) and spans[word][1] <= start:
                word += 1
            if owned[at] and word < len(spans) and start < stop and spans[word][0] < stop:
                number = numbers[text] + word
                yield WordToken(window, at, number, not begun[number])
                begun[number] = True
        following[text] = word


def word_places(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Per window the positions of the first tokens of words, each with its word's number through all texts."""
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for token in word_tokens(encoded, words):
        if token.first:
            places[token.window].append((token.position, token.word))
    return places


def word_labels(
    encoded: Encoded,
    words: Sequence[Sequence[tuple[int, int]]],
    labels: Iterable[Sequence[int]],
    continued: Sequence[int] | None = None,
) -> Iterator[list[int]]:
    """Per window a label for every token: each word's on its first token, `IGNORED` on all others.

    `continued` says for every label which one the other tokens of a word get; None: none.
    """
    pairs = (zip(spans, row, strict=True) for spans, row in zip(words, labels, strict=True))
    by_word = [label for _, label in chain.from_iterable(pairs)]
    places: dict[int, list[WordToken]] = defaultdict(list)
    for token in word_tokens(encoded, words):
        if token.first or continued is not None:
            places[token.window].append(token)
    for window, length in enumerate(encoded.lengths.tolist()):
        row = [IGNORED] * length
        for token in places[window]:
            label = by_word[token.word]
            goes_on = continued is not None and not token.first and label != IGNORED
            row[token.position] = continued[label] if continued is not None and goes_on else label
        yield row
