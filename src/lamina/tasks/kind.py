"""The interface of a kind of task, with everything that a new kind imports.

A new kind is one file with a subclass of `Kind`, and one line in the registry `lamina.tasks.KINDS`. No other package
asks what kind a task is; training, scoring and prediction call the methods of `Task.kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast, final, runtime_checkable

import numpy as np
from torch import Tensor

from lamina.data.arrow import Column
from lamina.data.batches import check_tokenizer
from lamina.data.class_names import decoder, names_of
from lamina.data.encode import CacheableWindows, encode, length_limit
from lamina.data.read import Table, read_table
from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.tasks import kind_of
from lamina.tasks.base import (
    ColumnSpec,
    EncodeOptions,
    GenerationOptions,
    Inputs,
    LabelledTask,
    Outputs,
    Results,
    Targets,
)
from lamina.tasks.class_results import ClassResults
from lamina.tasks.labels import (
    bad_cell,
    class_ids,
    class_labels,
    infer_labels,
    labelled,
    multi_hot,
    numbers,
    texts,
    usual_column,
    without_classes,
)
from lamina.tasks.split import Split, is_missing
from lamina.tasks.targets import RowTargets, WordTargets, first_window_targets, label_array
from lamina.utils import JSON

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedConfig, PreTrainedModel

    from lamina.layers.types import Batch, Processor
    from lamina.tasks.file_classification import LazyFile

__all__ = [
    "ClassKind",
    "ClassResults",
    "ColumnSpec",
    "EncodeOptions",
    "GenerationOptions",
    "Inputs",
    "Kind",
    "LabelledTask",
    "Outputs",
    "Results",
    "RowTargets",
    "Split",
    "Table",
    "Targets",
    "TaskLike",
    "TextClassKind",
    "TextInputs",
    "WordTargets",
    "bad_cell",
    "check_tokenizer",
    "checked_texts",
    "class_ids",
    "class_labels",
    "first_window_targets",
    "infer_labels",
    "label_array",
    "labelled",
    "multi_hot",
    "numbers",
    "texts",
    "usual_column",
    "without_classes",
]


@runtime_checkable
class HasLogits(Protocol):
    """The outputs of a model with a head."""

    logits: Tensor


# The file or folder of a split, or a pair of text files.
Source: TypeAlias = str | Path | Sequence[str | Path]
InputsT = TypeVar("InputsT", bound=Inputs)


class Kind(ABC, Generic[InputsT]):
    """A kind of task. A subclass implements three methods; every other method has a default.

    There is one object per kind, which `lamina.tasks.kind_of` returns. It has no state. A subclass also sets the first
    three class attributes, and those of the others whose default does not fit.

    **Reading**: from files or rows to a `Split` of examples with labels.
        Required: `build`.
        Defaults: `read`, `from_rows`, `examples`, `metrics`, `further_metrics`, `row_classes`.

    **Encoding**: from examples to batches, and what a model needs to read them.
        Required: `encode`.
        Defaults: `targets`, `learnt`, `length_limit`, `truncated`, `batch_size`, `model_rows`; and for whole models
        with a head of their own `configure`, `fit_processor`, `model_problem`, `output_problem`, `model_labels`.

    **Answering**: from outputs to scores and predictions.
        Required: `results`.
        Defaults: `outputs`, `predict_outputs`, `answers`.

    `TextClassKind` implements all but `build`, for kinds that classify texts.

    Attributes:
        name: The kind's name in tasks, recipes, files and on the command line, and the name of its reader's head.
        problem_types: Problem type -> its metrics. The default problem type and the default metric come first.
        auto_class: Name of the auto class of transformers whose models have a head for this kind.
        base_class: Name of the auto class of the model whose layers readers of this kind read.
        processor: What encodes examples: "tokenizer", "image_processor" or "feature_extractor".
        inputs: Name of the inputs. Tasks whose kinds have the same name share one pass if they have the same examples.
        predict_inputs: Name of the inputs for prediction, compared in the same way.
        file: Class of the files that examples are. None: examples are texts.
        per_token: Whether answers are given token by token, so that long texts are cut into windows.
        keeps_end: Whether prediction keeps the end of a text that is too long, whatever the tokenizer's side.
        tags_words: Whether every word has a label, which all of its sub-tokens may carry.
        has_classes: Whether a model's outputs are one score per label.
        reads_pairs: Whether an example may be a pair of texts.
        judges_second: Whether labels, or generated texts, belong to the second text of a pair.
        draws: Whether training inputs are random (masked tokens, image crops), so that a seed decides them.
        sequential: Whether the order of examples matters, so that validation gets the last tenth of the train split.
        usual_columns: Default columns of text and label.
        other_files: Format of files whose extension is unknown: "conll" or "lines". None: such files are an error.
        readers: Whether readers of a bank can do this kind of task; otherwise only whole models can.
        missing: Allowed values of `missing_labels`.
        takes_prefix: Whether the option `prefix`, a text in front of every example, is allowed.
        generates: Whether a model generates a text per example, both for predictions and for scores.
        learnt_keys: Names of the facts that `learnt` may return.
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
        """Return the kind's name, as messages print it and files hold it."""
        return self.name

    def __repr__(self) -> str:
        """Return the Python expression that looks the kind up."""
        return f"kind_of({self.name!r})"

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a kind of the same name, or is that name itself."""
        return self.name == (other.name if isinstance(other, Kind) else other)

    def __hash__(self) -> int:
        """Return the hash of the kind's name, so that a kind and its name are one key of a dict."""
        return hash(self.name)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the kind as its name, which is looked up when unpickling."""
        return kind_of, (self.name,)

    # Reading: from files or rows to examples with labels

    @abstractmethod
    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Make the examples of every split.

        Args:
            spec: Which columns to read, as the user named them.
            tables: Split name -> table, as `read` or `from_rows` returned it.

        Returns:
            `spec` with columns, labels and problem type filled in; and split name -> examples with labels.

        Raises:
            DataError: If a column is missing or a cell has a wrong form. The message names file, row and column.
        """

    def read(self, source: Source, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """Return one split as a table, read from a file or from another source that the kind allows.

        Args:
            source: Path of the file.
            spec: Which columns to read.
            header: Column names of a file that has none.

        Raises:
            DataError: If the file cannot be read.
            ConfigError: If `source` is a pair of files, which only text-to-text kinds read.
        """
        if not isinstance(source, str | Path):
            got = f"{len(source)} files were given for one part of a task of kind {spec.kind}"
            raise ConfigError(f"task: {got}; it reads one. Only kinds that generate texts read a pair of files.")
        return read_table(source, header=header, other=self.other_files)

    def from_rows(self, name: str, rows: datasets.Dataset | Mapping[str, list[object]], spec: ColumnSpec) -> Table:
        """Return a table of rows in memory: a dataset, or columns of equal length; `name` is for messages."""
        if isinstance(rows, Mapping):
            return Table(name, dict(rows), range(1, len(next(iter(rows.values()), ())) + 1))
        columns = {key: Column(rows, [key], decoder(feature)) for key, feature in rows.features.items()}
        return Table(name, columns, range(1, len(rows) + 1), class_names=names_of(rows.features))

    def examples(self, raw: Sequence[object], processor: Processor) -> Split:
        """Return examples without labels, from the examples that a user passed to `predict`.

        Raises:
            ConfigError: If an example is not a text or pair of texts that this kind reads. The message names the
                example.
        """
        return Split.of_texts(checked_texts(raw, pairs=self.reads_pairs))

    def metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the metrics for this problem type and these class names, the default metric first."""
        return self.problem_types[problem_type]

    def further_metrics(self, problem_type: str, labels: Sequence[str]) -> tuple[str, ...]:
        """Return metrics that are not reported by default; if a user asks for one of them, all are reported."""
        return ()

    def row_classes(self, task: TaskLike, split: Split) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
        """Return the classes that `Task.subsample(per_class=...)` counts, and the class ids of each example.

        The names and each list of ids are empty if the task has no classes that can be counted.
        """
        if not self.single_label(task.problem_type):
            return (), [()] * len(split)
        return tuple(task.labels), [() if is_missing(label) else (label,) for label in split.labels]

    def single_label(self, problem_type: str) -> bool:
        """Return whether every example has exactly one class, so that examples can be drawn class by class."""
        return self.has_classes and not self.per_token and problem_type == "classification"

    # Encoding: from examples to batches

    @abstractmethod
    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> InputsT:
        """Encode the examples of a split as rows that a model reads.

        Raises:
            ConfigError: If the processor is missing or of another type, or an option does not fit.
        """

    def targets(self, task: LabelledTask, split: Split, inputs: InputsT) -> Targets | None:
        """Return the labels of all rows; None if the labels come from the inputs themselves, as masked tokens do."""
        return None

    def learnt(self, task: LabelledTask, split: Split, inputs: InputsT) -> dict[str, JSON]:
        """Return facts about the train split that answers need later; a reader keeps them in its `info`."""
        return {}

    def length_limit(self, model: PreTrainedModel, processor: Processor, asked: int | None) -> int:
        """Return how much of an example is read: tokens of a window, samples of a clip, or 1 for images.

        Args:
            model: The model that reads the examples.
            processor: Its processor, which may have a lower limit.
            asked: The user's limit. None: the default.

        Raises:
            ConfigError: If `asked` is more than model and processor read.
        """
        return length_limit(model, processor, asked)

    def truncated(self, inputs: InputsT) -> int:
        """Return how many examples were cut off at their end."""
        return 0

    def batch_size(self, asked: int, inputs: InputsT, outputs: int) -> int:
        """Return how many rows to score at a time.

        Args:
            asked: The number that the user asks for, which is the maximum.
            inputs: The encoded examples.
            outputs: Number of scores that a model returns per position: of classes, or of the vocabulary.
        """
        return asked

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: PreTrainedConfig | None, *, by_row: bool = False
    ) -> tuple[int, int]:
        """Estimate how many rows of how many tokens a model reads, before there is any data or model.

        Args:
            rows: Number of examples.
            tokens: Mean tokens of an example.
            max_length: Maximum tokens of a row.
            config: The model's config.
            by_row: As in `Task`.

        Returns:
            Number of rows, and tokens of a row.
        """
        return rows, min(round(tokens), max_length)

    # Encoding for whole models with a head of their own

    def configure(self, config: PreTrainedConfig, task: TaskLike) -> None:
        """Write the task's class names and type of loss into a model's config, in place; the default changes nothing.

        Raises:
            ConfigError: If the head of the model is for other classes.
        """

    def fit_processor(self, processor: Processor, task: TaskLike) -> bool:
        """Change a processor in place to the task's settings, such as `image_size`; return whether there are any."""
        return False

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """Return in words why the model's class or config does not fit this kind of task; None if they fit."""
        return None

    def output_problem(self, outputs: HasLogits, task: TaskLike) -> str | None:
        """Return in words what is wrong with the model's outputs for a batch; None if nothing is."""
        return None

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Return the labels of a batch in the form that a whole model's own loss expects."""
        return labels

    # Answering: from outputs to scores and predictions

    @abstractmethod
    def results(self, task: TaskLike, split: Split, inputs: InputsT) -> Results:
        """Return an empty collection of outputs, which scores the examples of a split of a task."""

    def outputs(
        self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions
    ) -> Outputs:
        """Run a whole model on a batch without labels, and return what `Results.add` expects: logits or texts."""
        return model(**batch).logits  # pyright: ignore[reportCallIssue]

    def predict_outputs(
        self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions
    ) -> Outputs:
        """Run a whole model on a batch for prediction, in which inputs contain no labels; the default is `outputs`."""
        return self.outputs(model, batch, processor, options)

    def answers(self, task: TaskLike, split: Split, inputs: InputsT, processor: Processor) -> Results:
        """Return an empty collection of outputs for prediction; the default is `results`.

        Args:
            task: The facts about the task.
            split: The examples, as `examples` returned them.
            inputs: The encoded examples.
            processor: The processor, for kinds whose predictions are tokens.
        """
        return self.results(task, split, inputs)


class ClassKind(Kind[InputsT]):
    """A kind whose models return one score per label. It implements everything that depends on the model's head.

    Attributes:
        logits_axes: Axes of the logits: 2 for `[batch, classes]`, 3 for `[batch, tokens, classes]`.
    """

    logits_axes: ClassVar[int] = 2

    def configure(self, config: PreTrainedConfig, task: TaskLike) -> None:
        """Write the task's class names into the config of a model with a new head, whose classes are named LABEL_0 ...

        Raises:
            ConfigError: If the head has another number of classes, or its classes have other names of their own.
        """
        count = len(task.labels)
        shown = f"{', '.join(task.labels[:5])}{' ...' if count > 5 else ''}"
        if config.num_labels != count:
            got = f"the head has {config.num_labels} classes, the task has {count} ({shown}); they must agree"
            hint = f"Load the model with {self.auto_class}.from_pretrained(..., num_labels={count})."
            raise ConfigError(f"finetune: {got}. {hint}")
        id2label = cast("dict[int, str]", config.id2label)
        names = [str(id2label[number]) for number in range(count)]
        if names == [f"LABEL_{number}" for number in range(count)]:
            config.id2label = dict(enumerate(task.labels))
            config.label2id = {name: number for number, name in enumerate(task.labels)}
        elif [name.lower() for name in names] != [name.lower() for name in task.labels]:
            got = f"the classes of the head are {', '.join(names[:5])}, those of the task {shown}; they must agree"
            hint = "Give the task labels=[...], or change model.config.id2label."
            raise ConfigError(f"finetune: {got}, in this order. {hint}")

    def output_problem(self, outputs: HasLogits, task: TaskLike) -> str | None:
        """Return in words why the logits are not one score per label; None if they are."""
        shape = list(outputs.logits.shape)
        fits = len(shape) == self.logits_axes and shape[-1] == len(task.labels)
        return None if fits else f"it gives logits of the shape {shape}"

    def outputs(self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions) -> Tensor:
        """Return the model's logits for a batch.

        Raises:
            ConfigError: If the logits do not have `logits_axes` axes, because the head is for another kind of task.
        """
        logits = super().outputs(model, batch, processor, options)
        if not isinstance(logits, Tensor) or logits.ndim != self.logits_axes:
            got = f"a {type(model).__name__} gives logits of {list(getattr(logits, 'shape', ()))}"
            raise ConfigError(
                f"task: {got}; its head is for no task of kind '{self.name}'. Load it as {self.auto_class}."
            )
        return logits


@final
@dataclass(frozen=True)
class TextInputs(CacheableWindows):
    """Texts as windows of tokens; an `Inputs`."""

    @classmethod
    def of(cls, split: Split, processor: Processor | None, options: EncodeOptions) -> TextInputs:
        """Tokenise the texts of a split; windows of long texts have character offsets.

        Raises:
            ConfigError: If the processor has no tokenizer, or an option does not fit; see `lamina.data.encode.encode`.
        """
        processor = check_tokenizer(processor)
        encoded = encode(
            split.texts,
            processor,
            max_length=options.max_length,
            windows=options.windows,
            stride=options.stride,
            offsets=options.windows,
            add_prefix_space=options.add_prefix_space,
        )
        return cls(encoded, processor)


class TextClassKind(ClassKind[TextInputs]):
    """A kind that classifies texts or pairs of texts; a subclass has only to implement `build`."""

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> TextInputs:
        """Return the texts as windows of tokens; raise ConfigError if the processor has no tokenizer."""
        return TextInputs.of(split, processor, replace(options, windows=options.windows or self.per_token))

    def truncated(self, inputs: TextInputs) -> int:
        """Return how many texts were cut, or have more than one window, of which only the first is scored.

        None are for kinds that answer token by token, which read all windows.
        """
        return 0 if self.per_token else inputs.encoded.truncated or int((inputs.encoded.window == 1).sum())

    def targets(self, task: LabelledTask, split: Split, inputs: TextInputs) -> Targets:
        """Return the label of each text at its first window; further windows have no label."""
        return first_window_targets(split, inputs.encoded)

    def results(self, task: TaskLike, split: Split, inputs: TextInputs) -> Results:
        """Return an empty collection of the logits of each text's first window."""
        encoded = inputs.encoded
        return ClassResults(task, split, np.where(encoded.window == 0, encoded.text, -1))


def checked_texts(raw: Sequence[object], *, pairs: bool) -> list[str] | list[tuple[str, str]]:
    """Return the examples that a user passed to `predict` as texts, or as pairs of texts.

    Args:
        raw: The examples; either all of them are texts, or all are pairs (tuples or lists of two texts).
        pairs: Whether pairs are allowed.

    Raises:
        ConfigError: If an example has another type, or pairs are not allowed.
    """
    if len(raw) == 0 or isinstance(raw[0], str):
        for row, text in enumerate(raw):
            if not isinstance(text, str):
                raise _not_alike(row, text)
        return cast("list[str]", list(raw))
    if not pairs:
        raise ConfigError("predict: got pairs of texts; this kind of task reads single texts.")
    return [_checked_pair(row, pair) for row, pair in enumerate(raw)]


def _checked_pair(row: int, entry: object) -> tuple[str, str]:
    """Return an example as a tuple if it is a pair of texts; otherwise raise ConfigError with its index `row`."""
    if isinstance(entry, tuple | list) and len(entry) == 2:
        first, second = entry
        if isinstance(first, str) and isinstance(second, str):
            return first, second
    raise _not_alike(row, entry)


def _not_alike(row: int, entry: object) -> ConfigError:
    """Return the error that an example differs in type from the first one."""
    return ConfigError(f"predict: entry {row} is {type(entry).__name__}; all must be texts, or all pairs of texts.")
