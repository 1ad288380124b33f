"""AdaLayers: a small normalised projection of each layer, summed with learned importances.

`SingleLayer`, the baseline on one layer, uses the same projections, so this file holds the base classes of both.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion.base import (
    KEPT_ON_GPU,
    PROBABILITY,
    SIZE,
    Fusion,
    FusionConfig,
    LayerView,
    Range,
    Stream,
    draw,
    drop,
    dropout,
    is_on_gpu,
    layer_sum,
    nonzero_indices,
    require_fed,
)
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class ProjectedConfig(FusionConfig):
    """Base class of the configs of AdaLayers and SingleLayer, with the settings that both have; see `AdaLayers`."""

    _ranges: ClassVar = {"dim": SIZE, "dropout": PROBABILITY}

    dim: int
    dropout: float
    positions: bool
    output_activation: bool


# Tokens up to which a CPU projects all layers at once; starting an operation then takes longer than its work.
FEW = 128
# Number of features of all layers and members up to which training keeps them for the backward pass. More are computed
# again there, which takes less memory and more time.
KEPT = 1 << 22
KEPT_BYTES = 12 * KEPT  # at most so much is kept for them: projected and normalised features, and what dropout needs
_keeps: ContextVar[bool] = ContextVar("keeps", default=True)


@contextmanager
def recomputing() -> Generator[None]:
    """Compute features again in the `with` block, however few they are; memory is then linear in the number of rows."""
    token = _keeps.set(False)
    try:
        yield
    finally:
        _keeps.reset(token)


class _ProjectedStream(Stream):
    """One forward pass of several AdaLayers or SingleLayer fusions, its members.

    One matrix product per layer serves all.
    """

    def __init__(self, members: Sequence[ProjectedFusion]) -> None:
        self._members = members
        self._config = members[0].config
        self._p = self._config.dropout if members[0].training else 0.0
        self._weights = type(members[0]).weights_of(members)  # [members, layers]
        self._on_gpu = is_on_gpu(self._weights)
        self._zero = self._zeros()
        self._kernels: Sequence[Tensor] | None = None
        # Unbound once: the gradient of each slice `projection[i]` would be as large as the whole parameter.
        if torch.is_grad_enabled():  # [projections][members, dim, width]
            self._kernels = torch.stack([member.projection for member in members], dim=1).unbind(0)
        self._total: Tensor | None = None
        self._kept: Tensor | None = None  # kernels of all layers, [layers, members * dim, width]; only after `renewed`
        self._waiting: list[tuple[int, Tensor]] = []  # index of a layer, and its state
        self._buffer: Tensor | None = None  # memory of the stacked projections of a layer, reused for the next one

    def renewed(self) -> _ProjectedStream:
        if self._kept is None:
            stacked = torch.stack([member.projection for member in self._members], dim=1)
            self._kernels, self._kept = stacked.unbind(0), stacked.flatten(1, 2)
        stream = copy(self)
        stream._total, stream._waiting, stream._buffer = None, [], None
        return stream

    def active_layers(self, members: Sequence[Fusion]) -> list[int]:
        """Return the indices of the layers whose weight is not 0 for some member of this stream.

        `members` is unused.
        """
        return [index for index, zeros in enumerate(zip(*self._zero, strict=True)) if not all(zeros)]

    def step(self, index: int, view: LayerView) -> None:
        """Add one layer's weighted features to each member's sum, or store its state for `finish` (see `_collects`).

        A member for which the layer has weight 0 is skipped.
        """
        rows = [row for row, zero in enumerate(self._zero) if not zero[index]]
        if self._collects(view.state):
            self._waiting.append((index, view.state))
            return
        kernel, weights = self._kernel(rows, index), self._weights[rows, index]
        state = view.gelu.to(kernel.dtype)
        bits, every = None, len(rows) == len(self._members)
        if self._p > 0:
            shape = torch.Size((*state.shape[:2], len(rows), self._config.dim))
            bits = draw(shape, [self._members[row].generator for row in rows], state.device, axis=2)
        inputs = (state, kernel, self._p, bits)
        if torch.is_grad_enabled():
            size = len(self._members[0].projection) * state.shape[:2].numel() * len(rows) * self._config.dim
            keeps = _keeps.get() and size <= KEPT
            part = _weighted(weights, *inputs) if keeps else cast("Tensor", _Recomputed.apply(weights, *inputs))
        else:
            features, weights = _scaled(weights.unsqueeze(-1), *inputs)
            if every and self._total is not None:
                self._total.addcmul_(features, weights)
                return
            part = features * weights
        if every:
            self._total = part if self._total is None else self._total + part
            return
        if self._total is None:
            self._total = part.new_zeros(*part.shape[:2], len(self._members), self._config.dim)
        self._total = self._total.index_add(2, torch.tensor(rows, device=part.device), part)

    def _collects(self, state: Float[Tensor, "batch tokens width"]) -> bool:
        """Return whether `step` only stores each layer's `state`, so that `finish` projects all layers at once.

        That is faster on a CPU for up to `FEW` tokens, and on a GPU if neither the states nor the features of all
        layers have more than `KEPT_ON_GPU` elements. It is not done for SingleLayer, with dropout or gradients, or in
        an export, where the number of tokens is unknown.
        """
        layers = len(self._members[0].projection)
        if layers == 1 or self._p > 0 or torch.is_grad_enabled() or torch.compiler.is_exporting():
            return False
        tokens, size = state.shape[:2].numel(), max(state.shape[2], len(self._members) * self._config.dim)
        return layers * tokens * size <= KEPT_ON_GPU if self._on_gpu else tokens <= FEW

    def _zeros(self) -> list[list[bool]]:
        """Return for each member and layer whether the layer's weight is 0; on the meta device, False for all.

        During an export, weights have no values. Then a weight counts as 0 if the member's `active_layers` lacks the
        layer.
        """
        if not torch.compiler.is_exporting():
            weights = torch.ones_like(self._weights, device="cpu") if self._weights.is_meta else self._weights
            return [list(map(bool, row)) for row in (weights == 0).tolist()]
        return [[layer not in member.active_layers() for layer in range(member.layers)] for member in self._members]

    def _kernel(self, rows: list[int], index: int) -> Float[Tensor, "members dim width"]:
        """Return layer `index`'s projections, for the members numbered `rows`; the next call may overwrite them."""
        place = index if len(self._members[0].projection) > 1 else 0  # SingleLayer has only one
        if self._kernels is not None:
            return self._kernels[place] if len(rows) == len(self._members) else self._kernels[place][rows]
        parts = [self._members[row].projection[place] for row in rows]
        if len(parts) == 1:
            return parts[0].unsqueeze(0)
        if torch.compiler.is_exporting():
            return torch.stack(parts)
        if self._buffer is None or len(self._buffer) != len(parts):
            self._buffer = parts[0].new_empty(len(parts), *parts[0].shape)
        return torch.stack(parts, out=self._buffer)

    def _sum_together(self) -> Float[Tensor, "members batch tokens dim"]:
        """Return each member's weighted sum over the layers whose states `step` kept, computed in one operation."""
        indices, states = list(zip(*self._waiting, strict=True))
        state = F.gelu(torch.stack(states)).to(self._weights.dtype)
        chosen = slice(None) if len(indices) == self._weights.shape[1] else list(indices)
        kernels = self._kept
        if kernels is None and self._on_gpu:
            kernels = torch.stack([member.projection for member in self._members], dim=1).flatten(1, 2)
        if kernels is None:  # one product per member: joining the members' projections first takes longer
            parts = [torch.bmm(state.flatten(1, 2), member.projection[chosen].mT) for member in self._members]
            projected = torch.stack(parts)
        else:
            projected = torch.bmm(state.flatten(1, 2), kernels[chosen].mT).unflatten(-1, (len(self._members), -1))
            projected = projected.movedim(2, 0)
        features = F.layer_norm(projected, projected.shape[-1:])  # [members, layers, batch * tokens, dim]
        return layer_sum(self._weights[:, chosen], features.unflatten(2, state.shape[1:3]))

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "members batch tokens dim"]:
        """Return each member's sum over the layers, with GELU, and with positions and dropout, if the config sets them.

        `mask` only serves to number the positions. Raises ConfigError if no state was processed.
        """
        # contiguous, so that the heads need not copy
        total = self._sum_together() if self._waiting else require_fed(self._total).movedim(2, 0).contiguous()
        if self._config.output_activation:
            total = F.gelu(total)
        if self._config.positions:
            total = total + sinusoids(mask, self._config.dim).to(total.dtype)
            total = dropout(total, self._p, [member.generator for member in self._members])
        return total


