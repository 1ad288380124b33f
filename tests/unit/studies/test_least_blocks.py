from __future__ import annotations

import copy
import json
from dataclasses import replace
from inspect import unwrap
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from tests.support.finetuned import bart, t5, t5_tokenizer
from tests.support.stored import tiny_model, tiny_tokenizer
from transformers import BertForSequenceClassification

import lamina
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnknownNameError
from lamina.studies.cutting import least_blocks
from lamina.studies.cutting.advise import measure_speedup
from lamina.studies.cutting.least_blocks import drop_least_
from lamina.studies.statistics import paired_bootstrap, row_counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THINGS, WORDS = ("film", "paris", "anna"), {"good": ("good", "fun"), "bad": ("bad", "slow", "not good")}


def mood_rows() -> list[dict[str, str]]:
    return [
        {"text": f"the {thing} is {more}{word} .", "label": label}
        for thing in THINGS
        for more in ("", "very ", "and ")
        for label in WORDS
        for word in WORDS[label]
    ]


def mood() -> lamina.Task:
    splits = {"train": mood_rows(), "validation": mood_rows()}
    return lamina.Task.from_dataset("sequence_classification", splits, text="text", label="label", name="mood")


def trained(task: lamina.Task) -> BertForSequenceClassification:
    torch.manual_seed(0)
    model = tiny_model(kind=BertForSequenceClassification)
    options = {"epochs": 8, "batch_size": 8, "learning_rate": 3e-3, "progress": False}
    lamina.finetune(model, task, processor=tiny_tokenizer(), **options)
    return model


def accuracy(model: BertForSequenceClassification, task: lamina.Task) -> float:
    return lamina.evaluate(model, {"mood": task}, processor=tiny_tokenizer())["mood"]["accuracy"]


def test_a_model_with_a_head_is_cut_by_its_loss_and_healed(monkeypatch: pytest.MonkeyPatch):
    def speedup(whole: BertForSequenceClassification, cut: BertForSequenceClassification, *_: object) -> float:
        return len(whole.bert.encoder.layer) / len(cut.bert.encoder.layer)

    monkeypatch.setattr(least_blocks, "measure_speedup", speedup)
    scored = Mock(wraps=least_blocks._own_scores)
    monkeypatch.setattr(least_blocks, "_own_scores", scored)
    task = mood()
    model = trained(task)
    whole, count = copy.deepcopy(model), model.num_parameters()
    report = drop_least_(model, task, 2, by="loss", heal_epochs=4, processor=tiny_tokenizer())
    assert (report.scored_by, report.values, len(report.dropped)) == ("head", 45, 2)
    assert scored.call_count == 3 + 1 + 3 + 2  # before, cut and healed; whole; without each block left
    assert set(report.costs) == {1, 2, 3}
    assert min(report.costs, key=lambda layer: (report.costs[layer], -layer)) in report.dropped
    assert report.whole == pytest.approx(accuracy(whole, task))
    lamina.drop_(whole, report.dropped)
    assert report.cut == pytest.approx(accuracy(whole, task))
    assert report.healed == pytest.approx(accuracy(model, task))
    assert report.healed is not None
    assert report.change == pytest.approx(report.healed - report.whole)
    assert report.parameters == (count, model.num_parameters())
    assert report.speedup == 3
    assert edits(model)[0].layers == report.dropped
    blocks = ", ".join(map(str, report.dropped))
    fields = report.to_dict()
    assert json.loads(json.dumps(fields)) == fields
    assert report.sentence().startswith(f"mood: without blocks {blocks} accuracy")
    assert "± 0.123, 95 % interval over 45 rows)" in replace(report, interval=0.123).sentence()
    few = replace(report, interval=None, differing=5)
    assert ", only 5 rows differ, which decides nothing)" in few.sentence()
    assert ", too few rows for an interval)" in replace(few, values=39).sentence()
    assert ", no interval for accuracy)" in replace(few, differing=None).sentence()


def rare(metric: str, **options: Any) -> lamina.Task:
    """A task with 100 validation rows, four of them positive."""
    bad, good = ({"text": f"the film is {word} .", "label": word} for word in ("bad", "good"))
    splits = {"train": [bad, good] * 20, "validation": [bad] * 96 + [good] * 4}
    return lamina.Task.from_dataset(
        "sequence_classification", splits, text="text", label="label", name="mood", metric=metric, **options
    )


