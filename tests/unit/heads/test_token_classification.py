"""The head with one class per token."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.heads.attention import attend
from lamina.heads.token_classification import TokenClassification


def test_the_encoder_is_pre_norm_with_gelu():
    head = TokenClassification(("a", "b"), attention_heads=2, feedforward=12).build(8).eval()
    layer = head.encoder[0]
    features, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    with torch.no_grad():
        mixed = attend([layer.attention], layer.attention_norm(features).unsqueeze(0), mask, [None])[0]
        x = features + mixed
        x = x + layer.outer(F.gelu(layer.inner(layer.feedforward_norm(x))))
        expected = head.output(x)
        got = head(features, mask)
    torch.testing.assert_close(got[mask], expected[mask], rtol=0, atol=1e-6)


def test_without_an_encoder_it_is_one_linear_map():
    head = TokenClassification(("a", "b"), encoder_layers=0, attention_heads=7).build(8).eval()
    features = torch.randn(2, 4, 8)
    assert torch.equal(head(features, torch.ones(2, 4, dtype=torch.bool)), head.output(features))
    assert sum(p.numel() for p in head.parameters()) == 8 * 2 + 2


def test_the_loss_leaves_out_ignored_tokens():
    head = TokenClassification(("a", "b"), class_weights=(1.0, 4.0)).build(8)
    logits, labels = torch.randn(2, 3, 2), torch.tensor([[0, 1, -100], [1, -100, -100]])
    expected = F.cross_entropy(logits[labels >= 0], labels[labels >= 0], weight=torch.tensor([1.0, 4.0]))
    torch.testing.assert_close(head.loss(logits, labels), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 1.0}, "token_classification: dropout is 1.0"),
        ({"encoder_layers": -1}, "token_classification: encoder_layers is -1"),
        ({"feedforward": 0}, "token_classification: feedforward is 0"),
        ({"labels": ("a", "a")}, "at least one is needed and each only once"),
        ({"class_weights": (1.0, 0.0)}, "one positive weight per label"),
    ],
)
def test_values_that_cannot_be_are_refused(settings: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        TokenClassification(**{"labels": ("a", "b"), **settings})  # pyright: ignore


def test_attention_heads_must_divide_the_features():
    with pytest.raises(ConfigError, match="attention_heads is 3 for features of size 8"):
        TokenClassification(("a", "b"), attention_heads=3).build(8)
