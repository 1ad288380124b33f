"""Greedy continuations of prompts, and how much of one continuation another one repeats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lamina.data.encode import length_limit
from lamina.errors import DataError
from lamina.layers.preserve import evaluating
from lamina.studies.passes import text_inputs
from lamina.studies.states.vectors import is_text_token
from lamina.utils import check_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.studies.passes import Text

_TOGETHER = 32  # maximum number of prompts of one length that are continued in one call


def prompt_ids(
    model: PreTrainedModel, texts: Iterable[Text], processor: Processor, *, tokens: int | None, op: str
) -> list[Tensor]:
    """Return the token ids `[tokens]` of each prompt, without special tokens at the end.

    Texts longer than `tokens` (None: what the model allows) are truncated; texts without a token are left out. Raises
    DataError if no text has a token, and the errors of `text_inputs`. Messages begin with `op`, the study's name.
    """
    limit = length_limit(model, processor)
    inputs = text_inputs(model, texts, processor, limit if tokens is None else min(tokens, limit), op=op)
    prompts: list[Tensor] = []
    for row in range(len(inputs.lengths)):
        ids = inputs.batch([row])["input_ids"]
        positions = is_text_token(ids, processor)[0].nonzero().flatten().tolist()
        if positions:
            prompts.append(ids[0, : positions[-1] + 1])
    if not prompts:
        raise DataError(f"{op}: no prompt has a token to continue; pass texts with words.")
    return prompts


def continuations(
    model: PreTrainedModel, prompts: Sequence[Tensor], processor: Processor, *, new_tokens: int, op: str
) -> list[list[int]]:
    """Continue each prompt (token ids `[tokens]`) by greedy decoding, and return the generated token ids of each.

    Generation stops after `new_tokens` tokens, or after an end token, which is part of the result. Prompts of the same
    length are continued together, so that no prompt is padded. Raises ConfigError, whose message begins with `op`, if
    `new_tokens` is below 1, or the longest prompt plus `new_tokens` is longer than what the model allows.
    """
    longest = max(map(len, prompts))
    check_range(op, "new_tokens", new_tokens, 1, length_limit(model, processor) - longest)
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    end_tokens = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    # a finished continuation is padded up to the longest of its batch; what comes after an end token is cut off below
    options = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    options["pad_token_id"] = min(end_tokens, default=0)
    generated: dict[int, list[int]] = {}
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    while rows:
        length = len(prompts[rows[0]])
        group = [row for row in rows[:_TOGETHER] if len(prompts[row]) == length]
        rows = rows[len(group) :]
        ids = torch.stack([prompts[row] for row in group]).to(model.device)
        with torch.no_grad(), evaluating(model):
            texts = cast("Tensor", model.generate(ids, attention_mask=torch.ones_like(ids), **options))  # pyright: ignore
        for row, tokens in zip(group, texts[:, length:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(tokens) if token in end_tokens), len(tokens))
            generated[row] = tokens[:end]
    return [generated[row] for row in range(len(prompts))]


def same_share(whole: Sequence[int], other: Sequence[int]) -> float:
    """Return the share (0 to 1) of the tokens of `whole` (not empty) before its first difference from `other`."""
    pairs = enumerate(zip(whole, other, strict=False))
    equal = next((place for place, (token, other_token) in pairs if token != other_token), None)
    return (min(len(whole), len(other)) if equal is None else equal) / len(whole)
