"""Predict from a file of any size into another, with constant memory. A killed run resumes where it stopped.

Finished rows are appended as JSON lines to a hidden file beside the output. A small JSON file records how many bytes of
it are complete. At the end the hidden file is renamed to the output, or converted to CSV or Parquet.
"""

from __future__ import annotations

import csv
import errno
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, final

import torch

from lamina.bank import ReaderBank
from lamina.data.arrow import chunks
from lamina.data.batches import Budget
from lamina.data.read import read_chunks
from lamina.data.row_errors import bad_row, existing
from lamina.errors import ConfigError, DataError, LaminaError, NotFiniteError, StoreError
from lamina.prediction.file_columns import columns_of
from lamina.prediction.predict import Predictor, Prepared
from lamina.prediction.ray_workers import in_order
from lamina.store.files import locked
from lamina.tasks.lazy_file import LazyFile, beside, name_of
from lamina.train.options import PassOptions
from lamina.utils import (
    check_range,
    check_types,
    fsync,
    is_dir,
    is_file,
    pluralize,
    remove_leftovers,
    write_errors,
    write_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.prediction.backends import Backend
    from lamina.utils import JSONObject

logger = logging.getLogger(__name__)

_OWN = ("row", "text", "text_pair")  # columns of CSV and Parquet beside those of predictions
FORMATS = (".jsonl", ".csv", ".parquet")
_STATE = ("size", "rows", "read", "skipped", "bad")  # fields of a `Partial` that its note records
# facts that cannot be quoted -> what differs between two runs
_CHANGES = {name: f"of a bank or model with other {name}" for name in ("weights", "settings")}
_CHANGES |= dict.fromkeys(("bytes", "modified"), "whose source has changed since")
_OF_ANSWERS = {"add_prefix_space", "prefix", "max_target_length", "num_beams", "length_penalty"}
_FILE_ROWS, _MOST_ROWS = 32, 512  # maximum rows of a pass: of files; of texts, which tokens usually limit first
# Maximum tokens of a pass, and its fixed cost in tokens. A longer pass would be no faster per token.
_BUDGETS = {"cpu": Budget(2048, 64), "accelerator": Budget(16384, 4096)}
_tokenizing = Lock()  # truncation is a state of the tokenizer, so two threads would cut each other's texts
_SHOWN = 20  # bad rows that are logged one by one; further ones are only counted


@dataclass(frozen=True)
class FileResult:
    """The result of `predict_file`.

    Attributes:
        output: The file that was written.
        rows: Number of rows in it.
        skipped: Number of rows of the source that were left out because they could not be read.
    """

    output: Path
    rows: int
    skipped: int


@check_types("predict_file")
def predict_file(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel,
    source: str | Path,
    output: str | Path,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    readers: Collection[str] | str | None = None,
    kind: str | None = None,
    processor: Processor | None = None,
    batch_size: int | None = None,
    chunk_rows: int = 1000,
    add_prefix_space: bool = False,
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_workers: int = 0,
    backend: Backend = "auto",
    skip_bad: bool = False,
    resume: bool = True,
    ray: str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> FileResult:
    """Predict from every row of a file, with constant memory.

    Finished rows wait in hidden files beside `output` until all are done. If the run is killed, the same call continues
    it; no row is lost or written twice.

    Args:
        bank_or_model: A bank, or a whole model.
        source: JSONL, CSV, TSV, Parquet, or plain text with one text per line.
        output: JSONL, CSV or Parquet file, by its extension. It appears, or replaces an older one, once it is complete.
            A JSONL row has "row" (line in the source, from 1), "text" (a list for a pair) and "readers" (name ->
            prediction, as `predict` returns it). CSV and Parquet have a column for each part of a prediction, such as
            "cola.label" and "cola.probabilities.yes", with lists as JSON.
        text: Column of the text, image or audio clip; paths start at the source's folder. None: the only column, the
            one that the readers learnt from, or the first of "sentence", "text", "image" and "audio".
        text_pair: Column of the second text. None: rows are pairs only if a reader other than a language model learnt
            from pairs, all readers learnt from the same two columns, the file has both, and `text` is None or the first
            of them; `text_pair` is then the second.
        readers: Names of the readers that answer. None: all readers of the bank.
        kind: Kind of task that a whole model is used for. None: what its head is for.
        processor: Tokenizer, image processor or feature extractor. None: the bank's, or that of `model.name_or_path`.
        batch_size: Rows per pass. A row is a window of tokens, an image or an audio clip. None: for texts as many rows
            of similar length as have 2,048 tokens together (16,384 on a GPU), at most 512; for other files 32.
        chunk_rows: Number of rows that are read, sorted by length and written at a time.
        add_prefix_space: Put a space before every text if the tokenizer needs one to read the first word as it reads
            any other word. False: it is put only for readers that were trained with this option.
        prefix: Text that is put before every text to summarise or translate. "": none.
        max_target_length: Maximum number of tokens to generate per example.
        num_beams: Number of beams for generating. 1: greedy decoding.
        length_penalty: Exponent of the length in beam search; above 0 prefers longer texts.
        num_workers: Number of processes that prepare batches. 0: this process prepares them.
        backend: What computes a bank's answers, as in `predict`.
        skip_bad: Leave out rows that cannot be read, and count them. False: the first such row ends the run.
        resume: Continue a stopped run, which must have had the same source, readers, weights and options that change
            answers. False: start from the first row.
        ray: Predict with workers of Ray: "local" (on this machine), "auto" (the cluster that runs here) or HOST:PORT of
            a cluster. This process reads and writes; the output is the same. None: without Ray.
        workers: Number of Ray workers. None: one per GPU of the cluster or, without GPUs, one per core. A worker that
            dies is restarted, and its rows are predicted again.
        progress: Show a progress bar.

    Returns:
        The output file, and how many rows were written and skipped.

    Raises:
        DataError: If the file or a column is missing, or a row cannot be read. The rows before it are kept: the same
            call with `skip_bad` continues after them.
        ConfigError: If the output has an unknown extension, is the source or was begun with other arguments; if options
            contradict each other; if no column is named, and a classifier of pairs, or readers of different columns,
            need one; if `text` is `text_pair`; if a reader is named as an output column; or if Ray has no such cluster.
        StoreError: If the output cannot be written, or another run writes it. Complete rows are kept.
        MissingExtraError: If `ray` is set and Ray is not installed.
        LaminaError: If a worker of Ray dies several times; or any other error of `predict`.
    """
    source, output = Path(source), Path(output)
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"predict: the output {output} ends in '{output.suffix}'; it must be {', '.join(FORMATS)}.")
    if is_file(output) and is_file(source) and output.samefile(source):
        raise ConfigError(f"predict: the output {output} is the file that is read; it would be lost. Name another.")
    if os.path.exists(output) and not is_file(output):  # noqa: PTH110  a name may be too long
        raise ConfigError(f"predict: the output {output} is a folder, pipe or device; give a file.")
    check_range("predict", "chunk_rows", chunk_rows, 1, float("inf"))
    check_range("predict", "workers", workers, 1)
    if workers is not None and ray is None:
        raise ConfigError(f"predict: workers is {workers}, but ray was not given; they are processes of Ray.")
    options = PassOptions.checked(
        "predict",
        batch_size=_FILE_ROWS if batch_size is None else batch_size,
        add_prefix_space=add_prefix_space,
        prefix=prefix,
        max_target_length=max_target_length,
        num_beams=num_beams,
        length_penalty=length_penalty,
        num_workers=num_workers,
    )
    predictor = Predictor(bank_or_model, options, readers=readers, kind=kind, processor=processor, backend=backend)
    by_tokens = batch_size is None and predictor.file is None
    if by_tokens:
        predictor.options = options.model_copy(update={"batch_size": _MOST_ROWS})
    if clash := [name for name in predictor.names if name in _OWN and output.suffix.lower() != ".jsonl"]:
        came = f"a reader has the name '{clash[0]}' of a column of the output"
        raise ConfigError(f"predict: {came}. Rename it (bank.rename), or write JSONL.")
    if is_dir(source):
        files = predictor.file
        hint = "" if files is None else f" For its {files.many}: predict(bank, {files.listing(source)})."
        raise DataError(f"predict: {source} is a folder; a file is needed.{hint}", path=str(source))
    columns = columns_of(source, text, text_pair, predictor.readers)
    source = existing(source)
    same = {
        "source": str(source.resolve()),
        "bytes": source.stat().st_size,
        "modified": source.stat().st_mtime_ns,
        "columns": columns,
        "readers": list(predictor.names),
        "weights": predictor.digest(),
        "settings": predictor.settings_digest(),
        "processor": predictor.processor_digest(),
        **({"int8": True} if backend == "int8" else {}),
        **options.model_dump(include=_OF_ANSWERS),
    }
    answering = Answering(predictor, source, skip_bad=skip_bad, by_tokens=by_tokens)
    predictor.choose_engine()  # an error, or an export, comes before the first row
    predictor.engine = None  # Ray's workers have sessions of their own
    with Partial.open(output, same, resume=resume) as partial:
        read = functools.partial(read_examples, source, columns, file=predictor.file, rows=chunk_rows)
        left = _chunks(partial, read, skip_bad=skip_bad)
        outcomes = answering.in_turn(left) if ray is None else in_order(answering, ray, workers, "predict", left)
        _write_rows(partial, outcomes, progress=progress)
        partial.finish(output)
    predictor.warn_of_blank("predict")  # Ray's workers do not count them
    if partial.skipped:
        logger.warning("predict: left out %s of %s that cannot be read", pluralize(partial.skipped, "row"), source)
    return FileResult(output, partial.rows, partial.skipped)


def read_examples(
    source: Path,
    columns: Sequence[str],
    *,
    file: type[LazyFile] | None = None,
    rows: int = 1000,
    start: int = 0,
    bad: Callable[[DataError], None] | None = None,
) -> Iterator[tuple[list[int], list[object], int]]:
    """Yield for each chunk of a file: its examples' line numbers, the examples, and how many rows were parsed.

    An example is a text or a file, or a tuple of two texts. Raises DataError if the file or a column is missing,
    and as `bad` says.

    Args:
        source: The file.
        columns: Column of the text and, for pairs, of the second text.
        file: Class of the images or audio clips in the column, in forms that `LazyFile.of` accepts. None: texts.
        rows: Rows per chunk.
        start: Number of rows to skip at the start, without counting rows that cannot be parsed.
        bad: Called with the DataError of each row that is left out. None: it is raised, after the rows before it.
    """
    wanted = "a text is needed" if file is None else f"{file.one} is {file.forms}"
    for table in read_chunks(source, columns=columns, rows=rows, start=start, on_bad_row=bad):
        lines, examples = list[int](), list[object]()
        for line, *cells in zip(table.rows, *(table.column(name) for name in columns), strict=True):
            wrong = [
                (name, cell)
                for name, cell in zip(columns, cells, strict=True)
                if not (isinstance(cell, str) if file is None else file.accepts(cell))
            ]
            if not wrong:
                lines.append(line)
                examples.append(cells[0] if len(cells) == 1 else tuple(cells))
                continue
            column, cell = wrong[0]
            problem = bad_row(source, line, f"has {type(cell).__name__} in column '{column}'; {wanted}", column)
            if bad is None:
                yield lines, examples, len(lines)
                raise problem
            bad(problem)
        yield lines, examples, len(table)


@dataclass
class Partial:
    """The unfinished output of `predict_file`: a hidden file of rows, and a JSON note of how much is done.

    `lines` is the file of rows (JSON lines), `note` the note, and `same` the arguments that a resumed run must share.
    The first `size` bytes of `lines` are complete: `rows` rows, from the first `read` rows of the source that could be
    parsed. So far `skipped` rows were left out, parsed or not; the last of them has number `bad` (-1: none).
    """

    lines: Path
    note: Path
    same: JSONObject
    size: int = 0
    rows: int = 0
    read: int = 0
    skipped: int = 0
    bad: int = -1

    @classmethod
    @contextmanager
    def open(cls, output: Path, same: JSONObject, *, resume: bool) -> Iterator[Partial]:
        """Yield the unfinished output for the file `output`, locked inside the `with` block.

        With `resume`, the rows of an earlier run stay; without, they are removed. At the end, hidden files without a
        complete row are deleted. Raises ConfigError if `resume` is set and the earlier run had arguments other than
        `same`; StoreError if the folder cannot be written, the hidden file was cut off, or another run holds the lock.
        """
        beside = output.with_name(f".{output.name}.partial")
        partial = cls(beside, beside.with_name(f"{beside.name}.json"), same)
        with partial.writing(), ExitStack() as stack:
            if output.parent.exists() and not output.parent.is_dir():  # `mkdir` would say "File exists"
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(beside.with_name(f"{beside.name}.lock"), output, "predict"))
            if resume and partial.note.is_file() and beside.is_file():
                partial._go_on(json.loads(partial.note.read_text(encoding="utf-8")))
            else:
                partial.note.unlink(missing_ok=True)  # before the rows that it describes
            remove_leftovers(partial.note)
            with beside.open("ab") as file:
                file.truncate(partial.size)
            held = stack.pop_all()
        with held:
            try:
                yield partial
            finally:
                if not partial.rows:  # there is nothing to resume from
                    partial.note.unlink(missing_ok=True)
                    beside.unlink(missing_ok=True)

    def _go_on(self, state: JSONObject) -> None:
        """Set the counters to those in `state`, the note of an earlier run.

        Raises ConfigError if that run had other arguments; StoreError if its file was cut off.
        """
        for name in dict.fromkeys([*self.same, *state["same"]]):  # "int8" is only there if it is True
            if (before := state["same"].get(name)) != (now := self.same.get(name)):
                differs = _CHANGES.get(name, f"whose {name} was {before}, and now it is {now}")
                hint = "Start again with resume=False (--no-resume)."
                raise ConfigError(f"predict: {self.lines} belongs to an earlier run {differs}. {hint}")
        self.size, self.rows, self.read, self.skipped, self.bad = (state[name] for name in _STATE)
        if (size := self.lines.stat().st_size) < self.size:
            raise StoreError(
                f"predict: {self.lines} has {size} bytes of the {self.size} that were written; it was cut off. "
                "Start again with resume=False (--no-resume)."
            )

    def writing(self) -> AbstractContextManager[None]:
        """Convert any error but Lamina's own in the `with` block to a StoreError, which says how many rows are kept."""
        left, hint = f"{self.rows} rows are kept there", "Free space and run again to continue."
        return write_errors(f"predict: {self.lines.parent}", *((left, hint) if self.rows else ("", "")))

    def add(self, rows: Sequence[JSONObject], *, read: int) -> None:
        """Append `rows`, the output of the next `read` source rows, and save all counters.

        Raises StoreError if that fails; `size`, `rows` and `read` are then as before.
        """
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace")
        state = (self.size + len(data), self.rows + len(rows), self.read + read, self.skipped, self.bad)
        with self.writing():
            with self.lines.open("ab") as file:
                file.truncate(self.size)
                file.write(data)
            fsync(self.lines)
            write_text(self.note, json.dumps({"same": self.same, **dict(zip(_STATE, state, strict=True))}))
        self.size, self.rows, self.read, self.skipped, self.bad = state

    def finish(self, output: Path) -> None:
        """Write the complete output file from the partial rows, and delete the files of the partial output.

        An existing file at `output` is replaced, only once the new one is complete. Raises StoreError if the folder
        cannot be written; the partial rows then stay.
        """
        with self.writing():
            if output.suffix.lower() == ".jsonl":
                self.lines.replace(output)
            else:
                beside = output.with_name(f".{output.name}.whole")
                try:
                    (_to_csv if output.suffix.lower() == ".csv" else _to_parquet)(self._flat_rows, beside)
                    fsync(beside)
                    beside.replace(output)
                finally:
                    beside.unlink(missing_ok=True)
            self.note.unlink(missing_ok=True)
            self.lines.unlink(missing_ok=True)

    def _flat_rows(self) -> Iterator[JSONObject]:
        """Yield each finished row as a flat dict, column -> value, for CSV and Parquet."""
        with self.lines.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                text = row["text"] if isinstance(row["text"], list) else [row["text"]]
                yield {
                    "row": row["row"],
                    **dict(zip(("text", "text_pair"), text, strict=False)),
                    **{key: cell for name, answer in row["readers"].items() for key, cell in _cells(name, answer)},
                }


