"""Whether tasks fit their readers, and kept states the memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.support.stored import tiny_tokenizer
from tests.support.tiny import FAMILIES
from tests.support.training import length_of_text, names, reader, tiny_bank, tiny_model, yes_no
from tokenizers.processors import TemplateProcessing

from lamina import (
    DWAtt,
    Reader,
    ReaderBank,
    SequenceClassification,
    SingleLayer,
    Task,
    TokenClassification,
    fit,
    predict,
)
from lamina.errors import ConfigError, UnknownNameError
from lamina.tasks.split import Split
from lamina.train import bank_runner as readers
from lamina.train.bank_runner import BankRunner, free_bytes


def bank_of(*layers: str) -> ReaderBank:
    bank = tiny_bank({"streams": reader()})
    for name in layers:
        bank.add(f"keeps-{name}", Reader(DWAtt(layers=name), SequenceClassification(("no", "yes"), attention_heads=2)))
    return bank


def test_too_much_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    bank = bank_of("1-")
    before = {key: value.clone() for key, value in bank.state_dict().items()}
    monkeypatch.setattr(readers, "free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"the gradients of streams, keeps-1- keep 0\.0 GiB for 8 rows of"):
        fit(bank, {"streams": yes_no(), "keeps-1-": yes_no()}, batch_size=8, epochs=1, progress=False)
    assert all((value == before[key]).all() for key, value in bank.state_dict().items())


def test_free_memory_is_some():
    assert free_bytes(bank_of().device) > 1 << 20


TASK = yes_no(train=4, validation=4)


def checked(bank: ReaderBank, tasks: dict[str, Any], *parts: str) -> None:
    BankRunner(bank, "fit").check(tasks, parts)


def test_what_fits_passes():
    checked(tiny_bank({"r": reader(TASK)}), {"r": TASK}, "train", "validation")


def test_a_bank_without_a_tokenizer_cannot_read_texts():
    with pytest.raises(ConfigError, match=r"fit: the bank has no processor.*ReaderBank\(model, processor"):
        checked(ReaderBank(tiny_model()), {"r": TASK})


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_tags_are_read_at_the_step_that_reads_the_token(stack: str):
    bank = tiny_bank({}, FAMILIES["bart"].known())
    bank.add("tags", Reader(SingleLayer(0), TokenClassification(("no", "yes"), encoder_layers=0), stack))
    runner = BankRunner(bank.eval(), "evaluate")
    ids, labels = torch.tensor([[2, 4, 6, 7, 3], [2, 4, 8, 7, 3]]), torch.full((2, 5), -100)
    batch, labels[:, 2] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 1
    logits = runner.outputs(batch, None, ["tags"], None)["tags"]
    assert (logits[0] != logits[1]).any(-1).tolist() == [False, False, True, False, False]  # layer 0 reads no other one
    (loss,) = runner.losses(batch, {"tags": labels}, ["tags"], None)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[:, 2], labels[:, 2]))


def test_a_tagger_of_a_decoder_keeps_the_steps_that_it_learnt():
    bank = tiny_bank({}, FAMILIES["bart"].known())
    bank.add("tags", Reader(SingleLayer(0), TokenClassification(("O", "X"), encoder_layers=0), "decoder"))
    rows = [{"words": "the film is good", "tags": ["O", "X", "O", "X"]}] * 8
    data = {"train": [{**row, "words": row["words"].split()} for row in rows]}
    task = Task.from_dataset("token_classification", data, text="words", label="tags")
    fit(bank.eval(), {"tags": task}, epochs=1, keep="last", progress=False)
    assert bank["tags"].info["reads_words"] is True
    new = predict(bank, ["the film is good"])[0]["tags"]
    del bank["tags"].info["reads_words"]  # as an earlier version saved it
    old = predict(bank, ["the film is good"])[0]["tags"]
    assert [word["score"] for word in old[1:]] == pytest.approx([word["score"] for word in new[:-1]])


def test_tags_of_a_decoder_need_an_end_token():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    bank = ReaderBank(FAMILIES["bart"].known(), tokenizer)
    bank.add("tags", Reader(SingleLayer(0), TokenClassification(("O", "X"), encoder_layers=0), "decoder"))
    data = {"train": [{"words": ["the", "film"], "tags": ["O", "X"]}] * 8}
    task = Task.from_dataset("token_classification", data, text="words", label="tags")
    with pytest.raises(ConfigError, match=r"reader 'tags' tags words of the decoder.*without an end token"):
        fit(bank, {"tags": task}, epochs=1, progress=False)


def test_no_task_at_all():
    with pytest.raises(ConfigError, match="fit: no task was given; at least one is needed"):
        checked(tiny_bank({"r": reader()}), {})


def test_a_task_for_a_reader_there_is_not():
    with pytest.raises(UnknownNameError, match=r"fit: unknown reader 'mod'; known: mood. Did you mean 'mood'?"):
        checked(tiny_bank({"mood": reader()}), {"mod": TASK})


def test_a_part_there_is_not_or_that_is_empty():
    bank = tiny_bank({"r": reader(TASK)})
    with pytest.raises(UnknownNameError, match="unknown split 'test'; known: train, validation"):
        checked(bank, {"r": TASK}, "test")
    empty = dataclasses.replace(TASK, splits={**TASK.splits, "train": Split.of([], [])})
    with pytest.raises(ConfigError, match="its train part is empty; it needs at least one row"):
        checked(bank, {"r": empty}, "train")


@pytest.mark.parametrize(
    ("made_for", "message"),
    [
        (names(), "its kind is sequence_classification, reader 'r' was made for token_classification; they must agree"),
        (length_of_text(), "its problem_type is classification, reader 'r' was made for regression"),
        (
            dataclasses.replace(TASK, labels=("yes", "no")),
            r"its labels is \('no', 'yes'\), reader 'r' was made for \('yes', 'no'\)",
        ),
    ],
    ids=["kind", "problem", "labels"],
)
def test_a_task_that_does_not_fit_its_reader(made_for, message: str):
    with pytest.raises(ConfigError, match=message):
        checked(tiny_bank({"r": reader(made_for)}), {"r": TASK})
