"""Rows of tokens to padded batches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

_SORTED_BATCHES = 50


def tokenizer_of(processor: PreTrainedTokenizerBase | ProcessorMixin) -> Any:
    """The tokenizer that a processor holds, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def pad(rows: Sequence[Sequence[int]], value: int) -> Int[Tensor, "batch tokens"]:
    """Rows of unequal length as one tensor, filled with `value` on the right."""
    longest = max((len(row) for row in rows), default=0)
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], dtype=torch.long)


def padding_of(processor: PreTrainedTokenizerBase | ProcessorMixin) -> dict[str, int]:
    """What each key of a batch is padded with.

    Batches are padded to their longest row on the right, whatever side the tokenizer pads for generation, so that
    every token keeps the position it has in a batch of its own, and with it its states. A tokenizer without a padding
    token (GPT-2) gets its end token, or 0, there; the mask hides it either way.
    """
    tokenizer = tokenizer_of(processor)
    tokens = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return {
        "input_ids": next(token for token in tokens if token is not None),
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
    }


def length_batches(lengths: Sequence[int], batch_size: int, *, seed: int | None = None) -> list[list[int]]:
    """Rows in batches of like length, so that little is padded.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows per batch; the last one of all may have fewer.
        seed: For training: rows shuffled, sorted within chunks of 50 batches, batches shuffled. None, for
            evaluation: longest first, so that memory runs out at once or never.

    Returns:
        Row numbers; every row is in one batch.

    Raises:
        ConfigError: If `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ConfigError(f"length_batches: batch_size is {batch_size}; it must be at least 1.")
    lengths = [int(length) for length in lengths]
    rows = list(range(len(lengths)))
    if seed is None:
        rows.sort(key=lambda row: -lengths[row])
        return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    rng = random.Random(seed)
    rng.shuffle(rows)
    chunk = batch_size * _SORTED_BATCHES
    batches: list[list[int]] = []
    for start in range(0, len(rows), chunk):
        some = sorted(rows[start : start + chunk], key=lambda row: -lengths[row])
        batches += [some[i : i + batch_size] for i in range(0, len(some), batch_size)]
    rng.shuffle(batches)
    return batches
