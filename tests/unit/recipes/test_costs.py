"""Costs counted on the meta device, against hand counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from lamina.bank import Reader
from lamina.errors import LayerIndexError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.concat import Concat
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.last_layer import LastLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.recipes.costs import Meter, RowCost, RowSize, open_config, readable, row_cost

WIDTH, DEPTH, INNER, TOKENS = 16, 3, 32, 10
LINEAR = SequenceClassification(("no", "yes"), pooling="mean")
BART = {"encoder_layers": DEPTH, "decoder_layers": DEPTH, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER}


def empty(family: str, auto: Any = AutoModel, **settings: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return auto.from_config(AutoConfig.for_model(family, **settings)).eval()


@pytest.fixture(scope="module")
def bert() -> Meter:
    settings = {"num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": INNER}
    return Meter(empty("bert", vocab_size=50, hidden_size=WIDTH, **settings))


@pytest.fixture(scope="module")
def bart() -> Meter:
    return Meter(
        empty("bart", vocab_size=50, d_model=WIDTH, encoder_attention_heads=2, decoder_attention_heads=2, **BART)
    )


def block(tokens: int) -> int:
    """One block: four maps of width x width, two of width x inner, two products of attention."""
    return 2 * tokens * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 2 * 2 * tokens**2 * WIDTH


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_pass_ends_after_the_last_layer_that_is_read(bert: Meter, layer: int):
    assert bert.pass_flops(TOKENS, {"main": layer}) == layer * block(TOKENS)


def test_the_embeddings_alone_cost_no_product(bert: Meter):
    assert bert.pass_flops(TOKENS, {"main": 0}) == 0


def test_a_pass_grows_with_the_text(bert: Meter):
    assert bert.pass_flops(30, {"main": 3}) == 3 * block(30)


def test_of_an_encoder_and_decoder_only_what_is_read_is_run(bart: Meter):
    assert bart.pass_flops(TOKENS, {"encoder": DEPTH}) == DEPTH * block(TOKENS)
    assert bart.pass_flops(TOKENS, {"encoder": DEPTH, "decoder": DEPTH}) > 2 * DEPTH * block(TOKENS)


def test_the_model_s_size(bert: Meter):
    assert bert.size() == sum(parameter.numel() for parameter in bert.model.parameters()) > 0


def test_a_reader_that_is_counted(bert: Meter):
    cost = bert.reader(Reader(Concat(), LINEAR), TOKENS)
    assert cost.parameters == DEPTH * WIDTH**2 + 2 * WIDTH + 2
    assert cost.flops == 2 * TOKENS * DEPTH * WIDTH**2 + 2 * 2 * WIDTH
    assert cost.counted
    assert (cost.stack, cost.layers, cost.width, cost.kept) == ("main", (1, 2, 3), WIDTH, 0)


def test_a_reader_whose_layers_depend_on_values_is_estimated(bert: Meter):
    cost = bert.reader(Reader(AdaLayers(dim=8, dropout=0.0), LINEAR), TOKENS)
    assert cost.parameters == DEPTH * WIDTH * 8 + DEPTH + 2 * 8 + 2
    assert cost.flops == 2 * TOKENS * DEPTH * WIDTH * 8 + 2 * 2 * 8
    assert not cost.counted


def test_a_reader_that_needs_the_model_s_pass_is_estimated(bert: Meter):
    cost = bert.reader(Reader(ExtraLayers(n=2), LINEAR), TOKENS)
    assert cost.flops == 2 * (block(TOKENS) - 4 * TOKENS**2 * WIDTH) + 2 * 2 * WIDTH
    assert (cost.counted, cost.layers) == (False, (DEPTH,))


def test_a_reader_that_needs_every_state_at_once(bert: Meter):
    cost = bert.reader(Reader(DWAtt(), LINEAR), TOKENS)
    assert cost.kept == (0 if DWAtt.streams else DEPTH)
    assert cost.counted


def test_a_reader_without_parameters_but_its_head_s(bert: Meter):
    assert bert.reader(Reader(LastLayer(), LINEAR), TOKENS).parameters == 2 * WIDTH + 2


def test_seeds_share_a_count(bert: Meter):
    one = bert.reader(Reader(Concat(), LINEAR, seed=1), TOKENS)
    assert bert.reader(Reader(Concat(), LINEAR, seed=2), TOKENS) is one
    assert bert.reader(Reader(Concat(), LINEAR), TOKENS + 1) is not one


def test_a_reader_of_the_decoder(bart: Meter):
    assert bart.reader(Reader(LastLayer(), LINEAR, stack="decoder"), TOKENS).stack == "decoder"
    assert bart.reader(Reader(LastLayer(), LINEAR), TOKENS).stack == "encoder"


def test_a_reader_of_a_layer_that_the_model_lacks(bert: Meter):
    with pytest.raises(LayerIndexError, match="layer 9 does not exist"):
        bert.reader(Reader(Concat(layers=(9,)), LINEAR), TOKENS)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0"),
        (1, "1"),
        (999, "999"),
        (1000, "1 k"),
        (1234, "1.23 k"),
        (1e6, "1 M"),
        (2.5e15, "2.5 P"),
        (1e26, "100 Y"),
    ],
)
def test_large_numbers_are_readable(count: float, said: str):
    assert readable(count) == said


# Whole models

BERT = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "intermediate_size": INNER,
}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}


def test_a_row_of_a_classifier():
    model = empty("bert", AutoModelForSequenceClassification, **BERT)
    head = 2 * (WIDTH**2 + WIDTH * 2)  # pooler and classifier, of one token
    assert row_cost(model, RowSize(TOKENS)) == RowCost(DEPTH * block(TOKENS) + head, 0, True)


def test_a_row_whose_hidden_tokens_are_guessed():
    model = empty("bert", AutoModelForMaskedLM, **BERT)
    head = 2 * TOKENS * (WIDTH**2 + WIDTH * 50)
    assert row_cost(model, RowSize(TOKENS)) == RowCost(DEPTH * block(TOKENS) + head, 0, True)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_text_that_is_written(family: str):
    settings = (
        {**BART, **HEADS} if family == "bart" else {"num_layers": DEPTH, "num_heads": 2, "d_kv": 8, "d_ff": INNER}
    )
    model = empty(family, AutoModelForSeq2SeqLM, vocab_size=50, d_model=WIDTH, **settings)
    written = 6
    cost = row_cost(model, RowSize(TOKENS, written))
    own = 2 * written * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 4 * written**2 * WIDTH
    cross = 2 * (2 * written + 2 * TOKENS) * WIDTH**2 + 4 * written * TOKENS * WIDTH
    decoder = DEPTH * (own + cross) + 2 * written * WIDTH * 50
    assert cost == RowCost(DEPTH * block(TOKENS) + decoder, decoder, True)


def test_a_head_that_looks_for_an_end_token_is_estimated():
    model = empty("bart", AutoModelForSequenceClassification, vocab_size=50, d_model=WIDTH, **BART, **HEADS)
    both = row_cost(model, RowSize(TOKENS))
    assert both == row_cost(model, RowSize(TOKENS))
    base: Any = model.base_model
    body = Meter(base).pass_flops(TOKENS, {"encoder": DEPTH, "decoder": DEPTH})
    assert both == RowCost(body + 2 * (WIDTH**2 + WIDTH * 3), 0, False)  # BART has three classes by default


def test_an_image():
    settings = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": INNER}
    model = empty("vit", AutoModelForImageClassification, image_size=32, patch_size=8, **settings)
    patches = 2 * 16 * 3 * 8 * 8 * WIDTH
    assert row_cost(model, RowSize(pixels=(3, 32, 32))).flops == patches + DEPTH * block(17) + 2 * WIDTH * 2


@pytest.mark.parametrize(("family", "key"), [("deberta-v2", "position_buckets"), ("t5", "decoder_start_token_id")])
def test_keys_that_a_family_reads_though_its_config_does_not_list_them(family: str, key: str):
    config, _ = open_config("nobody/none", {"model_type": family, key: 7})
    assert getattr(config, key) == 7
    with pytest.raises(UnknownNameError, match=f"unknown key '{key}'"):
        open_config("nobody/none", {"model_type": "bert", key: 7})


def test_parameters_that_go_into_a_module_are_counted_and_stay_trainable():
    settings = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    model = empty("deberta-v2", **BERT, **settings)
    frozen = next(model.parameters()).requires_grad_(False)
    assert row_cost(model, RowSize(TOKENS)).flops > DEPTH * block(TOKENS)
    assert [parameter for parameter in model.parameters() if not parameter.requires_grad] == [frozen]
