"""One output for a whole text, image or clip: classification, regression or several labels at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.dropout import dropout
from lamina.fusion.paired_layers import PairedLayers
from lamina.fusion.pooled_layers import PooledLayers
from lamina.heads.attention import EncoderLayer, SelfAttention, attend, encode, linear
from lamina.heads.base import HeadConfig, LabelHead, ProblemType, checked_weights, label_names
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lamina.fusion.base import FusionConfig
    from lamina.heads.base import ReadTask

Pooling = Literal["attention", "query", "mean", "first"]


@dataclass(frozen=True)
class PooledClassification(HeadConfig):
    """Pool the tokens, then one linear map: what the heads of whole texts, images and clips are.

    Args:
        labels: Names of the classes, or their number; one name for regression.
        attention_heads: Heads of the self-attention (pooling "attention", encoder layers); must divide the features'
            size.
        dropout: Probability, inside the encoder layers and before pooling.
        attention_dropout: Probability, on the self-attention's weights; the paper's code has its `dropout` there too.
        pooling: "attention" (self-attention without residual, GELU, dropout, mean over real tokens: the paper's),
            "query" (a mean over real tokens with the weights `softmax_t(query . h_t / sqrt(dim))`, where the query is
            learnt and starts at 0), "mean" (over real tokens) or "first" (the first real token).
        problem_type: "classification", "regression" (one output, squared error) or "multi_label" (a sigmoid each).
        class_weights: One positive weight per label for the loss; None: all equal.
        linear: False: no linear map and no dropout before it; the pooled features, as many as there are labels, are the
            logits, as where `Routing` ends in the classes. Pooling is then not "attention", and no encoder layer mixes.
        encoder_layers: How many pre-norm transformer encoder layers the features go through first.
        feedforward: Inner size of each.

    Source:
        Dremov 2024, section 5.2; the encoder layers are those of its tags (figure 15). "query" is one head of the
        attention probes of Kramár et al. 2026, arXiv:2601.11516, section 3.1.2, on the fusion's features; theirs have
        several heads, each behind an MLP.
    """

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
        """Every layer pooled by learned queries; of pairs, each text by itself too, and how the two match."""
        fusion = PairedLayers() if task.pairs else PooledLayers()
        return fusion, cls(task.labels, pooling="first", problem_type=task.problem_type)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", label_names(self.kind, self.labels))
        for name, known in (("pooling", get_args(Pooling)), ("problem_type", get_args(ProblemType))):
            if getattr(self, name) not in known:
                raise UnknownNameError(op=self.kind, got=getattr(self, name), known=known, what=name)
        for name in ("dropout", "attention_dropout"):
            check_range(self.kind, name, getattr(self, name), 0, 1, open_high=True)
        check_range(self.kind, "encoder_layers", self.encoder_layers, 0, 64)
        check_range(self.kind, "feedforward", self.feedforward, 1, 1 << 20)
        if not self.linear and (self.pooling == "attention" or self.encoder_layers):
            came = "pooling 'attention'" if self.pooling == "attention" else f"encoder_layers={self.encoder_layers}"
            hint = "Use encoder_layers=0, and 'query', 'first' or 'mean'."
            raise ConfigError(
                f"{self.kind}: linear is False with {came}, which mixes features, which then are no logits. {hint}"
            )
        if self.problem_type == "regression" and len(self.labels) != 1:
            raise ConfigError(f"{self.kind}: {len(self.labels)} labels for a regression; it has one.")
        object.__setattr__(self, "class_weights", checked_weights(self.kind, self.class_weights, len(self.labels)))

    @property
    def weighs_tokens(self) -> bool:
        """By the query, where it sees what the fusion says of a token alone."""
        return self.pooling == "query" and not self.encoder_layers

    def build(self, dim: int) -> PooledClassificationHead:
        """Make the module for features of size `dim`."""
        return PooledClassificationHead(self, dim)


@final
@dataclass(frozen=True)
class SequenceClassification(PooledClassification):
    """One output for a whole text; see `PooledClassification` for the settings."""

    kind: ClassVar[str] = "sequence_classification"


@final
@dataclass(frozen=True)
class ImageClassification(PooledClassification):
    """One class for an image; see `PooledClassification` for the settings.

    All of a model's positions are read: patches, class tokens and registers. "first" is the class token, where there is
    one. A model has one class per image: problem type "classification".
    """

    kind: ClassVar[str] = "image_classification"
    inputs: ClassVar = ("pixel_values",)


@final
@dataclass(frozen=True)
class AudioClassification(PooledClassification):
    """One class for a clip of sound; see `PooledClassification` for the settings.

    The tokens are the frames of the sound itself; those of padding are not read, where the model says which they are.
    """

    kind: ClassVar[str] = "audio_classification"
    inputs: ClassVar = ("input_values", "input_features")


@final
class PooledClassificationHead(LabelHead):
    """The module of `PooledClassification`; logits `[batch, classes]`."""

    pools: ClassVar[bool] = True
    settings: ClassVar = (
        "attention_heads",
        "dropout",
        "attention_dropout",
        "pooling",
        "linear",
        "encoder_layers",
        "feedforward",
    )

    def __init__(self, config: PooledClassification, dim: int) -> None:
        parts = {}
        if config.pooling == "attention":
            parts["attention"] = SelfAttention(config.kind, dim, config.attention_heads, config.attention_dropout)
        how = (config.attention_heads, config.feedforward, config.dropout)
        parts["encoder"] = nn.ModuleList(EncoderLayer(config.kind, dim, *how) for _ in range(config.encoder_layers))
        super().__init__(config, dim, **parts)
        self.query = nn.Parameter(torch.zeros(dim)) if config.pooling == "query" else None

    @property
    def reads_first(self) -> bool:
        """Where that is the pooling, and nothing mixes the tokens before."""
        return self.config.pooling == "first" and not self.config.encoder_layers

    def is_token_wise(self) -> bool:
        """Where the pooling is a mean of what the fusion gave: the logits are then that of the tokens' own."""
        return self.config.pooling in ("mean", "query") and not self.config.encoder_layers

    def log_weights(self, features: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"] | None:
        """What the query says of a token."""
        if self.query is None or not self.config.weighs_tokens:
            return None
        return _asked(self.query, features)

    def many(
        self, heads: list[Any], features: Float[Tensor, "heads batch tokens dim"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "heads batch classes"]:
        """Logits of each text, for alike heads at once."""
        outputs, generators = [head.output for head in heads], [head.generator for head in heads]
        p = self.config.dropout if self.training and self.config.linear else 0.0
        for layers in zip(*(head.encoder for head in heads), strict=True):
            features = encode(layers, features, mask, generators)
        if self.config.pooling == "first":
            first = mask.int().argmax(1)
            seen = features[:, torch.arange(features.shape[1], device=first.device), first]
            return linear(outputs, dropout(seen, p, generators))
        if self.config.pooling == "attention":
            features = F.gelu(attend([head.attention for head in heads], features, mask, generators))
        if self.config.pooling == "query":
            weights = torch.stack([_asked(head.query, part) for head, part in zip(heads, features, strict=True)])
            weights = weights.masked_fill(~mask, -torch.inf).softmax(-1).unsqueeze(-1)
            return linear(outputs, (dropout(features, p, generators) * weights).sum(2))
        share = mask.unsqueeze(-1).to(features.dtype)
        return linear(outputs, (dropout(features, p, generators) * share).sum(2) / share.sum(1))

    def loss(self, logits: Float[Tensor, "batch classes"], labels: Tensor) -> Float[Tensor, ""]:
        """Cross-entropy, squared error, or binary cross-entropy.

        Labels are `[batch]` class indices (IGNORE: none), `[batch]` floats (NaN: none), or `[batch, classes]` zeros and
        ones (a negative: none).
        """
        if self.config.problem_type == "classification":
            return super().loss(logits, labels)
        if self.config.problem_type == "regression":
            logits = logits.squeeze(-1)
        if labels.shape != logits.shape:
            came = f"labels are {tuple(labels.shape)} for a {self.config.problem_type} of {tuple(logits.shape)}"
            raise ConfigError(f"{self.config.kind}: {came}; both must have one shape.")
        given, logits = self._given(labels), logits.float()
        target = labels.masked_fill(~given, 0).float()
        if self.config.problem_type == "regression":
            error = F.mse_loss(logits, target, reduction="none")
        else:
            error = F.binary_cross_entropy_with_logits(logits, target, weight=self.class_weights, reduction="none")
        return (error * given).sum() / given.sum().clamp(min=1)

    def count(self, labels: Tensor) -> Tensor:
        """Number (or weight) of the labels that are given."""
        return super().count(labels) if self.config.problem_type == "classification" else self._given(labels).sum()

    def _given(self, labels: Tensor) -> Tensor:
        return ~labels.isnan() if self.config.problem_type == "regression" else labels >= 0


def _asked(query: Float[Tensor, " dim"], features: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"]:
    return features @ query / math.sqrt(len(query))
