from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.data.arrow import dataset_of
from lamina.data.encode import Encoded, TokenRange, check_tokenizers, encode, window_table
from lamina.data.windows import IGNORED, read_flags, word_labels, word_tokens
from lamina.errors import ConfigError

TEXT = "EU rejects German call to boycott British lamb . 12,345.67 😀👨‍👩‍👧 äöü naïveté שלום - New York"
WORDS: list[str] = TEXT.split()


class Sentences:
    """Words joined by spaces; every word's label is its number in the row."""

    def __init__(self, *rows: list[str]) -> None:
        self.texts = [" ".join(row) for row in rows]
        self.labels = [tuple(range(len(row))) for row in rows]
        ends = [[len(" ".join(row[: at + 1])) for at in range(len(row))] for row in rows]
        self.words = [
            tuple((end - len(word), end) for end, word in zip(edges, row, strict=True))
            for edges, row in zip(ends, rows, strict=True)
        ]


@pytest.mark.parametrize("max_length", [8, 13, 64])
def test_every_word_has_one_labelled_token(tokenizer, max_length: int):
    split = Sentences(WORDS, [], ["moon"], WORDS * 5)
    encoded = encode(split.texts, tokenizer, max_length=max_length, windows=True)
    labels = list(word_labels(encoded, split.words, split.labels))
    assert [len(row) for row in labels] == encoded.lengths.tolist()
    for text in range(len(split.texts)):
        found = [label for i, row in enumerate(labels) if encoded.text[i] == text for label in row if label != IGNORED]
        assert sorted(found) == list(split.labels[text])


def encoded_of(windows: list[dict[str, Any]]) -> Encoded:
    """The windows of one text."""
    rows = [{"text": 0, "offsets": [], **window} for window in windows]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return Encoded(dataset_of([window_table(columns)]))


def test_the_first_sub_token_is_labelled(tokenizer):
    split = Sentences(WORDS)
    encoded = encode(split.texts, tokenizer, max_length=200, windows=True)
    (labels,), (spans,) = word_labels(encoded, split.words, split.labels), encoded.offsets
    for word, (start, end) in enumerate(split.words[0]):
        touching = [at for at, (s, e) in enumerate(spans) if s < end and e > start and s < e]
        assert labels.index(word) == touching[0]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # 3 has two tokens to its right in the first window, none to its left in the second; 4 ties and stays
        ([[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8], [6, 7, 8, 9]], [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]),
        ([[0, 1, 2, 3], [2, 3, 4, 5]], [[0, 1, 2], [3, 4, 5]]),  # one token more is more
    ],
)
def test_a_token_counts_in_the_window_that_sees_most(numbers: list[list[int]], expected: list[list[int]]):
    encoded = encoded_of(
        [
            {"input_ids": [9, *row, 9], "window": window, **TokenRange(1, len(row) + 1, row[0])._asdict()}
            for window, row in enumerate(numbers)
        ]
    )
    kept = [
        [n for n, flag in zip(row, flags[1:], strict=False) if flag]
        for row, flags in zip(numbers, read_flags(encoded), strict=True)
    ]
    assert kept == expected
    assert not any(flags[0] or flags[-1] for flags in read_flags(encoded))


@pytest.mark.parametrize("stride", [0, 1, 5, 11])
def test_every_token_counts_once(tokenizer, stride: int):
    text = " ".join(WORDS * 4)
    encoded = encode([text, "moon"], tokenizer, max_length=14, windows=True, stride=stride)
    whole = encode([text, "moon"], tokenizer, max_length=5000)
    counted = [
        (encoded.text[i], run.number + at - run.start)
        for i, (run, flags) in enumerate(zip(encoded.token_ranges, read_flags(encoded), strict=True))
        for at, flag in enumerate(flags)
        if flag
    ]
    expected = [(i, n) for i, run in enumerate(whole.token_ranges) for n in range(run.stop - run.start)]
    assert sorted(counted) == expected


def test_a_word_without_token_is_none(minilm):
    split = Sentences(["cat", "\u200b", "", "mat"])
    encoded = encode(split.texts, minilm, max_length=16, windows=True)
    assert list(word_tokens(encoded, split.words)) == [(0, 1, 0, 0), (0, 2, 3, 3)]
    assert list(word_labels(encoded, split.words, split.labels)) == [[IGNORED, 0, 3, IGNORED]]


def test_a_token_over_two_words_stands_for_the_first():
    offsets = [0, 5, 5, 6, 6, 9]
    encoded = encoded_of([{"input_ids": [5, 6, 7], "offsets": offsets, "window": 0, **TokenRange(0, 3, 0)._asdict()}])
    assert list(word_tokens(encoded, [((0, 2), (3, 5), (6, 9))])) == [(0, 0, 0, 1), (0, 2, 2, 2)]


def test_offsets_are_needed(minilm):
    split = Sentences(["cat"])
    encoded = encode(split.texts, minilm, max_length=8, offsets=False)
    with pytest.raises(ConfigError, match="there are no character offsets"):
        list(word_labels(encoded, split.words, split.labels))


def test_rows_must_be_the_same(minilm):
    encoded = encode(["cat"], minilm, max_length=8)
    with pytest.raises(ConfigError, match="1 texts and words of 2"):
        list(word_tokens(encoded, Sentences(["cat"], ["mat"]).words))


def test_a_digest_tells_tokens_and_windows_apart(minilm):
    def digest(*texts: str, max_length: int = 16) -> str:
        return encode(texts, minilm, max_length=max_length, windows=True).digest

    assert len({digest("cat", "mat"), digest("mat", "cat"), digest("cat mat"), digest("cat")}) == 4
    assert digest("cat", "mat") == digest("cat mat", max_length=3)  # the same windows, whatever they were cut from


def test_windows_survive_copies_and_pickles(minilm):
    encoded = encode([TEXT, "moon"], minilm, max_length=12, windows=True)
    for same in (copy.deepcopy(encoded), pickle.loads(pickle.dumps(encoded))):
        assert (same.digest, same.truncated, same.token_ranges) == (
            encoded.digest,
            encoded.truncated,
            encoded.token_ranges,
        )
        assert same.offsets == encoded.offsets
        assert all((same.batch([2, 0], {})[key] == rows).all() for key, rows in encoded.batch([2, 0], {}).items())


def test_a_version_of_tokenizers_that_loses_windows_is_refused(minilm, monkeypatch):
    class EarlyExit:
        """The encoder of tokenizers 0.23.2: it reads no further than the first window."""

        def __init__(self, _model: object) -> None:
            self.pre_tokenizer = None

        def enable_truncation(self, _length: int) -> None:
            pass

        def encode(self, _text: str) -> SimpleNamespace:
            return SimpleNamespace(overflowing=[])

    monkeypatch.setattr("lamina.data.encode.tokenizers", SimpleNamespace(Tokenizer=EarlyExit, __version__="0.23.2"))
    check_tokenizers.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"tokenizers 0\.23\.2 loses .*Run: pip install 'tokenizers!=0\.23\.1,!=0\.23\.2'"
        ):
            encode([TEXT], minilm, max_length=12, windows=True)
        assert len(encode(["a moon"], minilm, max_length=12, windows=True).lengths) == 1  # nothing to lose
    finally:
        check_tokenizers.cache_clear()
