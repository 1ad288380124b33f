"""Read objects from JSON Lines, and from a file that is one JSON array of objects."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from lamina.data.arrow import Record
from lamina.data.row_errors import Numbered, bad_row
from lamina.errors import DataError
from lamina.utils import MAX_BYTES, RepeatedKeyError, parse_json

_EXAMPLE = 'every line is one object, as {"text": "...", "label": "..."}'


def json_rows(path: Path, lines: Numbered[str]) -> Numbered[Record]:
    """Yield (number, object) for the lines of a file that are not blank, or for the array that the whole file is.

    Numbers are those of the lines; in an array they count its entries from 1. A DataError stands for what is not an
    object. The iterator raises DataError if a file that begins with "[" is not an array, or has more than `MAX_BYTES`
    characters, unless its first line is a whole list; then its lines are read one by one.
    """
    filled = (line for line in lines if isinstance(line[1], DataError) or line[1].strip())
    held = list(islice(filled, 1))
    is_array = bool(held) and isinstance(held[0][1], str) and held[0][1].lstrip().startswith("[")
    entries = _array(path, held, filled) if is_array else None
    for number, entry in enumerate(entries or (), start=1):
        yield number, entry if isinstance(entry, dict) else bad_row(path, number, "of the array is not an object")
    for number, line in chain(held, filled) if entries is None else ():
        yield number, line if isinstance(line, DataError) else _object(path, number, line)


def _array(path: Path, held: list[tuple[int, str | DataError]], lines: Numbered[str]) -> list[object] | None:
    """Return the entries of the JSON array in a file: its first line is in `held`, and `lines`, the others, join it.

    None: the first line is a list by itself, and others follow. Errors as in `json_rows`.
    """
    size, start = 0, str(held[0][1])
    for line in lines:
        held.append(line)
        size += len(str(line[1]))
        if isinstance(line[1], DataError) or size > MAX_BYTES:
            break
    try:
        if size > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} characters")
        return parse_json("".join(str(text) for _, text in held))
    except ValueError as error:
        with suppress(ValueError):
            parse_json(start)
            return None
        reason = f"begins with '[', but cannot be read as a JSON array ({error})"
        hint = f"Write one object per line, as with: jq -c '.[]' {path.name}"
        raise DataError(f"read: {path} {reason}. {hint}", path=str(path)) from error


def _object(path: Path, number: int, text: str) -> Record | DataError:
    """Return the JSON object in `text`, line `number` of a file; a DataError if there is none, or a key comes twice."""
    try:
        record = parse_json(text)
    except RepeatedKeyError as error:
        return bad_row(path, number, f"is not clear: {error}; a row has each column once")
    except ValueError as error:
        return bad_row(path, number, f"is not JSON ({error}); {_EXAMPLE}")
    return record if isinstance(record, dict) else bad_row(path, number, f"is not an object; {_EXAMPLE}")
