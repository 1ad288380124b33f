"""Cells: one table whatever ended when and where, resumed without doing one twice, failures recorded."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from tests.support.cells import cells, needs_ray, runs
from tests.support.recorded import packed
from tests.support.stored import tiny_model, tiny_tokenizer

from lamina.cells import run_cells as cell_runs
from lamina.cells.run_cells import Shelf
from lamina.errors import ConfigError, MissingExtraError, StoreError
from lamina.registry import STUDIES
from lamina.studies import advise, reinit, removal
from lamina.studies.run_study import parameters_of
from lamina.studies.runner import Cell, Failure, run_cells, whole_digests
from lamina.tasks.chat_templates import Chat
from lamina.tasks.task import Task

quiet = partial(run_cells, progress=False)


def test_rows_have_the_keys_of_their_cells_in_the_order_of_the_cells(tmp_path):
    table, failures = quiet(cells(tmp_path, 3))
    assert failures == []
    assert list(table.columns) == ["task", "seed", "layer", "score", "loss"]
    assert table["seed"].tolist() == [0, 0, 1, 1, 2, 2]
    assert table["score"].dtype == float
    assert table["loss"].isna().all()
    assert table["score"].nunique() == 6  # each cell draws from a random state of its own


@pytest.mark.parametrize("study", [advise, reinit, removal])
def test_studies_that_edit_models_refuse_recorded_states(study, tmp_path):
    """They are the states of the model before the edit, so every edit would seem to cost nothing."""
    labels = [{"label": label} for label in "ab" * 5]
    parts = {
        part: (packed(tmp_path / part, [torch.rand(2, 1, 32)] * 10, [3]), labels) for part in ("train", "validation")
    }
    task = Task.from_states("sequence_classification", **parts)
    told = f"^{study.__name__}: task 'mood' has recorded states, which no edit of the model changes"
    with pytest.raises(ConfigError, match=told):
        study(tiny_model(3), {"mood": task}, processor=tiny_tokenizer(), seeds=[0], epochs=1, progress=False)


def test_no_cell_gives_an_empty_table():
    table, failures = quiet([])
    assert (len(table), failures) == (0, [])


def test_a_cell_gives_the_same_alone_and_after_others(tmp_path):
    table, _ = quiet(cells(tmp_path, 3))
    (*_, last) = cells(tmp_path, 3)
    alone, _ = quiet([last])
    pd.testing.assert_frame_equal(alone, table.query("seed == 2").reset_index(drop=True))


def test_a_cell_that_fails_is_recorded_and_the_others_go_on(tmp_path):
    table, (failure,) = quiet(cells(tmp_path, 3, fails=1), output=tmp_path / "out")
    assert table["seed"].tolist() == [0, 0, 2, 2]
    assert isinstance(failure, Failure)
    assert (failure.key, failure.error) == ({"task": "toy", "seed": 1}, "ValueError: number 1 is odd")
    (noted,) = json.loads((tmp_path / "out" / "failures.json").read_text())
    assert noted["error"] == failure.error
    assert "_work" in noted["traceback"]


def test_an_error_outside_the_work_of_a_cell_has_the_traceback_of_the_worker(monkeypatch: pytest.MonkeyPatch):
    exceptions = pytest.importorskip("ray.exceptions")
    trace = "Traceback (most recent call last):\n  File 'x.py', line 3\nImportError: no module of that name"
    error = exceptions.RayTaskError("_outcome", trace, ImportError("no module of that name"), "proc", 1, "ip")

    def get(number: int) -> dict[str, float]:
        if number:
            raise error.as_instanceof_cause()
        return {"score": 0.5}

    ray = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 1.0},
        remote=lambda **_: lambda _work: SimpleNamespace(remote=lambda cell, _op: cell.key["seed"]),
        wait=lambda pending, num_returns: (pending[:num_returns], pending[num_returns:]),
        get=get,
        exceptions=exceptions,
    )
    monkeypatch.setattr(cell_runs, "import_ray", lambda _op: ray)
    both = [Cell({"seed": seed}, dict) for seed in range(2)]
    states, (failure,) = cell_runs.run_cells(
        both, op="study", done={}, on_end=lambda *_: None, progress=False, ray="local"
    )
    assert states == [{"score": 0.5}]
    assert (failure.key, failure.error) == ({"seed": 1}, "ImportError: no module of that name")
    assert "File 'x.py', line 3" in failure.traceback


@pytest.mark.parametrize("folder", ["file/out", "file"])
def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path, folder):
    (tmp_path / "file").write_text("")
    (cell, *_) = cells(tmp_path, 1)
    with pytest.raises(StoreError, match=r"save: .* cannot be written \(.*Check the rights and the space there"):
        Shelf(tmp_path / folder, lambda _: {}, op="study", what="study").write(cell, {})


def test_a_cell_without_enough_memory_says_what_to_do():
    def greedy() -> list[dict[str, object]]:
        raise MemoryError("Unable to allocate 8.00 PiB for an array")

    _, (failure,) = quiet([Cell({"seed": 0}, greedy)])
    assert failure.error.startswith("study: 8.00 PiB more memory could not be allocated. Use a smaller batch_size")


def test_resume_runs_no_cell_twice_and_gives_the_same_table(tmp_path):
    whole, _ = quiet(cells(tmp_path / "x", 0) or cells(tmp_path))
    (second := tmp_path / "second").mkdir()

    def interrupted() -> list[dict[str, object]]:
        raise KeyboardInterrupt

    killed = [*cells(second)[:2], Cell({"task": "toy", "seed": 2}, interrupted), cells(second)[3]]
    with pytest.raises(KeyboardInterrupt):
        quiet(killed, output=tmp_path / "out", settings={"model": "m"})
    assert runs(second) == {0: 1, 1: 1}
    again, failures = quiet(cells(second), output=tmp_path / "out", settings={"model": "m"}, resume=True)
    assert runs(second) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert failures == []
    pd.testing.assert_frame_equal(again, whole)


def test_resume_runs_what_failed_again_and_clears_the_record(tmp_path):
    quiet(cells(tmp_path, 2, fails=1), output=tmp_path / "out")
    table, failures = quiet(cells(tmp_path, 2), output=tmp_path / "out", resume=True)
    assert (len(table), failures) == (4, [])
    assert runs(tmp_path) == {0: 1, 1: 2}
    assert json.loads((tmp_path / "out" / "failures.json").read_text()) == []


def test_a_study_resumes_under_its_own_settings_only(tmp_path):
    quiet(cells(tmp_path, 1), output=tmp_path / "out", settings={"epochs": 1})
    with pytest.raises(
        ConfigError, match=r"belongs to a study with epochs 1, here 2; resuming needs the same settings"
    ):
        quiet(cells(tmp_path, 1), output=tmp_path / "out", settings={"epochs": 2}, resume=True)


@pytest.mark.parametrize("other", [{"layers": (1, 2)}, {"layers": (3,)}, {"seeds": (0,)}])
def test_a_run_anew_keeps_other_cells(other, tmp_path):
    whole, _ = quiet(cells(tmp_path, 3), output=tmp_path / "out", settings={"layers": (1, 2)})
    quiet([replace(cells(tmp_path, 1)[0], name="mine")], output=tmp_path / "out", settings=other)
    again, _ = quiet(cells(tmp_path, 3), output=tmp_path / "out", settings={"layers": (1, 2)}, resume=True)
    assert runs(tmp_path) == {0: 2, 1: 1, 2: 1}
    pd.testing.assert_frame_equal(again, whole)


def test_a_damaged_cell_is_refused_with_its_file(tmp_path):
    quiet(cells(tmp_path, 1), output=tmp_path / "out")
    (path,) = (tmp_path / "out" / "cells").iterdir()
    path.write_text(path.read_text().replace('"layer": 1', '"layer": 7'))
    with pytest.raises(StoreError, match=rf"study: .*{path.name} cannot be used .*checksum differs.* Remove it"):
        quiet(cells(tmp_path, 1), output=tmp_path / "out", resume=True)


def test_two_cells_of_one_key_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"two cells have the key \{'task': 'toy', 'seed': 0\}"):
        quiet([*cells(tmp_path, 1), *cells(tmp_path, 1)])


def test_resume_needs_an_output(tmp_path):
    with pytest.raises(ConfigError, match="resume is True, but there is no output"):
        quiet(cells(tmp_path, 1), resume=True)


def test_progress_says_how_many_cells_ended_and_the_time_left(tmp_path, capsys):
    run_cells(cells(tmp_path, 2))
    shown = capsys.readouterr().err
    assert "cells" in shown
    assert "2/2" in shown


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"study: needs the package 'ray'.*lamina\[ray\]"):
        quiet(cells(tmp_path, 1), ray="local")


@needs_ray
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("auto", r"no cluster of Ray answers at 'auto'.*ray start --head"),
        ("127.0.0.1:1", r"no cluster of Ray answers at '127.0.0.1:1' \(.*refused\)"),
        ("somewhere", "ray is 'somewhere'; it must be 'local', 'auto' or an address"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(tmp_path, monkeypatch, address, told):
    # clusters that other tests or programs run on this machine at the same time
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", functools.cache(set))
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda *_: None)
    with pytest.raises(ConfigError, match=told):
        quiet(cells(tmp_path, 1), ray=address)


def test_texts_differ_by_their_parts_and_roles():
    chats = [Chat([{"role": role, "content": "a"}]) for role in ("user", "assistant")]
    texts = [["a b"], [("a", "b")], [("a b", "")], ["a", "b"], ["b", "a"], ["a"], chats[:1], chats[1:]]
    assert len({str(whole_digests("", part)) for part in texts}) == len(texts)
    assert whole_digests("", [["a", "b"]]) == whole_digests("", iter([("a", "b")]))


def test_studies_that_read_texts_and_resume_are_known():
    """The cells of each must have the digest of the texts: other texts of the same number are other data."""
    options = {name: parameters_of(name) for name in STUDIES.names()}
    assert {name for name, known in options.items() if {"texts", "resume"} <= set(known)} == {"removal", "advise"}
