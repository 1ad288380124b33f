"""The kind of task that asks for the next token of running text."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from lamina.data.batches import padding_of, tokenizer_of
from lamina.data.encode import encode, length_limit
from lamina.data.read import Table
from lamina.data.windows import IGNORED, Encoded
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.causality import is_causal
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, GenerationOptions, Results, TaskLike, checked_texts
from lamina.tasks.chats import Chat, Span, chat_problem, chat_split, chats_of, is_chat, render
from lamina.tasks.inputs import SteadyWindows, TextInputs, WordTargets, check_tokenizer
from lamina.tasks.running_text import RunningTextKind, best_tokens, candidates, encode_running, has_nan
from lamina.tasks.split import Split
from lamina.tasks.text_to_text import generate, texts_of

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class CausalInputs(SteadyWindows):
    """Blocks of running text, or rows by themselves, with the token that follows each; an `Inputs`."""

    replies: WordTargets | None = None  # 1 at the tokens of replies, which alone are learnt; None: all are

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some blocks or rows; "labels" holds the next token of each, and -100 where none is learnt."""
        batch = self.encoded.batch(rows, padding_of(self.processor))
        ids, lengths = batch["input_ids"], torch.from_numpy(self.encoded.lengths[list(rows)]).unsqueeze(1)
        told = torch.arange(ids.shape[1]).expand_as(ids) < lengths
        if self.replies is not None:
            told = told & (self.replies.tensor(rows) == 1)
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
    reads_pairs = True
    judges_second = True

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Texts, or by row prompts with replies (`text_pair`) or chats, lists of messages (by default "messages").

        A row without a reply, or with a blank one, is one without a label.
        """
        if any("messages" in table.columns for table in tables.values()):
            spec = replace(spec, text=lab.usual_column(spec.text, self.usual_columns[0], "messages", tables))
        first = next(iter(tables.values()), None)
        if spec.text_pair is not None:
            splits = {part: _pairs(table, spec) for part, table in tables.items()}
        elif first is not None and any(map(is_chat, first.columns.get(str(spec.text), ())[:1])):
            splits = {part: chats_of(table, spec) for part, table in tables.items()}
        else:
            return super().build(spec, tables)
        spec = lab.without_classes(spec, ("token",), "classification", "the replies' own tokens")
        return replace(spec, by_row=True), splits

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> CausalInputs | TextInputs:
        """Blocks of the joined texts, or rows by themselves; to predict, the last tokens of each text."""
        check_tokenizer(processor)
        chats = len(split) > 0 and isinstance(split.texts[0], Chat)
        reader: Any = _AsWritten(processor) if chats else processor
        how: dict[str, Any] = {"max_length": options.max_length, "add_prefix_space": options.add_prefix_space}
        if options.part == "predict":
            texts = [render(chat, processor, prompt=True)[0] for chat in split.texts] if chats else split.texts
            with _kept_end(processor):
                return TextInputs(encode(texts, reader, offsets=False, **how), processor)
        if not chats and not split.pairs:
            return CausalInputs(encode_running(split, processor, options), processor)
        if not tokenizer_of(processor).is_fast:
            what = (
                f"{type(tokenizer_of(processor)).__name__} is a slow tokenizer; replies are found by character offsets"
            )
            raise ConfigError(f"causal_lm: {what}, which only fast ones give. Take a model that has a fast one.")
        told = (render(chat, processor) for chat in split.texts) if chats else _joined(split.texts, processor)
        texts, spans = zip(*told, strict=True)
        encoded = encode(texts, reader, **how)
        marks = _marks(encoded, spans, end=not chats and _adds_end(processor))
        return CausalInputs(encoded, processor, WordTargets(marks))

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """It must write, in one stack, and no token of it see later ones."""
        if model.config.is_encoder_decoder:
            return "it reads one text and writes another"
        if not model.can_generate():
            return "it does not write"
        try:
            causal = all(is_causal(model, stack) for stack in stacks(model).values())
        except UnsupportedModelError:  # its layers cannot be found; it is taken for what its class says
            return None
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
        """Texts, or chats that a reply is to be written to."""
        if not len(raw) or not is_chat(raw[0]):
            return Split.of(checked_texts(raw, pairs=False))
        for number, chat in enumerate(raw):
            if problem := chat_problem(chat):
                raise ConfigError(f"predict: entry {number} {problem}.")
        return chat_split(raw)

    def answers(self, task: TaskLike, split: Split, inputs: Any, processor: Any) -> Results:
        """Of a model "text", what it writes after the text; of a reader "candidates" for the next token, best first."""
        return _Continuations(inputs, processor)


def _pairs(table: Table, spec: ColumnSpec) -> Split:
    """Prompts with their replies."""
    told = lab.labelled({"": table}, replace(spec, label=spec.text_pair or ""), texts=True)[""]
    return Split.of(zip(lab.texts(told, spec.text), lab.texts(told, spec.text_pair or ""), strict=True))


class _AsWritten:
    """A tokenizer that adds no special tokens, as to the text of a chat template, which has them."""

    def __init__(self, processor: Any) -> None:
        self._tokenizer: Any = tokenizer_of(processor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self._tokenizer(texts, add_special_tokens=False, **options)


def _adds_end(processor: Any) -> bool:
    """Whether a tokenizer puts its end token behind every text."""
    tokenizer = tokenizer_of(processor)
    return tokenizer.eos_token is not None and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id


def _joined(pairs: Iterable[tuple[str, str]], processor: Any) -> Iterator[tuple[str, list[Span]]]:
    """Each prompt with its reply behind it, as they stand, and the end token, unless the tokenizer adds one itself."""
    end = "" if _adds_end(processor) else tokenizer_of(processor).eos_token or ""
    for prompt, reply in pairs:
        yield prompt + reply + end, [(len(prompt), len(prompt + reply + end))]


def _marks(encoded: Encoded, spans: Sequence[Sequence[Span]], *, end: bool) -> Iterator[list[int]]:
    """1 at the tokens that start inside one of their text's spans, and (`end`) at the last of all; 0 at the others."""
    for text, offsets in zip(encoded.text.tolist(), encoded.offsets, strict=True):
        row = [int(any(at <= start < stop for at, stop in spans[text]) and start < over) for start, over in offsets]
        yield [*row[:-1], 1] if end else row


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