def _cells(name: str, answer: object) -> Iterator[tuple[str, object]]:
    """Yield (column, value) for each value in the answer of the reader `name`: keys joined by dots, lists as JSON."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield from _cells(f"{name}.{key}", value)
    else:
        yield name, json.dumps(answer, ensure_ascii=False) if isinstance(answer, list) else answer


def _to_csv(rows: Callable[[], Iterator[JSONObject]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for row in rows():
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)


def _to_parquet(rows: Callable[[], Iterator[JSONObject]], path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema({"row": pa.int64(), "text": pa.string()})  # files may have no path in any row
    for part in chunks(rows()):  # types fit all rows: a column may begin with None, or with whole numbers
        schema = pa.unify_schemas([schema, pa.Table.from_pylist(part).schema], promote_options="permissive")
    with parquet.ParquetWriter(path.absolute(), schema) as writer:  # pyarrow expands a "~" in front of a path
        for part in chunks(rows()):
            writer.write_table(pa.Table.from_pylist(part, schema=schema))


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file.

    Attributes:
        lines: The line of each example in the file; see `Table.rows`.
        examples: The examples.
        read: Number of rows that could be parsed: the examples, and rows whose cell is no example.
        problems: Errors of rows that were left out.
    """

    lines: Sequence[int]
    examples: Sequence[object]
    read: int
    problems: Sequence[DataError] = ()


