"""The study `variability`: nu equals its definition with a pseudo-inverse, on the model's own states."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer
from tests.support.tiny import model_of

from lamina import Task
from lamina.errors import ConfigError, DataError, LayerIndexError, UnknownNameError
from lamina.studies import Study, variability
from lamina.studies.states.variability import ClassScatter
from lamina.studies.states.variability import _comparison_sentence as comparison_sentence
from lamina.studies.statistics import RankCorrelation

RNG = np.random.default_rng(0)
WORDS = ["the", "a", "film", "is", "good", "bad", "very", "paris", "anna", "to", "and", "slow", "fun", "zebra"]
ROWS = [
    {"sentence": " ".join(RNG.choice(WORDS, 2 + n % 5)) + (" good" if n % 3 == 0 else ""), "label": n % 3}
    for n in range(50)
]


def direct(vectors: np.ndarray, classes: np.ndarray) -> float:
    groups = [vectors[classes == number] for number in sorted(set(classes.tolist()))]
    means = np.stack([group.mean(0) for group in groups])
    within = np.mean([np.cov(group.T, bias=True) for group in groups], axis=0)
    between = np.cov(means.T, bias=True)
    return float(np.trace(within @ np.linalg.pinv(between, rcond=1e-9, hermitian=True)) / len(groups))


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden_size=16)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def task(rows=ROWS, name: str = "mood", **options) -> Task:
    return Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, **options)


@torch.no_grad()
def test_nu_equals_its_definition(model, tokenizer):
    study = variability(model, {"mood": task()}, processor=tokenizer, batch_size=7)
    means = []
    for row in ROWS:
        out = model(**tokenizer(row["sentence"], return_tensors="pt"), output_hidden_states=True)
        means.append(torch.stack(out.hidden_states)[:, 0, 1:-1].mean(1))  # without [CLS] and [SEP]; [UNK] counts
    vectors = torch.stack(means, dim=1).double().numpy()
    classes = np.array([row["label"] for row in ROWS])
    expected = [direct(layer, classes) for layer in vectors]
    np.testing.assert_allclose(study.table["score"], expected, rtol=1e-4)
    assert study.table["layer"].tolist() == [0, 1, 2, 3]
    assert study.table[["task", "measure", "classes", "rows"]].drop_duplicates().to_numpy().tolist() == [
        ["mood", "nu", 3, 50]
    ]
    again = variability(model, {"mood": task()}, processor=tokenizer, batch_size=50, layers=[2])
    assert again.table["score"].tolist() == pytest.approx([study.table["score"][2]], rel=1e-4)


@torch.no_grad()
def test_nu_of_a_decoder_leaves_out_the_start_token(tokenizer):
    bart, means = model_of("bart"), []
    for row in ROWS:
        out = bart(**tokenizer(row["sentence"], return_tensors="pt"), output_hidden_states=True)
        means.append(torch.stack(out.decoder_hidden_states)[:, 0, 2:].mean(1))  # without the start token and [CLS]
    classes = np.array([row["label"] for row in ROWS])
    expected = [direct(layer, classes) for layer in torch.stack(means, dim=1).double().numpy()]
    study = variability(bart, {"mood": task()}, processor=tokenizer, stack="decoder")
    np.testing.assert_allclose(study.table["score"], expected, rtol=1e-3)


def probed(scores: dict[int, float], name: str = "probe") -> Study:
    """A study of probes of two seeds, .1 apart, and of rows that are not to be read."""
    facts = {"task": "mood", "site": "output", "probe": "linear", "measure": "score"}
    rows = [
        {**facts, "layer": layer, "seed": seed, "score": score + seed / 10}
        for layer, score in scores.items()
        for seed in (0, 1)
    ]
    others = [{"layer": None}, {"layer": 1, "measure": "control"}, {"layer": 1, "site": "ffn"}, {"probe": "mlp"}]
    return Study(name, pd.DataFrame([*rows, *({**facts, "layer": 2, "score": 9.0, **other} for other in others)]))


def test_comparison_with_the_scores_of_probes(model, tokenizer, tmp_path):
    given = {"processor": tokenizer}
    nus = variability(model, {"mood": task()}, **given).table["score"]
    order = nus.rank().astype(int).to_dict()  # 1: the lowest nu
    study = variability(model, {"mood": task()}, probed=probed({k: 1 - n / 10 for k, n in order.items()}), **given)
    points = study.rows("nu and probes")
    assert points["nu"].tolist() == pytest.approx(nus.tolist())
    assert points["score"].tolist() == pytest.approx([1.05 - n / 10 for n in order.values()])
    assert study.table.iloc[-1][["measure", "n", "score"]].tolist() == ["rank_correlation", 4, -1.0]
    facts = "rank correlation -1.00, p = 0.083, n = 4 layers"  # two of 24 orders are as clear
    assert study.conclusions[-1] == f"mood: that nu tells which layer a probe reads best cannot be concluded ({facts})."
    assert study.rows("nu")["score"].tolist() == pytest.approx(nus.tolist())
    against = probed({k: n / 10 for k, n in order.items()})
    against.save(tmp_path)
    study = variability(model, {"mood": task()}, probed=tmp_path, **given)
    assert "rank correlation 1.00, p = 0.083" in study.conclusions[-1]


@pytest.mark.parametrize(
    ("score", "said"), [(-0.9, "a low nu goes with a high score of a probe"), (0.9, "nu contradicts the probe's score")]
)
def test_the_sentence_about_a_clear_correlation(score: float, said: str):
    facts = f"rank correlation {score:.2f}, p = 0.01, n = 7 layers"
    assert comparison_sentence("mood", RankCorrelation(7, 0.01, score)) == f"mood: {said} ({facts})."


def test_too_little_to_compare(model, tokenizer):
    two = variability(model, {"mood": task()}, probed=probed({1: 0.5, 3: 0.6}), processor=tokenizer)
    assert any(sentence.endswith("cannot be said (n = 2 layers).") for sentence in two.conclusions)
    same = variability(model, {"mood": task()}, probed=probed({0: 0.3, 1: 0.2, 3: 0.6}), processor=tokenizer)
    assert any("cannot be concluded (rank correlation" in sentence for sentence in same.conclusions)


def test_other_studies_as_probed_are_refused(model, tokenizer):
    with pytest.raises(ConfigError, match="'drift'; pass one that `probe` returned"):
        variability(model, {"mood": task()}, probed=probed({1: 0.5}, name="drift"), processor=tokenizer)
    with pytest.raises(UnknownNameError, match="mood"):
        variability(model, {"other": task()}, probed=probed({1: 0.5}), processor=tokenizer)


def test_sums_far_from_zero():
    vectors, classes = RNG.normal(size=(300, 12)) + 1000, RNG.integers(0, 4, 300)
    scatter = ClassScatter(Counter(classes.tolist()))
    for part in np.array_split(np.arange(300), 7):
        scatter.add(torch.tensor(vectors[part]), torch.tensor(classes[part]))
    assert scatter.nu() == pytest.approx(direct(vectors, classes), rel=1e-8)


def test_classes_that_lie_on_each_other():
    scatter = ClassScatter({0: 2, 1: 2})
    scatter.add(torch.tensor([[1.0, 0], [-1, 0], [1, 0], [-1, 0]]), torch.tensor([0, 0, 1, 1]))
    assert math.isinf(scatter.nu())


def test_several_tasks(model, tokenizer):
    other = [{"sentence": row["sentence"], "label": number % 2} for number, row in enumerate(ROWS)]
    study = variability(model, {"mood": task(), "coin": task(other)}, processor=tokenizer, split="validation")
    assert study.table.groupby("task")["classes"].first().to_dict() == {"coin": 2, "mood": 3}
    nu = study.table.groupby("task")["score"].mean()
    assert nu["coin"] > nu["mood"]


def test_invalid_tasks_and_options_are_refused(model, tokenizer):
    alike = [dict(row, label="good") for row in ROWS]
    with pytest.raises(DataError, match=r"rows of task 'mood' \(train\) are of one class only \('good'\); 2 are"):
        variability(model, {"mood": task(alike, labels=["bad", "good"])}, processor=tokenizer)
    with pytest.raises(ConfigError, match="variability: tasks is empty"):
        variability(model, {}, processor=tokenizer)
    with pytest.raises(ConfigError, match=r"variability: probed is 3; it must be a Study or a text or a path or None"):
        variability(model, task(), processor=tokenizer, probed=3)
    for wrong in ({"batch_size": 0}, {"max_length": 10_000}, {"max_length": 1}):
        with pytest.raises(ConfigError, match=rf"^variability: {next(iter(wrong))} is {next(iter(wrong.values()))}; "):
            variability(model, task(), processor=tokenizer, **wrong)
    numbers = [dict(row, label=row["label"] / 7) for row in ROWS]
    with pytest.raises(ConfigError, match=r"kind sequence_classification \(regression\); each row must have one class"):
        variability(model, {"mood": task(numbers)}, processor=tokenizer)
    with pytest.raises(UnknownNameError, match="unknown split 'test'"):
        variability(model, task(), processor=tokenizer, split="test")
    with pytest.raises(LayerIndexError, match="variability: layer 8"):
        variability(model, task(), processor=tokenizer, layers=8)


def test_rows_without_a_label_are_left_out(model, tokenizer):
    gaps = [{**row, "label": None if number % 4 == 0 else row["label"]} for number, row in enumerate(ROWS)]
    masked, dropped = (
        variability(model, task(gaps, missing_labels=how, problem_type="classification"), processor=tokenizer)
        for how in ("mask", "drop")
    )
    assert set(masked.table["classes"]) == {3}
    assert masked.table.equals(dropped.table)
