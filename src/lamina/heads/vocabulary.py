"""Heads that end in the base's own vocabulary: what masked and causal language modelling share."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.heads.base import IGNORE, Head, HeadConfig, cross_entropy, label_names

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel

Activation = Callable[[Tensor], Tensor]
Projection = nn.Linear | nn.Embedding
LABELS = ("token",)  # the classes are the base's vocabulary, which is not listed


@dataclass(frozen=True)
class VocabularyConfig(HeadConfig, ABC):
    """Settings of a head whose classes are the base's vocabulary."""

    labels: Sequence[str] = LABELS  # no others

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", label_names(self.kind, self.labels))
        if self.labels != LABELS:
            raise ConfigError(f"{self.kind}: labels are {self.labels}; the classes are the base's vocabulary.")

    def build(self, dim: int) -> Head:
        """Raise ConfigError: the base is needed."""
        came = f"only the size {dim} of the features was given"
        raise ConfigError(f"{self.kind}: {came}; it projects onto a model's vocabulary. Attach the reader to a bank.")


class Transform(NamedTuple):
    """What stands between features and vocabulary."""

    dense: nn.Linear
    activation: Activation
    norm: nn.Module
    bias: nn.Parameter

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits of hidden states, in the dtype of the vocabulary's `weight` `[classes, width]`."""
        hidden = self.norm(self.activation(self.dense(hidden)))
        return F.linear(hidden.to(weight.dtype), weight, self.bias.to(weight.dtype))


class VocabularyHead(Head, ABC):
    """Logits `[batch, tokens, classes]`, a class per entry of the base's vocabulary.

    The base's `projection` (`weight` `[classes, width]`) is kept by reference: it follows the base to its device and is
    no part of this module's state. Where the transform takes features of another size, `enter` maps them first.
    """

    logits_to_keep: ClassVar[bool] = True

    def __init__(self, projection: Projection, transform: Transform, dim: int) -> None:
        super().__init__()
        self._projection = (projection,)  # in a tuple, so that nn.Module does not register it
        width = transform.dense.in_features
        self.enter = nn.Linear(dim, width) if dim != width else None
        self.dense, self._activation, self.norm, self.bias = transform

    def forward(
        self,
        features: Float[Tensor, "batch tokens dim"],
        mask: Bool[Tensor, "batch tokens"],
        logits_to_keep: Bool[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens classes"] | Float[Tensor, "kept classes"]:
        """Logits of each token, in the dtype of the base's projection; those of padding mean nothing.

        With `logits_to_keep`, those of these positions alone, in row order: the vocabulary is large, and a loss needs
        only the positions that have a label.
        """
        if logits_to_keep is not None:
            features = features[logits_to_keep]
        hidden = features.to(self.dense.weight.dtype)
        if self.enter is not None:
            hidden = self.enter(hidden)
        transform = Transform(self.dense, self._activation, self.norm, self.bias)
        return transform.logits(hidden, self._projection[0].weight)

    def is_token_wise(self) -> bool:
        """Every token's logits come of its features alone."""
        return True

    @property
    def outputs(self) -> int:
        """Size of the base's vocabulary."""
        return len(self._projection[0].weight)

    def borrowed(self) -> dict[str, Tensor]:
        """The projection's weight."""
        return {"vocabulary": self._projection[0].weight}

    def loss(self, logits: Tensor, labels: Int[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Mean cross-entropy over tokens whose label is not IGNORE; of all logits, or of those of just these tokens."""
        given = labels != IGNORE
        return cross_entropy(logits if logits.ndim == 2 else logits[given], labels[given], None)


def vocabulary_of(model: PreTrainedModel, op: str) -> Projection:
    """The module whose `weight` `[classes, width]` maps onto the vocabulary: output embeddings, else the input's."""
    for find in (model.get_output_embeddings, model.get_input_embeddings):
        try:
            module = find()
        except NotImplementedError:
            continue
        if isinstance(module, Projection):
            return module
    came = f"the family '{model.config.model_type}' has no vocabulary"
    raise ConfigError(f"{op}: {came}. Use a model that reads text.")
