"""Schedules against values worked out by hand, and what each reader concludes from its scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training import reader, tiny_bank

from lamina.train.options import FitOptions
from lamina.train.state import ReaderState, Schedules, snapshot


def schedules(options: FitOptions, totals: dict[str, int], rates: dict[str, float] | None = None) -> Any:
    states = {name: ReaderState("accuracy") for name in totals}
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "reader": name} for name in totals for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    made = Schedules(optimizer, states, rates or dict.fromkeys(totals, 1.0), totals, options)
    made.states, made.optimizer = states, optimizer  # for the tests
    return made


def walk(made: Any, name: str, steps: int) -> list[float]:
    made.active = (name,)
    seen = []
    for _ in range(steps):
        seen.append(made.rate(name))
        made.step()
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "linear"}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"schedule": "constant"}, [1.0] * 5),
        ({"schedule": "linear", "warmup": 0.4}, [0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
        ({"schedule": "constant", "warmup": 0.4}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "plateau", "warmup": 0.4}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear", "warmup": 0.1}, [1.0, 0.8, 0.6, 0.4, 0.2]),  # less than one step
    ],
)
def test_rates(options: dict[str, Any], expected: list[float]):
    assert walk(schedules(FitOptions(**options), {"a": 5}), "a", 5) == pytest.approx(expected)


def test_each_reader_has_its_own_rate_and_steps():
    made = schedules(FitOptions(), {"a": 4, "b": 2}, {"a": 1.0, "b": 10.0})
    assert made.get_last_lr() == [1.0, 1.0, 10.0, 10.0]
    made.active = ("b",)
    made.step()
    assert made.get_last_lr() == [1.0, 1.0, 5.0, 5.0]
    made.active = ("a", "b")
    made.step()
    assert made.get_last_lr() == [0.75, 0.75, 0.0, 0.0]


def test_the_optimiser_gets_the_rates_also_after_it_was_restored():
    """Restoring an optimiser replaces its groups by new ones."""
    made = schedules(FitOptions(), {"a": 4})
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    made.active = ("a",)
    made.step()
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.75, 0.75]
    made.states["a"].done = 2
    made.load_state_dict(made.state_dict())
    assert [group["lr"] for group in made.optimizer.param_groups] == [0.5, 0.5]


def scored(values: list[float], rate: float = 1.0, **options: Any) -> tuple[ReaderState, list[float]]:
    chosen = FitOptions(**{"schedule": "plateau", **options})
    bank = tiny_bank({"r": reader()})
    state, scales = ReaderState("accuracy"), []
    for epoch, value in enumerate(values):
        with torch.no_grad():
            bank["r"].head.output.bias.fill_(epoch)
        if state.record(epoch, {"accuracy": value, "f1": -value}, chosen, rate):
            state.weights = snapshot(bank["r"])
        scales.append(state.scale)
        if state.stopped is not None:
            break
    return state, scales


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


def test_a_reader_stops_when_its_patience_ends():
    state, seen = scored([1, 2, 1, 2, 1, 1], patience=3)
    assert (state.stopped, len(seen)) == (4, 5)
    assert state.best_epoch == 2
    assert scored([1, 1, 2, 2, 3, 3, 4], patience=2)[0].stopped is None
    assert scored([1] * 9)[0].stopped is None


def test_the_best_weights_and_scores_are_kept():
    state, _ = scored([1, 3, 2, 3])
    assert state.best_epoch == 2
    assert state.scores == {"accuracy": 3, "f1": -3}
    assert torch.equal(state.weights["head.output.bias"], torch.tensor([1.0, 1.0]))  # the first of the two best


def test_a_score_of_nought_is_a_score():
    state, _ = scored([0.0, 0.0])
    assert state.best_epoch == 1
    assert state.weights


def test_of_a_perplexity_less_is_better():
    state = ReaderState("perplexity")
    found = [state.record(epoch, {"perplexity": value}, FitOptions(), 1.0) for epoch, value in enumerate([9, 8, 8, 7])]
    assert found == [True, True, False, True]
    assert state.scores == {"perplexity": 7}


def test_a_stage_has_a_best_epoch_and_a_schedule_of_its_own():
    made = schedules(FitOptions(patience=1), {"a": 6})
    state = made.states["a"]
    assert walk(made, "a", 2) == pytest.approx([1, 5 / 6])
    state.record(0, {"accuracy": 0.9}, FitOptions(patience=1), 1.0)
    state.record(1, {"accuracy": 0.8}, FitOptions(patience=1), 1.0)
    assert state.stopped == 1
    state.begin_stage()
    assert (state.stopped, state.best_epoch, state.weights) == (None, 0, {})
    assert walk(made, "a", 4) == pytest.approx([1, 0.75, 0.5, 0.25])
    assert state.record(2, {"accuracy": 0.1}, FitOptions(), 1.0)
    assert state.best_epoch == 3


def test_progress_is_json_ready():
    import json

    state, _ = scored([1, 1])
    back = json.loads(json.dumps(state.to_json()))
    assert "weights" not in back
    assert ReaderState(**back, weights=state.weights) == state
