"""The base class of fusions whose layer weights differ from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from lamina.fusion.base import Fusion, normalized

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


class InputWeighted(Fusion):
    """Base class of fusions whose layer weights differ from token to token; their sums give the `importance`.

    Subclasses pass the weights of each pass to `observe`.

    Attributes:
        amounts: `[layers]`, the sum of each layer's absolute weights over all tokens since the last switch between
            training and eval mode. It is a buffer that is not saved.
    """

    amounts: Tensor
    _counting: ClassVar = Lock()  # held during the addition, so that threads do not lose each other's counts

    def __init__(self, config: Any, *, layers: int, width: int, dim: int | None = None) -> None:  # noqa: ANN401
        super().__init__(config, layers=layers, width=width, dim=dim)
        self.register_buffer("amounts", torch.zeros(layers), persistent=False)

    def observe(self, weights: Float[Tensor, "layers batch tokens"], mask: Bool[Tensor, "batch tokens"]) -> None:
        """Add the absolute weights at all tokens (`mask` True) of one pass to `amounts`; in an export, do nothing.

        The weights of a token may be negative, and need not sum to 1.
        """
        if torch.compiler.is_exporting():
            return
        seen = weights.detach().float().abs().masked_fill(~mask, 0).sum((1, 2))
        with self._counting:
            self.amounts = self.amounts.to(seen) + seen

    def contributions(self, states: Sequence[Float[Tensor, "1 tokens width"]]) -> Float[Tensor, "layers tokens"]:
        """Return the absolute weight of each layer at each token of one text, `[layers, tokens]`.

        `amounts` does not change.
        """
        seen: list[Tensor] = []
        twin = copy(self)
        twin.observe = lambda weights, mask: seen.append(weights.detach())  # noqa: ARG005  the name is part of the call
        twin(torch.stack(list(states)))
        return seen[0][:, 0].float().abs()

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode, as in torch. If the mode changes, `amounts` is set to 0."""
        if mode != self.training:
            self.amounts = torch.zeros_like(self.amounts)
        return super().train(mode)

    def importance(self) -> Float[Tensor, " layers"]:
        """Return each layer's share of `amounts`. The shares sum to 1; they are equal as long as `amounts` are 0."""
        return normalized(self.amounts)
