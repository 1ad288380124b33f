"""Find the rows that stay in a task, and those that Prodigy or Label Studio mark as rejected, skipped or unfinished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from lamina.tasks.label_cells import is_missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.data.read import Table
    from lamina.tasks.base import ColumnSpec

_ANSWER = "answer"  # Prodigy's column
_BESIDE = frozenset({"_input_hash", "_task_hash", "_session_id", "_view_id", "_annotator_id"})  # others of Prodigy
_NOT_ACCEPTED = ("reject", "ignore")  # compared one by one, because a cell may be a list


def skipped_rows(table: Table, spec: ColumnSpec) -> set[int]:
    """Return the indices of rows whose label was rejected or skipped, or is not there yet.

    Rows of Prodigy have "reject" or "ignore" in a column "answer". That column counts only if `spec` does not read it
    and all its cells are "accept", "reject", "ignore" or missing. The table must also have another column of Prodigy,
    such as "_input_hash", or a label that is a list of objects (spans).

    Rows of Label Studio have an empty list as label. It counts only if another label is a list of annotations, which
    are objects with the key "result".
    """
    skipped, cells = set[int](), table.cells(spec.label)
    read = {str(column) for column in (spec.text, spec.text_pair, spec.label)}
    answers = () if _ANSWER in read else table.columns.get(_ANSWER, ())
    rejected = {at for at, answer in enumerate(answers) if answer in _NOT_ACCEPTED}
    if rejected and all(answer in ("accept", *_NOT_ACCEPTED, None) for answer in answers):
        is_marked = not _BESIDE.isdisjoint(table.columns) or any(map(_is_objects, cells))
        skipped |= rejected if is_marked else set()
    if any(is_annotations(cell) for cell in cells):
        skipped |= {at for at, cell in enumerate(cells) if isinstance(cell, list) and not cell}
    return skipped


def kept_rows(table: Table, spec: ColumnSpec, *, texts: bool = False) -> list[int]:
    """Return the indices of the rows that stay in a task, with a label or masked, as `labels.labelled` decides.

    A missing label raises no error here: its row stays, unless it is dropped. `texts` says whether labels are texts to
    generate.
    """
    is_drop, labels = spec.missing_labels == "drop", () if texts else spec.labels or ()
    skipped = skipped_rows(table, spec) if is_drop or spec.missing_labels is None else set[int]()
    cells = enumerate(table.cells(spec.label))
    return [at for at, cell in cells if not (at in skipped or (is_drop and is_missing(cell, labels, texts=texts)))]


def kept_table(table: Table, spec: ColumnSpec, count: int) -> Table | None:
    """Return the rows of a table that stay in its task; None if they are not `count` rows, one per example."""
    if spec.kind.has_classes and count < len(table):
        table = table.select_rows(kept_rows(table, spec))
    return table if count == len(table) else None


def is_annotations(cell: object) -> bool:
    """Return whether a cell is the list of a task's annotations in Label Studio; an empty list is not."""
    return _is_objects(cell) and all("result" in part for part in cell)


def _is_objects(cell: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    """Return whether a cell is a list of objects; an empty list is not."""
    return isinstance(cell, list | tuple) and bool(cell) and all(isinstance(part, Mapping) for part in cell)
