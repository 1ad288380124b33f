"""The masked language modelling head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, Family
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForPreTraining

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.last_layer import LastLayer
from lamina.heads.masked_lm import MaskedLM
from lamina.heads.vocabulary import vocabulary_of

if TYPE_CHECKING:
    from pathlib import Path

OWN = ("bert", "roberta", "distilbert", "modernbert", "electra", "albert", "deberta-v2", "esm", "rembert")
SPECIAL = {"rembert": {"output_embedding_size": 24, "bos_token_id": 1, "eos_token_id": 2}, "esm": {"mask_token_id": 4}}


def masked_model(name: str, **settings: Any) -> Any:
    """A tiny model with a head for masked language modelling, biases and norms stirred so that each counts."""
    family: Family = FAMILIES.get(name) or FAMILIES["bert"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**family.settings, **SPECIAL.get(name, {}), **settings})
    model = AutoModelForMaskedLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", one_in(3, OWN))
@torch.no_grad()
def test_it_starts_as_the_models_own_head(name: str):
    model = masked_model(name)
    bank = ReaderBank(model).eval()
    bank.add("words", Reader(LastLayer(), MaskedLM()))
    torch.testing.assert_close(bank(**inputs())["words"].logits, model(**inputs()).logits, rtol=0, atol=1e-5)


def test_the_copy_is_its_own():
    """Training the reader leaves the model's head alone, and only the reader's part is saved."""
    model = masked_model("bert")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    bank = ReaderBank(model)
    bank.add("words", Reader(LastLayer(), MaskedLM()))
    assert set(bank["words"].state_dict()) == {
        *("head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias", "head.bias")
    }
    assert all(parameter.requires_grad for parameter in bank.parameters())
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_is_saved_comes_back_without_the_vocabulary(tmp_path: Path):
    bank = ReaderBank(masked_model("bert", vocab_size=9000)).eval()
    bank.add("words", Reader(AdaLayers(dim=8), MaskedLM()))
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.add_(0.1)
        expected = bank(**inputs())["words"].logits
        bank.save_pretrained(tmp_path)
        loaded = ReaderBank.from_pretrained(tmp_path, model=masked_model("bert", vocab_size=9000))
        assert torch.equal(loaded(**inputs())["words"].logits, expected)
    saved = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert saved < 4 * (9000 + 8 * 1000)  # the bias and the small maps; the projection alone is 32 times the bias


def test_a_head_with_another_task_beside_it_is_found():
    torch.manual_seed(0)
    model = BertForPreTraining(BertConfig(**FAMILIES["bert"].settings)).eval()
    bank = ReaderBank(model).eval()
    bank.add("words", Reader(LastLayer(), MaskedLM()))
    with torch.no_grad():
        expected = model(**inputs()).prediction_logits
        torch.testing.assert_close(bank(**inputs())["words"].logits, expected, rtol=0, atol=1e-5)


def test_the_activation_is_found_by_the_logits():
    """The head's own function, where it is not the one that the config names first."""
    model = masked_model("bert")
    model.cls.predictions.transform.transform_act_fn = nn.ReLU()
    bank = ReaderBank(model).eval()
    bank.add("words", Reader(LastLayer(), MaskedLM()))
    with torch.no_grad():
        expected = model(**inputs()).logits
        torch.testing.assert_close(bank(**inputs())["words"].logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["order", "two norms"])
def test_a_head_that_does_something_else_is_not_copied(change: str):
    model = masked_model("bert")
    transform = model.cls.predictions.transform
    if change == "order":
        transform.forward = lambda hidden: transform.dense(transform.LayerNorm(F.gelu(hidden)))
    else:
        model.cls.extra = nn.LayerNorm(32)
    head = MaskedLM().build_on(model, 32)
    assert not torch.equal(head.dense.weight, transform.dense.weight)
    assert bool((head.bias == 0).all())


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5"])
def test_without_a_head_it_starts_fresh_on_the_input_embeddings(name: str):
    model = FAMILIES[name].known()
    head = MaskedLM().build_on(model, 32)
    table = model.get_input_embeddings().weight
    features = torch.randn(2, 4, 32)
    with torch.no_grad():
        expected = head.norm(F.gelu(head.dense(features))) @ table.T
        got = head(features, torch.ones(2, 4, dtype=torch.bool))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert sum(p.numel() for p in head.parameters()) == 33 * table.shape[1] + 2 * table.shape[1] + 99


