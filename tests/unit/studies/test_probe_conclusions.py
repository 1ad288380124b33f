"""What a comparison of probes concludes when little is known: few rows that differ, ties, baselines without a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from lamina.data.windows import IGNORED
from lamina.studies.probing.probe import compare_probes, conclusions
from lamina.tasks.task import Task

TRUTHS = [0, 1] * 20


def scored(guesses: dict[int, list[Any]], baseline: list[Any], *, name: str = "tfidf") -> list[Any]:
    """Return table rows of a baseline and of one linear probe per layer, the same for three seeds."""
    facts = {"task": "t", "layer": None, "probe": name, "measure": "score", "score": 0.9}
    rows = [{**facts, "seed": None, "guesses": baseline}]
    for layer, own in guesses.items():
        probe = {"layer": layer, "probe": "linear", "score": 0.9 + layer / 100, "guesses": own}
        rows += [{**facts, **probe, "seed": seed} for seed in (0, 1, 2)]
    return rows


def moods(metric: str = "accuracy") -> Task:
    rows = [{"sentence": "a", "label": ("bad", "good")[label]} for label in TRUTHS]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    return replace(task, metric=metric)


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1", "mcc"])
def test_a_probe_that_is_right_on_four_more_rows_is_not_called_better(metric: str):
    """The counts of macro F1 hold the scores of all rows, so they differ in rows with equal predictions too."""
    wrong = [1, 0] * 2 + TRUTHS[4:]
    comparison = compare_probes(scored({0: wrong, 1: TRUTHS}, wrong), moods(metric), "validation")
    assert pd.DataFrame(comparison.rows())[["low", "high", "p"]].isna().all(axis=None)
    _, beaten, ahead, over_embeddings = conclusions("t", comparison)
    assert beaten.startswith("t: no probe is shown to beat the best baseline")
    apart = "cannot be told apart: only 4 rows differ, which decides nothing; the difference is"
    assert ahead.startswith(f"t: layer 1 (linear) and tfidf {apart}")
    assert over_embeddings.startswith(f"t: layer 1 (linear) and layer 0 (linear) {apart}")


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_only_numbers_that_differ_count_in_a_correlation(metric: str):
    rows = [{"sentence": "a", "label": float(row)} for row in range(30)]
    task = replace(Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}), metric=metric)
    exact, other = list(map(float, range(30))), [29.0, *map(float, range(1, 30))]
    comparison = compare_probes(scored({1: exact}, other), task, "validation")
    (difference,) = comparison.ahead.values()
    assert (difference.differing, difference.conclusive) == (1, False)


@pytest.mark.parametrize(
    ("labels", "name"), [(["bad", "good"], "the most frequent class"), ([0.5, 1.5], "the mean of the training labels")]
)
def test_a_baseline_that_reads_no_text_is_named_so(labels: list[Any], name: str):
    rows = [{"sentence": "a", "label": labels[label]} for label in TRUTHS]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    probes = scored({1: TRUTHS}, [0] * 40, name="majority")
    others = [{**probes[0], "probe": "tfidf", "score": 0.4, "guesses": [1] * 40}]
    _, beaten, ahead = conclusions("t", compare_probes(probes + others, task, "validation"))
    assert beaten.startswith(f"t: linear probes of layer 1 beat {name} ({task.metric} 0.900), by ")
    assert ahead.startswith(f"t: layer 1 (linear) is ahead of {name} by ")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            {0: 0.5, 1: 0.9, 2: 0.9},
            "linear probes of layers 1-2 share the best score of 3 probes: accuracy 0.900 over 3 seeds",
        ),
        (
            {0: 0.9, 1: 0.5, 2: 0.9},
            "linear probes of layers 0, 2 share the best score of 3 probes: accuracy 0.900 over 3 seeds",
        ),
        ({0: 0.5, 1: 0.7, 2: 0.9}, "layer 2 (linear) has the best score of 3 probes: accuracy 0.900 ± 0.000, 95 %"),
    ],
)
def test_all_probes_with_the_best_score_are_named(scores: dict[int, float], words: str):
    rows = scored(dict.fromkeys(scores, TRUTHS), [0] * 40)
    rows = [{**row, "score": scores.get(row["layer"], 0.4)} for row in rows]
    sentence, *_ = conclusions("t", compare_probes(rows, moods(), "validation"))
    assert sentence.startswith(f"t: {words}")


@pytest.mark.parametrize(("place", "differing"), [(0, 0), (1, 8)])
def test_words_without_a_label_do_not_make_a_row_differ(place: int, differing: int):
    rows = [{"w": ["a", "b"], "t": ["B-X", "O"]}] * 8
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="w", label="t")
    split = task.split("validation").with_labels([(IGNORED, 0)] * 8)
    task = replace(task, splits={"validation": split}, metric="accuracy")
    wrong = [tuple(1 if at == place else 0 for at in range(2))] * 8
    comparison = compare_probes(scored({1: [(0, 0)] * 8}, wrong), task, "validation")
    assert next(iter(comparison.ahead.values())).differing == differing
