"""Write the hidden states of texts to files, to train readers elsewhere. A killed run can continue later."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final, get_args

import numpy as np
import torch
from rich.filesize import decimal

from lamina.bank import ReaderBank
from lamina.data.batches import length_batches
from lamina.data.encode import length_limit
from lamina.data.read import Table, read_table
from lamina.editing.record import location_of
from lamina.errors import ConfigError, DataError, StoreError, check_known
from lamina.layers import LayerStack, select
from lamina.layers.base_facts import StackSettings
from lamina.layers.discovery import pick_stack
from lamina.layers.fingerprints import fingerprint_of
from lamina.layers.preserve import preserve_training
from lamina.layers.recorded import StatesPooling
from lamina.layers.types import check_tokenizer
from lamina.layers.wrappers import checked_model
from lamina.prediction.file_columns import columns_of
from lamina.store.files import check_room, claimed, read_json, write_json
from lamina.store.manifest import STATES, StatesArray, StatesManifest
from lamina.tasks.base import EncodeOptions
from lamina.tasks.kind import TextInputs
from lamina.tasks.split import Split
from lamina.utils import (
    atomic_write,
    check_range,
    check_types,
    is_file,
    pluralize,
    progress_bar,
    remove_leftovers,
    write_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor
    from lamina.utils import JSON

logger = logging.getLogger(__name__)

PLAN, LENGTHS, TABLE = "extract.json", "lengths.npy", "rows.jsonl"
_FILE_BYTES = 1 << 28  # size of one file of states: a killed run loses the work for at most one file
_PLAN_FORMAT = 2  # version of the content of PLAN
_DTYPES = ("float16", "float32")


@check_types("extract")
def extract(  # noqa: PLR0913
    model: PreTrainedModel,
    source: str | PathLike[str],
    output: str | PathLike[str],
    *,
    layers: Selector = "all",
    stack: str | None = None,
    pooling: StatesPooling | None = None,
    dtype: Literal["float16", "float32"] = "float16",
    text: str | None = None,
    text_pair: str | None = None,
    processor: Processor | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    progress: bool = False,
) -> StatesManifest:
    """Write the hidden states of the texts in a file to a folder, with `states.json`, which describes them.

    `Task.from_states` reads the folder. The other columns of the file are written to `rows.jsonl`, so that readers find
    their labels there. The number of bytes to write is logged before the model runs. After a killed run or an error,
    the same call continues with the first missing file.

    Args:
        model: The model.
        source: File of texts, in a form that `Task.from_files` reads.
        output: Folder to write to; created if it does not exist.
        layers: Selector of the layers; layer 0 is the embeddings.
        stack: Name of a stack of blocks, such as "encoder". None: the only one, or the encoder.
        pooling: Write one state per row: of its "first" or "last" token, or the "mean" of its tokens. None: write the
            states of all tokens.
        dtype: Type of the numbers.
        text: Column of the text. None: the only column, or "sentence" or "text".
        text_pair: Column of the second text. None: rows are single texts.
        processor: The model's tokenizer, which is required.
        max_length: Maximum tokens per row; longer texts lose their end (their start, if the tokenizer truncates on the
            left). None: what the model allows.
        batch_size: Rows per pass.
        progress: Show a progress bar on standard error.

    Returns:
        The manifest that was written.

    Raises:
        UnknownNameError: If the stack, the pooling or the dtype does not exist.
        LayerIndexError: If a layer does not exist.
        DataError: If the file cannot be read, lacks a column or a row's text, or a state is NaN or too large for
            `dtype`; the message names the row.
        ConfigError: If there is no tokenizer, the stack is a decoder beside an encoder, the model does not have one
            state per token of a text, `layers` is no selector, or `batch_size` or `max_length` is out of range.
        UnsupportedModelError: If the layers of the model cannot be found.
        StoreError: If the folder cannot be written, or holds other files or states of a run with other arguments, or
            the disk is too small.
    """
    check_known("extract", [dtype], _DTYPES, "dtype")
    check_range("extract", "batch_size", batch_size, 1)
    check_known("extract", [] if pooling is None else [pooling], get_args(StatesPooling), "pooling")
    base, folder = checked_model(model, "extract"), Path(output)
    with preserve_training(base):
        bank = ReaderBank(base, processor)
        source_stack = pick_stack(bank.stacks, stack, op="extract")
        if source_stack.name == "decoder":
            raise ConfigError("extract: the stack is 'decoder', whose texts would be its outputs. Use the encoder.")
        texts, table = _read(Path(source), text, text_pair)
        limit = length_limit(bank.model, check_tokenizer(processor), max_length)
        inputs = TextInputs.of(Split.of(texts), processor, EncodeOptions(part="predict", max_length=limit))
        inputs = inputs.for_model(bank.model)
        chosen = tuple(select(layers, source_stack.layers, op="extract"))
        plan = _Plan(bank, inputs, source_stack, chosen, pooling, dtype, limit, text_pair is not None)
        with claimed(folder, [PLAN, STATES, LENGTHS, TABLE, *plan.names]):
            plan.begin(folder)
            for number in progress_bar(range(len(plan.parts)), show=progress, desc="writing states", unit="file"):
                if not is_file(folder / plan.names[number]):
                    with atomic_write(folder / plan.names[number], OSError) as path:
                        plan.write(number, path, batch_size)
            return plan.finish(folder, table)


def _read(source: Path, text: str | None, text_pair: str | None) -> tuple[list[object], Table]:
    """Return the texts (or pairs) of a file, and a table of its other columns.

    `text` and `text_pair` are columns, as in `extract`. Raises DataError if a column or a row's text is missing.
    """
    table = read_table(source, other="lines" if source.suffix.lower() == ".txt" else None)
    columns = columns_of(source, text, text_pair, {})
    cells = [table.column(column) for column in columns]
    for column, values in zip(columns, cells, strict=True):
        for row, cell in zip(table.rows, values, strict=True):
            if not isinstance(cell, str):
                raise DataError(
                    f"extract: {source} row {row} has no text in column '{column}'.", row=row, column=column
                )
    others = {name: values for name, values in table.columns.items() if name not in columns}
    texts: list[object] = [*(cells[0] if text_pair is None else zip(*cells, strict=True))]
    return texts, type(table)(table.path, others, table.rows)


@final
@dataclass(frozen=True)
class _Plan:
    """What one run of `extract` writes, and into which files.

    Attributes:
        bank: A bank without readers, which runs the model.
        inputs: The encoded texts.
        stack: The stack whose states are written.
        layers: The layers whose states are written.
        pooling: How the tokens of a row become one state; None: all are written.
        dtype: Type of the written numbers.
        max_length: Most tokens per text.
        pairs: Whether the texts are pairs.
    """

    bank: ReaderBank
    inputs: TextInputs
    stack: LayerStack
    layers: tuple[int, ...]
    pooling: StatesPooling | None
    dtype: str
    max_length: int
    pairs: bool

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of states per layer of each row, `[rows]`: its number of tokens, or 1 if states are pooled."""
        return np.ones(len(self.inputs.lengths), np.int64) if self.pooling else np.asarray(self.inputs.lengths)

    @property
    def row_bytes(self) -> np.ndarray:
        return self.counts * (len(self.layers) * self.stack.width * np.dtype(self.dtype).itemsize)

    @cached_property
    def parts(self) -> list[range]:
        """The rows of each file of states; a file holds about 256 MiB."""
        files = np.cumsum(self.row_bytes) // _FILE_BYTES
        edges = [0, *(np.flatnonzero(np.diff(files)) + 1).tolist(), len(files)]
        return [range(start, end) for start, end in pairwise(edges) if end > start]

    @cached_property
    def facts(self) -> dict[str, JSON]:
        """The facts that a later run must share to continue this one, JSON-ready: texts, model, layers and options."""
        return {
            "format": _PLAN_FORMAT,
            "fingerprint": fingerprint_of(self.stack),
            "settings": StackSettings.of(self.bank.model, self.stack).digest,
            "texts": self.inputs.digest,
            "stack": self.stack.name,
            "layers": list(self.layers),
            "pooling": self.pooling,
            "dtype": self.dtype,
            "max_length": self.max_length,
            "files": len(self.parts),
        }

    @cached_property
    def names(self) -> list[str]:
        return [f"states-{number:05}.npy" for number in range(len(self.parts))]

    def begin(self, folder: Path) -> None:
        """Write `facts` to the folder; or, if an earlier run has left its own there, check that the two are equal.

        The number of bytes that are still to be written is logged.

        Raises:
            StoreError: If the folder has the states of another run, or the disk has too little room for these bytes.
        """
        if is_file(folder / PLAN):
            written = read_json(folder / PLAN)
            differs = [name for name, value in self.facts.items() if written.get(name) != value]
            if differs:
                what = f"{folder} has states with other {', '.join(differs)}"
                raise StoreError(f"extract: {what}; a run only continues its own. Give another folder.")
        remove_leftovers(*(folder / name for name in self.names))
        needed = sum(
            int(self.row_bytes[rows.start : rows.stop].sum())
            for name, rows in zip(self.names, self.parts, strict=True)
            if not is_file(folder / name)
        )
        rows, tokens = pluralize(len(self.counts), "row"), f"{int(self.counts.sum()):,} states per layer"
        where = f"{decimal(needed)} to write into {pluralize(len(self.parts), 'file')} of {folder}"
        where = where if needed else f"{folder} has all of them already"
        logger.info("extract: %s, %s, %d layers, %s: %s", rows, tokens, len(self.layers), self.dtype, where)
        check_room(folder, needed)
        if not is_file(folder / PLAN):
            with atomic_write(folder / PLAN) as path:
                write_json(path, self.facts)

    def shape(self, number: int) -> list[int]:
        rows = self.parts[number]
        return [int(self.counts[rows.start : rows.stop].sum()), len(self.layers), self.stack.width]

    def write(self, number: int, path: Path, batch_size: int) -> None:
        """Write the states of the rows of file `number` to `path` as a .npy array, in passes of `batch_size` rows.

        Raises DataError or ConfigError, as `_compute` does.
        """
        rows, shape = self.parts[number], tuple(self.shape(number))
        states = np.lib.format.open_memmap(path, "w+", np.dtype(self.dtype), shape)
        firsts = np.cumsum([0, *self.counts[rows.start : rows.stop]])
        for row, values in self._compute(rows, batch_size):
            at = row - rows.start
            states[firsts[at] : firsts[at + 1]] = values
        states.flush()

    def _compute(self, rows: range, batch_size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (row number, states) for each of `rows`, in any order. States are `[tokens, layers, width]` in `dtype`.

        `tokens` is 1 if they are pooled. Raises DataError if a state is not finite, and ConfigError if the model does
        not have one state per token.
        """
        lengths = [int(self.inputs.lengths[row]) for row in rows]
        for batch in length_batches(lengths, batch_size, equal=self.inputs.equal_lengths):
            numbers = [rows.start + at for at in batch]
            tensors = {key: value.to(self.bank.device) for key, value in self.inputs.batch(numbers).items()}
            by_layer = self.bank.record_states({self.stack.name: self.layers}, tensors)[self.stack.name]
            states = torch.stack([by_layer[layer] for layer in self.layers], dim=2).float().cpu()
            if states.shape[1] != max(lengths[at] for at in batch):
                got = f"the model has {states.shape[1]} states for {max(lengths[at] for at in batch)} tokens"
                raise ConfigError(f"extract: {got}; only models with one state per token are read.")
            for number, at, row in zip(numbers, batch, states, strict=True):
                values = self._pooled(row[: lengths[at]]).to(getattr(torch, self.dtype)).numpy()
                if not np.isfinite(values).all():
                    hint = "" if self.dtype == "float32" else ", or beyond float16. Use dtype='float32'"
                    raise DataError(
                        f"extract: row {number} (from 0) has a state that is NaN or infinite{hint}.", row=number
                    )
                yield number, values

    def _pooled(self, states: Tensor) -> Tensor:
        if self.pooling is None:
            return states
        return {"first": states[:1], "last": states[-1:], "mean": states.mean(0, keepdim=True)}[self.pooling]

    def finish(self, folder: Path, table: Table) -> StatesManifest:
        """Write the rows' lengths, the table of other columns (if any) and, last, the manifest; return the manifest.

        Raises StoreError if a file cannot be written.
        """
        with atomic_write(folder / LENGTHS) as path, path.open("wb") as file:
            np.save(file, np.asarray(self.inputs.lengths, np.int64))
        if table.columns:
            write_text(folder / TABLE, "".join(_lines(table)))
        axes = ["rows" if self.pooling else "tokens", "layers", "width"]
        arrays = [
            StatesArray(file=name, axes=list(axes), shape=self.shape(number), rows=len(rows))  # pyright: ignore
            for number, (name, rows) in enumerate(zip(self.names, self.parts, strict=True))
        ]
        manifest = StatesManifest(
            rows=len(self.counts),
            depth=self.stack.depth,
            width=self.stack.width,
            layers=list(self.layers),
            arrays=arrays,
            lengths=LENGTHS,
            pooling=self.pooling,
            stack=self.stack.name,
            model=location_of(self.bank.model) or None,
            model_type=str(self.bank.model.config.model_type),
            fingerprint=str(self.facts["fingerprint"]),
            max_length=self.max_length,
            table=TABLE if table.columns else None,
            pairs=self.pairs,
            add_prefix_space=False,
        )
        with atomic_write(folder / STATES) as path:
            write_json(path, manifest.model_dump())
        return manifest


def _lines(table: Table) -> Iterator[str]:
    columns: Mapping[str, list[object]] = {str(name): list(cells) for name, cells in table.columns.items()}
    for cells in zip(*columns.values(), strict=True):
        yield json.dumps(dict(zip(columns, cells, strict=True)), default=str) + "\n"
