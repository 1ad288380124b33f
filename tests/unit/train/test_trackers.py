"""Trackers: what a training run logs to TensorBoard, MLflow and trackio, and how its run there ends."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import LoggerType
from tests.support.training import reader, tiny_bank, train, yes_no

from lamina.bank import ReaderBank
from lamina.errors import ConfigError

TASK = yes_no(train=12, validation=8)


def a_bank() -> ReaderBank:
    return tiny_bank({"a": reader(TASK, seed=0)})


def test_events_for_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(a_bank(), {"a": TASK}, output=tmp_path, tensorboard=True, epochs=2)
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert len(events.Scalars("a/accuracy")) == 2


def test_a_run_is_logged_to_mlflow_even_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow: Any = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "films")
    train(a_bank(), {"a": TASK}, trackers=["mlflow"], epochs=2)
    (run,) = mlflow.search_runs(experiment_names=["films"], output_format="list")
    scores = mlflow.MlflowClient().get_metric_history(run.info.run_id, "a/accuracy")
    assert len({score.step for score in scores}) == 2
    assert (run.data.params["epochs"], run.data.params["learners"], run.info.status) == ("2", "a", "FINISHED")
    monkeypatch.setattr("lamina.train.engine.Engine._run_epoch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(a_bank(), {"a": TASK}, trackers=["mlflow"])
    assert mlflow.active_run() is None  # it would make the next run fail


def test_scores_are_logged_by_the_trackers_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged: list[dict[str, float]] = []
    package: Any = ModuleType("trackio")
    package.__spec__ = ModuleSpec("trackio", None)
    run = SimpleNamespace(log=lambda values, **_: logged.append(values), finish=lambda: None)
    package.init = lambda **_: run
    settings: dict[str, Any] = {}
    package.config = SimpleNamespace(update=lambda values, **_: settings.update(values))
    monkeypatch.setitem(sys.modules, "trackio", package)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [LoggerType.TRACKIO])
    train(a_bank(), {"a": TASK}, output=tmp_path, trackers=["trackio"], epochs=2)
    assert len(logged) == 2
    assert all("a/accuracy" in values for values in logged)
    assert (settings["epochs"], settings["learners"]) == (2, "a")


def test_a_tracker_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"fit: trackers has 'wandb', which is not installed\. Run pip install wandb"):
        train(a_bank(), {"a": TASK}, trackers=["wandb"])
    with pytest.raises(ConfigError, match=r"trackers"):
        train(a_bank(), {"a": TASK}, trackers=["paper"])
