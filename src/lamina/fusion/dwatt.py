"""DWAtt: attention of each token over its own layers, with the top layer as the query."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.fusion.base import SIZE, FusionConfig
from lamina.fusion.input_weighted import InputWeighted
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@final
@dataclass(frozen=True)
class DWAtt(FusionConfig):
    """A fusion by depth-wise attention: `z_L + softmax(q K^T) V` over the layers of one token.

    `z_L` is the state of the highest selected layer, `v_n = LN_n(f_n(z_n))` the value of layer n, `q = 1 + elu(z_L +
    f_q(z_L))` the query, and `k_n = W_K p_n` the key of layer n, with a fixed random vector `p_n`. The query (`f_q`)
    and each layer (`f_n`) have their own network `f(x) = W LN(gelu(U x))`. The attention scores are not scaled by their
    size. The features have the model's width.

    Args:
        bottleneck: Size of `U x`, at least 1. None: half the model's width.
        position_dim: Size of `p_n`, at least 1. `p_n` is drawn once from U(0, 1) and saved.
        layers: Selector of the layers that are read. The default leaves out the embeddings.

    Raises:
        ConfigError: If a value is not valid.

    Source:
        ElNokrashy et al. 2024, "Depth-Wise Attention (DWAtt)", arXiv:2209.15168, eq. 3 to 11, with the biases that give
        the number of parameters in the paper: U has one, W and W_K have none, and all norms have weight and bias.
    """

    _ranges: ClassVar = {"bottleneck": SIZE, "position_dim": SIZE}

    bottleneck: int | None = None
    position_dim: int = 24
    layers: Selector = "1-"


def _bottleneck(width: int, size: int) -> nn.Sequential:
    """Return the network `W LN(gelu(U x))` with a hidden layer of `size`; its module `down` is U and `up` is W."""
    down, up = nn.Linear(width, size), nn.Linear(size, width, bias=False)
    return nn.Sequential(OrderedDict(down=down, gelu=nn.GELU(), norm=nn.LayerNorm(size), up=up))


@final
class DWAttFusion(InputWeighted, config=DWAtt):
    """The module of `DWAtt`. Its submodules correspond to the symbols in the formula of `DWAtt`.

    `query` is f_q, `values` are the f_n, `norms` the LN_n, `keys` is W_K, and the buffer `places` `[layers,
    position_dim]` holds the p_n.
    """

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
        """Return the features, summed layer by layer, and pass the attention weights to `observe`.

        Each state is removed from `states` after its use, to free memory.
        """
        dtype = self.keys.weight.dtype
        fused = states[self.layers - 1].to(dtype)
        query = 1 + F.elu(fused + self.query(fused))
        attention = F.linear(query, self.keys(self.places)).softmax(-1)
        self.observe(attention.movedim(-1, 0), mask)
        parts = zip(self.values, self.norms, attention.unsqueeze(-1).unbind(2), strict=True)
        for mlp, norm, weight in reversed(list(parts)):
            fused = torch.addcmul(fused, weight, norm(mlp(states.popitem()[1].to(dtype))))
        return fused
