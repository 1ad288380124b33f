"""Dropout in which every reader has its own random numbers."""

from __future__ import annotations

import pytest
import torch

from lamina.fusion.base import dropout


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_goes_is_p_and_the_mean_stays(p: float):
    dropped = dropout(torch.ones(2, 400, 251), p, [seeded(0), seeded(1)])
    assert (dropped == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert len(dropped.unique()) == 2


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_member_is_dropped_by_its_own_generator_alone(axis: int):
    part = torch.randn(5, 7, 3).movedim(2, axis)
    together = dropout(part, 0.4, [seeded(3), seeded(4), seeded(5)], axis=axis)
    for at, seed in enumerate((3, 4, 5)):
        alone = dropout(part.narrow(axis, at, 1), 0.4, [seeded(seed)], axis=axis)
        assert torch.equal(together.narrow(axis, at, 1), alone)
    assert not torch.equal(together.select(axis, 0) == 0, together.select(axis, 1) == 0)


def test_gradients_pass_where_values_do():
    part = torch.ones(1, 64, requires_grad=True)
    dropped = dropout(part, 0.5, [seeded(0)])
    dropped.sum().backward()
    assert torch.equal(part.grad, dropped.detach())


def test_nothing_goes_at_zero():
    part = torch.randn(1, 4)
    assert dropout(part, 0.0, [None]) is part


def test_the_precision_stays():
    assert dropout(torch.ones(1, 9, dtype=torch.bfloat16), 0.5, [None]).dtype is torch.bfloat16