@dataclass
class Answered:
    """The outcome of a `Chunk`.

    Attributes:
        rows: Output rows.
        read: `Chunk.read`; after a DataError, the number of output rows.
        problems: Errors of rows that were left out.
        failed: The error that ends the run; None: there is none.
    """

    rows: list[JSONObject] = field(default_factory=list)
    read: int = 0
    problems: list[DataError] = field(default_factory=list)
    failed: LaminaError | None = None


@final
class Answering:
    """Predicts the rows of a `Chunk` when called. Objects of this class can be sent to Ray workers.

    Args:
        predictor: The readers, or the model, that answer.
        source: The file of the rows; paths of images and audio clips start at its folder.
        skip_bad: Whether rows that cannot be read are left out. False: the first one ends the run.
        by_tokens: Whether passes are limited by their tokens too. False: by rows only.
    """

    def __init__(self, predictor: Predictor, source: Path, *, skip_bad: bool, by_tokens: bool) -> None:
        self._predictor, self._source, self._skip_bad = predictor, str(source), skip_bad
        self._folder, self._by_tokens = source.resolve().parent, by_tokens

    def begin(self) -> None:
        """Move the model to this process's GPU, if there is one."""
        if torch.cuda.is_available():
            self._predictor.to("cuda")

    def in_turn(self, chunks: Iterator[Chunk]) -> Iterator[Answered]:
        """Yield the outcome of each chunk. While the model runs, a thread reads and tokenises the next chunk.

        If `chunks` raises an error, it is raised here once the chunks before it have been answered.
        """

        def prepared() -> tuple[Chunk, Prepared | LaminaError] | None:
            chunk = next(chunks, None)
            return None if chunk is None else (chunk, self._prepare(chunk.examples))

        with ThreadPoolExecutor(1) as thread:
            following = thread.submit(prepared)
            while (ready := following.result()) is not None:
                following = thread.submit(prepared)
                yield self(*ready)

    def _prepare(self, examples: Sequence[object]) -> Prepared | LaminaError:
        """Return the examples (paths start at the source's folder) encoded for the model, or the LaminaError."""
        try:
            with _tokenizing:
                if self._predictor.file is not None:
                    examples = [beside(self._folder, example) for example in examples]
                return self._predictor.prepare(examples)
        except LaminaError as error:
            return error

    def __call__(self, chunk: Chunk, prepared: Prepared | LaminaError | None = None) -> Answered:
        """Return the outcome of a chunk. Errors of Lamina are stored in it, not raised.

        After a DataError the outcome has the rows before the bad one; after another error it has no rows. If the
        examples cannot be encoded together, halves are tried, until the bad row is found.

        Args:
            chunk: The chunk.
            prepared: What `_prepare` returned for the chunk's examples. None: they are not encoded yet.
        """
        answered = Answered(read=chunk.read, problems=list(chunk.problems))
        try:
            for row in self._rows(chunk.lines, chunk.examples, answered.problems, prepared):
                answered.rows.append(row)
        except DataError as error:
            answered.failed, answered.read = error, len(answered.rows)
        except LaminaError as error:
            answered = Answered(failed=error)
        return answered

    def _rows(
        self,
        lines: Sequence[int],
        examples: Sequence[object],
        problems: list[DataError],
        prepared: Prepared | LaminaError | None = None,
    ) -> Iterator[JSONObject]:
        """Yield the output row of each example; `lines` are the examples' numbers in the source.

        `prepared` is as in `__call__`. Errors of bad rows are appended to `problems` if bad rows are skipped; otherwise
        DataError is raised. Raises NotFiniteError if an output is NaN or infinite.
        """
        if not examples:
            return
        try:
            prepared = self._prepare(examples) if prepared is None else prepared
            if isinstance(prepared, LaminaError):
                raise prepared
            budget = _BUDGETS["cpu" if self._predictor.device.type == "cpu" else "accelerator"]
            answers = self._predictor.predict(prepared, budget=budget if self._by_tokens else None)
        except NotFiniteError as error:
            row = lines[error.row or 0]
            raise NotFiniteError(f"predict: {self._source} row {row}: {error}", name=error.name, row=row) from None
        except DataError as error:
            if len(examples) > 1:
                half = len(examples) // 2
                yield from self._rows(lines[:half], examples[:half], problems)
                yield from self._rows(lines[half:], examples[half:], problems)
                return
            problem = DataError(f"predict: {self._source} row {lines[0]}: {error}", path=self._source, row=lines[0])
            if not self._skip_bad:
                raise problem from None
            problems.append(problem)
            return
        for line, example, answer in zip(lines, examples, answers, strict=True):
            yield {"row": line, "text": name_of(example), "readers": answer}


