"""Schedules against values worked out by hand, and what each learner concludes from its scores."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from tests.support.finetuned import bert
from tests.support.training import reader, same, tiny_bank
from torch import nn

from lamina.errors import ConfigError
from lamina.train.learner import Learner, Progress, reader_groups
from lamina.train.options import FitOptions


def learner(total: int = 5, rate: float = 1.0, metric: str = "accuracy", **options: Any) -> Learner:
    module = tiny_bank({"r": reader()})["r"]
    chosen = FitOptions.of(options)
    groups = reader_groups(module, rate, chosen)
    return Learner("r", module, groups, metric=metric, total=total, options=chosen)


def walk(made: Learner, steps: int) -> list[float]:
    """The rates that steps are taken with."""
    seen = []
    for _ in range(steps):
        made.step()
        rates = {group["lr"] for group in made.optimizer.param_groups}
        assert len(rates) == 1
        seen.append(rates.pop())
    return seen


def cosine(step: int, total: int) -> float:
    return (1 + math.cos(math.pi * step / total)) / 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "constant"}, [1.0] * 5),
        ({"schedule": "linear", "warmup_ratio": 0.4}, [0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
        ({"schedule": "constant", "warmup_ratio": 0.4}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "plateau", "warmup_ratio": 0.4}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_ratio": 0.1}, [1.0, 0.8, 0.6, 0.4, 0.2]),  # less than one step
        ({"schedule": "linear", "warmup_ratio": 0.9, "warmup_steps": 2}, [0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
        ({"schedule": "cosine"}, [cosine(step, 5) for step in range(5)]),
        (
            {"schedule": "cosine", "warmup_steps": 1},
            [1.0, *(cosine(step, 4) for step in range(4))],
        ),
    ],
)
def test_rates(options: dict[str, Any], expected: list[float]):
    assert walk(learner(**options), 5) == pytest.approx(expected)


def test_groups_keep_the_ratio_of_their_rates():
    model = bert()
    groups = [
        {"params": [model.classifier.weight], "lr": 1.0, "weight_decay": 0.0},
        {"params": [model.classifier.bias], "lr": 0.1, "weight_decay": 0.0},
    ]
    made = Learner("m", model, groups, metric="accuracy", total=4, options=FitOptions())
    made.step()
    made.step()
    assert [group["lr"] for group in made.optimizer.param_groups] == pytest.approx([0.75, 0.075])


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"optimizer": "adamw", "adam_epsilon": 1e-5}, torch.optim.AdamW, {"eps": 1e-5}),
        ({"optimizer": "adam"}, torch.optim.Adam, {"eps": 1e-8}),
        ({"optimizer": "sgd", "momentum": 0.5}, torch.optim.SGD, {"momentum": 0.5}),
    ],
)
def test_optimisers(options: dict[str, Any], kind: type, expected: dict[str, float]):
    made = learner(weight_decay=0.3, **options)
    assert type(made.optimizer) is kind
    decay = {id(one): group["weight_decay"] for group in made.optimizer.param_groups for one in group["params"]}
    found = {key: decay[id(value)] for key, value in made.module.named_parameters()}
    assert found["fusion.projection"] == found["head.output.weight"] == 0.3
    assert {key for key, value in found.items() if value == 0} == {
        *("fusion.scores", "head.attention.bias", "head.attention.output.bias", "head.output.bias")
    }
    assert all(group[key] == value for group in made.optimizer.param_groups for key, value in expected.items())


def scored(values: list[float], rate: float = 1.0, **options: Any) -> tuple[Learner, list[float]]:
    made, scales = learner(rate=rate, **{"schedule": "plateau", **options}), []
    for epoch, value in enumerate(values):
        with torch.no_grad():
            made.module.head.output.bias.fill_(epoch)  # pyright: ignore
        made.record(epoch, {"accuracy": value, "f1": -value})
        scales.append(made.progress.scale)
        if made.progress.stopped is not None:
            break
    return made, scales


def test_the_rate_falls_when_the_score_has_stalled():
    assert scored([1, 1, 1, 1, 1, 1], plateau_patience=1)[1] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert scored([1, 1, 1, 1], plateau_patience=0)[1] == [1, 0.5, 0.25, 0.125]
    assert scored([1, 0.5, 2, 1, 1, 3], plateau_patience=1)[1] == [1, 1, 1, 1, 0.5, 0.5]
    assert scored([1, 2, 3], plateau_patience=0)[1] == [1, 1, 1]
    assert scored([1, 1, 1], plateau_patience=0, plateau_factor=0.1)[1] == pytest.approx([1, 0.1, 0.01])


def test_the_rate_falls_no_lower_than_its_least():
    assert scored([1] * 5, rate=0.01, plateau_patience=0, min_learning_rate=0.003)[1] == pytest.approx(
        [1, 0.5, 0.3, 0.3, 0.3]
    )
    assert scored([1] * 3, rate=1e-9, plateau_patience=0)[1] == [1, 1, 1]  # one that is lower still is left alone


def test_other_schedules_do_not_fall_with_the_score():
    assert scored([1] * 4, plateau_patience=0, schedule="constant")[1] == [1] * 4


def test_a_learner_stops_when_its_patience_ends():
    made, seen = scored([1, 2, 1, 2, 1, 1], early_stopping_patience=3)
    assert (made.progress.stopped, len(seen)) == (4, 5)
    assert made.progress.best_epoch == 2
    assert scored([1, 1, 2, 2, 3, 3, 4], early_stopping_patience=2)[0].progress.stopped is None
    assert scored([1] * 9)[0].progress.stopped is None


def test_the_best_weights_and_scores_are_kept():
    made, _ = scored([1, 3, 2, 3])
    assert made.progress.best_epoch == 2
    assert made.progress.scores == {"accuracy": 3, "f1": -3}
    assert torch.equal(made.best["head.output.bias"], torch.tensor([1.0, 1.0]))  # the first of the two best


def test_the_last_weights_can_be_kept_instead():
    made, _ = scored([1, 3, 2, 2], keep="last", early_stopping_patience=2)
    assert (made.progress.best_epoch, made.progress.scores["accuracy"], made.progress.stopped) == (4, 2, 3)
    before = made.tensors()
    made.load(made.best)
    assert same(made.tensors(), before)


def test_a_score_of_nought_is_a_score():
    made, _ = scored([0.0, 0.0])
    assert made.progress.best_epoch == 1
    assert made.best


def test_of_a_perplexity_less_is_better():
    made = learner(metric="perplexity")
    assert [made.record(epoch, {"perplexity": value}) for epoch, value in enumerate([9, 8, 8, 7])] == [
        *(True, True, False, True)
    ]
    assert made.progress.scores == {"perplexity": 7}


def test_a_stage_has_a_best_epoch_and_a_schedule_of_its_own():
    made = learner(6, early_stopping_patience=1)
    assert walk(made, 2) == pytest.approx([1, 5 / 6])
    made.record(0, {"accuracy": 0.9})
    made.record(1, {"accuracy": 0.8})
    assert made.progress.stopped == 1
    made.begin_stage()
    assert (made.progress.stopped, made.progress.best_epoch, made.best) == (None, 0, {})
    assert walk(made, 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert made.record(2, {"accuracy": 0.1})
    assert made.progress.best_epoch == 3


def test_parameters_that_start_afresh_have_no_optimiser_state(monkeypatch: pytest.MonkeyPatch):
    made = learner()
    for parameter in made.parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert made.optimizer.state
    monkeypatch.setattr(type(made.module), "on_epoch_end", lambda *_: True)
    assert made.end_epoch(0.5)
    assert not made.optimizer.state


def test_a_checkpoint_gives_a_learner_back():
    made, other = scored([1, 1])[0], learner(schedule="plateau")
    for parameter in made.parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    progress = json.loads(json.dumps(made.to_json()))
    other.from_tensors(made.to_tensors(), progress)
    assert other.progress == made.progress == Progress(**progress)
    assert same(other.tensors(), made.tensors())
    assert same(other.best, made.best)
    for one, two in zip(made.parameters, other.parameters, strict=True):
        assert same(made.optimizer.state[one], other.optimizer.state[two])


def test_what_is_frozen_is_not_kept():
    model = bert()
    model.bert.requires_grad_(False)
    groups = reader_groups(model, 1.0, FitOptions())
    made = Learner("m", model, groups, metric="accuracy", total=4, options=FitOptions())
    assert set(made.tensors()) == {"classifier.weight", "classifier.bias"}


def test_small_improvements_do_not_reset_early_stopping():
    module = nn.Linear(1, 1)
    chosen = FitOptions(early_stopping_patience=2, early_stopping_min_delta=0.1)
    made = Learner("a", module, reader_groups(module, 1.0, chosen), metric="accuracy", total=9, options=chosen)
    for epoch, score in enumerate((0.5, 0.55, 0.58)):
        assert made.record(epoch, {"accuracy": score})  # each is the best so far, and is kept
    assert made.progress.stopped == 2
    assert made.progress.best_epoch == 3


def test_patterns_say_which_parameters_decay():
    module = nn.ModuleDict({"fusion": nn.Linear(2, 2), "head": nn.LayerNorm(2)})

    def decayed(on: Any) -> list[int]:
        groups = reader_groups(module, 1.0, FitOptions.of({"weight_decay": 0.1, "weight_decay_on": on}))
        return [len(group["params"]) for group in groups if group["weight_decay"]]

    assert decayed("matrices") == [1]
    assert decayed("all") == [4]
    assert decayed(["*", "!head.*"]) == [2]
    with pytest.raises(ConfigError, match=r"weight_decay_on names 'heads\.\*', which matches none of 4 parameters"):
        decayed(["heads.*"])
    with pytest.raises(ConfigError, match=r"weight_decay_on is \[\]; it must be matrices, all, or a list of patterns"):
        decayed([])
