"""Check how a user names columns, classes and splits of a task, and read rows that are in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, UnknownNameError, check_known
from lamina.tasks.base import PARTS
from lamina.tasks.label_cells import look
from lamina.tasks.labels import is_hidden

if TYPE_CHECKING:
    import datasets

    from lamina.tasks.base import ColumnSpec

NOTHING_SPARE = (
    "every row of the train split is the only one of a class, so none can be held out for validation. Give a "
    "validation split, or more rows."
)


def input_column(text: str | int, inputs: str | int | None) -> str | int:
    """Return the column of the inputs. Users name it by `text` or by `inputs`; ConfigError if they use both."""
    if inputs is None:
        return text
    if text not in ("sentence", inputs):
        got = f"text is {text!r} and inputs is {inputs!r}"
        raise ConfigError(f"task: {got}; both options name the column of the inputs. Give one.")
    return inputs


def warn_of_cases(name: str, labels: Sequence[str]) -> None:
    """Log a warning if two class names in `labels` of the task `name` look alike.

    They differ only in case, width, spaces or unseen characters, and may be one class that was written in two ways.
    """
    first: dict[str, str] = {}
    for label in labels:
        if (other := first.setdefault(look(label), label)) != label:
            hint = "if they are one class, write them alike"
            what = f"task %s: the classes '%s' and '%s' differ in case, width, spaces or unseen characters only; {hint}"
            logger.warning(what, name, other, label)


def check_spec(spec: ColumnSpec) -> None:
    """Check that the kind of `spec` allows the user's choices in it, as far as this is known without the data.

    Raises UnknownNameError if the kind has no such problem type, or no such value of `missing_labels`; ConfigError if
    labels are empty or a label is named twice, text and label are one column, or an option is set that the kind does
    not have (`by_row`, `separator`, `text_pair`).
    """
    kind, labels = spec.kind, spec.labels
    if spec.missing_labels is not None:
        check_known("task", [spec.missing_labels], kind.missing, "missing_labels")
    if spec.problem_type is not None:
        check_known("task", [spec.problem_type], kind.problem_types, "problem type")
    if labels is not None and (not labels or len(set(labels)) < len(labels)):
        raise ConfigError(f"task: labels are {', '.join(labels) or 'none'}; every class needs its own name.")
    if spec.by_row and not kind.sequential:
        raise ConfigError(f"task: by_row is set for a task of kind {spec.kind}; it is for running text.")
    if spec.separator is not None and (not spec.separator or "multi_label" not in kind.problem_types):
        raise ConfigError(f"task: separator is {spec.separator!r}; it is a sign between labels, for 'multi_label'.")
    if kind.has_classes and not kind.sequential and spec.text == spec.label:
        raise ConfigError(
            f"task: text and label are both '{spec.label}'; a model would learn to copy. Name two columns."
        )
    if spec.text_pair is not None and not kind.reads_pairs:
        raise ConfigError(f"task: text_pair is '{spec.text_pair}'; a task of kind {spec.kind} reads one text per row.")


def classes_without_rows(names: Sequence[str], classes: Iterable[Sequence[int]]) -> list[str]:
    """Return the names of the classes that no row has; `classes` holds the class ids of each row."""
    seen = set(chain.from_iterable(classes))
    return [name for number, name in enumerate(names) if number not in seen]


logger = logging.getLogger(__name__)


def rows_by_part(
    name: str, dataset: Mapping[str, object], parts: Mapping[str, str] | None, label: str
) -> dict[str, datasets.Dataset | dict[str, list[object]]]:
    """Return `rows_of` each of "train", "validation" and "test" that a dataset has; see `Task.from_dataset`.

    `name` is the task's name, and `label` its label column. A split of another name without labels is left out, with a
    warning. Raises UnknownNameError if `parts` names a part or a split that does not exist, a split of another name has
    labels, or no split has one of these names; and the errors of `rows_of`.
    """
    if parts is None:
        named = {part: rows for part, rows in dataset.items() if part in PARTS}
        for split in (split for split in dataset if split not in PARTS):
            if not named or _has_labels(dataset[split], label):
                hint = f"Give parts={{'train': ..., 'validation': '{split}'}} to say which splits are read"
                raise UnknownNameError(op=f"task {name}", got=split, known=PARTS, what="split", hint=hint)
            logger.warning("task %s: the split '%s' has no labels, so it is left out", name, split)
    else:
        check_known(f"task {name}", parts, PARTS, "part")
        check_known(f"task {name}", parts.values(), dataset, "split of the dataset")
        named = {part: dataset[split] for part, split in parts.items()}
    return {part: rows_of(part, rows, label) for part, rows in named.items()}


def _has_labels(rows: object, label: str) -> bool:
    """Return whether a dataset, or a list of dicts, has labels in the column `label`; True for any other type.

    A cell that is empty or -1 is not a label.
    """
    if isinstance(rows, Sequence):
        return not all(is_hidden(row.get(label)) for row in rows if isinstance(row, Mapping))
    import datasets

    if not isinstance(rows, datasets.Dataset):
        return True
    return label in rows.column_names and not all(map(is_hidden, rows[label]))


def rows_of(part: str, source: object, label: str | int) -> datasets.Dataset | dict[str, list[object]]:
    """Return the rows `source` of the split `part` as a dataset; or, if they are dicts, as a mapping of columns.

    Arrays in the column `label` become lists, and a streamed dataset is read whole. Raises ConfigError if `source` is
    neither a dataset nor an iterable of dicts, or has a transform; and DataError if there are no rows.
    """
    import datasets

    if isinstance(source, datasets.IterableDataset) and source.features is not None:
        source = datasets.Dataset.from_list(list(source.decode(False)), features=source.features)  # keeps class names
    is_dataset = isinstance(source, datasets.Dataset)
    if isinstance(source, datasets.Dataset) and source.format["type"] == "custom":
        problem = f"split '{part}' has a transform (set_transform), which would change its rows each time they are read"
        raise ConfigError(f"task: {problem}. Apply it once with map, or remove it with reset_format.")
    rows: Any = source if is_dataset else [None]
    if isinstance(source, Iterable) and not isinstance(source, datasets.Dataset | str | bytes | Mapping):
        rows = list(source)
    if not is_dataset and not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"task: split '{part}' is {type(source).__name__}; it must be a Dataset or a list of dicts.")
    if len(rows) == 0:
        raise DataError(f"task: split '{part}' is empty; it needs at least one row.")
    if is_dataset:
        return rows.with_format(None)
    names = dict.fromkeys(key for row in rows for key in row)
    return {key: [_plain(row.get(key), whole=key == label) for row in rows] for key in names}


def _plain(cell: Any, *, whole: bool) -> object:  # noqa: ANN401
    """Return a NumPy or torch number as a Python number, and other cells unchanged.

    With `whole`, arrays become lists too. Columns of images or audio are read without it.
    """
    is_array = hasattr(cell, "dtype") and hasattr(cell, "tolist")
    return cell.tolist() if is_array and (whole or not getattr(cell, "ndim", 0)) else cell
