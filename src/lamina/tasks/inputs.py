"""Texts as inputs, class labels as targets, and the collection of logits: what several kinds of task share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from lamina.data.batches import pad, padding_of, tokenizer_of
from lamina.data.encode import encode
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError
from lamina.tasks import metrics as score
from lamina.tasks.base import Results

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lamina.data.windows import Encoded
    from lamina.tasks.base import EncodeOptions, TaskLike
    from lamina.tasks.split import Split

_CACHED = {"input_ids", "attention_mask", "token_type_ids"}


@dataclass(frozen=True)
class Windows:
    """What inputs of tokens have in common.

    Attributes:
        encoded: What is read: windows of texts, or blocks.
        processor: The tokenizer, or a processor that holds one; it says what rows are padded with.
    """

    encoded: Encoded
    processor: Any

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self.encoded.lengths  # pyright: ignore[reportReturnType]

    @property
    def digest(self) -> str:
        """Equal for equal tokens in equal rows."""
        return self.encoded.digest


@final
@dataclass(frozen=True)
class TextInputs(Windows):
    """Windows of texts as rows that a model reads; an `Inputs`."""

    @classmethod
    def of(cls, split: Split, processor: Any, options: EncodeOptions) -> TextInputs:
        """Tokenise a part of a task.

        Raises:
            ConfigError: If there is no tokenizer, it cannot tell where words are, or a length leaves no room.
        """
        check_tokenizer(processor)
        return cls(
            encode(
                split.texts,
                processor,
                max_length=options.max_length,
                windows=options.windows,
                stride=options.stride,
                offsets=options.windows,
            ),
            processor,
        )

    @property
    def uncacheable(self) -> str | None:
        """Why states cannot be kept: None if they can."""
        keys = set(self.encoded.keys)
        if "attention_mask" in keys and keys <= _CACHED:
            return None
        return f"the inputs are {', '.join(self.encoded.keys)}; only texts with an attention mask are cached"

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some windows, padded to the longest on the right."""
        return self.encoded.batch(rows, padding_of(self.processor))


def check_tokenizer(processor: Any) -> None:
    """Raise ConfigError unless the processor is, or holds, a tokenizer."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer_of(processor), PreTrainedTokenizerBase):
        what = "no processor was given" if processor is None else f"the processor is a {type(processor).__name__}"
        raise ConfigError(
            f"task: {what}; texts are read by a tokenizer. Give the one that AutoTokenizer.from_pretrained finds for "
            "the model."
        )


@final
@dataclass(frozen=True)
class RowTargets:
    """A label for every row, or one for each of its tokens; a `Targets`.

    Attributes:
        values: Per row a label, or a list of them.
        per_token: Whether they are lists, padded with -100.
    """

    values: Any
    per_token: bool = False

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """The labels of some rows: `[batch]` or `[batch, classes]`; with `per_token` `[batch, tokens]`."""
        if self.per_token:
            return pad([self.values[row] for row in rows], IGNORED)
        return torch.from_numpy(self.values[[int(row) for row in rows]])


def first_window_targets(split: Split, encoded: Encoded) -> RowTargets:
    """A text's label at its first window; its others carry none."""
    labels = label_array(split)
    values = labels[encoded.text]
    values[encoded.window > 0] = math.nan if values.dtype == np.float32 else -1 if values.ndim > 1 else IGNORED
    return RowTargets(values)


def label_array(split: Split) -> np.ndarray[Any, np.dtype[Any]]:
    """Class ids, numbers (in float32) or zeros and ones as an array `[rows, ...]`."""
    labels = np.asarray(list(split.labels))
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)


