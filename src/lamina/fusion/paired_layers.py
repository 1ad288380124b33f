"""PairedLayers: pool the tokens of two texts at each layer, compare the pooled vectors, then mix the layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion.base import LayerView
from lamina.fusion.pooled_layers import PooledTokens, PoolingConfig, PoolingFusion, PoolingStream
from lamina.layers.types import tokenizer_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lamina.layers.types import Tokenizer

_OP = "reader of pairs"


class Separators(NamedTuple):
    """Ids of the special tokens that a tokenizer adds to a pair of texts.

    Attributes:
        between: Ids inserted between the two texts, in this order.
        added: Ids inserted anywhere, such as [CLS]: they belong to neither text.
    """

    between: tuple[int, ...]
    added: tuple[int, ...]


_cache: WeakKeyDictionary[object, Separators] = WeakKeyDictionary()  # tokenizer -> its separators


def separators_of(processor: object) -> Separators:
    """Return the special tokens that a tokenizer adds to a pair of texts.

    On the first call the tokenizer encodes a short pair; the result is cached for as long as the tokenizer exists.

    Args:
        processor: A tokenizer, a joint processor that contains one, or None.

    Raises:
        ConfigError: If there is no tokenizer, it is not a fast one, or it puts no token between two texts.
    """
    tokenizer = tokenizer_of(processor)
    if tokenizer is None:
        problem = "the bank has no tokenizer, which is needed to tell two texts apart"
        raise ConfigError(f"{_OP}: {problem}. Use ReaderBank(model, processor=tokenizer).")
    if (separators := _cache.get(tokenizer)) is None:
        separators = _cache[tokenizer] = _encode_a_pair(tokenizer)
    return separators


def _encode_a_pair(tokenizer: Tokenizer) -> Separators:
    """Tokenise the pair ("a", "b"); return the ids between the two texts, and all ids that belong to neither text.

    Raises ConfigError if the tokenizer is not a fast one, does not encode pairs, or puts no token between two texts.
    """
    name = type(tokenizer).__name__
    encoding = tokenizer("a", "b")
    if not getattr(encoding, "is_fast", False):
        raise ConfigError(f"{_OP}: {name} does not tell the tokens of two texts apart. Use a fast tokenizer.")
    ids, owners = encoding["input_ids"], encoding.sequence_ids()  # owners: 0 or 1, or None for an added token
    if 0 not in owners or 1 not in owners:
        raise ConfigError(f"{_OP}: {name} does not encode pairs of texts. Use PooledLayers, which reads any text.")
    last, first = len(owners) - 1 - owners[::-1].index(0), owners.index(1)
    between = tuple(ids[last + 1 : first])
    if not between:
        problem = f"{name} puts no token between two texts, so they cannot be told apart"
        raise ConfigError(f"{_OP}: {problem}. Use PooledLayers, which reads both texts as one.")
    added = {token for token, owner in zip(ids, owners, strict=True) if owner is None}
    return Separators(between, tuple(sorted(added)))


def segments_of(
    ids: Int[Tensor, "batch tokens"], separators: Separators, mask: Bool[Tensor, "batch tokens"]
) -> Int[Tensor, "batch tokens"]:
    """Return the segment id of each token: 1 in the first text, 2 in the second, 0 for padding and special tokens.

    Args:
        ids: Token ids.
        separators: The special tokens of the tokenizer that made the ids.
        mask: True at tokens, False at padding.
    """
    text = mask & ~_is_among(ids, separators.added)
    is_between = _is_among(ids, separators.between)
    second = (is_between & (text.cumsum(1) > 0)).cumsum(1) > 0
    return text.int() * (1 + second.int())


def _is_among(ids: Int[Tensor, "batch tokens"], wanted: tuple[int, ...]) -> Bool[Tensor, "batch tokens"]:
    """Return a mask, True where an id is one of `wanted`. Unlike `torch.isin`, it can be exported to ONNX."""
    return (ids.unsqueeze(-1) == torch.tensor(wanted, device=ids.device)).any(-1)


_MATCHES = 8  # size of `LayerView.matches`


@final
@dataclass(frozen=True)
class PairedLayers(PoolingConfig):
    """A fusion for pairs of texts: pool the tokens of both texts at every layer, compare them, mix the layers.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i [p_i; |u_i - v_i|; u_i * v_i]))) + gelu(b + sum_i M_i m_i)`.
    For layer i, `p_i`, `u_i` and `v_i` are pooled states, as in `PooledLayers` and with the same queries: `p_i` pools
    the tokens of both texts, `u_i` of the first text, `v_i` of the second.

    `m_i` are 8 numbers, each rescaled to `4 (m - 1/2)`. The first three are the mean, minimum and standard deviation of
    the best matches of the first text's tokens; a token's best match is its highest cosine similarity with a token of
    the second text. The next three are computed with the texts exchanged. The last two are the cosine similarity of the
    texts' mean states, and the difference of the texts' lengths divided by the sum of the lengths.

    The model reads both texts in one pass, as for its own head, and nothing is projected per token. The separator that
    the bank's tokenizer puts between two texts shows which token belongs to which text. Every token gets the same
    features, so the head to use is `SequenceClassification(labels, pooling="first")`. For a single text, `u_i` pools
    its tokens and `v_i` is 0.

    Args:
        dim: Size of the features.
        heads: Number of parts of a query, each for its own slice of the state; must divide the model's width.
        layers: Selector of the layers that are read.
        dropout: Probability of dropout on each layer's features.
        queries: Number of queries per layer; their results are concatenated before `W_i`.

    Raises:
        ConfigError: If a number is out of range, or, when the module is built, if `heads` does not divide the width.

    Source:
        Our own. The comparison of two vectors is that of InferSent (Conneau et al. 2017, arXiv:1705.02364), which
        encodes the texts separately. The best matches between tokens are those of BERTScore (Zhang et al. 2020,
        arXiv:1904.09675), here for texts that are read together, at every layer, as learned features.
    """

    op: ClassVar[str] = "paired_layers"
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
        """Return three vectors, concatenated: both texts pooled, and difference and product of the two pooled texts.

        It also adds the terms `M_i m_i` to their sum. `view` has one layer's state or several, stacked; `layers` are
        their positions among the selected layers.
        """
        both, first, second = self.vectors(view, layers)
        matching = self._matching[layers]
        matches = view.matches.to(matching.dtype).expand(len(matching), -1, -1)
        self._matched = self._matched + torch.einsum("lbj,lmdj->mbd", matches, matching)
        return torch.cat([both, (first - second).abs(), first * second], dim=-1)

    def total(self) -> Float[Tensor, "members batch dim"]:
        """Return each member's features: the weighted sum over the layers, plus `gelu(b + sum_i M_i m_i)`."""
        return super().total() + F.gelu(self._matched)


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
