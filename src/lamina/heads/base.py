"""What every head is: a frozen config that builds a module with logits and a loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

    from lamina.fusion.base import Fusion, FusionConfig
    from lamina.layers.stack import LayerStack

ProblemType = Literal["classification", "regression", "multi_label"]
IGNORE = -100  # the label of a position that has none, as in transformers


@runtime_checkable
class TaskLike(Protocol):
    """What a kind must know of a task: of a `Task`, or of a reader's head where nothing is trained."""

    @property
    def kind(self) -> str:
        """Name of its kind, which is also that of the heads that serve it."""
        ...

    @property
    def problem_type(self) -> Any:
        """Which of the kind's problems it is."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """Class names in the order of their ids."""
        ...


@runtime_checkable
class ReadTask(TaskLike, Protocol):
    """What a reader must know of a task: of a `Task`, or of what is known of one before its data is read."""

    @property
    def pairs(self) -> bool:
        """Whether its examples are pairs of texts."""
        ...


class HeadConfig(ABC):
    """Settings of one head. Subclasses are frozen dataclasses with a `labels` tuple."""

    labels: Sequence[str]
    kind: ClassVar[str]  # the task kind it serves
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)  # which of the model's towers it reads, if none is named
    problem_type: ProblemType = "classification"

    @property
    def weighs_tokens(self) -> bool:
        """Whether its module gives each token a weight, see `Head.log_weights`."""
        return False

    @abstractmethod
    def build(self, dim: int) -> Head:
        """Make the trainable module for features of size `dim`."""

    @classmethod
    def default(cls, task: ReadTask) -> tuple[FusionConfig, Self]:
        """The fusion and head to begin with for a task; ConfigError if none was chosen."""
        came = f"no default reader was chosen for tasks of kind {task.kind}"
        raise ConfigError(f"reader: {came}. Name its fusion and head, as Reader(ScalarMix(), {cls.__name__}()).")

    def build_on(self, model: PreTrainedModel, dim: int) -> Head:
        """Make the module for a model that is at hand; most heads need nothing of it."""
        return self.build(dim)


class Head(nn.Module, ABC):
    """Features -> logits, and the loss of logits against labels."""

    generator: torch.Generator | None = None  # source of dropout's random numbers; None is torch's own
    logits_to_keep: ClassVar[bool] = False  # True: `forward` takes `logits_to_keep`, the positions that are wanted
    pools: ClassVar[bool] = False  # True: one row of logits per text, not per token

    @abstractmethod
    def forward(self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]) -> Tensor:
        """Logits; every row of `mask` must have a real token."""

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Scalar mean over the labels that are given; 0 where none is."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of scores per position: labels, or entries of a vocabulary."""

    @property
    def reads_first(self) -> bool:
        """Whether it reads the features of the first real token alone."""
        return False

    def is_token_wise(self) -> bool:
        """Whether it says something of each token by itself: its logits, or of a whole text the mean of theirs.

        A text of one token has that token's logits then, whatever comes before or after it. The mean is a plain one,
        or weighed by `log_weights`.
        """
        return False

    def log_weights(self, features: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"] | None:
        """The logarithm of each token's weight in the mean that a text's logits are, but for a constant.

        None, as in most heads, is the same weight for each.
        """
        return None

    def check_reads(self, model: PreTrainedModel, stack: LayerStack, fusion: Fusion) -> None:
        """Raise ConfigError if what a fusion makes of a model's stack is not for this head; most take anything."""

    def count(self, labels: Tensor) -> Tensor:
        """What `loss` divides by: how many labels are given, or their weight."""
        return counted(labels, None)

    def borrowed(self) -> Mapping[str, Tensor]:
        """Tensors of the base that the head uses and does not save, by a name each."""
        return {}

    def group(self) -> Hashable | None:
        """Heads of one class with equal groups are computed as one operation; None: alone."""
        return None

    def many(
        self, heads: list[Any], features: Float[Tensor, "heads batch tokens dim"], mask: Bool[Tensor, "batch tokens"]
    ) -> Float[Tensor, "heads batch ..."]:
        """Logits of several heads, all of which have the `group` of this one, each on its own features."""
        return torch.stack([head(part, mask) for head, part in zip(heads, features, strict=True)])


class PassThrough(nn.Module):
    """In place of a linear map where features are logits: its weight is the identity, neither learnt nor saved."""

    weight: Tensor
    bias: Tensor

    def __init__(self, op: str, dim: int, labels: int) -> None:
        super().__init__()
        if dim != labels:
            came = f"linear is False for features of size {dim} and {labels} labels"
            raise ConfigError(f"{op}: {came}; without a linear map the features are the logits, one per label.")
        self.out_features = labels
        self.register_buffer("weight", torch.eye(labels), persistent=False)
        self.register_buffer("bias", torch.zeros(labels), persistent=False)


class LabelHead(Head):
    """A head that ends in one linear map, a score per label; its config has `labels` and `class_weights`.

    Where the config has `linear=False` the map passes features on as they are.
    """

    settings: ClassVar[tuple[str, ...]]  # of the config: heads whose logits are computed at once have these in common
    class_weights: Tensor | None

    def __init__(self, config: Any, dim: int, **parts: nn.Module) -> None:
        super().__init__()
        self.config = config
        for name, part in parts.items():  # these come before the linear map
            self.add_module(name, part)
        count, learns = len(config.labels), getattr(config, "linear", True)
        self.output: Any = nn.Linear(dim, count) if learns else PassThrough(config.kind, dim, count)
        weights = None if config.class_weights is None else torch.tensor(config.class_weights)
        self.register_buffer("class_weights", weights, persistent=False)

    @property
    def outputs(self) -> int:
        """Number of labels."""
        return self.output.out_features

    def group(self) -> Hashable:
        """Same shape, same settings, same place."""
        weight, settings = self.output.weight, [getattr(self.config, name) for name in self.settings]
        return (*weight.shape, *settings, self.training, weight.dtype)

    def forward(self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]) -> Tensor:
        """Logits of each text or token; those of padding mean nothing."""
        return self.many([self], features.unsqueeze(0), mask)[0]

    def loss(self, logits: Float[Tensor, "*batch classes"], labels: Tensor) -> Float[Tensor, ""]:
        """Mean cross-entropy over the labels that are not IGNORE; ConfigError unless there is one per text or token."""
        if labels.shape != logits.shape[:-1]:
            came = f"labels are {list(labels.shape)} for logits of {list(logits.shape)}"
            raise ConfigError(f"{self.config.kind}: {came}; one per text or token is needed.")
        return cross_entropy(logits, labels, self.class_weights)

    def count(self, labels: Tensor) -> Tensor:
        """Number (or weight) of the labels that are given."""
        return counted(labels, self.class_weights)


