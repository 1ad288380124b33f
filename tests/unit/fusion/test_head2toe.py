"""Head2Toe: its features, its two stages, and the heads that can read it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamina.errors import ConfigError
from lamina.fusion.head2toe import Head2Toe
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification


def unit(values: Tensor) -> Tensor:
    length = sum(float(value) ** 2 for value in values) ** 0.5
    return values / length if length else values


def reference(config: Head2Toe, states: Tensor, mask: Tensor) -> Tensor:
    """All features, none dropped: text by text, layer by layer."""
    rows = []
    for row in range(states.shape[1]):
        real = [t for t in range(states.shape[2]) if mask[row, t]]
        groups = [[t] for t in range(states.shape[2])] if config.per_token else [real]
        features = []
        for group in groups:
            parts = []
            for state in states[:, row]:
                means = []
                for c in range(config.chunks):
                    start, end = c * len(group) // config.chunks, -(-(c + 1) * len(group) // config.chunks)
                    means.append(torch.stack([state[t] for t in group[start:end]]).mean(0))
                parts.append(unit(torch.cat(means)))
            features.append(torch.cat(parts))
        rows.append(torch.stack(features if config.per_token else features * states.shape[2]))
    return torch.stack(rows)


def states_and_mask() -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:], mask[2, :5] = False, False
    return torch.randn(4, 3, 7, 6, generator=torch.Generator().manual_seed(2)), mask


def linear_head(dim: int, classes: int = 3) -> Any:
    return SequenceClassification(classes, pooling="first", dropout=0.0).build(dim)


def scored(fraction: float = 0.1, **settings: Any) -> tuple[Any, Any]:
    """A fusion of 4 layers of 6 and a head in which the features 1, 20 and 7 stand out, in that order."""
    fusion = Head2Toe(fraction=fraction, **settings).build(4, 6)
    head = linear_head(24)
    with torch.no_grad():
        head.output.weight[:, [1, 20, 7]] = torch.tensor([[9.0, 6.0, 1.0], [0.0, -6.0, -3.0], [0.0, 0.0, 4.0]])
    return fusion, head


@pytest.mark.parametrize("settings", [{}, {"per_token": True}, {"chunks": 3}, {"chunks": 5}])
def test_the_features_are_scaled_means_one_after_another(settings: dict[str, Any]):
    config = Head2Toe(**settings)
    fusion = config.build(4, 6)
    states, mask = states_and_mask()
    got = fusion(states, mask)
    assert got.shape == (3, 7, fusion.dim)
    assert fusion.dim == 4 * 6 * config.chunks
    torch.testing.assert_close(got, reference(config, states, mask), rtol=0, atol=1e-6)


def test_padding_changes_nothing_whatever_it_holds():
    fusion = Head2Toe(chunks=2).build(4, 6)
    states, mask = states_and_mask()
    other = states.clone()
    other[:, ~mask] = 1e3
    torch.testing.assert_close(fusion(other, mask), fusion(states, mask))
    assert not torch.allclose(fusion(states, torch.ones_like(mask))[1], fusion(states, mask)[1])


def test_features_of_a_text_take_the_memory_of_one_token():
    states, mask = states_and_mask()
    assert Head2Toe().build(4, 6)(states, mask).stride()[1] == 0


def test_states_of_nothing_give_numbers_and_gradients():
    """A state of zeros has no direction; a text without tokens has no mean."""
    states, mask = states_and_mask()
    states[1, 0] = 0
    mask[1] = False
    for per_token in (False, True):
        states.requires_grad_(True).grad = None
        features = Head2Toe(per_token=per_token).build(4, 6)(states, mask)
        assert bool(features.isfinite().all())
        assert per_token or not bool(features[1].any())
        assert not bool(features[0, :, 6:12].any())
        features.sum().backward()
        assert states.grad is not None
        assert bool(states.grad.isfinite().all())


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_linear_head_reads_exactly_the_features(pooling: Any):
    states, mask = states_and_mask()
    fusion = Head2Toe().build(4, 6)
    head = SequenceClassification(3, pooling=pooling).build(24).eval()
    fusion.check_head(head)
    expected = head.output(reference(fusion.config, states, mask)[:, 0])
    torch.testing.assert_close(head(fusion(states, mask), mask), expected)


def test_the_penalty_is_the_length_of_every_features_column():
    fusion, head = scored(group_lasso=0.5)
    lengths = [sum(float(w) ** 2 for w in head.output.weight.detach()[:, i]) ** 0.5 for i in range(24)]
    assert fusion.regularization(head).item() == pytest.approx(0.5 * sum(lengths), rel=1e-5)


def test_the_penalty_draws_whole_columns_and_stands_still_at_zero():
    fusion, head = scored(group_lasso=1.0)
    with torch.no_grad():
        head.output.weight[:, 5] = 0
    fusion.regularization(head).backward()
    weight = head.output.weight
    expected = weight / weight.norm(dim=0, keepdim=True).clamp(min=1e-12)
    torch.testing.assert_close(weight.grad, expected.detach())
    assert head.output.bias.grad is None


def test_there_is_no_penalty_without_weight_or_head():
    fusion, head = scored(group_lasso=0.0)
    assert fusion.regularization(head) is None
    assert scored()[0].regularization() is None


def test_the_best_features_are_kept_and_the_head_starts_again():
    fusion, head = scored(fraction=3 / 24)
    states, mask = states_and_mask()
    full = fusion(states, mask)
    before = head.output.weight.clone()
    torch.manual_seed(5)
    assert fusion.on_epoch_end(0.5, head) is True
    torch.manual_seed(5)
    assert torch.equal(head.output.weight, linear_head(24).output.weight)
    assert not torch.equal(head.output.weight, before)
    assert fusion.kept.nonzero().flatten().tolist() == [1, 7, 20]
    assert fusion.regularization(head) is None
    kept = fusion(states, mask)
    assert torch.equal(kept[..., [1, 7, 20]], full[..., [1, 7, 20]])
    assert int(kept[0, 0].count_nonzero()) == 3
    assert fusion.active_layers() == (0, 1, 3)
    assert fusion.importance().tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


def test_features_are_scored_by_squares_over_all_classes():
    """One class with 5 is worth more than three classes with 2.8, though their sum is larger."""
    fusion, head = Head2Toe(fraction=1 / 24).build(4, 6), linear_head(24)
    with torch.no_grad():
        head.output.weight.zero_()
        head.output.weight[0, 2] = -5
        head.output.weight[:, 9] = 2.8
    fusion.on_epoch_end(0.5, head)
    assert fusion.kept.nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize(("fraction", "count"), [(1e-6, 1), (0.1, 2), (0.5, 12), (1.0, 24)])
def test_the_fraction_is_of_all_features(fraction: float, count: int):
    fusion, head = scored(fraction)
    fusion.on_epoch_end(0.5, head)
    assert int(fusion.kept.sum()) == count


def test_features_are_chosen_once_at_the_first_epoch_that_ends_the_first_stage():
    fusion, head = scored(score_share=0.6)
    assert fusion.on_epoch_end(0.25, head) is False
    assert fusion.on_epoch_end(0.5, head) is False
    assert not bool(fusion.selected)
    assert fusion.on_epoch_end(0.75, head) is True
    kept = fusion.kept.clone()
    with torch.no_grad():
        head.output.weight[:, 11] = 99
    assert fusion.on_epoch_end(1.0, head) is False
    assert torch.equal(fusion.kept, kept)


def test_without_an_epoch_left_the_head_stays_and_it_is_said(caplog: pytest.LogCaptureFixture):
    fusion, head = scored()
    before = head.output.weight.clone()
    with caplog.at_level(logging.WARNING):
        assert fusion.on_epoch_end(1.0, head) is False
    assert "head2toe: training ended before features were selected; all are kept" in caplog.text
    assert torch.equal(head.output.weight, before)
    assert bool(fusion.kept.all())


def test_importances_are_shares_of_the_score_while_features_are_scored():
    fusion, head = scored()
    assert fusion.importance().tolist() == pytest.approx([0.25] * 4)
    with torch.no_grad():
        head.output.weight.zero_()
    fusion.on_epoch_end(0.1, head)
    assert fusion.importance().tolist() == pytest.approx([0.25] * 4)  # no score to share
    with torch.no_grad():
        head.output.weight[0, 0], head.output.weight[1, 23] = 3, 1
    fusion.on_epoch_end(0.2, head)
    assert fusion.importance().tolist() == pytest.approx([0.9, 0, 0, 0.1])


def test_the_stage_is_saved():
    fusion, head = scored(fraction=0.3)
    fusion.on_epoch_end(0.5, head)
    other = Head2Toe(fraction=0.3).build(4, 6)
    other.load_state_dict(fusion.state_dict())
    states, mask = states_and_mask()
    assert torch.equal(other(states, mask), fusion(states, mask))
    assert other.regularization(head) is None
    assert other.on_epoch_end(0.6, head) is False
    assert torch.equal(other.importance(), fusion.importance())


def test_two_stages_find_the_layer_that_knows():
    """One coordinate of layer 2 tells the classes apart; the rest is noise."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (256,), generator=rng)
    states = torch.randn(4, 256, 3, 8, generator=rng)
    states[2, :, :, 5] += 3.0 * (2 * labels[:, None] - 1)
    mask = torch.ones(256, 3, dtype=torch.bool)
    fusion, head = Head2Toe(fraction=2 / 32, group_lasso=0.02).build(4, 8), linear_head(32, 2)
    for epoch in range(1, 5):
        optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(40):
            optimizer.zero_grad()
            penalty = fusion.regularization(head)
            (head.loss(head(fusion(states, mask), mask), labels) + (0 if penalty is None else penalty)).backward()
            optimizer.step()
        fusion.on_epoch_end(epoch / 4, head)
    assert bool(fusion.kept[2 * 8 + 5])
    assert int(fusion.kept.sum()) == 2
    assert float((head(fusion(states, mask), mask).argmax(1) == labels).float().mean()) > 0.95


