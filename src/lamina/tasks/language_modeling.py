"""Common parts of masked and causal language modelling: blocks or rows of text, token scores, most probable tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, final

import torch
from torch import Tensor

from lamina.data.encode import Encoded, Windows, blocks
from lamina.data.read import Table
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError
from lamina.heads.base import TaskLike
from lamina.layers.types import tokenizer_of
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, Kind
from lamina.tasks.class_results import first_invalid_row
from lamina.tasks.metrics import named_scores
from lamina.tasks.outputs import Results
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedConfig

    from lamina.layers.types import Processor

CANDIDATES = 5  # tokens that a prediction lists
_MOST_SCORES = 1 << 27  # scores of a whole vocabulary in one batch: 512 MB
_MOST_EXPONENT = 700.0  # the largest exponent whose exponential is a finite number


class Candidate(TypedDict):
    """A candidate `token` for one position, as text; `score` is its probability."""

    token: str
    score: float


class LanguageModelingKind(Kind[Windows]):
    """Base class of masked and causal language modelling, whose labels are the tokens of the texts themselves.

    A subclass implements `encode`, and `answers` for predictions.
    """

    problem_types = {"classification": ("perplexity", "accuracy")}
    has_classes = False
    sequential = True
    other_files = "lines"

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Return the texts of every split, without labels and line ends; blank texts are left out.

        The default column is "sentence", or "text" if no table has a column "sentence". Raises DataError if a column is
        missing, or a cell is not a text; ConfigError if the user passed labels. See `Kind.build` for arguments and
        result.
        """
        spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "text", tables))
        spec = lab.without_classes(spec, ("token",), "classification", "the texts' own tokens")
        return spec, {
            name: Split.of(text.rstrip("\r\n") for text in lab.texts(table, spec.text) if text.strip())
            for name, table in tables.items()
        }

    def truncated(self, inputs: Windows) -> int:
        """Return the number of texts that were truncated; 0 for blocks."""
        return inputs.encoded.truncated

    def model_rows(
        self, rows: int, tokens: float, max_length: int, config: PreTrainedConfig | None, *, by_row: bool = False
    ) -> tuple[int, int]:
        """Estimate the number of blocks and their length; see `Kind.model_rows`. With `by_row`, a row is a block."""
        if by_row:
            return super().model_rows(rows, tokens, max_length, config)
        total = math.ceil(rows * tokens)
        return math.ceil(total / max_length), min(max_length, total)

    def batch_size(self, asked: int, inputs: Windows, outputs: int) -> int:
        """Return a batch size for scoring: at least 1, at most `asked`, and so that the logits take at most 512 MB.

        `outputs` is the number of logits per token.
        """
        return max(1, min(asked, _MOST_SCORES // max(1, int(max(inputs.lengths, default=1)) * outputs)))

    def results(self, task: TaskLike, split: Split, inputs: Windows) -> Results:
        """Return a new `TokenSums`, which scores the tokens that have a label; the arguments are not used."""
        return TokenSums()


def encode_running(split: Split, processor: Processor, options: EncodeOptions) -> Encoded:
    """Tokenise the texts of a split with `blocks`, or (`options.by_row`) each text or pair alone with `encode`."""
    if options.by_row:
        return options.encode_texts(split.texts, processor)
    space = options.add_prefix_space
    return blocks(split.texts, processor, max_length=options.max_length, add_prefix_space=space)


def best_tokens(logits: Float[Tensor, "... classes"]) -> Float[Tensor, "... best 2"]:
    """Return the five most probable tokens as `[..., 5, 2]`: pairs of id and probability, the most probable first.

    Both are floats. If the vocabulary has fewer than five tokens, all of them are returned.
    """
    probabilities, ids = logits.float().softmax(-1).topk(min(CANDIDATES, logits.shape[-1]))
    return torch.stack([ids.to(probabilities.dtype), probabilities], dim=-1)


def has_nan(best: Sequence[Sequence[float]]) -> bool:
    """Return whether a probability in `best` is NaN; `best` is a result of `best_tokens` as a list."""
    return any(math.isnan(score) for _, score in best)


def candidates(best: Sequence[Sequence[float]], processor: Processor, *, strip: bool = True) -> list[Candidate]:
    """Return the pairs of id and probability in `best`, from `best_tokens`, as texts with their probabilities.

    `strip` removes white space around them.
    """
    tokenizer = tokenizer_of(processor)
    texts: list[str] = [tokenizer.decode([int(number)]) for number, _ in best]
    return [
        {"token": text.strip() if strip else text, "score": score} for text, (_, score) in zip(texts, best, strict=True)
    ]


@final
class TokenSums(Results[Tensor, None]):
    """Sums up the loss and the correct tokens over batches, for perplexity and accuracy. Logits are not stored."""

    def __init__(self) -> None:
        self._loss, self._correct, self._count = 0.0, 0, 0
        self._invalid_row: int | None = None

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Add the tokens of a batch that have a label to the sums.

        Args:
            rows: Indices of the rows in the batch.
            outputs: Logits of all tokens `[batch, tokens, vocabulary]`, or of those with a label `[labelled tokens,
                vocabulary]`.
            labels: Token ids `[batch, tokens]`; -100 if a token has no label.

        Raises:
            ConfigError: If `labels` is None.
        """
        if labels is None:
            raise ConfigError(f"metrics: no labels for {len(rows)} rows; tokens cannot be scored without labels.")
        labels = labels.to(outputs.device)
        has_label = labels != IGNORED
        logits, labels = outputs if outputs.ndim == 2 else outputs[has_label], labels[has_label]
        loss = float(torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum"))
        if self._invalid_row is None and not math.isfinite(loss) and (token := first_invalid_row(logits)) is not None:
            self._invalid_row = int(rows[int(has_label.nonzero()[token, 0])])
        self._loss += loss
        self._correct += int((logits.argmax(-1) == labels).sum())
        self._count += len(labels)

    def first_not_finite(self) -> int | None:
        """Return the index of the first row with invalid logits (`first_invalid_row`) at a labelled token, or None."""
        return self._invalid_row

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        """Return "accuracy" and "perplexity", as `metrics` names them.

        The perplexity is exp(mean loss per token), at most exp(700), also for a NaN loss.

        Raises:
            DataError: If no token has a label.
            UnknownNameError: If `metrics` has another name.
        """
        if not self._count:
            raise DataError("metrics: no token has a label; a score needs at least one.")
        mean = self._loss / self._count
        perplexity = math.exp(mean if mean < _MOST_EXPONENT else _MOST_EXPONENT)  # NaN becomes the largest number too
        known = {"perplexity": lambda: perplexity, "accuracy": lambda: self._correct / self._count}
        return named_scores(metrics, known)
