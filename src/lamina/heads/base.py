"""The interface of a head: a frozen config that builds a module with logits and a loss."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable
from unicodedata import normalize

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError, convert_errors
from lamina.fusion.base import Range, check_settings

if TYPE_CHECKING:
    from dataclasses import Field

    from _typeshed import DataclassInstance
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

    from lamina.fusion.base import Fusion, FusionConfig
    from lamina.layers.stack import LayerStack

ProblemType = Literal["classification", "regression", "multi_label"]
_MOST_LABELS = 1 << 20  # a larger number of classes is a mistake
_OF_LABELS = ("labels", "problem_type", "class_weights")  # settings on which logits do not depend
IGNORE = -100  # label of a position that has no label and is left out of the loss, as in transformers


@runtime_checkable
class TaskLike(Protocol):
    """A protocol: what kinds of task and heads need to know about a task. `Task` and `TaskOutline` fulfil it."""

    @property
    def kind(self) -> object:
        """The kind of the task as an object, or its name.

        `str(kind)` is the name, which equals the `kind` of matching heads.
        """
        ...

    @property
    def problem_type(self) -> Any:  # noqa: ANN401
        """One of the kind's problem types, such as "classification" or "regression"."""
        ...

    @property
    def labels(self) -> Sequence[str]:
        """Names of the classes, in the order of their ids; for a regression, the name of the score alone."""
        ...


@runtime_checkable
class ReadTask(TaskLike, Protocol):
    """A protocol: what decides a task's default reader. `Task` and a recipe's task fulfil it."""

    @property
    def pairs(self) -> bool:
        """Whether each example is a pair of texts."""
        ...


class HeadConfig(ABC):
    """The settings of a head. Subclasses are frozen dataclasses that have `labels` and `kind`, and define `build`.

    The base class checks no settings. Lamina's own heads call `check_head_settings` when an instance is made.

    Attributes:
        labels: Names of the classes; for a regression, the name of the score alone.
        kind: Name of the kind of task that the head is for.
        inputs: Names of the model's arguments that this kind of task provides, such as "input_ids". In models with
            several towers (one for texts, one for images), they decide which tower a reader reads, if the reader names
            no stack.
        problem_type: "classification", "regression" (a number), or "multi_label" (several labels at once).
    """

    labels: Sequence[str]
    kind: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)
    problem_type: ProblemType = "classification"

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def weighs_tokens(self) -> bool:
        """Whether the head's logits are a weighted mean over tokens, see `Head.token_map`; by default False."""
        return False

    @abstractmethod
    def build(self, dim: int) -> Head:
        """Return a new module for features of size `dim`; ConfigError if the settings do not fit that size."""

    @classmethod
    def default(cls, task: ReadTask) -> tuple[FusionConfig, Self]:
        """Return the default fusion and the default head for a task of this head's kind.

        Raises:
            ConfigError: If this kind of task has no default. Subclasses that have one override this method.
        """
        problem = f"no default reader was chosen for tasks of kind {task.kind}"
        raise ConfigError(f"reader: {problem}. Name its fusion and head, as Reader(ScalarMix(), {cls.__name__}()).")

    @classmethod
    def default_for_watching(cls, task: ReadTask) -> tuple[FusionConfig, Self]:
        """Return a fusion and a head for a monitor, whose scores of a token must not depend on later tokens.

        Raises:
            ConfigError: If this kind of task has none. Subclasses that have them override this method.
        """
        problem = f"tasks of kind {task.kind} have no reader that scores a text while it is written"
        raise ConfigError(f"reader: {problem}. Use a task of kind token_classification or sequence_classification.")

    def build_on(self, model: PreTrainedModel, dim: int) -> Head:
        """Return a new module for features of size `dim` of readers on `model`; by default what `build` returns."""
        return self.build(dim)


