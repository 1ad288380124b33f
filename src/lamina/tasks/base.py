"""Types that tasks and kinds share: options, outlines of tasks, and the interfaces of inputs, labels and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypeAlias, TypedDict, TypeVar, runtime_checkable

from torch import Tensor

from lamina.data.state_cache import CacheableInputs
from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.tasks import kind_of
from lamina.utils import JSON, check_range

if TYPE_CHECKING:
    from lamina.heads.base import HeadConfig
    from lamina.tasks.kind import Kind

PARTS = ("train", "validation", "test")

# What a model or reader returns for a batch: logits `[batch, ...]`, or one generated text per row.
Outputs: TypeAlias = Tensor | Sequence[str]

# A label of an example, as in `Split.labels`: a class id, a number, 0 and 1 per class, or a class id per word.
Label: TypeAlias = int | float | tuple[int, ...]

OutputsT = TypeVar("OutputsT", contravariant=True)  # the outputs that a `Results` collects
AnswerT = TypeVar("AnswerT")  # the predictions that it returns, one per example


@runtime_checkable
class KindedTask(TaskLike, Protocol):
    """A task's facts (`TaskLike`) and its `Kind` object, which reads, encodes and predicts for the task."""

    @property
    def kind(self) -> Kind:
        """The task's kind."""
        ...

    @property
    def pairs(self) -> bool:
        """Whether the examples are pairs of texts."""
        ...


@runtime_checkable
class LabelledTask(KindedTask, Protocol):
    """The facts about a task that its kind needs to make labels; a `Task` has them."""

    @property
    def label_all_tokens(self) -> bool:
        """Whether every sub-token of a word is labelled, and not only the first."""
        ...


@dataclass(frozen=True)
class TaskOutline:
    """The facts about a task without its examples; a `TaskLike`.

    A predictor has one per reader, and a recipe's estimate has one per task.

    Attributes:
        kind: The kind of task. If its name is passed, the kind is looked up.
        problem_type: One of the kind's problem types, such as "classification".
        labels: Class names in the order of their ids.
        rows: Number of examples by split, for estimates; "train" counts those of one repeat.
        tokens: Mean tokens of an example, for estimates.
        by_row: As in `Task`.
        image_size: As in `Task`.
        pairs: Whether examples are pairs of texts.
    """

    kind: Kind
    problem_type: str
    labels: tuple[str, ...]
    rows: Mapping[str, int] = field(default_factory=dict)
    tokens: float = 0.0
    by_row: bool = False
    image_size: int | None = None
    pairs: bool = False

    @classmethod
    def of_head(cls, head: HeadConfig) -> TaskOutline:
        """Return the outline of the task that a reader with this head was trained for; `head.kind` names the kind."""
        return cls(kind_of(str(head.kind)), head.problem_type, tuple(head.labels))

    def __post_init__(self) -> None:
        """Look up the kind if its name was passed; raise UnknownNameError if no such kind is registered."""
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", kind_of(self.kind))


