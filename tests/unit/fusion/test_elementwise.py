"""Elementwise: its initialisation and its importances."""

from __future__ import annotations

import pytest
import torch
from tests.support.formulas import view_of

from lamina.errors import ConfigError
from lamina.fusion.base import normalized
from lamina.fusion.elementwise import Elementwise


def test_it_starts_as_the_mean():
    fusion = Elementwise().build(4, 8)
    states = torch.randn(4, 2, 3, 8)
    torch.testing.assert_close(fusion(states), states.mean(0))
    torch.testing.assert_close(fusion.importance(), torch.full((4,), 0.25))


def test_each_feature_of_each_layer_has_its_own_weight():
    fusion = Elementwise().build(2, 3)
    with torch.no_grad():
        fusion.scales.copy_(torch.tensor([[1.0, 2.0, 0.0], [10.0, -1.0, 3.0]]))
    states = torch.tensor([[1.0, 1.0, 1.0], [2.0, 3.0, 4.0]]).view(2, 1, 1, 3)
    assert fusion(states).flatten().tolist() == [21, -1, 12]


def test_importances_are_shares_of_absolute_values():
    fusion = Elementwise().build(2, 2)
    with torch.no_grad():
        fusion.scales.copy_(torch.tensor([[1.0, -1.0], [4.0, 2.0]]))
    assert fusion.importance().tolist() == [0.25, 0.75]


def test_shares_of_nothing_are_equal():
    assert normalized(torch.zeros(4)).tolist() == [0.25] * 4
    assert normalized(torch.tensor([0.0, 1e-30])).tolist() == [0, 1]


def test_it_reads_all_layers_and_keeps_their_width():
    assert Elementwise().selector() == "all"
    fusion = Elementwise().build(5, 7)
    assert fusion.dim == 7
    assert [tuple(parameter.shape) for parameter in fusion.parameters()] == [(5, 7)]


def test_what_may_run_as_one():
    one = Elementwise().build(3, 8)
    assert one.group() == Elementwise(layers="1-").build(3, 8).group()
    assert one.group() != Elementwise().build(3, 16).group()
    assert one.group() != Elementwise().build(3, 8).double().group()


def test_a_stream_keeps_one_accumulator():
    members = [Elementwise().build(3, 16) for _ in range(2)]
    stream = members[0].stream(members)
    for index in range(3):
        stream.step(index, view_of(torch.randn(2, 5, 16)))
    kept = [value for value in vars(stream).values() if isinstance(value, torch.Tensor) and value.ndim > 2]
    assert [tuple(one.shape) for one in kept] == [(2, 2, 5, 16)]


def test_a_stream_that_was_fed_nothing_says_so():
    fusion = Elementwise().build(3, 16)
    with pytest.raises(ConfigError, match="fusion: no state was fed; feed every active layer before finish"):
        fusion.stream([fusion]).finish(torch.ones(1, 1, dtype=torch.bool))


def test_no_layers_are_refused():
    with pytest.raises(ConfigError, match="fusion: layers is 0; it must be"):
        Elementwise().build(0, 8)
