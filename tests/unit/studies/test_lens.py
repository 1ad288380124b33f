"""The logit lens: the last layer predicts what the model predicts; lower layers go through its norm and head."""

from __future__ import annotations

import math
from copy import deepcopy
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from tests.support.tiny import model_of
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lamina.errors import ConfigError, DataError, LayerIndexError, NotFiniteError, UnsupportedModelError
from lamina.studies import lens, lens_tokens
from lamina.studies.states import lens as lens_module
from lamina.studies.states.lens import OutputHead

TEXTS = ["the film is good .", "anna was very slow", "ben and anna", "a bad film and a good film in paris"]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes, max_position_embeddings=32)).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2)
        model.lm_head.weight.normal_(std=0.3)
    return model


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(vocab_size=20, **sizes, max_position_embeddings=32)).eval()


def by_layer(study, measure: str) -> list[float]:
    return study.table[study.table["measure"] == measure]["score"].tolist()


@torch.no_grad()
def test_a_causal_model_predicts_next_tokens(llama, words):
    study = lens(llama, TEXTS, processor=words, batch_size=3)
    losses, ranks = [[] for _ in range(4)], [[] for _ in range(4)]
    for text in TEXTS:
        inputs = words(text, return_tensors="pt")
        del inputs["token_type_ids"]
        states = list(llama(**inputs, output_hidden_states=True).hidden_states)
        ids = inputs["input_ids"][0]
        for layer, state in enumerate(states):  # the last of these is after the norm
            logits = llama.lm_head(state if layer == 3 else llama.model.norm(state))[0, :-2]  # not [SEP]
            chances = logits.log_softmax(-1)
            said = chances[torch.arange(len(chances)), ids[1:-1]]
            losses[layer] += (-said).tolist()
            ranks[layer] += [1 + int((row > value).sum()) for row, value in zip(chances, said, strict=True)]
    assert study.settings["causal"] is True
    assert set(study.table["tokens"]) == {len(losses[0])}
    assert by_layer(study, "loss") == pytest.approx([sum(values) / len(values) for values in losses], abs=1e-5)
    assert by_layer(study, "rank") == pytest.approx([sum(values) / len(values) for values in ranks])
    assert by_layer(study, "accuracy") == pytest.approx([values.count(1) / len(values) for values in ranks])


def test_padding_with_a_token_that_is_not_special_is_not_predicted(llama, words):
    bare = deepcopy(words)
    bare.pad_token = None
    study = lens(llama, ["ben", "a bad film and a good film"], processor=bare)
    assert study.table["tokens"].unique().tolist() == [1 + 7]


@torch.no_grad()
def test_a_masked_model_predicts_hidden_tokens(bert, words):
    study = lens(bert, TEXTS, processor=words, mask_share=1.0)
    losses = [[] for _ in range(3)]
    for text in TEXTS:
        inputs = words(text, return_tensors="pt")
        truth = inputs["input_ids"].clone()[0, 1:-1]
        inputs["input_ids"][0, 1:-1] = words.mask_token_id
        for layer, state in enumerate(bert(**inputs, output_hidden_states=True).hidden_states):
            chances = bert.cls(state)[0, 1:-1].log_softmax(-1)
            losses[layer] += (-chances[torch.arange(len(truth)), truth]).tolist()
    assert study.settings["causal"] is False
    assert by_layer(study, "loss") == pytest.approx([sum(values) / len(values) for values in losses], abs=1e-5)
    few = lens(bert, TEXTS, processor=words)
    assert few.table["tokens"].unique().tolist() == [4]
    assert by_layer(lens(bert, TEXTS, processor=words, batch_size=1), "loss") == pytest.approx(by_layer(few, "loss"))


@torch.no_grad()
def test_the_likeliest_tokens_of_one_text(llama, bert, words):
    study = lens_tokens(llama, TEXTS[0], processor=words, top=3, layers=[1, -1])
    assert study.table.groupby(["layer", "position"])["place"].apply(list).tolist() == [[1, 2, 3]] * 2 * 7
    inputs = words(TEXTS[0], return_tensors="pt")
    own = llama(input_ids=inputs["input_ids"]).logits[0].softmax(-1)
    last = study.table[(study.table["layer"] == 3) & (study.table["place"] == 1)]
    assert last["predicted"].tolist() == words.convert_ids_to_tokens(own.argmax(-1).tolist())
    assert last["score"].tolist() == pytest.approx(own.max(-1).values.tolist(), abs=1e-5)
    assert last["token"].tolist()[1] == "the"
    masked = lens_tokens(bert, "the [MASK] is good", processor=words)
    assert masked.table["position"].unique().tolist() == [2]
    assert len(masked.table) == 3 * 5


