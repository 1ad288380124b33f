"""Texts as inputs, class labels as targets, and the collection of logits: what several kinds of task share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch

from lamina.data.batches import pad, padding_of, tokenizer_of
from lamina.data.encode import encode
from lamina.data.windows import IGNORED, word_tokens
from lamina.errors import ConfigError
from lamina.tasks import metrics as score
from lamina.tasks.base import Kind, Results

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        given: dict[str, Any] = {name: getattr(options, name) for name in ("max_length", "stride", "windows")}
        return cls(encode(split.texts, processor, offsets=options.windows, **given), processor)

    @property
    def uncacheable(self) -> str | None:
        """Only texts with an attention mask are cached."""
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
        came = "no processor was given" if processor is None else f"the processor is a {type(processor).__name__}"
        hint = "Give the one that AutoTokenizer.from_pretrained finds for the model."
        raise ConfigError(f"task: {came}; texts are read by a tokenizer. {hint}")


@final
@dataclass(frozen=True)
class RowTargets:
    """A label for every row, or (`per_token`) a list with one for each of its tokens; a `Targets`."""

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


def word_places(encoded: Encoded, words: Sequence[Any]) -> Iterator[tuple[int, int, int, int]]:
    """Window and position of the token that stands for a word, its text and its number there; for all that have one."""
    for text, places in enumerate(word_tokens(encoded, words)):
        for number, place in enumerate(places):
            if place is not None:
                yield *place, text, number


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
        problem, labels = self._task.problem_type, self._task.labels
        if problem == "regression":
            return []
        guesses, targets = self._logits > 0, torch.from_numpy(label_array(self._split))
        if problem == "classification":
            guesses, targets = (score.one_hot(ids, labels) for ids in (self._logits.argmax(-1), targets))
        return score.class_table(guesses, targets, labels)

    def predictions(self) -> list[Any]:
        """Per example its "label", "score" and "probabilities", "labels" and "probabilities", or "value"."""
        return [_answer(logits, self._task) for logits in self._logits]


def _answer(logits: Tensor, task: TaskLike) -> dict[str, Any]:
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
    """What kinds share whose models give one score per label: of an example, or of every token.

    Attributes:
        logits_axes: Of the logits: 2 for `[batch, classes]`, 3 for `[batch, tokens, classes]`.
    """

    logits_axes: ClassVar[int] = 2

    def configure(self, config: Any, task: TaskLike) -> None:
        """Name the classes of a new head after a task's; a head that has names keeps them: they must be the task's."""
        count = len(task.labels)
        shown = f"{', '.join(task.labels[:5])}{' ...' if count > 5 else ''}"
        if config.num_labels != count:
            raise ConfigError(
                f"finetune: the head has {config.num_labels} classes, the task has {count} ({shown}); both must be the "
                f"same. Load the model with {self.auto_class}.from_pretrained(..., num_labels={count})."
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

    def output_problem(self, outputs: Any, task: TaskLike) -> str | None:
        """Logits that are not one per label."""
        shape = list(outputs.logits.shape)
        fits = len(shape) == self.logits_axes and shape[-1] == len(task.labels)
        return None if fits else f"it gives logits of the shape {shape}"


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
            came = f"entry {row} is {type(text).__name__}"
            raise ConfigError(f"predict: {came}; all must be texts, or all pairs of texts.")
    return raw if single else [tuple(text) for text in raw]