@dataclass(frozen=True)
class ColumnSpec:
    """Which columns of a table to read, and how: a task's arguments, before and after its kind has filled in defaults.

    Attributes:
        kind: The kind of task.
        text: Column of the text, of the list of words, or of the image or audio file.
        label: Column of the label, of the list of tags, or of the text to generate.
        text_pair: Column of the second text of a pair.
        labels: Class names in the order of their ids. None: those of the train split.
        problem_type: One of the kind's problem types. None: inferred from the labels.
        missing_labels: What to do with rows without a label: "error", "drop" or "mask" (and "ignore" for tags). None:
            "mask" if the table has other label columns, otherwise "error".
        by_row: As in `Task`.
        stratify: Whether a validation split that is cut from the train split keeps the share of each class.
        separator: The sign between the class names in one text, for "multi_label". None: found from the column.
        all_columns: Whether the classes of all label columns of the table count for that, not those of this task alone.
        positive: The positive class, if there are two. None: the usual one, or neither.
    """

    kind: Kind
    text: str | int
    label: str | int
    text_pair: str | int | None = None
    labels: tuple[str, ...] | None = None
    problem_type: str | None = None
    missing_labels: str | None = None
    by_row: bool = False
    stratify: bool = True
    separator: str | None = None
    all_columns: bool = False
    positive: str | None = None


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How a split becomes a model's inputs; each kind uses the options that concern it.

    Attributes:
        part: The split: one of `PARTS`, or "predict". Only "train" is masked or augmented anew in each epoch.
        max_length: Maximum tokens of a text or window, special tokens included; for audio, samples of a clip.
        stride: Tokens that two neighbouring windows of a long text share. None: a quarter of the window.
        windows: Whether to cut long texts into windows, because a task over these texts is answered token by token.
        seed: Seed of the masking and of the augmentation.
        prefix: Text that is put in front of every text.
        max_target_length: Maximum tokens of a text to generate.
        augment: Whether to crop and flip training images at random.
        add_prefix_space: Whether byte-level tokenizers get a space before the first word of a text.
        by_row: As in `Task`.
        image_size: Width and height of images in pixels. None: the size that the processor has.
    """

    part: str
    max_length: int
    stride: int | None = None
    windows: bool = False
    seed: int = 0
    prefix: str = ""
    max_target_length: int = 128
    augment: bool = False
    add_prefix_space: bool = False
    by_row: bool = False
    image_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How a model generates texts.

    Attributes:
        max_target_length: Maximum tokens of a generated text.
        num_beams: Number of beams. 1: greedy decoding.
        length_penalty: Exponent of the length in beam search; above 0 favours longer texts.
    """

    max_target_length: int = 128
    num_beams: int = 1
    length_penalty: float = 1.0


@runtime_checkable
class Inputs(CacheableInputs, Protocol):
    """The encoded examples of a split, as `Kind.encode` returns them: rows that a model reads in batches.

    A row is a window of a text, a block of joined texts, an image or an audio clip. A class of inputs may have an
    attribute `equal_lengths`; if it is True, all rows of a batch must have the same length.
    """

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the model's arguments for the rows with these indices: name -> tensor `[batch, ...]`.

        Masking and augmentation depend on `epoch`. "labels" is among the arguments only if the labels come from the
        inputs themselves: masked tokens, next tokens and target texts.
        """
        ...


@runtime_checkable
class Targets(Protocol):
    """The labels of one task for the rows of its inputs, as `Kind.targets` returns them."""

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """Return the labels of these rows `[batch, ...]`. A row without a label has -100, NaN or -1."""
        ...


class WrongAnswer(TypedDict):
    """An example with a wrong prediction.

    Attributes:
        row: Index of the example in its split.
        text: The example: a text, a pair as a list of two texts, or the name of a file. None until it is looked up.
        true: The correct answer.
        predicted: The predicted answer.
        confidence: Probability of the predicted answer; not for regressions.
        error: Predicted minus correct number; only for regressions.
    """

    row: int
    text: JSON
    true: JSON
    predicted: JSON
    confidence: NotRequired[float]
    error: NotRequired[float]


class ClassRow(TypedDict):
    """The scores of one class, or an average over classes, as `metrics.class_table` returns them.

    Attributes:
        label: Name of the class, or "micro avg", "macro avg" or "weighted avg".
        precision: Fraction of the predictions of this class that are correct.
        recall: Fraction of the examples of this class that were predicted as this class.
        f1: Harmonic mean of precision and recall.
        count: Number of examples of this class.
        guessed: Number of predictions of this class.
    """

    label: str
    precision: float
    recall: float
    f1: float
    count: int
    guessed: int


@runtime_checkable
class Results(Protocol[OutputsT, AnswerT]):
    """Collects outputs batch by batch; returns scores, tables and predictions once all batches were added.

    A subclass must define `add`, and those of the other methods that its kind of task needs; the defaults return
    nothing.
    """

    def add(self, rows: Sequence[int], outputs: OutputsT, labels: Tensor | None = None) -> None:
        """Add the outputs for the rows with these indices; `labels` are given if they come from the inputs."""

    def first_not_finite(self) -> int | None:
        """Return the index of the first example (or row) whose outputs are NaN or infinite; None if all are finite."""
        return None

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Return metric -> score, in the order of `metrics`."""
        return {}

    def baseline(self, metrics: Sequence[str]) -> tuple[str, dict[str, float]] | None:
        """Return the one answer that is right most often, and metric -> score of always giving it, from labels alone.

        None for kinds of task that have no such answer.
        """
        return None

    def compare(self, metrics: Sequence[str]) -> Mapping[str, Any]:
        """Return the fields of `comparison.Comparison`; {} for kinds whose scores are not compared."""
        return {}

    def per_class(self) -> list[ClassRow]:
        """Return the rows of a table of scores per class, as `metrics.class_table` does; [] without classes."""
        return []

    def errors(self, count: int) -> list[WrongAnswer]:
        """Return at most `count` wrong answers, the most confident first, as `class_results.error_rows` does."""
        return []

    def set_learnt(self, info: Mapping[str, JSON]) -> None:
        """Use the facts that a reader keeps from its training, which `Kind.learnt` returned; the default has none."""

    def predictions(self) -> list[AnswerT]:
        """Return the JSON-ready prediction for each example."""
        return []

    def raw_predictions(self) -> list[Any]:
        """Return the predictions with logits in place of probabilities, if the kind of task has logits."""
        return self.predictions()

    def guesses(self) -> list[Label]:
        """Return the predicted label of each example, in the same form as `Split.labels`."""
        return []


