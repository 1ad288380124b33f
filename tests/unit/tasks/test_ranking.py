"""How well scores tell two classes apart, and rows set aside alike for several tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from lamina.errors import ConfigError, UnknownNameError
from lamina.monitors.calibration import Calibration
from lamina.tasks import kind_of
from lamina.tasks.class_results import ClassResults, positive_id
from lamina.tasks.metrics import named_class, score_ranking
from lamina.tasks.task import Task

ALL = ("auroc", "recall_at_1", "recall_at_5")
KIND = "sequence_classification"


def drawn(rows: int = 500, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    targets = (torch.rand(rows, generator=rng) < 0.3).long()
    return torch.randn(rows, generator=rng) + 1.5 * targets, targets


def test_they_are_those_of_scikit_learn_and_of_a_calibrated_threshold():
    scores, targets = drawn()
    scores[:40] = scores[40:80]  # ties
    found = score_ranking(ALL, scores, targets)
    assert found["auroc"] == pytest.approx(roc_auc_score(targets, scores), abs=1e-9)
    for name, rate in (("recall_at_1", 0.01), ("recall_at_5", 0.05)):
        calibration = Calibration.of(scores.tolist(), targets.bool().tolist(), false_positive_rate=rate)
        assert found[name] == pytest.approx(calibration.recall)
    assert 0 < found["recall_at_1"] < found["recall_at_5"] < 1


def test_scores_that_differ_by_little_far_from_zero_are_no_ties():
    scores, targets = torch.tensor([19.0, 20.0, 21.0, 22.0]), torch.tensor([0, 0, 1, 1])
    assert score_ranking(ALL, scores, targets) == dict.fromkeys(ALL, 1.0)


@pytest.mark.parametrize("only", [0, 1])
def test_one_class_alone_gives_nothing(only: int):
    assert score_ranking(ALL, torch.tensor([0.1, 0.2]), torch.tensor([only, only])) == dict.fromkeys(ALL, 0.0)


def task(rows: int = 200, **how: Any) -> Task:
    _, targets = drawn(rows)
    given = [{"sentence": str(at), "label": ("no", "yes")[int(one)]} for at, one in enumerate(targets)]
    return Task.from_dataset(KIND, {"train": given}, **how)


def test_they_are_reported_where_one_is_asked_for():
    assert task(metric="auroc").metrics == ("auroc", "accuracy", "f1", "mcc", "macro_f1", "recall_at_1", "recall_at_5")
    assert task(metric="f1").metrics == ("f1", "accuracy", "mcc", "macro_f1")
    three = [{"sentence": "a", "label": str(at % 3)} for at in range(30)]
    with pytest.raises(UnknownNameError, match="unknown metric 'auroc'"):
        Task.from_dataset(KIND, {"train": three}, metric="auroc")
    with pytest.raises(UnknownNameError, match="unknown metric 'auroc'"):
        task(metric="auroc", problem_type="multi_label")


def test_scores_of_a_part_are_by_the_second_class():
    asked = task(metric="auroc")
    split = asked.split("validation")
    targets = torch.tensor(list(split.labels))
    results = ClassResults(asked, split, torch.arange(len(split)).numpy())
    results.add(range(len(split)), torch.stack([-targets.float(), targets.float()], dim=1))
    assert results.scores(asked.metrics) == dict.fromkeys(asked.metrics, 1.0)
    assert list(results.scores(asked.metrics)) == list(asked.metrics)
    assert kind_of(KIND).further_metrics("regression", ("score",)) == ()


def test_without_classes_in_view_every_task_sets_the_same_rows_aside():
    pairs = [{"text": str(at), "label": ("no", "yes")[at % 3 == 0], "spans": []} for at in range(100)]
    one = Task.from_dataset(KIND, {"train": pairs}, text="text", stratify=False)
    two = Task.from_dataset("token_classification", {"train": pairs}, text="text", label="spans", stratify=False)
    other = Task.from_dataset(KIND, {"train": pairs}, text="text")
    for part in ("train", "validation"):
        assert one.split(part).key == two.split(part).key != other.split(part).key
        assert one.held_out(stratify=False).split(part).key == two.held_out(stratify=False).split(part).key
    with pytest.raises(ConfigError, match="by_row is set for a task of kind"):
        Task.from_dataset(KIND, {"train": pairs}, text="text", by_row=True)


BAD = {"train": [{"text": str(at), "label": ("ok", "bad")[at % 3 == 0]} for at in range(90)]}


@pytest.mark.parametrize(
    ("labels", "positive"),
    [
        (("0", "1"), "1"),
        (("no", "yes"), "yes"),
        (("False", "True"), "True"),
        (("YES", "No"), "YES"),
        (("bad", "ok"), None),
    ],
)
def test_the_usual_positive_class(labels: tuple[str, str], positive: str | None):
    rows = [{"text": str(at), "label": labels[at % 2]} for at in range(20)]
    made = Task.from_dataset(KIND, {"train": rows}, text="text", labels=labels)
    assert "f1" in made.metrics if positive else "f1" not in made.metrics
    assert positive_id(made, ()) == (labels.index(positive) if positive else None)


def test_other_names_of_the_classes_have_their_own_positive_class():
    rows = [{"text": str(at), "label": ("no", "yes")[at % 2]} for at in range(20)]
    made = Task.from_dataset(KIND, {"train": rows}, text="text")
    for labels, positive in ((("bad", "ok"), None), (("true", "false"), 0), (("a", "b", "c"), None)):
        assert positive_id(replace(made, labels=labels), ()) == positive
    with pytest.raises(UnknownNameError, match="unknown label 'yes'; known: bad, ok"):
        replace(replace(made, positive="yes"), labels=("bad", "ok"))


@pytest.mark.parametrize(
    ("labels", "given", "named"),
    [
        (("0", "1"), 0, "0"),
        (("0", "1"), np.int64(1), "1"),
        (("0", "1"), True, "1"),
        (("1", "2"), 1.0, "1"),
        (("False", "True"), False, "False"),
        (("FALSE", "TRUE"), True, "TRUE"),
        (("false", "true"), 1, "true"),
        (("no", "yes"), True, "yes"),
        (("No", "Yes"), "no", "No"),
        (("bad", "ok"), " bad\u200b", "bad"),
    ],
)
def test_a_positive_class_is_named_in_any_clear_form(labels: tuple[str, str], given: Any, named: str):
    rows = [{"text": str(at), "label": labels[at % 2]} for at in range(20)]
    made = Task.from_dataset(KIND, {"train": rows}, text="text", labels=labels)
    assert named_class("evaluate", given, labels) == named
    if isinstance(given, str | int):
        assert made.with_positive(given).positive == named
        assert Task.from_dataset(KIND, {"train": rows}, text="text", labels=labels, positive=given).positive == named


@pytest.mark.parametrize("given", [1, True, "Bad", "", 0.5, ["bad"], b"bad"])
def test_a_positive_class_that_is_not_clear_is_an_error(given: Any):
    """The number of a label is no name, because the alphabet orders the labels."""
    with pytest.raises((UnknownNameError, ConfigError), match=r"known: bad, ok|the classes are bad, ok"):
        named_class("evaluate", given, ("bad", "ok"))


def test_no_class_is_positive_because_of_its_letters():
    """Every F1 and recall is of the class that the user calls positive, and of none without one."""
    plain = Task.from_dataset(KIND, BAD, text="text")
    assert (plain.labels, plain.positive, plain.metrics) == (("bad", "ok"), None, ("accuracy", "mcc", "macro_f1"))
    for metric in ("f1", "recall_at_1"):
        with pytest.raises(
            ConfigError, match=rf"'{metric}' is about the positive class, and the classes are bad and ok"
        ):
            Task.from_dataset(KIND, BAD, text="text", metric=metric)
    made = Task.from_dataset(KIND, BAD, text="text", metric="recall_at_5", positive="bad")
    assert plain.with_positive("bad").metrics == (*plain.metrics, "f1")
    split = made.split("train")
    targets = torch.tensor(list(split.labels))
    flagged = torch.zeros(len(split), 2)
    flagged[:, 0] = (targets == 0).float() * (torch.arange(len(split)) % 2 == 0)  # half of the bad rows, and none else
    flagged[:, 1] = 0.5
    results = ClassResults(made, split, torch.arange(len(split)).numpy())
    results.add(range(len(split)), flagged)
    found = float((flagged[:, 0] == 1).sum() / (targets == 0).sum())
    scores = results.scores(made.metrics)
    assert scores["f1"] == pytest.approx(2 * found / (1 + found))
    assert scores["recall_at_5"] == pytest.approx(found)
    with pytest.raises(ConfigError, match="only one of two classes can be positive"):
        Task.from_dataset(KIND, {"train": [*BAD["train"], {"text": "x", "label": "z"}]}, text="text", positive="bad")
    with pytest.raises(UnknownNameError, match="unknown label 'good'; known: bad, ok"):
        Task.from_dataset(KIND, BAD, text="text", positive="good")
