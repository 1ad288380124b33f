"""PairedLayers: pool the tokens of two texts at each layer, compare the pooled vectors, then mix the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import LayerView
from lamina.fusion.pooled_layers import PooledTokens, PoolingConfig, PoolingFusion, PoolingStream

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_MATCHES = 8  # size of `LayerView.matches`


@final
@dataclass(frozen=True)
class PairedLayers(PoolingConfig):
    """A fusion for pairs of texts: pool the tokens of both texts at every layer, compare them, mix the layers.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i [p_i; |u_i - v_i|; u_i * v_i]))) + gelu(b + sum_i M_i m_i)`.
    For layer i, `p_i`, `u_i` and `v_i` are pooled states, as in `PooledLayers` and with the same queries: `p_i` pools
    the tokens of both texts, `u_i` of the first text, `v_i` of the second.

    `m_i` are 8 numbers, each rescaled to `4 (m - 1/2)`. For them, each token's state is normalised by LayerNorm and
    scaled to length 1. The first three are the mean, minimum and standard deviation of the best matches of the first
    text's tokens; a token's best match is its highest cosine similarity with a token of the second text. The next three
    are computed with the texts exchanged. The last two are the cosine similarity of the texts' mean states, and the
    first text's length minus the second's, divided by the sum of the lengths in tokens.

    The model reads both texts in one pass, as for its own head. The token types of the batch (`token_type_ids`) show
    which token belongs to which text. If the bank's tokenizer makes none, the separator that it puts between two texts
    does: the last one with text on both sides. A first text may then contain a literal separator, such as "[SEP]", but
    a second text, or a single one, is divided at it. Every token gets the same features, so the head to use is
    `SequenceClassification(labels, pooling="first")`. For a single text, `u_i` pools its tokens and `v_i` is 0.

    Args:
        dim: Size of the features.
        heads: Number of parts of a query, each for its own slice of the state; must divide the model's width.
        layers: Selector of the layers that are read.
        dropout: Probability of dropout on each layer's features.
        queries: Number of queries per layer; their results are concatenated before `W_i`.

    Raises:
        ConfigError: If a value is not valid. When the reader is attached: if `heads` does not divide the width, or the
            head labels tokens. In a pass: if there are no token ids, or the bank has no fast tokenizer that puts a
            token between two texts.

    Source:
        Our own. The comparison of two vectors is that of InferSent (Conneau et al. 2017, arXiv:1705.02364), which
        encodes the texts separately. The best matches between tokens are those of BERTScore (Zhang et al. 2020,
        arXiv:1904.09675).
    """

    reads_pairs: ClassVar[bool] = True


class _PairedStream(PoolingStream):
    """One pass of several PairedLayers fusions: it pools three sets of tokens, and adds up the terms `M_i m_i`.

    For the symbols see `PairedLayers`.
    """

    def __init__(self, members: Sequence[PairedLayersFusion]) -> None:
        super().__init__(members)
        self._matching = torch.stack([member.matching for member in members], dim=1)  # [layers, members, dim, 8]
        self._matched: Tensor = torch.stack([member.bias for member in members]).unsqueeze(1)  # [members, batch, dim]

    def parts(self, view: LayerView) -> Sequence[PooledTokens]:
        """Return three sets of tokens to pool: those of both texts, of the first text, and of the second text."""
        masks = (view.mask, (view.segments == 1) & view.mask, (view.segments == 2) & view.mask)
        return list(map(PooledTokens.from_mask, masks))

    def pooled(self, view: LayerView, layers: slice) -> Float[Tensor, "*layers queries batch three_widths"]:
        """Return `[p_i; |u_i - v_i|; u_i * v_i]` of `PairedLayers`.

        It also adds the terms `M_i m_i` to the stream's sum of them. `view` has one layer's state or several, stacked;
        `layers` are their positions among the selected layers.
        """
        both, first, second = self.vectors(view, layers)
        matching = self._matching[layers]
        matches = view.matches.to(matching.dtype).expand(len(matching), -1, -1)
        self._matched = self._matched + torch.einsum("lbj,lmdj->mbd", matches, matching)
        return torch.cat([both, (first - second).abs(), first * second], dim=-1)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "members batch tokens dim"]:
        """Return each member's features: the weighted sum over the layers, plus `gelu(b + sum_i M_i m_i)`."""
        mixed = super().finish(mask)
        return (mixed[:, :, :1] + F.gelu(self._matched).unsqueeze(2)).expand_as(mixed)


@final
class PairedLayersFusion(PoolingFusion, config=PairedLayers):
    """The module of `PairedLayers`.

    Parameters: `queries` `[layers, queries * heads, width]`, `projection` `[layers, dim, queries * 3 * width]`,
    `matching` `[layers, dim, 8]` (M_i), `bias` `[dim]` (b) and `scores` `[layers]`. `importance` covers `scores` only.
    """

    stream_of: ClassVar = _PairedStream

    def __init__(self, config: PairedLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, parts=3)
        self.matching = nn.Parameter(torch.empty(layers, config.dim, _MATCHES))
        bound = 1 / math.sqrt(layers * _MATCHES)  # the initialisation of one linear map of all layers' numbers
        nn.init.uniform_(self.matching, -bound, bound)
        self.bias = nn.Parameter(torch.zeros(config.dim))
        self.scores = nn.Parameter(torch.zeros(layers))
