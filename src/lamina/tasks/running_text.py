"""What the kinds of task share that learn from running text: its blocks or rows, and scores of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.data.batches import tokenizer_of
from lamina.data.encode import blocks, encode
from lamina.data.read import Table
from lamina.data.windows import Encoded
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, Kind, Results, TaskLike
from lamina.tasks.metrics import TokenSums
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from jaxtyping import Float

CANDIDATES = 5  # for a token that is asked for
_MOST_SCORES = 1 << 27  # of tokens at once, when every entry of a vocabulary is scored: 512 MB


class RunningTextKind(Kind):
    """A kind whose labels are the texts' own tokens."""

    problem_types = {"classification": ("perplexity", "accuracy")}
    has_classes = False
    sequential = True
    other_files = "lines"

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """The texts as they are, without their line ends; blank ones are left out."""
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        spec = lab.without_classes(spec, ("token",), "classification", "the texts' own tokens")
        return spec, {
            name: Split.of(text.rstrip("\r\n") for text in lab.texts(table, spec.text) if text.strip())
            for name, table in tables.items()
        }

    def truncated(self, inputs: Any) -> int:
        """Rows that lost their end; blocks lose nothing."""
        return inputs.encoded.truncated

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: Any, *, by_row: bool = False
    ) -> tuple[int, int]:
        """Blocks of the joined texts, or the rows themselves."""
        if by_row:
            return super().model_rows(rows, tokens, max_length, config)
        total = ceil(rows * tokens)
        return ceil(total / max_length), min(max_length, total)

    def batch_size(self, asked: int, inputs: Any, outputs: int) -> int:
        """Few enough rows for scores of the whole vocabulary to fit."""
        return max(1, min(asked, _MOST_SCORES // max(1, int(max(inputs.lengths, default=1)) * outputs)))

    def results(self, task: TaskLike, split: Split, inputs: Any) -> Results:
        """Sums over the tokens that are asked for."""
        return TokenSums()


def encode_running(split: Split, processor: Any, options: EncodeOptions) -> Encoded:
    """Blocks of the joined texts, or texts and pairs by themselves."""
    how: dict[str, Any] = {"max_length": options.max_length, "add_prefix_space": options.add_prefix_space}
    if options.by_row:
        return encode(split.texts, processor, offsets=False, **how)
    return blocks(split.texts, processor, **how)


def best_tokens(logits: Float[Tensor, "... classes"]) -> Float[Tensor, "... best 2"]:
    """The five likeliest entries of the vocabulary (all, if it is smaller), best first: number and probability."""
    probabilities, ids = logits.float().softmax(-1).topk(min(CANDIDATES, logits.shape[-1]))
    return torch.stack([ids.to(probabilities.dtype), probabilities], dim=-1)


def has_nan(best: list[list[float]]) -> bool:
    """Whether tokens of `best_tokens` have no probabilities."""
    return any(isnan(score) for _, score in best)


def candidates(best: Sequence[Sequence[float]], processor: Any, *, strip: bool = True) -> list[dict[str, Any]]:
    """Tokens of `best_tokens` as "token", a text, and "score"; `strip`: without blanks around it."""
    texts = [tokenizer_of(processor).decode([int(number)]) for number, _ in best]
    return [
        {"token": text.strip() if strip else text, "score": score} for text, (_, score) in zip(texts, best, strict=True)
    ]
