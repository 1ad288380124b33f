"""One output for a whole text, image or audio clip: classification, regression or several labels at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError, check_known
from lamina.fusion.base import PROBABILITY, SIZE, Range, dropout
from lamina.fusion.concat import Concat
from lamina.fusion.paired_layers import PairedLayers
from lamina.fusion.pooled_layers import PooledLayers
from lamina.heads.attention import EncoderLayer, SelfAttention, attend, encode
from lamina.heads.base import (
    AffineMap,
    HeadConfig,
    LabelHead,
    ProblemType,
    TokenMap,
    check_class_weights,
    check_head_settings,
    linear,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lamina.fusion.base import FusionConfig
    from lamina.heads.base import ReadTask

logger = logging.getLogger(__name__)

Pooling = Literal["attention", "query", "mean", "first", "last"]


@dataclass(frozen=True)
class PooledClassification(HeadConfig):
    """Base class of heads for whole texts, images and audio clips: they pool the tokens, then apply a linear map.

    Args:
        labels: Names of the classes, or their number; one name for regression.
        attention_heads: Attention heads of the self-attention (pooling "attention") and of the encoder layers; must
            divide the size of the features.
        dropout: Probability of dropout inside the encoder layers and before pooling.
        attention_dropout: Probability of dropout on the weights of the self-attention. The paper's code uses its
            `dropout` there too.
        pooling: How the tokens' features become one vector; padding is excluded. "attention", as in the paper:
            self-attention without residual, GELU, dropout, then the mean over tokens. "query": the mean over tokens
            with the weights `softmax_t(query . h_t / sqrt(dim))`; the query is learned and initialised to 0. "mean":
            the plain mean. "first": the first token. "last": the last token, which has seen all others in a causal
            model.
        problem_type: "classification", "regression" (one output, squared error) or "multi_label" (a sigmoid per label).
        class_weights: One positive weight per label for the loss. None: all equal. Left out for a regression, with a
            warning.
        linear: Whether there is a linear map, with dropout before it. False: the pooled features are the logits, so
            their size must be the number of labels, as after `Routing(dim=len(labels))`. This excludes pooling
            "attention" and encoder layers.
        encoder_layers: Number of pre-norm transformer encoder layers before the pooling.
        feedforward: Inner size of each encoder layer's feed-forward network.

    Raises:
        ConfigError: If `labels`, a number or `class_weights` is not allowed, or options contradict each other; when the
            module is built, if the size of the features does not fit `attention_heads` (where used) or `linear=False`.
        UnknownNameError: If `pooling` or `problem_type` is unknown.

    Source:
        Dremov 2024, section 5.2; the encoder layers are those of its token tasks (figure 15). "query" is one head of
        the attention probes of Kramár et al. 2026, arXiv:2601.11516, section 3.1.2, applied to the fusion's features.
    """

    problem_types: ClassVar[tuple[str, ...]] = get_args(ProblemType)

    labels: Sequence[str]
    attention_heads: int = 8
    dropout: float = 0.1
    attention_dropout: float = 0.0
    pooling: Pooling = "attention"
    problem_type: ProblemType = "classification"
    class_weights: tuple[float, ...] | None = None
    linear: bool = True
    encoder_layers: int = 0
    feedforward: int = 2048

    @classmethod
    def default(cls, task: ReadTask) -> tuple[FusionConfig, Self]:
        """Return `PairedLayers` for pairs of texts, else `PooledLayers`; and a head for `task` with pooling "first"."""
        fusion = PairedLayers() if task.pairs else PooledLayers()
        return fusion, cls(task.labels, pooling="first", problem_type=task.problem_type)

    def __post_init__(self) -> None:
        ranges = {"dropout": PROBABILITY, "encoder_layers": Range(0, 64), "feedforward": SIZE}
        check_head_settings(self, {**ranges, "attention_dropout": PROBABILITY})
        check_known(self.kind, [self.pooling], get_args(Pooling), "pooling")
        check_known(self.kind, [self.problem_type], self.problem_types, "problem_type")
        if not self.linear and (self.pooling == "attention" or self.encoder_layers):
            problem = "pooling 'attention'" if self.pooling == "attention" else f"encoder_layers={self.encoder_layers}"
            hint = "Use encoder_layers=0, and 'query', 'first', 'last' or 'mean'."
            reason = "which mixes features, so they are not logits"
            raise ConfigError(f"{self.kind}: linear is False with {problem}, {reason}. {hint}")
        if self.problem_type == "regression" and len(self.labels) != 1:
            raise ConfigError(f"{self.kind}: {len(self.labels)} labels for a regression; it has one.")
        if self.problem_type == "regression" and self.class_weights is not None:
            logger.warning("%s: class_weights have no effect on a regression, and are left out", self.kind)
            object.__setattr__(self, "class_weights", None)  # no error, since banks with such a reader were saved
        object.__setattr__(self, "class_weights", check_class_weights(self.kind, self.class_weights, len(self.labels)))

    @property
    def weighs_tokens(self) -> bool:
        """Whether the logits are a weighted mean over tokens: with pooling "query" and no encoder layers before it."""
        return self.pooling == "query" and not self.encoder_layers

    def build(self, dim: int) -> PooledClassificationHead:
        """Return a new module for features of size `dim`; ConfigError if the settings do not fit that size."""
        return PooledClassificationHead(self, dim)


@final
@dataclass(frozen=True)
class SequenceClassification(PooledClassification):
    """A head with one output for a whole text; see `PooledClassification` for the settings."""

    kind: ClassVar[str] = "sequence_classification"

    @classmethod
    def default_for_watching(cls, task: ReadTask) -> tuple[FusionConfig, Self]:
        """Return a fusion and a head for a monitor: a map of all layers per token, and the mean of the tokens' logits.

        With them, a token's scores do not depend on later tokens.
        """
        return Concat(dim=128, layers="all"), cls(task.labels, pooling="mean", problem_type=task.problem_type)


@final
@dataclass(frozen=True)
class ImageClassification(PooledClassification):
    """A head with one class for an image; see `PooledClassification` for the settings.

    The tokens are all positions of the model: patches, class token and registers. Pooling "first" reads the class token
    of models that have one. The only problem type is "classification".
    """

    kind: ClassVar[str] = "image_classification"
    problem_types: ClassVar = ("classification",)
    inputs: ClassVar = ("pixel_values",)


@final
@dataclass(frozen=True)
class AudioClassification(PooledClassification):
    """A head with one class for an audio clip; see `PooledClassification` for the settings.

    The tokens are the audio frames. Padding frames are left out if the model says which these are. The only problem
    type is "classification".
    """

    kind: ClassVar[str] = "audio_classification"
    problem_types: ClassVar = ("classification",)
    inputs: ClassVar = ("input_values", "input_features")


@final
class PooledClassificationHead(LabelHead):
    """The module of `PooledClassification` and its subclasses; logits `[batch, classes]`."""

    pools: ClassVar[bool] = True

    def __init__(self, config: PooledClassification, dim: int) -> None:
        parts = {}
        if config.pooling == "attention":
            parts["attention"] = SelfAttention(config.kind, dim, config.attention_heads, config.attention_dropout)
        settings = (config.attention_heads, config.feedforward, config.dropout)
        encoder = (EncoderLayer(config.kind, dim, *settings) for _ in range(config.encoder_layers))
        parts["encoder"] = nn.ModuleList(encoder)
        super().__init__(config, dim, **parts)
        if config.problem_type == "regression":
            nn.init.zeros_(self.output.bias)  # how `start_output` knows that the head was never trained
        self.query = nn.Parameter(torch.zeros(dim)) if config.pooling == "query" else None

    @property
    def reads_first(self) -> bool:
        """Whether only the first token that is not padding is read: with pooling "first" and no encoder layers."""
        return self.config.pooling == "first" and not self.config.encoder_layers

    def is_token_wise(self) -> bool:
        """Return whether the logits are a mean of the tokens' own logits.

        That is so with pooling "mean" or "query", unless encoder layers mix the tokens before.
        """
        return self.config.pooling in ("mean", "query") and not self.config.encoder_layers

    def token_map(self) -> AffineMap | None:
        """Return the linear map from a token's features to its logits; None unless `is_token_wise()` is True.

        With pooling "query", the map has one more output, the last: the score `query . h_t / sqrt(dim)` of the token.
        """
        output = super().token_map()
        if output is None or self.query is None:
            return output
        scale = 1 / math.sqrt(len(self.query))
        weight = torch.cat([output.weight, self.query.unsqueeze(0) * scale])
        return TokenMap(weight, torch.cat([output.bias, output.bias.new_zeros(1)]))

    def forward_many(
        self,
        heads: Sequence[Any],
        features: Float[Tensor, "heads batch tokens dim"],
        mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "heads batch classes"]:
        """Return the logits of each sequence, for several `heads` of equal settings; head i reads `features[i]`.

        Features with a single token come from a fusion that pools: "first" and "last" read it whatever the mask.
        """
        outputs, generators = [head.output for head in heads], [head.generator for head in heads]
        p = self.config.dropout if self.training and self.config.linear else 0.0
        if self.config.encoder_layers:
            for layers in zip(*(head.encoder for head in heads), strict=True):
                features = encode(layers, features, mask, generators)
        if self.config.pooling in ("first", "last"):
            if features.shape[2] == 1:  # one vector for the whole text
                return linear(outputs, dropout(features[:, :, 0], p, generators))
            if self.config.pooling == "first":
                token = mask.int().argmax(1)
            else:
                token = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
            features = features[:, torch.arange(features.shape[1], device=token.device), token]
            return linear(outputs, dropout(features, p, generators))
        if self.config.pooling == "attention":
            features = F.gelu(attend([head.attention for head in heads], features, mask, generators))
        if self.config.pooling == "query":
            pairs = zip(heads, features, strict=True)
            scores = [part @ head.query / math.sqrt(len(head.query)) for head, part in pairs]
            weights = torch.stack(scores).masked_fill(~mask, -torch.inf).softmax(-1).unsqueeze(-1)
            return linear(outputs, (dropout(features, p, generators) * weights).sum(2))
        share = mask.unsqueeze(-1).to(features.dtype)
        return linear(outputs, (dropout(features, p, generators) * share).sum(2) / share.sum(1))

    def loss(self, logits: Float[Tensor, "batch classes"], labels: Tensor) -> Float[Tensor, ""]:
        """Return the mean loss over the labels that are present: cross-entropy, squared error or binary cross-entropy.

        Labels are `[batch]` class indices for classification (IGNORE: no label), `[batch]` floats for regression (NaN:
        no label), and `[batch, classes]` zeros and ones for multi-label tasks (a negative value: no label). Class
        weights weigh classes and labels, but no regression. Without labels the loss is 0.

        Raises:
            ConfigError: If the labels have another shape or, for classification, are no class numbers.
        """
        if self.config.problem_type == "classification":
            return super().loss(logits, labels)
        if self.config.problem_type == "regression":
            logits = logits.squeeze(-1)
        if labels.shape != logits.shape:
            problem = f"labels are {tuple(labels.shape)} for a {self.config.problem_type} of {tuple(logits.shape)}"
            raise ConfigError(f"{self.config.kind}: {problem}; both must have one shape.")
        present, logits = self._present(labels), logits.float()
        target = labels.masked_fill(~present, 0).float()
        if self.config.problem_type == "regression":
            error = F.mse_loss(logits, target, reduction="none")
        else:
            error = F.binary_cross_entropy_with_logits(logits, target, weight=self.class_weights, reduction="none")
        return (error * present).sum() / present.sum().clamp(min=1)

    def count(self, labels: Tensor) -> Tensor:
        """Return the number by which `loss` divides a sum over labels: the number of labels that are present.

        With problem type "classification" and class weights, it is the sum of these labels' weights.
        """
        return super().count(labels) if self.config.problem_type == "classification" else self._present(labels).sum()

    def _present(self, labels: Tensor) -> Tensor:
        """Return a mask that is True where a label is present: not NaN (regression), or not negative (multi-label)."""
        return ~labels.isnan() if self.config.problem_type == "regression" else labels >= 0
