"""Workers of Ray give what one process gives: bulk prediction, cells of studies, and runs of recipes."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from tests.support.cells import cells, run_that_dies, runs
from tests.support.dying import Odd, dies
from tests.support.film_recipes import LAST, methods, recipe, write_films
from tests.support.probing_sets import probing_sets
from tests.support.stored import TEXTS, save_base, tiny_bank

import lamina
from lamina.cells import run_cells as cell_runs
from lamina.errors import ConfigError, DataError, LaminaError
from lamina.prediction import ray_workers
from lamina.prediction.ray_workers import in_order
from lamina.recipes import run_recipe as runner
from lamina.recipes.run_recipe import run_recipe
from lamina.store import load
from lamina.studies import benchmark
from lamina.studies.runner import Cell, run_cells

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.long  # processes that import torch take long; see `make test-long`
quiet = partial(run_cells, progress=False)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start two workers on this machine, which the addresses "local" and "auto" then stand for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 27)
        yield
        ray.shutdown()


@pytest.fixture
def light() -> Iterator[None]:
    """Send workers their class itself: to find it by name, they would import torch first, which takes seconds."""
    ray.cloudpickle.register_pickle_by_value(ray_workers)
    yield
    ray.cloudpickle.unregister_pickle_by_value(ray_workers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_films(tmp_path_factory.mktemp("films"))


# Bulk prediction


@pytest.mark.usefixtures("light")
def test_items_are_taken_as_they_are_needed_and_what_a_worker_that_dies_had_in_hand_is_done_again(tmp_path: Path):
    """With one worker, since each takes seconds to start; the file below is answered by two."""
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    answers = in_order(functools.partial(dies, tmp_path / "mark", False), "local", 1, "test", items())
    assert next(answers) == 0
    assert len(taken) <= 3
    assert list(answers) == list(range(1, 20))
    assert (tmp_path / "mark").exists()


def test_a_worker_that_dies_again_and_again_is_told_after_the_answers_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_workers, "RETRIES", 1)
    answers = in_order(functools.partial(dies, tmp_path / "mark", True), "local", 1, "test", range(8))
    assert [next(answers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LaminaError, match=r"test: a worker of Ray died .* run again to continue"):
        next(answers)


@pytest.mark.parametrize(("wrong", "kind"), [((0,), ValueError), ((3,), DataError), ((2, 3), ValueError)])
def test_an_error_of_the_work_is_raised_as_it_is_and_its_item_is_not_tried_again(
    tmp_path: Path, wrong: tuple[int, ...], kind: type[Exception]
):
    answers = in_order(Odd(tmp_path, wrong), "local", 1, "test", range(6))
    assert [next(answers) for _ in range(wrong[0])] == list(range(wrong[0]))
    with pytest.raises(kind, match=rf"^item {wrong[0]}$"):
        next(answers)
    assert (tmp_path / str(wrong[0])).read_text() == "x"


def test_an_error_in_the_beginning_of_the_work_is_no_death_of_the_worker(tmp_path: Path):
    with pytest.raises(OSError, match="no GPU"):
        next(in_order(Odd(tmp_path, (), begins=False), "local", 1, "test", range(2)))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("light")
def test_what_the_items_raise_comes_after_the_answers_before():
    def items() -> Iterator[int]:
        yield 1
        raise DataError("row 2")

    answers = in_order(float, "local", 1, "test", items())
    assert next(answers) == 1.0
    with pytest.raises(DataError, match="row 2"):
        next(answers)


def test_more_workers_than_there_are_cores_are_refused():
    with pytest.raises(ConfigError, match=r"test: 3 workers were asked for; the cluster has 2 cores and 0 GPUs"):
        next(in_order(float, "local", 3, "test", range(2)))


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_is_answered_as_in_one_process_up_to_a_bad_row(tmp_path: Path):
    """And one process goes on where the workers ended."""
    bank, source = tiny_bank(), tmp_path / "texts.jsonl"
    texts = [f"{TEXTS[at % 3]}" + " film" * (at % 7) for at in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[30] = json.dumps({"text": 5})
    source.write_text("\n".join(lines))
    options = {"chunk_rows": 8, "progress": False}
    alone = lamina.predict_file(bank, source, tmp_path / "alone.jsonl", skip_bad=True, **options)
    with pytest.raises(DataError, match="row 31"):
        lamina.predict_file(bank, source, tmp_path / "ray.jsonl", ray="local", workers=2, **options)
    kept = rows_of(tmp_path / ".ray.jsonl.partial")
    assert len(kept) == 30  # those before the bad one
    found = lamina.predict_file(bank, source, tmp_path / "ray.jsonl", skip_bad=True, **options)
    assert (found.rows, found.skipped) == (alone.rows, alone.skipped) == (59, 1)
    for one, other in zip(rows_of(alone.output), rows_of(found.output), strict=True):
        assert (one["row"], one["text"]) == (other["row"], other["text"])
        mood = one["readers"]["mood"]["probabilities"]
        assert other["readers"]["mood"]["probabilities"] == pytest.approx(mood, abs=1e-5)


def test_a_file_is_answered_by_workers_to_its_end(tmp_path: Path):
    (source := tmp_path / "texts.txt").write_text("".join(f"{TEXTS[at % 3]}\n" for at in range(60)))
    options = {"chunk_rows": 8, "progress": False}
    alone = lamina.predict_file(tiny_bank(), source, tmp_path / "alone.jsonl", **options)
    found = lamina.predict_file(tiny_bank(), source, tmp_path / "ray.jsonl", ray="local", **options)
    assert (found.rows, found.skipped) == (alone.rows, alone.skipped) == (60, 0)


# Cells of studies


def test_a_cell_whose_worker_was_killed_is_tried_again_and_the_table_is_the_same(tmp_path: Path):
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    table, _ = quiet(cells(here, 6))
    spread, failures = quiet(cells(there, 6, dies=3), ray="auto", output=tmp_path / "out")
    assert failures == []
    assert runs(there) == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    workers = {pid for path in there.glob("*.runs") for pid in path.read_text().split()}
    assert str(os.getpid()) not in workers
    pd.testing.assert_frame_equal(spread, table)
    resumed, _ = quiet(cells(there, 6), output=tmp_path / "out", resume=True)
    pd.testing.assert_frame_equal(resumed, table)


def test_a_cell_that_kills_every_worker_or_raises_is_recorded_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cell_runs, "RETRIES", 1)
    table, failures = quiet(cells(tmp_path, 3, fails=0, dies=1, always=True), ray="auto")
    assert [failure.key["seed"] for failure in failures] == [0, 1]
    assert failures[0].error == "ValueError: number 0 is odd"
    assert "its worker died 2 times" in failures[1].error
    assert table["seed"].tolist() == [2, 2]
    assert runs(tmp_path) == {0: 1, 1: 2, 2: 1}  # what raises is not tried again


def test_a_cell_that_does_not_pickle_is_refused(tmp_path: Path):
    held = (tmp_path / "held").open("w")
    with pytest.raises(ConfigError, match=r"study: a cell cannot be sent to a worker .*functools.partial"):
        quiet([Cell({"seed": 0}, lambda: [{"score": held.fileno()}])], ray="auto")
    held.close()


@pytest.mark.parametrize("points", [None, [16, 32]])
def test_a_benchmark_on_workers_is_that_of_one_process(points: list[int] | None, tmp_path: Path):
    setting = "normal" if points is None else "scarce"
    options = {"methods": ("majority", "embedding", "scalar_mix"), "seeds": [0], "scored": 40, "progress": False}
    options |= {"data": probing_sets(tmp_path / "sets"), "setting": setting, "points": points}
    model = save_base(tmp_path / "base")
    here, there = (benchmark(model, ray=ray, **options) for ray in (None, "auto"))
    assert [failure["key"]["set"] for failure in there.settings["failures"]] == ["4_lost"] * len(points or [None])
    timed = ["seconds", "pass_seconds"]
    pd.testing.assert_frame_equal(here.table.drop(columns=timed), there.table.drop(columns=timed))


# Runs of recipes


def steps(folder: Path) -> dict[str, int]:
    return {path.stem: len(path.read_text().splitlines()) for path in sorted(folder.glob("*.runs"))}


def test_a_run_whose_worker_was_killed_goes_on_from_its_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Relative paths too."""
    monkeypatch.chdir(folder)
    fit = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, "progress": False, "save_steps": 1}
    made = methods(Path(), {"plain": {}, "cut": {"edits": [{"truncate": {"keep": 1}}]}}, fit=fit, seeds=[0, 1])
    whole = run_recipe(made, data=".", output=tmp_path / "here")
    (notes := tmp_path / "notes").mkdir()
    monkeypatch.setattr(runner, "_train_in_worker", partial(run_that_dies, str(notes), "film-plain-1", 5))
    spread = run_recipe(made, data=".", output=tmp_path / "there", ray="auto")
    assert (spread.table, spread.rows, spread.history) == (whole.table, whole.rows, whole.history)
    assert (spread.failures, spread.steps) == ([], whole.steps)
    assert steps(notes) == {"film-cut-0": 6, "film-cut-1": 6, "film-plain-0": 6, "film-plain-1": 7}  # one step twice
    workers = {pid for path in notes.glob("*.runs") for pid in path.read_text().split()}
    assert len(workers) > 1
    assert str(os.getpid()) not in workers
    best, same = (load(tmp_path / place / "models" / "film")[0].state_dict() for place in ("here", "there"))
    assert best.keys() == same.keys()
    assert all(torch.equal(value, same[name]) for name, value in best.items())
    assert {path.suffix for path in (tmp_path / "there" / "separate").iterdir()} == {".json"}
    monkeypatch.setattr(runner, "train", None)
    assert run_recipe(made, data=".", output=tmp_path / "there", resume=True).table == whole.table


def test_separate_readers_on_workers_and_without_an_output(folder: Path):
    made = recipe(folder, {"last": LAST, "more": {**LAST, "learning_rate": 0.1}}, separately=True)
    whole = run_recipe(made, data=folder)
    spread = run_recipe(made, data=folder, ray="auto")
    assert (spread.rows, spread.importances) == (whole.rows, whole.importances)
