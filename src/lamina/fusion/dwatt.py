"""DWAtt: each token attends over its own layers, with the top one as the query."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import FusionConfig, InputWeighted
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class DWAtt(FusionConfig):
    """Depth-wise attention: `z_L + softmax(q K^T) V` over the layers of one token; `dim` is the model's width.

    `v_n = LN_n(f_n(z_n))`, `q = 1 + elu(z_L + f_q(z_L))`, `k_n = W_K p_n` with fixed random `p_n`, and
    `f(x) = W LN(gelu(U x))`, one of its own for the query and for each layer. z_L is the highest layer that is
    selected. The scores are not divided by the root of their size. It needs every state at once: the query comes last.

    Args:
        bottleneck: Size of `U x`, at least 1; None: half the model's width.
        position_dim: Size of `p_n`, drawn once from U(0, 1) and saved; at least 1.
        layers: Which layers; the default leaves the embeddings out.

    Source:
        ElNokrashy et al. 2024, "Depth-Wise Attention (DWAtt)", arXiv:2209.15168, eq. 3 to 11, with the biases
        that make up its printed count: U has one, W and W_K have none, and all norms are affine.
    """

    bottleneck: int | None = None
    position_dim: int = 24
    layers: Selector = "1-"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("dwatt", "bottleneck", self.bottleneck, 1, 1 << 20)
        check_range("dwatt", "position_dim", self.position_dim, 1, 1 << 20)


def _bottleneck(width: int, size: int) -> nn.Sequential:
    """`W LN(gelu(U x))`: `down` is U, `up` is W."""
    down, up = nn.Linear(width, size), nn.Linear(size, width, bias=False)
    return nn.Sequential(OrderedDict(down=down, gelu=nn.GELU(), norm=nn.LayerNorm(size), up=up))


@final
class DWAttFusion(InputWeighted, config=DWAtt):
    """The module of `DWAtt`: `query`, `values`, `norms`, `keys` (W_K) and the fixed `places [layers, position_dim]`."""

    token_wise: ClassVar = True
    places: Tensor

    def __init__(self, config: DWAtt, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width)
        size = config.bottleneck or max(1, width // 2)
        self.query = _bottleneck(width, size)
        self.values = nn.ModuleList(_bottleneck(width, size) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.keys = nn.Linear(config.position_dim, width, bias=False)
        self.register_buffer("places", torch.rand(layers, config.position_dim))

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """Attend, one value at a time; a state is let go once it was read."""
        dtype = self.keys.weight.dtype
        fused = states[self.layers - 1].to(dtype)
        query = 1 + F.elu(fused + self.query(fused))
        attention = F.linear(query, self.keys(self.places)).softmax(-1)
        self.observe(attention.movedim(-1, 0), mask)
        parts = zip(self.values, self.norms, attention.unsqueeze(-1).unbind(2), strict=True)
        for mlp, norm, weight in reversed(list(parts)):
            fused = torch.addcmul(fused, weight, norm(mlp(states.popitem()[1].to(dtype))))
        return fused
