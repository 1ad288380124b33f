"""The part PooledLayers and PairedLayers share: learned queries pool each layer's tokens, then layers are mixed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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


@dataclass(frozen=True)
class PoolingConfig(FusionConfig):
    """Settings of how tokens are pooled and layers mixed."""

    op: ClassVar[str]  # the name of the fusion

    dim: int = 64
    heads: int = 1
    layers: Selector = "all"
    dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.op, "dim", self.dim, 1)
        check_range(self.op, "heads", self.heads, 1)
        check_range(self.op, "dropout", self.dropout, 0, 1, open_high=True)


def token_shares(
    states: Float[Tensor, "batch tokens width"],
    queries: Float[Tensor, "members heads width"],
    masks: Sequence[Bool[Tensor, "batch tokens"]],
) -> Iterator[Float[Tensor, "batch tokens members heads"]]:
    """How much the queries take of each token of each mask; they sum to 1 over tokens, and are 0 for an empty mask."""
    scores = F.linear(states, queries.flatten(0, 1))  # undivided: at usual rates queries would else hardly move
    for mask in masks:
        shares = scores.masked_fill(~mask.unsqueeze(-1), torch.finfo(scores.dtype).min).softmax(1)
        yield (shares * mask.any(1)[:, None, None]).unflatten(-1, queries.shape[:2])


def pool_tokens(
    states: Float[Tensor, "batch tokens width"],
    queries: Float[Tensor, "members heads width"],
    masks: Sequence[Bool[Tensor, "batch tokens"]],
) -> list[Float[Tensor, "members batch width"]]:
    """Means of states over the tokens of each mask, slice h weighted as query h says; 0 where a mask has no token."""
    slices = states.unflatten(-1, (queries.shape[1], -1))
    every = token_shares(states, queries, masks)
    return [torch.einsum("btmh,bthd->mbhd", shares, slices).flatten(2) for shares in every]


class PoolingStream(Stream):
    """One product with all members' queries per layer; what is kept is `[batch, members, dim]`."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members, self._config = members, members[0].config
        self._p = self._config.dropout if members[0].training else 0.0
        self._weights = torch.stack([member.scores.softmax(0) for member in members], dim=1).unsqueeze(-1).unbind(0)
        self._queries = torch.stack([member.queries for member in members], dim=1).unbind(0)
        self._kernels = torch.stack([member.projection for member in members], dim=1).unbind(0)
        self._total: Tensor | None = None

    @abstractmethod
    def pooled(
        self,
        state: Float[Tensor, "batch tokens width"],
        queries: Float[Tensor, "members heads width"],
        view: LayerView,
    ) -> Float[Tensor, "members batch parts"]:
        """What is projected of one layer, from its normed state."""

    def step(self, index: int, view: LayerView) -> None:
        """Add one layer's features."""
        kernel = self._kernels[index]
        pooled = self.pooled(view.normed.to(kernel.dtype), self._queries[index], view)
        features = F.layer_norm(torch.bmm(pooled, kernel.mT), kernel.shape[1:2]).transpose(0, 1)
        features = F.gelu(features)
        if self._p > 0:
            generators = [member.generator for member in self._members]
            features = drop(features, self._p, draw(features.shape, generators, features.device, axis=1))
        part = features * self._weights[index]
        self._total = part if self._total is None else self._total + part

    def total(self) -> Float[Tensor, "batch members dim"]:
        """The sum over layers."""
        return fed(self._total)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        """The sum, said to every token."""
        total = self.total().transpose(0, 1).unsqueeze(2)
        return list(total.expand(-1, -1, mask.shape[1], -1).unbind(0))


class PoolingFusion(Fusion):
    """`queries [layers, heads, width]`, `projection [layers, dim, parts * width]`; subclasses add `scores [layers]`."""

    scores: nn.Parameter  # of the layers, the last of the parameters

    def __init__(self, config: PoolingConfig, *, layers: int, width: int, parts: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        if width % config.heads:
            came = f"{config.heads} heads for states of width {width}"
            raise ConfigError(f"{config.op}: {came}; they must divide it.")
        self.queries = nn.Parameter(torch.zeros(layers, config.heads, width))  # at the start a plain mean
        self.projection = nn.Parameter(torch.empty(layers, config.dim, parts * width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # what nn.Linear starts from

    def group(self) -> Hashable:
        """Same shapes, same settings, same place."""
        return (super().group(), self.training, self.config.dropout, self.config.heads)

    def importance(self) -> Float[Tensor, " layers"]:
        """Share of each layer in the pooled features; sums to 1."""
        return self.scores.detach().softmax(0)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError unless the head reads a whole text."""
        if not getattr(head, "pools", False):
            whole = "pair" if self.config.reads_pairs else "text"
            raise ConfigError(f"{self.config.op}: the head labels each token; these features are a whole {whole}'s.")
