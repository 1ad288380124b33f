from __future__ import annotations

import pytest
from tests.support.tiny import FAMILIES
from transformers import GPT2Config, GPT2ForSequenceClassification

from lamina.errors import ConfigError
from lamina.layers import stacks
from lamina.layers.causality import is_causal


def test_a_head_that_takes_no_two_rows_is_left_out():
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=32, bos_token_id=1, eos_token_id=1)
    model = GPT2ForSequenceClassification(config).eval()
    assert model.config.pad_token_id is None
    assert is_causal(model, stacks(model)["main"])


@pytest.mark.parametrize(("family", "causal"), [("bert", False), ("gpt2", True)])
def test_who_writes_token_by_token_is_causal(family: str, *, causal: bool):
    model = FAMILIES[family].known()
    assert is_causal(model, stacks(model)["main"]) == causal


@pytest.mark.parametrize("given", [("a model", "a tokenizer"), "minilm", None])
def test_what_is_no_model_has_no_stacks(given: object):
    with pytest.raises(ConfigError, match=r"stacks: got .+, which is not a model; a transformers model is needed"):
        stacks(given)  # pyright: ignore[reportArgumentType]
