"""PooledLayers: each layer's tokens are pooled first, by learned attention, and then the layers are mixed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion.base import Fusion, FusionConfig, Stream, fed
from lamina.fusion.dropout import draw, drop
from lamina.fusion.layer_view import LayerView
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class PooledLayers(FusionConfig):
    """Pool the tokens of every layer by learned queries, then mix the layers; the features are of a whole text.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i p_i)))`, where slice h of `p_i` is slice h of the mean of
    the states `LayerNorm(z_i)` over the real tokens, weighted by `softmax_t(Q_ih . LayerNorm(z_it) / sqrt(width))`.
    Every token carries the same features, so the head is `SequenceClassification(labels, pooling="first")`. Nothing is
    projected per token, which makes this the cheapest fusion that learns what to take from every layer.

    Args:
        dim: Size of the features.
        heads: Queries per layer, each for its own slice of the state; must divide the width of the model.
        layers: Which layers.
        dropout: Probability, on each layer's features.

    Source:
        The two stages, tokens within each layer and then layers, are those of Meyoyan and Del Corro 2026,
        arXiv:2601.13288; the modules are not. Here each layer has queries of its own and one weight.
    """

    dim: int = 64
    heads: int = 8
    layers: Selector = "all"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("pooled_layers", "dim", self.dim, 1)
        check_range("pooled_layers", "heads", self.heads, 1)
        check_range("pooled_layers", "dropout", self.dropout, 0, 1, open_high=True)


def pool_tokens(
    states: Float[Tensor, "batch tokens width"],
    queries: Float[Tensor, "members heads width"],
    masks: Sequence[Bool[Tensor, "batch tokens"]],
) -> list[Float[Tensor, "members batch width"]]:
    """Means of states over the tokens of each mask, slice h weighted as query h says; 0 where a mask has no token."""
    scores = F.linear(states, queries.flatten(0, 1)) / math.sqrt(states.shape[-1])
    slices = states.unflatten(-1, (queries.shape[1], -1))
    means = []
    for mask in masks:
        shares = scores.masked_fill(~mask.unsqueeze(-1), torch.finfo(scores.dtype).min).softmax(1)
        shares = (shares * mask.any(1)[:, None, None]).unflatten(-1, queries.shape[:2])
        means.append(torch.einsum("btmh,bthd->mbhd", shares, slices).flatten(2))
    return means


class _PooledStream(Stream):
    """One product with all members' queries per layer; what is kept is `[batch, members, dim]`."""

    def __init__(self, members: Sequence[PooledLayersFusion]) -> None:
        self._members, self._config = members, members[0].config
        self._p = self._config.dropout if members[0].training else 0.0
        self._weights = torch.stack([member.scores.softmax(0) for member in members], dim=1).unsqueeze(-1).unbind(0)
        self._queries = torch.stack([member.queries for member in members], dim=1).unbind(0)
        self._kernels = torch.stack([member.projection for member in members], dim=1).unbind(0)
        self._total: Tensor | None = None

    def step(self, index: int, view: LayerView) -> None:
        queries, kernel, weights = self._queries[index], self._kernels[index], self._weights[index]
        [pooled] = pool_tokens(view.normed.to(kernel.dtype), queries, [view.mask])
        features = F.layer_norm(torch.bmm(pooled, kernel.mT), kernel.shape[1:2]).transpose(0, 1)
        features = F.gelu(features)
        if self._p > 0:
            generators = [member.generator for member in self._members]
            features = drop(features, self._p, draw(features.shape, generators, features.device, axis=1))
        part = features * weights
        self._total = part if self._total is None else self._total + part

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        total = fed(self._total).transpose(0, 1).unsqueeze(2)
        return list(total.expand(-1, -1, mask.shape[1], -1).unbind(0))


@final
class PooledLayersFusion(Fusion, config=PooledLayers):
    """The module of `PooledLayers`: `queries [layers, heads, width]`, `projection [layers, dim, width]`, `scores`."""

    stream_of: ClassVar = _PooledStream

    def __init__(self, config: PooledLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        if width % config.heads:
            raise ConfigError(f"pooled_layers: {config.heads} heads for states of width {width}; they must divide it.")
        self.queries = nn.Parameter(torch.zeros(layers, config.heads, width))  # at the start a plain mean
        self.projection = nn.Parameter(torch.empty(layers, config.dim, width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # what nn.Linear starts from
        self.scores = nn.Parameter(torch.zeros(layers))

    def group(self) -> Hashable:
        """Same shapes, same settings, same place."""
        return (super().group(), self.training, self.config.dropout, self.config.heads)

    def importance(self) -> Float[Tensor, " layers"]:
        """Share of each layer; sums to 1."""
        return self.scores.detach().softmax(0)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError unless the head reads a whole text."""
        if not getattr(head, "pools", False):
            raise ConfigError("pooled_layers: the head labels each token; these features are a whole text's.")
