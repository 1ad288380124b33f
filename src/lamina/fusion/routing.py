"""Routing: the vectors of all tokens and layers vote for a few outputs, which use those that explain them best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import FusionConfig, InputWeighted
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped

_TOKENS = 128  # routed at once where no gradients are kept and each token is routed by itself: votes are large


@final
@dataclass(frozen=True)
class Routing(FusionConfig):
    """Route all tokens of all layers into `dim` numbers per text, in three stages.

    States are normalised, scaled and shifted per layer, and become tokens x layers vectors. These are routed to
    `vectors` vectors, those to as many again, and those to `dim` outputs of size 1. Every token carries the same
    features. In the author's code the outputs are the classes themselves, without a head: `Routing(dim=len(labels))`
    under `SequenceClassification(labels, pooling="first", linear=False)`. With any `dim`, `pooling="first"` ("mean" as
    well) reads the features with one linear map.

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
class RoutingFusion(InputWeighted, config=Routing):
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
        features, credit = self._routed(states, mask)
        amounts = credit.abs().sum(-1)
        whole = amounts.sum(1 if self.config.per_token else (1, 2), keepdim=True)  # each text (or token) counts as one
        self.observe((amounts / whole.clamp(min=torch.finfo(amounts.dtype).tiny)).movedim(1, 0), mask)
        return features

    def is_token_wise(self) -> bool:
        """Where the config says so."""
        return self.config.per_token

    def importance(self) -> Float[Tensor, " layers"]:
        """Each layer's part of the absolute `credit`, over tokens and outputs; each text (or token) counts as one.

        Of what was read since the mode last changed; equal shares before any.
        """
        return super().importance()

    @torch.no_grad()
    def credit(
        self,
        states: Float[Tensor, "layers batch tokens width"],
        mask: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch layers tokens dim"]:
        """How much each output (where there is no head, each class) is due to each layer of each token.

        It is the product of the three stages' last `phi`, what every input is worth to every output: positive where it
        was used, negative where ignoring it would have been better. Padding has 0. Summed over layers it is the credit
        of tokens, which the thesis's figure 4 shows layer by layer.

        Args:
            states: As `forward` takes them.
            mask: True (or 1) where a token is real; None: everywhere.

        Source:
            Heinsen 2022, appendix A; the author's code also divides each product by its standard deviation over the
            batch, which is left out here, since a text's credit would depend on its neighbours.
        """
        mask = torch.ones(states.shape[1:3], device=states.device) if mask is None else mask
        return self._routed(dict(enumerate(states)), mask.bool())[1]

    def _routed(self, states: dict[int, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Features `[batch, tokens, dim]` and credit `[batch, layers, tokens, dim]`, which has no gradient."""
        normed = [
            F.layer_norm(state.to(self.scale.dtype), (self.width,)) * self.scale[index] + self.shift[index]
            for index, state in states.items()
        ]
        batch, tokens = mask.shape
        routed = torch.stack(normed, dim=2)
        if self.config.per_token:
            routed, real = routed.flatten(0, 1), mask.flatten().unsqueeze(1).repeat(1, self.layers)
        else:
            routed, real = routed.flatten(1, 2), mask.repeat_interleave(self.layers, dim=1)
        if torch.is_grad_enabled() or not self.config.per_token or torch.compiler.is_exporting():
            features, credit = self._staged(routed, real)
        else:
            parts = zip(routed.split(_TOKENS), real.split(_TOKENS), strict=True)
            features, credit = (torch.cat(part) for part in zip(*(self._staged(*part) for part in parts), strict=True))
        features = features.view(batch, -1, self.dim).expand(-1, tokens, -1)
        return features, credit.view(batch, tokens, self.layers, self.dim).transpose(1, 2)

    def _staged(self, routed: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """What comes out of the three stages, and what each input is worth to each output."""
        worths: list[Tensor] = []
        for stage in self.stages:
            routed, worth = stage.route(routed, real)  # pyright: ignore[reportCallIssue]
            worths.append(worth.detach())
            real = None
        return routed, worths[0] @ (worths[1] @ worths[2])


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
        return self.route(vectors, real)[0]

    def route(
        self, vectors: Float[Tensor, "batch inputs size"], real: Bool[Tensor, "batch inputs"] | None = None
    ) -> tuple[Float[Tensor, "batch outputs more"], Float[Tensor, "batch inputs outputs"]]:
        """The outputs, and what each input was worth to each in the last round: phi in the paper."""
        if real is None:
            real = vectors.new_ones(vectors.shape[:2], dtype=torch.bool)
        damping = real.sum(1).clamp(min=1).to(vectors.dtype).rsqrt()[:, None, None]  # 1 / sqrt(number of inputs)
        activation = (vectors * self.activation).sum(-1, keepdim=True) * damping + self.activation_bias.unsqueeze(-1)
        active = activation.sigmoid() * real.unsqueeze(-1)
        # what each output gains by using an input and loses by ignoring it
        worth = self.worth
        use, ignore = worth(vectors).chunk(2, dim=-1) if isinstance(worth, nn.Linear) else worth.unbind()
        share, outputs, phi = torch.full_like(use, 1 / use.shape[-1]), vectors.new_empty(0), vectors.new_empty(0)
        for iteration in range(self.iterations):
            if iteration > 0:
                share = self._shares(vectors, outputs)
            phi = active * (use * share - ignore * (1 - share))
            outputs = self._outputs(vectors, damping, phi)
        return self._normalised(outputs), phi

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
