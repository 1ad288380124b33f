"""From windows back to texts and words."""

from __future__ import annotations

import pytest
import torch
from tests.support.training import TAGS, names, tiny_tokenizer

from lamina.data.encode import encode
from lamina.train.answers import blank, guess, places_of, put


def test_words_of_many_windows_come_back_in_their_order():
    split = names(train=3, low=60, high=90).split("train")
    assert split.words is not None
    encoded = encode(split.texts, tiny_tokenizer(), max_length=16, windows=True, offsets=True)
    assert len(encoded.features) > 9
    places = places_of(encoded, {"a": split.words, "b": split.words})
    assert places["a"] is places["b"]
    answers = blank(TAGS, split.words, len(split))
    seen = [0] * len(split)
    for row, feature in enumerate(encoded.features):  # what a model says of a token is the token's own number
        ids = torch.tensor(feature["input_ids"], dtype=torch.float32)
        put(ids[None, :, None].expand(1, -1, 5), [row], encoded, places["a"], answers)
        seen[encoded.text[row]] += len(places["a"][row])
    vocabulary = tiny_tokenizer().get_vocab()
    for text, answer, count in zip(split.texts, answers, seen, strict=True):
        words = text.split()
        assert count == len(words)
        assert answer[:, 0].tolist() == [vocabulary[word] for word in words]


def test_a_word_s_logits_may_be_shrunk():
    split = names(train=1).split("train")
    assert split.words is not None
    encoded = encode(split.texts, tiny_tokenizer(), max_length=16, windows=True, offsets=True)
    answers = [torch.zeros(len(split.words[0]))]
    logits = torch.rand(1, encoded.lengths[0], 5)
    places = places_of(encoded, {"a": split.words})["a"]
    put(logits, [0], encoded, places, answers, shrink=lambda chosen: chosen.argmax(-1).float())
    assert answers[0].tolist() == logits[0, 1:-1].argmax(-1).tolist()


def test_a_text_has_the_answer_of_its_first_window():
    texts = ["the film is good and the film is bad", "bad"]
    encoded = encode(texts, tiny_tokenizer(), max_length=6, windows=True)
    answers = blank(("no", "yes"), None, 2)
    logits = torch.arange(2.0 * len(encoded.features)).view(-1, 2)
    put(logits, list(range(len(encoded.features))), encoded, None, answers)
    assert answers[0].tolist() == [0.0, 1.0]
    assert torch.equal(answers[1], logits[-1])


@pytest.mark.parametrize(("labels", "empty"), [(TAGS, 0), (("PER", "O"), 1), (("a", "b"), 0)])
def test_a_word_that_no_window_has_is_outside(labels: tuple[str, ...], empty: int):
    (answer,) = blank(labels, [[(0, 1), (2, 3)]], 1)
    assert answer.argmax(-1).tolist() == [empty, empty]


def test_guesses():
    logits = torch.tensor([0.2, -0.1, 0.3])
    assert guess(logits, "classification") == 2
    assert guess(logits, "multi_label") == [1, 0, 1]
    assert guess(logits[:1], "regression") == pytest.approx(0.2)
    assert guess(torch.eye(3), "classification") == [0, 1, 2]
