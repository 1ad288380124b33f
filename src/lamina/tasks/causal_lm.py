"""Causal language modelling: learn the next token of running text or of replies; continue texts and chats."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, cast, final

import torch
from torch import Tensor

from lamina.data.encode import Encoded, Windows, encode_replies, length_limit
from lamina.data.read import Table
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.heads.base import TaskLike
from lamina.layers import stacks
from lamina.layers.causality import is_causal
from lamina.layers.types import adds_end, check_tokenizer, padding_of, tokenizer_of
from lamina.tasks import labels as lab
from lamina.tasks import language_modeling as lm
from lamina.tasks.base import ColumnSpec, EncodeOptions, GenerationOptions, HasLogits
from lamina.tasks.chat_templates import Chat, chat_problem, chat_split, chats_of, is_chat, render
from lamina.tasks.kind import TextInputs
from lamina.tasks.outputs import Outputs, Results
from lamina.tasks.split import Split, checked_texts
from lamina.tasks.targets import WordTargets
from lamina.tasks.text_to_text import TextAnswer, generate, texts_of
from lamina.tasks.words import Span

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel

    from lamina.layers.types import Batch, Processor

logger = logging.getLogger(__name__)


class CandidatesAnswer(TypedDict):
    """A reader's prediction for a text: `candidates`, the most probable next tokens, the most probable first."""

    candidates: list[lm.Candidate]


