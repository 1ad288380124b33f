"""Separate runs of a recipe as cells: one that fails stops no other. test_ray.py runs them on workers of Ray."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.film_recipes import LAST, methods, recipe, write_films
from tests.support.portions import one_in

from lamina.cells import run_cells as cells
from lamina.editing.insert import insert_
from lamina.errors import ConfigError, LayerIndexError, NotFiniteError, StoreError
from lamina.recipes import run_recipe as runner
from lamina.recipes.expand import with_part
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import Recipe
from lamina.store import load, save

BAD = {"fit": {"learning_rate": 1e38}}
OVER = "fit: the (loss|gradient|weight)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_films(tmp_path_factory.mktemp("separate"))


def of_two(folder: Path, second: dict[str, Any], **fields: Any) -> Recipe:
    return methods(folder, {"plain": {}, "other": second, "cut": {"edits": [{"truncate": {"keep": 1}}]}}, **fields)


# A run that fails


def test_a_run_that_fails_is_recorded_and_the_others_go_on(folder: Path, tmp_path: Path):
    run = run_recipe(of_two(folder, BAD), data=folder, output=tmp_path)
    (failure,) = run.failures
    assert failure.key == {"run": "film-other-0"}
    assert re.match(OVER, failure.error)
    assert [row["method"] for row in run.table] == ["plain", "cut"]
    assert [row["reader"] for row in run.rows] == ["film-plain-0", "film-cut-0"]
    assert [cell.row for cell in run.report.tables[0].cells] == ["plain", "cut"]
    (noted,) = json.loads((tmp_path / "failures.json").read_text())
    assert (noted["key"], noted["error"]) == (failure.key, failure.error)
    assert "NotFiniteError" in noted["traceback"]
    assert len(json.loads((tmp_path / "table.json").read_text())) == 2


@pytest.mark.long
def test_every_run_has_events_of_its_own(folder: Path, tmp_path: Path):
    pytest.importorskip("tensorboard")
    two = methods(folder, {"plain": {}, "other": {}}, fit={"tensorboard": True})
    assert not run_recipe(two, data=folder, output=tmp_path).failures
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == ["film-other-0", "film-plain-0"]
    assert len([*tmp_path.rglob("events.out.tfevents.*")]) == 2


def test_what_failed_is_run_again_and_nothing_else(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real, failing, trained = runner.train, [True], []

    def train(model: Any, tasks: Any, *args: Any, **how: Any) -> Any:
        trained.append(*tasks)
        if trained[-1] == "film-other-0" and failing:
            raise MemoryError("Unable to allocate 8.00 PiB for an array")
        return real(model, tasks, *args, **how)

    monkeypatch.setattr(runner, "train", train)
    (failure,) = run_recipe(of_two(folder, {}), data=folder, output=tmp_path).failures
    assert failure.error.startswith("recipe: 8.00 PiB more memory could not be allocated. Use a smaller batch_size")
    failing.clear()
    whole = run_recipe(of_two(folder, {}), data=folder, output=tmp_path, resume=True)
    assert trained == ["film-plain-0", "film-other-0", "film-cut-0", "film-other-0"]
    assert (len(whole.table), whole.failures) == (3, [])
    assert json.loads((tmp_path / "failures.json").read_text()) == []


def test_no_run_that_ends_is_an_error(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"recipe: none of 2 runs finished; the first, film-a-0: {OVER}"):
        run_recipe(methods(folder, {"a": BAD, "b": BAD}), data=folder, output=tmp_path)
    assert len(json.loads((tmp_path / "failures.json").read_text())) == 2
    assert not (tmp_path / "table.json").exists()


@pytest.mark.long
def test_processes_that_share_a_run_end_with_its_error(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cells, "world_size", lambda: 2)
    with pytest.raises(NotFiniteError, match=OVER):
        run_recipe(of_two(folder, BAD), data=folder)


def test_an_edit_that_cannot_be_made_is_refused_before_anything_is_trained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "train", None)
    edits = [{"insert": {"layers": "1-9"}}]
    with pytest.raises(LayerIndexError, match=r"layer 9 does not exist"):
        run_recipe(of_two(folder, {"edits": edits}), data=folder, output=tmp_path)
    assert not (tmp_path / "failures.json").exists()


@pytest.mark.long
def test_a_model_that_was_edited_before_is_trained(folder: Path, tmp_path: Path):
    model, tokenizer = load(str(folder / "base"))
    insert_(model, "ffn")
    save(model, tmp_path / "base", tokenizer)
    made = methods(tmp_path, {"frozen": {"edits": [{"freeze": {"train": "inserted"}}]}})
    assert run_recipe(made, data=folder).rows[0]["trained"] > 0


# The model that is kept


@pytest.mark.full
def test_of_equal_models_the_first_of_the_recipe_is_kept_whichever_ended_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = methods(folder, {"plain": {"fit": {"epochs": 8}}, "same": {"fit": {"epochs": 9}}})
    real, failing = runner.train, [True]

    def train(model: Any, tasks: Any, *args: Any, **how: Any) -> Any:
        if failing and "film-plain-0" in tasks:
            raise ValueError("not yet")
        return real(model, tasks, *args, **how)

    monkeypatch.setattr(runner, "train", train)
    run_recipe(made, data=folder, output=tmp_path)
    other = load(tmp_path / "models" / "film", "sequence_classification")[0].state_dict()
    failing.clear()
    run = run_recipe(made, data=folder, output=tmp_path, resume=True)
    assert run.rows[0]["score"] == run.rows[1]["score"] == 1.0
    own = load(tmp_path / "models" / "film", "sequence_classification")[0].state_dict()
    assert not torch.equal(own["classifier.weight"], other["classifier.weight"])
    assert {path.suffix for path in (tmp_path / "separate").iterdir()} == {".json"}


@pytest.mark.long
@pytest.mark.parametrize(("resume", "kept"), one_in(2, [(True, "good"), (False, "bad")]))
def test_a_part_that_is_added_to_a_folder_keeps_the_better_model_of_the_first_part(
    folder: Path, tmp_path: Path, resume: bool, kept: str
):
    two = methods(folder, {"good": {"fit": {"epochs": 8}}, "bad": {"fit": {"learning_rate": 1e-12}}})
    scores, states = {}, {}
    for method in ("good", "bad"):
        part = with_part(two, {"method": [method]})
        scores[method] = run_recipe(part, data=folder, output=tmp_path, resume=resume).rows[0]["score"]
        states[method] = load(tmp_path / "models" / "film", "sequence_classification")[0].state_dict()
    assert scores["good"] > scores["bad"]
    same = torch.equal(states["good"]["classifier.weight"], states["bad"]["classifier.weight"])
    assert same == (kept == "good")


def test_a_model_that_is_not_where_its_worker_wrote_it_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lamina.recipes.separate_runs.save", lambda *_: None)
    with pytest.raises(StoreError, match=r"the model of film-plain-0 is not in .*film-plain-0\.model, .*keep: none"):
        run_recipe(methods(folder, {"plain": {}}), data=folder, output=tmp_path)


@pytest.mark.parametrize(
    ("first", "then", "lacks"),
    [
        ("none", "best", "a model of 'film', and"),
        ("best", "all", "the model of film-plain-0, and"),
        ("best", "best", None),
        ("all", "none", None),
    ],
)
def test_models_of_finished_runs_that_another_keep_would_have_saved_are_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, then: str, lacks: str | None
):
    run_recipe(methods(folder, {"plain": {}}, keep=first), data=folder, output=tmp_path)
    caplog.clear()
    run_recipe(methods(folder, {"plain": {}}, keep=then), data=folder, output=tmp_path, resume=True)
    warned = [record.message for record in caplog.records if "Train without resume" in record.message]
    assert len(warned) == (lacks is not None)
    assert lacks is None or f"the subfolder models lacks {lacks} the runs have finished" in warned[0]


# Workers


def test_readers_that_share_a_pass_go_to_no_workers(folder: Path):
    with pytest.raises(ConfigError, match=r"ray is set; the readers of the recipe share .* separately: true"):
        run_recipe(recipe(folder, {"last": LAST}), data=folder, ray="local")


def test_a_worker_reads_data_that_has_changed_since_the_last_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_films(tmp_path / "films")
    monkeypatch.setattr(runner, "run_cells", lambda *args, ray, **how: cells.run_cells(*args, **how))
    two = methods(folder, {"plain": {}}, fit={"epochs": 1})
    before = run_recipe(two, data=folder, ray="local")
    lines = (folder / "validation.tsv").read_text().splitlines(keepends=True)
    (folder / "validation.tsv").write_text("".join(lines[:2]))
    after, here = (run_recipe(two, data=folder, ray=ray) for ray in ("local", None))
    assert before.rows[0]["score"] != after.rows[0]["score"]
    assert after.rows == here.rows
