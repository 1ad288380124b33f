"""False alarms per thousand tokens: their interval, and thresholds that keep the rate on other texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.support.portions import one_in

from lamina.errors import ConfigError
from lamina.monitors.token_rate import TokenRateTest, alarms_per_thousand, threshold_per_thousand


def texts(count: int, seed: int, mean: int = 40) -> list[np.ndarray]:
    """Running highest scores of texts of very different lengths; each token's own score is uniform."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(1 + rng.exponential(mean, count).astype(int) ** 2 // mean, 20 * mean)
    return [np.maximum.accumulate(rng.random(length)) for length in lengths]


def rate_of(running: list[np.ndarray], threshold: float) -> float:
    alarms = [int((own >= threshold).argmax()) + 1 for own in running if own[-1] >= threshold]
    read = sum(alarms) + sum(len(own) for own in running if own[-1] < threshold)
    return 1000 * len(alarms) / read


def test_alarms_per_thousand_tokens_have_an_exact_poisson_interval():
    assert alarms_per_thousand(0, 3000) == (0.0, (0.0, pytest.approx(3.6889 / 3, rel=1e-4)))
    assert alarms_per_thousand(10, 2000)[1] == pytest.approx((4.7954 / 2, 18.3904 / 2), rel=1e-4)  # Garwood 1936


def test_without_a_guarantee_the_rate_holds_on_these_texts():
    running = texts(200, 0)
    found = threshold_per_thousand([*running, np.ones(1)], [False] * 200 + [True], rate=1.0, confidence=None)
    below = max(own[-1] for own in running if own[-1] < found)
    assert rate_of(running, found) <= 1.0 < rate_of(running, below)  # any lower, and it is exceeded


@pytest.mark.parametrize("rate", one_in(2, [0.5, 4.0]))
def test_a_guaranteed_rate_holds_on_other_texts_as_often_as_promised(rate: float):
    """Each token raises an alarm with probability 1 - threshold, so that the true rate per token is that."""
    true = []
    for seed in range(200):
        running = texts(200, seed)
        found = threshold_per_thousand([*running, np.ones(1)], [False] * 200 + [True], rate=rate, confidence=0.95)
        true.append(1000 * (1 - found))
    assert sum(own <= rate for own in true) >= 0.93 * 200  # 0.95 are promised
    assert np.mean(true) > 0.1 * rate  # and what is allowed is used


def test_the_rate_is_kept_when_texts_are_sixteen_times_as_long():
    """A rate per text is not: nearly every long text reaches its threshold."""
    running = texts(400, 0)
    found = threshold_per_thousand([*running, np.ones(1)], [False] * 400 + [True], rate=1.0, confidence=0.95)
    long = texts(400, 1, mean=640)
    assert rate_of(long, found) <= 1.0
    assert np.mean([own[-1] >= found for own in long]) > 5 * np.mean([own[-1] >= found for own in running])


def test_texts_that_are_sorted_by_length_do_not_break_the_promise():
    # only long texts raise alarms, 2 per thousand tokens; with the tokens of the short ones the true rate is 1
    lengths, passed = [100] * 300 + [10] * 3000, 0
    for seed in range(100):
        alarms = np.flatnonzero(np.random.default_rng(seed).random(300) < 0.2)
        passed += TokenRateTest(lengths, 1.0, 0.95).passes(alarms.tolist(), [100] * len(alarms))
    assert passed <= 9  # 5 are expected at most


def test_without_an_alarm_three_thousand_tokens_show_a_rate_of_one():
    """The rule of three: with 95 % confidence the rate is at most 3 in as many as were seen without one."""
    test = TokenRateTest([10] * 300, 1.0, 0.95)
    assert test.needed_tokens() == pytest.approx(1000 * math.log(20), rel=0.02)
    assert not test.passes()
    assert TokenRateTest([10] * 350, 1.0, 0.95).passes()
    assert not TokenRateTest([10] * 350, 1.0, 0.95).passes([4], [10])


def test_a_cascade_that_is_sure_of_some_texts_keeps_its_rate():
    running = [np.full(20, math.inf), *(np.full(20, 0.01 * number) for number in range(80))]
    positive = [False] * 81
    found = threshold_per_thousand([*running, np.ones(1)], [*positive, True], rate=2.0, confidence=None)
    assert sum(own[-1] >= found for own in running) == 3  # 3 of about 1,600 tokens
    with pytest.raises(ConfigError, match="81 of 81 negatives are flagged by the first monitor"):
        threshold_per_thousand([np.full(20, math.inf)] * 81 + [np.ones(1)], [*positive, True], rate=2, confidence=None)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (
            0.1,
            r"the negatives have 1000 tokens for a rate of 0.1 per thousand tokens with 95% conf.*; about 30\d\d\d are",
        ),
        (0, "the rate per thousand tokens is 0; it must be above 0 and below 1000, such as 0.01"),
        (1000, "the rate per thousand tokens is 1000"),
    ],
)
def test_what_cannot_be_promised_is_refused(rate: float, message: str):
    running = [np.linspace(0, 1, 10)] * 101
    with pytest.raises(ConfigError, match=message):
        threshold_per_thousand(running, [False] * 100 + [True], rate=rate, confidence=0.95)