@final
class ClassResults(Results):
    """Logits of whole examples, their scores and answers; a `Results`.

    Args:
        task: Says what they mean.
        split: The examples.
        example: Per row of the inputs the example whose logits it gives; -1: of none.
    """

    def __init__(self, task: TaskLike, split: Split, example: np.ndarray[Any, np.dtype[Any]]) -> None:
        self._task, self._split, self._example = task, split, example
        self._logits = torch.zeros(len(split), len(task.labels))

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Take in the logits `[batch, classes]` of some rows."""
        examples = torch.from_numpy(self._example[[int(row) for row in rows]])
        wanted = examples >= 0
        self._logits[examples[wanted]] = outputs.float().cpu()[wanted]

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Metric -> score."""
        problem, targets = self._task.problem_type, torch.from_numpy(label_array(self._split))
        if problem == "regression":
            return score.score_numbers(metrics, self._logits[:, 0].tolist(), targets.tolist())
        if problem == "multi_label":
            return score.score_multi_label(metrics, self._logits > 0, targets)
        return score.score_classes(metrics, self._logits.argmax(-1), targets, len(self._task.labels))

    def per_class(self) -> list[dict[str, Any]]:
        """A row per class; none for numbers."""
        problem, count = self._task.problem_type, len(self._task.labels)
        if problem == "regression":
            return []
        guesses, targets = self._logits > 0, torch.from_numpy(label_array(self._split))
        if problem == "classification":
            one_hot = torch.nn.functional.one_hot
            guesses, targets = one_hot(self._logits.argmax(-1), count), one_hot(targets, count)
        return score.class_table(guesses, targets, self._task.labels)

    def predictions(self) -> list[Any]:
        """Per example its "label", "score" and "probabilities", "labels" and "probabilities", or "value"."""
        return [_answer(logits, self._task) for logits in self._logits]


def _answer(logits: Tensor, task: TaskLike) -> dict[str, Any]:
    if task.problem_type == "regression":
        return {"value": float(logits[0])}
    if task.problem_type == "multi_label":
        probabilities = dict(zip(task.labels, logits.sigmoid().tolist(), strict=True))
        return {"labels": [name for name, p in probabilities.items() if p > 0.5], "probabilities": probabilities}
    probabilities = dict(zip(task.labels, logits.softmax(-1).tolist(), strict=True))
    label = max(probabilities, key=probabilities.__getitem__)
    return {"label": label, "score": probabilities[label], "probabilities": probabilities}


def configure_classes(config: Any, task: TaskLike, auto_class: str) -> None:
    """Name the classes of a new head after a task's; a head that has names keeps them, and they must be the task's.

    Raises:
        ConfigError: If the head has other classes.
    """
    count = len(task.labels)
    shown = f"{', '.join(task.labels[:5])}{' ...' if count > 5 else ''}"
    if config.num_labels != count:
        raise ConfigError(
            f"finetune: the head has {config.num_labels} classes, the task has {count} ({shown}); both must be the "
            f"same. Load the model with {auto_class}.from_pretrained(..., num_labels={count})."
        )
    names = [str(config.id2label[number]) for number in range(count)]
    if names == [f"LABEL_{number}" for number in range(count)]:
        config.id2label = dict(enumerate(task.labels))
        config.label2id = {name: number for number, name in enumerate(task.labels)}
    elif [name.lower() for name in names] != [name.lower() for name in task.labels]:
        raise ConfigError(
            f"finetune: the classes of the head are {', '.join(names[:5])}, those of the task {shown}; they must "
            "agree, in this order. Give the task labels=[...], or the model other names: model.config.id2label = "
            "dict(enumerate(task.labels))."
        )


def logits_problem(outputs: Any, task: TaskLike, axes: int) -> str | None:
    """What is wrong with the logits of a model for classes; None if nothing is."""
    shape = list(outputs.logits.shape)
    return None if len(shape) == axes and shape[-1] == len(task.labels) else f"it gives logits of the shape {shape}"


def checked_texts(raw: Sequence[Any], *, pairs: bool) -> Sequence[Any]:
    """What a user hands to `predict`, as texts or pairs of texts.

    Raises:
        ConfigError: If it is one text, or an entry is no text (or pair, where the first is one).
    """
    if isinstance(raw, str):
        raise ConfigError("predict: got one text; a list of texts is needed.")
    single = len(raw) == 0 or isinstance(raw[0], str)
    if not single and not pairs:
        raise ConfigError("predict: single texts are read here, and pairs were given.")
    for row, text in enumerate(raw):
        parts = [text] if single else text if isinstance(text, tuple | list) and len(text) == 2 else [None]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(
                f"predict: entry {row} is {type(text).__name__}; all must be texts, or all pairs of texts."
            )
    return raw if single else [tuple(text) for text in raw]
