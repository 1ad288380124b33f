"""nu against its definition with a pseudo-inverse, on the model's own states."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer

from lamina import Task
from lamina.errors import ConfigError, DataError, LayerIndexError, UnknownNameError
from lamina.studies import variability
from lamina.studies.class_scatter import ClassScatter

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
def test_nu_is_that_of_the_definition(model, tokenizer):
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


def test_what_cannot_be(model, tokenizer):
    alike = [dict(row, label="good") for row in ROWS]
    with pytest.raises(DataError, match=r"rows of task 'mood' \(train\) are of one class only \('good'\); 2 are"):
        variability(model, {"mood": task(alike, labels=["bad", "good"])}, processor=tokenizer)
    numbers = [dict(row, label=row["label"] / 7) for row in ROWS]
    with pytest.raises(ConfigError, match=r"kind sequence_classification \(regression\); each row must have one class"):
        variability(model, {"mood": task(numbers)}, processor=tokenizer)
    with pytest.raises(UnknownNameError, match="unknown split 'test'"):
        variability(model, task(), processor=tokenizer, split="test")
    with pytest.raises(LayerIndexError, match="variability: layer 8"):
        variability(model, task(), processor=tokenizer, layers=8)
