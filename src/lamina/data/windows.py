"""Choose the window that answers for each token, and find the tokens of each word."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lamina.data.encode import Encoded

IGNORED = -100  # label of a token that is left out of the loss


def read_flags(encoded: Encoded) -> list[list[bool]]:
    """Return for each window and token whether the answer for the token is taken from this window.

    Neighbouring windows share tokens. The answer for each token of a text is taken from one window: the one with the
    most context, which is the smaller of the numbers of tokens to the left and right. In the first window of a text,
    the left context counts as unlimited, in the last window the right one. If windows are equal, the first counts.
    Tokens outside `Encoded.token_ranges`, such as special tokens, have False.
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
    """A token that shares characters with words.

    Attributes:
        window: Index of the window.
        position: Position of the token in the window.
        word: Number of the first of these words, to which the token belongs. Words count through all texts, from 0.
        last: Number of the last of these words.
    """

    window: int
    position: int
    word: int
    last: int


def word_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> Iterator[WordToken]:
    """Yield the tokens of all words, window by window. A token in several windows comes once (see `read_flags`).

    `encoded` has offsets, and `words` the characters (start, end) of each word of each text, from left to right, where
    `end` is exclusive. A token belongs to the first word with which it shares characters; it may contain spaces too. A
    word has no token if the tokenizer drops it or joins it to the word before. Raises ConfigError if `words` has a
    different number of texts, or there are no offsets.
    """
    words = list(words)
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
                yield WordToken(window, at, first_words[text] + word, first_words[text] + last)
        next_words[text] = word


def deciding_tokens(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int] | None]:
    """Return for each word of all texts the token from which its label is predicted: (window, position in the window).

    It is the first token that belongs to the word (see `word_tokens`). If every token that shares characters with the
    word belongs to an earlier word, it is the first of these tokens, which several words then have in common. None: the
    tokenizer drops the word. Arguments and the ConfigError are those of `word_tokens`.
    """
    words = list(words)
    owned: dict[int, tuple[int, int]] = {}
    shared: dict[int, tuple[int, int]] = {}
    for token in word_tokens(encoded, words):
        owned.setdefault(token.word, (token.window, token.position))
        for word in range(token.word + 1, token.last + 1):
            shared.setdefault(word, (token.window, token.position))
    return [owned.get(word, shared.get(word)) for word in range(sum(map(len, words)))]


def word_places(encoded: Encoded, words: Sequence[Sequence[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Return window -> a list of (position, word) with the first token that belongs to each word (see `word_tokens`).

    Words are numbered through all texts, from 0. Windows without such a token have no entry. Arguments and the
    ConfigError are those of `word_tokens`.
    """
    firsts: dict[int, WordToken] = {}
    for token in word_tokens(encoded, words):
        firsts.setdefault(token.word, token)
    places: dict[int, list[tuple[int, int]]] = {}
    for word, token in firsts.items():
        places.setdefault(token.window, []).append((token.position, word))
    return places


def word_labels(
    encoded: Encoded,
    words: Sequence[Sequence[tuple[int, int]]],
    labels: Iterable[Sequence[int]],
    continued: Sequence[int] | None = None,
) -> Iterator[list[int]]:
    """Yield, for each window, a label for every token; `IGNORED` (-100) stands for none.

    The token from which a word is predicted (see `deciding_tokens`) has the word's label. If several words are
    predicted from one token, it has the label of the first. Raises ConfigError as `word_tokens` does.

    Args:
        encoded: The texts, tokenised with offsets.
        words: The characters (start, end) of each word of each text, from left to right.
        labels: The label of each word of each text.
        continued: `continued[label]` is the label of the other tokens of a word with this label; after `IGNORED` they
            have none. None: the other tokens have none.
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
