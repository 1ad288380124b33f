"""Texts that become others, as rows that batches for sequence-to-sequence models are made of."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from lamina.data.batches import collate, tokenizer_of
from lamina.data.encode import encode
from lamina.data.windows import IGNORED
from lamina.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from jaxtyping import Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from lamina.tasks.split import Split

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Pairs:
    """Tokenised sources and targets.

    Attributes:
        features: Per row "input_ids" and "attention_mask" of the source, and "labels", the target's tokens.
        processor: The tokenizer, or a processor that holds one; it says what sources are padded with.
        truncated: How many sources lost their end.
        truncated_targets: How many targets did.
    """

    features: Sequence[Mapping[str, Sequence[int]]]
    processor: Any
    truncated: int
    truncated_targets: int

    @classmethod
    def of(
        cls,
        split: Split,
        processor: PreTrainedTokenizerBase | ProcessorMixin,
        *,
        prefix: str = "",
        max_length: int,
        max_target_length: int,
    ) -> Self:
        """Tokenise a part of a task whose texts become others.

        Args:
            split: Sources, with the targets for labels.
            processor: The tokenizer, or a processor that holds one. It is left as it was. One that knows languages
                reads its source language and writes its target language; where that one is not set, the first.
            prefix: Put before each source, as T5 reads "summarize: " before what it is to summarise.
            max_length: Tokens of a source, prefix and special ones included.
            max_target_length: Tokens of a target, special ones included.

        Raises:
            DataError: If a label is no text.
            ConfigError: If a length leaves no room beside the special tokens.
        """
        targets = [_text(row, label) for row, label in enumerate(split.labels)]
        read = encode([prefix + text for text in split.texts], processor, max_length=max_length, offsets=False)
        written = encode(targets, _Writer.of(processor), max_length=max_target_length, offsets=False)
        features = [
            {**{key: source[key] for key in ("input_ids", "attention_mask")}, "labels": target["input_ids"]}
            for source, target in zip(read.features, written.features, strict=True)
        ]
        return cls(features, processor, read.truncated, written.truncated)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each source."""
        return [len(row["input_ids"]) for row in self.features]

    def __len__(self) -> int:
        return len(self.features)

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:  # noqa: ARG002
        """What a model is called with.

        The model itself makes the inputs of its decoder from the labels, by shifting them.

        Args:
            rows: Which, at least one.
            epoch: Without effect: texts are the same in every epoch.

        Returns:
            "input_ids", "attention_mask" and "labels", each `[batch, tokens]`, padded on the right; labels with -100.
        """
        return collate([self.features[row] for row in rows], self.processor)


def _text(row: int, label: object) -> str:
    if not isinstance(label, str):
        raise DataError(
            f"generation: row {row} has {label} for its target; texts are written. Use a task of kind summarization or "
            "translation.",
            row=row,
        )
    return label


class _Writer:
    """A tokenizer that reads every text as a target, with the language and the vocabulary of one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, processor: Any) -> Any:
        tokenizer = tokenizer_of(processor)
        if getattr(tokenizer, "tgt_lang", "") is None:
            logger.warning(
                "generation: the tokenizer's tgt_lang is not set; targets are taken to be in %s", tokenizer.src_lang
            )
        return cls(tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        tokenizer = self._tokenizer
        if getattr(tokenizer, "tgt_lang", "") is not None:
            return tokenizer(text_target=texts, **options)
        tokenizer.tgt_lang = tokenizer.src_lang
        try:
            return tokenizer(text_target=texts, **options)
        finally:
            tokenizer.tgt_lang = None


def texts_of(ids: Int[Tensor, "batch tokens"], processor: PreTrainedTokenizerBase | ProcessorMixin) -> list[str]:
    """Texts from tokens, those that were written or those of labels.

    Args:
        ids: Tokens; -100 counts as padding.
        processor: The tokenizer, or a processor that holds one.

    Returns:
        A text per row, without special tokens and without blanks around it.
    """
    tokenizer = tokenizer_of(processor)
    rows = [[token for token in row if token != IGNORED] for row in ids.tolist()]
    return [text.strip() for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]
