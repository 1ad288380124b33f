"""PairedLayers: each layer's tokens are pooled per text of a pair and compared, and then the layers are mixed."""

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
from lamina.fusion.pooled_layers import pool_tokens
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_MATCHES = 8  # numbers that say how two texts match at one layer


@final
@dataclass(frozen=True)
class PairedLayers(FusionConfig):
    """Pool the tokens of a pair's two texts at every layer, compare them, and mix the layers; of a whole pair.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i [p_i; |u_i - v_i|; u_i * v_i]))) + gelu(b + sum_i M_i m_i)`,
    where `p_i`, `u_i` and `v_i` are the tokens of both texts, of the first and of the second, pooled as in
    `PooledLayers` with the same queries. `m_i` are 8 numbers, `4 (m - 1/2)` of: for the tokens of the first text the
    mean, least and standard deviation of each one's highest cosine with a token of the second; the same the other way
    round; the cosine of the plain means; and the difference of the texts' lengths over their sum.

    One pass reads both texts, as the model's own head would, and nothing is projected per token. Which token is of
    which text is told by what the bank's tokenizer puts between two texts. Every token carries the same features, so
    the head is `SequenceClassification(labels, pooling="first")`. Of a single text, `u_i` is its tokens and `v_i` is 0.

    Args:
        dim: Size of the features.
        heads: Queries per layer, each for its own slice of the state; must divide the width of the model.
        layers: Which layers.
        dropout: Probability, on each layer's features.

    Source:
        None; the features of two sentence vectors are those of InferSent (Conneau et al. 2017, arXiv:1705.02364),
        which encodes the texts apart, and best matches between tokens those of BERTScore (Zhang et al. 2020,
        arXiv:1904.09675), here of texts that were read together, at every layer, and learned from.
    """

    dim: int = 64
    heads: int = 8
    layers: Selector = "all"
    dropout: float = 0.1

    reads_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("paired_layers", "dim", self.dim, 1)
        check_range("paired_layers", "heads", self.heads, 1)
        check_range("paired_layers", "dropout", self.dropout, 0, 1, open_high=True)


class _PairedStream(Stream):
    """One product with all members' queries per layer; what is kept is twice `[batch, members, dim]`."""

    def __init__(self, members: Sequence[PairedLayersFusion]) -> None:
        self._members, self._config = members, members[0].config
        self._p = self._config.dropout if members[0].training else 0.0
        self._weights = torch.stack([member.scores.softmax(0) for member in members], dim=1).unsqueeze(-1).unbind(0)
        self._queries = torch.stack([member.queries for member in members], dim=1).unbind(0)
        self._kernels = torch.stack([member.projection for member in members], dim=1).unbind(0)
        self._matching = torch.stack([member.matching for member in members], dim=1).unbind(0)
        self._total: Tensor | None = None
        self._matched: Tensor = torch.stack([member.bias for member in members])

    def step(self, index: int, view: LayerView) -> None:
        queries, kernel = self._queries[index], self._kernels[index]
        state = view.normed.to(kernel.dtype)
        first, second = (view.segments == 1) & view.mask, (view.segments == 2) & view.mask
        whole, one, two = pool_tokens(state, queries, [view.mask, first, second])
        pooled = torch.cat([whole, (one - two).abs(), one * two], dim=-1)
        features = F.layer_norm(torch.bmm(pooled, kernel.mT), kernel.shape[1:2]).transpose(0, 1)
        features = F.gelu(features)
        if self._p > 0:
            generators = [member.generator for member in self._members]
            features = drop(features, self._p, draw(features.shape, generators, features.device, axis=1))
        part = features * self._weights[index]
        self._total = part if self._total is None else self._total + part
        self._matched = self._matched + torch.einsum(
            "bj,mdj->bmd", view.matches.to(kernel.dtype), self._matching[index]
        )

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        total = (fed(self._total) + F.gelu(self._matched)).transpose(0, 1).unsqueeze(2)
        return list(total.expand(-1, -1, mask.shape[1], -1).unbind(0))


@final
class PairedLayersFusion(Fusion, config=PairedLayers):
    """The module of `PairedLayers`: that of `PooledLayers` with a projection `[layers, dim, 3 * width]`.

    Beside it are `matching [layers, dim, 8]` and `bias [dim]`.
    """

    stream_of: ClassVar = _PairedStream

    def __init__(self, config: PairedLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        if width % config.heads:
            raise ConfigError(f"paired_layers: {config.heads} heads for states of width {width}; they must divide it.")
        self.queries = nn.Parameter(torch.zeros(layers, config.heads, width))  # at the start a plain mean
        self.projection = nn.Parameter(torch.empty(layers, config.dim, 3 * width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # what nn.Linear starts from
        self.matching = nn.Parameter(torch.empty(layers, config.dim, _MATCHES))
        bound = 1 / math.sqrt(layers * _MATCHES)  # as one linear map of all layers' numbers
        nn.init.uniform_(self.matching, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(config.dim))
        self.scores = nn.Parameter(torch.zeros(layers))

    def group(self) -> Hashable:
        """Same shapes, same settings, same place."""
        return (super().group(), self.training, self.config.dropout, self.config.heads)

    def importance(self) -> Float[Tensor, " layers"]:
        """Share of each layer in the pooled features; sums to 1. The matches have weights of their own."""
        return self.scores.detach().softmax(0)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError unless the head reads a whole text."""
        if not getattr(head, "pools", False):
            raise ConfigError("paired_layers: the head labels each token; these features are a whole pair's.")