class ProjectedFusion(Fusion):
    """Base class of the modules of AdaLayers and SingleLayer: `sum_i weight_i * dropout(LayerNorm(W_i gelu(z_i)))`.

    If `output_activation` is set, GELU is applied to the sum; if `positions` is set, positions are added last, with
    another dropout. `z_i` is the state of layer i. The parameter `projection` `[projections, dim, width]` holds all
    `W_i`, without bias; subclasses define the weights. LayerNorm has no weight and bias; its eps is 1e-5.
    """

    stream_of: ClassVar = _ProjectedStream
    shared: ClassVar = ("dropout", "positions", "output_activation")

    def __init__(self, config: ProjectedConfig, *, layers: int, width: int, projections: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        self.projection = nn.Parameter(torch.empty(projections, config.dim, width))
        for weight in self.projection:
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))  # the initialisation of nn.Linear

    @classmethod
    @abstractmethod
    def weights_of(cls, members: Sequence[Any]) -> Float[Tensor, "members layers"]:
        """Return the weight of each layer in a fusion's sum, one row per fusion in `members`, all of this class.

        A row sums to 1, and no weight is negative.
        """

    def weights(self) -> Float[Tensor, " layers"]:
        """Return this fusion's weight of each layer in the sum, with gradient if it is trained."""
        return self.weights_of([self])[0]

    def is_token_wise(self) -> bool:
        """Return whether a token's features depend on this token's own states only: True unless `positions` is set."""
        return not self.config.positions

    def active_layers(self) -> tuple[int, ...]:
        """Return the indices, among the selected layers and from 0, of those whose weight is not 0."""
        return nonzero_indices(self.weights().detach())


