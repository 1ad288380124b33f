"""Base classes of kinds of task, with everything that a new kind imports.

A new kind is one file with a subclass of `Kind`, and one line in the registry `lamina.tasks.KINDS`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, cast, final

import numpy as np
from torch import Tensor

from lamina.data.encode import Encoded, Windows
from lamina.data.read import Table
from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.layers.types import check_tokenizer
from lamina.tasks.base import (
    ColumnSpec,
    EncodeOptions,
    GenerationOptions,
    Inputs,
    InputsT,
    Kind,
    LabelledTask,
    Targets,
)
from lamina.tasks.class_results import ClassResults
from lamina.tasks.label_cells import is_whole
from lamina.tasks.labels import (
    are_unnamed,
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
from lamina.tasks.outputs import Outputs, Results
from lamina.tasks.split import Split, checked_texts
from lamina.tasks.targets import RowTargets, WordTargets, first_window_targets, label_array

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from lamina.layers.types import Batch, Processor
    from lamina.tasks.base import HasLogits

__all__ = [
    "ClassKind",
    "ClassResults",
    "ColumnSpec",
    "EncodeOptions",
    "EncodedInputs",
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


logger = logging.getLogger(__name__)


class ClassKind(Kind[InputsT]):
    """Base class of kinds whose models return one score per label. It implements the methods about the model's head.

    Attributes:
        logits_axes: Number of axes of the logits: 2 for `[batch, classes]`, 3 for `[batch, tokens, classes]`.
    """

    logits_axes: ClassVar[int] = 2

    def configure(self, config: PreTrainedConfig, task: TaskLike) -> None:
        """Write the task's class names into the config of a model with a new head, in place.

        A head counts as new if its classes are named LABEL_0, LABEL_1 and so on. A head that has the task's names in
        the task's order (case does not count) stays as it is. Raises ConfigError, whose message names no operation, for
        other names, order or number of classes; the config is then unchanged.
        """
        count = len(task.labels)
        shown = f"{', '.join(task.labels[:5])}{' ...' if count > 5 else ''}"
        if config.num_labels != count:
            got = f"the head has {config.num_labels} classes, the task has {count} ({shown}); they must agree"
            hint = f"Load the model with {self.auto_class}.from_pretrained(..., num_labels={count})."
            raise ConfigError(f"{got}. {hint}")
        id2label = cast("dict[int, str]", config.id2label)
        names = [str(id2label[number]) for number in range(count)]
        if are_unnamed(names):
            config.id2label = dict(enumerate(task.labels))
            config.label2id = {name: number for number, name in enumerate(task.labels)}
        elif [name.lower() for name in names] != [name.lower() for name in task.labels]:
            got = f"the classes of the head are {', '.join(names[:5])}, those of the task {shown}; they must agree"
            hint = "Give the task labels=[...], or change model.config.id2label."
            if all(map(is_whole, task.labels)):
                hint += " With labels=[...] of the head's names, a label 0 in the data means the first of them."
            raise ConfigError(f"{got}, in this order. {hint}")

    def output_problem(self, outputs: HasLogits, task: TaskLike) -> str | None:
        """Return why the logits do not have `logits_axes` axes and one score per label, as text; None if they do."""
        shape = list(outputs.logits.shape)
        fits = len(shape) == self.logits_axes and shape[-1] == len(task.labels)
        return None if fits else f"it gives logits of the shape {shape}"

    def outputs(self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions) -> Tensor:
        """Run the model on a batch, and return its logits; `processor` and `options` are not used.

        Raises ConfigError if the logits do not have `logits_axes` axes.
        """
        logits = super().outputs(model, batch, processor, options)
        if not isinstance(logits, Tensor) or logits.ndim != self.logits_axes:
            got = f"a {type(model).__name__} gives logits of {list(getattr(logits, 'shape', ()))}"
            rule = f"its head is for no task of kind '{self.name}'. Load it as {self.auto_class}"
            raise ConfigError(f"task: {got}; {rule}.")
        return logits


@final
@dataclass(frozen=True)
class TextInputs(Windows):
    """Texts as windows of tokens. It is a `lamina.tasks.base.Inputs`."""

    @classmethod
    def of(cls, split: Split, processor: Processor | None, options: EncodeOptions) -> TextInputs:
        """Tokenise the texts of a split. Texts that are too long are truncated.

        With `options.windows`, they are cut into windows instead, and the character range of each token is kept.

        Raises:
            ConfigError: If the processor has no tokenizer, `max_length` leaves no room for text, or windows are wanted
                and the tokenizer is slow or `stride` does not fit.
        """
        processor = check_tokenizer(processor)
        return cls(options.encode_texts(split.texts, processor, windows=options.windows), processor)


class EncodedInputs(Inputs, Protocol):
    """Inputs with windows of texts as rows: a `TextInputs`, or recorded states of such windows."""

    @property
    def encoded(self) -> Encoded:
        """The windows: token ids, masks and the text that each window belongs to."""
        ...


class TextClassKind(ClassKind[EncodedInputs]):
    """Base class of kinds that classify texts or pairs of texts. A subclass implements only `build`."""

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> TextInputs:
        """Tokenise a split as `TextInputs.of` does, with its errors. Kinds that label tokens always use windows.

        Logs a warning if texts of the train split are truncated although `stride` is set.
        """
        processor, windows = check_tokenizer(processor), options.windows or self.per_token
        encoded = options.encode_texts(split.texts, processor, windows=windows)
        if options.part == "train" and options.stride is not None and encoded.truncated and not windows:
            what = "encode: stride is %d, but no task labels the words of these texts, so %d are truncated and not cut"
            logger.warning(what, options.stride, encoded.truncated)
        return TextInputs(encoded, processor)

    def truncated(self, inputs: EncodedInputs) -> int:
        """Return the number of truncated texts; if none was truncated, the number of texts cut into several windows.

        Texts in several windows count because only the first window is scored. They do not count for kinds that label
        tokens, which score all windows; with them, only the first text of a pair can be truncated.
        """
        return inputs.encoded.truncated or (0 if self.per_token else int((inputs.encoded.window == 1).sum()))

    def targets(self, task: LabelledTask, split: Split, inputs: EncodedInputs) -> Targets:
        """Return each text's label at the text's first window; further windows have no label. `task` is unused."""
        return first_window_targets(split, inputs.encoded)

    def results(self, task: TaskLike, split: Split, inputs: EncodedInputs) -> Results:
        """Return an empty `ClassResults`, which collects the logits of each text's first window."""
        encoded = inputs.encoded
        return ClassResults(task, split, np.where(encoded.window == 0, encoded.text, -1))
