"""Generate texts from texts: summarization and translation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, cast, final

from torch import Tensor

from lamina.data.encode import Encoded, Windows, encode
from lamina.data.read import Table, read_pair
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError
from lamina.heads.base import TaskLike
from lamina.layers.types import check_tokenizer, tokenizer_of
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec, EncodeOptions, GenerationOptions, Kind, Source
from lamina.tasks.metrics import score_texts
from lamina.tasks.outputs import Results
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from jaxtyping import Int
    from transformers import PreTrainedModel

    from lamina.layers.types import Batch, Processor, WritingModel

logger = logging.getLogger(__name__)


class TextAnswer(TypedDict):
    """The text that a model generated for an example."""

    text: str


@final
@dataclass(frozen=True)
class PairInputs(Windows):
    """Tokenised source texts, with target texts where they are known. It is a `lamina.tasks.base.Inputs`.

    Attributes:
        targets: The token ids of the texts to generate; None: they are not known, as in prediction.
    """

    targets: Encoded | None = None

    @property
    def uncacheable(self) -> str | None:
        """Why a model's states cannot be cached, as text; never None."""
        return "the model generates texts"

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return the sources with the indices `rows`; "labels", if known, are the target tokens, padded with -100.

        They are the same in every `epoch`.
        """
        read = super().batch(rows)
        batch = {key: read[key] for key in ("input_ids", "attention_mask")}
        if self.targets is not None:
            batch["labels"] = self.targets.batch(rows, {"input_ids": IGNORED})["input_ids"]
        return batch


class _TargetTokenizer:
    """A tokenizer that reads every text as a target: in the target language, with the target's special tokens.

    If the tokenizer has languages but no target language, it reads targets in the source language, with a warning.
    """

    def __init__(self, processor: Processor) -> None:
        self._tokenizer = tokenizer_of(processor)
        self._is_unset = getattr(self._tokenizer, "tgt_lang", "") is None
        if self._is_unset:
            language = self._tokenizer.src_lang
            logger.warning("generation: the tokenizer's tgt_lang is not set; targets are read in %s", language)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        if self._is_unset:
            self._tokenizer.tgt_lang = self._tokenizer.src_lang
        try:
            return self._tokenizer(text_target=texts, **options)
        finally:
            if self._is_unset:
                self._tokenizer.tgt_lang = None


def texts_of(ids: Int[Tensor, "batch tokens"], processor: Processor, *, strip: bool = True) -> list[str]:
    """Return each row of token ids as text, without special tokens and -100; `strip` removes blanks at both ends."""
    tokenizer = tokenizer_of(processor)
    rows = [[token for token in row if token != IGNORED] for row in ids.tolist()]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [text.strip() for text in texts] if strip else texts


def generate(
    model: PreTrainedModel, batch: Batch, options: GenerationOptions, **more: int
) -> Int[Tensor, "batch tokens"]:
    """Return the token ids that a model generates for a batch by greedy or beam search, as `options` say.

    A decoder-only model's ids begin with those of the batch. `more` holds further arguments for `model.generate`.
    """
    beams = options.num_beams
    search = {"num_beams": beams, "length_penalty": options.length_penalty} if beams > 1 else {}
    arguments = {**batch, "do_sample": False, "max_new_tokens": options.max_target_length, **search, **more}
    return cast("WritingModel", model).generate(**arguments)


class TextToTextKind(Kind[PairInputs]):
    """Base class of kinds that generate a text from a text. Only encoder-decoder models can do it, no readers.

    A subclass sets only `name` and `problem_types`.
    """

    auto_class = "AutoModelForSeq2SeqLM"
    inputs = predict_inputs = "text_to_text"
    has_classes = False
    readers = False
    takes_prefix = True
    generates = True

    def read(self, source: Source, spec: ColumnSpec, header: Sequence[str] | None = None) -> Table:
        """Return the table of a file, or of a pair of text files whose lines belong together.

        The texts of a pair are in the columns `spec.text` and `spec.label`. See `Kind.read` for the other arguments.
        Raises DataError if a file cannot be read, a pair is not two files, or their numbers of lines differ;
        ConfigError if a file is no path.
        """
        if isinstance(source, str | PathLike) or not isinstance(source, Iterable):
            return super().read(source, spec, header)
        if odd := [path for path in source if not isinstance(path, str | PathLike)]:
            raise ConfigError(f"task: a file is {odd[0]!r}; a path is needed.")
        return read_pair(list(source), (str(spec.text), str(spec.label)))

    def build(self, spec: ColumnSpec, tables: Mapping[str, Table]) -> tuple[ColumnSpec, dict[str, Split]]:
        """Return the source texts of every split, with the texts to generate as labels; see `Kind.build`.

        The default columns are "sentence" and "label". If no table has one, "text" or "target" takes its place. Raises
        DataError if a column is missing, a source is blank, all targets of a split are missing, or some are and
        `spec.missing_labels` is not "drop". Raises ConfigError if the user passed labels.
        """
        text, label = self.usual_columns
        text = lab.usual_column(spec.text, text, "text", tables)
        spec = replace(spec, text=text, label=lab.usual_column(spec.label, label, "target", tables))
        spec = lab.without_classes(spec, ("text",), "generation", "texts to generate")
        return spec, {name: _split(table, spec) for name, table in lab.labelled(tables, spec, texts=True).items()}

    def encode(self, split: Split, processor: Processor | None, options: EncodeOptions) -> PairInputs:
        """Tokenise the sources, each with the prefix in front, and the targets: the split's labels, if it has any.

        Targets are cut to `options.max_target_length` tokens. A tokenizer with languages reads them in its target
        language; if none is set, in its source language, with a warning. The tokenizer itself is not changed. Raises
        ConfigError if the processor has no tokenizer, and DataError if a label is not a text.
        """
        processor = check_tokenizer(processor)
        sources = options.encode_texts([options.prefix + text for text in split.texts], processor)
        if not split.labelled:
            return PairInputs(sources, processor)
        targets = list(split.labels)
        for row, label in enumerate(targets):
            if not isinstance(label, str):
                got = f"row {row} has {label} as its target; targets are texts"
                raise DataError(f"generation: {got}. Use a task of kind summarization or translation.", row=row)
        reader = cast("Processor", _TargetTokenizer(processor))
        encoded = encode(targets, reader, max_length=options.max_target_length, offsets=False)
        return PairInputs(sources, processor, encoded)

    def truncated(self, inputs: PairInputs) -> int:
        """Return the number of truncated texts: of sources or of targets, whichever is larger."""
        return max(inputs.encoded.truncated, 0 if inputs.targets is None else inputs.targets.truncated)

    def model_problem(self, model: PreTrainedModel) -> str | None:
        """Return why the model is not an encoder-decoder that generates text, as text; None if it is one."""
        generates = model.config.is_encoder_decoder and model.can_generate()
        return None if generates else "it is not an encoder-decoder that generates text"

    def outputs(
        self, model: PreTrainedModel, batch: Batch, processor: Processor, options: GenerationOptions
    ) -> list[str]:
        """Return the texts that the model generates for a batch of sources; see `Kind.outputs`."""
        return texts_of(generate(model, batch, options), processor)

    def results(self, task: TaskLike, split: Split, inputs: PairInputs) -> Results:
        """Return an empty collection of generated texts, which scores them against the labels of `split`."""
        return _GeneratedTexts(split)


@final
class SummarizationKind(TextToTextKind):
    """The kind of task in which a model writes a summary of a text, scored by ROUGE against the label."""

    name = "summarization"
    problem_types = {"generation": ("rougeL", "rouge1", "rouge2", "rougeLsum")}


@final
class TranslationKind(TextToTextKind):
    """The kind of task in which a model translates a text, scored by BLEU and chrF against the label."""

    name = "translation"
    problem_types = {"generation": ("bleu", "chrf")}


class _GeneratedTexts(Results[Sequence[str], TextAnswer]):
    """Collects generated texts, and scores them against the labels of a split."""

    def __init__(self, split: Split) -> None:
        self._split, self._texts = split, [""] * len(split)

    def add(self, rows: Sequence[int], outputs: Sequence[str], labels: Tensor | None = None) -> None:
        for row, text in zip(rows, outputs, strict=True):
            self._texts[row] = text

    def scores(self, metrics: Sequence[str]) -> dict[str, float]:
        return score_texts(metrics, self._texts, list(self._split.labels))

    def predictions(self) -> list[TextAnswer]:
        return [{"text": text} for text in self._texts]


def _split(table: Table, spec: ColumnSpec) -> Split:
    """Return the examples in a table: texts of column `spec.text`, with those of column `spec.label` as labels.

    Raises DataError if a cell is not a text, or a source text is blank.
    """
    texts = lab.texts(table, spec.text)
    for row, text in zip(table.rows, texts, strict=True):
        if not text.strip():
            problem = f"is blank in column '{spec.text}'; there is nothing to read."
            raise lab.bad_cell(table, row, spec.text, problem)
    return Split.of(texts, lab.texts(table, spec.label))