@final
@dataclass(frozen=True)
class CausalInputs(Windows):
    """Blocks or rows of tokens, each labelled with the token that follows it. It is a `lamina.tasks.base.Inputs`.

    Attributes:
        replies: For each row, 1 at the tokens of replies, which are learnt, and 0 at others. None: all are learnt.
    """

    replies: WordTargets | None = None

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the rows with the indices `rows`, the same in every epoch.

        "labels" holds the next token at each token, or -100 where it is not learnt.
        """
        batch = super().batch(rows)
        ids, lengths = batch["input_ids"], torch.from_numpy(self.encoded.lengths[list(rows)]).unsqueeze(1)
        is_learnt = torch.arange(ids.shape[1]).expand_as(ids) < lengths
        if self.replies is not None:
            is_learnt = is_learnt & (self.replies.tensor(rows) == 1)
        return {**batch, "labels": shifted(ids.where(is_learnt, IGNORED), -1)}


def shifted(labels: Int[Tensor, "batch tokens"], by: int) -> Int[Tensor, "batch tokens"]:
    """Return labels shifted by one token: to the right if `by` is 1, to the left if -1. -100 fills the gap."""
    moved = labels.roll(by, dims=1)
    moved[:, 0 if by > 0 else -1] = IGNORED
    return moved


@final
class CausalLMKind(lm.LanguageModelingKind):
    """The kind of task that predicts the next token of running text, or the tokens of replies.

    For prediction, a whole model continues a text, and a reader lists the most probable next tokens.
    """

    name = "causal_lm"
    auto_class = base_class = "AutoModelForCausalLM"
    inputs = predict_inputs = "causal_text"
    keeps_end = True
    reads_pairs = True
    judges_second = True

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Return the texts, pairs of prompt and reply, or chats of every split. The columns decide which.

        With `spec.text_pair`, that column has the replies. Chats are lists of messages, by default in column
        "messages" if no table has "sentence". Pairs and chats are always read row by row; other texts as
        `LanguageModelingKind.build` says. A row whose reply is missing or blank counts as a row without a label. Raises
        DataError if a column is missing, a cell has another form, all replies are missing, or some are and
        `spec.missing_labels` is not "drop"; ConfigError if the user passed labels. See `Kind.build` for arguments and
        result.
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

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> CausalInputs | TextInputs:
        """Return blocks or rows of tokens with the next tokens as labels; see `Kind.encode`.

        In pairs and chats, only tokens of replies have labels. For prediction (`options.part` "predict"), rows have no
        labels, and long texts lose their start. Raises ConfigError if the processor has no tokenizer, if replies are
        learnt with a slow one, which cannot tell where they are, or if chats have no chat template or it fails.
        """
        processor = check_tokenizer(processor)
        has_chats = len(split) > 0 and isinstance(split.texts[0], Chat)
        if options.part == "predict":
            return _encode_prompts(split, processor, options, has_chats=has_chats)
        if has_chats or split.pairs:
            return _encode_replies(split, processor, options, has_chats=has_chats)
        return CausalInputs(lm.encode_running(split, processor, options), processor)

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """Return why the model is not a decoder-only causal language model, as text; None if it is one.

        If its layers cannot be found, it counts as causal.
        """
        if model.config.is_encoder_decoder:
            return "it is an encoder-decoder"
        if not model.can_generate():
            return "it does not generate text"
        try:
            causal = all(is_causal(model, stack) for stack in stacks(model).values())
        except UnsupportedModelError:  # the layers cannot be found, so that the class of the model has to be trusted
            return None
        return None if causal else "its tokens see later tokens, which they are to predict"

    def output_problem(self, outputs: HasLogits, task: TaskLike) -> str | None:
        """Return why the model's logits are not `[batch, tokens, vocabulary]`, as text; None if they are."""
        shape = list(outputs.logits.shape)
        return None if len(shape) == 3 else f"it gives logits of the shape {shape}"

    def model_labels(self, labels: Tensor, task: TaskLike) -> Tensor:
        """Return next-token labels moved one position to the right, after a -100.

        Transformers' models shift labels to the left themselves.
        """
        return shifted(labels, 1)

    def predict_outputs(
        self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions
    ) -> list[str]:
        """Return the continuation of each text of a batch that the model generates; `processor` decodes it.

        Texts that leave too little room are cut at their start, with a warning. Raises ConfigError if
        `options.max_target_length` leaves no room for the text itself.
        """
        order = batch["attention_mask"].argsort(dim=1, stable=True)  # padding first: generated tokens follow the text
        prompts = {key: batch[key].gather(1, order) for key in ("input_ids", "attention_mask")}
        limit, width = length_limit(model, processor), prompts["input_ids"].shape[1]
        room = limit - options.max_target_length
        if room < 1:
            got = f"max_target_length is {options.max_target_length} for a model of {limit} tokens"
            raise ConfigError(f"predict: {got}; at least one token is needed for the text itself. Use a smaller one.")
        if width > room:
            logger.warning("predict: texts are cut to their last %d tokens, to leave room for the generated text", room)
        prompts = {key: value[:, -room:] for key, value in prompts.items()}
        padding = padding_of(processor)["input_ids"]
        ids = generate(model, prompts, options, pad_token_id=padding)
        both = (texts_of(part, processor, strip=False) for part in (ids, prompts["input_ids"]))
        # Decoding the new tokens alone would lose the space between the two texts.
        return [whole.removeprefix(text) for whole, text in zip(*both, strict=True)]

    def examples(self, raw: Sequence[object], processor: Processor) -> Split:
        """Return `raw`, a user's texts or chats to continue, as a split; ConfigError unless all are of one form."""
        if not len(raw) or not is_chat(raw[0]):
            return Split.of(checked_texts(raw, pairs=False))
        for number, chat in enumerate(raw):
            if problem := chat_problem(chat):
                raise ConfigError(f"predict: entry {number} {problem}.")
        return chat_split(chat for chat in raw if is_chat(chat))

    def answers(self, task: TaskLike, split: Split, inputs: Windows, processor: Processor) -> Results:
        """Return an empty collection of generated texts (whole models) or next-token candidates (readers)."""
        return _Continuations(inputs, processor)


def _pairs(table: Table, spec: ColumnSpec) -> Split:
    """Return a table's rows as pairs of prompt (`spec.text`) and reply (`spec.text_pair`); errors as in `build`."""
    reply = spec.text_pair or ""
    table = lab.labelled_table(table, replace(spec, label=reply), texts=True)
    return Split.of(zip(lab.texts(table, spec.text), lab.texts(table, reply), strict=True))


def _encode_prompts(split: Split, processor: Processor, options: EncodeOptions, *, has_chats: bool) -> TextInputs:
    """Tokenise texts, or (`has_chats`) chats up to the start of the next reply; too long ones lose their start.

    An end token that the tokenizer adds is left out. The tokenizer's settings are as before. Raises ConfigError if a
    chat template is missing or fails.
    """
    tokenizer, reader, texts = tokenizer_of(processor), processor, split.texts
    if has_chats:
        reader = cast("Processor", _WithoutSpecialTokens(processor))
        texts = [render(chat, processor, prompt=True)[0] for chat in split.texts]
    elif adds_end(tokenizer):
        reader = cast("Processor", _WithoutEnd(processor))
    side, tokenizer.truncation_side = tokenizer.truncation_side, "left"
    try:
        return TextInputs(options.encode_texts(texts, reader), processor)
    finally:
        tokenizer.truncation_side = side


