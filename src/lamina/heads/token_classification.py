"""Token classification: one class per token, such as entities or parts of speech."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import nn

from lamina.fusion.base import PROBABILITY, SIZE, Range, dropout
from lamina.fusion.concat import Concat
from lamina.heads.attention import EncoderLayer, encode
from lamina.heads.base import HeadConfig, LabelHead, check_class_weights, check_head_settings, linear

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from lamina.fusion.base import FusionConfig
    from lamina.heads.base import ReadTask


@final
@dataclass(frozen=True)
class TokenClassification(HeadConfig):
    """A head that runs pre-norm transformer encoder layers on the features, then a linear map per token.

    Args:
        labels: Names of the classes, or their number.
        encoder_layers: Number of encoder layers. 0: only the linear map.
        attention_heads: Attention heads of each encoder layer; ConfigError on building if they do not divide the size
            of the features.
        feedforward: Inner size of each encoder layer's feed-forward network.
        dropout: Probability of dropout inside the encoder layers and before the linear map.
        class_weights: One positive weight per label for the loss. None: all equal.

    Raises:
        ConfigError: If a value is not allowed.

    Source:
        Dremov 2024, section 5.2 and figure 15.
    """

    labels: Sequence[str]
    encoder_layers: int = 1
    attention_heads: int = 8
    feedforward: int = 2048
    dropout: float = 0.2
    class_weights: tuple[float, ...] | None = None

    kind: ClassVar[str] = "token_classification"

    @classmethod
    def default(cls, task: ReadTask) -> tuple[FusionConfig, TokenClassification]:
        """Return `Concat` of all layers, mapped to 128 features per token, and a head with one encoder layer."""
        return Concat(dim=128, layers="all"), cls(task.labels, feedforward=512)

    @classmethod
    def default_for_watching(cls, task: ReadTask) -> tuple[FusionConfig, TokenClassification]:
        """Return a fusion and a head for a monitor: those of `default`, but without the encoder layer.

        With them, a token's scores do not depend on later tokens.
        """
        return Concat(dim=128, layers="all"), cls(task.labels, encoder_layers=0)

    def __post_init__(self) -> None:
        ranges = {"dropout": PROBABILITY, "encoder_layers": Range(0, 64), "feedforward": SIZE}
        check_head_settings(self, ranges)
        object.__setattr__(self, "class_weights", check_class_weights(self.kind, self.class_weights, len(self.labels)))

    def build(self, dim: int) -> TokenClassificationHead:
        """Return a new module for features of size `dim`; ConfigError if `attention_heads` does not divide it."""
        return TokenClassificationHead(self, dim)


@final
class TokenClassificationHead(LabelHead):
    """The module of `TokenClassification`; logits `[batch, tokens, classes]`."""

    def __init__(self, config: TokenClassification, dim: int) -> None:
        settings = (config.attention_heads, config.feedforward, config.dropout)
        encoder = (EncoderLayer(config.kind, dim, *settings) for _ in range(config.encoder_layers))
        super().__init__(config, dim, encoder=nn.ModuleList(encoder))

    def is_token_wise(self) -> bool:
        """Return whether a token's logits depend only on this token's own features: True without encoder layers."""
        return self.config.encoder_layers == 0

    def forward_many(
        self,
        heads: Sequence[Any],
        features: Float[Tensor, "heads batch tokens dim"],
        mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "heads batch tokens classes"]:
        """Return the logits of each token, for several `heads` of equal settings; head i reads `features[i]`."""
        generators = [head.generator for head in heads]
        for layers in zip(*(head.encoder for head in heads), strict=True):
            features = encode(layers, features, mask, generators)
        p = self.config.dropout if self.training else 0.0
        return linear([head.output for head in heads], dropout(features, p, generators))
