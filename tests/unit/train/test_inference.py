"""Scoring and predicting: one answer per text, in order, whatever the text."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.unit.train.made import (
    PEOPLE,
    PLACES,
    length_of_text,
    names,
    reader,
    several,
    tiny_bank,
    tiny_model,
    tiny_tokenizer,
    train,
    yes_no,
)

from lamina.bank import Reader, ReaderBank
from lamina.data.task import Task
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.token_classification import TokenClassification
from lamina.train import evaluate, predict
from lamina.train.inference import guess

STRANGE = {
    "empty": "",
    "spaces": "  \t\n ",
    "emoji": "anna 😀👍🏽 went to paris 🇫🇷 !",
    "right to left": "שלום anna مرحبا paris",
    "unknown": "qqq zzz",
    "accents": "Ána e\u0301te\u0301 — “oslo”…",
    "wide": "東京 ben 東京",
    "nulls": "anna\x00 \u200b\ufeff paris",
    "one long word": "a" * 5000,
    "new lines": "anna\n\nben\r\npARIS",
}


@functools.cache
def trained() -> tuple[ReaderBank, dict[str, Task]]:
    tasks = {"mood": yes_no(), "who": names(train=80), "words": length_of_text(), "what": several()}
    bank = tiny_bank(
        {name: reader(task, seed=at, layers="all", dim=16) for at, (name, task) in enumerate(tasks.items())}
    )
    train(bank, tasks, epochs=16, batch_size=8, learning_rate=0.03)
    return bank, tasks


def test_every_kind_of_answer():
    bank, _ = trained()
    (answer,) = predict(bank, ["anna went to paris"])
    assert list(answer) == ["mood", "who", "words", "what"]
    assert answer["mood"]["label"] in ("no", "yes")
    assert sum(answer["mood"]["probabilities"].values()) == pytest.approx(1)
    assert isinstance(answer["words"]["value"], float)
    assert set(answer["what"]["probabilities"]) == {"who", "where", "how"}
    assert isinstance(answer["who"], list)


def test_entities_stand_where_they_are_said_to_stand():
    bank, _ = trained()
    texts = ["We saw  anna,\tben and the film in Paris.", "oslo", "the film", "rome oslo\nis not rome"]
    found = [[(one["label"], one["text"]) for one in answer["who"]] for answer in predict(bank, texts)]
    for text, answer in zip(texts, predict(bank, texts), strict=True):
        assert all(text[one["start"] : one["end"]] == one["text"] for one in answer["who"])
    known = dict.fromkeys(PEOPLE, "PER") | dict.fromkeys(PLACES, "LOC")
    said = {text.lower(): label for row in found for label, text in row}
    assert sum(known.get(text) == label for text, label in said.items()) >= 3
    assert found[2] == []


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_texts(kind: str):
    bank, _ = trained()
    text = STRANGE[kind]
    alone, beside = predict(bank, [text])[0], predict(bank, ["anna went", text, "the film is good and fun"])[1]
    for answer in (alone, beside):
        assert answer["mood"]["score"] > 0
        assert all(text[one["start"] : one["end"]] == one["text"] for one in answer["who"])
        assert all(one["text"].strip() for one in answer["who"])
    assert beside["words"]["value"] == pytest.approx(alone["words"]["value"], abs=1e-5)
    assert [(one["start"], one["end"]) for one in alone["who"]] == [(one["start"], one["end"]) for one in beside["who"]]


def test_a_very_long_text_is_read_to_its_end():
    bank, _ = trained()
    text = "the film is slow " * 5882 + "and oslo"
    assert len(text) > 100_000
    (answer,) = predict(bank, [text], readers=["who"])
    assert all(text[one["start"] : one["end"]] == one["text"] for one in answer["who"])
    assert answer["who"][-1]["end"] == len(text)


def test_windows_and_a_whole_text_agree_on_words_in_the_middle():
    """The same words at any place in a long text are found; none is lost where windows meet."""
    bank, _ = trained()
    once = predict(bank, ["the oslo film"], readers=["who"])[0]["who"]
    assert [one["text"] for one in once] == ["oslo"]
    text = " ".join(["the oslo film"] * 60)
    found = predict(bank, [text], readers=["who"])[0]["who"]
    assert len({one["start"] for one in found}) == len(found)
    assert len(found) >= 50


def test_answers_come_in_the_order_of_the_texts():
    bank, tasks = trained()
    texts = list(tasks["mood"].split("validation").texts)
    whole = predict(bank, texts, batch_size=3)
    for text, answer in list(zip(texts, whole, strict=True))[::5]:
        single = predict(bank, [text])[0]
        assert answer["words"]["value"] == pytest.approx(single["words"]["value"], abs=1e-5)
        assert answer["mood"]["probabilities"] == pytest.approx(single["mood"]["probabilities"], abs=1e-5)


def test_only_the_readers_asked_for_answer():
    bank, _ = trained()
    assert [list(answer) for answer in predict(bank, ["a", "b"], readers=["what", "mood"])] == [["what", "mood"]] * 2


def test_no_texts_are_no_answers():
    bank, _ = trained()
    assert predict(bank, []) == []


def test_pairs_of_texts():
    bank = tiny_bank({"r": reader()})
    texts = [("the film", "is good"), ("is good", "the film"), ("anna", "")]
    answers = predict(bank, texts)
    assert [list(answer) for answer in answers] == [["r"]] * 3
    assert answers[0]["r"]["probabilities"] != answers[1]["r"]["probabilities"]
    with torch.no_grad():
        inputs = tiny_tokenizer()("the film", "is good", return_tensors="pt")
        expected = bank.eval()(
            **{key: inputs[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in inputs}
        )
    assert answers[0]["r"]["probabilities"]["yes"] == pytest.approx(
        expected["r"].logits.softmax(-1)[0, 1].item(), abs=1e-5
    )


@pytest.mark.parametrize("training", [True, False])
def test_predicting_leaves_the_bank_as_it_was(training: bool):
    bank = tiny_bank({"r": reader(dropout=0.5)}).train(training)
    one, other = predict(bank, ["the film"]), predict(bank, ["the film"])
    assert one == other
    assert bank.training is training


def test_texts_padded_on_the_left_get_the_same_answers():
    """A tokenizer's padding side is where tokens are put, and must not be seen in what comes out."""
    from tests.support.tiny import FAMILIES

    model = FAMILIES["gpt2"].build()
    answers = []
    for side in ("right", "left"):
        bank = ReaderBank(model, tiny_tokenizer(side))
        bank.add("text", reader())
        bank.add("word", Reader(Mean(), TokenClassification(("x", "y"), feedforward=8, attention_heads=2)))
        answers.append(predict(bank, ["anna", "the film is good", "the film is not very good , we saw it"]))
    for right, left in zip(*answers, strict=True):
        assert left["text"]["probabilities"] == pytest.approx(right["text"]["probabilities"], abs=1e-5)
        assert [one["text"] for one in left["word"]] == [one["text"] for one in right["word"]]
        assert [one["score"] for one in left["word"]] == pytest.approx(
            [one["score"] for one in right["word"]], abs=1e-5
        )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "predict: got one text; a list of texts is needed. Put it in a list"),
        (["a", 3], "predict: entry 1 is int; all must be texts, or all pairs of texts"),
        (["a", ("a", "b")], "predict: entry 1 is tuple; all must be texts"),
        ([("a", "b"), "a"], "predict: entry 1 is str; all must be texts"),
        ([("a", "b", "c")], "predict: entry 0 is tuple"),
        ([None], "predict: entry 0 is NoneType"),
    ],
)
def test_what_is_no_list_of_texts(texts: Any, message: str):
    from lamina.train import inference

    bank, _ = trained()
    call = getattr(inference.predict, "__wrapped__", inference.predict)  # as outside these tests: no type checker
    with pytest.raises(ConfigError, match=message):
        call(bank, texts, readers=["mood"])