class Head(nn.Module, ABC):
    """Base class of modules that compute logits from features, and the loss of logits against labels.

    Subclasses define `forward`, `loss` and `outputs`; the other methods have defaults.

    Attributes:
        generator: Source of dropout's random numbers. None: torch's global generator.
        logits_to_keep: Whether `forward` has an argument `logits_to_keep`, a mask of the positions to compute.
        pools: Whether there is one row of logits per sequence. False: one per token.
    """

    generator: torch.Generator | None = None
    logits_to_keep: ClassVar[bool] = False
    pools: ClassVar[bool] = False

    @abstractmethod
    def forward(self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]) -> Tensor:
        """Return the logits for the features of a batch: a row per sequence if the head `pools`, else per token.

        `mask` is True at tokens and False at padding; every sequence must have a token.
        """

    @abstractmethod
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of `forward`'s logits, a scalar, over labels other than IGNORE (-100); 0 if all are."""

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Number of logits per sequence or token: the number of labels, or of entries of the vocabulary."""

    @property
    def reads_first(self) -> bool:
        """Whether the head reads only the features of the first token that is not padding; by default False."""
        return False

    def is_token_wise(self) -> bool:
        """Return whether tokens are read one by one: logits belong to one token, or are a (weighted) mean over tokens.

        By default False. For such a head, the score of a growing text can be updated as a running mean, because a
        token's own logits do not depend on other tokens.
        """
        return False

    def token_map(self) -> AffineMap | None:
        """Return the affine map from a token's features to its own logits, if a token-wise head is just such a map.

        If the head weighs tokens (see `HeadConfig.weighs_tokens`), the map has one more output: the logarithm, up to a
        constant, of the token's weight in the mean over a sequence. None (the default): there is no such map, call
        `forward`.
        """
        return None

    def check_reads(self, model: PreTrainedModel, stack: LayerStack, fusion: Fusion) -> None:
        """Raise ConfigError if this head cannot read what `fusion` computes from `stack`. By default it always can."""

    def count(self, labels: Tensor) -> Tensor:
        """Return the number by which `loss` divides a sum over labels: the number of labels that are not IGNORE.

        Heads that divide by the sum of these labels' class weights return that sum.
        """
        return count_labels(labels, None)

    def borrowed_tensors(self) -> Mapping[str, Tensor]:
        """Return name -> tensor, for the base model's tensors that the head uses and does not save; by default none."""
        return {}

    def group(self) -> Hashable | None:
        """Return a key; `forward_many` computes heads of one class with equal keys together.

        None (the default): this head is computed alone.
        """
        return None

    def forward_many(
        self,
        heads: Sequence[Head],
        features: Float[Tensor, "heads batch tokens dim"],
        mask: Bool[Tensor, "batch tokens"],
    ) -> Float[Tensor, "heads batch ..."]:
        """Return the logits of several `heads` with the class and `group` of this one; head i reads `features[i]`."""
        return torch.stack([head(part, mask) for head, part in zip(heads, features, strict=True)])


class PassThrough(nn.Module):
    """Stands in for the linear map of a head whose features are already the logits: an identity that is not saved.

    Args:
        op: The operation that error messages begin with.
        dim: Size of the features.
        labels: Number of labels, which must equal `dim`.

    Raises:
        ConfigError: If `dim` and `labels` differ.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, op: str, dim: int, labels: int) -> None:
        super().__init__()
        if dim != labels:
            problem = f"linear is False for features of size {dim} and {labels} labels"
            raise ConfigError(f"{op}: {problem}; without a linear map the features are the logits, one per label.")
        self.out_features = labels
        self.register_buffer("weight", torch.eye(labels), persistent=False)
        self.register_buffer("bias", torch.zeros(labels), persistent=False)


class TokenMap(NamedTuple):
    """The weight `[out, dim]` and bias `[out]` of an affine map of a token's features; see `Head.token_map`."""

    weight: Tensor
    bias: Tensor


AffineMap: TypeAlias = nn.Linear | PassThrough | TokenMap


