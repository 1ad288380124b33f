"""AdaLayers: its initialisation, its cutoff and its regulariser."""

from __future__ import annotations

import math

import pytest
import torch

from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers


def test_it_starts_with_equal_importances():
    fusion = AdaLayers().build(24, 8)
    assert fusion.projection.shape == (24, 64, 8)
    assert torch.equal(fusion.scores, torch.ones(24))
    torch.testing.assert_close(fusion.importance(), torch.full((24,), 1 / 24))


def test_projections_start_as_a_linear_map_does():
    fusion = AdaLayers(dim=200).build(3, 64)
    bound = 1 / math.sqrt(64)
    assert fusion.projection.abs().max() <= bound
    assert fusion.projection.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not torch.equal(fusion.projection[0], fusion.projection[1])


def test_the_default_leaves_the_embeddings_out():
    assert AdaLayers().selector() == "1-"


def test_the_entropy_of_24_equal_layers():
    fusion = AdaLayers(entropy=0.5).build(24, 8)
    penalty = fusion.regularization()
    assert penalty is not None
    assert penalty.item() == pytest.approx(0.5 * 3.178054 / 24, rel=1e-6)


def test_the_entropy_of_unequal_layers():
    fusion = AdaLayers(entropy=2.0, alpha=1.0).build(3, 8)
    with torch.no_grad():
        fusion.scores.copy_(torch.log(torch.tensor([0.5, 0.25, 0.25])))
    penalty = fusion.regularization()
    assert penalty is not None
    assert penalty.item() == pytest.approx(2.0 * 1.5 * math.log(2) / 3, rel=1e-6)
    penalty.backward()
    assert fusion.scores.grad is not None
    assert fusion.scores.grad[0] < 0 < fusion.scores.grad[1]  # a smaller penalty has a sharper peak


def test_the_entropy_is_that_after_the_cutoff():
    fusion = AdaLayers(entropy=1.0, alpha=1.0, cutoff=0.3).build(3, 8)
    with torch.no_grad():
        fusion.scores.copy_(torch.log(torch.tensor([0.4, 0.4, 0.2])))
    penalty = fusion.regularization()
    assert penalty is not None
    assert penalty.item() == pytest.approx(math.log(2) / 3, rel=1e-6)  # two halves and a zero
    penalty.backward()
    assert fusion.scores.grad is not None
    assert bool(fusion.scores.grad.isfinite().all())  # 0 log 0 has no derivative: a NaN here would end the training


def test_the_entropy_of_a_layer_whose_share_underflows_has_a_gradient():
    fusion = AdaLayers(entropy=1.0).build(3, 8)
    with torch.no_grad():
        fusion.scores.copy_(torch.tensor([1.0, 1.0, -2.0]))  # times alpha 64: exp(-192) is 0
    penalty = fusion.regularization()
    assert penalty is not None
    penalty.backward()
    assert fusion.scores.grad is not None
    assert bool(fusion.scores.grad.isfinite().all())


def test_no_entropy_is_no_penalty():
    assert AdaLayers().build(3, 8).regularization() is None


def test_the_cutoff_removes_a_layer_at_its_very_value():
    fusion = AdaLayers(alpha=1.0, cutoff=0.25).build(3, 8)
    with torch.no_grad():
        fusion.scores.copy_(torch.log(torch.tensor([0.5, 0.25, 0.25])))
    expected = torch.softmax(fusion.scores.detach(), 0)
    assert float(expected[1]) == 0.25
    assert fusion.importance().tolist() == [1, 0, 0]
    assert fusion.active_layers() == (0,)


def test_importances_are_shared_anew_after_the_cutoff():
    fusion = AdaLayers(alpha=1.0, cutoff=0.15).build(3, 8)
    with torch.no_grad():
        fusion.scores.copy_(torch.log(torch.tensor([0.6, 0.3, 0.1])))
    torch.testing.assert_close(fusion.importance(), torch.tensor([2 / 3, 1 / 3, 0.0]))


def test_a_layer_that_was_cut_gets_no_gradient():
    fusion = AdaLayers(dim=4, alpha=1.0, cutoff=0.15, dropout=0).build(3, 8)
    with torch.no_grad():
        fusion.scores.copy_(torch.log(torch.tensor([0.6, 0.3, 0.1])))
    fusion(torch.randn(3, 1, 2, 8)).square().sum().backward()
    assert fusion.projection.grad is not None
    assert fusion.projection.grad.abs().sum((1, 2)).gt(0).tolist() == [True, True, False]


@pytest.mark.parametrize("cutoff", [0.25, 0.3, 0.9])
def test_a_cutoff_that_would_remove_every_layer_is_refused(cutoff: float):
    with pytest.raises(ConfigError, match=f"ada_layers: cutoff is {cutoff} for 4 layers.* Use a cutoff below 0.25"):
        AdaLayers(cutoff=cutoff).build(4, 8)


def test_the_largest_possible_cutoff_is_accepted():
    assert AdaLayers(cutoff=0.2499).build(4, 8).active_layers() == (0, 1, 2, 3)


def test_alpha_makes_scores_count_for_more():
    mild, sharp = (AdaLayers(alpha=alpha).build(2, 8) for alpha in (1.0, 64.0))
    for fusion in (mild, sharp):
        with torch.no_grad():
            fusion.scores.copy_(torch.tensor([1.0, 1.01]))
    assert float(mild.importance()[1]) == pytest.approx(1 / (1 + math.exp(-0.01)), abs=1e-6)
    assert float(sharp.importance()[1]) == pytest.approx(1 / (1 + math.exp(-0.64)), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "ada_layers: dim is 0"),
        ({"dim": True}, "ada_layers: dim is True; it must be a whole number"),
        ({"dropout": 1.0}, r"ada_layers: dropout is 1.0; it must be"),
        ({"dropout": -0.1}, "ada_layers: dropout is -0.1"),
        ({"cutoff": -0.1}, "ada_layers: cutoff is -0.1"),
        ({"cutoff": 1.0}, "ada_layers: cutoff is 1.0; it must be"),
        ({"alpha": 0.0}, "ada_layers: alpha is 0.0; it must be positive"),
        ({"entropy": -1.0}, "ada_layers: entropy is -1.0; it must be at least 0"),
    ],
)
def test_values_that_cannot_be_are_refused(settings: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        AdaLayers(**settings)


def test_no_layers_are_refused():
    with pytest.raises(ConfigError, match="fusion: layers is 0"):
        AdaLayers().build(0, 8)


@pytest.mark.parametrize("tokens", [16, 200])  # projected together, and layer by layer
def test_half_precision_keeps_large_states(tokens: int):
    torch.manual_seed(0)
    fusion = AdaLayers(dim=8, dropout=0.0).build(layers=3, width=16).eval()
    states, mask = torch.randn(3, 1, tokens, 16), torch.ones(1, tokens, dtype=torch.bool)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        small, large = fusion(states, mask), fusion(1000 * states, mask)
    assert torch.isfinite(large).all()
    assert large.abs().mean() > small.abs().mean() / 2
