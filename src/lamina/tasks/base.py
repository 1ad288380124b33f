"""The interface of a kind of task, and the types that kinds and tasks share: options, facts, inputs and labels.

A kind (`Kind`) is one type of task, such as sequence classification. It reads, encodes and scores examples. A reader is
a small network that is trained for a task on a model's hidden states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor

from lamina.data.arrow import Cell, columns_of
from lamina.data.class_names import decoder, names_of
from lamina.data.encode import Encoded, encode, length_limit
from lamina.data.read import Table, read_table
from lamina.data.state_cache import CacheableInputs
from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.registry import KINDS
from lamina.tasks.label_cells import LabelCellError, class_name
from lamina.tasks.outputs import Outputs, Results
from lamina.tasks.split import Split, checked_texts, is_missing
from lamina.utils import JSON, check_range

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel

    from lamina.heads.base import HeadConfig
    from lamina.layers.types import Batch, Processor
    from lamina.tasks.lazy_file import LazyFile

PARTS = ("train", "validation", "test")


@runtime_checkable
class KindedTask(TaskLike, Protocol):
    """A task as its kind sees it, as a protocol: a `TaskLike` with its `Kind` object, and whether texts are pairs."""

    @property
    def kind(self) -> Kind:
        """The task's kind."""
        ...

    @property
    def pairs(self) -> bool:
        """Whether each example is a pair of texts."""
        ...


@runtime_checkable
class LabelledTask(KindedTask, Protocol):
    """A task as its kind sees it when it labels tokens, as a protocol: a `KindedTask` with `label_all_tokens`."""

    @property
    def label_all_tokens(self) -> bool:
        """Whether every sub-token of a word gets the word's label. False: only the first one does."""
        ...


