"""Find the rows that an annotator rejected, skipped or did not finish, as Prodigy and Label Studio mark them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.data.read import Table
    from lamina.tasks.base import ColumnSpec

_ANSWER = "answer"  # Prodigy's column
_NOT_ACCEPTED = ("reject", "ignore")  # compared one by one, because a cell may be a list


def skipped_rows(table: Table, spec: ColumnSpec) -> set[int]:
    """Return the indices of rows whose label was rejected or skipped, or is not there yet.

    There are two kinds. Rows of Prodigy have "reject" or "ignore" in a column "answer". That column counts only if all
    its cells are "accept", "reject", "ignore" or missing, and `spec` does not read it. Rows of Label Studio have an
    empty list of annotations; an empty list counts only if another cell of the label column is a list of annotations,
    which are objects with the key "result".
    """
    skipped, cells = set[int](), table.cells(spec.label)
    read = {str(column) for column in (spec.text, spec.text_pair, spec.label)}
    answers = () if _ANSWER in read else table.columns.get(_ANSWER, ())
    if all(answer in ("accept", *_NOT_ACCEPTED, None) for answer in answers):
        skipped |= {at for at, answer in enumerate(answers) if answer in _NOT_ACCEPTED}
    if any(is_annotations(cell) for cell in cells):
        skipped |= {at for at, cell in enumerate(cells) if isinstance(cell, list) and not cell}
    return skipped


def is_annotations(cell: object) -> bool:
    """Return whether a cell is the list of a task's annotations in Label Studio; an empty list is not."""
    if not isinstance(cell, list | tuple) or not cell:
        return False
    return all(isinstance(part, Mapping) and "result" in part for part in cell)
