"""What a causal model writes, and how far two continuations of a prompt are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.data.encode import length_limit
from lamina.errors import DataError
from lamina.layers.preserve import evaluating
from lamina.studies.passes import text_inputs
from lamina.studies.vectors import own_tokens
from lamina.utils import check_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOGETHER = 32  # prompts of one length that are continued in one call


def prompt_ids(
    model: PreTrainedModel, texts: Iterable[Any], processor: Any, *, tokens: int | None, op: str
) -> list[Tensor]:
    """Token ids `[tokens]` of prompts, up to `tokens` of each text, without special ones behind; none of no token.

    Raises:
        DataError: If no text has a token.
    """
    limit = length_limit(model, processor)
    inputs = text_inputs(model, texts, processor, limit if tokens is None else min(tokens, limit), op=op)
    prompts: list[Tensor] = []
    for row in range(len(inputs.lengths)):
        ids = inputs.batch([row])["input_ids"]
        places = own_tokens(ids, processor)[0].nonzero().flatten().tolist()
        if places:
            prompts.append(ids[0, : places[-1] + 1])
    if not prompts:
        raise DataError(f"{op}: no prompt has a token to go on from; give texts with words.")
    return prompts


def continuations(
    model: PreTrainedModel, prompts: Sequence[Tensor], processor: Any, *, new_tokens: int, op: str
) -> list[list[int]]:
    """The most likely next tokens, one by one, up to `new_tokens` or an end token, which is among them.

    Prompts are never padded: those of one length are continued together.

    Raises:
        ConfigError: If a prompt and its continuation are longer than the model reads.
    """
    longest = max(map(len, prompts))
    check_range(op, "new_tokens", new_tokens, 1, length_limit(model, processor) - longest)
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    end_tokens = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    search: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    search["pad_token_id"] = min(end_tokens, default=0)  # behind an end token, where nobody looks
    said: dict[int, list[int]] = {}
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    while rows:
        length = len(prompts[rows[0]])
        group = [row for row in rows[:_TOGETHER] if len(prompts[row]) == length]
        rows = rows[len(group) :]
        ids = torch.stack([prompts[row] for row in group]).to(model.device)
        with torch.no_grad(), evaluating(model):
            written: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **search)  # pyright: ignore
        for row, tokens in zip(group, written[:, length:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(tokens) if token in end_tokens), len(tokens))
            said[row] = tokens[:end]
    return [said[row] for row in range(len(prompts))]


def same_share(own: Sequence[int], other: Sequence[int]) -> float:
    """The share of a continuation's tokens, from its first on, that another has too before the two first differ."""
    equal = next((place for place, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(own), len(other)) if equal is None else equal) / len(own)
