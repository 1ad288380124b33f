"""Texts as inputs, class labels as targets, and the collection of logits: what several kinds of task share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from lamina.data.arrow import Ragged, chunks, dataset_of
from lamina.data.batches import pad, padding_of, tokenizer_of
from lamina.data.encode import encode
from lamina.data.windows import IGNORED, Encoded
from lamina.errors import ConfigError
from lamina.layers.nan_checks import first_invalid_row
from lamina.tasks import metrics as score
from lamina.tasks.base import EncodeOptions, GenerationOptions, Inputs, Kind, LabelledTask, Results, Targets, TaskLike
from lamina.tasks.error_examples import error_rows, wrong_answers
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

Array = np.ndarray[Any, np.dtype[Any]]
_CACHED = {"input_ids", "attention_mask", "token_type_ids"}


@dataclass(frozen=True)
class Windows:
    """What inputs of tokens have in common."""

    encoded: Encoded  # windows of texts, or blocks
    processor: Any  # the tokenizer, or a processor that holds one; it says what rows are padded with

    @property
    def lengths(self) -> Any:
        """Tokens of each row."""
        return self.encoded.lengths

    @property
    def digest(self) -> str:
        """Equal for equal tokens in equal rows."""
        return self.encoded.digest


@dataclass(frozen=True)
class SteadyWindows(Windows):
    """Inputs that are the same in every epoch."""

    @property
    def uncacheable(self) -> str | None:
        """Only texts with an attention mask are cached."""
        keys = set(self.encoded.keys)
        if "attention_mask" in keys and keys <= _CACHED:
            return None
        return f"the inputs are {', '.join(self.encoded.keys)}; only texts with an attention mask are cached"


@final
@dataclass(frozen=True)
class TextInputs(SteadyWindows):
    """Windows of texts as rows that a model reads; an `Inputs`."""

    @classmethod
    def of(cls, split: Split, processor: Any, options: EncodeOptions) -> TextInputs:
        """Tokenise a part of a task; windows have character offsets."""
        check_tokenizer(processor)
        windows, how = options.windows, {"max_length": options.max_length, "stride": options.stride}
        how["add_prefix_space"] = options.add_prefix_space
        return cls(encode(split.texts, processor, windows=windows, offsets=windows, **how), processor)

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some windows, padded to the longest on the right."""
        return self.encoded.batch(rows, padding_of(self.processor))


def check_tokenizer(processor: Any) -> None:
    """Raise ConfigError unless the processor is, or holds, a tokenizer."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer_of(processor), PreTrainedTokenizerBase):
        came = "no processor was given" if processor is None else f"the processor is a {type(processor).__name__}"
        hint = "Give the one that AutoTokenizer.from_pretrained finds for the model."
        raise ConfigError(f"task: {came}; texts are read by a tokenizer. {hint}")


@final
@dataclass(frozen=True)
class RowTargets:
    """A label `[rows]`, or zeros and ones `[rows, classes]`, for every row; a `Targets`."""

    values: Array

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """The labels of some rows."""
        return torch.from_numpy(self.values[[int(row) for row in rows]])


@final
class WordTargets:
    """A label for every token of every row, in Arrow; a `Targets`."""

    def __init__(self, labels: Iterable[Sequence[int]]) -> None:
        tables = (pa.table({"label": pa.array(part, pa.list_(pa.int32()))}) for part in chunks(labels))
        self._rows = dataset_of(tables)  # holds the file that large columns are in
        self._labels = Ragged(self._rows.data.column("label"))

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """The labels of some rows `[batch, tokens]`."""
        return pad([self._labels[row] for row in rows], IGNORED)


def first_window_targets(split: Split, encoded: Encoded) -> RowTargets:
    """A text's label at its first window; its others carry none."""
    labels = label_array(split)
    values = labels[encoded.text]
    values[encoded.window > 0] = math.nan if values.dtype == np.float32 else -1 if values.ndim > 1 else IGNORED
    return RowTargets(values)


def label_array(split: Split) -> Array:
    """Class ids, numbers (in float32) or zeros and ones as an array `[rows, ...]`."""
    labels = np.asarray(list(split.labels))
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)