@dataclass(frozen=True)
class TaskOutline:
    """The facts about a task without its examples.

    Attributes:
        kind: The kind of task. If its name is passed, the kind is looked up.
        problem_type: One of the kind's problem types, such as "classification".
        labels: Class names in the order of their ids.
        rows: Split name -> number of examples, for estimates; {} if unknown. If several subsamples
            are drawn from the train split, "train" is the size of one.
        tokens: Mean tokens of an example, for estimates; 0 if unknown.
        by_row: For language modelling, whether each row is read alone. False: rows are joined and cut into blocks.
        image_size: Width and height of images in pixels; None: the size that the image processor has.
        pairs: Whether each example is a pair of texts.
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
        """Return the outline of the task that a reader with this head was trained for.

        Only the kind, the problem type and the labels are known; all other fields have their defaults. Raises
        UnknownNameError if the head's kind is not registered.
        """
        return cls(kind_of(str(head.kind)), head.problem_type, tuple(head.labels))

    def __post_init__(self) -> None:
        """Look up the kind if its name was passed; raise UnknownNameError if no such kind is registered."""
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", kind_of(self.kind))


def positive_name(positive: object) -> str | None:
    """Return the class name that a user means by `positive`, a text, whole number or bool, as text; None stays None.

    Raises ConfigError if `positive` cannot name a class.
    """
    try:
        return None if positive is None else class_name(positive, (str(positive),))
    except LabelCellError:
        raise ConfigError(f"task: positive is {positive!r}; it is the name of one class.") from None


@dataclass(frozen=True)
class ColumnSpec:
    """The columns of a table to read, and how to read them.

    It holds the arguments of `Task.from_files`. Later, the kind returns a copy in which the defaults are filled in.

    Attributes:
        kind: The kind of task.
        text: Column of the text, of the list of words, or of the image or audio file. "sentence": the user chose none.
        label: Column of the label, of the list of tags, or of the text to generate. "label": the user chose none.
        text_pair: Column of the second text of a pair. None: single texts.
        labels: Class names in the order of their ids. None: those that the data declare, or that the train split has.
        problem_type: One of the kind's problem types. None: inferred from the labels.
        missing_labels: What to do with rows without a label: "error", "drop", "mask" or None; see `labels.labelled`.
            For tags also "ignore": as "error", but a row with a span that is not in its text, or that tags cannot mark,
            is kept without labels. `EvaluateOnly.MASK_NULLS`: only from `evaluate`.
        by_row: For language modelling, whether each row is read alone. False: rows are joined and cut into blocks.
        stratify: Whether a validation split that is cut from the train split keeps the share of each class.
        separator: The sign between class names in one cell, for "multi_label". None: found from the column.
        all_columns: Whether `stratify` uses all columns that look like labels. False: only this task's.
        positive: The positive class, if there are two. None: the usual one ("1", "yes" or "true"), or neither.
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
    """Options for encoding the examples of a split for a model. Each kind uses the options that concern it.

    Attributes:
        part: Name of the split: one of `PARTS`, or "predict". Masking and augmentation differ from epoch to epoch only
            in "train".
        max_length: Maximum tokens of a text or window, special tokens included; for audio, maximum samples of a clip.
        stride: Number of tokens that two neighbouring windows of a long text share; None: a quarter of `max_length`, or
            less (see `data.encode.encode`).
        windows: Whether to cut long texts into windows. Set if any task over these texts labels tokens.
        seed: Seed of the masking and of the augmentation.
        prefix: Text that is put in front of every text.
        max_target_length: Maximum tokens of a text to generate.
        augment: Whether to crop and flip training images at random.
        add_prefix_space: Whether byte-level tokenizers get a space before the first word of a text.
        by_row: For language modelling, whether each row is read alone. False: rows are joined and cut into blocks.
        image_size: Width and height of images in pixels; None: the size that the processor has.
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

    def encode_texts(
        self, texts: Sequence[Cell], processor: Processor, *, windows: bool = False, offsets: bool = False
    ) -> Encoded:
        """Tokenise texts or pairs with `max_length`, `stride` and `add_prefix_space`; no other attribute is used.

        `offsets` says whether to store the character range of each token; `windows` whether to cut long texts into
        windows, with offsets. See `lamina.data.encode.encode` for the result and the errors.
        """
        return encode(
            texts,
            processor,
            max_length=self.max_length,
            windows=windows,
            stride=self.stride,
            offsets=offsets or windows,
            add_prefix_space=self.add_prefix_space,
        )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options for the generation of texts by a model: length, beams and length penalty.

    Attributes:
        max_target_length: Maximum tokens of a generated text.
        num_beams: Number of beams. 1: greedy decoding.
        length_penalty: Exponent of the length in beam search; above 0 favours longer texts. Unused with one beam.
    """

    max_target_length: int = 128
    num_beams: int = 1
    length_penalty: float = 1.0


