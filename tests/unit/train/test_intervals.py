"""Means of repeated runs, against tabulated values of Student's t."""

from __future__ import annotations

import math

import pytest
from lamina.train.intervals import summarise

from lamina.errors import ConfigError


def test_five_values_by_hand():
    found = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.count, found.mean) == (5, 3.0)
    assert found.spread == pytest.approx(math.sqrt(2.5))
    assert found.interval == pytest.approx(2.7764 * math.sqrt(2.5) / math.sqrt(5), rel=1e-4)


@pytest.mark.parametrize(("confidence", "quantile"), [(0.95, 12.7062), (0.9, 6.3138), (0.99, 63.6567)])
def test_two_values_at_several_confidences(confidence: float, quantile: float):
    assert summarise([0.0, 2.0], confidence=confidence).interval == pytest.approx(quantile, rel=1e-4)


def test_many_values_come_near_the_normal_distribution():
    found = summarise([(-1.0) ** i for i in range(4000)])
    assert found.interval == pytest.approx(1.96 / math.sqrt(4000), rel=2e-3)


def test_one_value_has_no_interval():
    found = summarise([0.5])
    assert (found.count, found.mean, found.spread, found.interval) == (1, 0.5, 0.0, None)


def test_equal_values_have_an_interval_of_no_width():
    assert summarise([0.5, 0.5, 0.5]).interval == 0


def test_no_value():
    with pytest.raises(ConfigError, match="there is no value; at least one is needed"):
        summarise([])


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_that_cannot_be(confidence: float):
    with pytest.raises(ConfigError, match="it must be between 0 and 1"):
        summarise([1.0, 2.0], confidence=confidence)