def _features(
    state: Float[Tensor, "batch tokens width"],
    kernel: Float[Tensor, "members dim width"],
    p: float,
    bits: Tensor | None,
) -> Float[Tensor, "batch tokens members dim"]:
    """Return one layer's features `dropout(LayerNorm(kernel[i] state))` for every member i (a fusion).

    `state` is GELU of the layer's state, and `kernel` holds the members' projection matrices. `p` is the probability of
    dropout; random integers `bits` from `draw` decide what is dropped. None: no dropout.
    """
    projected = F.linear(state, kernel.flatten(0, 1)).unflatten(-1, kernel.shape[:2])
    features = F.layer_norm(projected, kernel.shape[1:2])
    return features if bits is None else drop(features, p, bits)


def _scaled(
    weights: Float[Tensor, "members 1"],
    state: Float[Tensor, "batch tokens width"],
    kernel: Float[Tensor, "members dim width"],
    p: float,
    bits: Tensor | None,
) -> tuple[Float[Tensor, "batch tokens members dim"], Float[Tensor, "*batch members 1"]]:
    """Return two tensors whose product is `_features` of the same arguments, times each member's weight.

    In general they are the features and the weights. On a CPU, LayerNorm over the few features of a member takes long;
    so there, without dropout, autocast and export, the rows of the small matrix `kernel` are centred instead. The
    projected features then have mean 0, and the second tensor is the weight divided by their standard deviation.
    """
    is_plain = kernel.is_cpu and kernel.dtype in (torch.float32, torch.float64)
    if bits is not None or not is_plain or torch.is_autocast_enabled("cpu") or torch.compiler.is_exporting():
        return _features(state, kernel, p, bits), weights
    centred = kernel - kernel.mean(1, keepdim=True)
    projected = F.linear(state, centred.flatten(0, 1)).unflatten(-1, kernel.shape[:2])
    variance = torch.linalg.vector_norm(projected, dim=-1, keepdim=True).square() / kernel.shape[1]
    return projected, weights * torch.rsqrt(variance + 1e-5)


def _weighted(weights: Tensor, state: Tensor, kernel: Tensor, p: float, bits: Tensor | None) -> Tensor:
    """Return `_features` of the same arguments, times each member's weight."""
    return _features(state, kernel, p, bits) * weights.unsqueeze(-1)


class _Recomputed(torch.autograd.Function):
    """Computes `_features` times each member's weight. The backward pass computes them again instead of storing them.

    Only the inputs (layer states, shared by all members) stay in memory.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        weights: Tensor,
        state: Tensor,
        kernel: Tensor,
        p: float,
        bits: Tensor | None,
    ) -> Tensor:
        kind = "cpu" if state.is_meta else state.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.save_for_backward(weights, state, kernel, bits)
        ctx.p = p
        return _weighted(weights, state, kernel, p, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore
        *saved, bits = ctx.saved_tensors
        inputs = [tensor.detach().requires_grad_(ctx.needs_input_grad[at]) for at, tensor in enumerate(saved)]
        weights, state, kernel = inputs
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            result = _weighted(weights, state, kernel, ctx.p, bits)
        gradients = iter(torch.autograd.grad(result, [one for one in inputs if one.requires_grad], grad_outputs))
        return *(next(gradients) if one.requires_grad else None for one in inputs), None, None


def sinusoids(mask: Bool[Tensor, "batch tokens"], dim: int) -> Float[Tensor, "batch tokens dim"]:
    """Return fixed sinusoidal position embeddings. Positions count the tokens (`mask` True) from 0, not padding.

    Source:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    place = (mask.cumsum(1) - 1).clamp(min=0).unsqueeze(-1).float()
    even = torch.arange(0, dim, 2, device=mask.device, dtype=torch.float32)
    angle = place * torch.exp(even * (-math.log(10000.0) / dim))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :dim]