def test_the_model_is_not_changed(llama, words):
    hooks = [len(block._forward_hooks) for block in llama.model.layers]
    llama.train()
    lens(llama, TEXTS, processor=words)
    assert llama.training
    assert hooks == [len(block._forward_hooks) for block in llama.model.layers]
    llama.eval()


def test_a_model_with_another_norm():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()
    assert OutputHead(model, op="lens").causal


def test_invalid_models_texts_and_options_are_refused(llama, bert, words):
    with pytest.raises(ConfigError, match=r"LlamaModel has no output over a vocabulary\. Load it with"):
        lens(llama.model, TEXTS, processor=words)
    with pytest.raises(UnsupportedModelError, match="it is not a single stack with a module per block"):
        lens(model_of("bart-Seq2SeqLM"), TEXTS, processor=words)
    with pytest.raises(DataError, match="no text has a token to predict"):
        lens(llama, [""], processor=words)
    with pytest.raises(LayerIndexError, match="lens: layer 8"):
        lens(llama, TEXTS, processor=words, layers=8)
    with pytest.raises(ConfigError, match="mask_share is 2; it must be at least 0 and at most 1"):
        lens(bert, TEXTS, processor=words, mask_share=2)
    with pytest.raises(ConfigError, match="top is 0; it must be at least 1"):
        lens_tokens(llama, TEXTS[0], processor=words, top=0)


def test_a_masked_model_needs_a_mask_token(bert):
    from tests.support.stored import tiny_tokenizer

    with pytest.raises(ConfigError, match="its tokenizer has no mask token"):
        lens(bert, TEXTS, processor=tiny_tokenizer())


def test_more_than_a_head_after_the_last_block(llama, monkeypatch: pytest.MonkeyPatch):
    forward = llama.lm_head.forward
    monkeypatch.setattr(llama.lm_head, "forward", lambda states: forward(states) + states.shape[1])
    with pytest.raises(UnsupportedModelError, match="after its last block is not done token by token"):
        OutputHead(llama, op="lens")


def test_a_perplexity_is_limited_and_refused_for_a_loss_that_is_nan(monkeypatch: pytest.MonkeyPatch):
    losses = iter([0.0, math.inf, math.nan])

    def measured(*_arguments: object, **_options: object) -> SimpleNamespace:
        return SimpleNamespace(table=pd.DataFrame({"measure": ["loss"], "score": [next(losses)]}))

    monkeypatch.setattr(lens_module, "lens", measured)
    assert [lens_module.perplexity(object(), [], None, 1) for _ in range(2)] == pytest.approx([1, math.exp(700)])
    with pytest.raises(NotFiniteError, match="lens: the loss at layer 1 is NaN, so there is no perplexity") as error:
        lens_module.perplexity(object(), [], None, 1)
    assert error.value.name == "layer 1"


@pytest.mark.parametrize("layers", [[0, 1], [1, 3]])
def test_a_token_whose_logits_are_nan_has_no_rank(llama, words, monkeypatch, layers: list[int]):
    logits, calls = OutputHead.logits, iter(range(2))  # one call per layer

    def broken(self: OutputHead, states: torch.Tensor) -> torch.Tensor:
        right = logits(self, states)
        is_checked = hasattr(self, "causal")
        return right.index_fill(0, torch.tensor(0), math.nan) if is_checked and next(calls) else right

    monkeypatch.setattr(OutputHead, "logits", broken)
    study = lens(llama, TEXTS, processor=words, layers=layers)
    undefined = study.table["layer"] == layers[1]
    assert study.table.loc[undefined, "score"].isna().all()
    assert study.table.loc[~undefined, "score"].notna().all()
    assert study.conclusions[-1].startswith("4 of 8 scores are not defined (NaN or infinite): 1 of probability")
