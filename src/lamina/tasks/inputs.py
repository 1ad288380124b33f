"""Texts as windows of tokens, and labels as tensors: what several kinds of task share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from lamina.data.arrow import Ragged, chunks, dataset_of
from lamina.data.batches import pad, padding_of
from lamina.data.encode import encode
from lamina.data.windows import IGNORED, Encoded
from lamina.errors import ConfigError
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from lamina.layers.types import Processor

Array: TypeAlias = npt.NDArray[np.generic]
_CACHED = {"input_ids", "attention_mask", "token_type_ids"}


@dataclass(frozen=True)
class Windows:
    """Tokens as rows that a model reads; the base class of all inputs of text kinds.

    Attributes:
        encoded: Windows of texts, or blocks of joined texts.
        processor: The tokenizer, or a processor that contains one; it determines the padding values.
    """

    encoded: Encoded
    processor: Processor

    @property
    def lengths(self) -> Any:  # an array, which pyright does not take for the sequence of int that `Inputs` has
        """Tokens of each row, as an array of int64."""
        return self.encoded.lengths

    @property
    def uncacheable(self) -> str | None:
        """Why a model's states for these rows cannot be cached, in words; None if they can be."""
        return None

    @property
    def digest(self) -> str:
        """A hash that is equal for equal tokens in equal rows."""
        return self.encoded.digest

    @property
    def padding(self) -> dict[str, int]:
        """Argument of the model -> value with which it is padded."""
        return padding_of(self.processor)

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the tokens of the rows with these indices, padded on the right, `[batch, tokens]`."""
        return self.encoded.batch(rows, self.padding)


@dataclass(frozen=True)
class CacheableWindows(Windows):
    """Tokens that are the same in every epoch, so that a model's states for them can be cached."""

    @property
    def uncacheable(self) -> str | None:
        """Why states cannot be cached, in words (no attention mask, or another argument); None if they can be."""
        keys = set(self.encoded.keys)
        if "attention_mask" in keys and keys <= _CACHED:
            return None
        return f"the inputs are {', '.join(self.encoded.keys)}; only texts with an attention mask are cached"


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


def check_tokenizer(processor: object) -> Processor:
    """Return the processor if it is, or has, a tokenizer; otherwise raise ConfigError."""
    from transformers import PreTrainedTokenizerBase

    tokenizer = getattr(processor, "tokenizer", processor)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        got = "no processor was given" if processor is None else f"the processor is a {type(processor).__name__}"
        hint = "Give the one that AutoTokenizer.from_pretrained finds for the model."
        raise ConfigError(f"task: {got}; texts need a tokenizer. {hint}")
    return cast("Processor", processor)


@final
@dataclass(frozen=True)
class RowTargets:
    """One label per row of the inputs, `[rows]`, or 0 and 1 per class, `[rows, classes]`; a `Targets`."""

    values: Array

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """Return the labels of the rows with these indices."""
        return torch.from_numpy(self.values[[int(row) for row in rows]])


@final
class WordTargets:
    """A label for every token of every row, -100 for none, stored in Arrow; a `Targets`.

    The argument `labels` yields the labels of one row after the other.
    """

    def __init__(self, labels: Iterable[Sequence[int]]) -> None:
        tables = (pa.table({"label": pa.array(part, pa.list_(pa.int32()))}) for part in chunks(labels))
        self._rows = dataset_of(tables)  # keeps the temporary file of a large column from being removed
        self._labels = Ragged(self._rows.data.column("label"))

    def tensor(self, rows: Sequence[int]) -> Tensor:
        """Return the labels of the rows with these indices, padded with -100, int64 `[batch, tokens]`."""
        return pad([self._labels[row] for row in rows], IGNORED)


def first_window_targets(split: Split, encoded: Encoded) -> RowTargets:
    """Return the label of each text for the text's first window; further windows have NaN, -1 or -100 instead."""
    labels = label_array(split)
    values = labels[encoded.text]
    values[encoded.window > 0] = math.nan if values.dtype == np.float32 else -1 if values.ndim > 1 else IGNORED
    return RowTargets(values)


def label_array(split: Split) -> Array:
    """Return the labels of a split as an array `[rows, ...]`: int64 class ids or 0 and 1, or float32 numbers."""
    labels = np.asarray(list(split.labels))
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64)