def _encode_replies(split: Split, processor: Processor, options: EncodeOptions, *, has_chats: bool) -> CausalInputs:
    """Tokenise pairs, or (`has_chats`) chats, and mark the tokens of replies; only these tokens are learnt.

    Raises ConfigError for a slow tokenizer, which does not tell where a reply begins, and if `render` fails on a chat.
    """
    tokenizer = tokenizer_of(processor)
    if not tokenizer.is_fast:
        what = f"{type(tokenizer).__name__} is a slow tokenizer; replies are found by character offsets"
        raise ConfigError(f"causal_lm: {what}, which only fast ones give. Use a model that has a fast one.")
    if not has_chats:
        has_end, space = adds_end(tokenizer), options.add_prefix_space
        end = "" if has_end else tokenizer.eos_token or ""
        pairs = [(prompt, reply + end) for prompt, reply in split.texts]
        encoded, marks = encode_replies(pairs, processor, max_length=options.max_length, add_prefix_space=space)
        if has_end:
            marks = [[*row[:-1], 1] for row in marks]
        return CausalInputs(encoded, processor, WordTargets(marks))
    texts, spans = zip(*(render(chat, processor) for chat in split.texts), strict=True)
    encoded = options.encode_texts(texts, cast("Processor", _WithoutSpecialTokens(processor)), offsets=True)
    return CausalInputs(encoded, processor, WordTargets(_marks(encoded, spans)))


class _WithoutSpecialTokens:
    """A wrapper around the tokenizer of `processor` that adds no special tokens, which chat templates write already."""

    def __init__(self, processor: Processor) -> None:
        self._tokenizer = tokenizer_of(processor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self._tokenizer(texts, add_special_tokens=False, **options)


class _WithoutEnd(_WithoutSpecialTokens):
    """A wrapper around the tokenizer of `processor` that leaves out the end token after a text."""

    def __call__(self, texts: list[str], **options: Any) -> Any:
        if "max_length" in options:  # the end token needs no room
            options["max_length"] += 1
        output = self._tokenizer(texts, **options)
        return {key: [row[:-1] for row in rows] for key, rows in output.items()}


def _marks(encoded: Encoded, spans: Sequence[Sequence[Span]]) -> Iterator[list[int]]:
    """Yield a list for each encoded row: 1 for a token with a character in one of its text's `spans`, 0 for any other.

    A token may begin with the space before a span.
    """
    for text, offsets in zip(encoded.text.tolist(), encoded.offsets, strict=True):
        yield [
            int(any(start < stop and first < over for first, stop in spans[text]) and start < over)
            for start, over in offsets
        ]


class _Continuations(Results[Outputs, TextAnswer | CandidatesAnswer]):
    """Collects what follows each text: generated texts (whole models) or next-token candidates (readers)."""

    def __init__(self, inputs: Windows, processor: Processor) -> None:
        self._lengths, self._processor = inputs.lengths, processor
        # per text the generated text, or a list of token id and probability
        self._answers: list[str | list[list[float]]] = [[] for _ in inputs.lengths]

    def add(self, rows: Sequence[int], outputs: Outputs, labels: Tensor | None = None) -> None:
        """Store the continuations of the texts with the indices `rows`.

        `outputs` are generated texts, or logits `[batch, tokens, classes]`; those of a text's last token are used.
        `labels` is not.
        """
        for at, row in enumerate(rows):
            if isinstance(outputs, Tensor):
                self._answers[row] = lm.best_tokens(outputs[at, self._lengths[row] - 1]).tolist()
            else:
                self._answers[row] = outputs[at]

    def first_not_finite(self) -> int | None:
        bad = (row for row, best in enumerate(self._answers) if not isinstance(best, str) and lm.has_nan(best))
        return next(bad, None)

    def predictions(self) -> list[TextAnswer | CandidatesAnswer]:
        """Return one prediction per text: the generated text, or next-token candidates with leading spaces."""
        return [
            TextAnswer(text=answer)
            if isinstance(answer, str)
            else CandidatesAnswer(candidates=lm.candidates(answer, self._processor, strip=False))
            for answer in self._answers
        ]
