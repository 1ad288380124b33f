from __future__ import annotations

import pytest
import torch
from tests.support.formulas import paired_layers, stir_

from lamina.errors import ConfigError
from lamina.fusion.paired_layers import PairedLayers
from lamina.heads.token_classification import TokenClassification


def test_parameter_counts():
    """At MiniLM's size: 7 states x (1 query + 64 rows of three parts) x 384, the matches' map, and a score each."""
    fusion = PairedLayers().build(7, 384)
    count = 7 * (1 + 64 * 3) * 384 + 7 * 64 * 8 + 64 + 7
    assert sum(parameter.numel() for parameter in fusion.parameters()) == count
    assert list(fusion.state_dict()) == ["queries", "projection", "matching", "bias", "scores"]


@torch.no_grad()
def test_it_computes_its_formula_on_pairs():
    fusion = PairedLayers(dim=4, heads=2).build(3, 8).eval()
    stir_(fusion, 0)
    states = torch.randn(3, 4, 7, 8, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(4, 7, dtype=torch.bool)
    mask[1, 5:], mask[2, :2] = False, False
    segments = torch.tensor(
        [[0, 1, 1, 0, 2, 2, 0], [0, 1, 0, 2, 2, 2, 2], [1, 1, 1, 1, 0, 2, 2], [0, 1, 1, 1, 1, 1, 0]]
    )
    got = fusion(states, mask, segments)
    torch.testing.assert_close(got, paired_layers(fusion, states, mask, segments), rtol=2e-6, atol=2e-6)
    assert not torch.allclose(got, fusion(states, mask))


@torch.no_grad()
def test_two_texts_that_change_places_are_as_far_apart():
    """Lengths and directions aside, which have numbers of their own: here texts are of one length and match alike."""
    fusion = PairedLayers(dim=4, heads=2).build(1, 8).eval()
    stir_(fusion, 0)
    fusion.matching.zero_()
    states = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(1, 4, dtype=torch.bool)
    one, other = fusion(states, mask, torch.tensor([[1, 1, 2, 2]])), fusion(states, mask, torch.tensor([[2, 2, 1, 1]]))
    torch.testing.assert_close(one, other)


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match="paired_layers: 5 heads for states of width 12; they must divide it"):
        PairedLayers(heads=5).build(2, 12)


def test_a_head_that_labels_tokens_is_refused():
    head = TokenClassification(["a", "b"], encoder_layers=0).build(4)
    with pytest.raises(ConfigError, match="the head labels tokens; these features are of a whole pair"):
        PairedLayers(dim=4, heads=2).build(2, 8).check_head(head)


@pytest.mark.parametrize(
    ("settings", "name"), [({"dim": 0}, "dim"), ({"heads": 0}, "heads"), ({"dropout": 1}, "dropout")]
)
def test_settings_out_of_range(settings: dict[str, int], name: str):
    with pytest.raises(ConfigError, match=f"paired_layers: {name} is"):
        PairedLayers(**settings)
