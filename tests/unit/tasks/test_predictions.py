"""From logits to answers."""

from __future__ import annotations

import pytest
import torch
from tests.support.masked import VOCABULARY, masking_tokenizer

from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.predictions import best_tokens, decode, fill, mask_spans, word_spans

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def test_classification():
    answer = decode(torch.tensor([0.0, 2.0, 1.0]), SequenceClassification(("a", "b", "c")), "x", [])
    assert answer["label"] == "b"
    assert answer["score"] == answer["probabilities"]["b"] == pytest.approx(0.6652, abs=1e-4)
    assert sum(answer["probabilities"].values()) == pytest.approx(1)


def test_regression():
    assert decode(torch.tensor([2.5]), SequenceClassification(("s",), problem_type="regression"), "x", []) == {
        "value": 2.5
    }


def test_multi_label():
    answer = decode(
        torch.tensor([1.0, -1.0, 3.0]), SequenceClassification(("a", "b", "c"), problem_type="multi_label"), "x", []
    )
    assert answer["labels"] == ["a", "c"]
    assert answer["probabilities"] == pytest.approx({"a": 0.7311, "b": 0.2689, "c": 0.9526}, abs=1e-4)


def tagged(text: str, tags: list[str], labels: tuple[str, ...] = TAGS) -> list[tuple[str, str]]:
    words = word_spans(text)
    assert len(words) == len(tags)
    logits = torch.nn.functional.one_hot(torch.tensor([labels.index(tag) for tag in tags]), len(labels)) * 5.0
    answer = decode(logits, TokenClassification(labels), text, words)
    assert all(text[one["start"] : one["end"]] == one["text"] for one in answer)
    assert all(0 < one["score"] <= 1 for one in answer)
    return [(one["label"], one["text"]) for one in answer]


def test_entities():
    text = "Anna Maria went to New  York ."
    assert tagged(text, ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"]) == [
        ("PER", "Anna Maria"),
        ("LOC", "New  York"),
    ]


def test_two_entities_side_by_side():
    assert tagged("anna ben", ["B-PER", "B-PER"]) == [("PER", "anna"), ("PER", "ben")]


def test_an_inside_tag_without_a_beginning_begins():
    assert tagged("x anna", ["O", "I-PER"]) == [("PER", "anna")]
    assert tagged("anna oslo", ["B-PER", "I-LOC"]) == [("PER", "anna"), ("LOC", "oslo")]
    assert tagged("anna x ben", ["B-PER", "O", "I-PER"]) == [("PER", "anna"), ("PER", "ben")]


def test_labels_that_mark_no_spans_label_every_word():
    assert tagged("a cat", ["DET", "NOUN"], ("DET", "NOUN")) == [("DET", "a"), ("NOUN", "cat")]
    assert tagged("a a", ["DET", "DET"], ("DET", "NOUN")) == [("DET", "a"), ("DET", "a")]


def test_no_words_are_no_entities():
    assert decode(torch.zeros(0, 5), TokenClassification(TAGS), "", []) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \n\t ", []),
        ("Hello, world!", ["Hello", ",", "world", "!"]),
        ("U.N. on 1996-08-22 at 7:30", ["U.N", ".", "on", "1996-08-22", "at", "7:30"]),
        ("don't mother-in-law 3.14 a/b", ["don't", "mother-in-law", "3.14", "a/b"]),
        ("-a- 'b'", ["-", "a", "-", "'", "b", "'"]),
        ("東京に行く", ["東", "京", "に", "行", "く"]),
        ("IBM東京", ["IBM", "東", "京"]),
        ("שלום עולם", ["שלום", "עולם"]),
        ("مرحبا", ["مرحبا"]),
        ("ok 😀👍!", ["ok", "😀", "👍", "!"]),
        ("a\u00a0b\u200bc", ["a", "b", "\u200b", "c"]),
    ],
)
def test_words(text: str, words: list[str]):
    assert [text[start:end] for start, end in word_spans(text)] == words


# Mask tokens


def test_where_the_mask_tokens_are():
    assert mask_spans("a [MASK] b[MASK].[mask]", "[MASK]") == [(2, 8), (10, 16)]
    assert mask_spans("a", "[MASK]") == []


def test_the_likeliest_tokens_come_first():
    logits = torch.zeros(2, len(VOCABULARY))
    logits[0, 7], logits[0, 9], logits[1, 20] = 5.0, 6.0, 3.0
    best = best_tokens(logits.bfloat16())
    assert best.shape == (2, 5, 2)
    found = fill(best, [(0, 6), (8, 14)], masking_tokenizer())
    assert [(one["start"], one["end"]) for one in found] == [(0, 6), (8, 14)]
    assert [one["token"] for one in found[0]["candidates"][:2]] == [VOCABULARY[9], VOCABULARY[7]]
    assert found[1]["candidates"][0]["token"] == VOCABULARY[20]
    shares = logits[0].softmax(-1)[[9, 7]].tolist()
    assert [one["score"] for one in found[0]["candidates"][:2]] == pytest.approx(shares, abs=1e-6)
    assert all(len(one["candidates"]) == 5 for one in found)


def test_a_small_vocabulary_has_fewer():
    assert best_tokens(torch.zeros(1, 3)).shape == (1, 3, 2)
    assert fill(torch.zeros(0, 3, 2), [], masking_tokenizer()) == []
