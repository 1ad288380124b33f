"""Rows that a user has in memory: choose the splits of a dataset that a task reads, and return rows as columns."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, UnknownNameError, check_known
from lamina.tasks.base import PARTS
from lamina.tasks.label_cells import is_hidden

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)


def rows_by_part(
    name: str, dataset: Mapping[str, object], parts: Mapping[str, str] | None, label: str
) -> dict[str, datasets.Dataset | dict[str, list[object]]]:
    """Return those of "train", "validation" and "test" that a dataset has, each with the result of `rows_of`.

    `name` is the task's name, `label` its label column, and `parts` as in `Task.from_dataset`. Without `parts`, a split
    of another name is left out with a warning if it has no labels. If it has labels, or all splits have other names,
    UnknownNameError is raised. With `parts`, UnknownNameError is raised if it names a part or split that does not
    exist. `rows_of` raises ConfigError for rows of another type, and DataError for a split without rows.
    """
    if parts is None:
        named = {part: rows for part, rows in dataset.items() if part in PARTS}
        for split in (split for split in dataset if split not in PARTS):
            if not named or _has_labels(dataset[split], label):
                (part,) = get_close_matches(split.lower(), PARTS, n=1) or ("validation",)
                more = "" if part == "train" else "'train': ..., "
                hint = f"Give parts={{{more}'{part}': '{split}'}} to say which splits are read"
                raise UnknownNameError(op=f"task {name}", got=split, known=PARTS, what="split", hint=hint)
            logger.warning("task %s: the split '%s' has no labels, so it is left out", name, split)
    else:
        check_known(f"task {name}", parts, PARTS, "part")
        check_known(f"task {name}", parts.values(), dataset, "split of the dataset")
        named = {part: dataset[split] for part, split in parts.items()}
    return {part: rows_of(part, rows, label) for part, rows in named.items()}


def _has_labels(rows: object, label: str) -> bool:
    """Return whether a dataset, or a list of dicts, has labels in the column `label`; True for any other type.

    A cell that is empty or -1 is not a label. `label` may be "outer.inner", as in `Table.cells`.
    """
    import datasets

    columns, (outer, _, inner) = getattr(rows, "column_names", None), label.partition(".")
    if isinstance(rows, datasets.Dataset | datasets.IterableDataset) and columns is not None:
        if not (wanted := [name for name in columns if name in (label, outer)]):
            return False
        rows = rows.select_columns(wanted).with_format(None)  # pandas and arrow yield no dicts
    if not isinstance(rows, Sequence | datasets.Dataset | datasets.IterableDataset):
        return True
    cells = (row[label] if label in row else row.get(outer) for row in rows if isinstance(row, Mapping))
    return not all(is_hidden(cell.get(inner) if isinstance(cell, Mapping) else cell) for cell in cells)


def rows_of(part: str, source: object, label: str | int) -> datasets.Dataset | dict[str, list[object]]:
    """Return the rows `source` of the split `part` as a dataset; or, if they are dicts, as a mapping of columns.

    A key that a dict lacks gives None. Arrays in the column `label` become lists; a streamed dataset is read whole.
    Raises ConfigError if `source` is neither a dataset nor an iterable of dicts, or has a transform; and DataError if
    there are no rows.
    """
    import datasets

    if isinstance(source, datasets.IterableDataset) and source.features is not None:
        files = datasets.Features({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
        is_file = (datasets.Audio, datasets.Image)  # encoding them again would need a decoder
        kinds = {name: files if isinstance(kind, is_file) else kind for name, kind in source.features.items()}
        source = datasets.Dataset.from_list(list(source.decode(False)), features=datasets.Features(kinds))
    is_dataset = isinstance(source, datasets.Dataset)
    if isinstance(source, datasets.Dataset) and source.format["type"] == "custom":
        problem = f"split '{part}' has a transform (set_transform), which would change its rows each time they are read"
        raise ConfigError(f"task: {problem}. Apply it once with map, or remove it with reset_format.")
    rows: Any = source if is_dataset else [None]
    if isinstance(source, Iterable) and not isinstance(source, datasets.Dataset | str | bytes | Mapping):
        rows = list(source)
    if not is_dataset and not all(isinstance(row, Mapping) for row in rows):
        hint = ""
        if type(source).__module__.partition(".")[0] == "pandas":
            hint = " Give frame.to_dict('records')."
        elif isinstance(source, list | tuple):
            number, row = next((number, row) for number, row in enumerate(rows, 1) if not isinstance(row, Mapping))
            hint = f" Its row {number} is {type(row).__name__}."
        rule = "it must be a Dataset or a list of dicts"
        raise ConfigError(f"task: split '{part}' is {type(source).__name__}; {rule}.{hint}")
    if len(rows) == 0:
        raise DataError(f"task: split '{part}' is empty; it needs at least one row.")
    if is_dataset:
        return rows.with_format(None)
    names = dict.fromkeys(key for row in rows for key in row)
    return {key: [_plain(row.get(key), whole=key == label) for row in rows] for key in names}


def _plain(cell: Any, *, whole: bool) -> object:  # noqa: ANN401
    """Return a NumPy or torch number as a Python number, an array of texts as a list, and other cells unchanged.

    With `whole`, arrays of numbers become lists too. Columns of images or audio are read without it.
    """
    is_array = hasattr(cell, "dtype") and hasattr(cell, "tolist")
    is_plain = whole or not getattr(cell, "ndim", 0) or getattr(getattr(cell, "dtype", None), "kind", "") in "OU"
    return cell.tolist() if is_array and is_plain else cell
