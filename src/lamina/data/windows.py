"""Texts as windows of tokens, and the token that stands for each word."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch

from lamina.data.arrow import Column, Ragged, dataset_of
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import datasets
    from torch import Tensor

IGNORED = -100
"""The label of tokens that carry none."""

TOKEN_KEYS = {"input_ids": pa.int32(), "attention_mask": pa.int8(), "token_type_ids": pa.int8()}
_PLACES = {"text": pa.int64(), "window": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "number": pa.int32()}


class Run(NamedTuple):
    """The text's own tokens in one window: positions `start` up to `stop`; the first is the text's token `number`."""

    start: int
    stop: int
    number: int


def window_table(
    features: Sequence[Mapping[str, Sequence[int]]],
    text: Sequence[int],
    window: Sequence[int],
    offsets: Sequence[Sequence[tuple[int, int]]],
    runs: Sequence[Run],
) -> pa.Table:
    """Some windows as an Arrow table; see `Encoded` for what each argument holds."""
    keys = [key for key in TOKEN_KEYS if features and key in features[0]] or ["input_ids"]
    columns = {key: pa.array([feature[key] for feature in features], pa.list_(TOKEN_KEYS[key])) for key in keys}
    flat = [[edge for span in spans for edge in span] for spans in offsets]
    columns["offsets"] = pa.array(flat, pa.list_(pa.int32()))
    starts, stops, numbers = zip(*runs, strict=True) if runs else ((), (), ())
    places = zip(_PLACES.items(), (text, window, starts, stops, numbers), strict=True)
    return pa.table({**columns, **{name: pa.array(values, kind) for (name, kind), values in places}})


def pairs_of(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Spans from their edges, as lists of lists are stored."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@final
class Encoded:
    """Texts as windows of tokens, in the order of the texts; in Arrow.

    Args:
        rows: A row per window, as `window_table` makes them.
        truncated: How many texts lost tokens; 0 with windows.
    """

    def __init__(self, rows: datasets.Dataset, truncated: int = 0) -> None:
        self.truncated, self._rows = truncated, rows
        self.keys = tuple(key for key in TOKEN_KEYS if key in rows.column_names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("truncated", "_rows", "keys")}

    @cached_property
    def _tokens(self) -> dict[str, Ragged]:
        return {key: Ragged(self._rows.data.column(key)) for key in self.keys}

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Tokens of each window."""
        return self._tokens["input_ids"].lengths

    @cached_property
    def text(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Per window the text it belongs to."""
        return self._rows.data.column("text").to_numpy()

    @cached_property
    def window(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Per window its number in that text."""
        return self._rows.data.column("window").to_numpy()

    @classmethod
    def of(cls, *columns: Any, truncated: int = 0) -> Encoded:
        """From the arguments of `window_table`."""
        return cls(dataset_of([window_table(*columns)]), truncated)

    @classmethod
    def join(cls, tables: Iterable[pa.Table], truncated: int = 0) -> Encoded:
        """From tables that `window_table` made."""
        return cls(dataset_of(tables), truncated)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def texts(self) -> int:
        """How many texts there are."""
        return int(self.text[-1]) + 1 if len(self) else 0

    @property
    def offsets(self) -> Column:
        """Per window and token the character span in the (first) text.

        (0, 0) for special tokens and those of the second text; empty lists if the tokenizer is a slow one or no offsets
        were asked for.
        """
        return Column(self._rows, ["offsets"], pairs_of)

    @cached_property
    def runs(self) -> list[Run]:
        """Per window where the tokens of the (first) text are."""
        columns = (self._rows.data.column(name).to_pylist() for name in ("start", "stop", "number"))
        return [Run(*row) for row in zip(*columns, strict=True)]

    @cached_property
    def digest(self) -> str:
        """Equal for equal tokens in equal windows."""
        return hashlib.blake2b(b"".join(self._tokens[key].digest() for key in self.keys), digest_size=16).hexdigest()

    def batch(self, rows: Sequence[int], fill: Mapping[str, int]) -> dict[str, Tensor]:
        """Some windows `[batch, tokens]`, padded on the right.

        Args:
            rows: Which, at least one.
            fill: Key -> what it is padded with; 0 where none is named.
        """
        return {key: torch.from_numpy(self._tokens[key].padded(rows, fill.get(key, 0))) for key in self.keys}


def owners(encoded: Encoded) -> list[list[bool]]:
    """Choose, for every token of a text, the one window that sees most around it.

    Returns:
        Per window and token whether the token counts here. Special tokens and second texts count nowhere. What a
        window sees around a token is the smaller of the counts to its left and right; a text's own end is no lack.
    """
    flags = [[False] * length for length in encoded.lengths.tolist()]
    totals: dict[int, int] = {}
    texts = encoded.text.tolist()
    for text, run in zip(texts, encoded.runs, strict=True):
        totals[text] = run.number + run.stop - run.start
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


def word_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> list[list[tuple[int, int] | None]]:
    """The token that stands for each word: its first sub-token, in the window that owns that one.

    A token belongs to the first word whose characters it shares, so spaces inside its span do no harm.

    Args:
        encoded: Windows of the texts, with offsets.
        words: Per text the character span of every word, from left to right.

    Returns:
        Per text and word (window, position), or None for a word that has no token of its own (the tokenizer
        drops it, or reads it as one with the word before).

    Raises:
        ConfigError: If there are no offsets, or the texts are not as many.
    """
    if encoded.texts != len(words):
        raise ConfigError(
            f"word_labels: {encoded.texts} texts and words of {len(words)}; both must be of the same rows."
        )
    words = list(words)
    found: list[list[tuple[int, int] | None]] = [[None] * len(spans) for spans in words]
    following = [0] * len(words)
    texts, runs = encoded.text.tolist(), encoded.runs
    for window, (owned, spans) in enumerate(zip(owners(encoded), encoded.offsets, strict=True)):
        if len(spans) != len(owned):
            raise ConfigError(
                "word_labels: there are no character offsets; words are found by them. "
                "Use a fast tokenizer, and encode with offsets."
            )
        text = texts[window]
        for at in range(runs[window].start, runs[window].stop):
            if owned[at]:
                following[text] = word = _word_at(words[text], spans[at], following[text])
                _claim(found[text], words[text], word, spans[at], (window, at))
    return found


def _word_at(words: Sequence[tuple[int, int]], span: tuple[int, int], word: int) -> int:
    """The first word from `word` on that ends behind the start of `span`."""
    while word < len(words) and words[word][1] <= span[0]:
        word += 1
    return word


def _claim(
    found: list[tuple[int, int] | None],
    words: Sequence[tuple[int, int]],
    word: int,
    span: tuple[int, int],
    place: tuple[int, int],
) -> None:
    if word < len(words) and found[word] is None and span[0] < span[1] and words[word][0] < span[1]:
        found[word] = place


def word_labels(
    encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]], labels: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Labels for tokens: each word's on the token that stands for it, `IGNORED` on all others.

    Args:
        encoded: Windows of the texts, with offsets.
        words: Per text the character span of every word.
        labels: Per text a class id for every word.

    Returns:
        Per window one class id or -100 for every token.

    Raises:
        ConfigError: If the offsets or rows do not fit.
    """
    found = [[IGNORED] * length for length in encoded.lengths.tolist()]
    for row, places in enumerate(word_tokens(encoded, words)):
        for label, place in zip(labels[row], places, strict=True):
            if place is not None:
                found[place[0]][place[1]] = label
    return found
