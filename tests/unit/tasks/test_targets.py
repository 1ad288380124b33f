"""Labels as tensors, window by window."""

from __future__ import annotations

import math

import torch
from tests.support.training import tiny_tokenizer

from lamina.data.encode import encode
from lamina.tasks.split import Split
from lamina.tasks.targets import targets

LONG = "the film is good and the film is bad"
TEXTS = (LONG, "very good")


def encoded(*, windows: bool = True) -> object:
    return encode(TEXTS, tiny_tokenizer(), max_length=6, stride=2, windows=windows)


def test_a_texts_label_goes_to_its_first_window():
    made = targets(encoded(), Split(TEXTS, (3, 1)))  # pyright: ignore
    assert made.values == [3, -100, -100, -100, 1]
    assert not made.per_token
    assert torch.equal(made.tensor([4, 1, 0]), torch.tensor([1, -100, 3]))


def test_other_windows_of_a_score_have_none():
    made = targets(encoded(), Split(TEXTS, (0.5, 1.5)))  # pyright: ignore
    assert made.values[0] == 0.5
    assert all(math.isnan(value) for value in made.values[1:4])
    assert made.values[4] == 1.5


def test_other_windows_of_several_labels_have_none():
    made = targets(encoded(), Split(TEXTS, ((1, 0), (0, 1))))  # pyright: ignore
    assert made.values == [(1, 0), [-1, -1], [-1, -1], [-1, -1], (0, 1)]
    assert torch.equal(made.tensor([0, 1]), torch.tensor([[1, 0], [-1, -1]]))


def test_a_words_label_goes_to_one_window_only():
    words = []
    for text in TEXTS:
        at, spans = 0, []
        for word in text.split():
            spans.append((at, at + len(word)))
            at += len(word) + 1
        words.append(tuple(spans))
    labels = (tuple(range(9)), (10, 11))
    made = targets(encoded(), Split(TEXTS, labels, tuple(words)))  # pyright: ignore
    assert made.per_token
    given = [label for row in made.values for label in row if label != -100]
    assert sorted(given) == [*range(9), 10, 11]
    padded = made.tensor([0, 4])
    assert padded.shape == (2, 6)
    assert padded[1].tolist() == [-100, 10, 11, -100, -100, -100]
