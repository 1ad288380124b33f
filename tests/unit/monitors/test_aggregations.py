"""Aggregations: their formulas, independence of pieces and padding, and settings that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.errors import ConfigError
from lamina.monitors import (
    AGGREGATIONS,
    EMA,
    Aggregation,
    AttentionMean,
    LastScore,
    MeanScore,
    MultiMax,
    RollingMax,
    SoftmaxMean,
)
from lamina.monitors.base import RunningScore

CASES: dict[str, list[dict[str, Any]]] = {
    "last_score": [{}],
    "mean_score": [{}],
    "ema": [{}, {"half_life": 1.0}],
    "rolling_max": [{"window": 1}, {"window": 3}, {"window": 99}],
    "multi_max": [{}],
    "softmax_mean": [{}, {"temperature": 0.1}, {"temperature": 50.0}],
    "attention_mean": [{}],
}
ALL = [pytest.param(name, settings, id=f"{name}-{n}") for name in CASES for n, settings in enumerate(CASES[name])]


def _rolling(scores: list[float], window: int = 10) -> float:
    if len(scores) < window:
        return sum(scores) / len(scores)
    return max(sum(scores[at : at + window]) / window for at in range(len(scores) - window + 1))


def _ema(scores: list[float], half_life: float = 5.0) -> float:
    keep = 0.5 ** (1 / half_life)
    weights = [keep ** (len(scores) - 1 - at) * (1 - keep if at else 1) for at in range(len(scores))]
    return sum(weight * score for weight, score in zip(weights, scores, strict=True))


def _softmax(scores: list[float], temperature: float = 1.0) -> float:
    weights = [math.exp(score / temperature) for score in scores]
    return sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)


def _attention(scores: list[float], log_weights: list[float]) -> float:
    weights = [math.exp(weight) for weight in log_weights]
    return sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)


FORMULAS: dict[str, Callable[..., float]] = {
    "last_score": lambda scores: scores[-1],
    "mean_score": lambda scores: sum(scores) / len(scores),
    "ema": _ema,
    "rolling_max": _rolling,
    "softmax_mean": _softmax,
    "multi_max": lambda *labels: sum(map(max, labels)),
    "attention_mean": _attention,
}


def columns(how: Aggregation) -> int:
    return 3 if how.per_label else 2 if how.weighted else 1


def scores_and_mask(labels: int = 1) -> tuple[Tensor, Tensor]:
    """Padding on the left, on the right, in between; and a row without a token."""
    scores = torch.randn(5, 12, labels, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 12, dtype=torch.bool)
    mask[1, :4], mask[2, 7:], mask[3, 2:9:3], mask[4] = False, False, False, False
    return scores.masked_fill(~mask.unsqueeze(-1), torch.nan), mask


def made(name: str, settings: dict[str, Any]) -> Aggregation:
    return AGGREGATIONS.from_dict({"name": name, **settings})


def test_every_aggregation_is_tried():
    assert set(AGGREGATIONS.names()) == set(CASES) == set(FORMULAS)


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_the_running_score_is_that_of_the_formula(name: str, settings: dict[str, Any]):
    scores, mask = scores_and_mask(columns(made(name, settings)))
    got = made(name, settings).running(scores, mask)
    assert got.shape == mask.shape
    for row in range(5):
        for at in range(12):
            real = scores[row, : at + 1][mask[row, : at + 1]].double()
            if not len(real):
                assert got[row, at].isnan()
                continue
            expected = FORMULAS[name](*[part.tolist() for part in real.unbind(-1)], **settings)
            assert float(got[row, at]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 7], [1, 8, 3]])
@pytest.mark.parametrize(("name", "settings"), ALL)
def test_scores_in_pieces_equal_scores_at_once(name: str, settings: dict[str, Any], sizes: list[int]):
    how = made(name, settings)
    scores, mask = scores_and_mask(columns(how))
    running = RunningScore(how)
    pieces = [running.add(*piece) for piece in zip(scores.split(sizes, 1), mask.split(sizes, 1), strict=True)]
    torch.testing.assert_close(torch.cat(pieces, 1), how.running(scores, mask), rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_later_tokens_change_no_score(name: str, settings: dict[str, Any]):
    how = made(name, settings)
    scores, mask = scores_and_mask(columns(how))
    changed = scores.clone()
    changed[:, 6:] += 5
    before, after = how.running(scores, mask), how.running(changed, mask)
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(after[:1], before[:1])


def test_after_one_half_life_the_weight_has_halved():
    scores = torch.cat([torch.ones(1, 1), torch.zeros(1, 8)], dim=1).unsqueeze(-1)
    assert float(EMA(half_life=4).running(scores, scores[..., 0] >= 0)[0, 4]) == pytest.approx(0.5)


def test_high_scores_do_not_overflow():
    scores = torch.tensor([[[1e4], [-1e4], [1e4]]])
    got = SoftmaxMean(temperature=0.01).running(scores, torch.ones(1, 3, dtype=torch.bool))
    assert got.tolist() == [[1e4, 1e4, 1e4]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(half_life=0), "ema: half_life is 0; it must be a positive, finite number of tokens"),
        (lambda: SoftmaxMean(temperature=-1), "softmax_mean: temperature is -1; it must be positive and finite"),
        (lambda: RollingMax(window=0), "rolling_max: window is 0; it must be at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], Aggregation], message: str):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    "how", [LastScore(), MeanScore(), EMA(3.0), RollingMax(4), MultiMax(), SoftmaxMean(0.5), AttentionMean()]
)
def test_settings_survive_json(how: Aggregation):
    assert AGGREGATIONS.from_dict(AGGREGATIONS.to_dict(how)) == how
