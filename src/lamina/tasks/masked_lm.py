"""The kind of task that asks for hidden tokens of running text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import regex
from torch import Tensor

from lamina.data.batches import pad, padding_of, tokenizer_of
from lamina.data.windows import IGNORED, word_places
from lamina.errors import ConfigError
from lamina.tasks.base import EncodeOptions, Results, TaskLike, checked_texts
from lamina.tasks.inputs import TextInputs, Windows, check_tokenizer
from lamina.tasks.running_text import RunningTextKind, best_tokens, candidates, encode_running, has_nan
from lamina.tasks.split import Split
from lamina.utils import derive_seed

SHARE = 0.15  # of the tokens that are no special ones
REPLACED, RANDOM = 0.8, 0.1  # of the chosen tokens: by the mask token, by any token; the rest stay as they are


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
class MaskedLMKind(RunningTextKind):
    """Hidden tokens of running text; to predict, the mask tokens that stand in a text are filled in."""

    name = "masked_lm"
    auto_class = base_class = "AutoModelForMaskedLM"
    inputs = "masked_text"
    per_token = True
    draws = True

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> MaskedInputs | TextInputs:
        """Blocks of the joined texts, or texts and pairs by themselves; to predict, windows of each text."""
        if options.part == "predict":
            return TextInputs.of(split, processor, replace(options, windows=True))
        check_tokenizer(processor)
        masking, seed = Masking.of(processor), options.seed if options.part == "train" else None
        return MaskedInputs(encode_running(split, processor, options), processor, masking, seed, options.part)

    def examples(self, raw: Sequence[Any], processor: Any) -> Split:
        """Texts with mask tokens, such as "[MASK]"."""
        texts, token = checked_texts(raw, pairs=False), regex.escape(mask_token(processor))
        return Split.of(texts, words=[[match.span() for match in regex.finditer(token, text)] for text in texts])

    def answers(self, task: TaskLike, split: Split, inputs: Any, processor: Any) -> Results:
        """Per mask token its "start" and "end", and "candidates" with "token" and "score", best first."""
        return _FilledMasks(split, inputs, processor)


class _FilledMasks(Results):
    """What may stand at the mask tokens of texts."""

    def __init__(self, split: Split, inputs: TextInputs, processor: Any) -> None:
        self._processor, self._masks = processor, list(split.words or ())
        self._best: list[list[list[float]]] = [[] for masks in self._masks for _ in masks]
        self._places = word_places(inputs.encoded, self._masks)

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        for at, row in enumerate(rows):
            for position, number in self._places[row]:
                self._best[number] = best_tokens(outputs[at, position]).tolist()

    def first_not_finite(self) -> int | None:
        texts = (text for text, masks in enumerate(self._masks) for _ in masks)
        return next((text for text, best in zip(texts, self._best, strict=True) if has_nan(best)), None)

    def predictions(self) -> list[Any]:
        best = iter(self._best)
        return [[self._to_prediction(span, next(best)) for span in masks] for masks in self._masks]

    def _to_prediction(self, mask: tuple[int, int], best: list[list[float]]) -> dict[str, Any]:
        return {"start": mask[0], "end": mask[1], "candidates": candidates(best, self._processor)}
