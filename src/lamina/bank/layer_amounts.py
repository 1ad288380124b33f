"""Measure how much each layer contributes to a reader's features at each token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.fusion.base import Fusion, InputWeighted, LayerView, WeightedSum
from lamina.fusion.concat import ConcatFusion
from lamina.fusion.pooled_layers import PooledLayersFusion, PooledTokens, token_shares
from lamina.layers.preserve import evaluating

if TYPE_CHECKING:
    from lamina.bank import ReaderBank, ReaderModule


def layer_amounts(bank: ReaderBank, names: Sequence[str], batch: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the contribution of each layer to the features at each token of one text, for some readers of a bank.

    `lamina.studies.contributions` says how it is measured for each fusion. The contributions of a token need not sum to
    1; divide them by their sum over the layers to get shares. The bank is in eval mode meanwhile, without gradients.

    Args:
        bank: The readers and their model.
        names: Names of readers.
        batch: One text as inputs of the model, on the bank's device.

    Returns:
        Reader name -> contributions `[layers, tokens]`; None for a reader whose fusion does not allow this measurement.
    """
    wanted: dict[str, set[int]] = {}
    for name in names:
        wanted.setdefault(bank[name].stack, set()).update(bank[name].layers)
    with evaluating(bank), torch.no_grad():
        states = bank.record_states({stack: sorted(layers) for stack, layers in wanted.items()}, batch)
        return {name: _amounts(bank[name], states[bank[name].stack]) for name in names}


def _amounts(reader: ReaderModule, states: Mapping[int, Tensor]) -> Tensor | None:
    """Return the contributions `[layers, tokens]` of one reader's layers, from their states; None if not measurable."""
    fusion, own = reader.fusion, [states[layer] for layer in reader.layers]
    if isinstance(fusion, InputWeighted):
        return _weights(fusion, own)
    if isinstance(fusion, PooledLayersFusion) and not fusion.config.reads_pairs:
        return torch.stack([_pooled(fusion, index, state) for index, state in enumerate(own)])
    if isinstance(fusion, ConcatFusion):
        maps = zip(own, fusion.projection, strict=True)
        return torch.stack([F.linear(state[0].to(weight.dtype), weight).float().norm(dim=-1) for state, weight in maps])
    if isinstance(fusion.stream([fusion]), WeightedSum):
        return torch.stack([_run(fusion, {index: state})[0].float().norm(dim=-1) for index, state in enumerate(own)])
    return None


def _run(fusion: Fusion, states: Mapping[int, Tensor]) -> Tensor:
    """Return the features that a fusion computes from only some of its layers (index of the layer -> states)."""
    stream = fusion.stream([fusion])
    for index, state in states.items():
        stream.step(index, LayerView(state, _every(state)))
    return stream.finish(_every(next(iter(states.values()))))[0]


def _every(state: Tensor) -> Tensor:
    """Return an all-True mask for states `[1, tokens, width]` without padding."""
    return torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)


def _weights(fusion: InputWeighted, states: Sequence[Tensor]) -> Tensor:
    """Return the absolute weight `[layers, tokens]` that the fusion gives each layer at each token.

    A copy of the fusion computes them, so that the running sums of the original do not change.
    """
    seen: list[Tensor] = []

    def observe(weights: Tensor, mask: Tensor) -> None:
        del mask
        seen.append(weights.detach())

    twin = copy(fusion)
    twin.observe = observe
    _run(twin, dict(enumerate(states)))
    return seen[0][:, 0].float().abs()


def _pooled(fusion: PooledLayersFusion, index: int, state: Tensor) -> Tensor:
    """Return the layer's importance times the attention of the layer's queries to each token, `[tokens]`."""
    queries, mask = fusion.queries[index].unsqueeze(0), _every(state)
    normed = LayerView(state, mask).normed.to(queries.dtype)
    (shares,) = token_shares(normed, queries, [PooledTokens.from_mask(mask)])
    return fusion.importance()[index].float() * shares[0, 0].float().mean(0)
