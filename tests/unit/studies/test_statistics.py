"""Intervals, paired bootstrap, Holm's correction and the sentence that they allow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lamina.errors import ConfigError
from lamina.studies.statistics import (
    Difference,
    corrected,
    holm,
    mean_and_interval,
    of_best,
    paired_bootstrap,
    rank_correlation,
    repeats_for,
)

RNG = np.random.default_rng(0)


def test_the_interval_of_paired_rows_is_that_of_scipy():
    first = RNG.integers(0, 2, 300).astype(float)
    second = np.where(RNG.random(300) < 0.2, 1 - first, first)
    ours = paired_bootstrap(first, second)
    theirs = stats.bootstrap((first - second,), np.mean, n_resamples=10_000, method="percentile", rng=1)
    assert ours.value == pytest.approx((first - second).mean())
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.004)
    assert (ours.rows, ours.seeds) == (300, 1)


def test_rows_are_paired():
    """Scores that vary wildly from row to row, and by the same small step everywhere: the step is certain."""
    rows = RNG.normal(size=400) * 10
    ahead = paired_bootstrap(rows + 0.1, rows)
    assert ahead.low == pytest.approx(0.1)
    assert ahead.high == pytest.approx(0.1)
    assert ahead.p == pytest.approx(2 / 10_001)


def test_equal_methods_are_not_told_apart():
    rows = RNG.random((3, 50))
    same = paired_bootstrap(rows, rows)
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, 1)
    assert not same.conclusive
    assert str(same) == (
        "A and B cannot be told apart: no row differs; the difference is 0.000 (n = 50 rows, 3 seeds)."
    )


@pytest.mark.parametrize(
    ("rows", "differing", "clause"),
    [(1, 1, "only 1 row differs"), (100, 4, "only 4 rows differ"), (5, 5, "only 5 rows differ")],
)
def test_a_method_is_not_called_better_for_a_handful_of_rows(rows: int, differing: int, clause: str):
    right = np.ones((3, rows))
    wrong = right.copy()
    wrong[:, :differing] = 0
    few = paired_bootstrap(right, wrong, names=("layer 3", "tfidf"), repeats=1000)
    assert (few.differing, few.few_differ, few.conclusive) == (differing, True, False)
    assert str(few).startswith(
        f"layer 3 and tfidf cannot be told apart: {clause}, which decides nothing; the difference"
    )


def test_six_rows_that_differ_may_decide():
    right = np.ones((3, 12))
    wrong = right.copy()
    wrong[:, :6] = 0
    enough = paired_bootstrap(right, wrong, repeats=1000)
    assert (enough.differing, enough.conclusive) == (6, True)
    assert str(enough).startswith("A is ahead of B by 0.500 (95 %")
    wrong[0, :6], wrong[0, 6:9] = 1, 0  # the seeds are wrong on different rows
    assert paired_bootstrap(right, wrong, repeats=1000).differing == 9


def test_rows_whose_counts_depend_on_other_rows_are_counted_by_the_caller():
    counts = RNG.random((2, 20, 3))
    options = {"metric": lambda totals: totals[..., 0], "repeats": 100}
    assert paired_bootstrap(counts, counts + 1, **options).differing == 20
    assert paired_bootstrap(counts, counts + 1, differing=3, **options).differing == 3
    assert paired_bootstrap(counts, counts, differing=3, **options).differing == 0


def test_seeds_that_disagree_widen_the_interval():
    base = np.zeros((4, 200))
    agree = base + 0.1
    differ = base + np.array([[-0.2], [0.4], [-0.1], [0.3]])
    assert paired_bootstrap(agree, base).high - paired_bootstrap(agree, base).low == pytest.approx(0)
    wide = paired_bootstrap(differ, base)
    assert wide.value == pytest.approx(0.1)
    assert wide.low < 0 < wide.high


def test_a_metric_of_counts():
    """F1 from counts of right, guessed and true per row."""
    counts = RNG.integers(0, 3, (2, 80, 3)).astype(float)
    other = counts + np.array([0.0, 1, 0])

    def f1(totals):
        return 2 * totals[..., 0] / (totals[..., 1] + totals[..., 2])

    ahead = paired_bootstrap(counts, other, metric=f1)
    expected = np.mean([f1(counts[s].sum(0)) - f1(other[s].sum(0)) for s in range(2)])
    assert ahead.value == pytest.approx(expected)
    assert 0 < ahead.low < ahead.value < ahead.high


def test_resampling_in_parts_changes_nothing(monkeypatch):
    monkeypatch.setattr("lamina.studies.statistics._AT_ONCE", 100)
    rows = RNG.normal(size=40)
    ahead = paired_bootstrap(rows, np.zeros(40), repeats=1000)
    assert ahead.low < rows.mean() < ahead.high


@pytest.mark.parametrize(
    ("second", "options", "match"),
    [
        (np.zeros(3), {}, "shapes"),
        (np.zeros(2), {"repeats": 5}, "repeats is 5"),
        (np.zeros(2), {"confidence": 1.0}, "confidence is 1.0"),
        (np.zeros(2), {"seed": -1}, "seed is -1"),
    ],
)
def test_what_cannot_be_compared(second, options, match):
    with pytest.raises(ConfigError, match=match):
        paired_bootstrap(np.zeros(2), second, **options)


@pytest.mark.parametrize("metric", [None, lambda totals: totals[..., 0] / totals[..., 1]])
def test_scores_that_are_not_finite_are_refused(metric):
    scores = np.array([[1.0, 1], [np.nan, 1], [0, 1]])
    scores = scores if metric else scores[:, 0]
    for pair in ((scores, np.ones_like(scores)), (np.ones_like(scores), scores)):
        with pytest.raises(ConfigError, match="paired_bootstrap: the score of new or old is NaN or infinite"):
            paired_bootstrap(*pair, metric=metric, names=("new", "old"), repeats=100)


def test_a_metric_without_a_score_in_some_resamples_is_told_what_to_return():
    """F1 is 0/0 in a resample that lacks the only row with positives."""
    first = np.array([[2.0, 2], [0, 0], [0, 0]])  # twice the true positives; predicted plus true positives
    second = first / [2, 1]

    def f1(totals):
        with np.errstate(invalid="ignore"):
            return totals[..., 0] / totals[..., 1]

    match = r"^paired_bootstrap: \d+ of 100 resamples have no finite score\. Use a metric that is defined for"
    with pytest.raises(ConfigError, match=match):
        paired_bootstrap(first, second, metric=f1, repeats=100)
    assert paired_bootstrap(first, second, metric=lambda totals: np.nan_to_num(f1(totals)), repeats=100).value == 0.5


@pytest.mark.parametrize(("shape", "metric"), [((), None), ((2, 2, 2), None), ((2,), lambda totals: totals[..., 0])])
def test_scores_of_too_few_or_too_many_axes_are_refused(shape, metric):
    with pytest.raises(ConfigError, match="paired_bootstrap: the scores have the shapes"):
        paired_bootstrap(np.zeros(shape), np.zeros(shape), metric=metric)


def test_holm_is_that_of_the_paper():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def _difference(value: float, low: float, high: float, p: float, seeds: int = 3) -> Difference:
    return Difference("A", "B", value, low, high, p, 872, 100, seeds)


def test_the_sentence_says_who_is_ahead():
    first, second = corrected([_difference(0.012, 0.003, 0.021, 0.005), _difference(-0.02, -0.03, -0.01, 0.0002)])
    assert str(first) == "A is ahead of B by 0.012 (95 % 0.003 to 0.021, n = 872 rows, 3 seeds, Holm p = 0.005)."
    assert str(second) == "B is ahead of A by 0.020 (95 % 0.010 to 0.030, n = 872 rows, 3 seeds, Holm p < 0.001)."
    assert corrected([first]) == [first]


def test_the_sentence_says_what_is_not_known():
    unsure = _difference(0.012, -0.003, 0.021, 0.2)
    facts = "(95 % -0.003 to 0.021, n = 872 rows, 3 seeds, p = 0.20)"
    assert str(unsure) == f"A and B cannot be told apart: the difference is 0.012 {facts}."
    many = corrected([_difference(0.012, 0.003, 0.021, 0.04), _difference(0.01, 0.001, 0.02, 0.04)])
    assert [one.conclusive for one in many] == [False, False]
    assert str(many[0]).startswith(
        "A and B cannot be told apart among so many comparisons: the difference is 0.012 (95 % 0.003"
    )


def test_one_seed_claims_no_interval():
    one = _difference(-0.012, -0.03, -0.001, 0.001, seeds=1)
    assert not one.conclusive
    assert str(one) == "A is 0.012 below B (n = 872 rows); with one seed no interval is claimed."
    two = _difference(0.02, 0.01, 0.03, 0.001, seeds=2)  # both seeds ahead: chance with probability 1/2
    assert not two.conclusive
    assert str(two) == "A is 0.020 above B (n = 872 rows); with 2 seeds no interval is claimed."
    assert mean_and_interval([0.5]) == "0.500 (one seed)"
    assert mean_and_interval([0.2, 0.3]) == "0.250 (2 seeds, no interval)"
    assert mean_and_interval([0.65, 0.65]) == "0.650 (2 seeds, no interval)"


def test_intervals_over_seeds():
    half = stats.t.ppf(0.975, 2) * 0.1 / 3**0.5
    assert mean_and_interval([0.5, 0.6, 0.7]) == f"0.600 ± {half:.3f}"


@pytest.mark.parametrize(
    ("second", "p"),
    [([1, 2, 3], 2 / 6), ([1, 2, 3, 4], 2 / 24), ([2, 1, 3, 4, 5], 10 / 120), ([1, 1, 2], 4 / 6)],
)
def test_few_pairs_have_an_exact_p(second: list[float], p: float):
    """The share of all orders with a correlation that is as far from 0; of ties several orders are one."""
    assert rank_correlation(range(len(second)), second).p == pytest.approx(p)


def test_a_value_is_ranked_within_its_group():
    lengths = [1, 1, 1, 1, 2, 2, 2]
    rising, falling = [1, 2, 3, 4, 10, 11, 12], [4, 3, 2, 1, 12, 11, 10]
    assert rank_correlation(rising, falling).score > 0.2  # the second group alone has higher values
    found = rank_correlation(rising, falling, lengths)
    assert found == (7, pytest.approx(2 / (24 * 6)), pytest.approx(-1))
    assert rank_correlation(rising, falling, list(range(7)))[:1] == (0,)
    alone = rank_correlation([*rising, 99], [*falling, 0], [*lengths, 3])
    assert alone == found  # a group of one has no order


def test_the_p_of_many_orders_is_that_of_random_ones(monkeypatch: pytest.MonkeyPatch):
    groups = [1] * 6 + [2] * 5 + [3] * 4
    first, second = RNG.normal(size=15).tolist(), RNG.normal(size=15).tolist()
    exact = rank_correlation(first, second, groups)
    monkeypatch.setattr("lamina.studies.statistics._MOST_ORDERS", 0)
    assert rank_correlation(first, second, groups) == (15, pytest.approx(exact.p, abs=0.02), exact.score)


def test_a_lead_over_one_of_many_can_be_significant_and_the_best_of_many_is_corrected():
    assert 500 * 2 / (1 + repeats_for(500)) < 0.05
    assert repeats_for(3) == 5000
    lead = _difference(0.012, 0.003, 0.021, 0.005)
    assert of_best(lead, 26).corrected_p == pytest.approx(0.13)
    assert of_best(lead, 1) == lead


def test_an_infinite_value_is_the_highest_rank():
    assert rank_correlation([1, 2, 3, 4, math.inf], [5, 4, 3, 2, 1]) == rank_correlation(range(5), [5, 4, 3, 2, 1])
    unknown = rank_correlation([1, 2, 3, math.nan], [4, 3, 2, 1])
    assert math.isnan(unknown.p)
    assert "cannot be said" in unknown.sentence("x holds", "x", "y", "4 layers")


def test_many_pairs_have_scipys_p():
    first, second = RNG.normal(size=12), RNG.normal(size=12)
    assert rank_correlation(list(first), list(second)).p == pytest.approx(stats.spearmanr(first, second).pvalue)
