"""Studies of word tags over pairs of texts, whose second text alone has tagged words."""

from __future__ import annotations

import json

import pytest
from tests.support.stored import tiny_model, tiny_tokenizer

from lamina.studies.probing.controls import baseline_predictions, control_task
from lamina.studies.probing.error_analysis import errors, without_span
from lamina.tasks.task import Task

QUERY = "is the film good ?"


@pytest.fixture(scope="module")
def task() -> Task:
    replies = ("the film is slow", "paris is fun and very good", "anna is bad", "good")
    rows = [
        {"query": QUERY, "reply": reply, "wrong": [word for word in ("slow", "bad") if word in reply]}
        for reply in replies * 3
    ]
    parts = {"train": rows, "validation": rows}
    return Task.from_dataset("token_classification", parts, text="query", text_pair="reply", label="wrong")


def test_a_control_has_a_label_per_word_of_the_second_text(task):
    labels: dict[str, set[int]] = {}
    for seed in range(8):
        split, seen = control_task(task, ("train",), seed).split("train"), dict[str, int]()
        for (_, reply), row in zip(split.texts, split.labels, strict=True):
            for word, label in zip(reply.split(), row, strict=True):
                assert seen.setdefault(word, label) == label
                labels.setdefault(word, set()).add(label)
    assert len(labels) == 11
    assert len({tuple(sorted(of_word)) for of_word in labels.values()}) > 1  # words do not share one label
    assert any(len(of_word) > 1 for of_word in labels.values())


def test_baselines_read_the_words_of_the_second_text(task):
    predictions = dict(baseline_predictions(task, "validation"))
    assert predictions["bag_of_words"] == list(task.split("validation").labels)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_words_are_removed_from_the_second_text_only(task, share: float):
    split, shortened = task.split("train"), without_span(task, "train", share, seed=0)
    pairs = zip(split.texts, shortened.texts, shortened.words or (), shortened.labels, strict=True)
    for (_, reply), (query, left), spans, tags in pairs:
        assert query == QUERY
        count = len(reply.split())
        assert len(left.split()) == count - min(round(share * count), count - 1)
        assert [left[start:end] for start, end in spans] == left.split()
        assert [task.labels[tag] != "O" for tag in tags] == [word in ("slow", "bad") for word in left.split()]
    assert share or shortened == split


def test_a_study_of_errors_lists_spans_of_the_second_text(task):
    model = tiny_model(hidden_size=16, num_hidden_layers=2)
    study = errors(model, task, processor=tiny_tokenizer(), layers=[1], epochs=1, deleted=[0.5])
    wrong = study.table.query("measure == 'error'").to_dict("records")
    assert wrong
    for row in wrong:
        query, reply = json.loads(row["text"])
        assert query == QUERY
        for span in json.loads(row["true"]) + json.loads(row["predicted"]):
            assert reply[span["start"] : span["end"]] == span["text"]
