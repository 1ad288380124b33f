"""Head2Toe: a linear head on features selected from every layer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion.base import Fusion, FusionConfig
from lamina.layers.selectors import Selector
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Head2Toe(FusionConfig):
    """Score the features of all layers with a regularised linear head, keep the best, train a fresh head on those.

    The features of a text are each layer's mean over its real tokens, scaled to length 1 and put one after another;
    every token carries the same. They go into one linear map, so the head is
    `SequenceClassification(labels, pooling="first")` ("mean" reads the same, at more memory), or with `per_token`
    `TokenClassification(labels, encoder_layers=0)`.

    Training has two stages. In the first the head sees everything, and the group lasso draws the weights of useless
    features towards 0. Between two epochs the features are chosen, the head starts again, and the penalty ends. With
    no epoch left for the second stage, the first head stays, with all features, and a warning is logged.

    Args:
        fraction: Share of the features, over all layers together, that is kept; above 0, up to 1.
        group_lasso: Weight of the sum over features of the length of their column of the head's weights.
        score_share: Share of the epochs that go into the first stage, rounded up; between 0 and 1.
        layers: Which layers.
        per_token: Features of each token by itself, for token tasks.
        chunks: Into how many stretches of equal length a text is cut, each with a mean of its own.

    Source:
        Dremov 2024, "Using Internal Representations of Frozen Transformer Models", section 3.3, on Evci et al. 2022,
        arXiv:2201.03529. They choose features once, after a full training; here both stages share the epochs of one
        run.
    """

    fraction: float = 0.1
    group_lasso: float = 1e-3
    score_share: float = 0.5
    layers: Selector = "all"
    per_token: bool = False
    chunks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"head2toe: fraction is {self.fraction}; it must be above 0 and at most 1.")
        if not 0 < self.score_share < 1:
            raise ConfigError(f"head2toe: score_share is {self.score_share}; it must be above 0 and below 1.")
        check_range("head2toe", "group_lasso", self.group_lasso, 0, float("inf"), open_high=True)
        check_range("head2toe", "chunks", self.chunks, 1, 1000)
        if self.per_token and self.chunks > 1:
            raise ConfigError(f"head2toe: chunks is {self.chunks} with per_token; chunks are parts of a whole text.")


@final
class Head2ToeFusion(Fusion, config=Head2Toe):
    """The module of `Head2Toe`; it has no parameters, only what was chosen: `kept [dim]` and `selected []`."""

    kept: Tensor
    selected: Tensor
    shares: Tensor

    def __init__(self, config: Head2Toe, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=layers * config.chunks * width)
        self.register_buffer("kept", torch.ones(self.dim, dtype=torch.bool))
        self.register_buffer("selected", torch.zeros((), dtype=torch.bool))
        self.register_buffer("shares", torch.full((layers,), 1 / layers))

    def active_layers(self) -> tuple[int, ...]:
        """Layers of which a feature is kept."""
        return tuple(self.kept.view(self.layers, -1).any(1).nonzero().flatten().tolist())

    def is_token_wise(self) -> bool:
        """Where the config says so."""
        return self.config.per_token

    def importance(self) -> Float[Tensor, " layers"]:
        """Share of each layer in the features that are kept; before that, in their scores after the last epoch."""
        return self.shares.clone()

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """The scaled features of all layers; 0 for those without a state and those that are not kept."""
        dtype, (batch, tokens) = self.shares.dtype, mask.shape
        pool = None if self.config.per_token else _stretches(mask, self.config.chunks).to(dtype)
        parts = [self.shares.new_zeros(batch, tokens if pool is None else 1, self.dim // self.layers)] * self.layers
        for index, state in states.items():
            part = state.to(dtype) if pool is None else (pool @ state.to(dtype)).flatten(1).unsqueeze(1)
            parts[index] = F.normalize(part, dim=-1)
        return (torch.cat(parts, dim=-1) * self.kept).expand(-1, tokens, -1)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError unless the head is one linear map, on what these features are of: a text or a token."""
        output = getattr(head, "output", None)
        own = set(output.parameters()) if isinstance(output, nn.Linear) else set()
        if not own or own != set(head.parameters()):
            hint = 'Set pooling="first" (SequenceClassification), or encoder_layers=0 (TokenClassification).'
            raise ConfigError(f"head2toe: the head has more than one linear map, whose weights are the scores. {hint}")
        if not self.config.per_token and not getattr(head, "pools", False):
            raise ConfigError("head2toe: the head labels each token; the features are a text's. Set per_token=True.")

    def regularization(self, head: Any = None) -> Tensor | None:
        """`group_lasso * sum_i ||W_i||` over the features, until they are chosen."""
        if head is None or self.config.group_lasso == 0 or bool(self.selected):
            return None
        return self.config.group_lasso * torch.linalg.vector_norm(head.output.weight, dim=0).sum()

    def on_epoch_end(self, done: float, head: Any) -> bool:
        """Take the scores down; choose the features and start the head again once the first stage is over."""
        if bool(self.selected):
            return False
        scores = head.output.weight.detach().square().sum(0)
        self._note(scores)
        if done < self.config.score_share:
            return False
        if done >= 1:
            hint = f"Use more epochs, or a smaller score_share (now {self.config.score_share})."
            logger.warning("head2toe: training ended before features were chosen; all are kept. %s", hint)
            return False
        count = max(1, round(self.config.fraction * self.dim))
        self.kept.zero_()[scores.topk(count).indices] = True
        self.selected.fill_(True)
        self._note(self.kept.to(scores.dtype))
        head.output.reset_parameters()
        return True

    def _note(self, worth: Float[Tensor, " dim"]) -> None:
        by_layer = worth.view(self.layers, -1).sum(1)
        if float(by_layer.sum()) > 0:
            self.shares.copy_(by_layer / by_layer.sum())


def _stretches(mask: Bool[Tensor, "batch tokens"], chunks: int) -> Float[Tensor, "batch chunks tokens"]:
    """Weights that average each of `chunks` stretches of a text's real tokens; short texts' stretches overlap."""
    place = (mask.cumsum(1) - 1).unsqueeze(1)
    count = mask.sum(1, keepdim=True)
    number = torch.arange(chunks, device=mask.device)
    start = (number * count).div(chunks, rounding_mode="floor").unsqueeze(2)
    end = ((number + 1) * count).add(chunks - 1).div(chunks, rounding_mode="floor").unsqueeze(2)
    inside = ((place >= start) & (place < end) & mask.unsqueeze(1)).float()
    return inside / inside.sum(2, keepdim=True).clamp(min=1)
