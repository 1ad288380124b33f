"""Self-attention against torch's own module with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.errors import ConfigError
from lamina.heads.attention import EncoderLayer, SelfAttention

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)


def copied(ours: SelfAttention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        for tensor in (ours.bias, ours.output.bias):
            tensor.normal_()  # biases start at 0, which would hide a mistake
        theirs.in_proj_weight.copy_(ours.weight)
        theirs.in_proj_bias.copy_(ours.bias)
        theirs.out_proj.load_state_dict(ours.output.state_dict())


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("grad", [True, False])
def test_it_computes_what_torchs_module_computes(heads: int, grad: bool):
    ours, theirs = SelfAttention("here", 8, heads).eval(), nn.MultiheadAttention(8, heads, batch_first=True).eval()
    copied(ours, theirs)
    features = torch.randn(3, 5, 8)
    with torch.set_grad_enabled(grad):
        expected, _ = theirs(features, features, features, key_padding_mask=~MASK)
        torch.testing.assert_close(ours(features, MASK), expected, rtol=0, atol=1e-6)


def test_an_encoder_layer_computes_what_torchs_computes():
    ours = EncoderLayer("here", 8, 2, 12, 0.3).eval()
    theirs = nn.TransformerEncoderLayer(8, 2, 12, 0.3, "gelu", batch_first=True, norm_first=True).eval()
    copied(ours.attention, theirs.self_attn)
    pairs = ((ours.inner, theirs.linear1), (ours.outer, theirs.linear2))
    norms = ((ours.attention_norm, theirs.norm1), (ours.feedforward_norm, theirs.norm2))
    for one, other in (*pairs, *norms):
        with torch.no_grad():
            for tensor in one.parameters():
                tensor.normal_()
        other.load_state_dict(one.state_dict())
    features = torch.randn(3, 5, 8)
    expected = theirs(features, src_key_padding_mask=~MASK)
    torch.testing.assert_close(ours(features, MASK)[MASK], expected[MASK], rtol=0, atol=1e-5)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_it_starts_as_torchs_module_does():
    torch.manual_seed(0)
    ours = SelfAttention("here", 64, 8)
    assert ours.weight.abs().max() <= (6 / (64 + 3 * 64)) ** 0.5
    assert ours.weight.std().item() == pytest.approx((2 / (64 + 3 * 64)) ** 0.5, rel=0.05)
    assert not ours.bias.any()
    assert not ours.output.bias.any()


def test_dropout_is_on_while_training_only():
    layer = EncoderLayer("here", 8, 2, 12, 0.5)
    features = torch.randn(3, 5, 8)
    assert not torch.equal(layer.train()(features, MASK), layer(features, MASK))
    assert torch.equal(layer.eval()(features, MASK), layer(features, MASK))
    attention = SelfAttention("here", 8, 2, 0.5)
    assert not torch.equal(attention.train()(features, MASK), attention(features, MASK))
    assert torch.equal(attention.eval()(features, MASK), attention(features, MASK))


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="here: attention_heads is 3 for features of size 8"):
        SelfAttention("here", 8, 3)
