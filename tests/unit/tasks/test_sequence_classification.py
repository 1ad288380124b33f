"""Classes, numbers and several labels of texts and pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.files import jsonl, tsv

from lamina.errors import ConfigError, DataError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE = "sequence_classification"
KIND = kind_of(SEQUENCE)


def test_classification_is_read_off_the_file(tmp_path: Path):
    train = tsv(tmp_path / "moods.tsv", ["good\tpos", "bad\tneg", "fine\tpos"])
    task = Task.from_files(SEQUENCE, train=train, validation=tsv(tmp_path / "dev.tsv", ["so\tneg"]))
    assert (task.kind, task.problem_type, task.labels, task.name) == (
        SEQUENCE,
        "classification",
        ("neg", "pos"),
        "moods",
    )
    assert (task.metric, task.metrics) == ("accuracy", ("accuracy", "mcc", "macro_f1"))
    assert task.split("train").texts == ("good", "bad", "fine")
    assert task.split("train").labels == (1, 0, 1)
    assert task.split("train").words is None
    assert task.split("validation").labels == (0,)


def test_numbers_sort_as_numbers(tmp_path: Path):
    task = Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", [f"a\t{i}" for i in range(12)] * 5))
    assert task.labels == tuple(map(str, range(12)))


@pytest.mark.parametrize("cells", [["0", "1", "2"], ["no", "yes", "maybe"]])
def test_labels_given_by_name_or_id(tmp_path: Path, cells: list[str]):
    rows = [f"a\t{cell}" for cell in cells]
    labels = ("no", "yes", "maybe")
    task = Task.from_files(
        SEQUENCE, train=tsv(tmp_path / "t.tsv", rows), test=tsv(tmp_path / "u.tsv", rows), labels=labels
    )
    assert task.labels == labels
    assert task.split("test").labels == (0, 1, 2)


def test_numeric_names_are_not_taken_as_ids(tmp_path: Path):
    task = Task.from_files(SEQUENCE, test=tsv(tmp_path / "t.tsv", ["a\t1", "a\t3"]), labels=("3", "1"))
    assert task.split("test").labels == (1, 0)


@pytest.mark.parametrize("cells", [("1", "3"), ("1.0", "3.00"), ("+1", "3.")])
@pytest.mark.parametrize("names", [("1.0", "2.0", "3.0"), ("1", "2", "3")])
def test_a_number_is_the_class_of_its_value_and_no_id(tmp_path: Path, names: tuple[str, ...], cells: tuple[str, ...]):
    train, how = (
        tsv(tmp_path / "t.tsv", [f"a\t{name}" for name in names] * 4),
        dict[str, Any](problem_type="classification"),
    )
    other = tsv(tmp_path / "d.tsv", [f"a\t{cell}" for cell in cells])
    task = Task.from_files(SEQUENCE, train=train, validation=other, **how)
    assert (task.labels, tuple(task.split("validation").labels)) == (names, (0, 2))
    assert tuple(Task.from_files(SEQUENCE, test=other, labels=names, **how).split("test").labels) == (0, 2)


@pytest.mark.parametrize(
    ("labels", "cell"), [(("0.5", "1.5"), "0"), (("1", "1.0"), "1.00"), (("1.5", "low"), "0"), (("1.0", "2.0"), "yes")]
)
def test_a_number_without_a_class_of_its_value_is_refused(tmp_path: Path, labels: tuple[str, ...], cell: str):
    path = tsv(tmp_path / "t.tsv", [f"a\t{labels[1]}", f"a\t{cell}"])
    hint = r" Some of these names are numbers, so cells hold names, never ids\." if cell == "0" else ""
    with pytest.raises(DataError, match=rf"row 3 has label '{cell}'; the labels are: {', '.join(labels)}\.{hint}$"):
        Task.from_files(SEQUENCE, test=path, labels=labels, problem_type="classification")


def test_pairs(tmp_path: Path):
    rows = [{"first": "a", "second": "b", "same": True}, {"first": "c", "second": "d", "same": False}]
    path = jsonl(tmp_path / "t.jsonl", rows)
    task = Task.from_files(SEQUENCE, train=path, validation=path, text="first", text_pair="second", label="same")
    assert task.labels == ("False", "True")
    assert task.split("train").texts == (("a", "b"), ("c", "d"))


@pytest.mark.parametrize("cells", [["1.5", "2", "-0.25"], ["1.0", "2.0", "3e0"]])
def test_decimal_points_mean_regression(tmp_path: Path, cells: list[str]):
    path = tsv(tmp_path / "t.tsv", [f"a\t{cell}" for cell in cells], header="sentence\tgrade")
    task = Task.from_files(SEQUENCE, train=path, validation=path, label="grade")
    assert (task.problem_type, task.labels, task.metrics) == ("regression", ("grade",), ("pearson", "spearman", "mae"))
    assert task.split("train").labels == tuple(map(float, cells))


def test_problem_can_be_named(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\t1", "b\t0"])
    task = Task.from_files(SEQUENCE, train=path, validation=path, problem_type="regression")
    assert (task.problem_type, task.split("train").labels) == ("regression", (1.0, 0.0))
    floats = jsonl(tmp_path / "t.jsonl", [{"sentence": "a", "label": 1.0}, {"sentence": "b", "label": 0.0}])
    task = Task.from_files(SEQUENCE, train=floats, validation=floats, problem_type="classification")
    assert (task.labels, task.split("train").labels) == (("0", "1"), (1, 0))


@pytest.mark.parametrize("cell", ["high", "inf", "-1e999"])
def test_regression_needs_numbers(tmp_path: Path, cell: str):
    path = tsv(tmp_path / "t.tsv", ["a\t1.5", f"b\t{cell}"])
    with pytest.raises(DataError, match=f"row 3 has '{cell}' in column 'label'; a regression task needs a number"):
        Task.from_files(SEQUENCE, train=path, problem_type="regression")


def test_lists_mean_multi_label(tmp_path: Path):
    rows = [{"sentence": "a", "label": ["x", "z"]}, {"sentence": "b", "label": []}, {"sentence": "c", "label": ["y"]}]
    path = jsonl(tmp_path / "t.jsonl", rows)
    task = Task.from_files(SEQUENCE, train=path, validation=path)
    assert (task.problem_type, task.labels, task.metric) == ("multi_label", ("x", "y", "z"), "f1")
    assert task.split("train").labels == ((1, 0, 1), (0, 0, 0), (0, 1, 0))


def test_multi_label_in_one_cell(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\tx, z", "b\t", "c\ty"])
    task = Task.from_files(SEQUENCE, train=path, validation=path, problem_type="multi_label")
    assert task.split("train").labels == ((1, 0, 1), (0, 0, 0), (0, 1, 0))
    with pytest.raises(DataError, match="row 2 has label 'x'; the labels are: y, z"):
        Task.from_files(SEQUENCE, train=path, problem_type="multi_label", labels=("y", "z"))


def test_label_outside_the_set(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", ["a\tyes", "b\tno"])
    dev = tsv(tmp_path / "d.tsv", ["a\tyes", "b\tmayb"])
    with pytest.raises(DataError, match=r"d\.tsv row 3 has label 'mayb'; the labels are: no, yes\.$") as info:
        Task.from_files(SEQUENCE, train=train, validation=dev)
    assert (info.value.row, info.value.column, info.value.path) == (3, "label", str(dev))


@pytest.mark.parametrize(
    ("cell", "hint"),
    [("Pos", "neg, pos. Did you mean 'pos'?"), ("POS", "pos. Did you mean 'pos'?"), ("2", "pos."), ("yes", "pos.")],
)
def test_a_label_like_a_known_one_is_suggested(tmp_path: Path, cell: str, hint: str):
    path = tsv(tmp_path / "d.tsv", ["a\tpos", f"b\t{cell}"])
    with pytest.raises(DataError) as info:
        Task.from_files(SEQUENCE, validation=path, labels=("neg", "pos"))
    assert str(info.value).endswith(hint)


@pytest.mark.parametrize("cell", ["GOOD", "goods", "1000"])
def test_no_label_is_suggested_for_a_number_or_if_labels_differ_in_case_only(tmp_path: Path, cell: str):
    path = tsv(tmp_path / "d.tsv", [f"a\t{cell}"])
    with pytest.raises(DataError, match=f"has label '{cell}'; the labels are: Good, good, 100.$"):
        Task.from_files(SEQUENCE, validation=path, labels=("Good", "good", "100"))


@pytest.mark.parametrize(
    ("labels", "cells", "said"),
    [
        (("neg", "pos"), "01", "0 = neg, 1 = pos."),
        (("neg", "pos"), ("neg", "pos"), None),
        (("pos", "neg"), "01", None),  # an order that somebody chose
        (("no", "yes"), "01", None),  # the order is known
        (("1", "2"), "12", None),  # names
    ],
)
def test_the_meaning_of_class_ids_in_a_file_to_score_is_said(tmp_path: Path, labels, cells, said, caplog):
    path = tsv(tmp_path / "d.tsv", [f"a\t{cell}" for cell in cells])
    task = Task.from_files(SEQUENCE, validation=path, labels=labels)
    assert list(task.split("validation").labels) == [0, 1]
    assert [said in message for message in caplog.messages] == ([] if said is None else [True])


@pytest.mark.parametrize("part", ["validation", "test"])
def test_class_ids_are_refused_if_the_order_of_the_names_is_that_of_the_alphabet(tmp_path: Path, part: str):
    names = ("entailment", "neutral", "contradiction")  # the order of their ids in SNLI and MNLI
    train = tsv(tmp_path / "t.tsv", [f"a\t{name}" for name in names] * 4)
    other: dict[str, Any] = {part: tsv(tmp_path / "d.tsv", ["a\tneutral", "a\t0"])}
    refused = (
        r"d\.tsv row 3 has label '0'; the labels are: contradiction, entailment, neutral\. "
        r"If it is a class id, give labels=\[\.\.\.\] with the names in the order of their ids\.$"
    )
    with pytest.raises(DataError, match=refused):
        Task.from_files(SEQUENCE, train=train, **other)
    task = Task.from_files(SEQUENCE, train=train, **other, labels=names)
    assert tuple(task.split(part).labels) == (1, 0)


@pytest.mark.parametrize("names", [("no", "yes"), ("LABEL_0", "LABEL_1", "LABEL_2")])
def test_class_ids_of_names_with_a_usual_order_are_read(tmp_path: Path, names: tuple[str, ...]):
    train = tsv(tmp_path / "t.tsv", [f"a\t{name}" for name in names])
    task = Task.from_files(SEQUENCE, train=train, validation=tsv(tmp_path / "d.tsv", ["a\t1", "a\t0"]))
    assert tuple(task.split("validation").labels) == (1, 0)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([[0], [1, 2]], "class ids in column 'label' are read as 0 = x, 1 = y, 2 = z."),
        ([[1, 0, 0], [0, 1, 1]], "lists of 0 and 1 per class in column 'label' are read as x, y, z, in this order."),
    ],
)
def test_ids_in_lists_and_0_and_1_per_class_need_an_order_too(tmp_path: Path, cells: list[Any], said: str, caplog: Any):
    train = jsonl(tmp_path / "t.jsonl", [{"sentence": "a", "label": list(cell)} for cell in ("z", "yx")])
    other = jsonl(tmp_path / "d.jsonl", [{"sentence": "a", "label": cell} for cell in cells])
    with pytest.raises(DataError, match=r"'0'; the labels are: x, y, z\. If it is a class|0 and 1 have one entry for"):
        Task.from_files(SEQUENCE, train=train, validation=other)
    assert not caplog.messages
    task = Task.from_files(SEQUENCE, validation=other, labels=("x", "y", "z"), problem_type="multi_label")
    assert tuple(task.split("validation").labels) == ((1, 0, 0), (0, 1, 1))
    assert [said in message for message in caplog.messages] == [True]  # the labels may be those of a saved reader


def test_flags_of_two_classes_are_not_read_as_ids(tmp_path: Path):
    train = jsonl(tmp_path / "t.jsonl", [{"sentence": "a", "label": list(cell)} for cell in ("z", "zy")])
    other = jsonl(tmp_path / "d.jsonl", [{"sentence": "a", "label": cell} for cell in ([1, 0], [0, 1])])
    with pytest.raises(
        DataError, match=r"row 1 has label '1'; the labels are: y, z\. If it is a class id, give labels="
    ):
        Task.from_files(SEQUENCE, train=train, validation=other)


@pytest.mark.parametrize(("names", "cell"), [(("Yes", "no"), 1), (("True", "false"), 0), (("cat", "dog"), 1.0)])
def test_an_order_that_is_only_sorted_gives_no_ids(
    tmp_path: Path, names: tuple[str, str], cell: float, caplog: pytest.LogCaptureFixture
):
    """Capitals are sorted before small letters; and a gap makes a column of ids floats."""
    train = jsonl(tmp_path / "t.jsonl", [{"sentence": "a", "label": name} for name in names])
    other = jsonl(tmp_path / "d.jsonl", [{"sentence": "a", "label": cell}])
    with pytest.raises(DataError, match=r"If it is a class id, give labels=\[\.\.\.\] with the names in the order"):
        Task.from_files(SEQUENCE, train=train, validation=other, problem_type="classification")
    Task.from_files(SEQUENCE, validation=other, labels=names, problem_type="classification")
    assert ["class ids in column 'label' are read as" in message for message in caplog.messages] == [True]


def test_text_must_be_text(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"sentence": ["a"], "label": 1}])
    with pytest.raises(DataError, match="row 1 has no text in column 'sentence' but list"):
        Task.from_files(SEQUENCE, train=path)


# From examples to scores and answers

LONG = "the film is good and the film is bad"


def task(problem_type: str, labels: tuple[str, ...], given: list[Any], texts: list[Any] | None = None) -> Task:
    split = Split.of(texts or ["the film", LONG, "very good", "bad"][: len(given)], given)
    metrics = KIND.metrics(problem_type, labels)
    return Task(kind_of(SEQUENCE), problem_type, labels, metrics[0], metrics, {"validation": split}, "it")


def scored(about: Task, processor: Any, logits: list[list[float]], order: int = -1, **options: Any) -> Any:
    """The results of logits that are given window by window, in two batches, as a rule against the order."""
    split = about.split("validation")
    inputs = KIND.encode(split, processor, EncodeOptions(part="validation", max_length=6, **options))
    results = KIND.results(about, split, inputs)
    rows = list(range(len(inputs.lengths)))[::order]
    for part in filter(None, (rows[:1], rows[1:])):
        results.add(part, torch.tensor([logits[row] for row in part], dtype=torch.bfloat16))
    return results


def test_a_part_becomes_batches(words: Any):
    about = task("classification", ("no", "yes"), [1, 0, 1])
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="train", max_length=6))
    batch = inputs.batch([2, 0])
    assert {key: value.dtype for key, value in batch.items()} == dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), torch.int64
    )
    assert batch["input_ids"].tolist() == [[2, 12, 10, 3], [2, 5, 7, 3]]
    assert list(inputs.lengths) == [4, 6, 4]
    assert KIND.truncated(inputs) == 1
    assert inputs.uncacheable is None
    targets = KIND.targets(about, split, inputs)
    assert targets is not None
    assert targets.tensor([2, 1, 0]).tolist() == [1, 0, 1]


def test_pairs_become_batches(words: Any):
    split = Split.of([("the film", "bad"), ("a", "good film")])
    inputs = KIND.encode(split, words, EncodeOptions(part="predict", max_length=12))
    assert inputs.batch([0, 1])["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_classes_are_scored(words: Any):
    results = scored(task("classification", ("no", "yes"), [1, 0, 1]), words, [[0, 2], [1, 0], [1, 0]])
    assert results.scores(("mcc", "accuracy")) == pytest.approx({"mcc": 0.5, "accuracy": 2 / 3})
    assert [(row["label"], row["count"]) for row in results.per_class()[:2]] == [("no", 1), ("yes", 2)]
    assert results.predictions()[0]["label"] == "yes"


def test_the_first_window_of_a_long_text_answers(words: Any):
    """Other readers of the same texts may need windows: the others carry no label and give no answer."""
    about = task("classification", ("no", "yes"), [1, 0, 1])
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="train", max_length=6, windows=True, stride=1))
    assert list(inputs.encoded.text) == [0, 1, 1, 1, 2]
    assert KIND.truncated(inputs) == 1
    targets = KIND.targets(about, split, inputs)
    assert targets is not None
    assert targets.tensor(range(5)).tolist() == [1, 0, -100, -100, 1]
    logits = [[0.0, 1.0], [1.0, 0.0], [0.0, 9.0], [0.0, 9.0], [0.0, 1.0]]
    for order in (-1, 1):
        assert scored(about, words, logits, order, windows=True, stride=1).scores(("accuracy",)) == {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("problem_type", "labels", "empty"), [("regression", [0.5, 1.5], np.nan), ("multi_label", [(1, 0), (0, 1)], -1)]
)
def test_further_windows_carry_no_label(words: Any, problem_type: str, labels: list[Any], empty: float):
    about = task(problem_type, ("a", "b"), labels)
    split = about.split("validation")
    inputs = KIND.encode(split, words, EncodeOptions(part="train", max_length=6, windows=True, stride=1))
    targets = KIND.targets(about, split, inputs)
    assert targets is not None
    found = targets.tensor([0, 1, 3])
    assert found[:2].tolist() == [list(one) if isinstance(one, tuple) else one for one in labels]
    assert np.array_equal(found[2].unique().numpy(), [empty], equal_nan=True)
    assert found.dtype == (torch.float32 if problem_type == "regression" else torch.int64)
    assert KIND.model_labels(found, about).dtype == torch.float32


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, None), (9.0, "not better by mae than always answering '3.5'")])
def test_numbers_of_a_wrong_scale_are_not_better_than_their_mean(words: Any, shift: float, verdict: str | None):
    labels = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    about = task("regression", ("score",), labels, ["bad"] * 6)
    split = about.split("validation")
    results: Any = KIND.results(about, split, KIND.encode(split, words, EncodeOptions(part="predict", max_length=6)))
    results.add(range(6), torch.tensor(labels)[:, None] + shift)
    comparison: Any = results.compare(("pearson", "mae"))
    assert comparison["verdict"] == verdict
    assert comparison["baseline"] == pytest.approx({"pearson": 0.0, "mae": 1.5})


def test_numbers_are_scored(words: Any):
    results = scored(task("regression", ("score",), [1.0, 2.0, 4.0]), words, [[2.0], [3.0], [5.0]])
    right = {"pearson": 1, "spearman": 1, "mae": 1}
    assert results.scores(tuple(right)) == pytest.approx(right, abs=1e-5)
    assert results.per_class() == []
    assert results.predictions() == [{"value": 2.0}, {"value": 3.0}, {"value": 5.0}]


def test_several_labels_are_scored(words: Any):
    about = task("multi_label", ("a", "b", "c"), [(1, 0, 1), (0, 0, 0)])
    results = scored(about, words, [[0.25, -0.25, 3.0], [-1.0, 0.25, -1.0]])  # a label is set above 0
    assert results.scores(("f1", "accuracy")) == pytest.approx({"f1": 0.8, "accuracy": 0.5})
    assert [row["f1"] for row in results.per_class()[:3]] == [1.0, 0.0, 1.0]
    first = results.predictions()[0]
    assert first["labels"] == ["a", "c"]
    assert first["probabilities"] == pytest.approx({"a": 0.5622, "b": 0.4378, "c": 0.9526}, abs=1e-4)


def test_an_answer_has_probabilities(words: Any):
    (answer,) = scored(task("classification", ("a", "b", "c"), [0]), words, [[0.0, 2.0, 1.0]]).predictions()
    assert answer["label"] == "b"
    assert answer["score"] == answer["probabilities"]["b"] == pytest.approx(0.6652, abs=1e-4)
    assert sum(answer["probabilities"].values()) == pytest.approx(1)


def test_what_predict_takes(words: Any):
    pairs = KIND.examples([("a", "b"), ["c", "d \ud83d"]], words)
    assert pairs.texts == (("a", "b"), ("c", "d \ufffd"))
    assert not pairs.labelled
    assert len(KIND.examples([], words)) == 0
    for raw, message in [
        (["a", 3], "predict: entry 1 is int; all must be texts, or all pairs of texts"),
        ([("a", "b"), ("c",)], "predict: entry 1 is tuple; all must be texts, or all pairs"),
        ([("a", "b"), "cd"], "predict: entry 1 is str; all must be texts, or all pairs"),
        ([{"question": "a"}], "entry 0 is dict; .* pairs of texts. Give the text itself, or a tuple of two texts."),
    ]:
        with pytest.raises(ConfigError, match=message):
            KIND.examples(raw, words)


def test_a_config_gets_the_classes():
    from transformers import BertConfig

    for problem_type, expected in [
        ("classification", "single_label_classification"),
        ("multi_label", "multi_label_classification"),
        ("regression", "regression"),
    ]:
        config = BertConfig(num_labels=2)  # pyright: ignore
        KIND.configure(config, task(problem_type, ("no", "yes"), [0]))
        assert (config.problem_type, config.id2label) == (expected, {0: "no", 1: "yes"})
    KIND.configure(BertConfig(id2label={0: "NO", 1: "YES"}), task("classification", ("no", "yes"), [0]))
    with pytest.raises(ConfigError, match=r"the head has 3 classes, the task has 2 \(no, yes\); .* num_labels=2"):
        KIND.configure(BertConfig(num_labels=3), task("classification", ("no", "yes"), [0]))  # pyright: ignore
    with pytest.raises(ConfigError, match="the classes of the head are yes, no, those of the task no, yes"):
        KIND.configure(BertConfig(id2label={0: "yes", 1: "no"}), task("classification", ("no", "yes"), [0]))


def test_classes_of_subsamples():
    about = task("classification", ("no", "yes"), [1, 0, 1])
    assert KIND.row_classes(about, about.split("validation")) == (("no", "yes"), [(1,), (0,), (1,)])
    about = task("multi_label", ("x", "y", "z"), [(1, 0, 1), (0, 0, 0)])
    assert KIND.row_classes(about, about.split("validation")) == (("x", "y", "z"), [(0, 2), ()])
    about = task("regression", ("score",), [0.5, 1.5])
    assert KIND.row_classes(about, about.split("validation")) == ((), [(), ()])
