"""Self-attention and the encoder layer of the heads, on torch's fused attention in training and inference alike.

`nn.MultiheadAttention` has the same parameters and start, but at inference takes a slower kernel when texts are padded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from lamina.heads.base import check_heads

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class SelfAttention(nn.Module):
    """Multi-head self-attention with biases, without residual.

    Args:
        op: Who asks, for the error.
        dim: Size of the features.
        heads: Must divide `dim`.
        dropout: Probability, on the attention weights.

    Raises:
        ConfigError: If `heads` does not divide `dim`.
    """

    def __init__(self, op: str, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(op, dim, heads)
        self.heads, self.dropout = heads, dropout
        self.output = nn.Linear(dim, dim)
        self.weight = nn.Parameter(torch.empty(3 * dim, dim))  # query, key and value, one above the other
        self.bias = nn.Parameter(torch.zeros(3 * dim))
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.output.bias)

    def forward(
        self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Mix the tokens; only those under `mask` are attended to, and every row must have one."""
        mixed = F.linear(features, self.weight, self.bias).unflatten(-1, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout)
        return self.output(attended.transpose(1, 2).flatten(-2))


class EncoderLayer(nn.Module):
    """A pre-norm transformer encoder layer with GELU.

    Args:
        op: Who asks, for the error.
        dim: Size of the features.
        heads: Must divide `dim`.
        feedforward: Inner size.
        dropout: Probability, on attention weights, inside the feed-forward and on both branches.
    """

    def __init__(self, op: str, dim: int, heads: int, feedforward: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(op, dim, heads, dropout)
        self.inner = nn.Linear(dim, feedforward)
        self.outer = nn.Linear(feedforward, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.feedforward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Attention and feed-forward, each added to what came in."""
        features = features + self.dropout(self.attention(self.attention_norm(features), mask))
        inner = self.dropout(F.gelu(self.inner(self.feedforward_norm(features))))
        return features + self.dropout(self.outer(inner))
