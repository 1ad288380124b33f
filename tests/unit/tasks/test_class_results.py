"""Whether scores mean anything: intervals, and the comparison with always giving one answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.tasks.class_results import compare, compare_tags


def share(values: torch.Tensor) -> Any:
    """The score is the share of ones; always answering has a fixed share of ones of its own."""
    return lambda rows, constant: {"accuracy": float(values[int(constant)][rows].double().mean())}


@pytest.mark.parametrize(("right", "verdict"), [(90, True), (60, False), (40, False)])
def test_the_interval_and_the_verdict(right: int, verdict: bool):
    own = (torch.arange(100) < right).long()
    other = (torch.arange(100) >= 45).long()
    found = compare(["accuracy"], 100, "x", share(torch.stack([own, other])))
    low, high = found["interval"]["accuracy"]
    spread = (right * (100 - right) / 100**3) ** 0.5
    assert low == pytest.approx(right / 100 - 1.96 * spread, abs=0.02)
    assert high == pytest.approx(right / 100 + 1.96 * spread, abs=0.02)
    assert (found["verdict"] is None) == verdict
    assert found["baseline"] == {"accuracy": 0.55}


def test_tags_are_compared_by_texts():
    labels, truths = ("O", "B-x", "I-x"), [[0, 1, 2, 0]] * 30
    right = compare_tags(["span_f1", "accuracy", "f1"], truths, truths, labels)
    assert (right["always"], right["baseline"]) == ("O", {"span_f1": 0.0, "accuracy": 0.5})
    assert right["interval"] == {"span_f1": (1.0, 1.0), "accuracy": (1.0, 1.0)}
    assert right["verdict"] is None
    wrong = compare_tags(["span_f1", "accuracy"], [[0, 0, 0, 0]] * 30, truths, labels)
    assert wrong["verdict"] == "not better than always answering 'O'"
    other = compare_tags(["macro_f1", "accuracy"], [[0, 0, 0, 0]] * 30, truths, labels)
    assert other["verdict"] == "not better by accuracy than always answering 'O'"
    once = iter([{}])  # a bootstrap would need more scores
    assert compare(["f1"], 9, "O", lambda *_: next(once))["interval"] == {}
    none = compare_tags(["macro_f1"], truths, truths, labels)
    assert (none["verdict"], none["interval"]) == ("not compared with always answering 'O'", {})
