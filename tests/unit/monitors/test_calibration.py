"""Calibration: thresholds for a rate of false positives, and confidence intervals of the rates."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.portions import one_in

from lamina.errors import ConfigError
from lamina.monitors import Calibration
from lamina.monitors.calibration import Precision, Rounding, allowed_positives, interval, needed_negatives


def scores(negatives: int = 200, positives: int = 50) -> tuple[list[float], list[bool]]:
    rng = torch.Generator().manual_seed(0)
    highest = torch.cat([torch.randn(negatives, generator=rng), 2 + torch.randn(positives, generator=rng)])
    return highest.tolist(), [False] * negatives + [True] * positives


@pytest.mark.parametrize("rate", [0.005, 0.01, 0.05, 0.5, 0.999])
def test_the_threshold_is_the_lowest_that_keeps_the_rate(rate: float):
    highest, positive = scores()
    found = Calibration.of(highest, positive, false_positive_rate=rate)
    no = [score for score, is_so in zip(highest, positive, strict=True) if not is_so]
    flagged = sum(score >= found.threshold for score in no)
    assert flagged == math.floor(rate * 200)
    assert found.false_positive_rate == flagged / 200 <= rate == found.target
    below = max(score for score in highest if score < found.threshold)
    assert sum(score >= below for score in no) == flagged + 1  # any lower, and there is one more
    assert found.recall == sum(score >= found.threshold for score in highest[200:]) / 50
    assert (found.negatives, found.positives) == (200, 50)


def test_a_rate_of_whole_rows_is_used_up_however_it_is_rounded():
    assert 0.29 * 100 < 29
    assert Calibration.of(*scores(100), false_positive_rate=0.29).false_positive_rate == 0.29


def test_a_threshold_that_was_chosen_before_is_measured():
    highest, positive = scores()
    chosen = Calibration.of(highest, positive, false_positive_rate=0.05)
    again = Calibration.of(
        highest[:250:10] + highest[200:], positive[:250:10] + positive[200:], threshold=chosen.threshold
    )
    assert (again.threshold, again.target, again.negatives) == (chosen.threshold, None, 20)
    assert again.false_positive_rate == sum(score >= chosen.threshold for score in highest[:200:10]) / 20


def test_no_score_stands_near_the_threshold():
    found = Calibration.of([0.1, 0.2, 0.4, 0.9, 0.8], [False] * 4 + [True], false_positive_rate=0.3)
    assert found.threshold == pytest.approx(0.6)  # between 0.4, which must not be flagged, and 0.8


@pytest.mark.parametrize(
    ("highest", "rate", "threshold"), [([-1e308, 1.5e308], 0.999, 2.5e307), ([0.1, 0.9], 1 - 1e-10, -5e307)]
)
def test_the_threshold_is_finite_for_the_largest_scores_and_rates(highest: list[float], rate: float, threshold: float):
    found = Calibration.of([-1e308, *highest], [False, False, True], false_positive_rate=rate)
    assert found.threshold == pytest.approx(threshold)


def test_equal_scores_are_flagged_together_or_not_at_all():
    found = Calibration.of([0.5] * 10 + [1.0], [False] * 10 + [True], false_positive_rate=0.2)
    assert (found.false_positive_rate, found.recall) == (0.0, 1.0)
    top = Calibration.of([1.0] * 11, [False] * 10 + [True], false_positive_rate=0.2)
    assert (top.false_positive_rate, top.recall) == (0.0, 0.0)
    assert 1 < top.threshold < 1 + 1e-5


@pytest.mark.parametrize(("level", "noise"), [*product((0.03, 0.5, 0.97), (1e-7, -1e-7, 1e-6)), (2000.0, 1e-4)])
def test_scores_that_are_equal_up_to_rounding_stay_on_one_side_under_another_kernel(level: float, noise: float):
    """Share a prefix, and so a highest score, among 16 of 100 negatives; another kernel rounds each differently."""
    tie = [level + noise * (number % 5) for number in range(16)]
    again = [level + noise * ((number * 3 + 2) % 5) for number in range(16)]
    top = 2 * max(1.0, level)  # the last may be logits, of which float32 keeps fewer decimals
    highest = [level / 2] * 82 + [top - 0.4, top - 0.3]
    positive = [False] * 100 + [True]
    found = Calibration.of([*highest, *tie, top], positive, false_positive_rate=0.1)
    assert found.false_positive_rate == 0.02
    measured = Calibration.of([*highest, *again, top], positive, threshold=found.threshold)
    assert (measured.false_positive_rate, measured.recall) == (0.02, 1.0)


@pytest.mark.parametrize(("precision", "noise"), [("bfloat16", 0.01), ("float16", 0.001)])
@pytest.mark.parametrize("probability", [True, False])
def test_scores_in_a_low_precision_are_equal_within_its_rounding(precision: Precision, noise: float, probability: bool):
    """Let 16 of 100 negatives have one score, which another kernel raises; two are higher than all of these."""
    logits = [*[-2.0] * 82, *[0.5] * 16, 3.0, 4.0, 6.0]
    again = [*[-2.0] * 82, *[0.5 + 4 * noise] * 16, 3.0, 4.0, 6.0]
    scores, other = (torch.tensor(own).sigmoid().tolist() if probability else own for own in (logits, again))
    positive, rounding = [False] * 100 + [True], Rounding.of(precision, scores, probability=probability)
    close = [*scores, scores[-4] + noise / 5]  # a positive text that keeps float32's threshold close to the tie
    for own, rate in ((rounding, 0.02), (Rounding.of("float32", scores), 0.18)):
        found = Calibration.of(close, [*positive, True], false_positive_rate=0.1, rounding=own)
        assert found.false_positive_rate == 0.02
        measured = Calibration.of(other, positive, threshold=found.threshold)
        assert measured.false_positive_rate == rate
    assert found == Calibration.of(close, [*positive, True], false_positive_rate=0.1)  # float32 is the default


def test_rounding_is_small_where_all_scores_lie_close_together():
    """The logits of the texts lie within 1, half of 2, so they move by half of 16 eps."""
    assert Rounding.of("bfloat16", [1.0, 2.0, -math.inf, math.inf], probability=False).logit == 8 * 2**-7
    assert Rounding.of("bfloat16", [0.5] * 3).at(0.5) == Rounding().at(0.5)
    assert Rounding.of("bfloat16", [-math.inf]) == Rounding()
    assert Rounding.of("float16", [0.0, 1.0]).logit == 16 * 2**-10
    assert Rounding.of("float32", [0.0, 1.0]) == Rounding()
    exact = {0.5: 1e-5 + 1e-6, 0.0: 1e-6, 1.0: 1e-6, -math.inf: 0.0, 20.0: 1e-5 + 1e-6 * 20}
    assert {score: Rounding().at(score) for score in exact} == exact


def test_close_scores_that_are_no_ties_do_not_move_the_threshold_away():
    """A tolerance that went on from score to score would clear all of them, and flag nothing."""
    highest = [0.4 + 5e-6 * number for number in range(1000)]
    found = Calibration.of([*highest, 0.9], [False] * 1000 + [True], false_positive_rate=0.1)
    assert 0.09 < found.false_positive_rate <= 0.1


def test_the_intervals_are_clopper_and_pearsons():
    assert interval(0, 10) == pytest.approx((0, 1 - 0.025**0.1))
    assert interval(10, 10) == pytest.approx((0.025**0.1, 1))
    assert interval(10, 10, 0.9)[0] == pytest.approx(0.05**0.1)
    highest, positive = scores()
    found = Calibration.of(highest, positive, false_positive_rate=0.05, confidence=0.9)
    assert found.false_positive_interval == interval(10, 200, 0.9)
    assert found.recall_interval == interval(round(found.recall * 50), 50, 0.9)


def test_texts_that_a_cascade_never_asks_about_are_not_flagged():
    highest = [-math.inf] * 9 + [0.3, 0.7, -math.inf]
    positive = [False] * 10 + [True, True]
    found = Calibration.of(highest, positive, false_positive_rate=0.05 * 2)
    assert 0.3 - 1e-4 < found.threshold < 0.3
    assert (found.false_positive_rate, found.recall) == (0.1, 0.5)


def test_a_calibration_survives_json():
    highest, positive = scores()
    found = Calibration.of(highest, positive, task="a", split="test", asked=0.25)
    assert Calibration(**json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("negatives", "positives", "rate", "message"),
    [
        (99, 5, 0.01, "there are 99 negatives for a false_positive_rate of 0.01; at least 100 are needed"),
        (2, 5, 0.3, "there are 2 negatives for a false_positive_rate of 0.3; at least 4 are needed"),
        (0, 5, 0.01, "no row is negative; a rate of false positives needs at least one"),
        (100, 0, 0.01, "no row is positive; recall needs at least one"),
        (100, 5, 0.0, "false_positive_rate is 0.0; it must be above 0 and below 1, such as 0.01"),
        (100, 5, 1, "false_positive_rate is 1; it must be above 0 and below 1, such as 0.01"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(negatives: int, positives: int, rate: float, message: str):
    highest, positive = scores(negatives, positives)
    with pytest.raises(ConfigError, match=f"calibrate: {message}"):
        Calibration.of(highest, positive, false_positive_rate=rate)


@pytest.mark.parametrize("score", [math.inf, -math.inf])
def test_texts_without_a_score_are_refused(score: float):
    with pytest.raises(ConfigError, match="calibrate: no text has a token that is scored"):
        Calibration.of([score] * 20, [False] * 10 + [True] * 10, false_positive_rate=0.1)


def test_a_rate_that_the_first_of_a_cascade_exceeds_is_refused():
    highest, positive = [math.inf] * 3 + [0.1] * 8, [False] * 10 + [True]
    with pytest.raises(ConfigError, match="3 of 10 negatives are flagged by the first monitor"):
        Calibration.of(highest, positive, false_positive_rate=0.2)


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_confidence_is_between_0_and_1(confidence: float):
    with pytest.raises(
        ConfigError, match=f"calibrate: confidence is {confidence}; it must be above 0 and below 1, such as 0.95"
    ):
        Calibration.of([0.1, 0.9], [False, True], threshold=0.5, confidence=confidence)


@pytest.mark.parametrize(("rate", "confidence", "needed"), [(0.01, 0.95, 299), (0.05, 0.95, 59), (0.01, 0.99, 459)])
def test_as_many_negatives_are_needed_as_make_the_highest_of_them_a_bound(rate: float, confidence: float, needed: int):
    assert needed_negatives(rate, confidence) == needed
    assert (1 - rate) ** needed <= 1 - confidence < (1 - rate) ** (needed - 1)
    assert [allowed_positives(count, rate, confidence) for count in (needed - 1, needed)] == [-1, 0]
    highest, positive = scores(needed - 1)
    with pytest.raises(ConfigError, match=rf"{confidence:.0%} confidence; at least {needed} are needed"):
        Calibration.of(highest, positive, false_positive_rate=rate, confidence=confidence, guarantee=True)


@pytest.mark.parametrize(("rate", "negatives"), one_in(3, [(0.01, 740), (0.05, 300), (0.2, 60)], 2))
def test_a_guaranteed_rate_holds_on_other_texts_as_often_as_promised(rate: float, negatives: int):
    """Scores are uniform, so that the true rate of a threshold t is 1 - t."""
    rng, held = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        no = torch.rand(negatives, generator=rng, dtype=torch.float64).tolist()
        found = Calibration.of([*no, 2.0], [False] * negatives + [True], false_positive_rate=rate, guarantee=True)
        held += 1 - found.threshold <= rate
        assert found.guaranteed
    assert held >= 0.93 * 400  # 0.95 are promised; two standard errors of 400 draws are 0.022
    assert negatives * rate > allowed_positives(negatives, rate, 0.95) >= 0


def test_a_monitor_is_useful_if_its_recall_lies_above_its_rate():
    highest, positive = scores()
    assert Calibration.of(highest, positive, false_positive_rate=0.05).is_useful
    assert not Calibration.of(highest, positive[::-1], false_positive_rate=0.05).is_useful


def test_scores_that_are_nan_or_too_few_are_an_error():
    with pytest.raises(ConfigError, match="a score is NaN"):
        Calibration.of([math.nan] * 10 + [0.5], [False] * 10 + [True], false_positive_rate=0.2)
    with pytest.raises(ConfigError, match="the threshold is NaN"):
        Calibration.of([0.1] * 10 + [0.5], [False] * 10 + [True], threshold=math.nan)
    with pytest.raises(ConfigError, match="11 scores for 10 texts"):
        Calibration.of([0.1] * 11, [False] * 10)


def test_a_score_equal_to_the_threshold_counts_as_flagged():
    found = Calibration.of([0.5, 0.2, 0.5], [False, False, True], threshold=0.5)
    assert (found.false_positive_rate, found.recall) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"highest": 5}, "calibrate: highest is 5; it must be a list"),
        ({"highest": [0.1, None, 0.9]}, "calibrate: `highest` has an entry that is not a number"),
        ({"highest": [0.1, 10**400, 0.9]}, "calibrate: `highest` has an entry that is not a number"),
        ({"threshold": 10**400}, "calibrate: threshold is 1000.*; it must be a number or None"),
        ({"positive": True}, "calibrate: positive is True; it must be a list"),
        ({"false_positive_rate": "low"}, "calibrate: false_positive_rate is 'low'; it must be a number"),
        ({"threshold": "0.5"}, "calibrate: threshold is '0.5'; it must be a number or None"),
        ({"guarantee": 1}, "calibrate: guarantee is 1; it must be True or False"),
    ],
)
def test_options_of_other_types_are_named(options: Any, message: str):
    how: dict[str, Any] = {"highest": [0.1, 0.2, 0.9], "positive": [False, False, True], **options}
    with pytest.raises(ConfigError, match=message):
        Calibration.of(**how)


@pytest.mark.parametrize("odd", [None, "no", math.nan, -1])
def test_labels_that_are_neither_true_nor_false_are_refused(odd: Any):
    with pytest.raises(ConfigError, match=r"it is True or False\. Leave out texts without a label"):
        Calibration.of([0.1, 0.2, 0.9], [False, odd, True], false_positive_rate=0.5)


def test_scores_of_numpy_give_a_threshold_that_is_written_as_json():
    highest = [np.float64(score) for score in (0.1, 0.2, 0.9)]
    found = Calibration.of(highest, [False, False, True], false_positive_rate=0.5)
    assert type(found.threshold) is float


def test_a_given_threshold_guarantees_nothing():
    with pytest.raises(ConfigError, match="guarantee is set, and so is the threshold"):
        Calibration.of([0.1, 0.9], [False, True], threshold=0.5, guarantee=True)
