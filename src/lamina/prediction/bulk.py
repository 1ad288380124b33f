"""Predict from a file of any size into another, at constant memory; a run that was killed goes on where it was.

Rows are written as they come, as JSON lines, to a file beside the output; a small file next to it says how much of it
is whole. At the end it is renamed to the output, or turned into CSV or Parquet.
"""

from __future__ import annotations

import csv
import functools
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.data.read import existing, read_chunks
from lamina.errors import ConfigError, DataError, LaminaError, NotFiniteError, StoreError, convert_errors
from lamina.prediction.predict import Predictor
from lamina.prediction.ray_workers import in_order
from lamina.store.files import locked
from lamina.train.options import PassOptions
from lamina.utils import check_range, fsync, is_file, remove_leftovers, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank

logger = logging.getLogger(__name__)

USUAL_COLUMNS = ("sentence", "text", "image", "audio")  # in this order, as a task's files are read
_OWN = ("row", "text", "text_pair")  # columns of CSV and Parquet beside those of answers
FORMATS = (".jsonl", ".csv", ".parquet")
_STATE = ("size", "rows", "read", "skipped", "bad")  # what the note says of a `Partial`
_OF_ANSWERS = {"add_prefix_space", "prefix", "max_target_length", "num_beams", "length_penalty"}
_SHOWN = 20  # rows that could not be read, of which each has a warning of its own


@dataclass(frozen=True)
class FileResult:
    """The file that was written, how many rows it has, and how many rows of the source could not be read."""

    output: Path
    rows: int
    skipped: int


