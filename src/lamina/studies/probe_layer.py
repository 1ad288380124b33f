"""What a probe reads: one layer's states, or their mean over a text, perhaps through one hidden layer."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, fed
from lamina.layers.sites import Site
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class ProbeLayer(FusionConfig):
    """One layer's states, layer-normed without affine part, so that one learning rate does for all layers.

    Args:
        layer: Which layer.
        pooled: The mean over the real tokens of a text in place of the token's own state.
        hidden: Size of a layer `gelu(W z + b)` before the head, which makes it an MLP; None: the head alone, linear.
        site: "output", the layer's states; "attention" or "ffn", what that part of its block adds to them.
    """

    layer: int
    pooled: bool = True
    hidden: int | None = None
    site: Site = "output"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_range("probe", "hidden", self.hidden, 1)

    @property
    def needs_block_inputs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it reads within a block, of which no states are recorded."""
        return self.site != "output"

    def selector(self) -> int:
        """The one layer."""
        return self.layer


class _ProbeStream(Stream):
    """What members read is made once; their hidden layers are one matrix product."""

    def __init__(self, members: Sequence[ProbeLayerFusion]) -> None:
        self._members, self._config = members, members[0].config
        self._state: Tensor | None = None

    def step(self, index: int, view: LayerView) -> None:  # noqa: ARG002
        state = view.normed.float()
        if self._config.pooled:
            weights = view.mask.to(state.dtype) / view.mask.sum(1, keepdim=True)
            state = torch.bmm(weights.unsqueeze(1), state)
        self._state = state

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        state: Tensor = fed(self._state)
        if self._config.hidden is None:
            features = state.expand(-1, mask.shape[1], -1) if self._config.pooled else state
            return [features] * len(self._members)
        maps = [member.inner for member in self._members]
        weight, bias = torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps])
        inner = F.gelu(F.linear(state, weight, bias)).unflatten(-1, (len(maps), -1)).movedim(2, 0)
        return list(inner.expand(-1, -1, mask.shape[1], -1).unbind(0))


@final
class ProbeLayerFusion(Fusion, config=ProbeLayer):
    """The module of `ProbeLayer`: of an MLP it has `inner`, a linear map."""

    stream_of: ClassVar = _ProbeStream
    inner: nn.Linear

    def __init__(self, config: ProbeLayer, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.hidden)
        if config.hidden is not None:
            self.inner = nn.Linear(width, config.hidden)

    def group(self) -> Hashable:
        """Same settings, same place."""
        return (super().group(), self.config.pooled, self.config.hidden, self.config.site)
