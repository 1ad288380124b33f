"""Spans of characters as labels, of texts and of replies to prompts, beside a label of the whole reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.files import jsonl
from tests.support.training import names, tiny_model, tiny_tokenizer

from lamina import evaluate, fit, predict
from lamina.bank import Reader, ReaderBank
from lamina.data.encode import encode
from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.fusion.concat import Concat
from lamina.fusion.pooled_layers import PooledLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.base import EncodeOptions
from lamina.tasks.task import Task
from lamina.train.groups import group_tasks

if TYPE_CHECKING:
    from pathlib import Path

TOKENS, TEXTS = "token_classification", "sequence_classification"
TEXT = "anna was very good and anna was fun"


def of(rows: list[dict[str, Any]], kind: str = TOKENS, **how: Any) -> Task:
    columns = {"text": "text", "label": "spans", "labels": None} | how
    return Task.from_dataset(kind, {"train": rows, "validation": rows}, **columns)


def tags(spans: Any, text: str = TEXT, **how: Any) -> list[str]:
    task = of([{"text": text, "spans": spans}], **how)
    return [task.labels[tag] for tag in task.split("train").labels[0]]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], "O O O O O O O O"),
        (["very good"], "O O B I O O O O"),
        ([" very good "], "O O B I O O O O"),
        (["anna"], "B O O O O B O O"),  # wherever it stands
        ([(9, 13), (14, 18)], "O O B B O O O O"),
        ([[10, 15]], "O O B I O O O O"),  # a character of a word is enough
        ([{"start": 0, "end": 8}], "B I O O O O O O"),
    ],
)
def test_words_in_a_span_are_tagged(spans: Any, expected: str):
    assert [tag[0] for tag in tags(spans)] == expected.split()


def test_what_spans_are_called():
    assert of([{"text": TEXT, "spans": ["anna"]}]).labels == ("B-span", "I-span", "O")
    assert of([{"text": TEXT, "spans": []}]).labels == ("B-span", "I-span", "O")
    named = [{"start": 0, "end": 4, "label": "PER"}, {"start": 14, "end": 18, "label": "MOOD"}]
    assert of([{"text": TEXT, "spans": named}]).labels == ("B-MOOD", "B-PER", "I-MOOD", "I-PER", "O")
    assert tags(["anna"], labels=["O", "B-WHO", "I-WHO"])[0] == "B-WHO"
    with pytest.raises(DataError, match=r"row 1 has label 'B-PER'; the labels are: O, B-X, I-X"):
        of([{"text": TEXT, "spans": named}], labels=["O", "B-X", "I-X"])


@pytest.mark.parametrize(
    ("spans", "problem"),
    [
        (["carla"], "row 1 has the span 'carla' in column 'spans', which is not in its text\\. .*'ignore'"),
        ([(3, 99)], r"row 1 has the span \(3, 99\) in column 'spans', which is not in its text"),
        ([(5, 5)], r"row 1 has the span \(5, 5\)"),
        ("anna", "row 1 has 'anna' in column 'spans'; spans are a list, which may be empty"),
        ("B-geo", "row 1 has 'B-geo' in column 'spans'; .* If a row is one word, write CoNLL"),
        (None, "row 1 has no label in column 'spans'"),
    ],
)
def test_spans_that_do_not_fit(spans: Any, problem: str):
    with pytest.raises(DataError, match=problem):
        of([{"text": TEXT, "spans": spans}])


def test_rows_whose_spans_are_not_in_their_text_can_stay_without_labels(caplog: pytest.LogCaptureFixture):
    rows = [{"text": TEXT, "spans": ["anna"]}, {"text": TEXT, "spans": ["anna", "carla"]}] * 4
    task = of(rows, missing_labels="ignore")
    assert (
        "4 of 8 rows have a span that is not in their text or that tags cannot mark; no word has a label (2, 4, 6, 8)"
        in caplog.text
    )
    assert set(task.split("train").labels[1]) == {-100}
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    bank.add("who", Reader(Concat(), TokenClassification(task.labels, encoder_layers=0)))
    fit(bank, {"who": task}, epochs=15, batch_size=8, learning_rate=0.02, progress=False)
    scores = evaluate(bank, {"who": task}, per_class=True, errors=5)["who"]
    assert (scores["span_f1"], scores["accuracy"]) == (1.0, 1.0)  # of those that have labels
    assert (scores["per_class"][0]["count"], scores["errors"]) == (8, [])
    with pytest.raises(UnknownNameError, match="unknown missing_labels 'ignore'; known: error, drop"):
        of(rows, TEXTS, missing_labels="ignore")


def test_files_hold_spans(tmp_path: Path):
    path = jsonl(tmp_path / "some.jsonl", [{"text": TEXT, "wrong": [[0, 4]]}] * 20)
    task = Task.from_files(TOKENS, train=path, text="text", label="wrong")
    assert len(task.split("train")) == 18


# Replies to prompts

ASKED = ["was it good", "was ben to rome", "is it"]
SAID = ["anna was very good", "ben was to paris . it was fun", "very slow"]
ROWS = [
    {"asked": asked, "said": said, "wrong": spans, "is_wrong": "yes" if spans else "no"}
    for asked, said, spans in zip(ASKED, SAID, [["very good"], ["paris"], []], strict=True)
]


def both(rows: list[dict[str, Any]]) -> dict[str, Task]:
    how: dict[str, Any] = {"text": "asked", "text_pair": "said"}
    return {"where": of(rows, label="wrong", **how), "whether": of(rows, TEXTS, label="is_wrong", **how)}


@pytest.mark.parametrize("max_length", [32, 12])
def test_the_words_of_the_reply_are_tagged_in_every_window(max_length: int):
    """With few tokens to a window, the reply is cut, and the prompt stands before every piece.

    A task on whole texts then reads pairs as it reads them alone: cut by the tokenizer. Else one pass serves both.
    """
    tokenizer, tasks = tiny_tokenizer(), both(ROWS)
    how = EncodeOptions(part="train", max_length=max_length)
    group, *apart = group_tasks(tasks, how, tokenizer)
    (alone,) = group_tasks({"whether": tasks["whether"]}, how, tokenizer)
    assert [other.names for other in apart] == [("whether",)] * (max_length == 12)
    assert all(
        other.inputs.batch(range(3))["input_ids"].equal(alone.inputs.batch(range(3))["input_ids"]) for other in apart
    )
    inputs: Any = group.inputs
    rows = range(len(inputs.lengths))
    batch, labels = inputs.batch(rows), group.labels(rows, None, group.names)
    assert (len(rows) > 3) is (max_length == 12)
    tagged: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for row, text in enumerate(inputs.encoded.text.tolist()):
        words = tokenizer.convert_ids_to_tokens(batch["input_ids"][row])
        assert " ".join(words).startswith(f"[CLS] {ASKED[text]} [SEP]")
        for word, tag in zip(words, labels["where"][row].tolist(), strict=True):
            if tag != -100:
                tagged[text].append(f"{word} {tasks['where'].labels[tag][0]}")
    assert [" ".join(line) for line in tagged.values()] == [
        "anna O was O very B good I",
        "ben O was O to O paris B . O it O was O fun O",
        "very O slow O",
    ]
    whole = apart[0] if apart else group
    assert whole.labels(range(3), None, ["whether"])["whether"].tolist() == [1, 1, 0]


def test_whole_texts_that_are_too_long_share_no_batch_with_their_windows():
    rows = [{"text": "anna was very good " * times, "spans": ["anna"], "mood": str(times)} for times in (1, 2, 9)]
    tasks = {"who": of(rows), "mood": of(rows, TEXTS, label="mood")}
    how = EncodeOptions(part="train", max_length=16)
    who, mood = group_tasks(tasks, how, tiny_tokenizer())
    assert (who.names, mood.names) == (("who",), ("mood",))
    assert len(who.inputs.lengths) > len(mood.inputs.lengths) == 3


def test_a_long_prompt_takes_half_of_a_window_and_is_counted():
    tokenizer = tiny_tokenizer()
    encoded = encode([("it " * 30, "was very good"), ("is it", "fun")], tokenizer, max_length=13, windows=True)
    ids = encoded.batch(range(len(encoded)), {})["input_ids"]
    assert encoded.truncated == 1
    assert len(encoded) == 2
    assert tokenizer.decode(ids[0]) == "[CLS] it it it it it [SEP] was very good [SEP]"
    with pytest.raises(ConfigError, match="stride is 5; windows hold 5 tokens of a text, so they can share 0 to 4"):
        encode([("it", "was")], tokenizer, max_length=13, windows=True, stride=5)


def readers(tasks: dict[str, Task]) -> ReaderBank:
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    bank.add("where", Reader(Concat(), TokenClassification(tasks["where"].labels, encoder_layers=0)))
    bank.add("whether", Reader(PooledLayers(over="second"), SequenceClassification(("no", "yes"), pooling="first")))
    return bank


@pytest.mark.long
def test_both_readers_learn_in_one_pass_and_answer_for_the_reply():
    tasks = both(ROWS * 4)
    bank = readers(tasks)
    fit(bank, tasks, epochs=40, batch_size=12, learning_rate=0.02, progress=False)
    scores = evaluate(bank, tasks)
    assert (scores["where"]["span_f1"], scores["whether"]["accuracy"]) == (1.0, 1.0)
    answers = predict(bank, list(zip(ASKED, SAID, strict=True)))
    found = [[(span["start"], span["end"], span["text"]) for span in answer["where"]] for answer in answers]
    assert found == [[(9, 18, "very good")], [(11, 16, "paris")], []]
    assert [answer["whether"]["label"] for answer in answers] == ["yes", "yes", "no"]


def test_an_empty_reply_has_no_spans():
    bank = readers(both(ROWS))
    assert predict(bank, [("is it", "")])[0]["where"] == []


def test_tags_of_listed_words_take_no_pairs():
    with pytest.raises(DataError, match="has no text in column 'said' but list"):
        of([{"asked": "it", "said": ["a", "b"], "spans": []}], text="asked", text_pair="said")
    assert names().split("train").words is not None
