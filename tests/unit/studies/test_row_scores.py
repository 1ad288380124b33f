"""Metrics from sums of what rows add, against the metrics of the tasks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamina.errors import UnknownNameError
from lamina.studies.statistics import row_counts
from lamina.tasks.base import TaskOutline
from lamina.tasks.metrics import score_classes, score_multi_label, score_numbers, score_tags

RNG = np.random.default_rng(0)


def ours(task: TaskOutline, metric: str, guesses, truths) -> float:
    counts, score = row_counts(task, metric, guesses, truths)
    assert len(counts) == len(truths)
    twice = score(np.stack([counts.sum(0), 2 * counts.sum(0)]))  # of each row twice: all metrics are the same
    assert twice[1] == pytest.approx(twice[0], rel=1e-5)
    return float(twice[0])


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("metric", ["accuracy", "f1", "mcc", "macro_f1"])
def test_classes(classes: int, metric: str):
    truths = RNG.integers(0, classes, 80)
    guesses = np.where(RNG.random(80) < 0.6, truths, RNG.integers(0, classes, 80))
    task = TaskOutline("sequence_classification", "classification", tuple("0123"[:classes]))  # pyright: ignore
    expected = score_classes([metric], torch.tensor(guesses), torch.tensor(truths), classes)[metric]
    assert ours(task, metric, guesses.tolist(), truths.tolist()) == pytest.approx(expected, rel=1e-5)
    constant = np.zeros(80, int)
    expected = score_classes([metric], torch.tensor(constant), torch.tensor(truths), classes)[metric]
    assert ours(task, metric, constant.tolist(), truths.tolist()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_numbers(metric: str):
    truths = RNG.normal(size=60) + 100
    guesses = truths + RNG.normal(size=60)
    task = TaskOutline("sequence_classification", "regression", ("score",))  # pyright: ignore
    expected = score_numbers([metric], guesses.tolist(), truths.tolist())[metric]
    assert ours(task, metric, guesses.tolist(), truths.tolist()) == pytest.approx(expected, rel=1e-5)
    assert ours(task, metric, [1.0] * 60, truths.tolist()) == 0


def test_the_correlation_of_a_subset_of_rows():
    truths, noise = np.random.default_rng(1).normal(size=(2, 60))
    guesses = truths + noise
    task = TaskOutline("sequence_classification", "regression", ("score",))  # pyright: ignore
    counts, score = row_counts(task, "pearson", guesses.tolist(), truths.tolist())
    high = truths > 0
    assert float(score(counts[high].sum(0))) == pytest.approx(np.corrcoef(guesses[high], truths[high])[0, 1])


@pytest.mark.parametrize("scale", [1e-200, 1e-7, 1e9, 1e200])
def test_the_correlation_does_not_depend_on_the_unit(scale: float):
    truths, guesses = [0.0, 1.0, 2.0, 4.0], [0.0, 2.0, 1.0, 3.0]
    task = TaskOutline("sequence_classification", "regression", ("score",))  # pyright: ignore
    small, large = ([scale * value for value in values] for values in (guesses, truths))
    assert ours(task, "pearson", small, large) == pytest.approx(np.corrcoef(guesses, truths)[0, 1])
    assert ours(task, "pearson", [scale * 0.1] * 4, large) == 0
    counts, score = row_counts(task, "pearson", small, large)
    assert float(score(3 * counts[1] + counts[1])) == 0  # a resample of one row


@pytest.mark.parametrize("outlier", [1e5, 1e8])
def test_rows_beside_an_outlier_keep_their_correlation(outlier: float):
    truths = RNG.uniform(0, 5, 30)
    guesses = truths + RNG.normal(scale=0.5, size=30)
    task = TaskOutline("sequence_classification", "regression", ("score",))  # pyright: ignore
    counts, score = row_counts(task, "pearson", [*guesses, 0.9 * outlier], [*truths, outlier])
    assert float(score(counts[:-1].sum(0))) == pytest.approx(np.corrcoef(guesses, truths)[0, 1], rel=0.02)


@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_several_labels(metric: str):
    truths, guesses = RNG.integers(0, 2, (2, 40, 3))
    task = TaskOutline("sequence_classification", "multi_label", ("a", "b", "c"))  # pyright: ignore
    expected = score_multi_label([metric], torch.tensor(guesses), torch.tensor(truths))[metric]
    both = [[tuple(row) for row in rows.tolist()] for rows in (guesses, truths)]
    assert ours(task, metric, *both) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "span_f1"])
def test_tags(metric: str):
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    truths = [tuple(RNG.integers(0, 5, size).tolist()) for size in RNG.integers(1, 9, 30)]
    guesses = [tuple(tag if RNG.random() < 0.7 else int(RNG.integers(0, 5)) for tag in row) for row in truths]
    task = TaskOutline("token_classification", "classification", labels)  # pyright: ignore
    expected = score_tags([metric], guesses, truths, labels)[metric]
    assert ours(task, metric, guesses, truths) == pytest.approx(expected, rel=1e-5)


def test_spans_of_other_schemes():
    truths, guesses = [(4, 4, 1, 3), (0, 4)], [(4, 0, 1, 3), (0, 4)]
    for labels in (("O", "B-x", "I-x", "L-x", "U-x"), ("O", "B-x", "I-x", "E-x", "S-x")):
        task = TaskOutline("token_classification", "classification", labels)  # pyright: ignore
        assert ours(task, "span_f1", guesses, truths) == pytest.approx(6 / 7)
        assert score_tags(["span_f1"], guesses, truths, labels)["span_f1"] == pytest.approx(6 / 7)


@pytest.mark.parametrize(("metric", "expected"), [("accuracy", 2 / 3), ("f1", 0.4), ("span_f1", 0.8)])
def test_words_without_a_label_are_not_scored(metric: str, expected: float):
    task = TaskOutline("token_classification", "classification", ("O", "B-x"))  # pyright: ignore
    assert ours(task, metric, [(1, 0, 1), (1,), (1,)], [(-100, 1, 1), (1,), (-100,)]) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_metric_that_is_no_function_of_sums_is_refused():
    with pytest.raises(UnknownNameError, match="unknown metric 'perplexity'"):
        row_counts(TaskOutline("sequence_classification", "classification", ("a", "b")), "perplexity", [0], [0])  # pyright: ignore


@pytest.mark.parametrize(
    ("kind", "form"), [("sequence_classification", int), ("token_classification", lambda tag: (tag,))]
)
def test_macro_f1_of_a_resample_is_over_the_classes_of_the_whole_sample(kind: str, form):
    task = TaskOutline(kind, "classification", ("a", "b", "c"))  # pyright: ignore
    counts, score = row_counts(task, "f1", [form(0)] * 4, [form(tag) for tag in (0, 0, 0, 1)])
    assert float(score(counts.sum(0))) == pytest.approx(3 / 7)
    assert float(score(counts[:3].sum(0))) == 0.5  # the resample lacks class "b", whose F1 is 0, and the sample "c"
    counts, score = row_counts(task, "f1", [form(0), form(1), form(2)], [form(0), form(1), form(1)])
    assert float(score(counts.sum(0))) == pytest.approx(5 / 9)  # the F1 of the classes are 1, 2/3 and 0
    assert float(score(counts[:1].sum(0))) == pytest.approx(5 / 9)
    assert score(counts[[0, 1]].sum(0)) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("kind", "metric"), [("sequence", "macro_f1"), ("sequence", "mcc"), ("sequence", "f1"), ("token", "f1")]
)
def test_counts_of_many_classes_grow_with_their_number_and_not_its_square(kind: str, metric: str):
    classes, rows = 150, 400
    truths = RNG.integers(0, classes, rows)
    guesses = np.where(RNG.random(rows) < 0.5, truths, RNG.integers(0, classes, rows))
    labels = tuple(f"class {number}" for number in range(classes))
    task = TaskOutline(f"{kind}_classification", "classification", labels)  # pyright: ignore
    sides = [side.tolist() for side in (guesses, truths)]
    sides = sides if kind == "sequence" else [[tuple(side[:3]), tuple(side[3:])] for side in sides]
    counts, score = row_counts(task, metric, *sides)
    assert counts.shape[1] <= 4 * classes
    name = "mcc" if metric == "mcc" else "macro_f1"
    expected = score_classes([name], torch.tensor(guesses), torch.tensor(truths), classes)[name]
    assert float(score(counts.sum(0))) == pytest.approx(expected, rel=1e-5)


def test_f1_of_a_class_counts_that_class_only():
    task = TaskOutline("sequence_classification", "classification", ("no", "yes"))  # pyright: ignore
    counts, score = row_counts(task, "f1", [1, 1, 0, 0], [1, 0, 1, 0])
    assert counts.tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert float(score(counts.sum(0))) == 0.5
