"""Law 9 for fine-tuning: a killed run resumes to the weights of the uninterrupted one; and what a run writes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tests.support.deaths import die_at_step, forked
from tests.support.finetuned import bert, tensors, tune
from tests.support.portions import one_in
from tests.support.training import same, yes_no

import lamina
from lamina.errors import ConfigError
from lamina.train.checkpoint import Checkpoints
from lamina.train.engine import Engine

OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 4, "save_steps": 4, "warmup_ratio": 0.2, "weight_decay": 0.1}
PER_EPOCH = 10


def job() -> tuple[Any, Any]:
    return bert(dropout=0.3), yes_no(train=40)


@pytest.fixture(scope="module")
def whole() -> tuple[dict[str, torch.Tensor], Any]:
    model, task = job()
    result = tune(model, task, **OPTIONS)
    return tensors(model), result


class KilledError(Exception):
    pass


DYING: dict[str, type[Any]] = {"step": Engine, "score": Engine, "save": Checkpoints}


def newest_checkpoint(folder: Path) -> Path | None:
    return Checkpoints(folder, "finetune").newest()


def killed(output: Path, when: int, where: str = "step", /, **options: Any) -> None:
    """A run that ends at call number `when` of one of the engine's methods."""
    model, task = job()
    plain, calls = getattr(DYING[where], where), []

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == when:
            raise KilledError
        return plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DYING[where], where, dying)
        with pytest.raises(KilledError):
            tune(model, task, output, **{**OPTIONS, **options})


def check_resumed(output: Path, whole: tuple[dict[str, torch.Tensor], Any], **options: Any) -> None:
    model, task = job()
    result = tune(model, task, output, resume=True, **{**OPTIONS, **options})
    assert same(tensors(model), whole[0])
    assert (result.history, result.best, result.steps) == (whole[1].history, whole[1].best, whole[1].steps)
    again = lamina.load(output, "AutoModelForSequenceClassification")[0]
    assert same(tensors(again), whole[0])


@pytest.mark.parametrize(
    "when", one_in(6, [1, PER_EPOCH, PER_EPOCH + 1, PER_EPOCH + 6, 2 * PER_EPOCH + 1, 3 * PER_EPOCH], 3)
)
def test_a_killed_run_resumes(when: int, whole: Any, tmp_path: Path):
    killed(tmp_path, when)
    check_resumed(tmp_path, whole)


@pytest.mark.parametrize(("when", "every"), one_in(4, [(1, 2), (1, 5), (2, 2), (2, 5)], 1))
def test_a_run_that_is_killed_while_it_scores_resumes(when: int, every: int, whole: Any, tmp_path: Path):
    """The last step of an epoch is one of those that save."""
    killed(tmp_path, when, "score", save_steps=every)
    check_resumed(tmp_path, whole, save_steps=every)


@pytest.mark.long
def test_a_run_that_is_killed_while_it_saves_resumes(whole: Any, tmp_path: Path):
    killed(tmp_path, 4, "save")
    check_resumed(tmp_path, whole)


@pytest.mark.long
def test_an_ended_run_does_not_go_on(whole: Any, tmp_path: Path):
    model, task = job()
    tune(model, task, tmp_path, **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", None)
        check_resumed(tmp_path, whole)


@pytest.mark.long
def test_a_run_with_a_limit_of_steps_resumes(tmp_path: Path):
    limit: dict[str, Any] = {"max_steps": PER_EPOCH + 5}
    model, task = job()
    whole = tune(model, task, **{**OPTIONS, **limit})
    killed(tmp_path, PER_EPOCH + 5, **limit)
    check_resumed(tmp_path, (tensors(model), whole), **limit)
    check_resumed(tmp_path, (tensors(model), whole), **limit)  # once more, now that it has ended


def killed_at(step: int, output: Path) -> None:
    """A run that kills its own process."""
    die_at_step(step)
    model, task = job()
    tune(model, task, output, **OPTIONS)


@pytest.mark.full  # hostile/test_kill_runs.py kills processes in every run
def test_a_process_that_is_killed_resumes(whole: Any, tmp_path: Path):
    ended = forked(lambda: killed_at(15, tmp_path))
    assert ended.code == -signal.SIGKILL, ended.err
    assert newest_checkpoint(tmp_path / "checkpoints") is not None
    check_resumed(tmp_path, whole)


def test_a_run_with_other_options_is_not_resumed(tmp_path: Path):
    model, task = job()
    tune(model, task, tmp_path, epochs=1)
    with pytest.raises(
        ConfigError,
        match=r"finetune: the checkpoint in .* was made with .*; a run must resume with the same settings and data",
    ):
        tune(model, task, tmp_path, resume=True, epochs=1, layer_decay=0.9)


def test_a_run_on_as_many_other_rows_is_not_resumed(tmp_path: Path):
    model, task = job()
    tune(model, task, tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"finetune: the checkpoint in .* was made with .*; a run must resume with the same settings and data",
    ):
        tune(model, yes_no(train=40, seed=5), tmp_path, resume=True)


@pytest.mark.long
def test_without_resume_a_run_starts_afresh(whole: Any, tmp_path: Path):
    killed(tmp_path, PER_EPOCH + 6)
    model, task = job()
    result = tune(model, task, tmp_path, **OPTIONS)
    assert same(tensors(model), whole[0])
    assert result.history == whole[1].history


# Files


def test_what_is_written(tmp_path: Path):
    model, task = job()
    result = tune(model, task, tmp_path, **OPTIONS)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    kept = json.loads((tmp_path / "history.json").read_text())
    assert kept == {"best": result.best, "test": {}, "history": result.history, "importances": []}
    (row,) = parquet.read_table(tmp_path / "table.parquet").to_pylist()
    assert {**row, "importances": {}} == result.table[0]
    assert result.folder == tmp_path
    kinds = {path.suffix for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}  # no pickles


def test_without_an_output_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert tune(*job()).folder is None
    assert not list(tmp_path.iterdir())
