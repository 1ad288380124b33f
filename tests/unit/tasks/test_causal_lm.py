"""The next token of running text: labels, perplexity, what may learn it, and what is predicted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.causal import END, VOCABULARY, causal_model, causal_tokenizer, lines
from tests.support.finetuned import copies
from tests.support.portions import one_in
from tests.support.tiny import model_of
from tests.support.training import LENGTH, yes_no

from lamina import evaluate, finetune, fit, predict
from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.causal_lm import CausalLM
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task

KIND = kind_of("causal_lm")
TEXTS = ["anna was to paris .", "the film is good . anna . ben", "paris"]


def encoded(texts: list[str] = TEXTS, **options: Any) -> Any:
    how = EncodeOptions(part="train", max_length=6, **options)
    return KIND.encode(Split.of(texts), causal_tokenizer(), how)


def causal_bank(*names: str) -> ReaderBank:
    bank = ReaderBank(causal_model(), causal_tokenizer())
    for seed, name in enumerate(names):
        bank.add(name, Reader(LastLayer(), CausalLM(), seed=seed))
    return bank


@pytest.mark.parametrize("by_row", [True, False])
def test_the_label_of_a_token_is_the_next_one_of_its_own_row(by_row: bool):
    inputs = encoded(by_row=by_row)
    batch = inputs.batch(range(len(inputs.lengths)))
    assert sorted(inputs.lengths) == ([1, 5, 6] if by_row else [2, 6, 6])
    for ids, labels, length in zip(batch["input_ids"], batch["labels"], inputs.lengths, strict=True):
        assert labels[: length - 1].tolist() == ids[1:length].tolist()
        assert set(labels[length - 1 :].tolist()) == {-100}
    assert bool((batch["input_ids"][batch["attention_mask"] == 0] == END).all())  # what the tokenizer has for a pad


def test_rows_that_are_too_long_are_counted_and_blocks_lose_nothing():
    assert KIND.truncated(encoded(by_row=True)) == 1
    assert KIND.truncated(encoded()) == 0
    assert int(sum(encoded().lengths)) == 14


@pytest.mark.parametrize("by_row", one_in(2, [True, False]))
def test_perplexity_is_that_of_transformers_own_loss(by_row: bool):
    model, tokenizer, task = causal_model(), causal_tokenizer(), lines(by_row=by_row)
    rows = [tokenizer(text)["input_ids"] for text in task.split("validation").texts]
    if not by_row:
        joined = [token for row in rows for token in row]
        rows = [joined[at : at + LENGTH] for at in range(0, len(joined), LENGTH)]
    total = count = right = 0.0
    for row in rows:
        ids = torch.tensor([row[:LENGTH]])
        with torch.no_grad():
            out = model(input_ids=ids, labels=ids)
        if (labels := ids.shape[1] - 1) > 0:
            total, count = total + labels * float(out.loss), count + labels
            right += float((out.logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
    for size in (1, 7):
        (scores,) = evaluate(model, task, processor=tokenizer, batch_size=size).values()
        assert scores["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
        assert scores["accuracy"] == pytest.approx(right / count)
    bank = causal_bank("last")  # starts as the model's own head
    assert evaluate(bank, {"last": task})["last"] == pytest.approx(scores, rel=1e-5)


def test_finetuning_and_readers_learn_the_rule():
    task, model, bank = lines(), causal_model(), causal_bank("word")
    how: dict[str, Any] = {"epochs": 4, "batch_size": 8, "learning_rate": 0.01, "progress": False}
    before = evaluate(model, task, processor=causal_tokenizer())["lines"]["perplexity"]
    frozen = {name: value.clone() for name, value in bank.model.state_dict().items()}
    [read] = fit(bank, {"word": task}, **how).table
    [tuned] = finetune(model, task, processor=causal_tokenizer(), **how).table
    assert (read["metric"], tuned["metric"]) == ("perplexity", "perplexity")
    assert tuned["score"] < read["score"] < before / 1.3
    assert all(torch.equal(value, frozen[name]) for name, value in bank.model.state_dict().items())


def test_the_whole_models_loss_is_over_the_same_labels():
    """Transformers' models shift labels themselves; what they get is shifted back."""
    batch = encoded(by_row=True).batch([0, 1, 2])
    labels = batch.pop("labels")
    given = KIND.model_labels(labels, lines())
    own = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert torch.equal(given[:, 1:], own[:, 1:])
    assert given[:, 0].tolist() == [-100] * 3