def linear(maps: Sequence[AffineMap], features: Float[Tensor, "heads *rows dim"]) -> Float[Tensor, "heads *rows out"]:
    """Apply affine map i of `maps` to `features[i]`, for several heads in one operation."""
    if len(maps) == 1:
        return F.linear(features, maps[0].weight, maps[0].bias)
    rows = features.flatten(1, -2) if features.ndim > 2 else features.unsqueeze(1)
    weights, biases = torch.stack([part.weight for part in maps]), torch.stack([part.bias for part in maps])
    mapped = torch.baddbmm(biases.unsqueeze(1), rows, weights.mT)
    return mapped.view(*features.shape[:-1], mapped.shape[-1])


@cache
def _shared_settings(config: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the names of a head's settings that must be equal for heads to be computed in one operation."""
    return tuple(field.name for field in fields(config) if field.name not in _OF_LABELS)


class LabelHead(Head):
    """Base class of heads that end with a linear map to one logit per label.

    Subclasses must define `forward_many` or `forward`: the inherited ones call each other, without end.

    Args:
        config: The settings, with `labels`, `class_weights` and optionally `linear`. With `linear=False` the features
            themselves are the logits; ConfigError if `dim` is not the number of labels then.
        dim: Size of the features.
        **parts: Submodules before the linear map, by name.

    Attributes:
        output: The linear map; with `linear=False` a `PassThrough`.
        class_weights: Weight of each label in the loss. None: all equal.
        settings: Names of the settings that must be equal for heads to be computed in one operation. None: all fields
            of the config except `labels`, `problem_type` and `class_weights`.
    """

    settings: ClassVar[tuple[str, ...] | None] = None
    class_weights: Tensor | None

    def __init__(self, config: Any, dim: int, **parts: nn.Module) -> None:  # noqa: ANN401
        super().__init__()
        self.config = config
        for name, part in parts.items():
            self.add_module(name, part)
        count, has_map = len(config.labels), getattr(config, "linear", True)
        output = nn.Linear(dim, count) if has_map else PassThrough(config.kind, dim, count)
        self.output: nn.Linear | PassThrough = output
        weights = None if config.class_weights is None else torch.tensor(config.class_weights)
        self.register_buffer("class_weights", weights, persistent=False)

    @property
    def outputs(self) -> int:
        """Number of labels, that is, of logits per sequence or token."""
        return self.output.out_features

    def token_map(self) -> AffineMap | None:
        """Return the linear map from a token's features to its logits; None if the head is not token-wise."""
        return self.output if self.is_token_wise() else None

    def group(self) -> Hashable | None:
        """Return a key made of shape, `settings`, mode and dtype; heads with equal keys are computed together.

        None if a setting cannot be hashed, such as a list: this head is then computed alone.
        """
        names = self.settings
        if names is None:
            names = _shared_settings(type(self.config))
        weight, settings = self.output.weight, [(name, getattr(self.config, name)) for name in names]
        key = (*weight.shape, *settings, self.training, weight.dtype)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def forward(self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]) -> Tensor:
        """Return the logits: one row per sequence if the head pools, else per token (without meaning at padding)."""
        return self.forward_many([self], features.unsqueeze(0), mask)[0]

    def loss(self, logits: Float[Tensor, "*batch classes"], labels: Tensor) -> Float[Tensor, ""]:
        """Return the mean cross-entropy over the labels that are not IGNORE, by class weights if any; 0 without labels.

        Raises:
            ConfigError: If there is not one label per sequence or token, or the labels are no class numbers.
        """
        if labels.shape != logits.shape[:-1]:
            problem = f"labels are {list(labels.shape)} for logits of {list(logits.shape)}"
            raise ConfigError(f"{self.config.kind}: {problem}; one per text or token is needed.")
        return cross_entropy(logits, labels, self.class_weights)

    def count(self, labels: Tensor) -> Tensor:
        """Return the number of labels that are not IGNORE; with class weights, the sum of these labels' weights."""
        return count_labels(labels, self.class_weights)


