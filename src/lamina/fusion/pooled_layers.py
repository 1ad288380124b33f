"""PooledLayers: each layer's tokens are pooled first, by learned attention, and then the layers are mixed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final, get_args

import torch
from torch import Tensor, nn

from lamina.errors import check_known
from lamina.fusion.layer_view import LayerView
from lamina.fusion.pooling import PoolingConfig, PoolingFusion, PoolingStream

if TYPE_CHECKING:
    from jaxtyping import Bool

Over = Literal["all", "second"]


@final
@dataclass(frozen=True)
class PooledLayers(PoolingConfig):
    """Pool the tokens of every layer by learned queries, then mix the layers; the features are of a whole text.

    With `over="second"` the tokens of a pair's second text alone are pooled, say of the reply to a prompt, which the
    base still reads in the light of the first; of what has no second text, all.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i [p_i1; ...; p_iq])))`, where slice h of `p_ij` is slice h of
    the mean of the states `LayerNorm(z_i)` over the real tokens, weighted by `softmax_t(Q_ijh . LayerNorm(z_it))`.
    Every token carries the same features, so the head is `SequenceClassification(labels, pooling="first")`. Nothing is
    projected per token, which makes this the cheapest fusion that learns what to take from every layer.

    Args:
        dim: Size of the features.
        heads: Parts of a query, each for its own slice of the state; must divide the width of the model.
        layers: Which layers.
        dropout: Probability, on each layer's features.
        queries: Per layer, each with a mean of the whole state of its own.
        over: Which tokens are pooled: "all", or those of the "second" text of a pair, which is told by what the bank's
            tokenizer puts between two texts.

    Source:
        The two stages, tokens within each layer and then layers, are those of Meyoyan and Del Corro 2026,
        arXiv:2601.13288; the modules are not. Here each layer has queries of its own and one weight.
    """

    op: ClassVar[str] = "pooled_layers"
    over: Over = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known(self.op, [self.over], get_args(Over), "over")

    @property
    def reads_pairs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  here by its settings
        """Whether it asks which tokens belong to which of two texts."""
        return self.over == "second"


class _PooledStream(PoolingStream):
    def masks(self, view: LayerView) -> Sequence[Bool[Tensor, "batch tokens"]]:
        if self._config.over == "all":
            return [view.mask]
        second = (view.segments == 2) & view.mask
        return [second | (view.mask & ~second.any(1, keepdim=True))]


@final
class PooledLayersFusion(PoolingFusion, config=PooledLayers):
    """The module of `PooledLayers`: `queries [layers, queries * heads, width]`, `scores`.

    And `projection [layers, dim, queries * width]`.
    """

    stream_of: ClassVar = _PooledStream

    def __init__(self, config: PooledLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, parts=1)
        self.scores = nn.Parameter(torch.zeros(layers))

    def group(self) -> Hashable:
        """Those that pool the same tokens, too."""
        return (super().group(), self.config.over)