@pytest.mark.parametrize(
    ("settings", "head"),
    [
        ({}, SequenceClassification(2)),
        ({"per_token": True}, TokenClassification(2, attention_heads=1, feedforward=4)),
    ],
)
def test_a_head_that_is_more_than_one_linear_map_is_refused(settings: dict[str, Any], head: Any):
    with pytest.raises(ConfigError, match=r"head2toe: the head is not a single linear map.*Set pooling=\"first\""):
        Head2Toe(**settings).build(2, 4).check_head(head.build(8))


def test_a_head_without_a_linear_map_is_refused():
    with pytest.raises(ConfigError, match="head2toe: the head is not a single linear map"):
        Head2Toe().build(2, 4).check_head(nn.Identity())


def test_features_of_a_text_are_not_for_tokens():
    head = TokenClassification(2, encoder_layers=0)
    with pytest.raises(ConfigError, match=r"head2toe: the head labels tokens;.*Set per_token=True"):
        Head2Toe().build(2, 4).check_head(head.build(8))
    Head2Toe(per_token=True).build(2, 4).check_head(head.build(8))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"fraction": 0.0}, r"head2toe: fraction is 0\.0; it must be"),
        ({"fraction": 1.5}, r"head2toe: fraction is 1\.5; it must be"),
        ({"score_share": 0.0}, r"head2toe: score_share is 0\.0; it must be"),
        ({"score_share": 1.0}, r"head2toe: score_share is 1\.0; it must be"),
        ({"group_lasso": -1.0}, r"head2toe: group_lasso is -1\.0; it must be"),
        ({"chunks": 0}, r"head2toe: chunks is 0; it must be"),
        (
            {"chunks": 2, "per_token": True},
            r"head2toe: chunks is 2 with per_token; chunks are parts of a whole text",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(settings: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        Head2Toe(**settings)