@final
class ClassResults(Results):
    """Logits of whole examples: `example` is per row of the inputs the one whose logits it gives; -1: none."""

    def __init__(self, task: TaskLike, split: Split, example: Array) -> None:
        self._task, self._split, self._example = task, split, example
        self._logits = torch.zeros(len(split), len(task.labels))

    @property
    def logits(self) -> Tensor:
        """Of each example `[examples, classes]`."""
        return self._logits

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Take in the logits `[batch, classes]` of some rows."""
        examples = torch.from_numpy(self._example[[int(row) for row in rows]])
        wanted = examples >= 0
        self._logits[examples[wanted]] = outputs.float().cpu()[wanted]

    def first_not_finite(self) -> int | None:
        """The first example without probabilities."""
        return first_invalid_row(self._logits)

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Metric -> score."""
        problem, targets = self._task.problem_type, torch.from_numpy(label_array(self._split))
        if problem == "regression":
            return score.score_numbers(metrics, self._logits[:, 0].tolist(), targets.tolist())
        if problem == "multi_label":
            return score.score_multi_label(metrics, self._logits > 0, targets)
        plain, ranked = ([name for name in metrics if (name in score.RANKING) is flag] for flag in (False, True))
        scores = score.score_classes(plain, self._logits.argmax(-1), targets, len(self._task.labels))
        if ranked:
            scores |= score.score_ranking(ranked, self._logits[:, 1] - self._logits[:, 0], targets)
        return {name: scores[name] for name in metrics}

    def per_class(self) -> list[dict[str, Any]]:
        """A row per class; none for numbers."""
        problem, labels = self._task.problem_type, self._task.labels
        if problem == "regression":
            return []
        guesses = self._logits > 0 if problem == "multi_label" else self._logits.argmax(-1)
        return score.class_table(guesses, torch.from_numpy(label_array(self._split)), labels)

    def errors(self, count: int) -> list[dict[str, Any]]:
        """The worst wrong answers: "row", "text", "true", "predicted", and "confidence" or (of numbers) "error"."""
        wrong = wrong_answers(self._logits, torch.from_numpy(label_array(self._split)), self._task)
        return error_rows(wrong, self._split.texts, count)

    def guesses(self) -> list[Any]:
        """Class ids, numbers, or zeros and ones."""
        if self._task.problem_type == "regression":
            return self._logits[:, 0].tolist()
        if self._task.problem_type == "multi_label":
            return [tuple(row) for row in (self._logits > 0).long().tolist()]
        return self._logits.argmax(-1).tolist()

    def predictions(self) -> list[Any]:
        """Per example its "label", "score" and "probabilities", "labels" and "probabilities", or "value"."""
        return [_to_prediction(logits, self._task) for logits in self._logits]

    def raw_predictions(self) -> list[Any]:
        """Per example the logit of each label; of a regression its "value"."""
        if self._task.problem_type == "regression":
            return self.predictions()
        return [{"logits": dict(zip(self._task.labels, row, strict=True))} for row in self._logits.tolist()]


def _to_prediction(logits: Tensor, task: TaskLike) -> dict[str, Any]:
    if task.problem_type == "regression":
        return {"value": float(logits[0])}
    several = task.problem_type == "multi_label"
    values = logits.sigmoid() if several else logits.softmax(-1)
    probabilities = dict(zip(task.labels, values.tolist(), strict=True))
    if several:
        return {"labels": [name for name, p in probabilities.items() if p > 0.5], "probabilities": probabilities}
    label = max(probabilities, key=probabilities.__getitem__)
    return {"label": label, "score": probabilities[label], "probabilities": probabilities}


class ClassKind(Kind):
    """What kinds share whose models give one score per label, unless they say otherwise of a whole text."""

    logits_axes: ClassVar[int] = 2  # of the logits: 2 for `[batch, classes]`, 3 for `[batch, tokens, classes]`

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> Inputs:
        """Windows of the texts."""
        return TextInputs.of(split, processor, replace(options, windows=options.windows or self.per_token))

    def targets(self, task: LabelledTask, split: Split, inputs: Any) -> Targets:
        """A text's label at its first window."""
        return first_window_targets(split, inputs.encoded)

    def outputs(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], processor: Any, options: GenerationOptions
    ) -> Tensor:
        """The logits; ConfigError if the model's head is for another kind."""
        logits = super().outputs(model, batch, processor, options)
        if logits.ndim != self.logits_axes:
            came = f"a {type(model).__name__} gives logits of {list(logits.shape)}"
            raise ConfigError(
                f"task: {came}; its head is for no task of kind '{self.name}'. Load it as {self.auto_class}."
            )
        return logits

    def results(self, task: TaskLike, split: Split, inputs: Any) -> Results:
        """Logits of each text's first window."""
        encoded = inputs.encoded
        return ClassResults(task, split, np.where(encoded.window == 0, encoded.text, -1))

    def configure(self, config: Any, task: TaskLike) -> None:
        """Name the classes of a new head after a task's; a head that has names keeps them: they must be the task's."""
        count = len(task.labels)
        shown = f"{', '.join(task.labels[:5])}{' ...' if count > 5 else ''}"
        if config.num_labels != count:
            came = f"the head has {config.num_labels} classes, the task has {count} ({shown}); they must agree"
            hint = f"Load the model with {self.auto_class}.from_pretrained(..., num_labels={count})."
            raise ConfigError(f"finetune: {came}. {hint}")
        names = [str(config.id2label[number]) for number in range(count)]
        if names == [f"LABEL_{number}" for number in range(count)]:
            config.id2label = dict(enumerate(task.labels))
            config.label2id = {name: number for number, name in enumerate(task.labels)}
        elif [name.lower() for name in names] != [name.lower() for name in task.labels]:
            came = f"the classes of the head are {', '.join(names[:5])}, those of the task {shown}; they must agree"
            hint = "Give the task labels=[...], or change model.config.id2label."
            raise ConfigError(f"finetune: {came}, in this order. {hint}")

    def output_problem(self, outputs: Any, task: TaskLike) -> str | None:
        """Logits that are not one per label."""
        shape = list(outputs.logits.shape)
        fits = len(shape) == self.logits_axes and shape[-1] == len(task.labels)
        return None if fits else f"it gives logits of the shape {shape}"
