"""SingleLayer: the baseline whose projection is trained."""

from __future__ import annotations

import pytest
import torch
from tests.support.training import tiny_bank, train, weights, yes_no

from lamina import Reader, SequenceClassification
from lamina.errors import ConfigError, LayerIndexError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.single_layer import SingleLayer


def test_it_selects_one_layer():
    assert SingleLayer(layer=4).selector() == 4
    assert SingleLayer().selector() == -1


@pytest.mark.parametrize(("layer", "index"), [(0, 0), (2, 2), (-1, 3), (-4, 0)])
def test_of_several_states_it_reads_its_layer(layer: int, index: int):
    fusion = SingleLayer(layer=layer).build(4, 8)
    assert fusion.active_layers() == (index,)
    assert fusion.weights().tolist() == [float(i == index) for i in range(4)]


@pytest.mark.parametrize("layer", [0, 3, -1])
def test_it_reads_a_single_state(layer: int):
    assert SingleLayer(layer=layer).build(1, 8).active_layers() == (0,)


def test_it_is_ada_layers_of_one_layer():
    single, ada = SingleLayer(dim=8).build(1, 16).eval(), AdaLayers(dim=8).build(1, 16).eval()
    with torch.no_grad():
        single.projection.copy_(ada.projection)
    states = torch.randn(1, 2, 3, 16)
    assert torch.equal(single(states), ada(states))


def test_its_projection_learns():
    fusion = SingleLayer(dim=8).build(1, 16)
    fusion(torch.randn(1, 2, 3, 16)).square().sum().backward()
    assert fusion.projection.grad is not None
    assert fusion.projection.grad.abs().sum() > 0


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="single_layer: dim is 0"):
        SingleLayer(dim=0)
    with pytest.raises(ConfigError, match="single_layer: dropout is 1"):
        SingleLayer(dropout=1)
    with pytest.raises(LayerIndexError, match="single_layer: layer 9 does not exist; the model has 4 layers"):
        SingleLayer(layer=9).build(4, 8)


def test_a_frozen_projection_keeps_its_start_and_its_head_learns():
    task = yes_no()
    config = SingleLayer(dim=8, dropout=0.0, frozen=True)
    bank = tiny_bank({"a": Reader(config, SequenceClassification(task.labels, pooling="mean", dropout=0.0))})
    before = weights(bank, "a")
    train(bank, {"a": task})
    after = weights(bank, "a")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not [name for name in changed if "projection" in name]
