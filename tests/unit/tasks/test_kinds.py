"""Which metrics there are, and which way they go."""

from __future__ import annotations

import math

import pytest

from lamina.tasks.kinds import KINDS, LOWER, METRICS, better, one_class


@pytest.mark.parametrize(
    ("metric", "new", "old", "expected"),
    [
        ("accuracy", 0.6, 0.5, True),
        ("accuracy", 0.5, 0.6, False),
        ("accuracy", 0.5, 0.5, False),
        ("perplexity", 2.9, 3.0, True),
        ("perplexity", 3.0, 2.9, False),
        ("perplexity", 3.0, 3.0, False),
        ("perplexity", math.nan, 3.0, False),
        ("accuracy", math.nan, 0.1, False),
    ],
)
def test_which_score_is_better(metric: str, new: float, old: float, expected: bool):
    assert better(metric, new, old) is expected


def test_every_kind_has_metrics_and_every_direction_a_metric():
    assert {kind for kind, _ in METRICS} == set(KINDS)
    assert {name for names in METRICS.values() for name in names} >= LOWER


@pytest.mark.parametrize(("kind", "problem"), METRICS)
def test_which_rows_have_one_class(kind: str, problem: str):
    expected = problem == "classification" and kind in ("sequence_classification", "image_classification")
    assert one_class(kind, problem) is expected