def predict_file(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel,
    source: str | Path,
    output: str | Path,
    *,
    text: str | None = None,
    text_pair: str | None = None,
    readers: Sequence[str] | None = None,
    kind: str | None = None,
    processor: Any = None,
    batch_size: int = 32,
    chunk_rows: int = 1000,
    add_prefix_space: bool = False,
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_workers: int = 0,
    skip_bad: bool = False,
    resume: bool = True,
    ray: str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> FileResult:
    """Predict from every row of a file, at constant memory.

    A run that was killed goes on where it was when it is started again: no row is lost, and none is there twice.

    Args:
        bank_or_model: The readers and their model; or a whole model.
        source: JSONL, CSV, TSV, Parquet, or plain text with a text per line.
        output: JSONL, CSV or Parquet, by its ending; it appears when it is whole. A JSONL row has "row" (its line in
            the source), "text" (a pair has a list) and "readers" (name -> answer, as `predict` gives it). CSV and
            Parquet have a column for each part of an answer, such as "cola.label" and "cola.probabilities.yes"; lists
            are JSON in them.
        text: Column of the text, or of the path of the image or clip, from the source's folder on; None: the only one,
            or the first that there is of "sentence", "text", "image" and "audio".
        text_pair: Column of the second text.
        readers: Which readers; None: all.
        kind: What a whole model is asked for; None: what its head is for.
        processor: Tokenizer or image processor; None: the bank's, or the one that belongs to `model.name_or_path`.
        batch_size: Rows per pass.
        chunk_rows: Rows that are read, sorted by length and written at a time.
        add_prefix_space: As of `fit`; readers that were trained with it get it in any case.
        prefix: Stands before every text that is to be summarised or translated.
        max_target_length: Tokens of a text to write.
        num_beams: Of the search for it.
        length_penalty: Of a search with beams.
        num_workers: Processes that make batches ahead.
        skip_bad: Leave out rows that cannot be read, and count them; else the first of them ends the run.
        resume: Go on where a run with the same arguments was ended; else start anew.
        ray: Have workers of Ray answer: "local" (processes of this machine), "auto" (the cluster that runs here) or
            HOST:PORT. This process reads and writes, and the output is the same, row by row.
        workers: With `ray`, how many; None: one for each GPU of the cluster, or each core. One that dies is started
            anew, and what it had in hand is answered again.
        progress: Show a progress bar.

    Returns:
        How many rows were written and skipped.

    Raises:
        DataError: If the file or a column is missing, or a row cannot be read; names it. The rows before it are kept
            for a run with `skip_bad`.
        ConfigError: If the output's ending is unknown, it is the source, or what an earlier run left there is of other
            arguments.
        UnknownNameError: If a reader does not exist.
        StoreError: If the output cannot be written, say because the disk is full; what was whole is kept.
        MissingExtraError: If Ray is not installed.
    """
    source, output = Path(source), Path(output)
    if output.suffix.lower() not in FORMATS:
        raise ConfigError(f"predict: the output {output} ends in '{output.suffix}'; it must be {', '.join(FORMATS)}.")
    if is_file(output) and is_file(source) and output.samefile(source):
        raise ConfigError(f"predict: the output {output} is the file that is read; it would be lost. Name another.")
    check_range("predict", "chunk_rows", chunk_rows, 1, float("inf"))
    check_range("predict", "workers", workers, 1)
    if workers is not None and ray is None:
        raise ConfigError(f"predict: workers is {workers}, but ray was not given; they are processes of Ray.")
    options = PassOptions.checked(
        "predict",
        batch_size=batch_size,
        add_prefix_space=add_prefix_space,
        prefix=prefix,
        max_target_length=max_target_length,
        num_beams=num_beams,
        length_penalty=length_penalty,
        num_workers=num_workers,
    )
    predictor = Predictor(bank_or_model, options, readers=readers, kind=kind, processor=processor)
    if clash := [name for name in predictor.names if name in _OWN and output.suffix.lower() != ".jsonl"]:
        came = f"a reader is called '{clash[0]}', as a column that the output has anyway"
        raise ConfigError(f"predict: {came}. Rename it (bank.rename), or write JSONL.")
    columns = [text or usual_column(source), *([text_pair] if text_pair else [])]
    source = existing(source)
    same = {
        "source": str(source.resolve()),
        "bytes": source.stat().st_size,
        "modified": source.stat().st_mtime_ns,
        "columns": columns,
        "readers": list(predictor.names),
        "weights": predictor.digest(),
        "processor": predictor.processor_digest(),
        **options.model_dump(include=_OF_ANSWERS),
    }
    answering = Answering(predictor, source, skip_bad=skip_bad)
    with Partial.open(output, same, resume=resume) as partial:
        job = _Job(source, columns, partial, skip_bad=skip_bad)
        here = (
            functools.partial(map, answering)
            if ray is None
            else functools.partial(in_order, answering, ray, workers, "predict")
        )
        job.run(here, chunk_rows, progress=progress)
        partial.finish(output)
    if partial.skipped:
        logger.warning("predict: %d rows of %s could not be read and were left out", partial.skipped, source)
    return FileResult(output, partial.rows, partial.skipped)


def usual_column(source: Path) -> str:
    """The column of the text where none is named: the only one, or one of a usual name; else a DataError."""
    first = next(read_chunks(source, rows=1, on_bad_row=lambda _: None), None) or next(read_chunks(source, rows=1))
    names = list(first.columns)
    column = names[0] if len(names) == 1 else next((name for name in USUAL_COLUMNS if name in names), None)
    if column is None:
        raise DataError(
            f"read: {source} has no column {' or '.join(map(repr, USUAL_COLUMNS))}; its columns are: "
            f"{', '.join(names)}. Name one of these.",
            path=str(source),
        )
    return column


def read_examples(
    source: Path,
    columns: Sequence[str],
    *,
    rows: int = 1000,
    start: int = 0,
    bad: Callable[[DataError], None] | None = None,
) -> Iterator[tuple[list[int], list[Any], int]]:
    """The examples of a file, in chunks: their lines, themselves, and how many rows were parsed for them.

    Args:
        source: The file.
        columns: That of the text, and perhaps that of the second text.
        rows: Rows per chunk.
        start: Leave out so many rows of those that could be parsed.
        bad: Called with what is wrong with a row; None: that is raised, after the rows before it were handed out.
    """
    for table in read_chunks(source, columns=columns, rows=rows, start=start, on_bad_row=bad):
        lines: list[int] = []
        examples: list[Any] = []
        for line, *cells in zip(table.rows, *(table.column(name) for name in columns), strict=True):
            wrong = [(name, cell) for name, cell in zip(columns, cells, strict=True) if not isinstance(cell, str)]
            if not wrong:
                lines.append(line)
                examples.append(cells[0] if len(cells) == 1 else tuple(cells))
                continue
            column, cell = wrong[0]
            came = f"{type(cell).__name__} in column '{column}'; a text is needed"
            problem = DataError(f"read: {source} row {line} has {came}.", path=str(source), row=line, column=column)
            if bad is None:
                yield lines, examples, len(lines)
                raise problem
            bad(problem)
        yield lines, examples, len(table)


@dataclass
class Partial:
    """What was written so far, beside the output."""

    lines: Path  # the rows, as JSON lines
    note: Path  # says how much of them is whole, and of what run they are
    same: dict[str, Any]  # what the run was started with
    size: int = 0  # bytes of `lines` that are whole
    rows: int = 0  # how many rows those are
    read: int = 0  # how many rows of the source were parsed for them
    skipped: int = 0  # how many could not be read
    bad: int = -1  # the last of those that the source itself has

    @classmethod
    @contextmanager
    def open(cls, output: Path, same: dict[str, Any], *, resume: bool) -> Iterator[Partial]:
        """Begin, or go on where an earlier run was ended, which must have had the same arguments; alone with it."""
        beside = output.with_name(f".{output.name}.partial")
        partial = cls(beside, beside.with_name(f"{beside.name}.json"), same)
        with partial.writing(), ExitStack() as stack:
            output.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(beside.with_name(f"{beside.name}.lock"), output, "predict"))
            if resume and partial.note.is_file() and beside.is_file():
                partial._go_on(json.loads(partial.note.read_text(encoding="utf-8")))
            else:
                partial.note.unlink(missing_ok=True)  # before the rows that it speaks of
            remove_leftovers(partial.note)
            with beside.open("ab") as file:
                file.truncate(partial.size)
            held = stack.pop_all()
        with held:
            try:
                yield partial
            finally:
                if not partial.note.is_file():  # no row is whole, so nothing is there to go on with
                    beside.unlink(missing_ok=True)

    def _go_on(self, state: dict[str, Any]) -> None:
        for name, now in self.same.items():
            if (before := state["same"].get(name)) != now:
                raise ConfigError(
                    f"predict: {self.lines} is of an earlier run whose {name} was {before}, and now it is {now}. "
                    "Start anew with resume=False (--no-resume)."
                )
        self.size, self.rows, self.read, self.skipped, self.bad = (state[name] for name in _STATE)
        if (size := self.lines.stat().st_size) < self.size:
            raise StoreError(
                f"predict: {self.lines} has {size} bytes of the {self.size} that were written; it was cut off. "
                "Start anew with resume=False (--no-resume)."
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the system says into one sentence."""
        left = f"{self.rows} rows are kept there. Make room and start again to go on."
        where = f"predict: {self.lines.parent} cannot be written"
        with convert_errors(lambda reason: StoreError(f"{where} ({reason}); {left}")):
            yield

    def add(self, rows: Sequence[dict[str, Any]], *, read: int) -> None:
        """Write rows, then take note of them, and of the rows that were skipped."""
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
        """Put the output in place."""
        with self.writing():
            if output.suffix.lower() == ".jsonl":
                self.lines.replace(output)
            else:
                beside = output.with_name(f".{output.name}.whole")
                try:
                    (_to_csv if output.suffix.lower() == ".csv" else _to_parquet)(self._flat_rows(), beside)
                    fsync(beside)
                    beside.replace(output)
                finally:
                    beside.unlink(missing_ok=True)
            self.note.unlink(missing_ok=True)
            self.lines.unlink(missing_ok=True)

    def _flat_rows(self) -> Iterator[dict[str, Any]]:
        with self.lines.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                text = row["text"] if isinstance(row["text"], list) else [row["text"]]
                yield {
                    "row": row["row"],
                    **dict(zip(("text", "text_pair"), text, strict=False)),
                    **{key: cell for name, answer in row["readers"].items() for key, cell in _cells(name, answer)},
                }


def _cells(name: str, answer: Any) -> Iterator[tuple[str, Any]]:
    """The columns of an answer."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield from _cells(f"{name}.{key}", value)
    else:
        yield name, json.dumps(answer, ensure_ascii=False) if isinstance(answer, list) else answer


def _to_csv(rows: Iterator[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow(row)


def _to_parquet(rows: Iterator[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    from lamina.data.arrow import chunks

    parts = chunks(rows)
    first = pa.Table.from_pylist(next(parts))
    with parquet.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for part in parts:
            writer.write_table(pa.Table.from_pylist(part, schema=first.schema))


@dataclass(frozen=True)
class Chunk:
    """Rows of the source that belong together."""

    lines: Sequence[int]  # where they are in the source
    examples: Sequence[Any]
    read: int  # how many rows were parsed for them
    problems: Sequence[DataError] = ()  # with rows that could not be parsed, and are left out


@dataclass
class Answered:
    """What came of a chunk."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0
    problems: list[DataError] = field(default_factory=list)
    failed: LaminaError | None = None  # why it ends after these rows


@final
class Answering:
    """Answers chunks; it can be sent to another process."""

    def __init__(self, predictor: Predictor, source: Path, *, skip_bad: bool) -> None:
        self._predictor, self._source, self._skip_bad = predictor, str(source), skip_bad
        self._folder = source.resolve().parent  # paths of images and sound start there, as those that a task names

    def _located(self, examples: Sequence[Any]) -> Sequence[Any]:
        reads_files = self._predictor.reads_files
        return [str(self._folder / example) for example in examples] if reads_files else examples

    def begin(self) -> None:
        """Use the accelerator of the process that this is in."""
        if torch.cuda.is_available():
            self._predictor.to("cuda")

    def __call__(self, chunk: Chunk) -> Answered:
        """The rows of the output; where one cannot be read, halves are tried until it is found."""
        answered = Answered(read=chunk.read, problems=list(chunk.problems))
        try:
            for row in self._rows(chunk.lines, chunk.examples, answered.problems):
                answered.rows.append(row)
        except DataError as error:
            answered.failed, answered.read = error, len(answered.rows)
        except LaminaError as error:
            answered = Answered(failed=error)
        return answered

    def _rows(
        self, lines: Sequence[int], examples: Sequence[Any], problems: list[DataError]
    ) -> Iterator[dict[str, Any]]:
        if not examples:
            return
        try:
            answers = self._predictor(self._located(examples))
        except NotFiniteError as error:
            row = lines[error.row or 0]
            raise NotFiniteError(f"predict: {self._source} row {row}: {error}", name=error.name, row=row) from None
        except DataError as error:
            if len(examples) > 1:
                half = len(examples) // 2
                yield from self._rows(lines[:half], examples[:half], problems)
                yield from self._rows(lines[half:], examples[half:], problems)
                return
            message = f"predict: {self._source} row {lines[0]}: {error}"
            problem = DataError(message, path=self._source, row=lines[0])
            if not self._skip_bad:
                raise problem from None
            problems.append(problem)
            return
        for line, example, answer in zip(lines, examples, answers, strict=True):
            yield {"row": line, "text": example, "readers": answer}


class _Job:
    """From the rows of a file to their answers."""

    def __init__(self, source: Path, columns: Sequence[str], partial: Partial, *, skip_bad: bool) -> None:
        self._source, self._columns, self._partial, self._skip_bad = source, columns, partial, skip_bad

    def run(self, answers: Callable[[Iterator[Chunk]], Iterator[Answered]], chunk_rows: int, *, progress: bool) -> None:
        """Write everything that is not there yet."""
        from tqdm.auto import tqdm

        partial = self._partial
        with tqdm(initial=partial.rows, disable=not progress, unit="row") as bar:
            for answered in answers(self._chunks(chunk_rows)):
                for problem in answered.problems:
                    self._skip(problem)
                    partial.bad = max(partial.bad, -1 if problem.row is None else problem.row)
                partial.add(answered.rows, read=answered.read)
                bar.update(len(answered.rows))
                if answered.failed is not None:
                    raise answered.failed

    def _chunks(self, rows: int) -> Iterator[Chunk]:
        """Yield the remaining rows of the source in chunks, each with the errors of the rows before it that are bad."""
        problems: list[DataError] = []
        told = self._partial.bad  # rows after the last good one are read again

        def note(problem: DataError) -> None:
            if problem.row is None or problem.row > told:
                problems.append(problem)

        bad = note if self._skip_bad else None
        for lines, examples, read in read_examples(
            self._source, self._columns, rows=rows, start=self._partial.read, bad=bad
        ):
            yield Chunk(lines, examples, read, tuple(problems))
            problems.clear()
        if problems:
            yield Chunk([], [], 0, tuple(problems))

    def _skip(self, problem: DataError) -> None:
        self._partial.skipped += 1
        if self._partial.skipped <= _SHOWN:
            logger.warning("%s", problem)
        if self._partial.skipped == _SHOWN:
            logger.warning("predict: further rows that cannot be read are only counted")
