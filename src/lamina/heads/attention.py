"""Building blocks of heads, computed for several heads of the same shape in one operation.

`nn.MultiheadAttention` has the same parameters and initialisation, but it is slower at inference on padded batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import Generators, dropout, is_full
from lamina.heads.base import TokenMap, check_attention_heads, linear

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def norm(norms: Sequence[nn.LayerNorm], features: Float[Tensor, "heads *rows dim"]) -> Float[Tensor, "heads *rows dim"]:
    """Apply LayerNorm i of `norms` to `features[i]`, for several heads at once; the norms have equal shape and eps."""
    if len(norms) == 1:
        return norms[0](features)
    normal = F.layer_norm(features, norms[0].normalized_shape, eps=norms[0].eps)
    shape = (len(norms), *[1] * (features.ndim - 2), -1)
    weight = torch.stack([module.weight for module in norms]).view(shape)
    bias = torch.stack([module.bias for module in norms]).view(shape)
    return torch.addcmul(bias, normal, weight)


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases and without a residual connection. It has no `forward`: call `attend`.

    Args:
        op: The operation that error messages begin with.
        dim: Size of the features.
        heads: Number of attention heads, which must divide `dim`.
        dropout: Probability of dropout on the attention weights.

    Raises:
        ConfigError: If `heads` does not divide `dim`.
    """

    def __init__(self, op: str, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_attention_heads(op, dim, heads)
        self.heads, self.dropout = heads, dropout
        self.output = nn.Linear(dim, dim)
        self.weight = nn.Parameter(torch.empty(3 * dim, dim))  # the rows for queries, then keys, then values
        self.bias = nn.Parameter(torch.zeros(3 * dim))
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.output.bias)


def attend(
    members: Sequence[SelfAttention],
    features: Float[Tensor, "heads batch tokens dim"],
    mask: Bool[Tensor, "batch tokens"],
    generators: Generators,
) -> Float[Tensor, "heads batch tokens dim"]:
    """Return the self-attention of several modules, the members, each on its own features, in one operation.

    Args:
        members: `SelfAttention` modules of equal shape and settings, one per head that is computed.
        features: `features[i]` are the features for member i.
        mask: True at tokens that are attended to; every row must have one.
        generators: Each member's generator for dropout. None: torch's global generator.
    """
    first = members[0]
    mixed = linear([TokenMap(member.weight, member.bias) for member in members], features)
    query, key, value = mixed.unflatten(-1, (3, first.heads, -1)).permute(3, 0, 4, 1, 2, 5).unbind(0)
    # [batch, members * attention heads, tokens, size]: the kernel sees members as more attention heads
    query, key, value = (part.permute(2, 0, 1, 3, 4).flatten(1, 2) for part in (query, key, value))
    key_mask = mask[:, None, None, :]
    if torch.compiler.is_exporting():  # the attention operation of ONNX takes no mask that is broadcast over queries
        key_mask = key_mask.expand(-1, 1, mask.shape[1], -1)
    if first.training and first.dropout > 0:
        scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~key_mask, -math.inf).softmax(-1)
        scores = dropout(scores.unflatten(1, (len(members), -1)), first.dropout, generators, axis=1).flatten(1, 2)
        attended = scores @ value
    else:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=None if is_full(mask) else key_mask)
    attended = attended.unflatten(1, (len(members), -1)).permute(1, 0, 3, 2, 4).flatten(-2)
    return linear([member.output for member in members], attended)


class EncoderLayer(nn.Module):
    """A pre-norm transformer encoder layer with GELU. It has no `forward`: call the function `encode`.

    Args:
        op: The operation that error messages begin with.
        dim: Size of the features.
        heads: Number of attention heads; ConfigError if it does not divide `dim`.
        feedforward: Inner size of the feed-forward network.
        dropout: Probability of dropout on attention weights, inside the feed-forward network, and on both branches.
    """

    def __init__(self, op: str, dim: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(op, dim, heads, dropout)
        self.inner = nn.Linear(dim, feedforward)
        self.outer = nn.Linear(feedforward, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.dropout = dropout


def encode(
    members: Sequence[EncoderLayer],
    features: Float[Tensor, "heads batch tokens dim"],
    mask: Bool[Tensor, "batch tokens"],
    generators: Generators,
) -> Float[Tensor, "heads batch tokens dim"]:
    """Return the output of several `EncoderLayer`s, the members, each on its own features, in one operation.

    `members` are `EncoderLayer`s of equal shape and settings; the other arguments are those of `attend`.
    """
    p = members[0].dropout if members[0].training else 0.0
    normed = norm([member.attention_norm for member in members], features)
    mixed = attend([member.attention for member in members], normed, mask, generators)
    features = features + dropout(mixed, p, generators)
    normed = norm([member.feedforward_norm for member in members], features)
    inner = dropout(F.gelu(linear([member.inner for member in members], normed)), p, generators)
    return features + dropout(linear([member.outer for member in members], inner), p, generators)