@final
@dataclass(frozen=True)
class AdaLayers(ProjectedConfig):
    """A fusion that projects every layer to `dim` features and sums them with learned softmax weights, the importances.

    `F = gelu(sum_i p_i dropout(LayerNorm(W_i gelu(z_i))))` with the importances `p = softmax(alpha * scores)`, where
    `z_i` is the state of layer i and the matrices `W_i` and `scores` are learned.

    Args:
        dim: Size of the features, k in the paper; at least 1.
        alpha: Positive factor of the scores in the softmax. The larger it is, the faster importances change in
            training.
        cutoff: Importances at or below this value become 0, and the others are divided by their sum. Must be below 1 /
            layers.
        entropy: Weight (lambda in the paper) of the entropy term, the mean of `-p log p` over layers, which is added to
            the loss. 0: no term.
        layers: Selector of the layers that are read. The default leaves out the embeddings.
        dropout: Probability of dropout on each layer's features and, with `positions`, on the sum.
        positions: Whether to add fixed sinusoidal token positions to the sum, after GELU.
        output_activation: Whether to apply GELU to the sum. The reference code does; the thesis does not mention it.

    Raises:
        ConfigError: If a value is not valid; for `cutoff` against the number of layers, only when the module is built.

    Source:
        Dremov 2024, "Using Internal Representations of Frozen Transformer Models", section 5.1.
    """

    _ranges: ClassVar = {**ProjectedConfig._ranges, "cutoff": PROBABILITY, "entropy": Range(0)}

    dim: int = 64
    alpha: float = 64.0
    cutoff: float = 0.0
    entropy: float = 0.0
    layers: Selector = "1-"
    dropout: float = 0.1
    positions: bool = False
    output_activation: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"ada_layers: alpha is {self.alpha}; it must be positive.")


@final
class AdaLayersFusion(ProjectedFusion, config=AdaLayers):
    """The module of `AdaLayers`. Parameters: `projection` `[layers, dim, width]` and `scores` `[layers]`.

    Raises ConfigError if `cutoff` is not below 1 / layers.
    """

    def __init__(self, config: AdaLayers, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, projections=layers)
        if config.cutoff >= 1 / layers:
            problem = f"cutoff is {config.cutoff} for {layers} layers; it would remove every layer"
            raise ConfigError(f"ada_layers: {problem}. Use a cutoff below {1 / layers:.4g}.")
        self.scores = nn.Parameter(torch.ones(layers))

    @classmethod
    def weights_of(cls, members: Sequence[Any]) -> Float[Tensor, "members layers"]:
        """Return the importance of each layer, one row per fusion in `members`: the softmax of `alpha * scores`.

        Importances at or below the setting `cutoff` are set to 0, and the others are divided by their sum. A row sums
        to 1.
        """
        scores = torch.stack([member.scores for member in members])
        weights = (scores * _column([member.config.alpha for member in members], scores)).softmax(-1)
        cutoffs = [member.config.cutoff for member in members]
        if not any(cutoffs):
            return weights
        weights = weights * (weights > _column(cutoffs, weights))
        return weights / weights.sum(-1, keepdim=True)

    def importance(self) -> Float[Tensor, " layers"]:
        """Return the importance of each layer without gradient: what `weights` returns; they sum to 1."""
        return self.weights().detach()

    def regularization(self, head: nn.Module | None = None) -> Tensor | None:
        """Return the entropy term of the loss, `entropy * mean_i(-p_i log p_i)`, over the layers' importances p_i.

        Returns None if the setting `entropy` is 0. `head` is unused.
        """
        if self.config.entropy == 0:
            return None
        weights = self.weights()
        positive = weights[weights > 0]  # 0 log 0 is 0, but its derivative is NaN
        return self.config.entropy * torch.special.entr(positive).sum() / self.layers


def _column(values: Sequence[float], like: Tensor) -> Float[Tensor, "members 1"] | float:
    return values[0] if len(set(values)) == 1 else like.new_tensor(values).unsqueeze(1)
