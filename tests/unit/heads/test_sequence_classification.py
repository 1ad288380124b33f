"""Heads with one output for a whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lamina.errors import ConfigError, UnknownNameError
from lamina.heads.attention import encode
from lamina.heads.sequence_classification import (
    AudioClassification,
    ImageClassification,
    PooledClassification,
    SequenceClassification,
)
from lamina.heads.token_classification import TokenClassification

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)


def head_of(**settings: object) -> torch.nn.Module:
    return SequenceClassification(**{"labels": ("a", "b"), **settings}).build(8).eval()  # pyright: ignore


def test_pooling_by_attention_is_the_papers():
    """softmax(QK/sqrt(d)) V per head, out projection, no residual, GELU, mean over real tokens, linear."""
    head = head_of(attention_heads=2)
    features = torch.randn(2, 4, 8)
    expected = []
    for row in range(2):
        real = features[row, MASK[row]]
        q, k, v = (F.linear(real, head.attention.weight, head.attention.bias)).chunk(3, -1)
        mixed = []
        for at in (slice(0, 4), slice(4, 8)):
            mixed.append(torch.softmax(q[:, at] @ k[:, at].T / 2, -1) @ v[:, at])
        out = F.linear(torch.cat(mixed, -1), head.attention.output.weight, head.attention.output.bias)
        expected.append(F.linear(F.gelu(out).mean(0), head.output.weight, head.output.bias))
    with torch.no_grad():
        torch.testing.assert_close(head(features, MASK), torch.stack(expected), rtol=0, atol=1e-6)


def test_heads_that_drop_attention_otherwise_run_apart():
    one, same, other = (head_of(attention_heads=2, attention_dropout=share).group() for share in (0.1, 0.1, 0.5))
    assert one == same != other


def test_pooling_by_mean_is_over_real_tokens():
    head = head_of(pooling="mean")
    features = torch.randn(2, 4, 8)
    expected = torch.stack([features[0, :3].mean(0), features[1, 1:].mean(0)])
    torch.testing.assert_close(head(features, MASK), head.output(expected))
    assert not hasattr(head, "attention")


def test_pooling_by_the_first_takes_the_first_real_token():
    head = head_of(pooling="first")
    features = torch.randn(2, 4, 8)
    torch.testing.assert_close(head(features, MASK), head.output(torch.stack([features[0, 0], features[1, 1]])))


@pytest.mark.parametrize("pooling", ["mean", "query", "first", "attention"])
def test_encoder_layers_are_those_of_tags_and_come_before_the_pooling(pooling: str):
    settings: dict[str, Any] = {"encoder_layers": 2, "feedforward": 16, "attention_heads": 2}
    head, tags = head_of(pooling=pooling, **settings), TokenClassification(("a", "b"), **settings).build(8).eval()
    plain = head_of(pooling=pooling, attention_heads=2)
    tags.encoder.load_state_dict(head.encoder.state_dict())
    plain.load_state_dict(head.state_dict(), strict=False)
    features = torch.randn(2, 4, 8)
    with torch.no_grad():
        encoded = features
        for layer in tags.encoder:
            encoded = encode([layer], encoded.unsqueeze(0), MASK, [None])[0]
        torch.testing.assert_close(head(features, MASK), plain(encoded, MASK), rtol=0, atol=1e-6)


def test_behind_encoder_layers_nothing_is_said_of_a_token_alone():
    for pooling in ("mean", "query", "first"):
        plain, deep = head_of(pooling=pooling), head_of(pooling=pooling, encoder_layers=1, feedforward=16)
        assert plain.is_token_wise() or plain.reads_first
        assert not deep.is_token_wise()
        assert not deep.reads_first
        assert not deep.config.weighs_tokens
        assert deep.token_map() is None


def test_the_mean_has_no_shape_for_a_row_without_tokens_so_the_bank_never_gives_one():
    head = head_of(pooling="mean")
    assert bool(head(torch.randn(1, 3, 8), torch.zeros(1, 3, dtype=torch.bool)).isnan().all())


def test_classification_loss():
    head = head_of(class_weights=(1.0, 3.0))
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, -100, 1])
    expected = F.cross_entropy(logits, labels, weight=torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(head.loss(logits, labels), expected)


def test_regression_loss():
    head = head_of(labels=("score",), problem_type="regression")
    logits, labels = torch.randn(3, 1), torch.tensor([0.5, float("nan"), 2.0])
    expected = ((logits[[0, 2], 0] - torch.tensor([0.5, 2.0])) ** 2).mean()
    torch.testing.assert_close(head.loss(logits, labels), expected)


def test_multi_label_loss():
    head = head_of(problem_type="multi_label", class_weights=(1.0, 2.0))
    logits, labels = torch.randn(3, 2), torch.tensor([[1, 0], [0, 1], [-1, 1]])
    wrong = -torch.stack([F.logsigmoid(logits), F.logsigmoid(-logits)])
    chosen = torch.where(labels == 1, wrong[0], wrong[1]) * torch.tensor([1.0, 2.0])
    torch.testing.assert_close(head.loss(logits, labels), chosen[labels >= 0].mean())


def test_dropout_is_on_while_training_only():
    head = head_of(pooling="mean", dropout=0.5)
    features = torch.randn(2, 4, 8)
    assert torch.equal(head(features, MASK), head(features, MASK))
    head.train()
    assert not torch.equal(head(features, MASK), head(features, MASK))


def test_attention_dropout_drops_weights_of_the_attention_while_training():
    """With one token a text attends to that alone: in training it sees it twice as large, or not at all."""
    head = head_of(attention_heads=1, dropout=0.0, attention_dropout=0.5)
    token, mask = torch.randn(1, 1, 8), torch.ones(1, 1, dtype=torch.bool)
    attention = head.attention
    value = F.linear(token, attention.weight[16:], attention.bias[16:])

    def expected(size: float) -> torch.Tensor:
        return head.output(F.gelu(attention.output(size * value))[:, 0])

    torch.testing.assert_close(head(token, mask), expected(1.0))
    head.train()
    logits = head(token.expand(64, -1, -1), mask.expand(64, -1))
    dropped, kept = ((logits - expected(size)).abs().amax(1) < 1e-5 for size in (0.0, 2.0))
    assert bool((dropped | kept).all())
    assert 10 < int(kept.sum()) < 54


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"pooling": "frist"},
            UnknownNameError,
            "unknown pooling 'frist'; known: attention, query, mean, first, last. Did you mean 'first'",
        ),
        (
            {"problem_type": "ranking"},
            UnknownNameError,
            "unknown problem_type 'ranking'; known: classification, regression",
        ),
        ({"dropout": 1.0}, ConfigError, "sequence_classification: dropout is 1.0"),
        ({"attention_dropout": -0.1}, ConfigError, "sequence_classification: attention_dropout is -0.1"),
        ({"problem_type": "regression"}, ConfigError, "2 labels for a regression; it has one"),
        ({"labels": ()}, ConfigError, "at least one is needed"),
        ({"encoder_layers": -1}, ConfigError, "sequence_classification: encoder_layers is -1"),
        ({"feedforward": 0}, ConfigError, "sequence_classification: feedforward is 0"),
        (
            {"encoder_layers": 1, "linear": False, "pooling": "mean"},
            ConfigError,
            "linear is False with encoder_layers=1, which mixes features",
        ),
        ({"class_weights": (1.0,)}, ConfigError, "one positive weight per label"),
    ],
)
def test_values_that_cannot_be_are_refused(settings: dict[str, object], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        SequenceClassification(**{"labels": ("a", "b"), **settings})  # pyright: ignore


def test_class_weights_of_a_regression_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture):
    head = SequenceClassification(("score",), problem_type="regression", class_weights=(2.0,))
    assert head.class_weights is None
    assert "class_weights have no effect on a regression" in caplog.text


def test_attention_heads_must_divide_the_features():
    with pytest.raises(ConfigError, match="attention_heads is 3 for features of size 8"):
        SequenceClassification(("a", "b"), attention_heads=3).build(8)
    SequenceClassification(("a", "b"), attention_heads=3, pooling="mean").build(8)  # not used there


def test_a_number_of_labels_names_them():
    assert SequenceClassification(3).labels == ("0", "1", "2")  # pyright: ignore


@pytest.mark.parametrize("head", [ImageClassification, AudioClassification])
def test_problem_types_that_a_kind_lacks_are_refused(head: type[PooledClassification]):
    with pytest.raises(UnknownNameError, match="unknown problem_type 'multi_label'; known: classification"):
        head(("a", "b"), problem_type="multi_label")


@pytest.mark.parametrize("problem_type", ["regression", "multi_label"])
def test_labels_that_would_be_stretched_are_refused(problem_type: str):
    head = head_of(labels=("score",) if problem_type == "regression" else ("a", "b"), problem_type=problem_type)
    logits = torch.zeros(3, 1 if problem_type == "regression" else 2)
    with pytest.raises(ConfigError, match=r"labels are \(3, 1\) for a .* both must have one shape"):
        head.loss(logits, torch.zeros(3, 1))


# Features that are logits


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_without_a_linear_map_the_pooled_features_are_the_logits(pooling: Any):
    head = SequenceClassification(("a", "b"), pooling=pooling, linear=False, dropout=0.9).build(2).train()
    features, mask = torch.randn(2, 3, 2), torch.tensor([[True, True, False], [False, True, True]])
    first = torch.stack([features[0, 0], features[1, 1]])
    mean = torch.stack([features[0, :2].mean(0), features[1, 1:].mean(0)])
    assert torch.allclose(head(features, mask), first if pooling == "first" else mean)
    assert list(head.parameters()) == []
    assert head.state_dict() == {}
    assert head.outputs == 2
    assert float(head.loss(head(features, mask), torch.tensor([0, 1]))) > 0
    assert head.group() != SequenceClassification(("a", "b"), pooling=pooling, dropout=0.9).build(2).train().group()


def test_features_that_cannot_be_logits_are_refused():
    with pytest.raises(ConfigError, match="linear is False for features of size 64 and 2 labels; without a linear map"):
        SequenceClassification(("a", "b"), pooling="first", linear=False).build(64)
    with pytest.raises(ConfigError, match="linear is False with pooling 'attention', which mixes features"):
        SequenceClassification(("a", "b"), linear=False)


def test_labels_that_do_not_fit_the_logits_are_an_error():
    with pytest.raises(ConfigError, match=r"labels are \[3\] for logits of \[2, 2\]; one per text or token is needed"):
        head_of().loss(torch.zeros(2, 2), torch.zeros(3, dtype=torch.long))
    tags = TokenClassification(("a", "b")).build(8)
    with pytest.raises(ConfigError, match=r"labels are \[6, 2\] for logits of \[2, 6, 2\]"):
        tags.loss(torch.zeros(2, 6, 2), torch.zeros(6, 2, dtype=torch.long))


@pytest.mark.parametrize("weights", [None, (1.0, 2.0)])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            torch.tensor([0, 5]),
            r"a label is not a class \(.*Target 5 is out of bounds\); class numbers from 0 to 1 are",
        ),
        (torch.tensor([-1, 1]), r"a label is not a class \(.*Target -1 is out of bounds\)"),
        (torch.tensor([0.0, 1.0]), r"labels are torch\.float32; .* or -100 for no label\. Call labels\.long\(\)"),
        (torch.tensor([0, 1], dtype=torch.int32), r"labels are torch\.int32"),
    ],
)
def test_labels_that_are_no_classes_are_refused(labels: torch.Tensor, message: str, weights: tuple[float, ...] | None):
    head = SequenceClassification(("no", "yes"), attention_heads=1, class_weights=weights).build(4)
    with pytest.raises(ConfigError, match=message):
        head.loss(torch.zeros(2, 2), labels)
