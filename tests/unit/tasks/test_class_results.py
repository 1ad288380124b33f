"""Whether scores mean anything: intervals, and the comparison with always giving one answer."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from lamina.errors import DataError
from lamina.tasks import kind_of
from lamina.tasks.base import TaskOutline
from lamina.tasks.class_results import ClassResults, compare, compare_tags
from lamina.tasks.split import Split

KIND = kind_of("sequence_classification")


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


@pytest.mark.parametrize("first", ["f1", "accuracy"])
def test_labels_are_compared_with_the_best_set_of_them(first: str):
    rng = random.Random(0)
    truths = [tuple(int(rng.random() < share) for share in (0.1, 0.4, 0.45, 0.3)) for _ in range(80)]
    task = TaskOutline(KIND, "multi_label", tuple("abcd"))
    results = ClassResults(task, Split.of(["x"] * 80, truths), np.arange(80))
    results.logits[:] = torch.tensor([-1.0, 1.0, 1.0, 1.0])  # learnt nothing
    rule = {"f1": lambda *both: f1_score(*both, average="micro", zero_division=0), "accuracy": accuracy_score}[first]
    best = max(product([0, 1], repeat=4), key=lambda answer: rule(truths, [answer] * 80))
    found = results.compare([first, "f1", "accuracy"])
    assert found["always"] == (
        ", ".join(name for name, is_set in zip("abcd", best, strict=True) if is_set) or "no label"
    )
    assert found["baseline"][first] == pytest.approx(rule(truths, [best] * 80))
    assert found["verdict"] == f"not better than always answering '{found['always']}'"
    none = ClassResults(task, Split.of(["x"] * 2, [(0, 0, 0, 0)] * 2), np.arange(2))
    assert none.baseline([first]) == ("no label", {first: 0.0 if first == "f1" else 1.0})


def test_f1_of_a_rare_class_is_compared_with_always_answering_it():
    task = TaskOutline(KIND, "classification", ("no", "yes"))
    results = ClassResults(task, Split.of(["x"] * 40, [0] * 30 + [1] * 10), np.arange(40))
    results.logits[:, 1] = 1.0  # always yes
    by_f1, by_accuracy = results.compare(["f1", "accuracy"]), results.compare(["accuracy", "f1"])
    assert (by_f1["always"], by_f1["baseline"]) == ("yes", {"f1": pytest.approx(0.4), "accuracy": 0.75})
    assert by_f1["verdict"] == "not better than always answering 'yes'"
    assert (by_accuracy["always"], by_accuracy["baseline"]) == ("no", {"accuracy": 0.75, "f1": pytest.approx(0.4)})


def test_draws_with_one_class_do_not_count_in_the_interval_of_a_ranking():
    task = TaskOutline(KIND, "classification", ("no", "yes"))
    results = ClassResults(task, Split.of(["x"] * 20, [0] * 18 + [1] * 2), np.arange(20))
    results.logits[:, 1] = torch.arange(20.0)  # every yes is above every no
    found = results.compare(["auroc", "recall_at_5"])
    assert (found["interval"]["auroc"], found["baseline"]["auroc"], found["verdict"]) == ((1.0, 1.0), 0.5, None)
    alone = ClassResults(task, Split.of(["x"] * 9, [0] * 9), np.arange(9))
    assert alone.compare(["auroc"])["verdict"] == "not better than always answering 'no'"


@pytest.mark.parametrize(("labels", "metric"), [(("nein", "ja"), "macro_f1"), (("a", "b", "never"), "f1")])
def test_macro_f1_of_draws_is_over_the_classes_of_all_rows(labels: tuple[str, ...], metric: str):
    task = TaskOutline(KIND, "classification", labels)
    results = ClassResults(task, Split.of(["x"] * 60, [0] * 58 + [1] * 2), np.arange(60))
    results.logits[:, 0] = 1.0
    found = results.compare([metric])
    assert found["interval"][metric] == pytest.approx((0.478, 0.5), abs=1e-3)
    assert found["verdict"] == f"not better than always answering '{labels[0]}'"


def test_macro_f1_of_a_perfect_reader_is_1_in_every_draw():
    labels = tuple(map(str, range(20)))
    truths = torch.arange(60) % 20
    results = ClassResults(
        TaskOutline(KIND, "classification", labels), Split.of(["x"] * 60, truths.tolist()), np.arange(60)
    )
    results.logits[:] = torch.nn.functional.one_hot(truths)
    assert results.compare(["macro_f1"])["interval"] == {"macro_f1": (1.0, 1.0)}


def test_a_single_class_is_compared_too():
    alone = ClassResults(TaskOutline(KIND, "classification", ("a",)), Split.of(["x"] * 3, [0] * 3), np.arange(3))
    found = alone.compare(["f1", "accuracy"])
    assert found["interval"] == {"f1": (1.0, 1.0), "accuracy": (1.0, 1.0)}
    assert found["verdict"] == "not better than always answering 'a'"


def test_examples_without_labels_are_not_compared():
    task = TaskOutline(KIND, "multi_label", tuple("ab"))
    results = ClassResults(task, Split.of(["x"], [(-1, -1)]), np.arange(1))
    with pytest.raises(DataError, match="metrics: there are no rows"):
        results.compare(["accuracy"])
    with pytest.raises(DataError, match="metrics: there are no rows"):
        results.baseline(["accuracy"])