def label_names(op: str, labels: Sequence[str] | int) -> tuple[str, ...]:
    """Label names from a sequence of them, or from their number; ConfigError if there is none, or one twice."""
    if isinstance(labels, str | Mapping):
        raise ConfigError(f"{op}: labels are {labels!r}; a list of names is needed.")
    names = tuple(str(i) for i in range(labels)) if isinstance(labels, int) else tuple(labels)
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{op}: labels are {names}; at least one is needed and each only once.")
    return names


def check_heads(op: str, dim: int, attention_heads: int) -> None:
    """Raise ConfigError unless `attention_heads` divides `dim`."""
    if attention_heads < 1 or dim % attention_heads:
        fits = ", ".join(str(heads) for heads in range(1, dim + 1) if dim % heads == 0)
        came = f"attention_heads is {attention_heads} for features of size {dim}"
        raise ConfigError(f"{op}: {came}; it must divide that size. Use one of {fits}.")


def checked_weights(op: str, weights: Sequence[float] | None, labels: int) -> tuple[float, ...] | None:
    """The weights as a tuple; ConfigError unless there is one positive weight per label."""
    if weights is None:
        return None
    if len(weights) != labels or not all(0 < weight < math.inf for weight in weights):
        came = f"class_weights are {tuple(weights)} for {labels} labels"
        raise ConfigError(f"{op}: {came}; one positive weight per label is needed, in their order.")
    return tuple(float(weight) for weight in weights)


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """Mean cross-entropy over the labels that are not IGNORE, weighted as in torch; 0, not NaN, where there is none."""
    flat, targets = logits.flatten(0, -2).float(), labels.flatten()
    total = F.cross_entropy(flat, targets, weight=weight, ignore_index=IGNORE, reduction="sum")
    return total / counted(targets, weight).clamp(min=torch.finfo(flat.dtype).tiny)


def counted(labels: Tensor, weight: Tensor | None) -> Tensor:
    """How many labels are not IGNORE, or the sum of their classes' weights."""
    given = labels != IGNORE
    return given.sum() if weight is None else weight[labels[given]].sum()