def test_what_cannot_be_predicted():
    bank, _ = trained()
    with pytest.raises(
        UnknownNameError, match=r"unknown reader 'mod'; known: mood, who, words, what. Did you mean 'mood'"
    ):
        predict(bank, ["a"], readers=["mod"])
    with pytest.raises(ConfigError, match="predict: there is no reader; at least one is needed"):
        predict(bank, ["a"], readers=[])
    with pytest.raises(ConfigError, match="predict: the bank has no processor"):
        predict(ReaderBank(tiny_model()), ["a"])
    with pytest.raises(ConfigError, match="predict: reader 'who' reads single texts, and pairs were given"):
        predict(bank, [("a", "b")])


# Scores


def test_scores_of_a_part():
    bank, tasks = trained()
    found = evaluate(bank, tasks, split="train")
    assert list(found) == list(tasks)
    assert found["mood"]["accuracy"] > 0.8
    assert list(found["mood"]) == ["accuracy", "f1", "mcc"]


def test_scores_are_those_of_the_predictions():
    bank, tasks = trained()
    split = tasks["mood"].split("validation")
    answers = predict(bank, list(split.texts))
    right = [
        answer["mood"]["label"] == ("no", "yes")[label] for answer, label in zip(answers, split.labels, strict=True)
    ]
    assert evaluate(bank, {"mood": tasks["mood"]})["mood"]["accuracy"] == pytest.approx(sum(right) / len(right))


def test_scores_do_not_depend_on_the_size_of_a_batch():
    bank, tasks = trained()
    one, other = evaluate(bank, tasks, batch_size=3), evaluate(bank, tasks, batch_size=64)
    for name in tasks:
        assert one[name] == pytest.approx(other[name], abs=1e-5)


def test_rows_per_class():
    bank, tasks = trained()
    found = evaluate(bank, tasks, per_class=True)
    assert [row["label"] for row in found["mood"]["per_class"]] == ["no", "yes"]
    assert [row["label"] for row in found["who"]["per_class"]] == ["LOC", "PER"]
    assert sum(row["count"] for row in found["mood"]["per_class"]) == 20


def test_scores_of_a_part_or_reader_there_is_not():
    bank, tasks = trained()
    with pytest.raises(UnknownNameError, match="unknown split 'test'; known: train, validation"):
        evaluate(bank, tasks, split="test")
    with pytest.raises(UnknownNameError, match="tasks: unknown reader 'mod'"):
        evaluate(bank, {"mod": tasks["mood"]})


def test_guesses():
    assert guess(torch.tensor([1.5]), "regression") == 1.5
    assert guess(torch.tensor([0.1, -0.1]), "multi_label") == [1, 0]
    assert guess(torch.tensor([0.1, 0.3]), "classification") == 1
    assert guess(torch.tensor([[0.1, 0.3], [2.0, 1.0]]), "classification") == [1, 0]
