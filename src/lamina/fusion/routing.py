"""Routing: the vectors of all tokens and layers vote for a few outputs, which use those that explain them best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import Fusion, FusionConfig
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class Routing(FusionConfig):
    """Route all tokens of all layers into `dim` numbers per text, in three stages.

    States are normalised, scaled and shifted per layer, and become tokens x layers vectors. These are routed to
    `vectors` vectors, those to as many again, and those to `dim` outputs of size 1. Every token carries the same
    features: `SequenceClassification(labels, pooling="first")` reads them with one linear map ("mean" as well). The
    paper's last stage ends in the classes themselves, without a head.

    Args:
        dim: Size of the features; at least 2.
        vectors: Outputs of the first and the second stage; at least 2.
        size: Size of those vectors; None: the width of the states, as in the paper.
        iterations: Rounds of routing in each stage; at least 2 (a single one routes nothing).
        layers: Which layers.
        per_token: Route over the layers of each token by itself, for token tasks.

    Source:
        Heinsen 2022, arXiv:2211.11754. The votes are never held in memory. As in the author's code, how much each input
        is used or ignored in the first stage is a linear function of that input, since the number of inputs varies.
        Padding has no activation and does not count as an input.
    """

    dim: int = 64
    vectors: int = 64
    size: int | None = None
    iterations: int = 2
    layers: Selector = "all"
    per_token: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dim", "vectors", "size", "iterations"):
            check_range("routing", name, getattr(self, name), 2, 1 << 20)


@final
class RoutingFusion(Fusion, config=Routing):
    """The module of `Routing`: `scale` and `shift` `[layers, width]`, and three `stages`."""

    def __init__(self, config: Routing, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        self.scale = nn.Parameter(torch.ones(layers, width))
        self.shift = nn.Parameter(torch.zeros(layers, width))
        size, many, rounds = config.size or width, config.vectors, config.iterations
        shapes = ((None, many, width, size), (many, many, size, size), (many, config.dim, size, 1))
        self.stages = nn.ModuleList(Route(*shape, iterations=rounds) for shape in shapes)

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """Route what the states hold, all at once: every iteration needs every input."""
        parts = [
            F.layer_norm(state.to(self.scale.dtype), (self.width,)) * self.scale[index] + self.shift[index]
            for index, state in states.items()
        ]
        batch, tokens = mask.shape
        inputs = torch.stack(parts, dim=2)
        if self.config.per_token:
            routed, real = inputs.flatten(0, 1), mask.new_ones(batch * tokens, self.layers)
        else:
            routed, real = inputs.flatten(1, 2), mask.repeat_interleave(self.layers, dim=1)
        routed = self.stages[0](routed, real)
        for stage in self.stages[1:]:
            routed = stage(routed)
        return routed.view(batch, -1, self.dim).expand(-1, tokens, -1)


@final
class Route(nn.Module):
    """One stage of routing; where `inputs` is None, any number share parameters. Outputs of size 1 have no norm."""

    def __init__(self, inputs: int | None, outputs: int, size_in: int, size_out: int, *, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        own, std = inputs or 1, size_in**-0.5
        self.activation = _normal(own, size_in, std=2 * std)
        self.activation_bias = nn.Parameter(torch.zeros(own))
        self.vote_scale = _normal(outputs, size_in)
        self.vote_map = _normal(size_in, size_out, std=2 * std)
        self.vote_bias = nn.Parameter(torch.zeros(outputs, size_out))
        self.guess_map = _normal(size_out, size_in, std=size_out**-0.5)
        self.guess_scale = _normal(outputs, size_in)
        self.guess_bias = nn.Parameter(torch.zeros(outputs, size_in))
        self.match_scale = _normal(own, outputs, std=std)
        self.match_bias = nn.Parameter(torch.zeros(own, outputs))
        self.worth = _normal(2, own, outputs) if inputs else nn.Linear(size_in, 2 * outputs)

    def forward(
        self, vectors: Float[Tensor, "batch inputs size"], real: Bool[Tensor, "batch inputs"] | None = None
    ) -> Float[Tensor, "batch outputs more"]:
        """Route; `real` is False where an input is padding (None: nowhere)."""
        if real is None:
            real = vectors.new_ones(vectors.shape[:2], dtype=torch.bool)
        damping = real.sum(1).clamp(min=1).to(vectors.dtype).rsqrt()[:, None, None]  # 1 / sqrt(number of inputs)
        activation = (vectors * self.activation).sum(-1, keepdim=True) * damping + self.activation_bias.unsqueeze(-1)
        active = activation.sigmoid() * real.unsqueeze(-1)
        # what each output gains by using an input and loses by ignoring it
        worth = self.worth
        use, ignore = worth(vectors).chunk(2, dim=-1) if isinstance(worth, nn.Linear) else worth.unbind()
        share, outputs = torch.full_like(use, 1 / use.shape[-1]), vectors.new_empty(0)
        for iteration in range(self.iterations):
            if iteration > 0:
                share = self._shares(vectors, outputs)
            outputs = self._outputs(vectors, damping, active * (use * share - ignore * (1 - share)))
        return self._normalised(outputs)

    def _outputs(self, vectors: Tensor, damping: Tensor, weight: Tensor) -> Tensor:
        """Sum of the votes `(x_i / sqrt(inputs) * vote_scale_j) vote_map + vote_bias_j`, inputs summed first."""
        gathered = torch.einsum("bij,bid->bjd", weight, vectors) * damping * self.vote_scale
        return gathered @ self.vote_map + weight.sum(1).unsqueeze(-1) * self.vote_bias

    def _shares(self, vectors: Tensor, outputs: Tensor) -> Tensor:
        """How each input divides itself among the outputs: by how well they predict it."""
        guess = (self._normalised(outputs) @ self.guess_map) * self.guess_scale + self.guess_bias
        match = torch.einsum("bid,bjd->bij", vectors, guess) * self.match_scale + self.match_bias
        return F.logsigmoid(match).softmax(-1)

    def _normalised(self, outputs: Tensor) -> Tensor:
        return outputs if outputs.shape[-1] == 1 else F.layer_norm(outputs, outputs.shape[-1:])


def _normal(*shape: int, std: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))
