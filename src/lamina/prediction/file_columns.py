"""Choose the columns of a file that readers answer about: the text's and, for pairs, the second text's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lamina.data.read import Table, read_chunks
from lamina.errors import ConfigError, DataError
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lamina.bank import ReaderModule

logger = logging.getLogger(__name__)
USUAL_COLUMNS = ("sentence", "text", "image", "audio")  # in this order, as in the files of tasks


def columns_of(source: Path, text: str | None, text_pair: str | None, readers: Mapping[str, ReaderModule]) -> list[str]:
    """Return the column of the texts in a file and, if rows are pairs, the column of the second texts.

    Args:
        source: The file.
        text: Column of the text, image or audio clip. None: `usual_column` chooses it, and a warning names it if
            readers learnt from different columns.
        text_pair: Column of the second text. None: it is chosen as in `predict_file`, or rows are single texts.
        readers: The readers that answer, by name. Empty for a whole model.

    Raises:
        ConfigError: If both columns are the same; or if no column is named, and either a reader gives one answer about
            a pair of texts and no second column can be chosen, or readers learnt from different columns and the file
            has two of these.
        DataError: If no column is named and none is usual, or the file cannot be read.
    """
    learnt = {name: reader.info.get("columns", {}) for name, reader in readers.items()}
    kinds = {name: kind_of(str(reader.config.head.kind)) for name, reader in readers.items()}
    # The second text of a language model is the reply, which it writes itself.
    paired = [name for name, reader in readers.items() if reader.info.get("pair") and kinds[name].has_classes]
    sample = _sample(source) if text is None or (text_pair is None and paired) else None
    names = [] if sample is None else list(sample.columns)
    if text_pair is None and paired:
        sets: dict[tuple[str | None, str | None], str] = {}  # columns -> the first reader that learnt from them
        for name, own in learnt.items():
            sets.setdefault((own.get("text"), own.get("text_pair")), name)
        first, second = next(iter(sets)) if len(sets) == 1 else (None, None)
        if {first, second} <= {*names} and text in (None, first):
            text, text_pair = first, second
        needy = [name for name in paired if text is None and not kinds[name].judges_second]
        if needy:
            got = f"'{needy[0]}' was trained on pairs of texts, and {source.name} has the columns {', '.join(names)}"
            hint = f"leave '{needy[0]}' out with readers (--readers)"
            if len(sets) > 1 and (None, None) not in sets:
                needs = [f"'{name}' from {' and '.join(filter(None, columns))}" for columns, name in sets.items()]
                got = f"the readers learnt from different columns, {', '.join(needs)}"
                hint = f"predict with one reader after the other: readers=['{needy[0]}'] (--readers {needy[0]})"
            raise ConfigError(f"predict: {got}. Name two with text and text_pair (--text, --pair), or {hint}.")
    if text is None:
        singles = [name for name, own in learnt.items() if "text" in own and (text_pair or name not in paired)]
        text = _text_column(source, sample or _sample(source), {name: str(learnt[name]["text"]) for name in singles})
    if text == text_pair:
        raise ConfigError(f"read: text and text_pair are both '{text}'; the two texts are equal. Name two.")
    return [text] if text_pair is None else [text, text_pair]


def _text_column(source: Path, sample: Table, learnt: Mapping[str, str]) -> str:
    """Choose the text column of a file; `sample` has its first rows, and `learnt` is reader -> its column in training.

    A column of lists, as of words with tags, is chosen only if readers learnt from nothing else. Raises ConfigError if
    readers learnt from different columns of the file, and DataError as `usual_column` does.
    """
    names = list(sample.columns)
    lists = {
        name for name in {*learnt.values()} & {*names} if any(isinstance(cell, list) for cell in sample.cells(name))
    }
    columns = list(dict.fromkeys(name for name in learnt.values() if name not in lists)) or list(lists)
    if len([name for name in columns if name in names]) > 1:
        needs = [f"'{reader}' from {name}" for reader, name in learnt.items() if name in names and name not in lists]
        hint = f"or predict with one reader after the other: readers=['{next(iter(learnt))}'] (--readers)"
        raise ConfigError(
            f"predict: the readers learnt from different columns of {source.name}, {', '.join(needs)}; one call reads "
            f"one column. Name it with text (--text), {hint}."
        )
    column = usual_column(source, names, columns)
    if len(columns) > 1:
        what = "predict: all readers read column '%s' of %s, though they learnt from columns %s. Set text to choose it"
        logger.warning(what, column, source.name, " and ".join(columns))
    return column


def usual_column(source: Path, names: Sequence[str], learnt: Sequence[str]) -> str:
    """Choose the text column of a file among its columns `names`, if the user names none, and return it.

    It is the only column; else the column in `learnt` (which readers learnt from), if the file has just one of these;
    else the first of `USUAL_COLUMNS` that it has. Raises DataError if there is none.
    """
    known = [name for name in learnt if name in names]
    usual = known if len(known) == 1 else [name for name in USUAL_COLUMNS if name in names]
    column = names[0] if len(names) == 1 else next(iter(usual), None)
    if column is None:
        raise DataError(
            f"read: {source} has no column {' or '.join(map(repr, dict.fromkeys([*learnt, *USUAL_COLUMNS])))}; its "
            f"columns are: {', '.join(names)}. Name one of these with `text` (--text).",
            path=str(source),
        )
    return column


def _sample(source: Path) -> Table:
    """Return a file's first 100 rows; raise DataError if the file cannot be read."""
    return next(read_chunks(source, rows=100, on_bad_row=lambda _: None), None) or next(read_chunks(source))
