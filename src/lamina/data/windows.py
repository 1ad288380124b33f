"""Encoded texts as windows of tokens, and which token stands for each word."""

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

IGNORED = -100  # label of tokens without a label
TOKEN_KEYS = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "token_type_ids": pa.int8()}
_PLACES = {"text": pa.int64(), "window": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "number": pa.int32()}


class Run(NamedTuple):
    """Where a text's tokens are in one window.

    Attributes:
        start: Position of the first of them.
        stop: Position after the last.
        number: Number of the first within the whole text, from 0.
    """

    start: int
    stop: int
    number: int


def window_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return windows as an Arrow table: tokens, "offsets" as flat edges, "text", "window" and the fields of `Run`."""
    keys = [key for key in TOKEN_KEYS if rows and key in rows[0]] or ["input_ids"]
    lists = {**{key: TOKEN_KEYS[key] for key in keys}, "offsets": pa.int32()}
    schema = pa.schema({**{name: pa.list_(kind) for name, kind in lists.items()}, **_PLACES})
    return pa.Table.from_pylist(rows, schema=schema)


def pairs_of(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Return spans from a flat list of their edges: start, end, start, end ..."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@final
class Encoded:
    """Texts as windows of tokens, in the order of the texts, made by `encode` and `blocks`.

    Attributes:
        truncated: How many texts lost tokens.
        keys: The model's arguments that a batch has, such as "input_ids".
        lengths: Array of the tokens of each window.
        text: Array of the number of each window's text.
        window: Array of the number of each window within its text.
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
        """Number of texts."""
        return int(self.text[-1]) + 1 if len(self) else 0

    @cached_property
    def offsets(self) -> Column:
        """Per window and token the character span in the text; (0, 0) for special tokens. Empty without offsets."""
        rows = dataset_of([self._rows.select(["offsets"])]) if isinstance(self._rows, pa.Table) else self._rows
        return Column(rows, ["offsets"], pairs_of)

    @cached_property
    def runs(self) -> list[Run]:
        """Per window the place of the text's tokens."""
        return list(map(Run, *(self._table.column(name).to_pylist() for name in Run._fields)))

    @cached_property
    def digest(self) -> str:
        """Hash of all tokens and windows."""
        return hashlib.blake2b(b"".join(self._tokens[key].digest() for key in self.keys), digest_size=16).hexdigest()

    def batch(self, rows: Sequence[int], fill: Mapping[str, int]) -> dict[str, Tensor]:
        """Return windows as padded tensors `[batch, tokens]`.

        Args:
            rows: Numbers of the windows, at least one.
            fill: Padding value of each key; 0 for a key that is missing.
        """
        return {key: pad([tokens[row] for row in rows], fill.get(key, 0)) for key, tokens in self._tokens.items()}


def owners(encoded: Encoded) -> list[list[bool]]:
    """Return per window and token whether the token is read in this window.

    Neighbouring windows share tokens. Each token is read in the window with the most context around it: the smaller of
    the numbers of tokens to its left and to its right, where the start and end of the text do not count as a lack.
    Special tokens, and first texts of pairs, are read in no window.
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
    """A token that belongs to a word.

    Attributes:
        window: Number of the window.
        position: Position in the window.
        word: Number of the word, counted through all texts.
        first: Whether the token is the first of its word.
    """

    window: int
    position: int
    word: int
    first: bool


def word_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> Iterator[WordToken]:
    """Yield the tokens of all words, window by window, each in the window that `owners` chooses.

    A token belongs to the first word whose characters it shares, so spaces inside its span do no harm. A word has no
    token if the tokenizer drops it or joins it to the word before.

    Args:
        encoded: The texts, with offsets.
        words: The character spans of each text's words, from left to right.

    Raises:
        ConfigError: If there are not as many texts in `words`, or no offsets.
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
    """Return, per window, the position of each word's first token with the word's number, counted through all texts."""
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
    """Yield, per window, a label for every token.

    Args:
        encoded: The texts, with offsets.
        words: The character spans of each text's words.
        labels: The label of each word, text by text. It goes to the word's first token.
        continued: The label that a word's other tokens get, by the number of the word's label. None: they are
            `IGNORED`, like all tokens outside words.
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
