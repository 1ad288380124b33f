"""PooledLayers: pool the tokens of each layer by learned attention, then mix the layers.

`PairedLayers`, for two texts, uses the same pooling, so this file holds the base classes of both.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError, check_known
from lamina.fusion.base import (
    KEPT_ON_GPU,
    PROBABILITY,
    SIZE,
    Fusion,
    FusionConfig,
    LayerView,
    Stream,
    draw,
    drop,
    fusion_name,
    is_on_gpu,
    layer_sum,
    require_fed,
)
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Over = Literal["all", "second"]
_TOGETHER = 8  # number of layers that are projected in one operation, on a CPU
_TOGETHER_ON_GPU = 32
# Number of texts up to which weights times vectors, both float32, takes less time on a CPU than vectors times weights,
# if several members follow each other.
_FEW = 4
_KEPT = 1 << 18  # number of elements of states (or of scores) up to which several layers are pooled at once, on a CPU


@dataclass(frozen=True)
class PoolingConfig(FusionConfig):
    """Settings that PooledLayers and PairedLayers share; see there. ConfigError if a number is out of its range."""

    _ranges: ClassVar = {"dim": SIZE, "heads": SIZE, "queries": SIZE, "dropout": PROBABILITY}

    dim: int = 64
    heads: int = 1
    layers: Selector = "all"
    dropout: float = 0.1
    queries: int = 1


class PooledTokens(NamedTuple):
    """A set of tokens of each sequence, whose states are pooled to one vector. Both fields None: all tokens.

    Attributes:
        excluded: `[batch, 1, tokens]`, True at tokens that are not in the set.
        has_any: `[batch, 1, 1]`, whether the sequence has a token in the set.
    """

    excluded: Bool[Tensor, "batch 1 tokens"] | None = None
    has_any: Bool[Tensor, "batch 1 1"] | None = None

    @classmethod
    def from_mask(cls, mask: Bool[Tensor, "batch tokens"]) -> Self:
        """Return the set of tokens where `mask` is True."""
        return cls(~mask.unsqueeze(1), mask.any(1)[:, None, None])

    def shares(
        self, scores: Float[Tensor, "*layers batch scored tokens"]
    ) -> Float[Tensor, "*layers batch scored tokens"]:
        """Return the weights of the tokens: the softmax of `scores` over the set. If the set is empty, all are 0."""
        if self.excluded is None or self.has_any is None:
            return scores.softmax(-1)
        return scores.masked_fill(self.excluded, torch.finfo(scores.dtype).min).softmax(-1) * self.has_any


class PoolingStream(Stream):
    """Base class of the streams of PooledLayers and PairedLayers: one forward pass of several fusions, the members.

    Each layer is pooled with the queries of all members in one product. Small states are collected until there are
    enough to pool several layers at once. Up to `_TOGETHER` pooled layers (on a GPU `_TOGETHER_ON_GPU`) are then
    projected in one operation, and added to a sum `[members, batch, dim]`.
    """

    def __init__(self, members: Sequence[PoolingFusion]) -> None:
        self._members, self._config = members, members[0].config
        self._p = self._config.dropout if members[0].training else 0.0
        self._weights = torch.stack([member.scores for member in members]).softmax(-1)  # [members, layers]
        self._on_gpu = is_on_gpu(self._weights)
        queries = torch.stack([member.queries for member in members], dim=1)
        self._queries = queries.unflatten(2, (-1, self._config.heads)).flatten(1, 2)  # [layers, queries, heads, width]
        self._parts: Sequence[PooledTokens] = ()
        self._views: list[LayerView] = []  # layers that are not pooled yet
        self._pooled: list[Tensor] = []  # pooled layers that are not projected yet, [layers, members, batch, width]
        self._counts = [0, 0]  # numbers of layers that were pooled and that were projected
        self._total: Tensor | None = None

    @abstractmethod
    def parts(self, view: LayerView) -> Sequence[PooledTokens]:
        """Return the sets of tokens to pool, from the masks of `view`, the first layer; all layers use these sets."""

    def pooled(self, view: LayerView, layers: slice) -> Float[Tensor, "*layers queries batch width"]:
        """Return the pooled vectors of the layers whose states are in `view`; by default of the first set of `parts`.

        `layers` says which of the fusion's layers these are, from 0.
        """
        return self.vectors(view, layers)[0]

    def vectors(self, view: LayerView, layers: slice) -> list[Float[Tensor, "*layers queries batch width"]]:
        """Return for each set of tokens the mean of `view.normed`, weighted by attention; arguments as for `pooled`.

        The weights are a softmax over the set's tokens of the product of query and normed state. A state is cut into as
        many slices as a query has heads; head h weighs slice h. The mean over an empty set is 0.
        """
        queries = self._queries[layers.start] if view.state.ndim == 3 else self._queries[layers].unsqueeze(1)
        states, heads = view.normed.to(queries.dtype), queries.shape[-2]
        # not divided by the square root of the size: queries would hardly change at usual learning rates
        scores = queries.flatten(-3, -2) @ states.mT
        vectors: list[Tensor] = []
        for tokens in self._parts:
            shares = tokens.shares(scores)
            if heads == 1:
                vectors.append((shares @ states).transpose(-3, -2))
            else:
                by_head = shares.unflatten(-2, (-1, heads)).transpose(-3, -2)
                slices = states.unflatten(-1, (heads, -1)).transpose(-3, -2)
                vectors.append((by_head @ slices).movedim(-2, -4).flatten(-2))
        return vectors

    def step(self, index: int, view: LayerView) -> None:
        """Store one layer's state. Pool the states once enough are stored; project once enough layers are pooled."""
        self._parts = self._parts or self.parts(view)
        self._views.append(view)
        most, together = (KEPT_ON_GPU, _TOGETHER_ON_GPU) if self._on_gpu else (_KEPT, _TOGETHER)
        full = index + 1 - self._counts[1] == together
        size = max(view.state.numel(), view.mask.numel() * math.prod(self._queries.shape[1:3]))  # states, scores
        if full or (len(self._views) + 1) * size > most:
            self._pool()
        if full:
            self._project()

    def _pool(self) -> None:
        """Pool the tokens of all stored states at once, and forget the states."""
        views, self._views = self._views, []
        layers = slice(self._counts[0], self._counts[0] + len(views))
        view = views[0]
        if len(views) > 1:
            view = LayerView(torch.stack([kept.state for kept in views]), view.mask, view.segment_ids, view.is_padded)
        pooled = self.pooled(view, layers).unflatten(-3, (len(self._members), -1)).transpose(-3, -2).flatten(-2)
        self._pooled.append(pooled if len(views) > 1 else pooled.unsqueeze(0))
        self._counts[0] = layers.stop

    def _project(self) -> None:
        """Project the pooled layers, and add their weighted features to each member's sum; forget the pooled layers."""
        pooled = self._pooled[0] if len(self._pooled) == 1 else torch.cat(self._pooled)
        layers = slice(self._counts[1], self._counts[0])
        kernels: list[Tensor] = [member.projection for member in self._members]
        if len(pooled) < len(kernels[0]):
            kernels = [kernel[layers] for kernel in kernels]
        if self._on_gpu:
            features = pooled.transpose(0, 1) @ torch.stack(kernels).mT  # [members, layers, batch, dim]
        else:  # one product per member: joining the members' projections first takes longer
            parts = list(zip(pooled.unbind(1), kernels, strict=True))
            records = torch.is_grad_enabled() or torch.compiler.is_compiling()  # such a graph takes any number of texts
            if not records and len(parts) > 1 and pooled.dtype == torch.float32 and pooled.shape[2] <= _FEW:
                features = torch.stack([torch.bmm(kernel, part.mT) for part, kernel in parts]).mT
            else:
                features = torch.stack([torch.bmm(part, kernel.mT) for part, kernel in parts])
        features = F.gelu(F.layer_norm(features, features.shape[-1:]))
        if self._p > 0:
            generators, shape = [member.generator for member in self._members], features[:, 0].shape
            bits = [draw(shape, generators, features.device) for _ in range(features.shape[1])]
            features = drop(features, self._p, torch.stack(bits, dim=1))
        part = layer_sum(self._weights[:, layers], features)
        self._total = part if self._total is None else self._total + part
        self._counts[1], self._pooled = layers.stop, []

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "members batch tokens dim"]:
        """Return each member's sum over all layers, repeated for every token; only the shape of `mask` is used.

        States that are still stored are pooled and projected first. ConfigError if no state was fed.
        """
        if self._views:
            self._pool()
        if self._pooled:
            self._project()
        return require_fed(self._total).unsqueeze(2).expand(-1, -1, mask.shape[1], -1)


