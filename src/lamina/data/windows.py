"""Tokenised texts as windows of tokens, and the tokens that belong to each word."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import pyarrow as pa

from lamina.data.arrow import Column, Ragged, dataset_of
from lamina.data.batches import pad
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import datasets
    from torch import Tensor

IGNORED = -100  # label of a token that is left out of the loss
TOKEN_KEYS = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "token_type_ids": pa.int8()}
_PLACES = {"text": pa.int64(), "window": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "number": pa.int32()}
# A window as a row of `window_table`: column -> number, or list of numbers.
WindowRow: TypeAlias = "Mapping[str, int | Sequence[int]]"


class TokenRange(NamedTuple):
    """The tokens of a text in one window, without special tokens.

    Attributes:
        start: Position of the first token in the window.
        stop: Position after the last token in the window.
        number: Index of the first token among all tokens of the text, from 0.
    """

    start: int
    stop: int
    number: int


def window_table(rows: Sequence[WindowRow]) -> pa.Table:
    """Return windows as an Arrow table with one row per window.

    Columns are the tokens (`TOKEN_KEYS`), "offsets" (a flat list: start, end, start, end ...), "text" (index of the
    text), "window" (index of the window within its text) and the fields of `TokenRange`.
    """
    keys = [key for key in TOKEN_KEYS if rows and key in rows[0]] or ["input_ids"]
    lists = {**{key: TOKEN_KEYS[key] for key in keys}, "offsets": pa.int32()}
    schema = pa.schema({**{name: pa.list_(kind) for name, kind in lists.items()}, **_PLACES})
    return pa.Table.from_pylist(rows, schema=schema)


def pairs_of(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs (start, end) from a flat list: start, end, start, end ..."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@final
class Encoded:
    """Tokenised texts as windows of tokens, in the order of the texts; `encode` and `blocks` return it.

    Args:
        rows: One row per window, with the columns of `window_table`; in memory, or as a dataset on disk.
        truncated: Number of texts that lost tokens.

    Attributes:
        truncated: Number of texts that lost tokens.
        keys: The arguments of the model that a batch has, such as "input_ids".
        lengths: Number of tokens of each window, as an array.
        text: Index of each window's text, as an array.
        window: Index of each window within its text, as an array.
    """

    def __init__(self, rows: pa.Table | datasets.Dataset, truncated: int = 0) -> None:
        self._rows, self.truncated = rows, truncated
        self._table: pa.Table = rows if isinstance(rows, pa.Table) else rows.data.table
        self.keys = tuple(key for key in TOKEN_KEYS if key in rows.column_names)
        self._tokens = {key: Ragged(self._table.column(key)) for key in self.keys}
        self.lengths = self._tokens["input_ids"].lengths
        self.text, self.window = (self._table.column(name).to_numpy() for name in ("text", "window"))

    def __reduce__(self) -> tuple[type[Encoded], tuple[pa.Table | datasets.Dataset, int]]:
        return Encoded, (self._rows, self.truncated)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def texts(self) -> int:
        """Number of texts."""
        return int(self.text[-1]) + 1 if len(self) else 0

    @cached_property
    def offsets(self) -> Column:
        """For each window, the characters (start, end) of each token in the text; (0, 0) for special tokens.

        The list of a window is empty if the texts were tokenised without offsets.
        """
        rows = dataset_of([self._rows.select(["offsets"])]) if isinstance(self._rows, pa.Table) else self._rows
        return Column(rows, ["offsets"], pairs_of)

    @cached_property
    def token_ranges(self) -> list[TokenRange]:
        """For each window, which of its tokens belong to the text."""
        return list(map(TokenRange, *(self._table.column(name).to_pylist() for name in TokenRange._fields)))

    @cached_property
    def digest(self) -> str:
        """A hash of all tokens and their division into windows."""
        return hashlib.blake2b(b"".join(self._tokens[key].digest() for key in self.keys), digest_size=16).hexdigest()

    def token(self, window: int, position: int) -> int:
        """Return the id of a token of a window."""
        return int(self._tokens["input_ids"][window][position])

    def batch(self, rows: Sequence[int], fill: Mapping[str, int]) -> dict[str, Tensor]:
        """Return windows as the arguments of a model: tensors (int64) `[batch, tokens]`, padded on the right.

        Args:
            rows: Indices of the windows, at least one.
            fill: Padding value of each argument; an argument that is missing here is padded with 0.
        """
        return {key: pad([tokens[row] for row in rows], fill.get(key, 0)) for key, tokens in self._tokens.items()}


def read_flags(encoded: Encoded) -> list[list[bool]]:
    """Return, for each window and token, whether the answer for the token is read from this window.

    Neighbouring windows share tokens. Each token of a text is read in exactly one window: the one in which the smaller
    of the numbers of tokens to its left and right is largest. The start and the end of the text count as unlimited
    context. Special tokens, and the tokens of the first texts of pairs, are read in no window.
    """
    flags = [[False] * length for length in encoded.lengths.tolist()]
    texts, ranges = encoded.text.tolist(), encoded.token_ranges
    # windows come in order, so that the last window of a text sets its total number of tokens
    totals = {text: tokens.number + tokens.stop - tokens.start for text, tokens in zip(texts, ranges, strict=True)}
    best: dict[tuple[int, int], tuple[int, int, int]] = {}  # (text, token) -> (context, window, position)
    for window, (text, tokens) in enumerate(zip(texts, ranges, strict=True)):
        total = totals[text]
        if tokens.stop - tokens.start == total:
            flags[window][tokens.start : tokens.stop] = [True] * total
            continue
        ends_here = tokens.number + tokens.stop - tokens.start == total
        for at in range(tokens.start, tokens.stop):
            left = total if tokens.number == 0 else at - tokens.start
            right = total if ends_here else tokens.stop - 1 - at
            key = (text, tokens.number + at - tokens.start)
            if key not in best or min(left, right) > best[key][0]:
                best[key] = (min(left, right), window, at)
    for _, window, at in best.values():
        flags[window][at] = True
    return flags


class WordToken(NamedTuple):
    """A token that belongs to a word.

    Attributes:
        window: Index of the window.
        position: Position of the token in the window.
        word: Index of the word among the words of all texts.
        first: Whether the token is the first token of its word.
    """

    window: int
    position: int
    word: int
    first: bool


class _Overlap(NamedTuple):
    """A token and the words with which it shares characters: from `first` up to and including `last`."""

    window: int
    position: int
    first: int
    last: int


def _overlaps(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> Iterator[_Overlap]:
    """Yield the tokens that share characters with words, window by window; see `word_tokens` for arguments and errors.

    A token that windows share comes once (see `read_flags`). Words are counted through all texts.
    """
    if encoded.texts != len(words):
        raise ConfigError(f"word_labels: {encoded.texts} texts and words of {len(words)}; both must be the same rows.")
    first_words = [0, *accumulate(map(len, words))]  # text -> index of its first word among the words of all texts
    next_words = [0] * len(words)  # text -> the word, within the text, to which the next token may belong
    texts, ranges = encoded.text.tolist(), encoded.token_ranges
    for window, (is_read, offsets) in enumerate(zip(read_flags(encoded), encoded.offsets, strict=True)):
        if len(offsets) != len(is_read):
            problem = "there are no character offsets; words are found by them"
            raise ConfigError(f"word_labels: {problem}. Use a fast tokenizer, and encode with offsets.")
        text = texts[window]
        spans, word = words[text], next_words[text]
        for at in range(ranges[window].start, ranges[window].stop):
            start, stop = offsets[at]
            while is_read[at] and word < len(spans) and spans[word][1] <= start:
                word += 1
            if is_read[at] and word < len(spans) and start < stop and spans[word][0] < stop:
                last = word
                while last + 1 < len(spans) and spans[last + 1][0] < stop:
                    last += 1
                yield _Overlap(window, at, first_words[text] + word, first_words[text] + last)
        next_words[text] = word


def word_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> Iterator[WordToken]:
    """Yield the tokens of all words, window by window; a token that windows share comes once (see `read_flags`).

    A token belongs to the first word with which it shares characters; it may contain spaces too. A word has no token if
    the tokenizer drops it or joins it to the word before.

    Args:
        encoded: The texts, tokenised with offsets.
        words: The characters (start, end) of each word of each text, from left to right.

    Raises:
        ConfigError: If the number of texts in `words` is another one, or there are no offsets.
    """
    words = list(words)
    begun = bytearray(sum(map(len, words)))  # word -> whether its first token was yielded
    for token in _overlaps(encoded, words):
        yield WordToken(token.window, token.position, token.first, not begun[token.first])
        begun[token.first] = True


def deciding_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int] | None]:
    """Return for each word of all texts the token that decides about it, as window and position in the window.

    It is the first token that belongs to the word (see `word_tokens`). If all tokens that share characters with the
    word belong to words before it, it is the first of these, which decides about several words. None: the tokenizer
    drops the word. Arguments and errors are those of `word_tokens`.
    """
    words = list(words)
    owned: list[tuple[int, int] | None] = [None] * sum(map(len, words))
    shared: dict[int, tuple[int, int]] = {}
    for token in _overlaps(encoded, words):
        place = token.window, token.position
        owned[token.first] = owned[token.first] or place
        for word in range(token.first + 1, token.last + 1):
            shared.setdefault(word, place)
    return [place or shared.get(word) for word, place in enumerate(owned)]


def word_places(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Return, for each window, pairs of the position of a word's first token and the word's index.

    Arguments and errors are those of `word_tokens`. Words are counted through all texts. A window without a first token
    has no entry.
    """
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
    """Yield, for each window, a label for every token; tokens that decide about no word have the label `IGNORED`.

    A token that decides about several words (see `deciding_tokens`) has the label of the first.

    Args:
        encoded: The texts, tokenised with offsets.
        words: The characters (start, end) of each word of each text, from left to right.
        labels: The label of each word of each text, for the token that decides about it.
        continued: `continued[label]` is the label of the other tokens of a word with this label. None: the other tokens
            have the label `IGNORED`.

    Raises:
        ConfigError: If the number of texts in `words` is another one, or there are no offsets.
    """
    words = list(words)
    pairs = (zip(spans, row, strict=True) for spans, row in zip(words, labels, strict=True))
    by_word = [label for _, label in chain.from_iterable(pairs)]
    by_token: dict[int, dict[int, int]] = defaultdict(dict)  # window -> position -> label
    for word, place in enumerate(deciding_tokens(encoded, words)):
        if place is not None:
            by_token[place[0]].setdefault(place[1], by_word[word])
    if continued is not None:
        for token in word_tokens(encoded, words):
            label = by_word[token.word]
            by_token[token.window].setdefault(token.position, label if label == IGNORED else continued[label])
    for window, length in enumerate(encoded.lengths.tolist()):
        yield [by_token[window].get(position, IGNORED) for position in range(length)]