def test_features_of_another_size_are_mapped_to_the_bases():
    own = MaskedLM().build_on(masked_model("bert"), 8)
    assert own.enter is not None
    assert own.enter.weight.shape == (32, 8)
    assert own(torch.randn(2, 4, 8), torch.ones(2, 4, dtype=torch.bool)).shape == (2, 4, 99)
    fresh = MaskedLM().build_on(FAMILIES["bert"].known(), 8)
    assert fresh.enter is None
    assert fresh.dense.weight.shape == (32, 8)


def test_the_projection_follows_the_model():
    model = masked_model("bert")
    head = MaskedLM().build_on(model, 32)
    features, mask = torch.randn(1, 3, 32), torch.ones(1, 3, dtype=torch.bool)
    before = head(features, mask)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
    torch.testing.assert_close(head(features, mask) - head.bias, 2 * (before - head.bias), rtol=0, atol=1e-5)
    model.bfloat16()
    assert head(features, mask).dtype == torch.bfloat16
    assert head.dense.weight.dtype == torch.float32


def test_a_half_precision_model_is_recognised():
    model = masked_model("bert").bfloat16()
    head = MaskedLM().build_on(model, 32)
    assert head.dense.weight.dtype == torch.float32
    torch.testing.assert_close(head.dense.weight, model.cls.predictions.transform.dense.weight.float())


def test_it_is_built_without_weights():
    with torch.device("meta"):
        model = masked_model("bert")
        head = MaskedLM().build_on(model, 8)
    assert head.dense.weight.is_meta
    assert head.bias.shape == (99,)


def test_building_leaves_the_model_as_it_was():
    model = masked_model("bert").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    MaskedLM().build_on(model, 32)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_what_is_kept_is_projected():
    head = MaskedLM().build_on(masked_model("bert"), 32)
    features, mask = torch.randn(2, 4, 32), torch.ones(2, 4, dtype=torch.bool)
    labels = torch.tensor([[-100, 7, -100, 3], [98, -100, -100, -100]])
    whole, part = head(features, mask), head(features, mask, labels != -100)
    assert part.shape == (3, 99)
    torch.testing.assert_close(part, whole[labels != -100], rtol=0, atol=1e-6)
    torch.testing.assert_close(head.loss(part, labels), head.loss(whole, labels))
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(head.loss(whole, labels), expected)


@pytest.mark.parametrize("narrow", [False, True])
def test_without_a_mask_there_is_no_loss(narrow: bool):
    head = MaskedLM().build_on(masked_model("bert"), 32)
    labels = torch.full((2, 4), -100)
    keep = labels != -100 if narrow else None
    loss = head.loss(head(torch.randn(2, 4, 32), torch.ones(2, 4, dtype=torch.bool), keep), labels)
    assert loss.item() == 0
    loss.backward()
    assert all(bool((parameter.grad == 0).all()) for parameter in head.parameters() if parameter.grad is not None)


def test_it_learns_from_several_layers():
    bank = ReaderBank(masked_model("bert")).train()
    bank.add("words", Reader(AdaLayers(dim=8, dropout=0.0), MaskedLM()))
    batch = inputs()
    labels = torch.where(torch.arange(7) < 3, batch["input_ids"], -100)
    optimizer = torch.optim.Adam(bank.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = bank(**batch, labels={"words": labels}).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(losses[0])
    assert losses[-1] < losses[0] / 2


def test_the_base_is_needed():
    with pytest.raises(ConfigError, match="masked_lm: only the size 8 of the features was given"):
        MaskedLM().build(8)


def test_the_labels_are_the_vocabulary():
    assert MaskedLM(["token"]).labels == ("token",)  # pyright: ignore
    with pytest.raises(ConfigError, match=r"masked_lm: labels are \('a', 'b'\); the classes are the base's vocabulary"):
        MaskedLM(("a", "b"))


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="masked_lm: the family 'vit' has no vocabulary"):
        vocabulary_of(FAMILIES["vit"].known(), "masked_lm")
