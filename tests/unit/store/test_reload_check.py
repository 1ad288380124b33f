"""A model that was changed by hand is refused before it is trained or saved, since its copy would not load."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES
from tests.support.training import tiny_bank, tiny_tokenizer, train, yes_no
from torch import nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertForSequenceClassification, BertModel

import lamina
from lamina.errors import ConfigError
from lamina.store.save_model import check_reloads

SIZES = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}


def bert() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=2)).eval()


def deleted(model: Any) -> None:
    del model.bert.encoder.layer[1]


def sliced(model: Any) -> None:
    model.bert.encoder.layer = model.bert.encoder.layer[:2]


def repeated(model: Any) -> None:
    model.bert.encoder.layer.append(deepcopy(model.bert.encoder.layer[0]))


def shared(model: Any) -> None:
    model.bert.encoder.layer[1] = model.bert.encoder.layer[0]


def shared_in_part(model: Any) -> None:
    model.bert.encoder.layer[2].output.dense.weight = model.bert.encoder.layer[0].output.dense.weight


def widened(model: Any) -> None:
    model.bert.encoder.layer[1].intermediate.dense = nn.Linear(16, 24)
    model.bert.encoder.layer[1].output.dense = nn.Linear(24, 16)


def another_head(model: Any) -> None:
    model.classifier = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 2))


CHANGES = {
    deleted: "there is no weight 'bert.encoder.layer.2.",
    sliced: "there is no weight 'bert.encoder.layer.2.",
    repeated: r"the weight 'bert.encoder.layer.3.* has no place",
    shared: "'bert.encoder.layer.0.* and 'bert.encoder.layer.1.* are shared",
    shared_in_part: "'bert.encoder.layer.0.output.dense.weight' and 'bert.encoder.layer.2.* are shared",
    widened: r"layer.1.intermediate.dense.bias' is \[24\], and its config says \[16\]",
    another_head: "there is no weight 'classifier.bias'",
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_changes_by_hand_are_refused_before_training_and_saving(
    change: Callable[[Any], None], reason: str, tmp_path: Path
):
    model = bert()
    change(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    config = model.config.to_dict()
    with pytest.raises(ConfigError, match=f"^finetune: .*could not be loaded again: .*{reason}"):
        lamina.finetune(model, yes_no(train=8, validation=4), processor=tiny_tokenizer(), epochs=1, progress=False)
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert model.config.to_dict() == config
    with pytest.raises(ConfigError, match=r"^save: "):
        lamina.save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_base_that_is_trained_with_its_readers_is_refused_too():
    task = yes_no(train=8, validation=4)
    model = BertModel(BertConfig(**SIZES))
    del model.encoder.layer[0]
    bank = lamina.ReaderBank(model, tiny_tokenizer(), train_base=True)
    bank.add("r", task)
    with pytest.raises(ConfigError, match=r"^fit: this BertModel could not be loaded again"):
        train(bank, {"r": task}, epochs=1)


def test_a_frozen_base_may_be_cut_by_hand():
    task = yes_no(train=8, validation=4)
    model = BertModel(BertConfig(**SIZES))
    del model.encoder.layer[0]
    assert train(tiny_bank({"r": lamina.Reader.default(task)}, model), {"r": task}, epochs=1).steps > 0


def test_what_the_config_or_an_edit_says_is_not_refused(tmp_path: Path):
    check_reloads(AlbertModel(AlbertConfig(**SIZES, embedding_size=8)), "save")  # its blocks are one block
    check_reloads(BertModel(BertConfig(**SIZES), add_pooling_layer=False), "save")
    model = bert()
    model.resize_token_embeddings(64)
    lamina.insert_(model, "ffn", layers=[1])
    lamina.truncate_(model, 2)
    lamina.save(model, tmp_path / "model")
    loaded, _ = lamina.load(tmp_path / "model", "sequence_classification")
    ids = torch.tensor([[2, 3, 4]])
    assert torch.equal(model(ids).logits, loaded(ids).logits)


def relu(model: Any) -> None:
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()


def eps(model: Any) -> None:
    model.bert.encoder.layer[1].output.LayerNorm.eps = 0.5


def config(model: Any) -> None:
    model.config.layer_norm_eps = 0.5


def pad(model: Any) -> None:
    model.config.pad_token_id, model.config.chunk_size_feed_forward = 7, 2


def resized(model: Any) -> None:
    model.resize_token_embeddings(64)
    model.bert.embeddings.word_embeddings.num_embeddings, model.num_labels = 60, 3


def nothing(model: Any) -> None:
    model.bert.embeddings.dropout, model.note = nn.Identity(), 3
    model.bert.encoder.layer[1].output.dropout.p = 0.9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (relu, "'bert.encoder.layer.1.intermediate.intermediate_act_fn' is a ReLU, and a GELUActivation by the config"),
        (eps, "eps of 'bert.encoder.layer.1.output.LayerNorm' is 0.5, and 1e-12 by the config"),
        (config, "eps of 'bert.embeddings.LayerNorm' is 1e-12, and 0.5 by the config"),
        *((change, "") for change in (nothing, pad, resized)),
    ],
)
def test_a_setting_that_a_loaded_model_would_not_have_is_named(
    change: Callable[[Any], None], said: str, caplog: pytest.LogCaptureFixture
):
    model = bert()
    change(model)
    check_reloads(model, "save")
    warned = f"save: a model that is loaded again would compute something else: {said}. Loading builds"
    assert warned in caplog.text if said else caplog.text == ""


def test_sizes_and_tokens_that_a_model_does_not_compute_with_are_not_named(caplog: pytest.LogCaptureFixture):
    model = FAMILIES["llama-CausalLM"].known()
    model.resize_token_embeddings(110)  # leaves `vocab_size` of the inner model
    model.config.pad_token_id = 7
    check_reloads(model, "save")
    assert "something else" not in caplog.text
    model = FAMILIES["roberta"].known()
    model.config.pad_token_id = 7  # its positions begin there
    check_reloads(model, "save")
    assert "padding_idx of 'embeddings' is 0, and 7 by the config" in caplog.text


def test_a_setting_of_the_whole_model_is_named_as_such(caplog: pytest.LogCaptureFixture):
    model = FAMILIES["t5-Seq2SeqLM"].known()
    model.model_dim = 8
    check_reloads(model, "save")
    assert "something else: model_dim of the model is 8, and" in caplog.text


def test_a_class_that_cannot_be_built_is_named(caplog: pytest.LogCaptureFixture):
    class Picky(BertModel):
        def __init__(self, config: BertConfig, size: int) -> None:
            super().__init__(config)

    check_reloads(Picky(BertConfig(**SIZES), 3), "save")
    assert "save: whether the saved model will load again was not checked" in caplog.text


def test_saving_a_bank_on_a_base_that_was_cut_by_hand_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model = bert().bert
    model.encoder.layer = model.encoder.layer[:2]
    bank = lamina.ReaderBank(model, tiny_tokenizer())
    bank.add("a", yes_no())
    bank.save_pretrained(tmp_path)
    (said,) = [record.getMessage() for record in caplog.records if "by hand" in record.getMessage()]
    assert "there is no weight 'encoder.layer.2." in said
    assert "Cut it with lamina.truncate_ and save it, or pass the changed model" in said
    assert list(lamina.ReaderBank.from_pretrained(tmp_path, model=model)) == ["a"]
    caplog.clear()
    lamina.ReaderBank(BertModel(BertConfig(**SIZES), add_pooling_layer=False), tiny_tokenizer()).save_pretrained(
        tmp_path
    )
    assert not [record for record in caplog.records if "by hand" in record.getMessage()]
