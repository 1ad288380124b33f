"""Answers to the rows of a file, a chunk at a time, in this process or by workers of Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.errors import DataError, LaminaError, NotFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lamina.prediction.predict import Predictor


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
