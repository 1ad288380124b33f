"""The kind of task that asks for hidden tokens of running text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isnan
from typing import TYPE_CHECKING, Any, final

import regex
import torch
from torch import Tensor

from lamina.data.batches import pad, padding_of, tokenizer_of
from lamina.data.encode import blocks, encode
from lamina.data.read import Table
from lamina.data.windows import IGNORED, word_places
from lamina.errors import ConfigError
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, Kind, Results, TaskLike, checked_texts
from lamina.tasks.inputs import TextInputs, Windows, check_tokenizer
from lamina.tasks.metrics import TokenSums
from lamina.tasks.split import Split
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from jaxtyping import Float

SHARE = 0.15  # of the tokens that are no special ones
REPLACED, RANDOM = 0.8, 0.1  # of the chosen tokens: by the mask token, by any token; the rest stay as they are
CANDIDATES = 5  # for a mask token
_MOST_SCORES = 1 << 27  # of tokens at once, when every entry of a vocabulary is scored: 512 MB


def mask_token(processor: Any) -> str:
    """The text of the tokenizer's mask token; without one a ConfigError."""
    token = tokenizer_of(processor).mask_token
    if token is None:
        hint = "Use a model that was trained with it, such as BERT or RoBERTa."
        raise ConfigError(f"masked_lm: the tokenizer has no mask token; masked language modelling needs one. {hint}")
    return token


@dataclass(frozen=True)
class Masking:
    """How tokens are hidden: of each row 15 % of the tokens that are no special ones, and one at least, are chosen.

    Of these 80 % become the mask token, 10 % any token of the vocabulary, and 10 % stay. What is chosen depends on the
    row and the seed alone, never on the batch. Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1, appendix A.1.
    """

    token: int  # id of the mask token
    special: frozenset[int]  # ids that are never chosen
    vocabulary: int  # count of tokens

    @classmethod
    def of(cls, processor: Any) -> Masking:
        """For a tokenizer, or a processor that holds one."""
        mask_token(processor)
        tokenizer = tokenizer_of(processor)
        return cls(int(tokenizer.mask_token_id), frozenset(tokenizer.all_special_ids), len(tokenizer))

    def hide(self, ids: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
        """The row to read with some tokens hidden, and its labels: the tokens that were, and -100 everywhere else."""
        rng = random.Random(seed)
        ordinary = [at for at, token in enumerate(ids) if token not in self.special]
        count = max(1, round(SHARE * len(ordinary))) if ordinary else 0
        read, labels = list(ids), [IGNORED] * len(ids)
        for at in rng.sample(ordinary, count):
            labels[at] = read[at]
            draw = rng.random()
            if draw < REPLACED:
                read[at] = self.token
            elif draw < REPLACED + RANDOM:
                read[at] = rng.randrange(self.vocabulary)
        return read, labels


@final
@dataclass(frozen=True)
class MaskedInputs(Windows):
    """Blocks of running text, or rows by themselves, with some tokens hidden; an `Inputs`."""

    masking: Masking
    seed: int | None  # of the train part, where what is hidden depends on it and the epoch; else on the row alone
    part: str

    uncacheable = "the texts are masked anew in each epoch"

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some blocks or rows with hidden tokens; "labels" holds those, and -100 elsewhere."""
        when = () if self.seed is None else (self.seed, epoch)
        batch = self.encoded.batch(rows, padding_of(self.processor))
        lengths = self.encoded.lengths[list(rows)]
        hidden = [
            self.masking.hide(ids[:length].tolist(), derive_seed("mask", self.part, *when, row))
            for ids, length, row in zip(batch["input_ids"], lengths, rows, strict=True)
        ]
        read, labels = zip(*hidden, strict=True)
        batch["input_ids"] = pad(read, padding_of(self.processor)["input_ids"])
        return {**batch, "labels": pad(labels, IGNORED)}


@final
class MaskedLMKind(Kind):
    """Hidden tokens of running text; to predict, the mask tokens that stand in a text are filled in."""

    name = "masked_lm"
    problem_types = {"classification": ("perplexity", "accuracy")}
    auto_class = "AutoModelForMaskedLM"
    base_class = "AutoModelForMaskedLM"
    inputs = "masked_text"
    per_token = True
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

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> MaskedInputs | TextInputs:
        """Blocks of the joined texts, or texts and pairs by themselves; to predict, windows of each text."""
        if options.part == "predict":
            return TextInputs.of(split, processor, replace(options, windows=True))
        check_tokenizer(processor)
        masking, seed = Masking.of(processor), options.seed if options.part == "train" else None
        how: dict[str, Any] = {"max_length": options.max_length, "add_prefix_space": options.add_prefix_space}
        if options.by_row:
            encoded = encode(split.texts, processor, offsets=False, **how)
        else:
            encoded = blocks(split.texts, processor, **how)
        return MaskedInputs(encoded, processor, masking, seed, options.part)

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
        """Sums over the hidden tokens."""
        return TokenSums()

    def examples(self, raw: Sequence[Any], processor: Any) -> Split:
        """Texts with mask tokens, such as "[MASK]"."""
        texts, token = checked_texts(raw, pairs=False), regex.escape(mask_token(processor))
        return Split.of(texts, words=[[match.span() for match in regex.finditer(token, text)] for text in texts])

    def answers(self, task: TaskLike, split: Split, inputs: Any, processor: Any) -> Results:
        """Per mask token its "start" and "end", and "candidates" with "token" and "score", best first."""
        return _FilledMasks(split, inputs, processor)


def best_tokens(logits: Float[Tensor, "... classes"]) -> Float[Tensor, "... best 2"]:
    """The five likeliest entries of the vocabulary (all, if it is smaller), best first: number and probability."""
    probabilities, ids = logits.float().softmax(-1).topk(min(CANDIDATES, logits.shape[-1]))
    return torch.stack([ids.to(probabilities.dtype), probabilities], dim=-1)


def _has_nan(best: list[list[float]]) -> bool:
    return any(isnan(score) for _, score in best)


class _FilledMasks(Results):
    """What may stand at the mask tokens of texts."""

    def __init__(self, split: Split, inputs: TextInputs, processor: Any) -> None:
        self._tokenizer, self._masks = tokenizer_of(processor), list(split.words or ())
        self._best: list[list[list[float]]] = [[] for masks in self._masks for _ in masks]
        self._places = word_places(inputs.encoded, self._masks)

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        for at, row in enumerate(rows):
            for position, number in self._places[row]:
                self._best[number] = best_tokens(outputs[at, position]).tolist()

    def first_not_finite(self) -> int | None:
        texts = (text for text, masks in enumerate(self._masks) for _ in masks)
        return next((text for text, best in zip(texts, self._best, strict=True) if _has_nan(best)), None)

    def predictions(self) -> list[Any]:
        best = iter(self._best)
        return [[self._to_prediction(span, next(best)) for span in masks] for masks in self._masks]

    def _to_prediction(self, mask: tuple[int, int], best: list[list[float]]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([int(number)]).strip() for number, _ in best]
        candidates = [{"token": text, "score": score} for text, (_, score) in zip(texts, best, strict=True)]
        return {"start": mask[0], "end": mask[1], "candidates": candidates}