def test_a_head_is_scored_on_all_rows_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(least_blocks, "measure_speedup", lambda *_: 1.0)
    task = rare("f1", positive="good")
    model = trained(task)
    whole = lamina.evaluate(model, {"mood": task}, processor=tiny_tokenizer())["mood"]["f1"]
    assert whole > 0.5
    report = drop_least_(model, task, 1, by="influence", processor=tiny_tokenizer())
    assert report.whole == pytest.approx(whole)  # parts without a positive row would have an F1 of 0
    assert report.cut == pytest.approx(lamina.evaluate(model, task, processor=tiny_tokenizer())["mood"]["f1"])
    assert report.change == pytest.approx(report.cut - report.whole)


def change_of(task: lamina.Task, then: list[Any], now: list[Any]) -> least_blocks._Change:
    subject = least_blocks._Subject(Mock(), task, Mock(), Mock(), 0, True, False)
    return least_blocks._change(subject, *(least_blocks._Scored([0.0], answers) for answers in (then, now)))


@pytest.mark.parametrize("metric", ["accuracy", "f1", "mcc", "macro_f1"])
def test_the_interval_is_that_of_a_paired_bootstrap_over_rows(metric: str):
    task = rare(metric, positive="good")
    truths = list(task.split("validation").labels)
    wrong = [1 - truth if row % 10 == 0 else truth for row, truth in enumerate(truths)]
    found = change_of(task, truths, wrong)
    assert (found.values, found.differing) == (100, 10)
    (last, score), (first, _) = (row_counts(task, metric, answers, truths) for answers in (wrong, truths))
    expected = paired_bootstrap(last, first, metric=score, repeats=5000)
    assert found.interval == pytest.approx((expected.high - expected.low) / 2)
    assert change_of(task, truths, [1 - truths[0], *truths[1:]]) == least_blocks._Change(None, 100, 1)


def test_a_metric_that_rows_cannot_be_summed_for_has_no_interval():
    task = rare("auroc", positive="good")
    truths = list(task.split("validation").labels)
    assert change_of(task, truths, [0] * 100) == least_blocks._Change(None, 100, None)


@pytest.mark.parametrize("gap", [False, True])
def test_words_and_rows_without_a_label_do_not_differ(gap: bool):
    rows = [{"w": ["a", "film"], "t": ["O", "B-X"]}] * 50
    parts = {"train": rows, "validation": rows}
    task = lamina.Task.from_dataset("token_classification", parts, text="w", label="t")
    split = task.split("validation")
    right = [tuple(row) for row in split.labels]
    labels = [(-100, -100 if gap and at % 2 else row[1]) for at, row in enumerate(right)]
    task = replace(task, splits={**task.splits, "validation": split.with_labels(labels)})
    other = [(1 - first, second if at % 5 else 1 - second) for at, (first, second) in enumerate(right)]
    found = change_of(task, right, other)
    assert (found.values, found.differing) == ((25, 5) if gap else (50, 10))
    assert (found.interval is None) == gap


def test_what_cannot_be():
    task, model = mood(), tiny_model()
    with pytest.raises(
        ConfigError, match=r"--by loss needs a BertModel with a trained head for 'mood', and it has none"
    ):
        drop_least_(model, task, 1, by="loss", processor=tiny_tokenizer())
    with pytest.raises(ConfigError, match="edit: count is 3; it must be at least 1 and at most 2"):
        drop_least_(model, task, 3, processor=tiny_tokenizer())
    with pytest.raises(ConfigError, match="edit: count is 'a'; it must be a whole number"):
        drop_least_(model, task, "a", processor=tiny_tokenizer())  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError, match="way to choose blocks"):
        unwrap(drop_least_)(model, task, 1, by="luck")
    assert edits(model) == []


@pytest.mark.parametrize(("wrong", "match"), [({"heal_epochs": -1}, "epochs is -1"), ({"seed": -1}, "seed is -1")])
def test_options_of_healing_are_checked_before_the_cut(wrong: dict[str, int], match: str):
    model = tiny_model(kind=BertForSequenceClassification)
    with pytest.raises(ConfigError, match=f"edit: {match}; it must be at least"):
        drop_least_(model, mood(), 1, processor=tiny_tokenizer(), **{"heal_epochs": 1, **wrong})
    assert edits(model) == []


@pytest.mark.long
def test_few_rows_are_said_and_give_no_interval(caplog: pytest.LogCaptureFixture):
    task = mood()
    few = replace(task, splits={**task.splits, "validation": task.split("validation").select_rows(range(30))})
    with caplog.at_level("WARNING"):
        report = drop_least_(trained(task), few, 1, by="loss", processor=tiny_tokenizer())
    assert "too few rows for an interval)" in report.sentence()
    assert "95 %" not in report.sentence()
    said = [
        record.message for record in caplog.records if "mood" in record.message and "split too" not in record.message
    ]
    assert len(said) == 2
    assert "'mood' has 30 validation rows" in said[0]
    assert "--by loss chooses blocks on 4 rows of 'mood'" in said[1]


