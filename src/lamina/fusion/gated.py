"""Gated: each state of each token sets its own weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import Fusion, FusionConfig, WeightedSum
from lamina.fusion.elementwise import shares
from lamina.fusion.layer_view import LayerView
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class Gated(FusionConfig):
    """`sum_i w_i z_i` with `w_i = U gelu(V z_i + a) + b`, one number per token and layer; `dim` is the model's width.

    Args:
        hidden: Size of the gate's hidden layer, at least 1.
        layers: Which layers.

    Source:
        Wang et al. 2018, "Multi-layer Representation Fusion for Neural Machine Translation", as ElNokrashy et al. 2024
        (DWAtt) write it: `w_i = f(z_i)`, so one gate serves all the layers and nothing normalises its weights. U starts
        at 0 and b at 1 / layers, so the sum starts as the mean.
    """

    hidden: int = 128
    layers: Selector = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gated", "hidden", self.hidden, 1, 1 << 20)


class InputWeighted(Fusion):
    """A fusion that weighs its layers anew for each token, and keeps count of what each layer got."""

    amounts: Tensor  # [layers]; not saved, since it tells what was read, not what was learned
    _counting: ClassVar = Lock()  # held for one addition, so that no thread's count is lost

    def __init__(self, config: Any, *, layers: int, width: int, dim: int | None = None) -> None:
        super().__init__(config, layers=layers, width=width, dim=dim)
        self.register_buffer("amounts", torch.zeros(layers), persistent=False)

    def observe(self, weights: Float[Tensor, "layers batch tokens"], mask: Bool[Tensor, "batch tokens"]) -> None:
        """Count the size of the weights of real tokens; a graph that is exported counts nothing."""
        if torch.compiler.is_exporting():
            return
        seen = weights.detach().float().abs().masked_fill(~mask, 0).sum((1, 2))
        with self._counting:
            self.amounts = self.amounts.to(seen) + seen

    def train(self, mode: bool = True) -> Self:
        """As in torch; a change of mode starts a new count."""
        if mode != self.training:
            self.amounts = torch.zeros_like(self.amounts)
        return super().train(mode)

    def importance(self) -> Float[Tensor, " layers"]:
        """Each layer's part of the absolute weights of real tokens since the mode last changed; equal before any."""
        return shares(self.amounts)


class _GatedStream(WeightedSum):
    """One matrix product per layer for all members together: their hidden layers are stacked into one."""

    def __init__(self, members: Sequence[GatedFusion]) -> None:
        self._members = members
        self._inner = torch.cat([member.inner.weight for member in members])
        self._inner_bias = torch.cat([member.inner.bias for member in members])
        self._outer = torch.cat([member.outer.weight for member in members])
        self._outer_bias = torch.cat([member.outer.bias for member in members])
        self._weights: list[Tensor] = []

    def step(self, index: int, view: LayerView) -> None:
        state = view.state.to(self._inner.dtype)
        hidden = F.gelu(F.linear(state, self._inner, self._inner_bias)).unflatten(-1, (len(self._members), -1))
        weights = ((hidden * self._outer).sum(-1) + self._outer_bias).movedim(2, 0)
        self._weights.append(weights.detach())
        self._add(state, weights.unsqueeze(-1))

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        sums = super().finish(mask)
        for member, weights in zip(self._members, torch.stack(self._weights, dim=1), strict=True):
            member.observe(weights, mask)
        return sums


@final
class GatedFusion(InputWeighted, config=Gated):
    """The module of `Gated`: the linear maps `inner` (V, a) and `outer` (U, b)."""

    token_wise: ClassVar = True
    stream_of: ClassVar = _GatedStream

    def __init__(self, config: Gated, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        self.inner = nn.Linear(width, config.hidden)
        self.outer = nn.Linear(config.hidden, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.constant_(self.outer.bias, 1 / layers)
