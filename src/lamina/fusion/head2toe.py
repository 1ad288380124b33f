"""Head2Toe: a linear head on a few features selected from all layers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.fusion.base import Fusion, FusionConfig, Range, nonzero_indices
from lamina.layers.selectors import Selector

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Head2Toe(FusionConfig):
    """A fusion that scores all layers' features with a linear head, keeps the best, and trains a new head on them.

    For each layer, the mean of the tokens' states is scaled to length 1. These vectors, concatenated, are the features,
    the same for every token. A single linear map must read them, otherwise a bank raises ConfigError: use
    `SequenceClassification(labels, pooling="first")` ("mean" gives the same result and needs more memory), or with
    `per_token` `TokenClassification(labels, encoder_layers=0)`.

    Training has two stages. In the first, the head reads all features, and a group lasso penalty pulls the weights of
    useless features towards 0. Then, between two epochs, the features are selected by the size of their weights, the
    head is initialised again, and the penalty ends. If no epoch is left for the second stage, the first head stays,
    with all features, and a warning is logged.

    Args:
        fraction: Share of the features, over all layers together, that is kept (at least one); above 0, up to 1.
        group_lasso: Weight of the penalty: the sum of the lengths of the columns of the head's weight. 0: no penalty.
        score_share: Share of the epochs for the first stage, rounded up to whole epochs; between 0 and 1, exclusive.
        layers: Selector of the layers that are read.
        per_token: Whether each token has its own features instead of the mean, for token tasks.
        chunks: Number of equally long parts into which a sequence is cut, each with its own mean. A layer's means are
            scaled together. With `per_token` only 1.

    Raises:
        ConfigError: If a value is not valid, or `chunks` is above 1 with `per_token`.

    Source:
        Dremov 2024, "Using Internal Representations of Frozen Transformer Models", section 3.3, after Evci et al. 2022,
        arXiv:2201.03529. They select features after a full training; here both stages share the epochs of one training.
    """

    _ranges: ClassVar = {"group_lasso": Range(0, open_high=True), "chunks": Range(1, 1000)}

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
        if self.per_token and self.chunks > 1:
            raise ConfigError(f"head2toe: chunks is {self.chunks} with per_token; chunks are parts of a whole text.")


@final
class Head2ToeFusion(Fusion, config=Head2Toe):
    """The module of `Head2Toe`. It has no parameters; its buffers are saved with the reader.

    The buffers are `kept` `[dim]` (which features are kept), `selected` `[]` (whether the selection was made), and
    `shares` `[layers]` (what `importance` returns).
    """

    kept: Tensor
    selected: Tensor
    shares: Tensor

    def __init__(self, config: Head2Toe, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=layers * config.chunks * width)
        self.register_buffer("kept", torch.ones(self.dim, dtype=torch.bool))
        self.register_buffer("selected", torch.zeros((), dtype=torch.bool))
        self.register_buffer("shares", torch.full((layers,), 1 / layers))

    def active_layers(self) -> tuple[int, ...]:
        """Return which of the selected layers (from 0) have at least one kept feature."""
        return nonzero_indices(self.kept.view(self.layers, -1).any(1))

    def is_token_wise(self) -> bool:
        """Return `config.per_token`: whether each token has its own features."""
        return self.config.per_token

    def importance(self) -> Float[Tensor, " layers"]:
        """Return each layer's share of the kept features; `[layers]`, with sum 1.

        Before the selection, it is the share of the head's squared weights at the end of the last epoch; before the
        first epoch ends, all shares are equal.
        """
        return self.shares.clone()

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """Return each layer's states, scaled to length 1 and concatenated.

        Features that are not kept, and layers that `states` lacks, are 0. Without `per_token`, a layer's states are
        first averaged over each chunk of tokens, the averages are scaled together, and all tokens get equal features.
        """
        dtype, (batch, tokens) = self.shares.dtype, mask.shape
        pool = None if self.config.per_token else _chunk_weights(mask, self.config.chunks).to(dtype)
        parts = [self.shares.new_zeros(batch, tokens if pool is None else 1, self.dim // self.layers)] * self.layers
        for index, state in states.items():
            part = state.to(dtype) if pool is None else (pool @ state.to(dtype)).flatten(1).unsqueeze(1)
            parts[index] = F.normalize(part, dim=-1)
        return (torch.cat(parts, dim=-1) * self.kept).expand(-1, tokens, -1)

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError unless `head` is one linear map, and labels whole sequences or `per_token` is set."""
        output = getattr(head, "output", None)
        linear = set(output.parameters()) if isinstance(output, nn.Linear) else set()
        if not linear or linear != set(head.parameters()):
            problem = "the head is not a single linear map, whose weights score the features"
            hint = 'Set pooling="first" (SequenceClassification), or encoder_layers=0 (TokenClassification).'
            raise ConfigError(f"head2toe: {problem}. {hint}")
        if not self.config.per_token and not getattr(head, "pools", False):
            raise ConfigError("head2toe: the head labels tokens; the features are of whole texts. Set per_token=True.")

    def regularization(self, head: nn.Module | None = None) -> Tensor | None:
        """Return the group lasso penalty `group_lasso * sum_i ||W_i||`, with the head's weights W_i of feature i.

        Returns None after the selection, without a head, or if `group_lasso` is 0.
        """
        if head is None or self.config.group_lasso == 0 or bool(self.selected):
            return None
        return self.config.group_lasso * torch.linalg.vector_norm(_output_of(head).weight, dim=0).sum()

    def on_epoch_end(self, done: float, head: nn.Module) -> bool:
        """Update `shares`; at the end of the first stage, also select features and initialise the head again.

        Once features are selected, it does nothing. `done` is the finished share of the epochs; at 1 it is too late to
        select, and a warning is logged. `head` reads the features. Returns whether features were selected now.
        """
        if bool(self.selected):
            return False
        output = _output_of(head)
        scores = output.weight.detach().square().sum(0)
        self._store_shares(scores)
        if done < self.config.score_share:
            return False
        if done >= 1:
            hint = f"Use more epochs, or a smaller score_share (now {self.config.score_share})."
            logger.warning("head2toe: training ended before features were selected; all are kept. %s", hint)
            return False
        count = max(1, round(self.config.fraction * self.dim))
        self.kept.zero_()[scores.topk(count).indices] = True
        self.selected.fill_(True)
        self._store_shares(self.kept.to(scores.dtype))
        output.reset_parameters()
        return True

    def _store_shares(self, scores: Float[Tensor, " dim"]) -> None:
        """Set `shares` to each layer's share of the sum of all features' `scores`; do nothing if the sum is 0."""
        by_layer = scores.view(self.layers, -1).sum(1)
        if float(by_layer.sum()) > 0:
            self.shares.copy_(by_layer / by_layer.sum())


def _output_of(head: nn.Module) -> nn.Linear:
    """Return the linear map that the head consists of; `check_head` has made sure that there is one."""
    return cast("nn.Linear", head.output)


def _chunk_weights(mask: Bool[Tensor, "batch tokens"], chunks: int) -> Float[Tensor, "batch chunks tokens"]:
    """Return weights that average each of `chunks` equally long parts of a sequence's tokens, padding excluded.

    If `chunks` does not divide the number of tokens, neighbouring parts may share a token, so that none is empty.
    In a row that is all padding, all weights are 0.
    """
    place = (mask.cumsum(1) - 1).unsqueeze(1)
    count = mask.sum(1, keepdim=True)
    number = torch.arange(chunks, device=mask.device)
    start = (number * count).div(chunks, rounding_mode="floor").unsqueeze(2)
    end = ((number + 1) * count).add(chunks - 1).div(chunks, rounding_mode="floor").unsqueeze(2)
    inside = ((place >= start) & (place < end) & mask.unsqueeze(1)).float()
    return inside / inside.sum(2, keepdim=True).clamp(min=1)
