from __future__ import annotations

from inspect import unwrap

import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer
from transformers import BertForSequenceClassification

import lamina
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnknownNameError
from lamina.studies.cutting.least_blocks import drop_least_

THINGS, WORDS = ("film", "paris", "anna"), {"good": ("good", "fun"), "bad": ("bad", "slow", "not good")}


def mood() -> lamina.Task:
    rows = [
        {"text": f"the {thing} is {more}{word} .", "label": label}
        for thing in THINGS
        for more in ("", "very ", "and ")
        for label in WORDS
        for word in WORDS[label]
    ]
    splits = {"train": rows, "validation": rows}
    return lamina.Task.from_dataset("sequence_classification", splits, text="text", label="label", name="mood")


def trained(task: lamina.Task) -> BertForSequenceClassification:
    torch.manual_seed(0)
    model = tiny_model(kind=BertForSequenceClassification)
    options = {"epochs": 8, "batch_size": 8, "learning_rate": 3e-3, "progress": False}
    lamina.finetune(model, task, processor=tiny_tokenizer(), **options)
    return model


def test_a_model_with_a_head_is_cut_by_its_loss_and_healed():
    task = mood()
    model = trained(task)
    count = model.num_parameters()
    report = drop_least_(model, task, 2, by="loss", heal_epochs=4, processor=tiny_tokenizer())
    assert (report.scored_by, report.values, len(report.dropped)) == ("head", 2, 2)
    assert set(report.costs) == {1, 2, 3}
    assert min(report.costs, key=lambda layer: (report.costs[layer], -layer)) in report.dropped
    assert 0 < report.cut <= 1
    assert report.healed is not None
    assert report.change == pytest.approx(report.healed - report.whole)
    assert report.parameters == (count, model.num_parameters())
    assert report.speedup > 0
    assert edits(model)[0].layers == report.dropped
    blocks = ", ".join(map(str, report.dropped))
    assert report.sentence().startswith(f"mood: without blocks {blocks} accuracy")
    assert "95 % interval over 2 parts of the rows" in report.sentence()


def test_what_cannot_be():
    task, model = mood(), tiny_model()
    with pytest.raises(
        ConfigError, match=r"--by loss needs a BertModel with a trained head for 'mood', and it has none"
    ):
        drop_least_(model, task, 1, by="loss", processor=tiny_tokenizer())
    with pytest.raises(ConfigError, match="auto"):
        drop_least_(model, task, 3, processor=tiny_tokenizer())
    with pytest.raises(UnknownNameError, match="way to choose blocks"):
        unwrap(drop_least_)(model, task, 1, by="luck")
    assert edits(model) == []
