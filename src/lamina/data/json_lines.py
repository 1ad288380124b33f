"""Read objects from JSON Lines, and from a file that is one JSON array of objects."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from lamina.data.arrow import Record
from lamina.data.row_errors import Numbered, bad_row
from lamina.errors import DataError
from lamina.utils import MAX_BYTES, RepeatedKeyError, parse_json

_EXAMPLE = 'every line is one object, as {"text": "...", "label": "..."}'


def json_rows(path: Path, lines: Numbered[str]) -> Numbered[Record]:
    """Yield (line number, object) for each line of a file that is not blank; if the file is one array, for its entries.

    The entries of an array are numbered from 1. A line or entry that is not an object, or a line with a key twice, is
    replaced by a DataError. `lines` are those of `read_lines`; `path` is for messages.

    A file whose first line begins with "[" is read whole, as an array. This fails if the file is no array, an object
    has a key twice, a line cannot be read, or there are more than `MAX_BYTES` (67 million) characters. After a failure,
    a file whose first filled line alone is a list, or whose second is an object, is read line by line. For any other
    file, the iterator raises DataError.
    """
    filled = (line for line in lines if isinstance(line[1], DataError) or line[1].strip())
    held = list(islice(filled, 1))
    if held and isinstance(held[0][1], str) and held[0][1].lstrip().startswith("["):
        held = list(_while_readable(chain(held, filled)))
        entries = _array(path, [line for _, line in held])
        if entries is not None:
            for number, entry in enumerate(entries, start=1):
                is_row = isinstance(entry, dict)
                yield number, entry if is_row else bad_row(path, number, "of the array is not an object")
            return
    for number, line in chain(held, filled):
        yield number, line if isinstance(line, DataError) else _object(path, number, line)


def _while_readable(lines: Numbered[str]) -> Numbered[str]:
    """Yield lines; end after the first DataError, or once they have more than `MAX_BYTES` characters together."""
    size = 0
    for number, line in lines:
        yield number, line
        size += len(str(line))
        if isinstance(line, DataError) or size > MAX_BYTES:
            return


def _array(path: Path, lines: Sequence[str | DataError]) -> list[object] | None:
    """Return the entries of the JSON array in `lines`; None if the file is to be read line by line.

    `lines` are those of `_while_readable`, and the first begins with "[". Raises DataError if they are neither an array
    nor to be read line by line; see `json_rows`.
    """
    text = "".join(map(str, lines))
    try:
        if isinstance(lines[-1], DataError):
            raise lines[-1]
        if len(text) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} characters")
        return parse_json(text)
    except ValueError as error:  # a DataError is one too
        for line, kind in zip(lines[:2], (list, dict), strict=False):
            with suppress(ValueError):
                if isinstance(parse_json(str(line)), kind):
                    return None
        if isinstance(error, DataError):
            raise
        problem = f"begins with '[', but cannot be read as a JSON array ({error})."
        if not isinstance(error, RepeatedKeyError):
            problem += f" Write one object per line, as with: jq -c '.[]' {path.name}"
        raise DataError(f"read: {path} {problem}", path=str(path)) from error


def _object(path: Path, number: int, text: str) -> Record | DataError:
    """Return the JSON object in `text`, line `number` of a file; a DataError if there is none, or a key comes twice."""
    try:
        record = parse_json(text)
    except RepeatedKeyError as error:
        return bad_row(path, number, f"is not clear: {error}; a row has each column once")
    except ValueError as error:
        return bad_row(path, number, f"is not JSON ({error}); {_EXAMPLE}")
    return record if isinstance(record, dict) else bad_row(path, number, f"is not an object; {_EXAMPLE}")