class PoolingFusion(Fusion):
    """Base class of the modules of PooledLayers and PairedLayers; ConfigError if `heads` does not divide the width.

    Parameters: `queries` `[layers, queries * heads, width]` and `projection` `[layers, dim, queries * parts * width]`,
    where `parts` is the number of pooled vectors per query. Subclasses set `stream_of`, and add `scores` `[layers]`,
    the weights of the layers before the softmax.
    """

    shared: ClassVar = ("dropout", "heads", "queries")
    scores: nn.Parameter

    def __init__(self, config: PoolingConfig, *, layers: int, width: int, parts: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        if width % config.heads:
            problem = f"{config.heads} heads for states of width {width}"
            raise ConfigError(f"{fusion_name(config)}: {problem}; they must divide it.")
        # At first every query computes the plain mean. They become different because their parts of the projection are.
        self.queries = nn.Parameter(torch.zeros(layers, config.queries * config.heads, width))
        self.projection = nn.Parameter(torch.empty(layers, config.dim, config.queries * parts * width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # the initialisation of nn.Linear

    def importance(self) -> Float[Tensor, " layers"]:
        """Return the weight of each layer, the softmax of `scores`, without gradient. The weights sum to 1."""
        return self.scores.detach().softmax(0)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError if `head` labels tokens instead of whole sequences."""
        if not getattr(head, "pools", False):
            whole = "pair" if self.config.reads_pairs else "text"
            problem = f"the head labels tokens; these features are of a whole {whole}"
            raise ConfigError(f"{fusion_name(self.config)}: {problem}.")


@final
@dataclass(frozen=True)
class PooledLayers(PoolingConfig):
    """A fusion that pools the tokens of every layer by learned queries, and mixes the layers; for sequence tasks.

    `F = sum_i softmax(scores)_i dropout(gelu(LayerNorm(W_i [p_i1; ...; p_iq])))`. `p_ij` is what query j reads at layer
    i: a mean over the tokens t of the normalised states `LayerNorm(z_it)`. The mean is computed slice by slice: head h
    weighs slice h of the states by `softmax_t(Q_ijh . LayerNorm(z_it))`. Every token gets the same features, so the
    head to use is `SequenceClassification(labels, pooling="first")`.

    Args:
        dim: Size of the features.
        heads: Number of parts of a query, each for its own slice of the state; must divide the model's width.
        layers: Selector of the layers that are read.
        dropout: Probability of dropout on each layer's features.
        queries: Number of queries per layer; each computes its own mean.
        over: Which tokens are pooled. "all": all tokens. "second": those of the second of two texts, such as the reply
            to a prompt, which the model still reads together with the first; all tokens if there is no second text. How
            the texts are told apart is described in `PairedLayers`.

    Raises:
        ConfigError: If a value is not valid. When the reader is attached: if `heads` does not divide the width, or the
            head labels tokens. In a pass with "second": if there are no token ids, or the bank has no fast tokenizer
            that puts a token between two texts.
        UnknownNameError: If `over` is unknown.

    Source:
        The two stages, pooling of tokens within each layer and then mixing of layers, are those of Meyoyan and Del
        Corro 2026, arXiv:2601.13288. The modules differ: here each layer has its own queries and one weight.
    """

    over: Over = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known(fusion_name(self), [self.over], get_args(Over), "over")

    @property
    def reads_pairs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  here by its settings
        """Whether the fusion needs to know which tokens belong to the second text: only if `over` is "second"."""
        return self.over == "second"


class _PooledStream(PoolingStream):
    """One forward pass of several PooledLayers fusions (its members), which all pool the same set of tokens."""

    def parts(self, view: LayerView) -> Sequence[PooledTokens]:
        """Return one set of tokens: all but padding, or if `over` is "second" the tokens of the second text.

        For a sequence without a second text, the set has all its tokens.
        """
        mask = view.mask
        if self._config.over == "all" and not view.is_padded:
            return [PooledTokens()]
        if self._config.over == "second":
            second = (view.segments == 2) & mask
            mask = second | (mask & ~second.any(1, keepdim=True))
        return [PooledTokens.from_mask(mask)]


@final
class PooledLayersFusion(PoolingFusion, config=PooledLayers):
    """The module of `PooledLayers`.

    Parameters: `queries` `[layers, queries * heads, width]`, `projection` `[layers, dim, queries * width]` and `scores`
    `[layers]`.
    """

    stream_of: ClassVar = _PooledStream
    shared: ClassVar = (*PoolingFusion.shared, "over")

    def __init__(self, config: PooledLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, parts=1)
        self.scores = nn.Parameter(torch.zeros(layers))

    def contributions(self, states: Sequence[Tensor]) -> Tensor | None:
        """Return `[layers, tokens]`: each layer's weight times its queries' mean attention to each token.

        None if `over` is "second", because a single text does not show where a second one begins.
        """
        if self.config.reads_pairs:
            return None
        rows: list[Tensor] = []
        for index, state in enumerate(states):
            view, queries = LayerView.of_text(state), self.queries[index]
            shares = PooledTokens().shares(queries @ view.normed.to(queries.dtype).mT)
            rows.append(self.importance()[index].float() * shares[0].float().mean(0))
        return torch.stack(rows)
