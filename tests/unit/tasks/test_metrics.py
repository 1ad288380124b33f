from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as reference

from lamina.errors import DataError, UnknownNameError
from lamina.tasks.kinds import METRICS
from lamina.tasks.metrics import _FUNCTIONS, TokenSums, compute, per_class
from lamina.tasks.task import Task
from lamina.tasks.text_metrics import TEXT_METRICS

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE, TOKEN = "sequence_classification", "token_classification"
TWO = (SEQUENCE, "classification", ("no", "yes"))
FOUR = (SEQUENCE, "classification", ("a", "b", "c", "d"))
NUMBER = (SEQUENCE, "regression", ("score",))
MANY = (SEQUENCE, "multi_label", ("a", "b", "c"))
TAGS = (TOKEN, "classification", ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"))
WORDS = (TOKEN, "classification", ("DT", "NN", "VB"))
RNG = np.random.default_rng(0)


def draw(classes: int, rows: int = 200) -> tuple[list[int], list[int]]:
    truth = RNG.integers(classes, size=rows)
    guess = np.where(RNG.random(rows) < 0.6, truth, RNG.integers(classes, size=rows))
    return guess.tolist(), truth.tolist()


def test_every_metric_of_a_task_exists():
    known = {name for (kind, _), names in METRICS.items() if kind != "masked_lm" for name in names}
    assert known == set(_FUNCTIONS) | set(TEXT_METRICS)


def test_two_classes_agree_with_the_reference():
    guess, truth = draw(2)
    scores = compute(TWO, ("mcc", "accuracy", "f1"), guess, truth)
    assert list(scores) == ["mcc", "accuracy", "f1"]
    assert scores["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))
    assert scores["f1"] == pytest.approx(reference.f1_score(truth, guess))
    assert scores["mcc"] == pytest.approx(reference.matthews_corrcoef(truth, guess))


def test_more_classes_agree_with_the_reference():
    guess, truth = draw(4)
    scores = compute(FOUR, ("mcc", "accuracy", "f1"), torch.tensor(guess), torch.tensor(truth))
    assert scores["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))
    assert scores["f1"] == pytest.approx(reference.f1_score(truth, guess, average="macro"))
    assert scores["mcc"] == pytest.approx(reference.matthews_corrcoef(truth, guess))


def test_regression_agrees_with_the_reference():
    truth = RNG.integers(0, 6, size=100).astype(float)
    guess = truth + RNG.normal(size=100)
    scores = compute(NUMBER, ("pearson", "spearman"), guess.tolist(), truth.tolist())
    assert scores["pearson"] == pytest.approx(stats.pearsonr(truth, guess)[0])
    assert scores["spearman"] == pytest.approx(stats.spearmanr(truth, guess)[0], abs=1e-5)


def test_multi_label_agrees_with_the_reference():
    guess, truth = (RNG.integers(0, 2, size=(50, 3)).tolist() for _ in range(2))
    scores = compute(MANY, ("f1", "accuracy"), guess, truth)
    assert scores["f1"] == pytest.approx(reference.f1_score(truth, guess, average="micro"))
    assert scores["accuracy"] == pytest.approx(reference.accuracy_score(truth, guess))


def test_spans_count_whole():
    truth = [[1, 2, 0, 3], [0, 1]]
    guess = [[1, 2, 0, 3], [1, 0]]  # two of three found, one of three guesses wrong
    scores = compute(TAGS, ("span_f1", "accuracy"), guess, truth)
    assert scores["span_f1"] == pytest.approx(2 / 3)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert compute(TAGS, ("span_f1",), [[1, 0, 0, 3], [0, 1]], truth)["span_f1"] == pytest.approx(2 / 3)


def test_spans_end_with_their_text():
    assert compute(TAGS, ("span_f1",), [[1], [2]], [[1], [1]])["span_f1"] == 1.0


def test_words_without_spans():
    scores = compute(WORDS, ("accuracy", "f1"), [[0, 1], [2, 2]], [[0, 1], [2, 1]])
    assert scores["accuracy"] == 0.75
    assert scores["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    with pytest.raises(DataError, match="the labels DT, NN, VB mark no spans"):
        compute(WORDS, ("span_f1",), [[0]], [[0]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("task", "guess", "truth"),
    [
        (TWO, [0, 0, 0, 0], [0, 1, 0, 1]),
        (TWO, [0, 0], [0, 0]),
        (TWO, [1, 1], [1, 1]),
        (FOUR, [2, 2, 2], [0, 1, 3]),
        (NUMBER, [2.5, 2.5, 2.5], [1.0, 2.0, 3.0]),
        (NUMBER, [1.0, 2.0, 3.0], [4.0, 4.0, 4.0]),
        (NUMBER, [1.0, math.nan, 3.0], [4.0, 5.0, 4.0]),
        (NUMBER, [1.0], [1.0]),
        (MANY, [[0, 0, 0]], [[0, 0, 0]]),
        (TAGS, [[0, 0], []], [[0, 1], []]),
        (TAGS, [[0, 0]], [[0, 0]]),
    ],
)
def test_what_has_no_meaning_is_zero(task: tuple[str, str, tuple[str, ...]], guess: list[Any], truth: list[Any]):
    scores = compute(task, METRICS[task[:2]], guess, truth)
    assert all(math.isfinite(score) for score in scores.values())
    for name in ("mcc", "pearson", "spearman", "span_f1"):
        assert scores.get(name, 0.0) == 0.0


def test_one_class_only():
    assert compute((SEQUENCE, "classification", ("a",)), ("accuracy",), [0, 0], [0, 0]) == {"accuracy": 1.0}


def test_a_task_says_what_it_is(tmp_path: Path):
    path = tmp_path / "t.tsv"
    path.write_text("sentence\tlabel\na\tx\nb\ty\n")
    task = Task.from_files(SEQUENCE, train=path, validation=path)
    assert compute(task, task.metrics, [0, 1], task.split("validation").labels) == {
        "accuracy": 1.0,
        "f1": 1.0,
        "mcc": 1.0,
    }


def test_unknown_names():
    with pytest.raises(UnknownNameError, match=r"metrics: unknown metric 'acuracy'; .* Did you mean 'accuracy'\?"):
        compute(TWO, ("acuracy",), [0], [0])
    with pytest.raises(UnknownNameError, match="unknown metric 'pearson'; known: accuracy, f1, mcc"):
        compute(TWO, ("pearson",), [0], [0])
    with pytest.raises(UnknownNameError, match="unknown kind of task 'token_classification, regression'"):
        per_class((TOKEN, "regression", ("a",)), [0], [0])


@pytest.mark.parametrize("score", [lambda *rows: compute(rows[0], (), *rows[1:]), per_class])
def test_rows_must_fit(score: Any):
    with pytest.raises(DataError, match="2 predictions for 1 targets"):
        score(TWO, [0, 1], [0])
    with pytest.raises(DataError, match="text 1 has 1 predictions for 2 words") as info:
        score(TAGS, [[0], [0]], [[0], [0, 1]])
    assert info.value.row == 1
    for task, rows in ((TWO, []), (TAGS, []), (TAGS, [[], []])):
        with pytest.raises(DataError, match="there are no rows"):
            score(task, rows, rows)


def test_table_of_classes():
    assert per_class(TWO, [0, 1, 1, 1], [0, 0, 1, 1]) == [
        {"label": "no", "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3), "count": 2},
        {"label": "yes", "precision": pytest.approx(2 / 3), "recall": 1.0, "f1": pytest.approx(0.8), "count": 2},
    ]
    assert [row["f1"] for row in per_class(FOUR, [0], [1])] == [0.0] * 4
    assert per_class(NUMBER, [1.0], [1.0]) == []


def test_table_of_many_labels():
    rows = per_class(MANY, [[1, 0, 0], [1, 1, 0]], [[1, 0, 0], [0, 1, 1]])
    assert [(row["label"], row["precision"], row["recall"], row["count"]) for row in rows] == [
        ("a", 0.5, 1.0, 1),
        ("b", 1.0, 1.0, 1),
        ("c", 0.0, 0.0, 1),
    ]


def test_table_of_spans():
    rows = per_class(TAGS, [[1, 2, 0, 3], [1, 0]], [[1, 2, 0, 3], [0, 1]])
    assert rows == [
        {"label": "LOC", "precision": 1.0, "recall": 1.0, "f1": 1.0, "count": 1},
        {"label": "PER", "precision": 0.5, "recall": 0.5, "f1": 0.5, "count": 2},
    ]


def test_table_of_words():
    rows = per_class(WORDS, [[0, 1], [2, 2]], [[0, 1], [2, 1]])
    assert [(row["label"], row["count"]) for row in rows] == [("DT", 1), ("NN", 2), ("VB", 1)]
    assert [row["recall"] for row in rows] == [1.0, 0.5, 1.0]


# Hidden tokens


def test_sums_of_parts_are_the_score_of_the_whole():
    rng = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 7, generator=rng), torch.randint(7, (50,), generator=rng)
    sums = TokenSums()
    for part in (slice(0, 1), slice(1, 30), slice(30, 30), slice(30, 50)):
        sums.add(logits[part], labels[part])
    scores = sums.scores(("accuracy", "perplexity"))
    assert list(scores) == ["accuracy", "perplexity"]
    expected = torch.nn.functional.cross_entropy(logits, labels).exp().item()
    assert scores["perplexity"] == pytest.approx(expected, rel=1e-5)
    assert scores["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


def test_equal_logits_are_as_perplexing_as_there_are_classes():
    sums = TokenSums()
    sums.add(torch.zeros(5, 30, dtype=torch.bfloat16), torch.arange(5))
    assert sums.scores(("perplexity",)) == {"perplexity": pytest.approx(30, rel=1e-4)}


@pytest.mark.parametrize("logit", [math.nan, 1e6, math.inf])
def test_perplexity_is_a_finite_number_and_bad_is_bad(logit: float):
    sums = TokenSums()
    sums.add(torch.tensor([[0.0, logit]]), torch.tensor([0]))
    found = sums.scores(("perplexity",))["perplexity"]
    assert math.isfinite(found)
    assert found > 1e300


def test_no_hidden_token_is_no_score():
    with pytest.raises(DataError, match="metrics: no token is hidden; a score needs at least one"):
        TokenSums().scores(("perplexity",))


def test_hidden_tokens_are_not_scored_row_by_row():
    with pytest.raises(UnknownNameError, match="unknown kind of task 'masked_lm, classification'"):
        compute(("masked_lm", "classification", ("token",)), ("accuracy",), [1], [1])


# Written texts


@pytest.mark.parametrize("kind", ["summarization", "translation"])
def test_written_texts_are_scored_as_texts(kind: str):
    task = (kind, "generation", ("text",))
    scores = compute(task, METRICS[task[:2]], ["the cat sat there", "a dog"], ["the cat sat there", "a dog"])
    assert list(scores) == list(METRICS[task[:2]])
    assert all(score == pytest.approx(100 if name in ("bleu", "chrf") else 1) for name, score in scores.items())
    assert per_class(task, ["a"], ["b"]) == []
    with pytest.raises(UnknownNameError, match="metrics: unknown metric 'accuracy'; known: "):
        compute(task, ("accuracy",), ["a"], ["b"])
    with pytest.raises(DataError, match="1 predictions for 2 targets"):
        compute(task, METRICS[task[:2]], ["a"], ["b", "c"])
    with pytest.raises(DataError, match="there are no rows"):
        compute(task, METRICS[task[:2]], [], [])
