"""From a recipe to tasks and readers: each method, setting, seed and draw once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.training import names, yes_no

from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.recipes.members import load_task, plan, read_sweeps, trials, with_sweep
from lamina.recipes.schema import Recipe

ADA = {"fusion": {"name": "ada_layers", "dim": 8}}


def recipe(readers: dict[str, Any], *, preset: str = "cola", seeds: tuple[int, ...] = (0,), **task: Any) -> Recipe:
    return Recipe.model_validate(
        {"model": "m", "seeds": list(seeds), "tasks": {"a": {"preset": preset, "readers": readers, **task}}}
    )


# Readers


def test_a_reader_for_every_method_and_seed():
    found = plan(recipe({"Ada": ADA, "the mean": {"fusion": "mean"}}, seeds=(0, 3)), {"a": yes_no()}, {})
    assert list(found) == ["a-Ada-0", "a-Ada-3", "a-the-mean-0", "a-the-mean-3"]
    one = found["a-Ada-3"]
    assert (one.task, one.trial, one.member.template) == ("a", 0, "a")
    assert one.member.name == "a-Ada-3"
    assert one.member.settings == {"method": "Ada", "seed": 3}
    assert (one.member.reader.fusion, one.member.reader.seed) == (AdaLayers(dim=8), 3)
    assert one.member.reader.head == SequenceClassification(("no", "yes"))
    assert found["a-the-mean-0"].member.reader.fusion == Mean()


def test_the_head_fits_the_task():
    found = plan(recipe({"Ada": {**ADA, "head": {"feedforward": 12}}}), {"a": names()}, {})
    assert found["a-Ada-0"].member.reader.head == TokenClassification(names().labels, feedforward=12)


def test_a_reader_for_every_setting():
    grid = {"alpha": [1, 8], "epochs": [5, 6]}
    found = plan(recipe({"Ada": {**ADA, "grid": grid}}, seeds=(0, 1)), {"a": yes_no()}, {"epochs": 9})
    assert list(found) == [f"a-Ada_000{number}-{seed}" for number in (1, 2, 3, 4) for seed in (0, 1)]
    one = found["a-Ada_0003-1"].member
    assert one.settings == {"method": "Ada", "fusion.alpha": 8, "epochs": 5, "seed": 1}
    assert (one.reader.fusion.alpha, one.epochs, one.reader.seed) == (8, 5, 1)  # pyright: ignore


def test_a_grid_over_seeds_takes_the_place_of_the_recipe_s():
    found = plan(recipe({"Ada": {**ADA, "grid": {"seed": [7, 8]}}}, seeds=(0, 1)), {"a": yes_no()}, {})
    assert [one.member.reader.seed for one in found.values()] == [7, 8]


def test_every_draw_has_readers_that_start_differently():
    found = plan(recipe({"Ada": ADA}, seeds=(0, 1), draw={"rows": 3, "trials": 3}), {"a": yes_no()}, {})
    assert [(name, one.trial, one.member.settings["draw"]) for name, one in found.items()] == [
        (f"a-Ada-{seed}-{trial}", trial, trial) for seed in (0, 1) for trial in (0, 1, 2)
    ]
    assert len({one.member.reader.seed for one in found.values()}) == 6
    assert [one.member.settings["seed"] for one in found.values()] == [one.member.reader.seed for one in found.values()]


@pytest.mark.parametrize(
    ("reader", "task", "options", "epochs", "rate"),
    [
        ({}, {}, {}, 3, 1e-3),
        ({}, {}, {"epochs": 9, "learning_rate": 0.9}, 9, 0.9),
        ({}, {"epochs": 8, "learning_rate": 0.8}, {"epochs": 9, "learning_rate": 0.9}, 8, 0.8),
        ({"learning_rate": 0.7}, {"epochs": 8, "learning_rate": 0.8}, {"epochs": 9}, 8, 0.7),
        ({"learning_rate": 0.7, "grid": {"epochs": [6], "learning_rate": [0.6]}}, {"epochs": 8}, {}, 6, 0.6),
    ],
)
def test_epochs_and_rate_of_the_closest_place(
    reader: dict[str, Any], task: dict[str, Any], options: dict[str, Any], epochs: int, rate: float
):
    (found,) = plan(recipe({"Ada": {**ADA, **reader}}, **task), {"a": yes_no()}, options).values()
    assert (found.member.epochs, found.member.learning_rate) == (epochs, rate)


def test_two_methods_of_one_name():
    with pytest.raises(ConfigError, match=r"tasks\.a\.readers\.Ada!: 'a-Ada-0' is the name of another reader too"):
        plan(recipe({"Ada": ADA, "Ada!": {"fusion": "mean"}}), {"a": yes_no()}, {})


def test_a_grid_over_a_key_that_the_method_lacks():
    with pytest.raises(UnknownNameError, match="grid of 'a-m', Mean: unknown key 'alpha'"):
        plan(recipe({"m": {"fusion": "mean", "grid": {"alpha": [1]}}}), {"a": yes_no()}, {})


# Tasks


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    """The published format, with few rows."""
    (tmp_path / "cola").mkdir()
    for part, count in (("train", 40), ("dev", 10)):
        rows = [f"x\t{row % 4 and 1}\t\t{part} sentence {row} .\n" for row in range(count)]
        (tmp_path / "cola" / f"{part}.tsv").write_text("".join(rows))
    return tmp_path


def test_a_task_as_published(cola: Path):
    task = load_task("a", recipe({"Ada": ADA}, preset="glue/cola").tasks["a"], cola)
    assert ({part: len(split) for part, split in task.splits.items()}) == {"train": 40, "validation": 10}
    assert task.metric == "mcc"


def test_holding_out_a_tenth_makes_the_published_validation_part_the_test(cola: Path):
    published = load_task("a", recipe({"Ada": ADA}).tasks["a"], cola)
    task = load_task("a", recipe({"Ada": ADA}, hold_out=True, metric="accuracy").tasks["a"], cola)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 36, "validation": 4, "test": 10}
    assert task.split("test") == published.split("validation")
    assert sorted(task.split("train").texts + task.split("validation").texts) == sorted(published.split("train").texts)
    assert sorted(task.split("validation").labels) == [0, 1, 1, 1]
    assert task.metric == "accuracy"


def test_holding_out_a_tenth_keeps_a_published_test_part(tmp_path: Path):
    for part, count in (("train", 20), ("validation", 4), ("test", 6)):
        rows = [f"{part} {row}\t{('no', 'yes')[row % 2]}\n" for row in range(count)]
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    files = {part: f"{part}.tsv" for part in ("train", "validation", "test")}
    body = {"files": files, "hold_out": True, "readers": {"Ada": ADA}}
    made = Recipe.model_validate({"model": "m", "tasks": {"mine": body}})
    task = load_task("mine", made.tasks["mine"], tmp_path)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 18, "validation": 2, "test": 6}
    assert all(text.startswith("test ") for text in task.split("test").texts)


def test_a_metric_that_the_task_lacks(cola: Path):
    with pytest.raises(UnknownNameError, match="task cola: unknown metric 'span_f1'; known: mcc, accuracy"):
        load_task("a", recipe({"Ada": ADA}, metric="span_f1").tasks["a"], cola)


def test_limits(cola: Path):
    task = load_task("a", recipe({"Ada": ADA}, limit=7, limit_validation=5).tasks["a"], cola)
    assert (len(task.split("train")), len(task.split("validation"))) == (7, 5)


def test_files(tmp_path: Path):
    for part in "ab":
        (tmp_path / f"{part}.tsv").write_text("said\tlabel\nfirst\tno\nsecond\tyes\n")
    body = {"files": {"train": "a.tsv", "validation": "b.tsv"}, "text": "said", "readers": {"Ada": ADA}}
    found = Recipe.model_validate({"model": "m", "tasks": {"mine": body}})
    task = load_task("mine", found.tasks["mine"], tmp_path)
    assert (task.name, task.labels, task.split("train").texts) == ("mine", ("no", "yes"), ("first", "second"))
    body["files"] = {"train": "a.tsv", "dev": "b.tsv"}
    with pytest.raises(ConfigError, match=r"tasks\.mine\.files: 'dev' is no part"):
        load_task("mine", Recipe.model_validate({"model": "m", "tasks": {"mine": body}}).tasks["mine"], tmp_path)


def test_every_trial_draws_rows_of_its_own(cola: Path):
    task = yes_no(train=40)
    drawn = trials(recipe({"Ada": ADA}, draw={"per_class": 5, "trials": 3}).tasks["a"], task)
    assert [len(one.split("train")) for one in drawn] == [10, 10, 10]
    assert len({one.split("train").texts for one in drawn}) == 3
    assert [one.drawn and one.drawn["seed"] for one in drawn] == [0, 1, 2]
    assert all(one.split("validation") is task.split("validation") for one in drawn)


def test_a_task_that_draws_nothing_is_the_task_itself():
    task = yes_no()
    assert trials(recipe({"Ada": ADA}).tasks["a"], task) == [task]


# Sweeps


def test_sweeps_are_read_as_numbers_words_and_lists():
    given = ["fusion.alpha=1,8,64", "fusion.entropy=0,1e-3", "layers=[1, 2],1-", "fusion=mean,ada_layers"]
    assert read_sweeps(given) == {
        "fusion.alpha": [1, 8, 64],
        "fusion.entropy": [0, 0.001],
        "layers": [[1, 2], "1-"],
        "fusion": ["mean", "ada_layers"],
    }


@pytest.mark.parametrize("given", ["alpha", "alpha=", "=1,2", "alpha=[1", ""])
def test_a_sweep_without_a_key_or_values(given: str):
    with pytest.raises(ConfigError, match="names no values; the form is key=value,value"):
        read_sweeps([given])


def test_a_sweep_that_comes_twice():
    with pytest.raises(ConfigError, match="sweep: 'alpha' is there twice"):
        read_sweeps(["alpha=1", "alpha=2"])


def test_a_sweep_goes_to_every_reader_that_has_its_key():
    readers = {"Ada": {**ADA, "grid": {"fusion.dim": [4], "seed": [1, 2]}}, "one": {"fusion": "single_layer"}}
    swept = with_sweep(recipe({**readers, "mean": {"fusion": "mean"}}), {"dim": [8, 16], "fusion.alpha": [1.0]})
    grids = {method: reader.grid for method, reader in swept.tasks["a"].readers.items()}
    assert grids == {
        "Ada": {"seed": [1, 2], "fusion.dim": [8, 16], "fusion.alpha": [1.0]},
        "one": {"fusion.dim": [8, 16]},
        "mean": {},
    }


def test_a_sweep_takes_the_place_of_a_short_key_too():
    swept = with_sweep(recipe({"Ada": {**ADA, "grid": {"dim": [4], "alpha": [1]}}}), {"fusion.dim": [8]})
    assert swept.tasks["a"].readers["Ada"].grid == {"alpha": [1], "fusion.dim": [8]}


def test_a_sweep_over_training_goes_to_every_reader():
    swept = with_sweep(recipe({"Ada": ADA, "mean": {"fusion": "mean"}}), {"epochs": [1, 2]})
    assert [reader.grid for reader in swept.tasks["a"].readers.values()] == [{"epochs": [1, 2]}] * 2


def test_a_sweep_that_no_reader_has_the_key_of():
    with pytest.raises(UnknownNameError, match=r"sweep: unknown key 'alpha'; known: fusion, fusion\.layers"):
        with_sweep(recipe({"mean": {"fusion": "mean"}}), {"alpha": [1]})


def test_a_sweep_over_a_short_key_that_may_mean_two():
    with pytest.raises(ConfigError, match=r"'dropout' may mean fusion\.dropout or head\.dropout"):
        with_sweep(recipe({"Ada": ADA}), {"dropout": [0.1]})