@pytest.mark.parametrize("by", ["influence", "loss"])
def test_the_processor_saved_with_the_model_is_used(tmp_path: Path, by: least_blocks.By):
    tiny_model(kind=BertForSequenceClassification).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert len(drop_least_(model, mood(), 1, by=by).dropped) == 1


@pytest.mark.long
def test_only_a_missing_head_makes_readers_score_the_model():
    task, model = mood(), trained(mood())
    report = drop_least_(model, task, 1, by="readers", processor=tiny_tokenizer())
    assert (report.scored_by, set(report.costs)) == ("head", {1, 2, 3})
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ConfigError, match="no processor was given"):
        drop_least_(model, task, 1)
    with pytest.raises(UnknownNameError, match="validation"):
        drop_least_(model, replace(task, splits={"train": task.split("train")}), 1, processor=tiny_tokenizer())


def test_a_task_may_have_a_name_that_no_reader_can_have():
    report = drop_least_(tiny_model(), replace(mood(), name="_情感"), 1, processor=tiny_tokenizer())
    assert (report.task, report.scored_by) == ("_情感", "readers")


def test_a_reader_that_fails_leaves_the_model_as_trainable_as_it_was(monkeypatch: pytest.MonkeyPatch):
    def fails(*_, **__):
        raise KeyboardInterrupt

    model = tiny_model()
    monkeypatch.setattr(least_blocks, "train", fails)
    with pytest.raises(KeyboardInterrupt):
        drop_least_(model, mood(), 1, processor=tiny_tokenizer())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_backbone_has_no_head_whatever_classes_its_config_names(count: int):
    labels = [f"class {number}" for number in range(count)]
    rows = [{"text": "a film", "label": float(number) if count == 1 else labels[number % count]} for number in range(9)]
    kind = {"problem_type": "regression"} if count == 1 else {}
    splits = {"train": rows, "validation": rows}
    task = lamina.Task.from_dataset("sequence_classification", splits, text="text", label="label", **kind)
    model = tiny_model()
    model.config.id2label = {0: "other", 1: "names"}
    assert not least_blocks._has_head(model, task, tiny_tokenizer())[0]
    assert model.config.id2label == {0: "other", 1: "names"}


@pytest.mark.parametrize("by", ["influence", "loss"])
def test_a_trained_head_of_other_classes_is_refused(by: str):
    model = tiny_model(kind=BertForSequenceClassification, num_labels=3)
    with pytest.raises(ConfigError, match="the head has 3 classes, the task has 2"):
        drop_least_(model, mood(), 1, by=by, processor=tiny_tokenizer())
    assert edits(model) == []


@pytest.mark.parametrize("family", [bart, t5])
@pytest.mark.parametrize(
    ("kind", "target", "auto", "width"),
    [
        ("summarization", "good film", "AutoModelForSeq2SeqLM", 3),
        ("translation", "good film", "AutoModel", 3),
        ("sequence_classification", "good", "AutoModelForSequenceClassification", 6),
        ("sequence_classification", ["good", "fun"], "AutoModel", 6),
    ],
)
def test_an_encoder_decoder_is_timed_on_as_many_tokens_as_it_reads_or_writes(
    family: Callable[[str], Any], kind: str, target: str | list[str], auto: str, width: int
):
    rows = [{"source": "the film is good .", "target": target}, {"source": "a film", "target": target[:1]}]
    splits = {"train": rows, "validation": rows}
    task = lamina.Task.from_dataset(kind, splits, text="source", label="target")
    model, shapes = family(auto), []
    model.base_model.decoder.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    measure_speedup(model, family(auto), task, t5_tokenizer())
    assert shapes == [(2, width)] * 5


def test_a_model_that_cannot_be_timed_is_not_cut(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> float:
        raise KeyboardInterrupt

    model = tiny_model()
    monkeypatch.setattr(least_blocks, "_scores", lambda *_: least_blocks._Scored([0.0], []))
    monkeypatch.setattr(least_blocks, "measure_speedup", fails)
    with pytest.raises(KeyboardInterrupt):
        drop_least_(model, mood(), 1, processor=tiny_tokenizer())
    assert (len(model.encoder.layer), edits(model)) == (3, [])
