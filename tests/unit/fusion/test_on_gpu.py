"""Layers that a GPU computes in one operation, where a CPU computes them one by one; here a CPU stands for the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.support.formulas import stir_
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.fusion import ada_layers, base, pooled_layers
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.base import Fusion, FusionConfig, LayerView
from lamina.fusion.paired_layers import PairedLayers
from lamina.fusion.pooled_layers import PooledLayers

LAYERS, TOKENS, WIDTH = 11, 200, 64


class Operations(TorchDispatchMode):
    """Counts the operations that torch starts."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        self.count += 1
        return func(*args, **kwargs or {})


def read(fusions: Sequence[Fusion], states: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the features of several fusions for padded pairs of texts, and the number of operations."""
    segments = (torch.arange(TOKENS) // (TOKENS // 2) + 1).expand(len(mask), -1)
    with Operations() as operations:
        stream = fusions[0].stream(fusions)
        for index, state in enumerate(states):
            stream.step(index, LayerView(state, mask, segments))
        return stream.finish(mask), operations.count


@torch.no_grad()
@pytest.mark.parametrize("limit", [None, 3 * 2 * TOKENS * WIDTH])
@pytest.mark.parametrize("config", [AdaLayers(dim=4, layers="all"), PooledLayers(dim=4), PairedLayers(dim=4)])
def test_layers_computed_together_are_those_computed_one_by_one(
    config: FusionConfig, limit: int | None, monkeypatch: pytest.MonkeyPatch
):
    """`limit`: elements of states that are kept at most; None: as many as a GPU keeps."""
    fusions = [config.build(LAYERS, WIDTH).eval() for _ in range(3)]
    for number, fusion in enumerate(fusions):
        stir_(fusion, number)
    states = torch.randn(LAYERS, 2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1, 150:] = False
    monkeypatch.setattr(pooled_layers, "_KEPT", 0)
    one_by_one, many = read(fusions, states, mask)
    for module in (ada_layers, pooled_layers):
        monkeypatch.setattr(module, "is_on_gpu", lambda _: True)
        if limit is not None:
            monkeypatch.setattr(module, "KEPT_ON_GPU", limit)
    together, few = read(fusions, states, mask)
    torch.testing.assert_close(together, one_by_one, rtol=3e-6, atol=3e-6)
    assert few < many / 2 if limit is None else few < many + 2 * LAYERS


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_and_dropout_are_those_of_layers_computed_one_by_one(dropout: float, monkeypatch: pytest.MonkeyPatch):
    states = torch.randn(LAYERS, 2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(TOKENS) < torch.tensor([[TOKENS], [150]])
    fusions = [PooledLayers(dim=4, dropout=dropout).build(LAYERS, WIDTH).train(dropout > 0) for _ in range(3)]
    for number, fusion in enumerate(fusions):
        stir_(fusion, number)
    target = torch.randn(3, 2, TOKENS, 4, generator=torch.Generator().manual_seed(3))

    def learn() -> tuple[torch.Tensor, int, list[torch.Tensor | None]]:
        for number, fusion in enumerate(fusions):
            fusion.zero_grad()
            fusion.generator = torch.Generator().manual_seed(number)
        features, count = read(fusions, states, mask)
        (features * target).sum().backward()
        return features, count, [parameter.grad for fusion in fusions for parameter in fusion.parameters()]

    monkeypatch.setattr(pooled_layers, "_KEPT", 0)
    monkeypatch.setattr(pooled_layers, "_TOGETHER", 1)
    one_by_one, many, alone = learn()
    monkeypatch.setattr(pooled_layers, "is_on_gpu", lambda _: True)
    together, few, joint = learn()
    torch.testing.assert_close(together, one_by_one, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(joint, alone, rtol=3e-5, atol=3e-5)
    assert all(gradient is not None and gradient.any() for gradient in alone)
    assert few < many / 2


@torch.no_grad()
@pytest.mark.parametrize(("members", "is_together"), [(1, True), (3, False)])
def test_features_of_many_readers_count_towards_the_limit(
    members: int, is_together: bool, monkeypatch: pytest.MonkeyPatch
):
    states, mask = torch.zeros(LAYERS, 2, TOKENS, WIDTH), torch.ones(2, TOKENS, dtype=torch.bool)
    monkeypatch.setattr(ada_layers, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(ada_layers, "KEPT_ON_GPU", states.numel())
    fusions = [AdaLayers(dim=WIDTH // 2, layers="all").build(LAYERS, WIDTH).eval() for _ in range(members)]
    assert (read(fusions, states, mask)[1] < 4 * LAYERS) == is_together


@torch.no_grad()
def test_scores_of_many_queries_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch):
    states, mask = torch.zeros(LAYERS, 2, TOKENS, WIDTH), torch.ones(2, TOKENS, dtype=torch.bool)
    monkeypatch.setattr(pooled_layers, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(pooled_layers, "KEPT_ON_GPU", states.numel() * 3 // 2)
    few, many = (PooledLayers(dim=4, queries=queries).build(LAYERS, WIDTH).eval() for queries in (2, 2 * WIDTH))
    assert read([few], states, mask)[1] < read([many], states, mask)[1]


def test_only_accelerators_count_as_a_gpu():
    assert not base.is_on_gpu(torch.zeros(1))
    assert not base.is_on_gpu(torch.zeros(1, device="meta"))