def first_invalid_row(logits: Tensor) -> int | None:
    """Return the index of the first row of `logits` `[rows, classes]` whose softmax is NaN; None if there is none.

    A -inf beside finite numbers is valid: its probability is 0.
    """
    bad = (~logits.float().logsumexp(-1).isfinite()).nonzero()
    return int(bad[0]) if len(bad) else None


def as_examples(examples: object) -> list[Any]:
    """Return the examples that a user passed to `predict` as a list.

    Args:
        examples: A list or another iterable with a fixed order, such as a NumPy array, a tensor or a column of pandas.
            An array of numbers with several axes is a list of images or clips.

    Raises:
        ConfigError: If `examples` is a single text or path, a mapping, a set or a table.
    """
    is_numeric = getattr(getattr(examples, "dtype", None), "kind", "f") in "biuf"
    has_media = is_numeric and getattr(examples, "ndim", 1) > 1
    to_list = None if has_media else getattr(examples, "tolist", None)
    listed = examples if to_list is None else to_list()
    is_single = isinstance(listed, str | bytes | Path | Mapping | Set) or hasattr(listed, "__dataframe__")
    if is_single or not isinstance(listed, Iterable):
        raise ConfigError(
            f"predict: got one {type(examples).__name__}; a list of texts, pairs of texts, images or clips is needed."
        )
    return list(listed)


def check_image_size(size: int, kind: Kind, op: str) -> None:
    """Raise ConfigError, whose message begins with `op`, if the kind has no images or the size is below 1 pixel."""
    if kind.processor != "image_processor":
        raise ConfigError(f"{op}: image_size is {size} for a task of kind {kind}, which has no images.")
    check_range(op, "image_size", size, 1)


def check_label_all_tokens(label_all_tokens: bool, kind: Kind) -> None:
    """Raise ConfigError if `label_all_tokens` is set for a kind whose labels do not belong to words."""
    if label_all_tokens and not kind.tags_words:
        raise ConfigError(f"task: label_all_tokens is set for a task of kind {kind}; it is for tasks that tag words.")
