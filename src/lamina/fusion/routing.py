"""Routing: the states of all tokens and layers vote for a few output vectors, which iteratively weigh the votes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import FusionConfig, Range
from lamina.fusion.input_weighted import InputWeighted
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped

_TOKENS = 128  # tokens per chunk if each is routed by itself and no gradients are recorded: votes need much memory


@final
@dataclass(frozen=True)
class Routing(FusionConfig):
    """A fusion that routes the states of all tokens and layers to `dim` numbers per sequence, in three stages.

    In routing, each input vector votes for each output vector; an output uses those inputs most that it predicts best.
    The inputs of the first stage are the states, normalised, scaled and shifted per layer: tokens x layers vectors. The
    first and the second stage have `vectors` output vectors each; the outputs of the third are `dim` numbers. Every
    token gets the same features. In the author's code these numbers are the logits; for that use
    `Routing(dim=len(labels))` with `SequenceClassification(labels, pooling="first", linear=False)`. With any other
    `dim`, `pooling="first"` (or "mean") reads the features with one linear map.

    Args:
        dim: Size of the features, at least 2.
        vectors: Number of output vectors of the first and the second stage, at least 2.
        size: Size of those vectors, at least 2. None: the model's width, as in the paper.
        iterations: Number of iterations in each stage, at least 2 (the first one weighs all votes equally).
        layers: Selector of the layers that are read.
        per_token: Whether to route over the layers of each token separately, for token tasks.

    Raises:
        ConfigError: If a value is not valid.

    Source:
        Heinsen 2022, arXiv:2211.11754. The votes are never all in memory. As in the author's code, how much an input of
        the first stage is used or ignored is a linear function of the input, because the number of inputs varies.
        Padding has activation 0 and does not count as an input.
    """

    _ranges: ClassVar = dict.fromkeys(("dim", "vectors", "size", "iterations"), Range(2, 1 << 20))

    dim: int = 64
    vectors: int = 64
    size: int | None = None
    iterations: int = 2
    layers: Selector = "all"
    per_token: bool = False


@final
class RoutingFusion(InputWeighted, config=Routing):
    """The module of `Routing`. Parameters: `scale` and `shift` `[layers, width]`; `stages` are three of `Route`.

    For `importance`, each sequence (with `per_token`: each token) counts the same: a layer's amount there is its share
    of the absolute `credit`.
    """

    def __init__(self, config: Routing, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.dim)
        self.scale = nn.Parameter(torch.ones(layers, width))
        self.shift = nn.Parameter(torch.zeros(layers, width))
        size, vectors = config.size or width, config.vectors
        shapes = ((None, vectors, width, size), (vectors, vectors, size, size), (vectors, config.dim, size, 1))
        self.stages = nn.ModuleList(Route(*shape, iterations=config.iterations) for shape in shapes)

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """Return the features, and pass each layer's share of the absolute `credit` to `observe`.

        The shares of one sequence (with `per_token`: of one token) sum to 1.
        """
        features, credit = self._routed(states, mask)
        amounts = credit.abs().sum(-1)
        # normalised, so that each sequence (or token) counts the same
        total = amounts.sum(1 if self.config.per_token else (1, 2), keepdim=True)
        self.observe((amounts / total.clamp(min=torch.finfo(amounts.dtype).tiny)).movedim(1, 0), mask)
        return features

    def is_token_wise(self) -> bool:
        """Return `config.per_token`: whether each token is routed separately."""
        return self.config.per_token

    @torch.no_grad()
    def credit(
        self,
        states: Float[Tensor, "layers batch tokens width"],
        mask: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch layers tokens dim"]:
        """Return the credit: how much each layer of each token contributed to each output, that is, to each feature.

        It may be negative, and is 0 at padding. With `linear=False` in the head, an output is the logit of a class.

        Args:
            states: Hidden states of the selected layers, lowest first.
            mask: True (or 1) at tokens, False at padding. None: there is no padding.

        Source:
            Heinsen 2022, appendix A. The author's code also divides each product by its standard deviation over the
            batch. That is left out here, because the credit of a sequence would depend on the rest of the batch.
        """
        mask = torch.ones(states.shape[1:3], device=states.device) if mask is None else mask
        return self._routed(dict(enumerate(states)), mask.bool())[1]

    def _routed(self, states: dict[int, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return features `[batch, tokens, dim]`, and without gradient the `credit` `[batch, layers, tokens, dim]`.

        `states` is index of a layer, among those that are read -> state; `mask` is True at tokens.
        """
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
            features, credit = self._run_stages(routed, real)
        else:
            chunks = zip(routed.split(_TOKENS), real.split(_TOKENS), strict=True)
            results = zip(*(self._run_stages(*chunk) for chunk in chunks), strict=True)
            features, credit = (torch.cat(result) for result in results)
        features = features.view(batch, -1, self.dim).expand(-1, tokens, -1)
        return features, credit.view(batch, tokens, self.layers, self.dim).transpose(1, 2)

    def _run_stages(self, routed: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run the three stages on the vectors `routed`; return the outputs of the last, and the credit of inputs.

        The credit is how much each input contributed to each output, `[batch, inputs, outputs]`; it may be negative,
        and is 0 at padding. `real` is False at inputs that are padding. None: no input is padding.
        """
        weights: list[Tensor] = []
        for stage in self.stages:
            routed, phi = stage.route(routed, real)  # pyright: ignore[reportCallIssue]
            weights.append(phi.detach())
            real = None  # outputs of a stage are never padding
        return routed, weights[0] @ (weights[1] @ weights[2])


@final
class Route(nn.Module):
    """One stage of `Routing`: a module that computes output vectors from input vectors.

    Args:
        inputs: Number of input vectors. None: any number; the parameters per input are then shared by all.
        outputs: Number of output vectors.
        size_in: Size of an input vector.
        size_out: Size of an output vector. Vectors of size 1 are not normalised.
        iterations: Number of iterations.
    """

    def __init__(self, inputs: int | None, outputs: int, size_in: int, size_out: int, *, iterations: int) -> None:
        super().__init__()
        self.iterations = iterations
        rows, std = inputs or 1, size_in**-0.5
        self.activation = _normal(rows, size_in, std=2 * std)
        self.activation_bias = nn.Parameter(torch.zeros(rows))
        self.vote_scale = _normal(outputs, size_in)
        self.vote_map = _normal(size_in, size_out, std=2 * std)
        self.vote_bias = nn.Parameter(torch.zeros(outputs, size_out))
        self.guess_map = _normal(size_out, size_in, std=size_out**-0.5)
        self.guess_scale = _normal(outputs, size_in)
        self.guess_bias = nn.Parameter(torch.zeros(outputs, size_in))
        self.match_scale = _normal(rows, outputs, std=std)
        self.match_bias = nn.Parameter(torch.zeros(rows, outputs))
        self.worth = _normal(2, rows, outputs) if inputs else nn.Linear(size_in, 2 * outputs)

    def forward(
        self, vectors: Float[Tensor, "batch inputs size"], real: Bool[Tensor, "batch inputs"] | None = None
    ) -> Float[Tensor, "batch outputs more"]:
        """Return the output vectors; `real` is False at inputs that are padding. None: no input is padding."""
        return self.route(vectors, real)[0]

    def route(
        self, vectors: Float[Tensor, "batch inputs size"], real: Bool[Tensor, "batch inputs"] | None = None
    ) -> tuple[Float[Tensor, "batch outputs more"], Float[Tensor, "batch inputs outputs"]]:
        """Return the output vectors, and the weight of each input for each output in the last iteration.

        `real` is False at inputs that are padding. None: no input is padding. The weights may be negative and need not
        sum to 1; those of padding are 0.
        """
        if real is None:
            real = vectors.new_ones(vectors.shape[:2], dtype=torch.bool)
        damping = real.sum(1).clamp(min=1).to(vectors.dtype).rsqrt()[:, None, None]  # 1 / sqrt(number of inputs)
        activation = (vectors * self.activation).sum(-1, keepdim=True) * damping + self.activation_bias.unsqueeze(-1)
        active = activation.sigmoid() * real.unsqueeze(-1)
        # for each input and output: the benefit of using the input, and the cost of ignoring it
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
        """Return the weighted sum, over inputs i, of the votes `(x_i / sqrt(inputs) * scale_j) map + bias_j`.

        `vectors` are the inputs x, `weight` is the weight of each input for each output j, and `damping` the factor `1
        / sqrt(inputs)`. The inputs are summed before they are mapped, so that the votes themselves are never in memory.
        """
        gathered = torch.einsum("bij,bid->bjd", weight, vectors) * damping * self.vote_scale
        return gathered @ self.vote_map + weight.sum(1).unsqueeze(-1) * self.vote_bias

    def _shares(self, vectors: Tensor, outputs: Tensor) -> Tensor:
        """Return the share `[batch, inputs, outputs]` of each input that each output gets.

        An output gets more of the inputs that it predicts better. The shares of an input sum to 1.
        """
        guess = (self._normalised(outputs) @ self.guess_map) * self.guess_scale + self.guess_bias
        match = torch.einsum("bid,bjd->bij", vectors, guess) * self.match_scale + self.match_bias
        return F.logsigmoid(match).softmax(-1)

    def _normalised(self, outputs: Tensor) -> Tensor:
        return outputs if outputs.shape[-1] == 1 else F.layer_norm(outputs, outputs.shape[-1:])


def _normal(*shape: int, std: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).normal_(std=std))