@runtime_checkable
class Inputs(CacheableInputs, Protocol):
    """The encoded examples of a split, made by `Kind.encode`. A model reads their rows in batches.

    A row is a window of a text, a block of joined texts, an image or an audio clip. An implementation may have the
    attribute `equal_lengths`; if it is True, all rows of a batch must have the same length.
    """

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the rows with the indices `rows` as the model's arguments: name -> tensor `[batch, ...]`.

        `epoch`, the number of the epoch, seeds masking and augmentation. The arguments include "labels" only if labels
        are made from the inputs: masked tokens, next tokens, target texts.
        """
        ...


@runtime_checkable
class Targets(Protocol):
    """The labels of one task, one per row of its inputs, made by `Kind.targets`."""

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """Return the labels of the rows with the indices `rows`, `[batch, ...]`.

        A row without a label has -100; or NaN if labels are numbers; or -1 if they are 0 and 1 per class.
        """
        ...


def check_image_size(size: int, kind: Kind, op: str) -> None:
    """Raise ConfigError if the kind has no images, whatever the `size`, or if `size` is below 1 pixel.

    `op` is the operation, for the message.
    """
    if kind.processor != "image_processor":
        raise ConfigError(f"{op}: image_size is {size} for a task of kind {kind}, which has no images.")
    check_range(op, "image_size", size, 1)


def check_label_all_tokens(label_all_tokens: bool, kind: Kind) -> None:
    """Raise ConfigError if the option `label_all_tokens` is set for a kind that does not label words."""
    if label_all_tokens and not kind.tags_words:
        raise ConfigError(f"task: label_all_tokens is set for a task of kind {kind}; it is for tasks that tag words.")


@runtime_checkable
class HasLogits(Protocol):
    """The output of a transformers model with a head; only its logits are read."""

    logits: Tensor


# The file or folder of a split, or a pair of text files.
Source: TypeAlias = str | Path | Sequence[str | Path]
InputsT = TypeVar("InputsT", bound=Inputs)


class Kind(ABC, Generic[InputsT]):
    """A kind of task, such as sequence classification.

    There is one object per kind, without state; `lamina.tasks.kind_of` returns it by name. A subclass implements
    `build`, `encode` and `results`; all other methods have a default. It sets `name`, `problem_types` and `auto_class`,
    and other class attributes only if their default does not fit. `TextClassKind` implements all but `build`, for kinds
    that classify texts.

    Attributes:
        name: The kind's name in tasks, recipes, files and on the command line, and the name of its reader's head.
        problem_types: Problem type -> its metrics. The default problem type and the default metric come first.
        auto_class: Name of the auto class of transformers whose models have a head for this kind.
        base_class: Name of the auto class of the model whose layers readers of this kind read.
        processor: What encodes examples: "tokenizer", "image_processor" or "feature_extractor".
        inputs: Name of the form of inputs. Tasks over the same examples share one pass if this name is the same.
        predict_inputs: The same for prediction.
        file: Class of the files, if examples are files. None: examples are texts.
        per_token: Whether answers are given token by token, so that long texts are cut into windows.
        keeps_end: Whether prediction keeps the end of too long texts, even if the tokenizer keeps the beginning.
        tags_words: Whether every word has a label. If so, all of its sub-tokens may get it.
        has_classes: Whether a model's outputs are one score per label.
        reads_pairs: Whether an example may be a pair of texts.
        judges_second: Whether the labels of a pair, or the generated text, are about its second text.
        draws: Whether training inputs are random (masked tokens, image crops), so that a seed decides them.
        sequential: Whether the order of examples matters, so that validation gets the last tenth of the train split.
        usual_columns: Default columns of text and label.
        other_files: Format of files whose extension is unknown: "conll" or "lines". None: such files are an error.
        readers: Whether readers of a bank can do this kind of task; otherwise only whole models can.
        missing: Allowed values of `missing_labels`.
        takes_prefix: Whether the option `prefix`, a text in front of every example, is allowed.
        generates: Whether a model generates a text per example, both for predictions and for scores.
        learnt_keys: Names of the facts that `learnt` may return; others are lost when training ends.
    """

    name: ClassVar[str]
    problem_types: ClassVar[Mapping[str, tuple[str, ...]]]
    auto_class: ClassVar[str]
    base_class: ClassVar[str] = "AutoModel"
    processor: ClassVar[str] = "tokenizer"
    inputs: ClassVar[str] = "text"
    predict_inputs: ClassVar[str] = "text"
    file: ClassVar[type[LazyFile] | None] = None
    per_token: ClassVar[bool] = False
    keeps_end: ClassVar[bool] = False
    tags_words: ClassVar[bool] = False
    has_classes: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = False
    judges_second: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    sequential: ClassVar[bool] = False
    usual_columns: ClassVar[tuple[str, str]] = ("sentence", "label")
    other_files: ClassVar[str | None] = None
    readers: ClassVar[bool] = True
    missing: ClassVar[tuple[str, ...]] = ("error", "drop")
    takes_prefix: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    learnt_keys: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        """Return the kind's name."""
        return self.name

    def __repr__(self) -> str:
        """Return the Python expression that looks the kind up."""
        return f"kind_of({self.name!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a kind of the same name, or a string with that name."""
        return self.name == (other.name if isinstance(other, Kind) else other)

    def __hash__(self) -> int:
        """Return the hash of the kind's name: a kind and its name are one key of a dict."""
        return hash(self.name)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the kind as its name."""
        return kind_of, (self.name,)

    # Reading: from files or rows to examples with labels

    @abstractmethod
    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Make the labelled examples of every split from tables.

        Args:
            spec: Which columns to read, as the user named them.
            tables: Split name -> table, as `read` or `from_rows` returned it.

        Returns:
            A copy of `spec` with columns, labels and problem type filled in; and split name -> examples with labels,
            without splits whose labels are secret (a warning names them).

        Raises:
            DataError: If a column is missing, a cell has a wrong form, or a row lacks a label and `spec.missing_labels`
                does not allow that. The message names file, row and column.
            ConfigError: If labels in `spec` do not fit the kind or the data.
        """

    def read(self, source: Source, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """Return one split as a table, read from a file or from another source that the kind allows.

        Args:
            source: Path of the file.
            spec: The columns that the user named. Kinds of files, and those that read pairs, use them.
            header: Column names, if the file has no header. None: it has one.

        Raises:
            DataError: If the file cannot be read.
            ConfigError: If `source` is not a path.
        """
        if not isinstance(source, str | Path | Sequence):
            raise ConfigError(f"task: a file is {source!r}; a path is needed.")
        if not isinstance(source, str | Path):
            got = f"{len(source)} files were given for one part of a task of kind {spec.kind}"
            raise ConfigError(f"task: {got}; it reads one. Only kinds that generate texts read a pair of files.")
        return read_table(source, header=header, other=self.other_files)

    def from_rows(self, name: str, rows: datasets.Dataset | Mapping[str, list[object]], spec: ColumnSpec) -> Table:
        """Return rows in memory as a table: `rows` is a dataset, or a mapping of columns of equal length.

        Class ids in a dataset become class names. `name` is the table's name in messages, which count rows from 1.
        Only kinds that read files use `spec`.
        """
        if isinstance(rows, Mapping):
            return Table(name, dict(rows), range(1, len(next(iter(rows.values()), ())) + 1))
        columns = columns_of(rows, {key: decoder(feature) for key, feature in rows.features.items()})
        return Table(name, columns, range(1, len(rows) + 1), class_names=names_of(rows.features))

    def examples(self, raw: Sequence[object], processor: Processor) -> Split:
        """Return the examples `raw`, which a user passed to `predict`, as a split without labels.

        `processor` is for kinds whose examples depend on the tokenizer.

        Raises:
            ConfigError: If the examples are neither all texts nor, for a kind that reads pairs, all pairs of texts.
        """
        return Split.of_texts(checked_texts(raw, pairs=self.reads_pairs))

    def metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the metrics for this problem type and these class names, the default metric first."""
        return self.problem_types[problem_type]

    def further_metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return metrics that are only reported if the user names one of them; then all are. By default ()."""
        return ()

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Return the class names of a task, and a list with the class ids of each example in `split`.

        An example without a label has no ids. If the task's examples do not have one class each, there are by default
        neither names nor ids.
        """
        if not self.single_label(task.problem_type):
            return (), [()] * len(split)
        return tuple(task.labels), [() if is_missing(label) else (label,) for label in split.labels]

    def single_label(self, problem_type: str) -> bool:
        """Return whether every example of a task with this problem type has exactly one class."""
        return self.has_classes and not self.per_token and problem_type == "classification"

    # Encoding: from examples to batches

    @abstractmethod
    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> InputsT:
        """Encode the examples of a split, in their order, as rows that a model reads.

        Raises:
            ConfigError: If the processor is missing or of another type, or an option does not fit.
            DataError: If an example or label has a wrong form, or a file cannot be read.
        """

    def targets(self, task: LabelledTask, split: Split, inputs: InputsT) -> Targets | None:
        """Return the labels of all rows of `inputs`, which encode `split`.

        Returns None (the default) if `Inputs.batch` makes the labels.
        """
        return None

    def learnt(self, task: LabelledTask, split: Split, inputs: InputsT) -> dict[str, JSON]:
        """Return facts about the train split that predictions need later, saved in a reader's `info`; by default {}."""
        return {}

    def length_limit(self, model: PreTrainedModel, processor: Processor, asked: int | None) -> int:
        """Return the maximum length that is read of an example: tokens of a window, samples of a clip, or 1 for images.

        Args:
            model: The model that reads the examples.
            processor: Its processor, which may have a lower limit.
            asked: The user's limit. None: the default; for texts the limit of model and tokenizer, or 512 if they have
                none.

        Raises:
            ConfigError: If `asked` is below 1, or more than model and processor read.
        """
        return length_limit(model, processor, asked)

    def truncated(self, inputs: InputsT) -> int:
        """Return how many of the encoded examples were truncated; by default 0."""
        return 0

    def batch_size(self, asked: int, inputs: InputsT, outputs: int) -> int:
        """Return the number of rows in a batch for scoring: at most `asked`, the user's number, which is the default.

        `outputs` is the number of scores per position: of a reader's head, or the size of a whole model's vocabulary.
        """
        return asked

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: PreTrainedConfig | None, *, by_row: bool = False
    ) -> tuple[int, int]:
        """Estimate the number of rows that a model reads, and the tokens per row, without data or a loaded model.

        By default they are `rows`, and `tokens` rounded but at most `max_length`; the other arguments are not used.

        Args:
            rows: Number of examples.
            tokens: Mean tokens of an example.
            max_length: Maximum tokens of a row.
            config: The model's config. None: not known.
            by_row: For language modelling, whether each row is read alone. False: rows are joined and cut into blocks.
        """
        return rows, min(round(tokens), max_length)

    # Encoding for whole models with a head of their own

    def configure(self, config: PreTrainedConfig, task: TaskLike) -> None:
        """Write the task's class names and type of loss into a model's config, in place; by default change nothing.

        Raises:
            ConfigError: If the head of the model is for other classes. The caller adds the operation to the message.
        """

    def fit_processor(self, processor: Processor, task: TaskLike) -> bool:
        """Apply the task's settings for a processor, such as `image_size`, in place; return whether there were any.

        By default there are none. Raises ConfigError if the processor cannot apply them.
        """
        return False

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """Return why the class or config of `model` does not fit this kind of task, as text.

        Returns None (the default) if they fit.
        """
        return None

    def output_problem(self, outputs: HasLogits, task: TaskLike) -> str | None:
        """Return why the model's outputs for a batch do not fit the task, as text; None (the default) if they do."""
        return None

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Return a batch's labels in the form that the loss of a transformers model expects; by default unchanged."""
        return labels

    # Answering: from outputs to scores and predictions

    @abstractmethod
    def results(self, task: TaskLike, split: Split, inputs: InputsT) -> Results:
        """Return an empty `Results` for `split`; it collects a model's outputs for `inputs`, and scores them."""

    def outputs(
        self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions
    ) -> Outputs:
        """Run a whole model on a batch without labels; return logits or generated texts, for `Results.add`.

        `processor` decodes generated tokens, and `options` say how texts are generated. The default returns the logits.
        """
        return model(**batch, **as_output(model)).logits  # pyright: ignore[reportCallIssue]

    def predict_outputs(
        self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions
    ) -> Outputs:
        """Run a whole model on a batch to predict; the default calls `outputs`, with the same arguments.

        Kinds whose training inputs contain the labels override it, because a model must not see them here.
        """
        return self.outputs(model, batch, processor, options)

    def answers(self, task: TaskLike, split: Split, inputs: InputsT, processor: Processor) -> Results:
        """Return an empty `Results` that turns a model's outputs into predictions. This default calls `results`.

        `split` comes from `examples`, and `inputs` encode it. `processor` is for kinds whose predictions are tokens.
        """
        return self.results(task, split, inputs)


def as_output(model: PreTrainedModel) -> dict[str, bool]:
    """Return arguments with which the model returns an object: `return_dict=True`, or {} if its config says so."""
    return {} if getattr(model.config, "return_dict", True) else {"return_dict": True}


@cache
def kind_of(name: str) -> Kind:
    """Return the kind of task that is registered under a name, always the same object.

    Raises UnknownNameError if there is none, MissingExtraError if it needs a package that is not installed, and
    ConfigError if its module cannot be imported for another reason.
    """
    return KINDS.get(name)()
