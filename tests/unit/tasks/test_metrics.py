"""Scores against references, and which score is the better one."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from seqeval.metrics import classification_report as span_report
from sklearn import metrics as reference

from lamina.errors import DataError, UnknownNameError
from lamina.tasks import KINDS, kind_of
from lamina.tasks.language_modeling import TokenSums
from lamina.tasks.metrics import (
    BOUNDS,
    LOWER,
    RANKING,
    SUBTOKENS,
    better,
    class_table,
    score_classes,
    score_multi_label,
    score_numbers,
    score_tags,
    span_table,
)

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
WORDS = ("DT", "NN", "VB")
RNG = np.random.default_rng(0)


def classes(metrics: tuple[str, ...], guess: list[int], truth: list[int], count: int) -> dict[str, float]:
    return score_classes(metrics, torch.tensor(guess), torch.tensor(truth), count)


def several(metrics: tuple[str, ...], guess: list[list[int]], truth: list[list[int]]) -> dict[str, float]:
    return score_multi_label(metrics, torch.tensor(guess), torch.tensor(truth))


def draw(classes: int, rows: int = 200) -> tuple[list[int], list[int]]:
    truth = RNG.integers(classes, size=rows)
    guess = np.where(RNG.random(rows) < 0.6, truth, RNG.integers(classes, size=rows))
    return guess.tolist(), truth.tolist()


def test_spans_of_bilou_tags_that_touch():
    labels = ("O", "B-PER", "I-PER", "L-PER", "U-PER")
    assert score_tags(("span_f1",), [[4, 0]], [[4, 4]], labels)["span_f1"] == pytest.approx(2 / 3)
    assert score_tags(("span_f1",), [[1, 3, 0, 0]], [[1, 3, 1, 3]], labels)["span_f1"] == pytest.approx(2 / 3)
    assert span_table([[1, 3, 1, 3]], [[1, 3, 1, 3]], labels)[0]["count"] == 2


def test_two_classes_agree_with_the_reference():
    guess, truth = draw(2)
    scores = classes(("mcc", "accuracy", "f1", "macro_f1"), guess, truth, 2)
    assert list(scores) == ["mcc", "accuracy", "f1", "macro_f1"]
    assert scores["macro_f1"] == pytest.approx(reference.f1_score(truth, guess, average="macro"))
    assert scores["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))
    assert scores["f1"] == pytest.approx(reference.f1_score(truth, guess))
    assert scores["mcc"] == pytest.approx(reference.matthews_corrcoef(truth, guess))


def test_ids_beyond_a_single_class_count_as_wrong():
    assert classes(("accuracy", "macro_f1"), [0, 1], [0, 0], 1) == pytest.approx({"accuracy": 0.5, "macro_f1": 1 / 3})


def test_more_classes_agree_with_the_reference():
    guess, truth = draw(4)
    scores = classes(("mcc", "accuracy", "f1"), guess, truth, 4)
    assert scores["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))
    assert scores["f1"] == pytest.approx(reference.f1_score(truth, guess, average="macro"))
    assert scores["mcc"] == pytest.approx(reference.matthews_corrcoef(truth, guess))


def test_regression_agrees_with_the_reference():
    truth = RNG.integers(0, 6, size=100).astype(float)
    guess = truth + RNG.normal(size=100)
    scores = score_numbers(("pearson", "spearman"), guess.tolist(), truth.tolist())
    assert scores["pearson"] == pytest.approx(stats.pearsonr(truth, guess)[0])
    assert scores["spearman"] == pytest.approx(stats.spearmanr(truth, guess)[0], abs=1e-5)


def test_multi_label_agrees_with_the_reference():
    guess, truth = (RNG.integers(0, 2, size=(50, 3)).tolist() for _ in range(2))
    scores = several(("f1", "accuracy"), guess, truth)
    assert scores["f1"] == pytest.approx(reference.f1_score(truth, guess, average="micro"))
    assert scores["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))


def test_spans_count_whole():
    truth = [[1, 2, 0, 3], [0, 1]]
    guess = [[1, 2, 0, 3], [1, 0]]  # two of three found, one of three guesses wrong
    scores = score_tags(("span_f1", "accuracy"), guess, truth, TAGS)
    assert scores["span_f1"] == pytest.approx(2 / 3)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert score_tags(("span_f1",), [[1, 0, 0, 3], [0, 1]], truth, TAGS)["span_f1"] == pytest.approx(2 / 3)


def test_spans_end_with_their_text():
    assert score_tags(("span_f1",), [[1], [2]], [[1], [1]], TAGS)["span_f1"] == 1.0


def test_words_without_spans():
    scores = score_tags(("accuracy", "f1"), [[0, 1], [2, 2]], [[0, 1], [2, 1]], WORDS)
    assert scores["accuracy"] == 0.75
    assert scores["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    with pytest.raises(DataError, match="the labels DT, NN, VB mark no spans"):
        score_tags(("span_f1",), [[0]], [[0]], WORDS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("score", "guess", "truth"),
    [
        (lambda *rows: classes(("accuracy", "f1", "mcc"), *rows, 2), [0, 0, 0, 0], [0, 1, 0, 1]),
        (lambda *rows: classes(("accuracy", "f1", "mcc"), *rows, 2), [0, 0], [0, 0]),
        (lambda *rows: classes(("accuracy", "f1", "mcc"), *rows, 2), [1, 1], [1, 1]),
        (lambda *rows: classes(("accuracy", "f1", "mcc"), *rows, 4), [2, 2, 2], [0, 1, 3]),
        (lambda *rows: score_numbers(("pearson", "spearman"), *rows), [2.5, 2.5, 2.5], [1.0, 2.0, 3.0]),
        (lambda *rows: score_numbers(("pearson", "spearman"), *rows), [1.0, 2.0, 3.0], [4.0, 4.0, 4.0]),
        (lambda *rows: score_numbers(("pearson", "spearman"), *rows), [1.0, math.nan, 3.0], [4.0, 5.0, 4.0]),
        (lambda *rows: score_numbers(("pearson", "spearman"), *rows), [1.0], [1.0]),
        (lambda *rows: several(("f1", "accuracy"), *rows), [[0, 0, 0]], [[0, 0, 0]]),
        (lambda *rows: score_tags(("span_f1", "accuracy", "f1"), *rows, TAGS), [[0, 0], []], [[0, 1], []]),
        (lambda *rows: score_tags(("span_f1", "accuracy", "f1"), *rows, TAGS), [[0, 0]], [[0, 0]]),
    ],
)
def test_what_has_no_meaning_is_zero(score: Any, guess: list[Any], truth: list[Any]):
    scores = score(guess, truth)
    assert all(math.isfinite(value) for value in scores.values())
    for name in ("mcc", "pearson", "spearman", "span_f1"):
        assert scores.get(name, 0.0) == 0.0


def test_one_class_only():
    assert classes(("accuracy",), [0, 0], [0, 0], 1) == {"accuracy": 1.0}


def test_unknown_names():
    with pytest.raises(UnknownNameError, match=r"metrics: unknown metric 'acuracy'; .* Did you mean 'accuracy'\?"):
        classes(("acuracy",), [0], [0], 2)
    for value in (math.nan, math.inf, 1.7e308):
        assert score_numbers(("mae",), [1.0, value], [1.0, 2.0])["mae"] == math.exp(700)
    with pytest.raises(UnknownNameError, match="unknown metric 'pearson'; known: accuracy, f1, mcc"):
        classes(("pearson",), [0], [0], 2)
    for score in (several, score_numbers):
        with pytest.raises(UnknownNameError, match="metrics: unknown metric 'mcc'"):
            score(("mcc",), [[0, 1]], [[0, 1]]) if score is several else score(("mcc",), [0.0], [0.0])


def test_rows_must_fit():
    with pytest.raises(DataError, match="2 predictions for 1 targets"):
        classes((), [0, 1], [0], 2)
    with pytest.raises(DataError, match="2 predictions for 1 targets"):
        score_numbers((), [0.0, 1.0], [0.0])
    with pytest.raises(DataError, match="text 1 has 1 predictions for 2 words") as info:
        score_tags((), [[0], [0]], [[0], [0, 1]], TAGS)
    assert info.value.row == 1
    for score in (lambda: classes((), [], [], 2), lambda: score_tags((), [], [], TAGS), lambda: several((), [], [])):
        with pytest.raises(DataError, match="metrics: there are no rows"):
            score()
    with pytest.raises(DataError, match="metrics: there are no words"):
        score_tags((), [[], []], [[], []], TAGS)


def test_table_of_classes():
    guess, truth = torch.tensor([[1, 0], [0, 1], [0, 1], [0, 1]]), torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]])
    assert class_table(guess, truth, ("no", "yes"))[:2] == [
        {"label": "no", "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "count": 2, "guessed": 1},
        {"label": "yes", "precision": pytest.approx(2 / 3), "recall": 1, "f1": pytest.approx(0.8), "count": 2}
        | {"guessed": 3},
    ]
    rows = class_table(torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[1, 0, 0], [0, 1, 1]]), ("a", "b", "c"))
    assert [(row["label"], row["precision"], row["recall"], row["count"], row["guessed"]) for row in rows] == [
        ("a", 0.5, 1.0, 1, 2),
        ("b", 1.0, 1.0, 1, 1),
        ("c", 0.0, 0.0, 1, 0),
        ("micro avg", 2 / 3, 2 / 3, 3, 3),
        ("macro avg", 0.5, 2 / 3, 3, 3),
        ("weighted avg", 0.5, 2 / 3, 3, 3),
    ]


def test_table_classification_report():
    rows = span_table([[1, 2, 0, 3], [1, 0]], [[1, 2, 0, 3], [0, 1]], TAGS)
    assert rows[:2] == [
        {"label": "LOC", "precision": 1.0, "recall": 1.0, "f1": 1.0, "count": 1, "guessed": 1},
        {"label": "PER", "precision": 0.5, "recall": 0.5, "f1": 0.5, "count": 2, "guessed": 2},
    ]


def report_rows(report: Any) -> list[dict[str, Any]]:
    """What scikit-learn or seqeval report, as rows of a table, without what was guessed."""
    names = {"f1-score": "f1", "support": "count"}
    report = {name: values for name, values in report.items() if name != "accuracy"}
    return [{"label": key} | {names.get(k, k): float(v) for k, v in row.items()} for key, row in report.items()]


def without_guessed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "guessed"} for row in rows]


def test_averages_are_those_of_scikit_learn_and_seqeval():
    rng, how = random.Random(0), {"output_dict": True, "zero_division": 0}
    truth = [[rng.randrange(len(TAGS)) for _ in range(6)] for _ in range(20)]
    guess = [[tag if rng.random() < 0.6 else rng.randrange(len(TAGS)) for tag in row] for row in truth]
    expected = report_rows(
        span_report(*([[TAGS[tag] for tag in row] for row in rows] for rows in (truth, guess)), **how)
    )
    assert without_guessed(span_table(guess, truth, TAGS)) == [pytest.approx(row) for row in expected]
    true, said = (torch.tensor([[int(tag == i) for i in range(3)] for row in rows for tag in row])
                  for rows in (truth, guess))  # fmt: skip
    expected = report_rows(reference.classification_report(true, said, target_names=list("abc"), **how))
    table = without_guessed(class_table(said, true, "abc"))
    assert table == [pytest.approx(row) for row in expected if row["label"] != "samples avg"]
    true, said = torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])
    expected = report_rows(reference.classification_report(true, said, **how))
    table = without_guessed(class_table(said, true, ("0", "1")))
    assert [row for row in table if row["label"] != "micro avg"] == [pytest.approx(row) for row in expected]


def test_a_class_that_nowhere_occurs_is_in_no_average():
    rows = {row["label"]: row for row in class_table(torch.tensor([0, 1]), torch.tensor([0, 1]), ("a", "b", "never"))}
    assert (rows["never"]["f1"], rows["macro avg"]["f1"], rows["weighted avg"]["f1"]) == (0.0, 1.0, 1.0)


# Figure 19 of the thesis: type -> precision, recall, F1 and guessed spans as printed, true spans of CoNLL-2003's
# test part, and how many must have been right.
FIGURE_19 = {
    "LOC": (90.93, 92.51, 91.71, 1697, 1668, 1543),
    "MISC": (72.44, 81.62, 76.76, 791, 702, 573),
    "ORG": (85.05, 90.43, 87.66, 1766, 1661, 1502),
    "PER": (94.02, 95.36, 94.69, 1640, 1617, 1542),
}


def test_the_thesis_counts_what_was_guessed():
    """Its figure 19 comes out of these counts to the printed digits, and so does its F1 of .894 over all types."""
    labels = ("O", *(f"B-{kind}" for kind in FIGURE_19))
    truth: list[int] = []
    guess: list[int] = []
    for tag, (_, _, _, guessed, true, right) in enumerate(FIGURE_19.values(), start=1):
        truth += [tag] * true + [0] * (guessed - right)
        guess += [tag] * right + [0] * (true - right) + [tag] * (guessed - right)
    rows = {row["label"]: row for row in span_table([guess], [truth], labels)}
    for kind, printed in FIGURE_19.items():
        row = rows[kind]
        assert (row["guessed"], row["count"]) == printed[3:5]
        assert [100 * row[key] for key in ("precision", "recall", "f1")] == pytest.approx(printed[:3], abs=0.011)
    assert rows["micro avg"]["f1"] == pytest.approx(0.894, abs=5e-4)
    assert (rows["micro avg"]["guessed"], rows["micro avg"]["count"]) == (5894, 5648)


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


def test_every_direction_has_a_metric():
    known = {name for kind in KINDS.names() for metrics in kind_of(kind).problem_types.values() for name in metrics}
    assert known >= LOWER


# Hidden tokens


def test_sums_of_parts_are_the_score_of_the_whole():
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 7, generator=rng), torch.randint(7, (50,), generator=rng)
    sums = TokenSums()
    for part in (slice(0, 1), slice(1, 30), slice(30, 30), slice(30, 50)):
        sums.add([], logits[part], labels[part])
    scores = sums.scores(("accuracy", "perplexity"))
    assert list(scores) == ["accuracy", "perplexity"]
    expected = torch.nn.functional.cross_entropy(logits, labels).exp().item()
    assert scores["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert scores["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


def test_equal_logits_are_as_perplexing_as_there_are_classes():
    sums = TokenSums()
    sums.add([], torch.zeros(5, 30, dtype=torch.bfloat16), torch.arange(5))
    assert sums.scores(("perplexity",)) == {"perplexity": pytest.approx(30, rel=1e-4)}


@pytest.mark.parametrize("logit", [math.nan, 1e6, math.inf])
def test_perplexity_is_a_finite_number_and_bad_is_bad(logit: float):
    sums = TokenSums()
    sums.add([7], torch.tensor([[0.0, logit]]), torch.tensor([[0]]))
    assert sums.first_not_finite() == (None if math.isfinite(logit) else 7)
    found = sums.scores(("perplexity",))["perplexity"]
    assert math.isfinite(found)
    assert found > 1e300


def test_no_hidden_token_is_no_score():
    with pytest.raises(DataError, match="metrics: no token has a label; a score needs at least one"):
        TokenSums().scores(("perplexity",))


# Written texts


def test_the_range_of_every_metric_is_known():
    used = {metric for name in KINDS.names() for metrics in kind_of(name).problem_types.values() for metric in metrics}
    assert used | {*RANKING, SUBTOKENS} <= set(BOUNDS)
