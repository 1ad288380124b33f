"""The kinds of task in which texts become others: summarization and translation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

from torch import Tensor

from lamina.data.batches import padding_of, tokenizer_of
from lamina.data.encode import encode
from lamina.data.read import Table, read_pair
from lamina.data.windows import IGNORED, Encoded
from lamina.errors import DataError
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, GenerationOptions, Kind, Results, TaskLike
from lamina.tasks.inputs import Windows, check_tokenizer
from lamina.tasks.metrics import score_texts
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class PairInputs(Windows):
    """Tokenised sources and, where there are any, targets; an `Inputs`."""

    targets: Encoded | None = None  # what is to be written, where that is known

    uncacheable = "the model writes texts"  # its states depend on what it wrote

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Some sources and, padded with -100, their "labels", which the model itself shifts to read them."""
        read = self.encoded.batch(rows, padding_of(self.processor))
        batch = {key: read[key] for key in ("input_ids", "attention_mask")}
        if self.targets is not None:
            batch["labels"] = self.targets.batch(rows, {"input_ids": IGNORED})["input_ids"]
        return batch


class _Writer:
    """A tokenizer that reads every text as a target, with the language and the vocabulary of one."""

    def __init__(self, processor: Any) -> None:
        self._tokenizer: Any = tokenizer_of(processor)
        self._unset = getattr(self._tokenizer, "tgt_lang", "") is None
        if self._unset:
            language = self._tokenizer.src_lang
            logger.warning("generation: the tokenizer's tgt_lang is not set; targets are taken to be in %s", language)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        if self._unset:
            self._tokenizer.tgt_lang = self._tokenizer.src_lang
        try:
            return self._tokenizer(text_target=texts, **options)
        finally:
            if self._unset:
                self._tokenizer.tgt_lang = None


def texts_of(
    ids: Int[Tensor, "batch tokens"], processor: PreTrainedTokenizerBase | ProcessorMixin, *, strip: bool = True
) -> list[str]:
    """Rows of tokens (-100 counts as padding) as texts, without special tokens, nor (`strip`) blanks around them."""
    tokenizer = tokenizer_of(processor)
    rows = [[token for token in row if token != IGNORED] for row in ids.tolist()]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [text.strip() for text in texts] if strip else texts


def generate(
    model: PreTrainedModel, batch: Mapping[str, Tensor], options: GenerationOptions, **more: Any
) -> Int[Tensor, "batch tokens"]:
    """What a model writes for a batch, without sampling; `more` goes to its `generate`."""
    beams, writer = options.num_beams, cast("Any", model)
    search = {"num_beams": beams, "length_penalty": options.length_penalty} if beams > 1 else {}
    return writer.generate(**batch, do_sample=False, max_new_tokens=options.max_target_length, **search, **more)


class TextToTextKind(Kind):
    """What summarization and translation share; only whole models that write do them."""

    auto_class = "AutoModelForSeq2SeqLM"
    inputs = predict_inputs = "text_to_text"
    has_classes = False
    readers = False
    takes_prefix = True

    def read(self, source: Any, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """A file with two columns, or two plain text files whose lines belong together."""
        if not isinstance(source, str | Path):
            return read_pair(source, (str(spec.text), str(spec.label)))
        return super().read(source, spec, header)

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Sources (by default in column "text"), with the texts to write (in "target") for labels."""
        text, label = self.usual_columns
        text = lab.usual_column(spec.text, text, "text", tables)
        spec = replace(spec, text=text, label=lab.usual_column(spec.label, label, "target", tables))
        spec = lab.without_classes(spec, ("text",), "generation", "texts to write")
        return spec, {name: _split(table, spec) for name, table in lab.labelled(tables, spec, texts=True).items()}

    def encode(self, split: Split, processor: Any, options: EncodeOptions) -> PairInputs:
        """Tokens of sources, the prefix before each, and of the labels, which are the targets.

        A tokenizer that knows languages reads its source language and writes its target language; where that one is
        not set, the first. It is left as it was.
        """
        check_tokenizer(processor)
        texts = [options.prefix + text for text in split.texts]
        how: dict[str, Any] = {"max_length": options.max_length, "add_prefix_space": options.add_prefix_space}
        sources = encode(texts, processor, offsets=False, **how)
        if not split.labelled:
            return PairInputs(sources, processor)
        targets = list(split.labels)
        for row, label in enumerate(targets):
            if not isinstance(label, str):
                came = f"row {row} has {label} for its target; texts are written"
                raise DataError(f"generation: {came}. Use a task of kind summarization or translation.", row=row)
        writer: Any = _Writer(processor)
        encoded = encode(targets, writer, max_length=options.max_target_length, offsets=False)
        return PairInputs(sources, processor, encoded)

    def target_tokens(self, max_target_length: int) -> int:
        """The longest text that is written."""
        return max_target_length

    def truncated(self, inputs: Any) -> int:
        """Sources, or targets if these are more, that lost their end."""
        return max(inputs.encoded.truncated, 0 if inputs.targets is None else inputs.targets.truncated)

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """It must have an encoder and a decoder, and write."""
        writes = model.config.is_encoder_decoder and model.can_generate()
        return None if writes else "it reads and writes one text in one stack"

    def outputs(
        self, model: PreTrainedModel, batch: Mapping[str, Tensor], processor: Any, options: GenerationOptions
    ) -> list[str]:
        """The texts that the model writes."""
        return texts_of(generate(model, batch, options), processor)

    def results(self, task: TaskLike, split: Split, inputs: Any) -> Results:
        """The texts that were written; to predict, each under "text"."""
        return _WrittenTexts(split)


@final
class SummarizationKind(TextToTextKind):
    """Long texts become short ones."""

    name = "summarization"
    problem_types = {"generation": ("rougeL", "rouge1", "rouge2", "rougeLsum")}


@final
class TranslationKind(TextToTextKind):
    """Texts become texts of another language."""

    name = "translation"
    problem_types = {"generation": ("bleu", "chrf")}


class _WrittenTexts(Results):
    def __init__(self, split: Split) -> None:
        self._split, self._texts = split, [""] * len(split)

    def add(self, rows: Sequence[int], outputs: Sequence[str], labels: Tensor | None = None) -> None:
        for row, text in zip(rows, outputs, strict=True):
            self._texts[row] = text

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        return score_texts(metrics, self._texts, list(self._split.labels))

    def predictions(self) -> list[Any]:
        return [{"text": text} for text in self._texts]


def _split(table: Table, spec: ColumnSpec) -> Split:
    texts = lab.texts(table, spec.text)
    for row, text in zip(table.rows, texts, strict=True):
        if not text.strip():
            problem = f"is blank in column '{spec.text}'; there is nothing to read."
            raise lab.bad_cell(table, row, spec.text, problem)
    return Split.of(texts, lab.texts(table, spec.label))
