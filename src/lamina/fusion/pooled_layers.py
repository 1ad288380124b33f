"""PooledLayers: each layer's tokens are pooled first, by learned attention, and then the layers are mixed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError, check_known
from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, fed
from lamina.fusion.dropout import draw, drop
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Over = Literal["all", "second"]
_TOGETHER = 8  # layers that are projected at once


@dataclass(frozen=True)
class PoolingConfig(FusionConfig):
    """Settings of how tokens are pooled and layers mixed."""

    op: ClassVar[str]  # the name of the fusion

    dim: int = 64
    heads: int = 1
    layers: Selector = "all"
    dropout: float = 0.1
    queries: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.op, "dim", self.dim, 1)
        check_range(self.op, "heads", self.heads, 1)
        check_range(self.op, "queries", self.queries, 1)
        check_range(self.op, "dropout", self.dropout, 0, 1, open_high=True)


class PooledTokens(NamedTuple):
    """Tokens that are pooled together."""

    others: Bool[Tensor, "batch 1 tokens"]  # the tokens that are not
    some: Bool[Tensor, "batch 1 1"]  # whether there is any

    @classmethod
    def of(cls, mask: Bool[Tensor, "batch tokens"]) -> Self:
        """Those of a mask."""
        return cls(~mask.unsqueeze(1), mask.any(1)[:, None, None])


def token_shares(
    states: Float[Tensor, "batch tokens width"],
    queries: Float[Tensor, "queries heads width"],
    parts: Sequence[PooledTokens],
) -> Iterator[Float[Tensor, "batch queries heads tokens"]]:
    """How much the queries take of each token of each part; they sum to 1 over tokens, and are 0 for an empty part."""
    scores = queries.flatten(0, 1) @ states.mT  # undivided: at usual rates queries would else hardly move
    for others, some in parts:
        shares = scores.masked_fill(others, torch.finfo(scores.dtype).min).softmax(-1)
        yield (shares * some).unflatten(1, queries.shape[:2])


def pool_tokens(
    states: Float[Tensor, "batch tokens width"],
    queries: Float[Tensor, "queries heads width"],
    parts: Sequence[PooledTokens],
) -> list[Float[Tensor, "queries batch width"]]:
    """Means of states over each part's tokens, slice h weighted as query h says; 0 where a part has no token."""
    slices = states.unflatten(-1, (queries.shape[1], -1)).transpose(1, 2)
    every = token_shares(states, queries, parts)
    return [(shares.transpose(1, 2) @ slices).permute(2, 0, 1, 3).flatten(2) for shares in every]


class PoolingStream(Stream):
    """One product with all members' queries per layer; layers wait for a few others to be projected with them.

    What is kept of those that were is `[batch, members, dim]`.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        self._members, self._config = members, members[0].config
        self._p = self._config.dropout if members[0].training else 0.0
        self._weights = torch.stack([member.scores for member in members], dim=-1).softmax(0)
        queries = torch.stack([member.queries for member in members], dim=1)
        self._queries = queries.unflatten(2, (-1, self._config.heads)).flatten(1, 2).unbind(0)
        self._parts: Sequence[PooledTokens] = ()
        self._waiting: list[Tensor] = []
        self._done = 0  # layers that were projected
        self._total: Tensor | None = None

    @abstractmethod
    def masks(self, view: LayerView) -> Sequence[Bool[Tensor, "batch tokens"]]:
        """Which tokens are pooled together; the same at all layers."""

    def pooled(
        self,
        state: Float[Tensor, "batch tokens width"],
        queries: Float[Tensor, "queries heads width"],
        parts: Sequence[PooledTokens],
    ) -> Float[Tensor, "queries batch parts"]:
        """What is projected of one layer, from its normed state, by the queries of all members."""
        return pool_tokens(state, queries, parts)[0]

    def step(self, index: int, view: LayerView) -> None:
        """Pool one layer's tokens."""
        self._parts = self._parts or [PooledTokens.of(mask) for mask in self.masks(view)]
        queries = self._queries[index]
        pooled = self.pooled(view.normed.to(queries.dtype), queries, self._parts)
        self._waiting.append(pooled.unflatten(0, (len(self._members), -1)).transpose(1, 2).flatten(2))
        if len(self._waiting) == _TOGETHER:
            self._project()

    def _project(self) -> None:
        """Add the features of the layers that wait; weights are used where they are, since to join them costs more."""
        pooled, layers = torch.stack(self._waiting), slice(self._done, self._done + len(self._waiting))
        every = [torch.bmm(pooled[:, at], member.projection[layers].mT) for at, member in enumerate(self._members)]
        features = torch.stack(every, dim=2)
        features = F.gelu(F.layer_norm(features, features.shape[-1:]))
        if self._p > 0:
            generators, shape = [member.generator for member in self._members], features.shape[1:]
            bits = [draw(shape, generators, features.device, axis=1) for _ in self._waiting]
            features = drop(features, self._p, torch.stack(bits))
        part = (features * self._weights[layers, None, :, None]).sum(0)
        self._total = part if self._total is None else self._total + part
        self._done, self._waiting = layers.stop, []

    def total(self) -> Float[Tensor, "batch members dim"]:
        """The sum over layers."""
        if self._waiting:
            self._project()
        return fed(self._total)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        """The sum, said to every token."""
        total = self.total().transpose(0, 1).unsqueeze(2)
        return list(total.expand(-1, -1, mask.shape[1], -1).unbind(0))


class PoolingFusion(Fusion):
    """`queries [layers, queries * heads, width]`, `projection [layers, dim, queries * parts * width]`.

    Subclasses add `scores [layers]`.
    """

    scores: nn.Parameter  # of the layers, the last of the parameters

    def __init__(self, config: PoolingConfig, *, layers: int, width: int, parts: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        if width % config.heads:
            came = f"{config.heads} heads for states of width {width}"
            raise ConfigError(f"{config.op}: {came}; they must divide it.")
        # At the start each gives the plain mean; their parts of the projection draw them apart.
        self.queries = nn.Parameter(torch.zeros(layers, config.queries * config.heads, width))
        self.projection = nn.Parameter(torch.empty(layers, config.dim, config.queries * parts * width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # what nn.Linear starts from

    def group(self) -> Hashable:
        """Same shapes, same settings, same place."""
        return (super().group(), self.training, self.config.dropout, self.config.heads, self.config.queries)

    def importance(self) -> Float[Tensor, " layers"]:
        """Share of each layer in the pooled features; sums to 1."""
        return self.scores.detach().softmax(0)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError unless the head reads a whole text."""
        if not getattr(head, "pools", False):
            whole = "pair" if self.config.reads_pairs else "text"
            raise ConfigError(f"{self.config.op}: the head labels each token; these features are a whole {whole}'s.")


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
