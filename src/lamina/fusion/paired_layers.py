"""PairedLayers: each layer's tokens are pooled per text of a pair and compared, and then the layers are mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import LayerView
from lamina.fusion.pooled_layers import PooledTokens, PoolingConfig, PoolingFusion, PoolingStream, pool_tokens

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_MATCHES = 8  # numbers that say how two texts match at one layer


@final
@dataclass(frozen=True)
class PairedLayers(PoolingConfig):
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
        heads: Parts of a query, each for its own slice of the state; must divide the width of the model.
        layers: Which layers.
        dropout: Probability, on each layer's features.
        queries: Per layer; what each makes of the tokens stands side by side before `W_i`.

    Source:
        None; the features of two sentence vectors are those of InferSent (Conneau et al. 2017, arXiv:1705.02364),
        which encodes the texts apart, and best matches between tokens those of BERTScore (Zhang et al. 2020,
        arXiv:1904.09675), here of texts that were read together, at every layer, and learned from.
    """

    op: ClassVar[str] = "paired_layers"
    reads_pairs: ClassVar[bool] = True


class _PairedStream(PoolingStream):
    """What is kept is twice `[batch, members, dim]`."""

    def __init__(self, members: Sequence[PairedLayersFusion]) -> None:
        super().__init__(members)
        self._matching = torch.stack([member.matching for member in members], dim=1).unbind(0)
        self._matched: Tensor = torch.stack([member.bias for member in members])

    def masks(self, view: LayerView) -> Sequence[Bool[Tensor, "batch tokens"]]:
        return [view.mask, (view.segments == 1) & view.mask, (view.segments == 2) & view.mask]

    def pooled(
        self,
        state: Float[Tensor, "batch tokens width"],
        queries: Float[Tensor, "queries heads width"],
        parts: Sequence[PooledTokens],
    ) -> Float[Tensor, "queries batch three_widths"]:
        whole, one, two = pool_tokens(state, queries, parts)
        return torch.cat([whole, (one - two).abs(), one * two], dim=-1)

    def step(self, index: int, view: LayerView) -> None:
        super().step(index, view)
        matching = self._matching[index]
        self._matched = self._matched + torch.einsum("bj,mdj->bmd", view.matches.to(matching.dtype), matching)

    def total(self) -> Float[Tensor, "batch members dim"]:
        return super().total() + F.gelu(self._matched)


@final
class PairedLayersFusion(PoolingFusion, config=PairedLayers):
    """The module of `PairedLayers`: that of `PooledLayers` with a projection `[layers, dim, queries * 3 * width]`.

    Beside it are `matching [layers, dim, 8]` and `bias [dim]`, weights that `importance` does not count.
    """

    stream_of: ClassVar = _PairedStream

    def __init__(self, config: PairedLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, parts=3)
        self.matching = nn.Parameter(torch.empty(layers, config.dim, _MATCHES))
        bound = 1 / math.sqrt(layers * _MATCHES)  # as one linear map of all layers' numbers
        nn.init.uniform_(self.matching, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(config.dim))
        self.scores = nn.Parameter(torch.zeros(layers))
