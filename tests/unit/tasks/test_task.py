"""What tasks of every kind have in common."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from tests.support.files import jsonl, put, tsv
from tests.support.pictures import encoded, picture
from tests.support.pictures import put as put_bytes
from tests.support.training import reader, tiny_bank, train

from lamina import evaluate
from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import KINDS, kind_of
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE, TOKEN, IMAGE = "sequence_classification", "token_classification", "image_classification"
AUDIO = "audio_classification"


@pytest.mark.parametrize("how", [{"label": "sentence"}, {"text_pair": "label"}])
def test_one_column_is_no_text_and_label(how: dict[str, str]):
    others = [{"sentence": "new one", "label": "a"}]
    with pytest.raises(ConfigError, match=r"text and label are both '.*'; a model would learn to copy"):
        Task.from_dataset("sequence_classification", {"train": ROWS, "validation": others}, **how)


def test_a_text_is_not_paired_with_itself(tmp_path: Path):
    rows = [{"a": f"text {label}", "b": "other", "label": label} for label in "xy"] * 4
    for kind in (SEQUENCE, TOKEN):
        with pytest.raises(ConfigError, match="text and text_pair are both 'b'; the two texts are equal"):
            Task.from_dataset(kind, {"train": rows}, text="b", text_pair="b")
    task = Task.from_dataset(SEQUENCE, {"train": rows}, text="a", text_pair="b")
    bank = tiny_bank({"pairs": reader(task)})
    train(bank, {"pairs": task}, epochs=1)
    (tmp_path / "x.csv").write_text("a,b,label\none,two,x\n")
    with pytest.raises(ConfigError, match="text and text_pair are both 'b'"):  # the second text is as in training
        evaluate(bank, tmp_path / "x.csv", text="b")
    assert evaluate(bank, tmp_path / "x.csv", text="b", text_pair="a")["pairs"]


def test_files_may_have_labels_in_the_default_column_of_texts():
    rows = [{"image": np.zeros((4, 4, 3), np.uint8), "sentence": name} for name in "ab"]
    assert Task.from_dataset(IMAGE, {"train": rows, "test": rows}, label="sentence").labels == ("a", "b")


def test_one_column_is_no_text_and_label_by_default(tmp_path: Path):
    rows = [{"text": word, "label": word} for word in ("good", "bad")]
    with pytest.raises(ConfigError, match="text and label are both 'text'"):
        Task.from_dataset("sequence_classification", {"train": rows}, label="text")
    (tmp_path / "some.conll").write_text("Rome NNP\nin IN\n")
    for how in ({"label": 0}, {"label": -2}, {"text": -1}):
        with pytest.raises(ConfigError, match=r"text and label are both '[01]'"):
            Task.from_files(TOKEN, train=tmp_path / "some.conll", **how)


def test_a_task_of_one_class_is_refused():
    rows = [{"text": "good", "label": "yes"}, {"text": "fine", "label": "yes"}]
    with pytest.raises(DataError, match="task moods: 'yes' is its only class"):
        Task.from_dataset(SEQUENCE, {"train": rows}, text="text", name="moods")
    given = {"train": rows, "validation": rows}
    assert Task.from_dataset(SEQUENCE, given, text="text", labels=["no", "yes"]).labels == ("no", "yes")
    assert Task.from_dataset(SEQUENCE, {"test": rows}, text="text", labels=["yes"]).labels == ("yes",)
    enum = Enum("Answer", {"NO": "no", "YES": "yes"}, type=str)
    assert Task.from_dataset(SEQUENCE, given, text="text", labels=list(enum)).labels == ("no", "yes")


# From files


def test_unknown_split(tmp_path: Path):
    task = Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"] * 10))
    with pytest.raises(UnknownNameError, match="task t: unknown split 'test'; known: train, validation"):
        task.split("test")


def test_a_tenth_of_train_validates(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{'ab'[i % 4 == 0]}" for i in range(200)])
    task = Task.from_files(SEQUENCE, train=train, seed=5)
    assert (len(task.split("train")), len(task.split("validation"))) == (180, 20)
    assert Counter(task.split("validation").labels) == {0: 15, 1: 5}
    assert task == Task.from_files(SEQUENCE, train=train, seed=5)


def test_limit_leaves_validation_whole(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{i % 2}" for i in range(200)])
    task = Task.from_files(SEQUENCE, train=train, limit=7)
    assert (len(task.split("train")), len(task.split("validation"))) == (7, 20)
    assert task.split("validation") == Task.from_files(SEQUENCE, train=train).split("validation")


def test_metric_first(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"])
    task = Task.from_files(SEQUENCE, train=path, validation=path, metric="mcc", positive="y", name="moods")
    assert (task.metric, task.metrics, task.name) == ("mcc", ("mcc", "accuracy", "f1", "macro_f1"), "moods")
    with pytest.raises(UnknownNameError, match=r"unknown metric 'acuracy'; known: .*macro_f1, auroc.* Did you mean"):
        Task.from_files(SEQUENCE, train=path, metric="acuracy")


def test_names_that_do_not_exist(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"])
    with pytest.raises(UnknownNameError, match="kind: unknown name 'classification'"):
        Task.from_files("classification", train=path)
    with pytest.raises(UnknownNameError, match=r"unknown problem type 'regresion'.* Did you mean 'regression'"):
        Task.from_files(SEQUENCE, train=path, problem_type="regresion")
    with pytest.raises(DataError, match="no column 'text'; its columns are: sentence, label"):
        Task.from_files(SEQUENCE, train=path, text="text")


def test_files_and_labels_are_needed(tmp_path: Path):
    with pytest.raises(DataError, match="no file was given"):
        Task.from_files(SEQUENCE)
    path = tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"])
    with pytest.raises(DataError, match="neither a train split nor labels were given"):
        Task.from_files(SEQUENCE, test=path)
    task = Task.from_files(SEQUENCE, test=path, labels=["x", "y"])
    assert list(task.splits) == ["test"]


@pytest.mark.parametrize("labels", [[], ["x", "y", "x"]])
def test_labels_are_distinct(tmp_path: Path, labels: list[str]):
    with pytest.raises(ConfigError, match="every class needs its own name"):
        Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", ["a\tx"]), labels=labels)


# Fewer rows


def test_validation_can_be_capped(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{i % 2}" for i in range(200)])
    whole = Task.from_files(SEQUENCE, train=train, validation=train)
    task = Task.from_files(SEQUENCE, train=train, validation=train, test=train, limit_validation=7)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 200, "validation": 7, "test": 200}
    assert set(task.split("validation").texts) < set(whole.split("validation").texts)
    again = Task.from_files(SEQUENCE, train=train, validation=train, limit_validation=7, seed=1)
    assert again.split("validation") != task.split("validation")
    with pytest.raises(ConfigError, match="task: limit_validation is 0; it must be at least 1"):
        Task.from_files(SEQUENCE, train=train, limit_validation=0)


def test_a_limit_is_a_draw(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{i % 2}" for i in range(200)])
    task = Task.from_files(SEQUENCE, train=train, validation=train, limit=7, seed=3)
    assert task.subsampled == {"rows": 7, "of": 200, "stratified": False, "seed": 3}
    assert task == Task.from_files(SEQUENCE, train=train, validation=train).subsample(rows=7, seed=3)
    assert Task.from_files(SEQUENCE, train=train, validation=train, limit=200).subsampled is None
    with pytest.raises(ConfigError, match=r"task: limit is 0"):
        Task.from_files(SEQUENCE, train=train, limit=0)


def letters(tmp_path: Path, counts: dict[str, int]) -> Task:
    rows = [f"{label} {i}\t{label}" for label, count in counts.items() for i in range(count)]
    path = tsv(tmp_path / "t.tsv", rows)
    return Task.from_files(SEQUENCE, train=path, validation=path, test=path)


def test_a_draw_leaves_the_other_parts_whole(tmp_path: Path):
    task = letters(tmp_path, {"a": 60, "b": 30, "c": 10})
    drawn = task.subsample(per_class=8, seed=2)
    assert {part: len(split) for part, split in drawn.splits.items()} == {"train": 24, "validation": 100, "test": 100}
    assert drawn.subsampled == {"per_class": 8, "of": 100, "stratified": False, "seed": 2}
    assert task.subsampled is None
    assert len(task.split("train")) == 100
    texts = drawn.split("train").texts
    assert len(set(texts)) == 24
    assert sorted(texts, key=task.split("train").texts.index) == list(texts)
    assert drawn == task.subsample(per_class=8, seed=2)
    assert drawn.split("train") != task.subsample(per_class=8, seed=3).split("train")


def test_draws_of_a_draw_are_recorded(tmp_path: Path):
    task = letters(tmp_path, {"a": 60, "b": 30, "c": 10}).subsample(fraction=0.5, seed=1).subsample(rows=3)
    before = {"fraction": 0.5, "of": 100, "stratified": False, "seed": 1}
    assert task.subsampled == {"rows": 3, "of": 50, "stratified": False, "seed": 0, "before": before}
    assert json.loads(json.dumps(task.subsampled)) == task.subsampled


def test_a_class_that_no_training_row_has_is_named(caplog: pytest.LogCaptureFixture):
    rows = {
        "train": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
        "validation": [{"text": "c", "label": "z"}],
    }
    Task.from_dataset(SEQUENCE, rows, text="text", label="label", labels=("x", "y", "z"), name="t")
    assert "task t: no row of the train split has class 'z', which cannot be learnt" in caplog.text
    assert caplog.text.count("no row of") == 1


def test_an_empty_class_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    task = letters(tmp_path, {"a": 60, "b": 40})
    task.subsample(rows=100)
    assert caplog.text == ""
    only = task.subsample(rows=1).split("train").texts[0][0]
    assert f"task t: none of the 1 rows drawn is of class '{'ab'.replace(only, '')}'" in caplog.text


def test_only_rows_of_one_class_are_drawn_by_class(tmp_path: Path):
    path = put(tmp_path / "a.conll", "EU B-ORG\nof O\n\nUK B-LOC\n")
    task = Task.from_files(TOKEN, train=path, validation=path)
    assert len(task.subsample(per_class=1).split("train")) == 2
    with pytest.raises(
        ConfigError, match=r"stratified is set for a task of kind token_classification \(classification\)"
    ):
        task.subsample(per_class=1, stratified=True)
    with pytest.raises(UnknownNameError, match="unknown split 'train'"):
        Task.from_files(TOKEN, test=path, labels=task.labels).subsample(rows=1)


def test_any_texts_become_running_text(tmp_path: Path):
    rows = [{"first": "a b", "second": "c d", "same": i % 2} for i in range(20)]
    path = jsonl(tmp_path / "t.jsonl", rows)
    columns: dict[str, Any] = {"text": "first", "text_pair": "second", "label": "same"}
    task = Task.from_files(SEQUENCE, train=path, validation=path, test=path, **columns)
    running = task.subsample(rows=3).masked_lm()
    assert (running.kind, running.problem_type, running.labels) == ("masked_lm", "classification", ("token",))
    assert (running.name, running.metric, running.metrics) == ("t-mlm", "perplexity", ("perplexity", "accuracy"))
    assert {part: len(split) for part, split in running.splits.items()} == {"train": 6, "validation": 40, "test": 40}
    assert running.split("train").texts == ("a b", "c d") * 3
    assert running.split("train").labels == (None,) * 6
    assert running.subsampled == {"rows": 3, "of": 20, "stratified": False, "seed": 0}


def test_words_and_sources_become_running_text(tmp_path: Path):
    words = Task.from_files(TOKEN, test=put(tmp_path / "a.conll", "EU B-ORG\nsaid O\n"), labels=("O", "B-ORG"))
    assert words.masked_lm().split("test").texts == ("EU said",)
    path = jsonl(tmp_path / "t.jsonl", [{"text": "long text", "target": "text"}])
    assert Task.from_files("summarization", test=path).masked_lm().split("test").texts == ("long text",)


def test_a_tenth_of_train_can_be_set_aside_later(tmp_path: Path):
    task = letters(tmp_path, {"a": 60, "b": 40})
    held = task.held_out(seed=3)
    assert {part: len(split) for part, split in held.splits.items()} == {"train": 90, "validation": 10, "test": 100}
    assert Counter(held.split("validation").labels) == {0: 6, 1: 4}
    assert sorted([*held.split("train").texts, *held.split("validation").texts]) == sorted(task.split("train").texts)
    assert held == task.held_out(seed=3) != task.held_out(seed=4)


def test_the_published_validation_part_becomes_the_test_part(tmp_path: Path):
    path = put(tmp_path / "t.txt", "".join(f"Line {i}\n" for i in range(20)))
    other = put(tmp_path / "v.txt", "Other\n")
    held = Task.from_files("masked_lm", train=path, validation=other).held_out()
    assert held.split("test").texts == ("Other",)
    assert held.split("validation").texts == ("Line 18", "Line 19")  # the last lines, whatever the seed
    only = Task.from_files(SEQUENCE, test=tsv(tmp_path / "t.tsv", ["a\tx"]), labels=["x"])
    with pytest.raises(UnknownNameError, match="unknown split 'train'"):
        only.held_out()


# From data at hand

ROWS = [{"sentence": f"text {i}", "label": "ab"[i % 2]} for i in range(20)]


@pytest.mark.parametrize(
    "dataset",
    [
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}),
        {"train": datasets.Dataset.from_list(ROWS).with_format("numpy"), "test": ROWS[:3]},
        {"test": tuple(ROWS[:3]), "train": (dict(row) for row in ROWS)},
    ],
    ids=["DatasetDict", "datasets and lists", "generator"],
)
def test_a_task_of_data_at_hand(dataset: Any):
    task = Task.from_dataset(SEQUENCE, dataset, name="mine", limit=10, seed=1)
    assert (task.labels, task.metric, task.name) == (("a", "b"), "accuracy", "mine")
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 10, "validation": 2, "test": 3}
    assert task.split("test").texts == ("text 0", "text 1", "text 2")
    assert task.split("test").labels == (0, 1, 0)
    assert list(task.splits) == ["train", "validation", "test"]
    assert task.subsampled == {"rows": 10, "of": 18, "stratified": False, "seed": 1}


def test_class_names_of_a_column_are_the_labels():
    """Its cells are ids, whatever the names look like."""
    for names in (["neg", "pos"], ["3", "1"], ["1", "0"]):
        features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [1, 0]}, features=features)
        task = Task.from_dataset(SEQUENCE, {"train": rows, "test": rows})
        assert task.labels == tuple(names)
        assert task.split("test").labels == (1, 0)
        more = Task.from_dataset(SEQUENCE, {"test": rows}, labels=["new", *names])
        assert more.split("test").labels == (2, 1)
        for labels in (names[::-1], [name.upper() + "s" for name in names], ["no", "yes"]):
            with pytest.raises(ConfigError, match=rf"labels are {', '.join(labels)}, but .* names {', '.join(names)};"):
                Task.from_dataset(SEQUENCE, {"test": rows}, labels=labels)
    rows = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [1, -1]}, features=features)
    with pytest.raises(DataError, match="task/test row 2 has no label in column 'label'"):
        Task.from_dataset(SEQUENCE, {"test": rows})
    running = Task.from_dataset("masked_lm", {"test": rows})  # has no classes, and so takes no names
    assert running.labels == ("token",)


def test_lists_in_cells():
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B-X", "I-X"])),
        }
    )
    rows = datasets.Dataset.from_dict({"tokens": [["EU", "said"], []], "tags": [[1, 0], []]}, features=features)
    columns: dict[str, Any] = {"text": "tokens", "label": "tags"}
    task = Task.from_dataset(TOKEN, {"test": rows}, **columns)
    assert (task.labels, task.metric) == (("O", "B-X", "I-X"), "span_f1")
    assert task.split("test").labels == ((1, 0), ())
    assert task.split("test").words == (((0, 2), (3, 7)), ())
    same = Task.from_dataset(
        TOKEN, {"test": [{"tokens": ["EU", "said"], "tags": ["B-X", "O"]}]}, labels=task.labels, **columns
    )
    assert same.split("test").labels == ((1, 0),)
    several = [{"sentence": "a", "label": ["x", "z"]}, {"sentence": "b", "label": []}]
    for part in (several, datasets.Dataset.from_list(several)):
        task = Task.from_dataset(SEQUENCE, {"train": part, "validation": part})
        assert (task.problem_type, task.split("train").labels) == ("multi_label", ((1, 1), (0, 0)))


def test_other_kinds_of_data_at_hand():
    pairs = [{"first": "a", "second": "b \ud83d", "label": 1.5}] * 2
    task = Task.from_dataset(SEQUENCE, {"test": pairs}, text="first", text_pair="second")
    assert (task.problem_type, task.split("test").texts[0]) == ("regression", ("a", "b \ufffd"))
    rows = datasets.Dataset.from_list([{"translation": {"en": "yes", "ro": "da"}}])
    task = Task.from_dataset("translation", {"test": rows}, text="translation.en", label="translation.ro")
    assert (task.split("test").texts, task.split("test").labels) == (("yes",), ("da",))
    task = Task.from_dataset("summarization", {"test": [{"text": "long", "target": "short \ud83d"}]})
    assert task.split("test").labels == ("short \ufffd",)
    assert Task.from_dataset("masked_lm", {"test": [{"text": "a"}, {"text": " "}]}).split("test").texts == ("a",)


def test_images_at_hand(tmp_path: Path):
    file = put_bytes(tmp_path, "a.png", encoded(picture(200)))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = datasets.Dataset.from_dict({"image": [str(file), str(file)], "label": [1, 0]}, features=features)
    dicts = [{"image": picture(200), "label": "dog"}, {"image": picture(200), "label": "cat"}]
    paths = [{"image": str(file), "label": "dog"}, {"image": str(file), "label": "cat"}]
    for part in (rows, dicts, paths):
        task = Task.from_dataset(IMAGE, {"train": part, "validation": part})
        assert (task.labels, task.split("train").labels) == (("cat", "dog"), (1, 0))
        assert task.split("train").texts[1].open().tobytes() == picture(200).tobytes()
    with pytest.raises(DataError, match="images: the data set has no column 'img'; its columns of images are: image"):
        Task.from_dataset(IMAGE, {"test": rows}, text="img")
    with pytest.raises(
        DataError, match=r"images: task/test cannot be read \(.*; an image is a path, bytes, a Pillow image"
    ):
        Task.from_dataset(IMAGE, {"test": [{"image": "a", "label": 1}, {"image": 3, "label": 1}]})


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ({"train": [{"review": "a", "label": 1}]}, DataError, "no column 'sentence'; its columns are: review, label"),
        (
            {"train": datasets.Dataset.from_list([{"sentence": "a", "class": 1}])},
            DataError,
            "task/train has no column 'label'; its columns are: sentence, class",
        ),
        ({"train": [ROWS[0], {"sentence": "b"}]}, DataError, "task/train row 2 has no label in column 'label'"),
        (
            {"train": ROWS, "dev": ROWS},
            UnknownNameError,
            r"task task: unknown split 'dev'; known: train, validation, test. Give parts=\{.*'validation': 'dev'\}",
        ),
        ({"Train": ROWS, "Test": ROWS}, UnknownNameError, r"unknown split 'Train'.* Give parts=\{'train': 'Train'\}"),
        ({"train": ROWS, "testing": ROWS}, UnknownNameError, r"parts=\{'train': \.\.\., 'test': 'testing'\}"),
        ({}, DataError, "task: the dataset has no splits"),
        ({"train": []}, DataError, "task: split 'train' is empty; it needs at least one row"),
        ({"train": datasets.Dataset.from_list(ROWS).select([])}, DataError, "task: split 'train' is empty"),
        ({"train": "rows.csv"}, ConfigError, "task: split 'train' is str; it must be a Dataset or a list of dicts"),
        ({"train": {"sentence": ["a"]}}, ConfigError, "task: split 'train' is dict; it must be a Dataset"),
        (
            {"train": [("a", 1)]},
            ConfigError,
            r"is list; it must be a Dataset or a list of dicts\. Its row 1 is tuple",
        ),
        (
            {"train": pandas.DataFrame({"text": ["a"]})},
            ConfigError,
            r"dicts\. Give frame\.to_dict\('records'\)",
        ),
        ({"train": 3}, ConfigError, "task: split 'train' is int; it must be a Dataset"),
        (
            {"train": datasets.Dataset.from_list(ROWS).with_transform(dict)},
            ConfigError,
            r"task: split 'train' has a transform \(set_transform\)",
        ),
    ],
)
def test_data_that_does_not_fit(dataset: Any, error: type[Exception], message: str):
    call: Any = inspect.unwrap(Task.from_dataset.__func__)  # pyright: ignore[reportFunctionMemberAccess]  no type checker
    with pytest.raises(error, match=message):
        call(Task, SEQUENCE, dataset)


# Kinds


@pytest.mark.parametrize("name", KINDS.names())
def test_every_kind_says_what_it_must(name: str):
    kind = kind_of(name)
    assert kind.name == name
    assert kind is kind_of(name)
    for problem_type, metrics in kind.problem_types.items():
        assert metrics
        assert set(kind.metrics(problem_type, ("O", "B-X", "I-X"))) == set(metrics)
        expected = problem_type == "classification" and name in (SEQUENCE, IMAGE, AUDIO)
        assert kind.single_label(problem_type) is expected


def test_unknown_kind():
    with pytest.raises(UnknownNameError, match=r"kind: unknown name 'translatoin'; .* Did you mean 'translation'"):
        kind_of("translatoin")


def test_its_print_is_a_line_and_says_how_many_rows_there_are():
    rows = [{"sentence": "a", "label": f"c{number}"} for number in range(9)]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows[:2]}, name="mood")
    assert repr(task) == (
        "Task('mood', sequence_classification, 9 labels [c0, c1, c2, c3, c4, c5, ...], metric accuracy; "
        "rows: train: 9, validation: 2)"
    )


def test_splits_are_named_by_a_dict():
    for rows, parts, name in ((ROWS, None, "dataset"), ({"train": ROWS}, ["train"], "parts")):
        call: Any = Task.from_dataset
        with pytest.raises(ConfigError, match=rf"task: {name} is a list; it must be a dict, as in \{{'train'"):
            call(SEQUENCE, rows, parts=parts)


@pytest.mark.parametrize("problem_type", ["classification", "multi_label"])
def test_a_part_without_a_label_column_is_left_out(problem_type: str, caplog: pytest.LogCaptureFixture):
    train = [{"sentence": f"text {row}", "label": ["ab"[row % 2]]} for row in range(20)]
    if problem_type == "classification":
        train = [{**row, "label": row["label"][0]} for row in train]
    how: dict[str, Any] = {"problem_type": problem_type}
    task = Task.from_dataset(SEQUENCE, {"train": train, "test": [{"sentence": "a"}]}, **how)
    assert [*task.splits] == ["train", "validation"]
    assert "task/test has no column 'label', so it is left out of the task" in caplog.text
    with pytest.raises(DataError, match=r"task/test has no column 'label'.* Did you mean 'Label'"):
        Task.from_dataset(SEQUENCE, {"train": train, "test": [{"sentence": "a", "Label": "a"}]}, **how)


def test_labels_are_names(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"task: labels is 'xy'; it must be a list or None"):
        Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"] * 10), labels="xy")


@pytest.mark.parametrize("cell", [np.float32, np.float64, torch.tensor])
def test_numbers_of_numpy_and_torch_are_numbers(cell: Any):
    rows = [{"sentence": f"text {row}", "label": cell(value)} for row, value in enumerate((0.5, 1.25, 2.75, 3.0))]
    assert Task.from_dataset("sequence_classification", {"train": rows}).problem_type == "regression"


def test_an_array_of_zeros_and_ones_is_a_row_of_several_labels():
    rows = [{"sentence": f"text {row}", "label": np.array([row % 2, 1])} for row in range(4)]
    assert Task.from_dataset("sequence_classification", {"train": rows}).problem_type == "multi_label"


def test_pairs_whose_second_text_is_learnt_stay_pairs():
    rows = [{"about": "who", "reply": "anna sat", "spans": ["anna"]}] * 4
    how: dict[str, Any] = {"text": "about", "text_pair": "reply", "label": "spans"}
    with pytest.raises(ConfigError, match="is about the second text of a pair; leave its pairs"):
        Task.from_dataset("token_classification", {"train": rows}, **how).join_pairs(" ")


def test_labels_that_are_given_may_have_blanks_around_them():
    rows = [{"sentence": f"text {row}", "label": ("spam ", "ham")[row % 2]} for row in range(4)]
    given = {"train": rows}
    assert Task.from_dataset("sequence_classification", given, labels=["spam ", "ham"]).labels == ("spam", "ham")


def test_parts_are_named_by_the_user(caplog: pytest.LogCaptureFixture):
    dataset = {"train": ROWS, "validation_matched": ROWS[:4], "validation_mismatched": ROWS[:6], "dev": ROWS[:2]}
    parts = {"train": "train", "validation": "validation_matched", "test": "validation_mismatched"}
    task = Task.from_dataset(SEQUENCE, dataset, parts=parts)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 20, "validation": 4, "test": 6}
    assert not caplog.messages
    for wrong, told in (
        ({"train": "train", "dev": "dev"}, "unknown part 'dev'; known: train, validation, test"),
        ({"train": "train", "validation": "valid"}, "unknown split of the dataset 'valid'; known: train, validation_m"),
    ):
        with pytest.raises(UnknownNameError, match=told):
            Task.from_dataset(SEQUENCE, dataset, parts=wrong)


@pytest.mark.parametrize("label", [-1, None, "-1", ""])
def test_a_part_without_labels_is_left_out_and_named(label: Any, caplog: pytest.LogCaptureFixture):
    """As the unsupervised part of IMDB, and the secret labels of a test part of GLUE."""
    hidden = [row | {"label": label} for row in ROWS]
    task = Task.from_dataset(SEQUENCE, {"train": ROWS, "test": hidden, "unsupervised": hidden}, name="imdb")
    assert list(task.splits) == ["train", "validation"]
    assert caplog.messages == [
        "task imdb: the split 'unsupervised' has no labels, so it is left out",
        "task: imdb/test has no label in column 'label' (every cell is -1 or empty), so it is left out of the task",
    ]
    classes = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"sentence": ["x", "y"], "label": [-1, -1]}, features=classes)
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "unsupervised": rows, "test": rows})
    assert list(Task.from_dataset(SEQUENCE, both).splits) == ["train", "validation"]  # pyright: ignore


@pytest.mark.parametrize("labels", [None, ["a", "b"]])
def test_parts_that_all_lack_labels_are_an_error(labels: list[str] | None):
    hidden = [row | {"label": ""} for row in ROWS]
    with pytest.raises(DataError, match="has no label in column 'label'"):
        Task.from_dataset(SEQUENCE, {"validation": hidden, "test": hidden}, labels=labels)


@pytest.mark.parametrize("form", ["nested", "streamed", "streamed and nested", "pandas", "arrow"])
def test_labels_of_other_parts_are_found_in_every_form(form: str):
    hidden = [row | {"label": -1} for row in ROWS]
    dataset: dict[str, Any] = {"train": ROWS, "unsupervised": hidden}
    if "nested" in form:
        dataset = {part: [{**row, "m": {"gold": row["label"]}} for row in rows] for part, rows in dataset.items()}
    label = "m.gold" if "nested" in form else "label"
    if form in ("pandas", "arrow"):
        dataset = {part: datasets.Dataset.from_list(rows).with_format(form) for part, rows in dataset.items()}
    if "streamed" in form:
        dataset = {part: datasets.Dataset.from_list(rows).to_iterable_dataset() for part, rows in dataset.items()}
    assert list(Task.from_dataset(SEQUENCE, dataset, label=label).splits) == ["train", "validation"]
    with pytest.raises(UnknownNameError, match="unknown split 'extra'"):
        Task.from_dataset(SEQUENCE, dataset | {"extra": dataset["train"]}, label=label)


def test_declared_names_are_distinct_and_no_names_of_a_regression():
    def declared(names: list[str]) -> datasets.Dataset:
        classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        return datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, 1]}, features=classes)

    with pytest.raises(ConfigError, match="labels are a, a; every class needs its own name"):
        Task.from_dataset(SEQUENCE, {"train": declared(["a", "a "])}, text="text")
    stars = Task.from_dataset(SEQUENCE, {"test": declared(["4", "5"])}, text="text", problem_type="regression")
    assert (stars.labels, stars.split("test").labels) == (("label",), (4.0, 5.0))


def test_minus_one_may_be_a_class():
    rows = [{"sentence": str(at), "label": 1 - 2 * (at % 2)} for at in range(20)]
    task = Task.from_dataset(SEQUENCE, {"train": rows, "test": [row for row in rows if row["label"] == -1]})
    assert (task.labels, len(task.split("test"))) == (("-1", "1"), 10)


@pytest.mark.parametrize("option", ["seed", "limit", "limit_validation"])
def test_numbers_among_the_options_of_recorded_states_are_whole(option: str):
    with pytest.raises(ConfigError, match=f"task: {option} is 'x'; it must be a whole number"):
        Task.from_states("sequence_classification", train="states", **{option: "x"})


@pytest.mark.parametrize("labels", [5, None])
def test_options_of_recorded_states_have_the_right_types(labels: Any):
    with pytest.raises(ConfigError, match=f"task: {'labels' if labels else 'the states of train'} are"):
        Task.from_states("sequence_classification", train=5, labels=labels)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("cells", "rows"), [([1, 1.5, "cat"], (3, 2)), ([1, "cat", [2]], (3, 1)), (["cat", 1, 1.5], (3, 1))]
)
def test_labels_of_two_forms_are_both_quoted(cells: list[Any], rows: tuple[int, int]):
    table = [{"sentence": "a", "label": cell} for cell in cells]
    with pytest.raises(DataError, match="all labels must have one form") as info:
        Task.from_dataset("sequence_classification", {"train": table})
    later, earlier = (cells[row - 1] for row in rows)
    assert f"row {rows[0]} has {later!r}" in str(info.value)
    assert f"row {rows[1]} has {earlier!r}" in str(info.value)


def test_a_file_of_a_wrong_form_is_named_by_its_row(tmp_path: Path):
    file = jsonl(tmp_path / "train.jsonl", [{"image": "a.png", "label": "a"}, {"image": 7, "label": "b"}])
    with pytest.raises(DataError, match=r"train\.jsonl cannot be read \(row 2 is int;"):
        Task.from_files("image_classification", train=file)
    with pytest.raises(DataError, match=r"task/train cannot be read \(row 1 is int;"):
        Task.from_dataset("image_classification", {"train": [{"image": 7, "label": "b"}]})
