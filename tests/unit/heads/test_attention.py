"""Self-attention against torch's own module with the same weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lamina.errors import ConfigError
from lamina.heads.attention import EncoderLayer, SelfAttention, attend, encode

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
    pairs = [
        (SelfAttention("here", 8, heads).eval(), nn.MultiheadAttention(8, heads, batch_first=True).eval())
        for _ in range(3)
    ]
    for pair in pairs:
        copied(*pair)
    features = torch.randn(3, 3, 5, 8)
    with torch.set_grad_enabled(grad):
        expected = [theirs(f, f, f, key_padding_mask=~MASK)[0] for (_, theirs), f in zip(pairs, features, strict=True)]
        together = attend([ours for ours, _ in pairs], features, MASK, [None] * 3)
        torch.testing.assert_close(together, torch.stack(expected), rtol=0, atol=1e-6)
        alone = attend([pairs[0][0]], features[:1], MASK, [None])
        torch.testing.assert_close(alone[0], expected[0], rtol=0, atol=1e-6)


def layer_pair() -> tuple[EncoderLayer, nn.TransformerEncoderLayer]:
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
    return ours, theirs


@pytest.mark.parametrize("members", [1, 3])
def test_an_encoder_layer_computes_what_torchs_computes(members: int):
    pairs = [layer_pair() for _ in range(members)]
    features = torch.randn(members, 3, 5, 8)
    together = encode([ours for ours, _ in pairs], features, MASK, [None] * members)
    for (ours, theirs), one, part in zip(pairs, together, features, strict=True):
        expected = theirs(part, src_key_padding_mask=~MASK)
        torch.testing.assert_close(one[MASK], expected[MASK], rtol=0, atol=1e-5)
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_it_starts_as_torchs_module_does():
    torch.manual_seed(0)
    ours = SelfAttention("here", 64, 8)
    assert ours.weight.abs().max() <= (6 / (64 + 3 * 64)) ** 0.5
    assert ours.weight.std().item() == pytest.approx((2 / (64 + 3 * 64)) ** 0.5, rel=0.05)
    assert not ours.bias.any()
    assert not ours.output.bias.any()


def test_dropout_is_on_while_training_only():
    features = torch.randn(1, 3, 5, 8)
    for run, part in ((encode, EncoderLayer("here", 8, 2, 12, 0.5)), (attend, SelfAttention("here", 8, 2, 0.5))):
        part.train()
        assert not torch.equal(run([part], features, MASK, [None]), run([part], features, MASK, [None]))
        part.eval()
        assert torch.equal(run([part], features, MASK, [None]), run([part], features, MASK, [None]))


def test_the_mean_of_attention_with_dropout_is_attention_without():
    torch.manual_seed(0)
    part = SelfAttention("here", 8, 2, 0.3).double()
    features = torch.randn(1, 3, 5, 8, dtype=torch.float64)
    part.train()
    often = attend([part], features.repeat(1, 4000, 1, 1), MASK.repeat(4000, 1), [None])
    mean = often.unflatten(1, (4000, 3)).mean(1)
    torch.testing.assert_close(mean, attend([part.eval()], features, MASK, [None]), rtol=0, atol=0.05)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="here: attention_heads is 3 for features of size 8"):
        SelfAttention("here", 8, 3)
