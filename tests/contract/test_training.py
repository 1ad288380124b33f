"""Laws 1, 4 and 9 while training: the base stays, readers are independent, and a killed run resumes."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.deaths import die_at_step, forked
from tests.support.portions import set_apart
from tests.support.tiny import FAMILIES
from tests.support.training import (
    largest_difference,
    length_of_text,
    names,
    reader,
    same,
    several,
    tiny_bank,
    tiny_model,
    tiny_tokenizer,
    train,
    weights,
    yes_no,
)

from lamina.bank import Reader, ReaderBank
from lamina.errors import NotFiniteError, StoreError
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks.task import Task
from lamina.train.checkpoint import Checkpoints
from lamina.train.engine import Engine
from lamina.train.learner import Learner

# Law 1


@pytest.mark.parametrize("name", ["bert-SequenceClassification", "gpt2-CausalLM", "bart-Seq2SeqLM", "t5-Seq2SeqLM"])
def test_the_base_comes_out_of_training_as_it_went_in(name: str):
    family, model = FAMILIES[name], FAMILIES[name].known()
    bank = ReaderBank(model, tiny_tokenizer())
    task = yes_no(train=12, validation=6)
    bank.add("r", reader(task, dropout=0.1))
    inputs = family.inputs(model)
    plain = model(**inputs).logits
    before = {key: value.clone() for key, value in [*model.named_parameters(), *model.named_buffers()]}
    start = weights(bank)
    train(bank, {"r": task}, epochs=2)
    assert not same(weights(bank), start)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    assert same(after, before)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(**inputs).logits, plain)
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# Law 4


def crowd(task: Task, dropout: float) -> tuple[dict[str, Reader], dict[str, Task]]:
    """Fifteen readers: other fusions, heads and tasks, over the same texts and over others."""
    others = [yes_no(seed=3), length_of_text(seed=4), several(seed=5), names(seed=6)]
    readers: dict[str, Reader] = {}
    tasks: dict[str, Task] = {}
    pooled = {"pooling": "mean", "dropout": dropout}
    for number, fusion in enumerate([SingleLayer(1, dim=8), LastLayer(), Mean(), ScalarMix(layer_dropout=dropout)]):
        readers[f"plain{number}"] = Reader(fusion, SequenceClassification(task.labels, **pooled), seed=number)
        tasks[f"plain{number}"] = task
    for number in range(3):  # of its own shape, so that they run as one with it
        readers[f"twin{number}"] = reader(task, dropout=dropout, seed=10 + number, entropy=float(number))
        tasks[f"twin{number}"] = task
    for number, other in enumerate(others):
        for copy in range(2):
            readers[f"other{number}{copy}"] = reader(other, dropout=dropout, seed=20 + number + copy)
            tasks[f"other{number}{copy}"] = other
    assert len(readers) == 15
    return readers, tasks


def effective(bank: ReaderBank, name: str) -> dict[str, torch.Tensor]:
    """A reader's weights without the bias of its attention's keys.

    Softmax takes no notice of that bias, so its gradient is rounding noise, which Adam scales up to full steps.
    """
    found = weights(bank, name)
    for key, value in found.items():
        if key.endswith("attention.bias"):
            size = len(value) // 3
            value[size : 2 * size] = 0
    return found


@pytest.mark.parametrize(("schedule", "dropout"), [("linear", 0.0), ("plateau", 0.3)])
def test_a_reader_is_the_same_beside_fifteen_others(schedule: str, dropout: float):
    task = yes_no(train=100)
    options: dict[str, Any] = {"schedule": schedule, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_ratio": 0.1}
    alone = tiny_bank({"one": reader(task, dropout=dropout)})
    assert train(alone, {"one": task}, **options).steps == 25
    readers, tasks = crowd(task, dropout)
    beside = tiny_bank({**readers, "one": reader(task, dropout=dropout)})
    result = train(beside, {**tasks, "one": task}, **options)
    assert result.steps > 25
    assert largest_difference(weights(alone), weights(tiny_bank({"one": reader(task)}))) > 0.1  # it did learn
    assert largest_difference(effective(alone, "one"), effective(beside, "one")) <= 1e-4


def newest_checkpoint(folder: Path) -> Path | None:
    return Checkpoints(folder, "fit").newest()


def test_clipping_is_each_readers_own():
    """A neighbour whose gradient is enormous would use up a norm they shared."""
    task, wild = yes_no(), length_of_text(scale=1e6)
    assert task.split("train").key == wild.split("train").key
    options: dict[str, Any] = {"max_grad_norm": 0.05, "epochs": 3}
    alone = tiny_bank({"one": reader(task)})
    train(alone, {"one": task}, **options)
    beside = tiny_bank({"one": reader(task), "wild": reader(wild, seed=1)})
    train(beside, {"one": task, "wild": wild}, learning_rate={"one": 0.01, "wild": 100.0}, **options)
    assert largest_difference(effective(alone, "one"), effective(beside, "one")) <= 1e-4


def test_an_early_stop_is_each_readers_own():
    task = yes_no(train=60)
    options: dict[str, Any] = {"epochs": 6, "early_stopping_patience": 2, "schedule": "plateau", "plateau_patience": 0}
    alone = tiny_bank({"one": reader(task)})
    found = train(alone, {"one": task}, learning_rate=0.03, **options)
    beside = tiny_bank({"one": reader(task), "still": reader(task, seed=1), "far": reader(yes_no(seed=9), seed=2)})
    tasks = {"one": task, "still": task, "far": yes_no(seed=9)}
    rates = {"one": 0.03, "still": 1e-9, "far": 1e-9}
    result = train(beside, tasks, learning_rate=rates, **options)
    epochs = {name: sum(row["reader"] == name for row in result.history) for name in tasks}
    assert epochs["still"] == epochs["far"] == 3  # its score never rises: two epochs of patience
    assert epochs["one"] == len(found.history) > 3
    assert result.best["one"] == pytest.approx(found.best["one"])
    assert largest_difference(effective(alone, "one"), effective(beside, "one")) <= 1e-4


def test_a_neighbour_that_stopped_moves_no_more():
    task = yes_no()
    bank = tiny_bank({"still": reader(task), "one": reader(task, seed=1)})
    final: dict[str, dict[str, torch.Tensor]] = {}
    record = Learner.record

    def spy(self: Learner, epoch: int, scores: dict[str, float]) -> bool:
        final[f"{self.name}{epoch}"] = weights(bank, self.name)
        final[f"still beside {self.name}{epoch}"] = weights(bank, "still")
        return record(self, epoch, {**scores, "accuracy": float(epoch) if self.name == "one" else 0.5})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "record", spy)
        train(bank, {"still": task, "one": task}, epochs=4, early_stopping_patience=1, weight_decay=0.5)
    assert "still1" in final
    assert "still2" not in final
    assert same(final["still1"], final["still beside one3"])
    assert not same(final["one1"], final["one3"])


def test_a_neighbour_whose_loss_is_not_a_number_is_named():
    task = yes_no(train=16)
    bank = tiny_bank({"one": reader(task), "broken": reader(task, seed=1)})
    with torch.no_grad():
        bank["broken"].head.output.bias.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="the gradient of reader 'broken' is NaN or infinite at step 1"):
        train(bank, {"one": task, "broken": task})


# Law 9


class Killed(BaseException):
    pass


def three() -> tuple[ReaderBank, dict[str, Task]]:
    """Readers with dropout, over the same and over other texts; one of them stops early."""
    task, other = yes_no(train=20, validation=40), names(metric="accuracy", train=12, validation=12)
    tasks = {"one": task, "two": task, "three": other}
    readers = {name: reader(tasks[name], dropout=0.2, seed=seed) for seed, name in enumerate(tasks)}
    return tiny_bank(readers), tasks


OPTIONS: dict[str, Any] = {
    "epochs": {"one": 5, "two": 5, "three": 4},
    "learning_rate": {"one": 0.01, "two": 1e-9, "three": 0.01},
    "schedule": "plateau",
    "plateau_patience": 0,
    "early_stopping_patience": 2,
    "warmup_ratio": 0.1,
    "weight_decay": 0.01,
    "save_steps": 3,
}
PER_EPOCH = 8  # five batches of the first texts and three of the others


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run writes that nobody kills."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(ended: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """The run that nobody kills."""
    bank, tasks = three()
    result = train(bank, tasks, output=ended, **OPTIONS)
    assert sum(row["reader"] == "two" for row in result.history) == 3  # it did stop early
    assert result.best["one"]["epoch"] > 2  # and another went on learning
    return weights(bank), result


DYING: dict[str, type[Any]] = {"step": Engine, "record": Learner, "save": Checkpoints}


def kill_after(patch: pytest.MonkeyPatch, method: str, count: int) -> None:
    """Raise in the middle of call number `count` (from 0) of a method of the engine."""
    calls = iter(range(10**6))
    original = getattr(DYING[method], method)

    def dying(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == count:
            raise Killed
        return original(self, *args, **kwargs)

    patch.setattr(DYING[method], method, dying)


def killed(folder: Path, method: str, count: int, options: dict[str, Any] = OPTIONS) -> None:
    """A run that dies, and leaves nothing but its folder."""
    bank, tasks = three()
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, method, count)
        with pytest.raises(Killed):
            train(bank, tasks, output=folder, **options)


@pytest.mark.parametrize(
    ("method", "count"),
    [
        pytest.param("step", 1, marks=pytest.mark.full),  # before the first checkpoint
        pytest.param(
            "step", 5, marks=pytest.mark.full
        ),  # after one that is in the middle of the first epoch, when no epoch was scored yet
        ("step", 3 * PER_EPOCH + 2),  # when a reader has stopped
        ("record", 4),  # between the readers' scores
        pytest.param("save", 3, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_resumes_to_the_same_weights(
    method: str, count: int, whole: tuple[dict[str, torch.Tensor], Any], tmp_path: Path
):
    killed(tmp_path, method, count)
    bank, tasks = three()
    result = train(bank, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert same(weights(bank), whole[0])
    assert result.history == whole[1].history
    assert result.best == whole[1].best
    assert result.importances == whole[1].importances
    assert result.steps == whole[1].steps


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_resumes(whole: tuple[dict[str, torch.Tensor], Any], tmp_path: Path):
    for _ in range(4):
        killed(tmp_path, "step", 6, {**OPTIONS, "resume": True})
    bank, tasks = three()
    train(bank, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert same(weights(bank), whole[0])


@pytest.mark.long
def test_a_killed_run_resumes_under_the_linear_schedule(tmp_path: Path):
    options = {"epochs": 3, "schedule": "linear", "warmup_ratio": 0.2, "optimizer": "adam"}
    expected, tasks = three()
    train(expected, tasks, **options)
    killed(tmp_path, "step", PER_EPOCH + 2, options)
    bank, _ = three()
    train(bank, tasks, output=tmp_path, resume=True, **options)
    assert same(weights(bank), weights(expected))


def test_resuming_really_goes_on_and_does_not_start_anew(tmp_path: Path):
    killed(tmp_path, "step", 2 * PER_EPOCH + 1)
    steps = []
    step = Engine.step
    bank, tasks = three()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", lambda self, *a, **k: steps.append(self.steps) or step(self, *a, **k))
        result = train(bank, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert steps[0] == 2 * PER_EPOCH
    assert steps == list(range(2 * PER_EPOCH, result.steps))


def test_a_finished_run_resumes_to_itself(whole: tuple[dict[str, torch.Tensor], Any], ended: Path, tmp_path: Path):
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    again, tasks = three()
    second = train(again, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert same(weights(again), whole[0])
    assert second.history == whole[1].history
    assert second.steps == whole[1].steps


@pytest.mark.long
def test_without_a_checkpoint_a_resumed_run_starts(whole: tuple[dict[str, torch.Tensor], Any], tmp_path: Path):
    bank, tasks = three()
    train(bank, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert same(weights(bank), whole[0])


@pytest.mark.parametrize("written", set_apart(["save_file", "write_text", "replace"], "write_text", "save_file"))
def test_a_checkpoint_that_was_not_written_to_its_end_is_ignored(
    written: str, whole: tuple[dict[str, torch.Tensor], Any], tmp_path: Path
):
    """The run is interrupted while it writes a checkpoint's tensors, its progress, or moves it into place."""
    from lamina.train import checkpoint

    place: Any = checkpoint if written == "save_file" else Path
    original, calls = getattr(place, written), []

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return original(*args, **kwargs)

    bank, tasks = three()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, written, dying)
        with pytest.raises(Killed):
            train(bank, tasks, output=tmp_path, **OPTIONS)
    bank, tasks = three()
    train(bank, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert same(weights(bank), whole[0])
    assert not any(path.name.startswith(".") for path in (tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_of_the_older_format_is_refused(tmp_path: Path):
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-3" / "readers.json").write_text("{}")
    bank, tasks = three()
    with pytest.raises(StoreError, match=r"checkpoint-3 cannot be used \(readers\.json was written by version 0\.1"):
        train(bank, tasks, output=tmp_path, resume=True)
    train(bank, tasks, output=tmp_path)
    assert not (tmp_path / "checkpoints" / "checkpoint-3" / "readers.json").exists()


def test_a_disk_that_is_full_leaves_whole_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lamina.train import checkpoint

    original, calls = checkpoint.save_file, []

    def full(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        original(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", full)
    bank, tasks = three()
    with pytest.raises(
        StoreError, match=r"cannot be written to .*No space left on device.*earlier checkpoints are intact"
    ):
        train(bank, tasks, output=tmp_path, **OPTIONS)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.long
def test_what_another_run_left_in_the_folder_is_not_resumed(tmp_path: Path):
    """Else the checkpoints of a longer run would pass for newer ones."""
    bank, tasks = three()
    train(bank, tasks, output=tmp_path, epochs=3)
    options = {"epochs": 2, "learning_rate": 0.02}
    expected, _ = three()
    train(expected, tasks, **options)
    killed(tmp_path, "step", PER_EPOCH + 1, options)
    bank, _ = three()
    result = train(bank, tasks, output=tmp_path, resume=True, **options)
    assert result.steps == 2 * PER_EPOCH
    assert same(weights(bank), weights(expected))


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path):
    assert newest_checkpoint(tmp_path) is None
    for step in (9, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / ".checkpoint-200").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "checkpoint-100"


def test_the_checkpoints_of_the_two_highest_steps_are_kept(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, "fit")
    for step in (8, 9, 10, 11):
        checkpoints.save(step, {"weight": torch.zeros(1)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11"]


def killed_at(step: int, folder: Path) -> None:
    """A run that kills its own process."""
    die_at_step(step)
    bank, tasks = three()
    train(bank, tasks, output=folder, **OPTIONS)


@pytest.mark.full  # hostile/test_kill_runs.py kills processes in every run
def test_a_process_that_is_killed_resumes(whole: tuple[dict[str, torch.Tensor], Any], tmp_path: Path):
    ended = forked(lambda: killed_at(20, tmp_path))
    assert ended.code == -signal.SIGKILL, ended.err
    assert newest_checkpoint(tmp_path / "checkpoints") is not None
    bank, tasks = three()
    result = train(bank, tasks, output=tmp_path, resume=True, **OPTIONS)
    assert same(weights(bank), whole[0])
    assert json.loads((tmp_path / "history.json").read_text())["history"] == result.history == whole[1].history


def test_the_base_model_of_these_tests_would_show_dropout():
    """Its dropout is on as soon as anything puts it in training mode."""
    model = tiny_model().train()
    ids = torch.arange(4, 9)[None]
    assert not torch.equal(model(input_ids=ids).last_hidden_state, model(input_ids=ids).last_hidden_state)
