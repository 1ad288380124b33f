# pyright: reportGeneralTypeIssues=false, reportOptionalIterable=false, reportTypedDictNotRequiredAccess=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false

"""A tag for every word."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.files import jsonl, put

from lamina.errors import DataError, UnknownNameError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.tasks.token_classification import spans_of_tags
from lamina.tasks.words import join, word_spans

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "token_classification"
KIND = kind_of(TOKEN)
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def test_words_and_tags_from_jsonl(tmp_path: Path):
    rows = [{"tokens": ["EU", "rejects", "a"], "tags": ["I-ORG", "O", "O"]}, {"tokens": [], "tags": []}]
    path = jsonl(tmp_path / "t.jsonl", rows)
    task = Task.from_files(TOKEN, train=path, validation=path, text="tokens", label="tags")
    assert (task.labels, task.metrics) == (("B-ORG", "I-ORG", "O"), ("span_f1", "accuracy", "f1"))
    train = task.split("train")
    assert train.texts == ("EU rejects a", "")
    assert train.labels == ((0, 2, 2), ())
    assert train.words == (((0, 2), (3, 10), (11, 12)), ())


def test_tags_as_ids(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": ["EU", "a"], "tags": [1, 0]}])
    task = Task.from_files(TOKEN, test=path, text="tokens", label="tags", labels=("O", "B-ORG", "I-ORG"))
    assert task.split("test").labels == ((1, 0),)


def test_the_meaning_of_ids_of_tags_is_said_if_the_labels_are_sorted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": ["EU"], "tags": [-100]}, {"tokens": ["EU", "a"], "tags": [-100, 2]}])
    how: dict[str, Any] = {"test": path, "text": "tokens", "label": "tags"}
    Task.from_files(TOKEN, labels=("O", "B-ORG", "I-ORG"), **how)
    assert not caplog.messages
    Task.from_files(TOKEN, labels=("B-ORG", "I-ORG", "O"), **how)
    assert "class ids in column 'tags' are read as 0 = B-ORG, 1 = I-ORG, 2 = O." in caplog.text


def test_tags_that_mark_no_spans(tmp_path: Path):
    path = put(tmp_path / "pos.conll", "the DT\ncat NN\n\nsat VB\nI PRP\n")
    task = Task.from_files(TOKEN, train=path, validation=path)
    assert (task.labels, task.metric) == (("DT", "NN", "PRP", "VB"), "accuracy")
    assert task.split("train").labels == ((0, 1), (3, 2))
    with pytest.raises(UnknownNameError, match="unknown metric 'span_f1'"):
        Task.from_files(TOKEN, train=path, metric="span_f1")


def test_tags_without_b_stay_when_so_named(tmp_path: Path):
    path = put(tmp_path / "t.conll", "EU I-ORG\nof O\n")
    task = Task.from_files(TOKEN, test=path, labels=("O", "I-ORG"))
    assert task.split("test").labels == ((1, 0),)


def test_conll_columns_by_number(tmp_path: Path):
    path = put(tmp_path / "eng.train", "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n")
    task = Task.from_files(TOKEN, train=path, validation=path, label=1)
    assert task.labels == ("NNP", "VBZ")
    task = Task.from_files(TOKEN, train=path, validation=path, label="-2")
    assert task.labels == ("B-NP", "B-VP", "I-NP", "I-VP", "O")


def test_unknown_tag_names_its_line(tmp_path: Path):
    train = put(tmp_path / "a.conll", "x B-A\n")
    dev = put(tmp_path / "b.conll", "x B-A\n\nx O\ny I-B\n")
    with pytest.raises(DataError, match=r"b\.conll row 4 has label 'B-B'; the labels are: B-A, I-A, O"):
        Task.from_files(TOKEN, train=train, validation=dev)


def test_words_and_tags_of_different_length(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a", "b"], "tags": ["O"]}])
    with pytest.raises(DataError, match="row 2 has 2 words and 1 tags") as info:
        Task.from_files(TOKEN, train=path, text="tokens", label="tags")
    assert info.value.row == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"a": ["text"], "b": "O"}, "row 1 has no list in column 'b'"),
        ({"a": 3, "b": ["O"]}, "row 1 has no list in column 'a'"),
        ({"a": "text", "b": ["O"]}, "row 1 has the span 'O' in column 'b', which is not in its text"),
    ],
)
def test_token_tasks_need_lists(tmp_path: Path, row: dict[str, Any], problem: str):
    with pytest.raises(DataError, match=problem):
        Task.from_files(TOKEN, train=jsonl(tmp_path / "t.jsonl", [row]), text="a", label="b")


def test_files_of_columns_have_no_pairs(tmp_path: Path):
    with pytest.raises(DataError, match="has no column 'b'; its columns are: 0, 1"):
        Task.from_files(TOKEN, train=put(tmp_path / "a.conll", "x O\n"), text_pair="b")


# From examples to scores


def task(rows: list[tuple[str, str]], labels: tuple[str, ...] = TAGS) -> Task:
    """Words and tags, with spaces between them."""
    joined = [join(words.split()) for words, _ in rows]
    tags = [tuple(labels.index(tag) for tag in tags.split()) for _, tags in rows]
    split = Split.of([text for text, _ in joined], tags, [spans for _, spans in joined])
    metrics = KIND.metrics("classification", labels)
    return Task(kind_of(TOKEN), "classification", labels, metrics[0], metrics, {"validation": split}, "it")


ROWS = [("anna ben was the good film in paris and oslo", "B-PER B-PER O O O O O B-LOC O B-LOC"), ("the film", "O O")]


def test_a_tag_goes_to_one_token_of_one_window(words: Any):
    about = task([(" ".join("abcdefghi"), " ".join("RSTUVWXYZ")), ("j k", "Y Z")], tuple("RSTUVWXYZ"))
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="train", max_length=6, stride=2))
    targets = KIND.targets(about, split, inputs)
    assert targets is not None
    assert KIND.truncated(inputs) == 0
    found = targets.tensor(range(len(inputs.lengths)))
    assert sorted(found[found != -100].tolist()) == sorted([*range(9), 7, 8])
    assert targets.tensor([len(inputs.lengths) - 1]).tolist() == [[-100, 7, 8, -100]]


def test_labels_of_tokens_are_in_arrow_and_on_disk_once_they_are_many(words: Any, monkeypatch: pytest.MonkeyPatch):
    about = task(ROWS)
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="train", max_length=6))
    small = KIND.targets(about, split, inputs)
    monkeypatch.setattr("lamina.data.arrow.SPILL_BYTES", 0)
    large = KIND.targets(about, split, inputs)
    assert not small._rows.cache_files
    assert len(large._rows.cache_files) == 1
    rows = [2, 0, 1]
    assert torch.equal(small.tensor(rows), large.tensor(rows))
    assert (small.tensor(rows) != -100).any()


@pytest.mark.parametrize("max_length", [6, 32])
def test_logits_of_the_right_tags_score_one(words: Any, max_length: int):
    about = task(ROWS)
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="validation", max_length=max_length))
    targets = KIND.targets(about, split, inputs)
    assert targets is not None
    results = KIND.results(about, split, inputs)
    for row in range(len(inputs.lengths)):
        wanted = targets.tensor([row])
        results.add([row], torch.nn.functional.one_hot(wanted.clamp(min=0), 5) * (wanted != -100).unsqueeze(-1) * 3.0)
    assert results.scores(about.metrics) == {"span_f1": 1.0, "accuracy": 1.0, "f1": 1.0}
    assert [(row["label"], row["f1"], row["count"]) for row in results.per_class()[:3]] == [
        ("LOC", 1.0, 2),
        ("PER", 1.0, 2),
        ("micro avg", 1.0, 4),
    ]
    assert results.errors(3) == []
    spans, none = results.predictions()
    assert [(span["label"], span["text"]) for span in spans] == [
        ("PER", "anna"),
        ("PER", "ben"),
        ("LOC", "paris"),
        ("LOC", "oslo"),
    ]
    assert none == []


@pytest.mark.parametrize("max_length", [6, 32])
def test_spans_in_error_have_their_places_and_scores(words: Any, max_length: int):
    """In one window or over several; the most confident text first, its confidence that of its surest error."""
    about = task([*ROWS, ("oslo was good", "B-LOC O O")])
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="validation", max_length=max_length))
    said = task(
        [
            ("anna ben was the good film in paris and oslo", "B-PER I-PER O O O O O O B-PER B-LOC"),
            ("the film", "O O"),
            ("oslo was good", "B-PER O O"),
        ]
    )
    given = KIND.targets(said, said.split("validation"), inputs)
    assert given is not None
    results, sure = KIND.results(about, split, inputs), {0: 2.0, 1: 9.0, 2: 4.0}  # logit of what is said, per text
    for row in range(len(inputs.lengths)):
        wanted, logit = given.tensor([row]), sure[int(inputs.encoded.text[row])]
        results.add([row], torch.nn.functional.one_hot(wanted.clamp(min=0), 5) * (wanted != -100).unsqueeze(-1) * logit)
    first, second = results.errors(9)
    share = {logit: pytest.approx(math.exp(logit) / (math.exp(logit) + 4)) for logit in (2.0, 4.0)}
    assert (first["row"], first["text"], first["confidence"]) == (2, "oslo was good", share[4.0])
    assert first["true"] == [
        {"start": 0, "end": 4, "label": "LOC", "text": "oslo", "score": share[4.0], "error": "wrong"}
    ]
    assert [(span["label"], span["error"]) for span in first["predicted"]] == [("PER", "wrong")]
    assert (second["row"], second["confidence"]) == (0, share[2.0])
    assert [(span["text"], span["label"], span["error"]) for span in second["true"]] == [
        ("anna", "PER", "wrong"),
        ("ben", "PER", "wrong"),
        ("paris", "LOC", "missed"),
    ]
    assert [(span["text"], span["label"], span["error"]) for span in second["predicted"]] == [
        ("anna ben", "PER", "wrong"),
        ("and", "PER", "extra"),
    ]
    assert results.errors(1) == [first]


def test_tags_that_differ_without_a_span_in_error(words: Any):
    """I- after O begins a span as B- does."""
    about = task([("anna was", "B-PER O")])
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="validation", max_length=8))
    results = KIND.results(about, split, inputs)
    results.add([0], torch.eye(5)[torch.tensor([[0, 2, 0, 0]])])
    assert results.scores(("span_f1", "accuracy")) == {"span_f1": 1.0, "accuracy": 0.5}
    assert results.errors(9) == []


def test_tags_without_spans_are_scored_word_by_word(words: Any):
    about = task([("the film", "DT NN"), ("good", "JJ")], ("DT", "NN", "JJ"))
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="validation", max_length=8))
    results = KIND.results(about, split, inputs)
    assert results.scores(("accuracy",)) == {"accuracy": pytest.approx(1 / 3)}  # nothing was added: the first label
    results.add([0, 1], torch.eye(3)[torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]])])
    assert results.scores(("accuracy",)) == {"accuracy": pytest.approx(2 / 3)}
    assert [(row["label"], row["recall"]) for row in results.per_class()[:3]] == [("DT", 1.0), ("NN", 1.0), ("JJ", 0.0)]
    (row,) = results.errors(9)
    assert (row["row"], row["text"], row["confidence"]) == (1, "good", pytest.approx(torch.e / (torch.e + 2)))
    assert [(span["label"], span["error"]) for span in (*row["true"], *row["predicted"])] == [
        ("JJ", "wrong"),
        ("NN", "wrong"),
    ]


def test_a_word_without_a_token_is_outside(words: Any):
    split = Split.of(["the  film"], [(0, 0, 0)], [((0, 3), (4, 4), (5, 9))])
    about = task([], ("B-PER", "I-PER", "O"))  # as labels that are read off the data are sorted
    inputs = KIND.encode(split, words, EncodeOptions(part="validation", max_length=8))
    results = KIND.results(about, split, inputs)
    results.add([0], torch.eye(3)[torch.full((1, int(inputs.lengths[0])), 0)])
    assert results.scores(("accuracy",)) == {"accuracy": pytest.approx(2 / 3)}


def test_classes_of_subsamples():
    """As the papers count: the classes are types of spans, of which CoNLL-2003 has four; else tags."""
    split = Split.of(["a"] * 4, [(0, 0), (1, 2, 0, 1), (3, 2), ()])
    assert KIND.row_classes(task([]), split) == (("PER", "LOC"), [(), (0,), (0, 1), ()])
    conll = ("O", *(f"{mark}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for mark in "BI"))
    assert len(KIND.row_classes(task([], conll), Split.of([]))[0]) == 4
    split = Split.of(["a"] * 2, [(1, 0, 1), (0,)])
    assert KIND.row_classes(task([], ("DT", "NN")), split) == (("DT", "NN"), [(0, 1), (0,)])


# Answers


def tagged(words: Any, text: str, tags: list[str], labels: tuple[str, ...] = TAGS) -> list[tuple[str, str]]:
    split = KIND.examples([text], words)
    assert len((split.words or ())[0]) == len(tags)
    about = task([], labels)
    inputs = KIND.encode(split, words, EncodeOptions(part="predict", max_length=32))
    logits = torch.zeros(1, int(inputs.lengths[0]), len(labels))
    for at, tag in enumerate(tags):
        logits[0, at + 1, labels.index(tag)] = 5.0
    results = KIND.answers(about, split, inputs, words)
    results.add([0], logits)
    (answer,) = results.predictions()
    assert all(text[span["start"] : span["end"]] == span["text"] for span in answer)
    assert all(0 < span["score"] <= 1 for span in answer)
    return [(span["label"], span["text"]) for span in answer]


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        (
            "Anna Maria went to New  York .",
            ["B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O"],
            [("PER", "Anna Maria"), ("LOC", "New  York")],
        ),
        ("anna ben", ["B-PER", "B-PER"], [("PER", "anna"), ("PER", "ben")]),
        ("x anna", ["O", "I-PER"], [("PER", "anna")]),
        ("anna oslo", ["B-PER", "I-LOC"], [("PER", "anna"), ("LOC", "oslo")]),
        ("anna x ben", ["B-PER", "O", "I-PER"], [("PER", "anna"), ("PER", "ben")]),
        ("", [], []),
    ],
)
def test_spans(words: Any, text: str, tags: list[str], expected: list[tuple[str, str]]):
    assert tagged(words, text, tags) == expected


def test_labels_that_mark_no_spans_label_every_word(words: Any):
    assert tagged(words, "a cat", ["DET", "NOUN"], ("DET", "NOUN")) == [("DET", "a"), ("NOUN", "cat")]
    assert tagged(words, "a a", ["DET", "DET"], ("DET", "NOUN")) == [("DET", "a"), ("DET", "a")]


def test_of_a_pair_the_second_text_has_the_words(words: Any):
    split = KIND.examples([("a b", "a c")], words)
    assert split.texts == (("a b", "a c"),)
    assert split.words == (((0, 1), (2, 3)),)


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
        ("a\u00a0b\u200bc", ["a", "b", "c"]),
    ],
)
def test_words(text: str, words: list[str]):
    assert [text[start:end] for start, end in word_spans(text)] == words


@pytest.mark.parametrize("marks", [("S", "E", "IOBES"), ("U", "L", "BILOU")])
def test_a_tag_that_ends_a_span_is_joined_with_nothing_after_it(marks: tuple[str, str, str]):
    single, last, _ = marks
    labels = ("O", "B-x", "I-x", f"{last}-x", f"{single}-x")
    text, words = "a b c d", [(0, 1), (2, 3), (4, 5), (6, 7)]

    def found(*tags: int) -> list[str]:
        return [span["text"] for span in spans_of_tags(tags, [1.0] * 4, labels, text, words)]

    assert found(1, 3, 2, 3) == ["a b", "c d"]
    assert found(4, 2, 3, 0) == ["a", "b c"]
    assert found(1, 2, 3, 3) == ["a b c", "d"]
