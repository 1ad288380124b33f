"""ScalarMix and its layer dropout."""

from __future__ import annotations

import pytest
import torch
from tests.support.formulas import view_of

from lamina.errors import ConfigError
from lamina.fusion.scalar_mix import ScalarMix


def test_it_starts_as_the_mean():
    fusion = ScalarMix().build(4, 8)
    states = torch.randn(4, 2, 3, 8)
    torch.testing.assert_close(fusion(states), states.mean(0))


def test_dropped_layers_give_their_share_to_the_others():
    fusion = ScalarMix(layer_dropout=0.5).build(4, 1).train()
    fusion.generator = torch.Generator().manual_seed(0)
    states = torch.tensor([1.0, 10.0, 100.0, 1000.0]).view(4, 1, 1, 1)
    seen = {round(fusion(states).item(), 3) for _ in range(200)}
    subsets = [[value for bit, value in enumerate((1, 10, 100, 1000)) if number >> bit & 1] for number in range(1, 16)]
    assert seen == {round(sum(subset) / len(subset), 3) for subset in subsets}  # none empty: then all are kept


def test_layers_are_dropped_while_training_only_and_by_its_own_generator():
    fusion = ScalarMix(layer_dropout=0.9).build(4, 2)
    states = torch.randn(4, 1, 1, 2)
    torch.testing.assert_close(fusion.eval()(states), states.mean(0))
    fusion.train().generator = torch.Generator().manual_seed(3)
    before = torch.get_rng_state()
    first = [fusion(states) for _ in range(5)]
    assert torch.equal(torch.get_rng_state(), before)
    fusion.generator.manual_seed(3)
    assert all(torch.equal(fusion(states), one) for one in first)
    assert any(not torch.equal(one, first[0]) for one in first)


def test_without_dropout_no_random_number_is_drawn():
    fusion = ScalarMix().build(3, 2).train()
    fusion.generator = torch.Generator().manual_seed(0)
    before = fusion.generator.get_state()
    fusion(torch.randn(3, 1, 1, 2))
    assert torch.equal(fusion.generator.get_state(), before)


@pytest.mark.parametrize("trained", [(), (1,), (0, 1, 2)])
def test_the_weights_have_the_same_gradient_over_frozen_states_as_over_trained_ones(trained: tuple[int, ...]):
    fusion = ScalarMix().build(3, 4).train()
    states = torch.randn(3, 2, 5, 4)
    read = [state.clone().requires_grad_(index in trained) for index, state in enumerate(states)]
    stream = fusion.stream([fusion])
    for index, state in enumerate(read):
        stream.step(index, view_of(state))
    (got,) = stream.finish(torch.ones(2, 5, dtype=torch.bool))
    got.square().sum().backward()
    scores = fusion.scores.detach().requires_grad_()
    weights = fusion.scale.detach() * scores.softmax(0)
    expected = torch.einsum("l,lbtw->btw", weights, states)
    torch.testing.assert_close(got, expected)
    (slope,) = torch.autograd.grad(expected.square().sum(), scores)
    assert slope.abs().sum() > 0
    torch.testing.assert_close(fusion.scores.grad, slope)
    for index, state in enumerate(read):
        if index in trained:
            torch.testing.assert_close(state.grad, 2 * expected.detach() * weights[index].detach())


def test_values_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"scalar_mix: layer_dropout is 1\.0; it must be"):
        ScalarMix(layer_dropout=1.0)
