"""What a kind of task says of itself: everything that training, scoring and predicting need to know.

Nothing outside `lamina.tasks` asks which kind a task is; it calls these methods. A new kind is one file with a subclass
of `Kind`, and one line in the registry `KINDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from lamina.data.arrow import Column
from lamina.data.encode import length_limit
from lamina.data.read import Table, read_table
from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.utils import check_range

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    from lamina.tasks.class_files import LazyFile

PARTS = ("train", "validation", "test")


@runtime_checkable
class KindedTask(TaskLike, Protocol):
    """The facts about a task with its `Kind` object, which reads, encodes and answers for the task."""

    @property
    def kind(self) -> Kind:
        """The task's kind."""
        ...


@runtime_checkable
class LabelledTask(KindedTask, Protocol):
    """What a kind must know of a task to make labels: of a `Task`."""

    @property
    def label_all_tokens(self) -> bool:
        """Whether all tokens of a word are labelled."""
        ...


@dataclass(frozen=True)
class TaskOutline:
    """What is known of a task without its data, a `TaskLike`; estimates of recipes know its size too."""

    kind: Kind
    problem_type: str
    labels: tuple[str, ...]
    rows: Mapping[str, int] = field(default_factory=dict)  # of each part; of "train" in each repeat
    tokens: float = 0.0  # of a usual row
    by_row: bool = False  # as of a `Task`
    image_size: int | None = None  # as of `Task`
    pairs: bool = False  # as of `Task`

    @classmethod
    def of_head(cls, head: Any) -> TaskOutline:
        """Return the outline of the task that a reader's head (its config) answers, whose `kind` is a name."""
        return cls(kind_of(str(head.kind)), head.problem_type, tuple(head.labels))

    def __post_init__(self) -> None:
        """Look up the kind where its name was passed, raising `UnknownNameError` if no such kind is registered."""
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", kind_of(self.kind))


@dataclass(frozen=True)
class ColumnSpec:
    """Which columns to read, and as what."""

    kind: Kind
    text: str | int  # column of the text, of the list of words, or of the image
    label: str | int  # column of the label, of the list of tags, or of the text to write
    text_pair: str | int | None = None  # column of the second text
    labels: tuple[str, ...] | None = None  # class names in the order of their ids; None: read off the train part
    problem_type: str | None = None  # None: read off the labels
    missing_labels: str = "error"  # what becomes of rows without a label: "error" or "drop"
    by_row: bool = False  # as of a `Task`
    stratify: bool = True  # set rows aside class by class


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How a part of a task becomes inputs of a model; a kind looks at what concerns it."""

    part: str  # one of `PARTS`, or "predict"; random changes are made to "train" only
    max_length: int  # tokens of a text or window, special ones included; samples of a clip
    stride: int | None = None  # tokens that two windows of a long text share; None: a quarter of the window
    windows: bool = False  # cut long texts into windows: some task over these texts is answered token by token
    seed: int = 0  # of random changes (hidden tokens, crops of images)
    prefix: str = ""  # stands before every text
    max_target_length: int = 128  # tokens of a text to write
    augment: bool = False  # crop and flip training images at random
    add_prefix_space: bool = False  # read the first word of a text as any other
    by_row: bool = False  # read each row by itself, not blocks of joined rows
    image_size: int | None = None  # pixels of an image's width and height; None: as the processor has it


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How texts are written."""

    max_target_length: int = 128  # tokens, at most
    num_beams: int = 1  # 1 is greedy
    length_penalty: float = 1.0  # of the beam search: above 0 favours longer texts


@runtime_checkable
class Inputs(Protocol):
    """A part of a task as rows that a model reads: windows of texts, blocks, images, clips.

    With an attribute `equal_lengths` that is true the rows of a batch must be of one length.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens (or samples) of each row, by which batches are put together; 1 for what has none."""
        ...

    @property
    def uncacheable(self) -> str | None:
        """Why the model's states for these rows cannot be kept from epoch to epoch; None if they can."""

    @property
    def digest(self) -> str:
        """Equal for equal inputs: kept states are found by it."""
        ...

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """What the model is called with for some rows: tensors `[batch, ...]`; random changes depend on the epoch.

        "labels" are among them only where the inputs make them (hidden tokens, target texts).
        """
        ...


