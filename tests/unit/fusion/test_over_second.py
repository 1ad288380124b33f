"""PooledLayers over the second text of a pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer

from lamina.bank import Reader, ReaderBank
from lamina.errors import UnknownNameError
from lamina.fusion.pooled_layers import Over, PooledLayers
from lamina.heads.sequence_classification import SequenceClassification

SEGMENTS = torch.tensor([[0, 1, 1, 0, 2, 2, 0], [0, 1, 1, 1, 1, 0, 0]])
MASK = torch.tensor([[1] * 7, [1] * 6 + [0]]).bool()


def test_the_states_of_the_first_text_change_nothing():
    fusion: Any = PooledLayers(dim=8, over="second").build(3, 16).eval()
    torch.nn.init.normal_(fusion.queries)
    states = torch.randn(3, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    other = states.clone()
    other[:, 0, :4] += 1.0
    with torch.no_grad():
        one, two = (fusion(given, MASK, SEGMENTS)[0] for given in (states, other))
        assert torch.equal(one, two)
        other[:, 0, 5] *= -1.0
        assert not torch.allclose(fusion(other, MASK, SEGMENTS)[0], one)
        whole = PooledLayers(dim=8).build(3, 16).eval()
        whole.load_state_dict(fusion.state_dict())
        torch.testing.assert_close(fusion(states, MASK, SEGMENTS)[1], whole(states, MASK)[1])  # there is no second text


def test_readers_of_both_kinds_share_a_bank_and_each_reads_its_own():
    head = SequenceClassification(("no", "yes"), pooling="first")
    together = ReaderBank(tiny_model(), tiny_tokenizer())
    for over in get_args(Over):
        together.add(over, Reader(PooledLayers(over=over), head))
    batch = tiny_tokenizer()(
        [("the film is good", "anna went"), ("bad", "very bad")], return_tensors="pt", padding=True
    )
    out = together.eval()(**batch)
    for over in get_args(Over):
        alone = ReaderBank(tiny_model(), tiny_tokenizer())
        alone.add(over, Reader(PooledLayers(over=over), head))
        torch.testing.assert_close(alone.eval()(**batch)[over].logits, out[over].logits)
    assert not torch.allclose(out["all"].logits, out["second"].logits)


def test_the_settings_alone_say_whether_pairs_are_read():
    for over in get_args(Over):
        config = replace(PooledLayers(), over=over)
        assert config.reads_pairs == (over == "second")
        assert "reads_pairs" not in vars(config)


def test_it_is_all_or_the_second():
    with pytest.raises(UnknownNameError, match="unknown over 'first'; known: all, second"):
        PooledLayers(over="first")  # pyright: ignore[reportArgumentType]
