"""Scores of whole models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.finetuned import (
    bert,
    copies,
    image_processor,
    masking_tokenizer,
    running_text,
    shades,
    t5,
    t5_tokenizer,
    tensors,
    vit,
)
from tests.support.training import LENGTH, length_of_text, names, same, several, tiny_tokenizer, yes_no

from lamina import evaluate
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.train.plan import group_tasks
from lamina.train.scoring import eval_mode

TOKEN = "AutoModelForTokenClassification"


def scored(model: Any, task: Any, processor: Any = None, part: str = "validation", **given: Any) -> dict[str, float]:
    return evaluate(model, {"it": task}, split=part, processor=processor or tiny_tokenizer(), **given)["it"]


@pytest.mark.parametrize(
    ("build", "make", "options"),
    [
        (bert, yes_no, {}),
        (lambda: bert(labels=1), length_of_text, {}),
        (lambda: bert(labels=3), several, {}),
        (lambda: bert(TOKEN, 5), names, {}),
        (lambda: bert(TOKEN, 5), lambda: names(validation=5, low=60, high=90), {}),
        (lambda: bert("AutoModelForMaskedLM"), running_text, {"processor": masking_tokenizer()}),
        (t5, copies, {"processor": t5_tokenizer(), "max_target_length": 6}),
        (vit, shades, {"processor": image_processor()}),
    ],
)
def test_scores_do_not_depend_on_the_batches(build: Any, make: Any, options: dict[str, Any]):
    task, model = make(), build()
    before = tensors(model)
    one, many = scored(model, task, batch_size=1, **options), scored(model, task, batch_size=64, **options)
    assert one == pytest.approx(many, abs=1e-5)
    assert one.keys() == set(task.metrics)
    assert same(tensors(model), before)


def test_scores_are_those_of_the_model_s_own_answers():
    task, model = yes_no(), bert()
    split, right = task.split("validation"), 0
    for text, label in zip(split.texts, split.labels, strict=True):
        right += int(model(**tiny_tokenizer()([text], return_tensors="pt")).logits.argmax()) == label
    assert scored(model, task)["accuracy"] == pytest.approx(right / len(split))


def test_perplexity_is_that_of_the_hidden_tokens():
    task, model, tokenizer = running_text(), bert("AutoModelForMaskedLM"), masking_tokenizer()
    inputs = group_tasks({"it": task}, EncodeOptions(part="validation", max_length=LENGTH), tokenizer)[0].inputs
    batch = inputs.batch(range(len(inputs.lengths)))
    with torch.no_grad():
        expected = math.exp(float(model(**batch).loss))
    assert scored(model, task, tokenizer)["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_a_large_vocabulary_is_scored_in_small_batches(monkeypatch: pytest.MonkeyPatch):
    task, model, tokenizer = running_text(), bert("AutoModelForMaskedLM"), masking_tokenizer()
    plain = scored(model, task, tokenizer)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _m, _a, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    monkeypatch.setattr("lamina.tasks.masked_lm._MOST_SCORES", 2 * 32 * model.config.vocab_size)
    assert scored(model, task, tokenizer) == pytest.approx(plain)
    assert max(sizes[1:]) == 2


def test_how_texts_are_written(monkeypatch: pytest.MonkeyPatch):
    task, model, asked = copies(), t5(), []
    plain = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: asked.append(given) or plain(**given))
    scored(model, task, t5_tokenizer(), num_beams=3, length_penalty=0.5, max_target_length=4)
    scored(model, task, t5_tokenizer(), length_penalty=0.5, max_target_length=4)
    beams, greedy = asked[0], asked[-1]
    assert (beams["num_beams"], beams["length_penalty"], beams["max_new_tokens"]) == (3, 0.5, 4)
    assert beams["do_sample"] is greedy["do_sample"] is False
    assert "length_penalty" not in greedy
    assert "labels" not in beams


def test_texts_come_back_in_the_order_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    """Batches are sorted by length, and the model that repeats what it reads is always right."""
    task, model = copies("translation"), t5()
    texts = tuple(" ".join(["good", "bad", "slow", "fun", "film"][row:] * 2) for row in (3, 0, 4, 1, 2))
    task = replace(task, splits={"validation": Split.of(texts, texts)})
    monkeypatch.setattr(model, "generate", lambda **given: given["input_ids"])
    assert scored(model, task, t5_tokenizer(), batch_size=2)["bleu"] == pytest.approx(100.0)


def test_eval_mode_leaves_the_modes():
    model = bert()
    model.train()
    model.bert.eval()
    modes = [one.training for one in model.modules()]
    with eval_mode(model):
        assert not any(one.training for one in model.modules())
        assert not torch.is_grad_enabled()
    assert [one.training for one in model.modules()] == modes
