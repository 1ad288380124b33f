"""Gated: its initialisation, and the importances that it sums up while it reads."""

from __future__ import annotations

import pytest
import torch
from tests.support.formulas import view_of

from lamina.errors import ConfigError
from lamina.fusion.gated import Gated, GatedFusion


def by_first_feature(layers: int = 2) -> GatedFusion:
    """A gate whose weight is almost the state's first feature, which is large: gelu(x) is x there."""
    fusion = Gated(hidden=1).build(layers, 2)
    with torch.no_grad():
        fusion.inner.weight.copy_(torch.tensor([[1.0, 0.0]]))
        for parameter in (fusion.inner.bias, fusion.outer.bias):
            parameter.zero_()
        fusion.outer.weight.fill_(1)
    return fusion.eval()


def states_of(*first: list[float]) -> torch.Tensor:
    """One row; per layer the first features of its tokens, the second ones all 1."""
    return torch.stack([torch.tensor([[[10 * value, 1.0] for value in layer]]) for layer in first])


def test_it_starts_as_the_mean():
    fusion = Gated().build(4, 8)
    states = torch.randn(4, 2, 3, 8)
    torch.testing.assert_close(fusion(states), states.mean(0))
    torch.testing.assert_close(fusion.importance(), torch.full((4,), 0.25))


def test_it_leaves_its_start():
    fusion = Gated(hidden=4).build(3, 8)
    optimizer = torch.optim.SGD(fusion.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in fusion.parameters()]
    for _ in range(2):  # the first step moves only what follows the hidden layer
        optimizer.zero_grad()
        fusion(torch.randn(3, 2, 4, 8)).square().sum().backward()
        optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, fusion.parameters(), strict=True))


def test_a_token_sets_its_own_weights():
    states = states_of([1, 3], [2, 0])
    got = by_first_feature()(states)
    torch.testing.assert_close(got, torch.tensor([[[100 + 400.0, 10 + 20], [900, 30]]]))


def test_one_gate_serves_all_layers():
    one, other = (torch.nn.Module.state_dict(Gated(hidden=3).build(layers, 4)) for layers in (2, 9))
    assert {key: value.shape for key, value in one.items()} == {key: value.shape for key, value in other.items()}
    assert set(one) == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}


def test_importances_are_those_of_the_real_tokens_that_were_read():
    fusion = by_first_feature()
    fusion(states_of([1, 3, 50], [3, 1, 0]), torch.tensor([[True, True, False]]))
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.5, 0.5]))
    fusion(states_of([8], [0]))  # 12 of 16 by now
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.75, 0.25]))


def test_a_negative_weight_counts_for_its_size():
    fusion = by_first_feature()
    with torch.no_grad():
        fusion.outer.weight.fill_(-1)
    fusion(states_of([1], [3]))
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.25, 0.75]))


def test_a_change_of_mode_starts_a_new_count():
    fusion = by_first_feature()
    fusion(states_of([1], [0]))
    fusion.eval()
    torch.testing.assert_close(fusion.importance(), torch.tensor([1.0, 0.0]))
    torch.nn.Sequential(fusion).train()  # as a part of something larger
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.5, 0.5]))
    fusion(states_of([0], [1]))
    fusion.train()  # as it was
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.0, 1.0]))
    fusion.eval()
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.5, 0.5]))
    assert not fusion.importance().requires_grad


def test_importances_of_no_token_are_equal():
    fusion = by_first_feature()
    fusion(states_of([1], [0]), torch.tensor([[False]]))
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.5, 0.5]))


def test_padding_that_is_not_a_number_is_not_counted():
    fusion = by_first_feature()
    fusion(states_of([1, float("nan")], [3, float("nan")]), torch.tensor([[True, False]]))
    torch.testing.assert_close(fusion.importance(), torch.tensor([0.25, 0.75]))


def test_what_was_read_is_neither_saved_nor_part_of_the_result():
    fusion = by_first_feature()
    states = states_of([1, 2], [3, 4])
    before, saved = fusion(states), fusion.state_dict()
    assert torch.equal(fusion(states), before)
    assert "amounts" not in saved
    fresh = Gated(hidden=1).build(2, 2).eval()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh(states), before)


def test_readers_that_run_as_one_count_for_themselves():
    members = [by_first_feature(), by_first_feature()]
    with torch.no_grad():
        members[1].outer.bias.fill_(20)
    stream = members[0].stream(members)
    for index, state in enumerate(states_of([1], [3])):
        stream.step(index, view_of(state))
    stream.finish(torch.tensor([[True]]))
    torch.testing.assert_close(members[0].importance(), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(members[1].importance(), torch.tensor([30 / 80, 50 / 80]))


def test_what_may_run_as_one():
    one = Gated(hidden=4).build(3, 8)
    assert one.group() == Gated(hidden=4).build(3, 8).group()
    assert one.group() != Gated(hidden=5).build(3, 8).group()
    assert one.group() != Gated(hidden=4).build(3, 16).group()
    assert one.group() != Gated(hidden=4).build(3, 8).double().group()


def test_a_stream_keeps_one_accumulator_and_its_weights():
    members = [Gated(hidden=4).build(3, 16) for _ in range(2)]
    stream = members[0].stream(members)
    for index in range(3):
        stream.step(index, view_of(torch.randn(2, 5, 16)))
    kept = [value for value in vars(stream).values() if isinstance(value, torch.Tensor) and value.ndim > 2]
    assert [tuple(one.shape) for one in kept] == [(2, 2, 5, 16)]


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="gated: hidden is 0; it must be"):
        Gated(hidden=0)
    with pytest.raises(ConfigError, match="fusion: layers is 0; it must be"):
        Gated().build(0, 8)