def _chunks(
    partial: Partial, read: Callable[..., Iterator[tuple[list[int], list[object], int]]], *, skip_bad: bool
) -> Iterator[Chunk]:
    """Yield the rows that are not written yet in chunks. With `skip_bad`, a chunk also has the errors of bad rows.

    Errors that an earlier run has counted are left out. `read` takes the options `start` and `bad` of `read_examples`.
    """
    problems: list[DataError] = []
    told = partial.bad  # a resumed run parses bad rows after the last good one again

    def note(problem: DataError) -> None:
        if problem.row is None or problem.row > told:
            problems.append(problem)

    for lines, examples, count in read(start=partial.read, bad=note if skip_bad else None):
        yield Chunk(lines, examples, count, tuple(problems))
        problems.clear()
    if problems:
        yield Chunk([], [], 0, tuple(problems))


def _write_rows(partial: Partial, outcomes: Iterator[Answered], *, progress: bool) -> None:
    """Write the outcomes of chunks, in order, and count and log rows that cannot be read, the first 20 one by one.

    `progress` shows a bar. Raises an outcome's error once its rows are written, and StoreError as `Partial.add` does.
    """
    from tqdm.auto import tqdm

    with tqdm(initial=partial.rows, disable=not progress, unit="row") as bar:
        for answered in outcomes:
            for problem in answered.problems:
                partial.skipped += 1
                partial.bad = max(partial.bad, -1 if problem.row is None else problem.row)
                if partial.skipped <= _SHOWN:
                    logger.warning("%s", problem)
                if partial.skipped == _SHOWN:
                    logger.warning("predict: further rows that cannot be read are only counted")
            partial.add(answered.rows, read=answered.read)
            bar.update(len(answered.rows))
            if answered.failed is not None:
                raise answered.failed
