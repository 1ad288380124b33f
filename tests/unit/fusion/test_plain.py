"""LastLayer and Mean, the fusions without parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean


def test_the_last_layer_comes_back_bit_for_bit():
    fusion = LastLayer().build(4, 8)
    states = torch.randn(4, 2, 3, 8)
    assert torch.equal(fusion(states), states[-1])
    assert fusion.active_layers() == (3,)
    assert LastLayer().selector() == -1


def test_the_mean_shares_equally():
    fusion: Any = Mean().build(4, 8)
    assert torch.equal(fusion.importance(), torch.full((4,), 0.25))


def test_neither_has_parameters():
    assert not list(LastLayer().build(4, 8).parameters())
    assert not list(Mean().build(4, 8).parameters())


@pytest.mark.parametrize("config", [LastLayer(), Mean()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_features_follow_the_bank_to_another_dtype(config: LastLayer | Mean, dtype: torch.dtype):
    fusion = config.build(4, 8)
    states = torch.randn(4, 2, 3, 8, dtype=dtype)
    assert fusion(states).dtype == torch.float32
    assert fusion.to(dtype)(states).dtype == dtype
    assert not fusion.state_dict()
