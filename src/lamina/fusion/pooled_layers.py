"""PooledLayers: each layer's tokens are pooled first, by learned attention, and then the layers are mixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn

from lamina.fusion.layer_view import LayerView
from lamina.fusion.pooling import PoolingConfig, PoolingFusion, PoolingStream, pool_tokens

if TYPE_CHECKING:
    from jaxtyping import Float


@final
@dataclass(frozen=True)
class PooledLayers(PoolingConfig):
    """Pool the tokens of every layer by learned queries, then mix the layers; the features are of a whole text.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i p_i)))`, where slice h of `p_i` is slice h of the mean of
    the states `LayerNorm(z_i)` over the real tokens, weighted by `softmax_t(Q_ih . LayerNorm(z_it))`.
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

    op: ClassVar[str] = "pooled_layers"


class _PooledStream(PoolingStream):
    def pooled(
        self,
        state: Float[Tensor, "batch tokens width"],
        queries: Float[Tensor, "members heads width"],
        view: LayerView,
    ) -> Float[Tensor, "members batch width"]:
        return pool_tokens(state, queries, [view.mask])[0]


@final
class PooledLayersFusion(PoolingFusion, config=PooledLayers):
    """The module of `PooledLayers`: `queries [layers, heads, width]`, `projection [layers, dim, width]`, `scores`."""

    stream_of: ClassVar = _PooledStream

    def __init__(self, config: PooledLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, parts=1)
        self.scores = nn.Parameter(torch.zeros(layers))
