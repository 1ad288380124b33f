"""Base classes of heads whose classes are the base model's vocabulary: masked and causal language modelling."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.heads.base import IGNORE, Head, HeadConfig, check_head_settings, cross_entropy

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel

Activation = Callable[[Tensor], Tensor]
Projection = nn.Linear | nn.Embedding
LABELS = ("token",)  # placeholder: the classes are the base model's vocabulary, which is not listed


@dataclass(frozen=True)
class VocabularyConfig(HeadConfig, ABC):
    """Settings of a head whose classes are the base model's vocabulary; ConfigError if `labels` are not the default.

    Subclasses define `build_on`; the inherited one raises the ConfigError of `build`.
    """

    labels: Sequence[str] = LABELS

    def __post_init__(self) -> None:
        check_head_settings(self, {})
        if self.labels != LABELS:
            raise ConfigError(f"{self.kind}: labels are {self.labels}; the classes are the base's vocabulary.")

    def build(self, dim: int) -> Head:
        """Raise ConfigError: only `build_on` can make this head, because it needs the base model."""
        problem = f"only the size {dim} of the features was given; it projects onto a model's vocabulary"
        raise ConfigError(f"{self.kind}: {problem}. Attach the reader to a bank.")


class Transform(NamedTuple):
    """The trainable parts of a vocabulary head: `dense`, `activation` and `norm` precede the projection.

    `bias` follows it.
    """

    dense: nn.Linear
    activation: Activation
    norm: nn.Module
    bias: nn.Parameter

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the logits of hidden states, in the dtype of `weight`, the projection `[classes, width]`."""
        hidden = self.norm(self.activation(self.dense(hidden)))
        return F.linear(hidden.to(weight.dtype), weight, self.bias.to(weight.dtype))


class VocabularyHead(Head, ABC):
    """Base class of heads with logits `[batch, tokens, classes]`, one class per entry of the base model's vocabulary.

    Args:
        projection: The base model's module whose `weight` `[classes, width]` maps onto the vocabulary. It is not
            registered as a submodule: it stays part of the base model, and is not in this head's state dict.
        transform: The trainable parts.
        dim: Size of the features. If the transform expects another size, a linear map `enter` comes first.
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
        """Return the logits of each token, in the dtype of the projection; at padding they have no meaning.

        Args:
            features: The features.
            mask: Not used.
            logits_to_keep: If given, logits are only computed where it is True, and returned as `[kept, classes]` in
                row order.
        """
        if logits_to_keep is not None:
            features = features[logits_to_keep]
        hidden = features.to(self.dense.weight.dtype)
        if self.enter is not None:
            hidden = self.enter(hidden)
        transform = Transform(self.dense, self._activation, self.norm, self.bias)
        return transform.logits(hidden, self._projection[0].weight)

    def is_token_wise(self) -> bool:
        """Return True: the logits of a token depend only on its own features."""
        return True

    @property
    def outputs(self) -> int:
        """Size of the base model's vocabulary."""
        return len(self._projection[0].weight)

    def borrowed_tensors(self) -> dict[str, Tensor]:
        """Return the projection's weight under the name "vocabulary"; it is not saved with the head."""
        return {"vocabulary": self._projection[0].weight}

    def loss(self, logits: Tensor, labels: Int[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the mean cross-entropy over the tokens whose label is not IGNORE (-100); 0 if there are none.

        `logits` are `[batch, tokens, classes]`, or `[kept, classes]` for just the tokens with a label. Raises
        ConfigError if a label is no class number.
        """
        present = labels != IGNORE
        return cross_entropy(logits if logits.ndim == 2 else logits[present], labels[present], None)


def vocabulary_of(model: PreTrainedModel, op: str) -> Projection:
    """Return the module of a model whose `weight` `[classes, width]` maps onto the model's vocabulary.

    It is the model's output embeddings, or else its input embeddings. Raises ConfigError, beginning with `op`, if the
    model has neither.
    """
    for find in (model.get_output_embeddings, model.get_input_embeddings):
        try:
            module = find()
        except NotImplementedError:
            continue
        if isinstance(module, Projection):
            return module
    problem = f"the family '{model.config.model_type}' has no vocabulary"
    raise ConfigError(f"{op}: {problem}. Use a model that reads text.")
