"""The tasks of a recipe: what is read, held out and subsampled, and that nothing is read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.training import yes_no

from lamina.errors import ConfigError, UnknownNameError
from lamina.recipes import load_tasks as loading
from lamina.recipes.load_tasks import load_task, load_tasks, repeats
from lamina.recipes.schema import Recipe, parse_recipe

READERS = {"Ada": {"fusion": "ada_layers"}}


def recipe(**task: Any) -> Recipe:
    body = {"readers": READERS, **task} if "files" in task else {"preset": "cola", "readers": READERS, **task}
    return parse_recipe({"model": "m", "tasks": {"a": body}})


def load(folder: Path, **task: Any) -> Any:
    return load_task("a", recipe(**task).tasks["a"], folder)


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    """The published format, with few rows."""
    (tmp_path / "cola").mkdir()
    for part, count in (("train", 40), ("dev", 10)):
        rows = [f"x\t{row % 4 and 1}\t\t{part} sentence {row} .\n" for row in range(count)]
        (tmp_path / "cola" / f"{part}.tsv").write_text("".join(rows))
    return tmp_path


def sizes(task: Any) -> dict[str, int]:
    return {part: len(split) for part, split in task.splits.items()}


def test_a_task_as_published(cola: Path):
    task = load(cola, preset="glue/cola")
    assert (sizes(task), task.metric) == ({"train": 40, "validation": 10}, "mcc")


def test_a_preset_may_have_a_metric_that_is_not_reported_by_default(cola: Path):
    task = load(cola, metric="auroc")
    assert (task.metric, task.metrics[0]) == ("auroc", "auroc")
    assert "auroc" not in load(cola).metrics


def test_holding_out_a_tenth_makes_the_published_validation_part_the_test(cola: Path):
    published, task = load(cola), load(cola, hold_out=True, metric="accuracy")
    assert sizes(task) == {"train": 36, "validation": 4, "test": 10}
    assert task.split("test") == published.split("validation")
    kept = [*task.split("train").texts, *task.split("validation").texts]
    assert sorted(kept) == sorted(published.split("train").texts)
    assert sorted(task.split("validation").labels) == [0, 1, 1, 1]
    assert task.metric == "accuracy"


def test_holding_out_a_tenth_keeps_a_published_test_part(tmp_path: Path):
    for part, count in (("train", 20), ("validation", 4), ("test", 6)):
        rows = [f"{part} {row}\t{('no', 'yes')[row % 2]}\n" for row in range(count)]
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    task = load(tmp_path, files={part: f"{part}.tsv" for part in ("train", "validation", "test")}, hold_out=True)
    assert sizes(task) == {"train": 18, "validation": 2, "test": 6}
    assert all(text.startswith("test ") for text in task.split("test").texts)


def test_what_is_set_aside_already_is_not_set_aside_again(tmp_path: Path):
    for part, count in (("train", 100), ("test", 20)):
        rows = [f"{part} {row}\t{('no', 'yes')[row % 2]}\n" for row in range(count)]
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    files = {part: f"{part}.tsv" for part in ("train", "test")}
    assert sizes(load(tmp_path, files=files, hold_out=True)) == {"train": 90, "validation": 10, "test": 20}
    assert sizes(load(tmp_path, files={"train": "train.tsv"}, hold_out=True))["test"] == 10


def test_limits(cola: Path):
    assert sizes(load(cola, limit=7, limit_validation=5)) == {"train": 7, "validation": 5}


def test_files(tmp_path: Path):
    for part in "ab":
        (tmp_path / f"{part}.tsv").write_text("said\tlabel\nfirst\tno\nsecond\tyes\n")
    task = load(tmp_path, files={"train": "a.tsv", "validation": "b.tsv"}, text="said")
    assert (task.name, task.labels, list(task.split("train").texts)) == ("a", ("no", "yes"), ["first", "second"])


def test_a_metric_that_the_data_does_not_allow(tmp_path: Path):
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfirst\t0.5\nsecond\t1.5\n")
    with pytest.raises(UnknownNameError, match="task a: unknown metric 'mcc'; known: pearson"):
        load(tmp_path, files={"train": "a.tsv", "validation": "a.tsv"}, metric="mcc")


def test_every_repeat_has_rows_of_its_own():
    task = yes_no(train=40)
    copies = repeats(recipe(subsample={"per_class": 5, "repeats": 3}).tasks["a"], task)
    assert [len(copy.split("train")) for copy in copies] == [10, 10, 10]
    assert len({tuple(copy.split("train").texts) for copy in copies}) == 3
    assert [copy.subsampled and copy.subsampled["seed"] for copy in copies] == [0, 1, 2]
    assert all(copy.split("validation") is task.split("validation") for copy in copies)
    assert repeats(recipe().tasks["a"], task) == [task]


def test_tasks_over_the_same_data_read_it_once(cola: Path, monkeypatch: pytest.MonkeyPatch):
    few = {"preset": "cola", "readers": READERS, "subsample": {"rows": 5}}
    bodies = {"all": {"preset": "cola", "readers": READERS}, "few": few, "less": {**few, "limit": 9}}
    read: list[str] = []
    monkeypatch.setattr(loading, "load_task", lambda name, *rest: read.append(name) or load_task(name, *rest))
    tasks = load_tasks(parse_recipe({"model": "m", "tasks": bodies}), cola)
    assert read == ["all", "less"]
    assert {name: len(task.split("train")) for name, (task,) in tasks.items()} == {"all": 40, "few": 5, "less": 5}


def test_a_test_part_that_is_not_there(cola: Path):
    made = recipe().model_copy(update={"evaluate": "test"})
    with pytest.raises(ConfigError, match="evaluate is test, but task 'a' has only train, validation"):
        load_tasks(made, cola)


def test_a_limit_of_validation_rows_is_one_of_those_that_are_held_out(cola: Path):
    whole = sizes(load(cola, hold_out=True))
    limited = sizes(load(cola, hold_out=True, limit_validation=1))
    assert limited == {**whole, "validation": 1}
    assert whole["validation"] > 1