def label_names(op: str, labels: Sequence[str] | int) -> tuple[str, ...]:
    """Return the names in `labels` as a tuple, in Unicode's form NFC. For a number n, they are "0" to "n - 1".

    An array, a column of a data frame or a tensor counts as the list or number that it holds.

    Raises:
        ConfigError: If there is no label, a label occurs twice, or `labels` is a number above 2**20, or neither a
            number nor a list of strings. The message begins with `op`.
    """
    labels = labels.tolist() if hasattr(labels, "tolist") else labels  # pyright: ignore[reportAttributeAccessIssue]
    is_number = type(labels) is int and labels <= _MOST_LABELS
    if not is_number and (isinstance(labels, str | Mapping | set | frozenset) or not isinstance(labels, Iterable)):
        raise ConfigError(f"{op}: labels are {labels!r}; a list of names is needed.")
    names: tuple[object, ...] = tuple(map(str, range(labels)) if isinstance(labels, int) else labels)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{op}: labels are {labels!r}; a list of names is needed.")
    normal = tuple(normalize("NFC", str(name)) for name in names)
    if not normal or len(set(normal)) < len(normal):
        raise ConfigError(f"{op}: labels are {normal}; at least one is needed and each only once.")
    return normal


def check_head_settings(config: HeadConfig, ranges: Mapping[str, Range]) -> None:
    """Replace the field `labels` of a head by what `label_names` returns, and check the types and ranges of all fields.

    `ranges` is name of a field -> the numbers that it may have. Raises ConfigError if a field is not valid.
    """
    object.__setattr__(config, "labels", label_names(config.kind, config.labels))
    check_settings(config.kind, config, ranges)


def check_attention_heads(op: str, dim: int, attention_heads: int) -> None:
    """Raise ConfigError, whose message begins with `op`, unless `attention_heads` is positive and divides `dim`."""
    if attention_heads < 1 or dim % attention_heads:
        divisors = ", ".join(str(heads) for heads in range(1, dim + 1) if dim % heads == 0)
        problem = f"attention_heads is {attention_heads} for features of size {dim}"
        raise ConfigError(f"{op}: {problem}; it must divide that size. Use one of {divisors}.")


def check_class_weights(op: str, weights: Sequence[float] | None, labels: int) -> tuple[float, ...] | None:
    """Return class weights as a tuple of floats; None, which means that all are equal, is returned as it is.

    Raises:
        ConfigError: If `weights` is not one positive, finite number for each of `labels` labels. The message begins
            with `op`.
    """
    if weights is None:
        return None
    is_list = isinstance(weights, Iterable) and not isinstance(weights, str | bytes | Mapping | set | frozenset)
    values = tuple(weights) if is_list else ()
    if len(values) != labels or not all(hasattr(value, "__float__") and 0 < value < math.inf for value in values):
        problem = f"class_weights are {values or weights!r} for {labels} labels"
        raise ConfigError(f"{op}: {problem}; a list with one positive weight per label is needed, in their order.")
    return tuple(map(float, values))


def cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean cross-entropy over the labels that are not IGNORE, a scalar; 0 if all are (torch returns NaN).

    `logits` are `[..., classes]` and `labels` `[...]`. `weight` holds one weight per class, for a weighted mean as in
    torch. None: all equal. Raises ConfigError if the labels are not int64 or uint8; on the CPU, also if one is not a
    class.
    """
    flat, targets = logits.flatten(0, -2).float(), labels.flatten()
    rule = f"class numbers from 0 to {flat.shape[-1] - 1} are needed, or {IGNORE} for no label"
    if targets.dtype not in (torch.int64, torch.uint8):
        raise ConfigError(f"bank: labels are {targets.dtype}; {rule}. Call labels.long().")
    with convert_errors(lambda reason: ConfigError(f"bank: a label is not a class ({reason}); {rule}."), IndexError):
        total = F.cross_entropy(flat, targets, weight=weight, ignore_index=IGNORE, reduction="sum")
    return total / count_labels(targets, weight).clamp(min=torch.finfo(flat.dtype).tiny)


def count_labels(labels: Tensor, weight: Tensor | None) -> Tensor:
    """Return the number of labels that are not IGNORE, or the sum of their weights if `weight` (per class) is given."""
    present = labels != IGNORE
    return present.sum() if weight is None else weight[labels[present].long()].sum()