@runtime_checkable
class Targets(Protocol):
    """One task's labels for the rows of its inputs."""

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """The labels of some rows `[batch, ...]`; -100, NaN or -1 where a row carries none."""
        ...


@runtime_checkable
class Results(Protocol):
    """Collects outputs batch by batch, and tells what they amount to; what a subclass leaves out is empty."""

    def add(self, rows: Sequence[int], outputs: Any, labels: Tensor | None = None) -> None:
        """Take in what `Kind.outputs` or a reader's head gave for some rows; and labels, where the inputs made them."""

    def first_not_finite(self) -> int | None:
        """The first example (or row of the inputs) for which outputs were NaN or infinite; None if there is none."""
        return None

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Metric -> score, in the order asked; never NaN."""
        return {}

    def per_class(self) -> list[dict[str, Any]]:
        """A row per class and average, as `metrics.class_table` makes them; empty where there are no classes."""
        return []

    def errors(self, count: int) -> list[dict[str, Any]]:
        """The `count` worst examples that were answered wrongly, as `error_examples.error_rows` gives them."""
        return []

    def predictions(self) -> list[Any]:
        """Per example a JSON-ready answer."""
        return []

    def raw_predictions(self) -> list[Any]:
        """Per example a JSON-ready answer with logits in place of probabilities, where there are any."""
        return self.predictions()

    def guesses(self) -> list[Any]:
        """Per example what is to be compared with its label in the split, in the same form."""
        return []


def cells_of(rows: datasets.Dataset, column: str, spec: ColumnSpec) -> Any:
    """A column of a data set; ids become names where the column has names for them that are all among the labels."""
    names = class_names(rows, column)
    named = partial(_by_name, names) if names and set(names) <= set(spec.labels or ()) else None
    return Column(rows, [column], named)


def class_names(rows: datasets.Dataset, column: str | int) -> tuple[str, ...] | None:
    """The class names that a column of a data set has, in the order of their ids; None if it has none."""
    feature = rows.features.get(str(column))
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else tuple(str(name).strip() for name in names)


def _by_name(names: tuple[str, ...], cell: Any) -> Any:
    if isinstance(cell, list):
        return [_by_name(names, part) for part in cell]
    if cell == -1:  # how `datasets` writes that there is no label
        return None
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell


def as_examples(given: Any) -> list[Any]:
    """What a user hands to `predict` as a list: of any iterable whose order means something; else a ConfigError."""
    numbers = getattr(getattr(given, "dtype", None), "kind", "f") in "biuf"
    several = numbers and getattr(given, "ndim", 1) > 1  # images or clips in one array
    listed = given.tolist() if hasattr(given, "tolist") and not several else given  # arrays, columns of pandas, tensors
    unordered = isinstance(listed, str | bytes | Path | Mapping | Set) or hasattr(listed, "__dataframe__")
    if unordered or not isinstance(listed, Iterable):
        rule = "a list of texts, pairs of texts, images or clips is needed"
        raise ConfigError(f"predict: got one {type(given).__name__}; {rule}.")
    return list(listed)


def checked_texts(raw: Sequence[Any], *, pairs: bool) -> Sequence[Any]:
    """What a user hands to `predict`, as texts or (where `pairs` may be) pairs of texts; else a ConfigError."""
    single = len(raw) == 0 or isinstance(raw[0], str)
    if not single and not pairs:
        raise ConfigError("predict: single texts are read here, and pairs were given.")
    for row, text in enumerate(raw):
        parts = [text] if single else text if isinstance(text, tuple | list) and len(text) == 2 else [None]
        if not all(isinstance(part, str) for part in parts):
            came = f"entry {row} is {type(text).__name__}"
            raise ConfigError(f"predict: {came}; all must be texts, or all pairs of texts.")
    return raw if single else [tuple(text) for text in raw]


def check_image_size(size: int, kind: Kind, op: str) -> None:
    """Raise ConfigError unless tasks of a kind have images, and the size is one of them."""
    if kind.processor != "image_processor":
        raise ConfigError(f"{op}: image_size is {size} for a task of kind {kind}, which has no images.")
    check_range(op, "image_size", size, 1)


class Kind(ABC):
    """A kind of task: what it says of itself, and what it does at each step."""

    name: ClassVar[str]  # in tasks, recipes and on the command line; also the name of its reader head
    problem_types: ClassVar[Mapping[str, tuple[str, ...]]]  # problem type -> its metrics; of both the usual one first
    auto_class: ClassVar[str]  # of transformers, whose models have the head for it
    base_class: ClassVar[str] = "AutoModel"  # auto class of the model that a bank's readers of this kind read
    processor: ClassVar[str] = "tokenizer"  # what makes inputs; or "image_processor", "feature_extractor"
    inputs: ClassVar[str] = "text"  # tasks of kinds that name the same inputs share a pass over the same examples
    predict_inputs: ClassVar[str] = "text"  # the same for predicting
    file: ClassVar[type[LazyFile] | None] = None  # what its examples are, where they are files; None: they are texts
    per_token: ClassVar[bool] = False  # answers are token by token, so that long texts are cut into windows
    tags_words: ClassVar[bool] = False  # every word has a label, which all of its tokens may carry
    has_classes: ClassVar[bool] = True  # the outputs of a model are one score per label
    reads_pairs: ClassVar[bool] = False  # an example may be a pair of texts
    judges_second: ClassVar[bool] = False  # of a pair the second text is what has labels, or is learnt
    draws: ClassVar[bool] = False  # its inputs to learn from are drawn by a seed, as masks and crops are
    sequential: ClassVar[bool] = False  # examples belong together in their order, so that the last tenth is held out
    usual_columns: ClassVar[tuple[str, str]] = ("sentence", "label")  # of text and label, where none is named
    other_files: ClassVar[str | None] = None  # what files of other endings hold: "conll", "lines"; None: there are none
    readers: ClassVar[bool] = True  # readers can do it; else only whole models
    missing: ClassVar[tuple[str, ...]] = ("error", "drop")  # what may become of rows without a label
    takes_prefix: ClassVar[bool] = False  # a text may be put before every example

    def __str__(self) -> str:
        """Return the kind's name, as messages print it and files hold it."""
        return self.name

    def __repr__(self) -> str:
        """Return the expression that looks the kind up."""
        return f"kind_of({self.name!r})"

    def __eq__(self, other: object) -> bool:
        """Tell whether `other` is a kind of the same name, or is that name itself."""
        return self.name == (other.name if isinstance(other, Kind) else other)

    def __hash__(self) -> int:
        """Return the hash of the kind's name, so that a kind and its name are one key of a dict."""
        return hash(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the kind as its name, which the process that reads it looks up."""
        return kind_of, (self.name,)

    # From files to examples

    def read(self, source: Any, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """Read one part from a file, or from what else the kind takes; `header` names the columns of files without.

        Raises:
            DataError: If it cannot be read.
            ConfigError: If it is not of a form that the kind takes.
        """
        if not isinstance(source, str | Path):
            came = f"{len(source)} files were given for one part of a task of kind {spec.kind}"
            raise ConfigError(f"task: {came}; it reads one. A pair of files is for texts that become others.")
        return read_table(source, header=header, other=self.other_files)

    def from_rows(self, name: str, rows: datasets.Dataset | Mapping[str, list[Any]], spec: ColumnSpec) -> Table:
        """A part that is at hand, as a data set or as columns of equal length; messages call it `name`."""
        columns = rows if isinstance(rows, Mapping) else {key: cells_of(rows, key, spec) for key in rows.column_names}
        return Table(name, dict(columns), range(1, len(next(iter(columns.values()), ())) + 1))

    @abstractmethod
    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Settle columns, labels and problem type, and make the examples of every part.

        Raises:
            DataError: If a column is missing or a cell does not fit; names file, row and column.
        """

    def metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """The metrics that fit, the usual one first."""
        return self.problem_types[problem_type]

    def further_metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Metrics that are reported too if one of them is asked for."""
        return ()

    def check_tags(self, *, label_all_tokens: bool) -> None:
        """Raise ConfigError if all tokens of words are to be labelled where words have no labels."""
        if label_all_tokens and not self.tags_words:
            came = f"label_all_tokens is set for a task of kind {self.name}"
            raise ConfigError(f"task: {came}; it is for tasks that tag words.")

    def single_label(self, problem_type: str) -> bool:
        """Whether every example has exactly one class, so that it can be drawn class by class."""
        return self.has_classes and not self.per_token and problem_type == "classification"

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """The classes that few-shot subsamples are counted by, and per example the numbers of those in it."""
        if not self.single_label(task.problem_type):
            return (), [()] * len(split)
        return tuple(task.labels), [(label,) for label in split.labels]

    # From examples to batches

    @abstractmethod
    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> Inputs:
        """The examples of a part as rows that a model reads; a processor or option that does not fit: ConfigError."""

    def targets(self, task: LabelledTask, split: Split, inputs: Inputs) -> Targets | None:
        """The labels of every row; None where the inputs make them."""

    def length_limit(self, model: PreTrainedModel, processor: Any, asked: int | None) -> int:
        """How much is read of one example: tokens of a window, samples of a clip; 1 of what has no length.

        `asked` is the most that a user wants; None: as much as usual. More than the model reads is a ConfigError.
        """
        return length_limit(model, processor, asked)

    def truncated(self, inputs: Inputs) -> int:
        """How many examples are read without their end."""
        return 0

    def batch_size(self, asked: int, inputs: Inputs, outputs: int) -> int:
        """Rows per batch when scoring, at most `asked`; `outputs` counts the scores per position of a model."""
        return asked

    # For estimates, before there is a model

    def model_rows(
        self,
        rows: int,
        tokens: float,
        max_length: int,
        config: Any,
        *,
        by_row: bool = False,
    ) -> tuple[int, int]:
        """How many rows of how many tokens a model of this config reads of `rows` examples of usually `tokens`."""
        return rows, min(round(tokens), max_length)

    def target_tokens(self, max_target_length: int) -> int:
        """Tokens that a model writes per example, at most; 0: none."""
        return 0

    # Whole models

    def configure(self, config: Any, task: TaskLike) -> None:
        """Write the task's classes and problem type into a model's config; a head of other classes is a ConfigError."""

    def fit_processor(self, processor: Any, task: TaskLike) -> bool:
        """Have a processor make inputs as the task asks, for whoever uses it later; whether the task asks for any."""
        return False

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """Why a model cannot do this kind of task, as far as its class and config tell; None if nothing is wrong."""

    def output_problem(self, outputs: Any, task: TaskLike) -> str | None:
        """What is wrong with a model's outputs for a batch; None if nothing is."""

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Labels as a whole model's own loss takes them."""
        return labels

    def outputs(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], processor: Any, options: GenerationOptions
    ) -> Any:
        """A model's outputs for a batch without labels, as `Results.add` takes them."""
        return model(**batch).logits  # pyright: ignore[reportCallIssue]

    def predict_outputs(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], processor: Any, options: GenerationOptions
    ) -> Any:
        """What a model answers with where the inputs make no labels, as to predict; by default its outputs."""
        return self.outputs(model, batch, processor, options)

    # From outputs to scores and answers

    @abstractmethod
    def results(self, task: TaskLike, split: Split, inputs: Inputs) -> Results:
        """An empty collection for scoring a part of a task."""

    def examples(self, raw: Sequence[Any], processor: Any) -> Split:
        """Examples without labels from what a user hands to `predict`; a ConfigError names what does not fit."""
        return Split.of(checked_texts(raw, pairs=self.reads_pairs))

    def answers(self, task: TaskLike, split: Split, inputs: Inputs, processor: Any) -> Results:
        """An empty collection for predicting, where it is not that for scoring; `split` is what `examples` gave."""
        return self.results(task, split, inputs)
