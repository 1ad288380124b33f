"""Masked language modelling: mask tokens of running text, predict them, and fill in mask tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast, final

import regex
from torch import Tensor

from lamina.data.encode import Windows, pad
from lamina.data.windows import IGNORED, word_places
from lamina.errors import ConfigError
from lamina.heads.base import TaskLike
from lamina.layers.types import check_tokenizer, padding_of, tokenizer_of
from lamina.tasks import language_modeling as lm
from lamina.tasks.base import EncodeOptions
from lamina.tasks.kind import TextInputs
from lamina.tasks.outputs import Results
from lamina.tasks.split import Split, checked_texts
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from lamina.layers.types import Processor

SHARE = 0.15  # share of a row's ordinary tokens that are predicted
REPLACED, RANDOM = 0.8, 0.1  # shares of these that become the mask token, and any token; the rest are unchanged


class MaskAnswer(TypedDict):
    """The most probable tokens (`candidates`) for one mask token, which is the characters `[start:end]` of the text."""

    start: int
    end: int
    candidates: list[lm.Candidate]


def mask_token(processor: Processor) -> str:
    """Return the text of the tokenizer's mask token, such as "[MASK]"; raise ConfigError if it has none."""
    token = tokenizer_of(processor).mask_token
    if token is None:
        hint = "Use a model that was trained with it, such as BERT or RoBERTa."
        raise ConfigError(f"masked_lm: the tokenizer has no mask token; masked language modelling needs one. {hint}")
    return token


@dataclass(frozen=True)
class Masking:
    """Chooses 15 % of a row's ordinary tokens, at least one if it has any, and masks them.

    80 % of the chosen tokens become the mask token, 10 % a random token of the vocabulary, and 10 % stay as they are.
    The choice depends only on the row and the seed.

    Attributes:
        token: Id of the mask token.
        special: Ids of special tokens, which are never chosen.
        vocabulary: Number of tokens in the vocabulary.

    Source:
        Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.1.
    """

    token: int
    special: frozenset[int]
    vocabulary: int

    @classmethod
    def of(cls, processor: Processor) -> Masking:
        """Return the masking for a processor's tokenizer; raise ConfigError if the tokenizer has no mask token."""
        mask_token(processor)
        tokenizer = tokenizer_of(processor)
        return cls(cast("int", tokenizer.mask_token_id), frozenset(tokenizer.all_special_ids), len(tokenizer))

    def hide(self, ids: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
        """Mask tokens of the row `ids`, chosen by `seed`; return the ids for the model to read, and the labels.

        A label is the original id at each chosen token, and -100 elsewhere.
        """
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
    """Blocks or rows of text with masked tokens. It is a `lamina.tasks.base.Inputs`.

    Attributes:
        masking: Chooses and masks the tokens.
        seed: Seed of masking that differs in each epoch, for the train split. None: masking is the same in all epochs.
        part: Name of the split.
    """

    masking: Masking
    seed: int | None
    part: str

    @property
    def uncacheable(self) -> str | None:
        """Why a model's states cannot be cached, as text; never None."""
        return "the texts are masked anew in each epoch"

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the rows with these indices; "labels" has the original id at tokens chosen by `masking`, else -100.

        In the train split, the masking differs in each `epoch`.
        """
        seeds = () if self.seed is None else (self.seed, epoch)
        batch = super().batch(rows)
        lengths = self.encoded.lengths[list(rows)]
        hidden = [
            self.masking.hide(ids[:length].tolist(), derive_seed("mask", self.part, *seeds, row))
            for ids, length, row in zip(batch["input_ids"], lengths, rows, strict=True)
        ]
        read, labels = zip(*hidden, strict=True)
        batch["input_ids"] = pad(read, padding_of(self.processor)["input_ids"])
        return {**batch, "labels": pad(labels, IGNORED)}


@final
class MaskedLMKind(lm.LanguageModelingKind):
    """The kind of task that predicts masked tokens of running text; `predict` fills in the mask tokens of a text."""

    name = "masked_lm"
    auto_class = base_class = "AutoModelForMaskedLM"
    inputs = "masked_text"
    per_token = True
    draws = True

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> MaskedInputs | TextInputs:
        """Return blocks or rows with masked tokens; for prediction, windows of each text, without masking.

        Raises ConfigError if there is no tokenizer, if it is slow in prediction, or if it has no mask token otherwise.
        """
        processor = check_tokenizer(processor)
        if options.part == "predict":
            return TextInputs(options.encode_texts(split.texts, processor, windows=True), processor)
        masking, seed = Masking.of(processor), options.seed if options.part == "train" else None
        return MaskedInputs(lm.encode_running(split, processor, options), processor, masking, seed, options.part)

    def examples(self, raw: Sequence[object], processor: Processor) -> Split:
        """Return a user's texts for `predict` as a split; its `words` hold the character range of each mask token.

        Raises ConfigError if an example is not a text, or the tokenizer has no mask token.
        """
        texts, token = checked_texts(raw, pairs=False), regex.escape(mask_token(processor))
        return Split.of(texts, words=[[match.span() for match in regex.finditer(token, str(text))] for text in texts])

    def answers(self, task: TaskLike, split: Split, inputs: Windows, processor: Processor) -> Results:
        """Return an empty collection of the most probable tokens at each mask token of the split's texts."""
        return _FilledMasks(split, inputs, processor)


class _FilledMasks(Results[Tensor, list[MaskAnswer]]):
    """Collects the most probable tokens at each mask token of each text."""

    def __init__(self, split: Split, inputs: Windows, processor: Processor) -> None:
        self._processor, self._masks = processor, list(split.words or ())
        self._best: list[list[list[float]]] = [[] for masks in self._masks for _ in masks]
        self._places = word_places(inputs.encoded, self._masks)

    def add(self, rows: Sequence[int], outputs: Tensor, labels: Tensor | None = None) -> None:
        """Store the `best_tokens` of each mask token in the windows `rows`; `outputs` are logits of all tokens.

        `labels` is not used.
        """
        for at, row in enumerate(rows):
            for position, number in self._places.get(row, ()):
                self._best[number] = lm.best_tokens(outputs[at, position]).tolist()

    def first_not_finite(self) -> int | None:
        texts = (text for text, masks in enumerate(self._masks) for _ in masks)
        return next((text for text, best in zip(texts, self._best, strict=True) if lm.has_nan(best)), None)

    def predictions(self) -> list[list[MaskAnswer]]:
        filled = (lm.candidates(best, self._processor) for best in self._best)
        return [[MaskAnswer(start=i, end=j, candidates=next(filled)) for i, j in masks] for masks in self._masks]
