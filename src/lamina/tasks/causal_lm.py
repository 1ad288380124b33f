"""The kind of task that asks for the next token of running text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from lamina.data.batches import padding_of, tokenizer_of
from lamina.data.encode import encode, length_limit
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError
from lamina.layers import stacks
from lamina.layers.causality import is_causal
from lamina.tasks.base import EncodeOptions, GenerationOptions, Results, TaskLike, checked_texts
from lamina.tasks.inputs import TextInputs, Windows, check_tokenizer
from lamina.tasks.running_text import RunningTextKind, best_tokens, candidates, encode_running, has_nan
from lamina.tasks.split import Split
from lamina.tasks.text_to_text import generate, texts_of

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class CausalInputs(Windows):
    """Blocks of running text, or rows by themselves, with the token that follows each; an `Inputs`."""

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some blocks or rows; "labels" holds the next token of each, and -100 at the last and at padding."""
        batch = self.encoded.batch(rows, padding_of(self.processor))
        ids, lengths = batch["input_ids"], torch.from_numpy(self.encoded.lengths[list(rows)]).unsqueeze(1)
        told = torch.arange(ids.shape[1]).expand_as(ids) < lengths
        return {**batch, "labels": shifted(ids.where(told, IGNORED), -1)}


def shifted(labels: Int[Tensor, "batch tokens"], by: int) -> Int[Tensor, "batch tokens"]:
    """Labels one token further on (`by` is 1) or back (-1); what has none then is -100."""
    moved = labels.roll(by, dims=1)
    moved[:, 0 if by > 0 else -1] = IGNORED
    return moved


@final
class CausalLMKind(RunningTextKind):
    """The next token of running text; to predict, a model goes on with a text, and a reader says what may come next."""

    name = "causal_lm"
    auto_class = base_class = "AutoModelForCausalLM"
    inputs = predict_inputs = "causal_text"

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> CausalInputs | TextInputs:
        """Blocks of the joined texts, or rows by themselves; to predict, the last tokens of each text."""
        check_tokenizer(processor)
        if options.part != "predict":
            return CausalInputs(encode_running(split, processor, options), processor)
        how: dict[str, Any] = {"max_length": options.max_length, "add_prefix_space": options.add_prefix_space}
        with _kept_end(processor):
            return TextInputs(encode(split.texts, processor, offsets=False, **how), processor)

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """It must write, in one stack, and no token of it see later ones."""
        if model.config.is_encoder_decoder:
            return "it reads one text and writes another"
        if not model.can_generate():
            return "it does not write"
        causal = all(is_causal(model, stack) for stack in stacks(model).values())
        return None if causal else "in it the states of a token change with later tokens, which it is to predict"

    def output_problem(self, outputs: Any, task: TaskLike) -> str | None:
        """Logits that are not a vocabulary's for every token."""
        shape = list(outputs.logits.shape)
        return None if len(shape) == 3 else f"it gives logits of the shape {shape}"

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Every token's own, since transformers' models look at the next one themselves."""
        return shifted(labels, 1)

    def predict_outputs(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], processor: Any, options: GenerationOptions
    ) -> list[str]:
        """What the model writes after each text."""
        given = _left_padded(batch)
        limit, width = length_limit(model, processor), given["input_ids"].shape[1]
        room = limit - options.max_target_length
        if room < 1:
            came = f"max_target_length is {options.max_target_length} for a model of {limit} tokens"
            raise ConfigError(f"predict: {came}; at least one is needed for the text itself. Use a smaller one.")
        if width > room:
            logger.warning("predict: only the last %d tokens of a text leave room for what is to be written", room)
        given = {key: value[:, -room:] for key, value in given.items()}
        ids = generate(model, given, options, pad_token_id=padding_of(processor)["input_ids"])
        both = (texts_of(part, processor, strip=False) for part in (ids, given["input_ids"]))
        return [whole.removeprefix(text) for whole, text in zip(*both, strict=True)]  # with the blank between the two

    def examples(self, raw: Sequence[Any], processor: Any) -> Split:
        """Texts."""
        return Split.of(checked_texts(raw, pairs=False))

    def answers(self, task: TaskLike, split: Split, inputs: Any, processor: Any) -> Results:
        """Of a model "text", what it writes after the text; of a reader "candidates" for the next token, best first."""
        return _Continuations(inputs, processor)


@contextmanager
def _kept_end(processor: Any) -> Iterator[None]:
    """Have a tokenizer cut off the start of a text that is too long."""
    tokenizer = tokenizer_of(processor)
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "left"
    try:
        yield
    finally:
        tokenizer.truncation_side = side


def _left_padded(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ids and mask with the padding on the left, so that what is written follows the text."""
    order = batch["attention_mask"].argsort(dim=1, stable=True)
    return {key: batch[key].gather(1, order) for key in ("input_ids", "attention_mask")}


class _Continuations(Results):
    """What comes after each text: as a model writes it, or as a reader has the next token."""

    def __init__(self, inputs: TextInputs, processor: Any) -> None:
        self._lengths, self._processor = inputs.lengths, processor
        self._answers: list[Any] = [None] * len(inputs.lengths)

    def add(self, rows: Sequence[int], outputs: Any, labels: Tensor | None = None) -> None:
        for at, row in enumerate(rows):
            written = not isinstance(outputs, Tensor)
            self._answers[row] = outputs[at] if written else best_tokens(outputs[at, self._lengths[row] - 1]).tolist()

    def first_not_finite(self) -> int | None:
        bad = (row for row, best in enumerate(self._answers) if not isinstance(best, str) and has_nan(best))
        return next(bad, None)

    def predictions(self) -> list[Any]:
        return [
            {"text": answer}
            if isinstance(answer, str)
            else {"candidates": candidates(answer, self._processor, strip=False)}
            for answer in self._answers
        ]