def test_states_of_texts_can_be_kept_from_epoch_to_epoch():
    banks: dict[Any, ReaderBank] = {cache: causal_bank("word") for cache in ("on", "off")}
    how: dict[str, Any] = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, "progress": False}
    cached, plain = (fit(bank, {"word": lines()}, cache=cache, **how).table for cache, bank in banks.items())
    assert cached[0]["score"] == pytest.approx(plain[0]["score"], rel=1e-4)


# To predict


def test_a_model_goes_on_with_each_text_whatever_stands_beside_it():
    model: Any = causal_model(3)  # which goes on with each otherwise
    tokenizer = causal_tokenizer()
    together = predict(model, TEXTS, processor=tokenizer, max_target_length=5)
    for text, answer in zip(TEXTS, together, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=END
        )
        own = tokenizer.decode(written[0], skip_special_tokens=True)
        assert own == text + answer["causal_lm"]["text"]
        assert [answer] == predict(model, [text], processor=tokenizer, max_target_length=5)


def test_a_long_text_loses_its_start_so_that_there_is_room(caplog: pytest.LogCaptureFixture):
    model, tokenizer = causal_model(), causal_tokenizer()
    words = [VOCABULARY[5 + at % 9] for at in range(3 * LENGTH)]
    (long,), (end,) = (
        predict(model, [" ".join(part)], processor=tokenizer, max_target_length=4)
        for part in (words, words[-(LENGTH - 4) :])
    )
    assert long == end
    assert f"texts are cut to their last {LENGTH - 4} tokens, to leave room" in caplog.text
    assert tokenizer.truncation_side == "right"
    with pytest.raises(ConfigError, match=f"max_target_length is {LENGTH} for a model of {LENGTH} tokens"):
        predict(model, TEXTS, processor=tokenizer, max_target_length=LENGTH)


def test_a_reader_says_what_may_come_next():
    bank, tokenizer = causal_bank("word"), causal_tokenizer()
    for text, answer in zip(TEXTS, predict(bank, TEXTS), strict=True):
        with torch.no_grad():
            logits = bank.model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        best = logits.softmax(-1).topk(5)
        assert [one["token"] for one in answer["word"]["candidates"]] == [VOCABULARY[at] for at in best.indices]
        assert [one["score"] for one in answer["word"]["candidates"]] == pytest.approx(best.values.tolist(), rel=1e-4)


# What does not fit


@pytest.mark.parametrize(
    ("family", "reason"),
    [("bert", "it does not generate text"), ("t5", "it is an encoder-decoder")],
)
def test_models_that_are_not_causal_are_refused(family: str, reason: str):
    with pytest.raises(ConfigError, match=f"no head for a task of kind causal_lm .{reason}.*AutoModelForCausalLM"):
        predict(model_of(family), TEXTS, processor=causal_tokenizer(), kind="causal_lm")


def test_an_encoder_with_a_language_model_head_is_refused():
    """It gives logits and a loss like any other; but every token has seen the next one."""
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
    )
    with pytest.raises(ConfigError, match=r"evaluate: BertLMHeadModel .*its tokens see later tokens"):
        evaluate(BertLMHeadModel(config), lines(), processor=causal_tokenizer())


def test_a_model_whose_layers_cannot_be_found_is_scored_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def fail(_model: Any) -> Any:
        raise UnsupportedModelError(op="stacks", model_type="gpt2", reason="it hides its layers", hint="")

    expected = evaluate(causal_model(), lines(), processor=causal_tokenizer())
    monkeypatch.setattr("lamina.tasks.causal_lm.stacks", fail)
    assert evaluate(causal_model(), lines(), processor=causal_tokenizer()) == expected


def test_by_row_is_for_running_text():
    with pytest.raises(
        ConfigError, match="by_row is set for a task of kind sequence_classification; it is for running"
    ):
        Task.from_dataset("sequence_classification", {"train": [{"sentence": "a", "label": "b"}]}, by_row=True)


def test_a_task_of_texts_becomes_one_of_next_tokens():
    task = yes_no().causal_lm()
    assert (task.kind, task.metric, task.by_row) == ("causal_lm", "perplexity", False)
    assert task.name.endswith("-clm")
    assert yes_no().causal_lm(rows=True).by_row
    assert len(copies().causal_lm().split("train")) == len(copies().split("train"))


def test_a_reader_of_all_layers_is_token_wise_and_learns():
    bank = ReaderBank(causal_model(), causal_tokenizer())
    bank.add("mix", Reader(ScalarMix(), CausalLM()))
    before = evaluate(bank, {"mix": lines()})["mix"]["perplexity"]
    fit(bank, {"mix": lines()}, epochs=3, batch_size=8, learning_rate=0.01, progress=False)
    assert evaluate(bank, {"mix": lines()})["mix"]["perplexity"] < before / 1.3
