"""Fine-tuning: every kind of task is learnt, what is frozen stays, and a killed run resumes to the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.finetuned import (
    bert,
    copies,
    image_processor,
    masking_tokenizer,
    pairs,
    running_text,
    scored,
    scores,
    shades,
    t5,
    t5_tokenizer,
    tensors,
    tune,
    vit,
)
from tests.support.portions import set_apart
from tests.support.training import largest_difference, length_of_text, names, same, several, tiny_tokenizer, yes_no

import lamina
from lamina.editing.inserted_layer import InsertedLayer
from lamina.tasks.split import Split

ROOT = Path(__file__).parents[2]
TOKEN, MASKED = "AutoModelForTokenClassification", "AutoModelForMaskedLM"
LONG: dict[str, Any] = {"low": 60, "high": 90}  # words; the model reads 32 tokens at once
WRITE = {"processor": t5_tokenizer(), "max_target_length": 8}

# Kind -> model, task, options, a score that chance does not reach
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], float]] = {
    "sequence": (bert, lambda: yes_no(train=80), {"epochs": 2}, 0.9),
    "pair": (bert, pairs, {"epochs": 2}, 0.9),
    "pair, encoder and decoder": (
        lambda: t5("AutoModelForSequenceClassification"),
        pairs,
        {"epochs": 3, "processor": t5_tokenizer()},
        0.9,
    ),
    "regression": (lambda: bert(labels=1), lambda: length_of_text(train=80), {"epochs": 3}, 0.8),
    "multi-label": (lambda: bert(labels=3), lambda: several(train=240), {"epochs": 5, "learning_rate": 3e-3}, 0.85),
    "tags": (lambda: bert(TOKEN, 5), lambda: names(train=60), {"epochs": 6}, 0.8),
    "tags in windows": (lambda: bert(TOKEN, 5), lambda: names(train=20, validation=5, **LONG), {"epochs": 4}, 0.8),
    "summaries": (t5, copies, {**WRITE, "epochs": 8, "num_beams": 3}, 0.6),
    "translations": (
        t5,
        lambda: copies("translation"),
        {**WRITE, "epochs": 8, "num_beams": 2, "length_penalty": 0.5, "prefix": "the "},
        20.0,
    ),
    "pictures": (vit, shades, {"epochs": 3, "processor": image_processor()}, 0.9),
}


@pytest.mark.parametrize(
    "kind", set_apart(KINDS, "translations", "multi-label", "sequence", "pair, encoder and decoder", "tags")
)
def test_every_kind_is_learnt(kind: str):
    build, make, options, enough = KINDS[kind]
    task = make()
    model, untrained = build(), build()
    result = tune(model, task, **{"learning_rate": 1e-2, **options})
    best = max(scores(result, task.metric))
    assert best >= enough
    given = {key: value for key, value in options.items() if key not in ("epochs", "processor", "learning_rate")}
    processor = options.get("processor", tiny_tokenizer())
    assert scored(untrained, task, "validation", processor, **given)[task.metric] < enough
    found = scored(model, task, "validation", processor, batch_size=4, **given)
    assert found[task.metric] == best == result.best[task.name][task.metric]


@pytest.mark.long
def test_hidden_tokens_are_learnt():
    result = tune(bert(MASKED), running_text(), epochs=12, learning_rate=1e-2, processor=masking_tokenizer())
    found = scores(result, "perplexity")
    assert found[0] > 15
    assert found[-1] < 10
    assert result.best["lines"]["perplexity"] == min(found)


EDITS: dict[str, Callable[[Any], Any]] = {
    "insert": lambda model: lamina.insert_(model, "attention", layers="1-2"),
    "frozen but for the inserted": lambda model: (
        lamina.insert_(model, "both", init="xavier", activation="relu", placement="output"),
        lamina.freeze_(model, train="inserted"),
    ),
    "reinit": lambda model: lamina.reinit_(model, "top:1", generator=torch.Generator().manual_seed(0)),
    "truncate": lambda model: lamina.truncate_(model, 1),
    "freeze": lambda model: lamina.freeze_(model, "bottom:2"),
}


@pytest.mark.parametrize("edit", set_apart(EDITS, "reinit", "freeze", "insert"))
def test_an_edited_model_learns_and_comes_back(edit: str, tmp_path: Path):
    task, model = yes_no(train=80), bert()
    EDITS[edit](model)
    before = tensors(model)
    flags = {name: one.requires_grad for name, one in model.named_parameters()}
    result = tune(model, task, tmp_path, epochs=3, learning_rate=1e-2)
    assert max(scores(result, "accuracy")) > 0.9
    after = tensors(model)
    changed = {name for name, flag in flags.items() if flag and not torch.equal(before[name], after[name])}
    assert changed == {name for name, flag in flags.items() if flag and "key.bias" not in name} | {
        name for name in changed if "key.bias" in name
    }
    assert all(torch.equal(before[name], after[name]) for name, flag in flags.items() if not flag)
    assert {name: one.requires_grad for name, one in model.named_parameters()} == flags
    again = lamina.load(tmp_path, "AutoModelForSequenceClassification")[0]
    assert same(tensors(again), after)
    assert [one.kind for one in lamina.edits(again)] == [one.kind for one in lamina.edits(model)]
    (row,) = result.table
    assert row["parameters"] == model.num_parameters()
    assert row["trained"] == sum(one.numel() for name, one in model.named_parameters() if flags[name])


def test_inserted_layers_are_all_that_trains_beside_the_head():
    model = bert()
    EDITS["frozen but for the inserted"](model)
    before = tensors(model)
    tune(model, yes_no())
    changed = {name for name, value in tensors(model).items() if not torch.equal(value, before[name])}
    inner = {f"{path}.weight" for path, one in model.named_modules() if isinstance(one, InsertedLayer)}
    outer = {name for name in before if name.startswith(("classifier", "bert.pooler"))}
    assert changed <= inner | outer
    assert inner & changed
    assert outer <= changed


def test_a_plain_model_is_loaded_by_plain_transformers(tmp_path: Path):
    model, task = bert(), yes_no()
    tune(model, task, tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert same(tensors(again), tensors(model))
    assert again.config.id2label == {0: "no", 1: "yes"}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("anna")["input_ids"] == [2, 21, 3]


# A run changes nothing around it


def test_a_run_leaves_no_trace_but_the_weights():
    model = bert(dropout=0.3)
    model.train()
    model.bert.embeddings.eval()
    modes = [one.training for one in model.modules()]
    cache, forward = model.config.use_cache, model.forward
    torch.manual_seed(3)
    np.random.seed(3)
    state = torch.get_rng_state(), np.random.get_state()
    tune(model, yes_no(), precision="bfloat16")
    assert torch.equal(torch.get_rng_state(), state[0])
    assert str(np.random.get_state()) == str(state[1])
    assert [one.training for one in model.modules()] == modes
    assert model.config.use_cache is cache
    assert model.forward == forward
    assert "_original_forward" not in vars(model)
    assert all(one.grad is None for one in model.parameters())
    assert {one.dtype for one in model.parameters()} == {torch.float32}


def test_mixed_precision_does_not_last():
    before, mixed, after = bert(), bert(), bert()
    tune(before, yes_no())
    tune(mixed, yes_no(), precision="bfloat16")
    tune(after, yes_no())
    assert same(tensors(before), tensors(after))
    assert 0 < largest_difference(tensors(before), tensors(mixed)) < 0.1


def test_a_forward_of_its_own_stays():
    model = bert()
    calls: list[int] = []
    plain = model.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    model.forward = counted
    tune(model, yes_no(), precision="bfloat16")
    assert model.forward is counted
    assert calls


def test_weights_in_bfloat16():
    model = bert().to(torch.bfloat16)
    before = tensors(model)
    tune(model, yes_no(), learning_rate=1e-2)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert not same(tensors(model), before)


# Steps


STEPS: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
    "sequence": (bert, lambda: yes_no(train=37), {}),
    "regression": (lambda: bert(labels=1), lambda: length_of_text(train=37), {}),
    "multi-label": (lambda: bert(labels=3), lambda: several(train=37), {}),
    "tags": (lambda: bert(TOKEN, 5), lambda: names(train=37), {}),
    "hidden": (lambda: bert(MASKED), lambda: running_text(train=150), {"processor": masking_tokenizer()}),
    "summaries": (t5, lambda: copies(train=37), WRITE),
    "pictures": (vit, lambda: shades(train=37), {"processor": image_processor()}),
}


@pytest.mark.parametrize("kind", set_apart(STEPS, "regression", "multi-label", "pictures", "hidden", "sequence"))
def test_two_batches_a_step_are_one_of_twice_the_size(kind: str):
    build, make, options = STEPS[kind]
    task, whole, halves = make(), build(), build()
    common = {**options, "learning_rate": 3e-4, "adam_epsilon": 1e-4, "epochs": 2}
    first = tune(whole, task, batch_size=16, **common)
    second = tune(halves, task, batch_size=8, gradient_accumulation_steps=2, **common)
    assert first.steps == second.steps
    assert largest_difference(tensors(whole), tensors(build())) > 1e-4
    assert largest_difference(tensors(whole), tensors(halves)) <= 1e-5


@pytest.mark.long
def test_windows_without_words_that_count_do_no_harm():
    """A step of such windows has no label at all, and the mean over none is no number."""
    task, model = names(train=3, validation=3, low=60, high=90), bert(TOKEN, 5)
    result = tune(model, task, batch_size=1, stride=26)
    assert all(one.isfinite().all() for one in model.parameters())
    assert result.best[task.name]["accuracy"] > 0


def test_a_step_without_labels():
    task = names(train=4, validation=3)
    train = task.split("train")
    blank = Split.of(["", *train.texts], [(), *train.labels], [(), *(train.words or ())])
    task = replace(task, splits={**task.splits, "train": blank})
    model = bert(TOKEN, 5)
    tune(model, task, batch_size=1)
    assert all(one.isfinite().all() for one in model.parameters())


def test_the_number_of_steps_is_limited():
    result = tune(bert(), yes_no(train=40), max_steps=15, epochs=1)
    assert result.steps == 15
    assert [row["epoch"] for row in result.history] == [1, 2]
    assert tune(bert(), yes_no(train=40), max_steps=3, epochs=5).steps == 3


def scripted(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> list[dict[str, torch.Tensor]]:
    """Let the epochs have these scores; what comes back are the weights they had."""
    from lamina.train.base import Runner

    kept: list[dict[str, torch.Tensor]] = []
    real = Runner.score

    def score(
        subject: Any, groups: Any, options: Any, *, names: set[str] | None = None, collected: Any = None
    ) -> dict[str, dict[str, float]]:
        if names is None or len(kept) == len(values):  # after the last epoch
            return real(subject, groups, options, names=names, collected=collected)
        kept.append(tensors(subject.model))
        return {name: {"accuracy": values[len(kept) - 1]} for name in names}

    monkeypatch.setattr(Runner, "score", score)
    return kept


def test_the_weights_are_those_of_the_best_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kept = scripted(monkeypatch, [0.3, 0.7, 0.7, 0.2])
    model = bert()
    result = tune(model, yes_no(), tmp_path, epochs=4)
    assert result.best["classification of seque"] == {"epoch": 2, "accuracy": 0.7}
    assert same(tensors(model), kept[1])
    assert not same(kept[1], kept[2])
    assert same(tensors(lamina.load(tmp_path, "AutoModelForSequenceClassification")[0]), kept[1])


@pytest.mark.long
def test_patience_ends_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    kept = scripted(monkeypatch, [0.3, 0.7, 0.7, 0.2])
    result = tune(bert(), yes_no(), tmp_path, epochs=5, early_stopping_patience=2)
    assert len(kept) == len(result.history) == 4
    assert result.table[0]["stopped"] is True
    assert result.table[0]["epochs_run"] == 4
    again = tune(bert(), yes_no(), tmp_path, epochs=5, early_stopping_patience=2, resume=True)
    assert (again.history, again.best, again.steps) == (result.history, result.best, result.steps)
