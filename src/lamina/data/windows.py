"""Texts as windows of tokens, and the token that stands for each word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED = -100
"""The label of tokens that carry none."""


class Run(NamedTuple):
    """The text's own tokens in one window: positions `start` up to `stop`; the first is the text's token `number`."""

    start: int
    stop: int
    number: int


@dataclass(frozen=True)
class Encoded:
    """Texts as windows of tokens, in the order of the texts.

    Attributes:
        features: Per window `input_ids`, `attention_mask` and, where the model takes them, `token_type_ids`.
        text: Per window the text it belongs to.
        window: Per window its number in that text.
        offsets: Per window and token the character span in the (first) text; (0, 0) for special tokens and those of
            the second text. Empty lists if the tokenizer is a slow one or no offsets were asked for.
        truncated: How many texts lost tokens; 0 with windows.
        runs: Per window where the tokens of the (first) text are.
    """

    features: list[dict[str, list[int]]]
    text: list[int]
    window: list[int]
    offsets: list[list[tuple[int, int]]]
    truncated: int = 0
    runs: list[Run] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each window."""
        return [len(feature["input_ids"]) for feature in self.features]


def owners(encoded: Encoded) -> list[list[bool]]:
    """Choose, for every token of a text, the one window that sees most around it.

    Returns:
        Per window and token whether the token counts here. Special tokens and second texts count nowhere. What a
        window sees around a token is the smaller of the counts to its left and right; a text's own end is no lack.
    """
    flags = [[False] * length for length in encoded.lengths]
    totals: dict[int, int] = {}
    for text, run in zip(encoded.text, encoded.runs, strict=True):
        totals[text] = run.number + run.stop - run.start
    best: dict[tuple[int, int], tuple[int, int, int]] = {}
    for window, (text, run) in enumerate(zip(encoded.text, encoded.runs, strict=True)):
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
    if any(len(spans) != length for spans, length in zip(encoded.offsets, encoded.lengths, strict=True)):
        raise ConfigError(
            "word_labels: there are no character offsets; words are found by them. "
            "Use a fast tokenizer, and encode with offsets."
        )
    texts = encoded.text[-1] + 1 if encoded.text else 0
    if texts != len(words):
        raise ConfigError(f"word_labels: {texts} texts and words of {len(words)}; both must be of the same rows.")
    found: list[list[tuple[int, int] | None]] = [[None] * len(spans) for spans in words]
    following = [0] * len(words)
    for window, owned in enumerate(owners(encoded)):
        text, run = encoded.text[window], encoded.runs[window]
        for at in range(run.start, run.stop):
            if owned[at]:
                word = _word_at(words[text], encoded.offsets[window][at], following[text])
                following[text] = word
                _claim(found[text], words[text], word, encoded.offsets[window][at], (window, at))
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
    found = [[IGNORED] * length for length in encoded.lengths]
    for row, places in enumerate(word_tokens(encoded, words)):
        for label, place in zip(labels[row], places, strict=True):
            if place is not None:
                found[place[0]][place[1]] = label
    return found
