"""The trainer of whole models: losses, rates, checkpoints."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.finetuned import bert, copies, t5, t5_tokenizer, tensors, tune
from tests.support.training import names, same, yes_no

from lamina.train import tuner as module
from lamina.train.runs import newest_checkpoint
from lamina.train.tuner import BEST, PROGRESS, Tuner


def seen(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What one of the trainer's methods gives back, call by call."""
    found: list[Any] = []
    plain = getattr(Tuner, name)

    def spy(self: Tuner, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        found.append((self, result))
        return result

    monkeypatch.setattr(Tuner, name, spy)
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_loss_of_a_step_is_that_of_its_rows(accumulate: int, monkeypatch: pytest.MonkeyPatch):
    task, model = names(train=9), bert("AutoModelForTokenClassification", 5)
    found = seen(monkeypatch, "training_step")
    losses: list[float] = []

    def first(self: Tuner, inputs: dict[str, Any]) -> None:
        if not losses:
            rows = range(len(task.split("train")))
            batch = self.job.train.batch(rows)
            with torch.no_grad():
                losses.append(float(model(**batch).loss))

    plain = Tuner.floating_point_ops
    monkeypatch.setattr(Tuner, "floating_point_ops", lambda self, inputs: first(self, inputs) or plain(self, inputs))
    tune(model, task, batch_size=9 // accumulate, accumulate=accumulate)
    assert len(found) == 1
    assert float(found[0][1]) == pytest.approx(losses[0], rel=1e-5)


def test_a_loss_of_no_labels_is_nothing():
    model = bert("AutoModelForTokenClassification", 5)
    inputs = {"input_ids": torch.tensor([[2, 3]]), "labels": torch.tensor([[-100, -100]]), "share": 0}
    loss = Tuner.compute_loss(object.__new__(Tuner), model, inputs)
    loss.backward()
    assert loss.item() == 0
    assert all(one.grad is None or not one.grad.any() for one in model.parameters())


def test_processes_exchange_gradients_with_the_last_batch_alone(monkeypatch: pytest.MonkeyPatch):
    waited: list[Any] = []
    found = seen(monkeypatch, "get_train_dataloader")

    class Counting(nullcontext):  # type: ignore[type-arg]
        pass

    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "no_sync", lambda self, model: waited.append(model) or Counting())
    tune(bert(), yes_no(train=12), batch_size=4, accumulate=3)
    assert len(found) == 1
    assert len(waited) == 2


def test_a_rate_of_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    """What has no rate has no gradient, so that it has no share in the norm that is clipped."""
    model = bert()
    before, flags = tensors(model), []
    step = Tuner.training_step

    def spy(self: Tuner, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        flags.append({name for name, one in model.named_parameters() if one.grad is not None})
        return result

    monkeypatch.setattr(Tuner, "training_step", spy)
    result = tune(model, yes_no(), layer_rates={"0-2": 0.0})
    moved = {name for name, value in tensors(model).items() if not torch.equal(value, before[name])}
    assert moved <= flags[0]
    assert all("layer.2" in name or "pooler" in name or "classifier" in name for name in flags[0])
    assert all(one.requires_grad for one in model.parameters())
    assert result.table[0]["trained"] == sum(one.numel() for n, one in model.named_parameters() if n in flags[0])


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"optimizer": "adamw", "epsilon": 1e-5}, torch.optim.AdamW, {"eps": 1e-5}),
        ({"optimizer": "adam"}, torch.optim.Adam, {"eps": 1e-8}),
        ({"optimizer": "sgd", "momentum": 0.5}, torch.optim.SGD, {"momentum": 0.5}),
    ],
)
def test_optimisers(options: dict[str, Any], kind: type, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    found = seen(monkeypatch, "create_optimizer")
    model = bert()
    before = tensors(model)
    tune(model, yes_no(train=8), weight_decay=0.1, **options)
    assert not same(tensors(model), before)
    optimizer = found[0][1]
    assert type(optimizer) is kind
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
    assert all(group[key] == value for group in optimizer.param_groups for key, value in expected.items())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup": 0.5}, [0, 0.5, 1, 0.5]),
        ({"schedule": "constant", "warmup_steps": 2}, [0, 0.5, 1, 1]),
        ({"schedule": "linear", "warmup": 0.5, "warmup_steps": 1}, [0, 1, 2 / 3, 1 / 3]),
        ({"schedule": "cosine"}, [1, 0.8536, 0.5, 0.1464]),
    ],
)
def test_schedules(options: dict[str, Any], expected: list[float], monkeypatch: pytest.MonkeyPatch):
    rates: list[list[float]] = []
    step = Tuner.training_step

    def spy(self: Tuner, *args: Any, **kwargs: Any) -> Any:
        rates.append([group["lr"] for group in self.optimizer.param_groups])  # pyright: ignore
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Tuner, "training_step", spy)
    tune(bert(), yes_no(train=16), batch_size=4, learning_rate=1.0, layer_rates={"1": 0.1}, **options)
    assert [max(some) for some in rates] == pytest.approx(expected, abs=1e-4)
    assert [min(some) for some in rates] == pytest.approx([each / 10 for each in expected], abs=1e-4)


def test_a_checkpoint_holds_what_the_run_was(tmp_path: Path):
    model = bert()
    result = tune(model, yes_no(), tmp_path, epochs=2)
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "checkpoint-20"
    progress = json.loads((newest / PROGRESS).read_text())
    assert progress["finished"] is True
    assert progress["history"] == result.history
    assert progress["run"]["epochs"] == 2
    assert progress["run"]["rows"] == 40
    assert same(load_file(newest / BEST), tensors(model))


def test_two_checkpoints_are_kept(tmp_path: Path):
    tune(bert(), yes_no(train=16), tmp_path, epochs=4)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint-12", "checkpoint-16"}


def test_tied_weights_come_back(tmp_path: Path):
    model = t5()
    tune(model, copies(), tmp_path, epochs=2, processor=t5_tokenizer(), max_target_length=4)
    assert model.lm_head.weight is model.shared.weight
    again = tune(t5(), copies(), tmp_path, epochs=2, processor=t5_tokenizer(), max_target_length=4, resume=True)
    assert again.steps == 30


def test_use_of_the_cache_stays_on():
    model = t5()
    assert model.config.use_cache
    tune(model, copies(), processor=t5_tokenizer(), max_target_length=4)
    assert model.config.use_cache


def test_tensorboard_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    init = Tuner.__init__

    def spy(self: Tuner, model: Any, job: Any, arguments: Any) -> None:
        made.append(arguments)
        init(self, model, job, arguments)

    monkeypatch.setattr(module.Tuner, "__init__", spy)
    tune(bert(), yes_no(train=8), tmp_path)
    assert made[0].report_to == []
