"""Which answers are wrong, how sure they were, and in what order they are shown."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lamina.tasks import kind_of
from lamina.tasks.base import TaskOutline
from lamina.tasks.class_results import ClassResults, error_rows
from lamina.tasks.split import Split
from lamina.tasks.token_classification import wrong_spans

TEXTS = ("one", "two", "three", "four")


def errors(problem: str, labels: tuple[str, ...], truth: Any, logits: Any, count: int = 9, texts: Any = TEXTS) -> Any:
    split = Split.of(texts, truth)
    results = ClassResults(
        TaskOutline(kind_of("sequence_classification"), problem, labels), split, np.arange(len(split))
    )
    results.add(range(len(split)), torch.tensor(logits, dtype=torch.float32))
    return results.errors(count)


def sure(probability: float) -> list[float]:
    """Logits of two classes, the first of them with this probability."""
    return [math.log(probability), math.log(1 - probability)]


def test_the_most_confident_come_first():
    logits = [sure(0.7), sure(0.9), sure(0.2), sure(0.99)]
    rows = errors("classification", ("no", "yes"), [1, 1, 0, 0], logits)
    assert rows == [
        {"row": 1, "text": "two", "true": "yes", "predicted": "no", "confidence": pytest.approx(0.9)},
        {"row": 2, "text": "three", "true": "no", "predicted": "yes", "confidence": pytest.approx(0.8)},
        {"row": 0, "text": "one", "true": "yes", "predicted": "no", "confidence": pytest.approx(0.7)},
    ]
    assert errors("classification", ("no", "yes"), [1, 1, 0, 0], logits, 2) == rows[:2]
    assert errors("classification", ("no", "yes"), [0, 0, 1, 0], logits) == []


def test_answers_that_are_equally_sure_are_in_the_order_of_the_rows():
    rows = errors("classification", ("no", "yes"), [1, 1, 0, 1], [sure(0.75)] * 4, 2)
    assert [row["row"] for row in rows] == [0, 1]


def test_a_pair_has_both_texts():
    rows = errors("classification", ("no", "yes"), [1], [sure(0.7)], texts=[("a", "b")])
    assert rows[0]["text"] == ["a", "b"]


def test_of_several_labels_the_surest_wrong_decision_counts():
    rows = errors(
        "multi_label",
        ("a", "b", "c"),
        [(1, 0, 1), (1, 1, 0), (0, 0, 0), (0, 1, 0)],
        [[5.0, 1.0, -2.0], [9.0, 9.0, -9.0], [-1.0, 3.0, -9.0], [-7.0, -4.0, -7.0]],
    )
    sigmoid = lambda x: pytest.approx(1 / (1 + math.exp(-x)))  # noqa: E731
    assert [(row["row"], row["true"], row["predicted"], row["confidence"]) for row in rows] == [
        (3, ["b"], [], sigmoid(4)),
        (2, [], ["b"], sigmoid(3)),
        (0, ["a", "c"], ["a", "b"], sigmoid(2)),
    ]


def test_the_largest_errors_of_numbers_come_first():
    rows = errors("regression", ("score",), [1.0, 2.0, 3.0, 4.0], [[1.5], [-2.0], [3.0], [6.0]], 3)
    assert rows == [
        {"row": 1, "text": "two", "true": 2.0, "predicted": -2.0, "error": -4.0},
        {"row": 3, "text": "four", "true": 4.0, "predicted": 6.0, "error": 2.0},
        {"row": 0, "text": "one", "true": 1.0, "predicted": 1.5, "error": 0.5},
    ]


def test_no_more_than_the_worst_are_held():
    """The wrong answers are taken one by one, and all but the worst are let go."""
    alive: set[int] = set()
    most = 0

    class Row(dict[str, Any]):
        def __del__(self) -> None:
            alive.discard(self["row"])

    def wrong() -> Any:
        nonlocal most
        for row in range(500):
            alive.add(row)
            most = max(most, len(alive))
            yield Row(row=row, confidence=(row * 7919 % 500) / 500)

    rows = error_rows(wrong(), Split.of(map(str, range(500))).texts, 3)
    assert [row["confidence"] for row in rows] == [0.998, 0.996, 0.994]
    assert [row["text"] for row in rows] == [str(row["row"]) for row in rows]
    assert most < 12


# Spans


def span(start: int, end: int, label: str, score: float = 0.5) -> dict[str, Any]:
    return {"start": start, "end": end, "label": label, "score": score}


def kinds(found: Any) -> list[list[tuple[int, str, str]]]:
    return [[(s["start"], s["label"], s["error"]) for s in found[side]] for side in ("true", "predicted")]


def test_spans_are_missed_extra_or_wrong():
    true = [span(0, 4, "PER"), span(6, 9, "LOC", 0.3), span(12, 20, "ORG"), span(30, 33, "PER", 0.9)]
    predicted = [span(0, 4, "PER"), span(6, 9, "ORG", 0.8), span(12, 15, "ORG", 0.6), span(40, 44, "LOC", 0.7)]
    found = wrong_spans(5, true, predicted)
    assert found is not None
    assert kinds(found) == [
        [(6, "LOC", "wrong"), (12, "ORG", "wrong"), (30, "PER", "missed")],
        [(6, "ORG", "wrong"), (12, "ORG", "wrong"), (40, "LOC", "extra")],
    ]
    assert (found["row"], found["confidence"]) == (5, 0.9)  # of the missed one
    found = wrong_spans(5, true[:3], predicted)
    assert found is not None
    assert found["confidence"] == 0.8  # a true span's score counts only where it was missed


def test_spans_that_touch_do_not_overlap():
    found = wrong_spans(0, [span(0, 4, "PER")], [span(4, 6, "PER")])
    assert kinds(found) == [[(0, "PER", "missed")], [(4, "PER", "extra")]]


def test_a_text_whose_spans_are_right_is_no_error():
    assert wrong_spans(0, [span(0, 4, "PER", 0.1)], [span(0, 4, "PER", 0.9)]) is None
    assert wrong_spans(0, [], []) is None
