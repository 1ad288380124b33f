"""Read CoNLL files: one line per word with its columns, and a blank line after every sentence.

Some lines are skipped: comments (lines that begin with `#` before the first word of a sentence), "-DOCSTART-" lines, a
header, and the lines of CoNLL-U that repeat words (`1-2`, `8.1`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeAlias

from lamina.errors import DataError

# Lines without line ends, and sentences (number of the column as text -> its cells): each with the number of its first
# line in the file, or with the error that describes it.
Lines: TypeAlias = Iterator[tuple[int, str | DataError]]
Sentences: TypeAlias = Iterator[tuple[int, dict[str, list[str]] | DataError]]

_BLANKS = re.compile(r"[ \t]+")
_REPEATED = re.compile(r"\d+[-.]\d+")  # number of a multi-word token or an empty node in CoNLL-U
_CONLLU_COLUMNS = 10
_SPAN_TAG = re.compile(r"O|[BIESLUMW][-_].+")
_HEADER = re.compile(
    r"#|id|sentence( #|_id)?|tokens?|words?|form|text|lemma|[ux]?pos|(pos_|ner_)?tags?|chunk|labels?|ner|iob|bio",
    re.IGNORECASE,
)
logger = logging.getLogger(__name__)


def sentences(path: str, read: Callable[[], Lines]) -> Sentences:
    """Yield the sentences of a CoNLL file, each with the number of its first line.

    Each line is a word with its columns, separated by tabs or blanks; a blank line or "-DOCSTART-" ends a sentence. A
    sentence is replaced by a DataError if one of its lines cannot be read, or has not as many columns as the file's
    first line.

    Args:
        path: Name of the file for messages.
        read: Function that opens the file at its beginning. It is called again if a line may be a comment or a word.
    """
    words: list[list[str]] = []  # cells of each word of the current sentence
    first = width = 0  # the sentence's first line; number of columns in the file; 0: not known yet
    problem: DataError | None = None  # what is wrong with the current sentence
    facts: tuple[int, frozenset[str]] | None = None  # of `_columns_and_tags`, once it was needed
    for number, text in chain(read(), ((0, ""),)):
        if isinstance(text, DataError):
            first, problem = first or number, problem or text
            continue
        cells = _cells(text)
        if text.strip() and "-DOCSTART-" not in cells:
            if text.startswith("#") and not words:
                facts = facts or _columns_and_tags(read())
                if _is_comment(cells, *facts):
                    continue
            if len(cells) == _CONLLU_COLUMNS and _REPEATED.fullmatch(cells[0]):
                continue
            if not width and _is_header(cells):
                logger.warning("read: %s row %d (%s) is a header, not a word, and is left out", path, number, text)
                continue
            width = width or len(cells)
            if len(cells) != width:
                reason = f"row {number} has {len(cells)} columns; the file has {width}"
                problem = problem or DataError(f"read: {path} {reason}.", path=path, row=number)
            words.append(cells)
            first = first or number
            continue
        if first:
            yield first, problem or {str(i): list(column) for i, column in enumerate(zip(*words, strict=True))}
        words, first, problem = [], 0, None


def _cells(text: str) -> list[str]:
    """Return the cells of a line: divided at tabs if there are some, otherwise at blanks."""
    return text.split("\t") if "\t" in text else _BLANKS.split(text.strip(" "))


def _is_header(cells: list[str]) -> bool:
    """Return whether the first line of a file is a header: at least two cells, all of them usual names of columns."""
    return len(cells) > 1 and all(_HEADER.fullmatch(cell.strip()) for cell in cells)


def _columns_and_tags(lines: Lines) -> tuple[int, frozenset[str]]:
    """Return the number of columns of the first line without `#` in front, and the last cells of all such lines."""
    rows = (_cells(text) for _, text in lines if isinstance(text, str) and text.strip() and not text.startswith("#"))
    rows = (cells for cells in rows if "-DOCSTART-" not in cells)
    first = next(rows, [])
    return len(first), frozenset(cells[-1] for cells in chain([first], rows) if cells)


def _is_comment(cells: list[str], columns: int, tags: frozenset[str]) -> bool:
    """Return whether a line that begins with `#` is a comment, and not the word "#".

    It is a comment if it has more or fewer columns than lines with words, or its last cell is no tag. `tags` are the
    last cells of all lines that do not begin with `#`.
    """
    return len(cells) != columns or (cells[-1] not in tags and not _SPAN_TAG.fullmatch(cells[-1]))
