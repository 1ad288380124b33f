"""Infer the problem type of a task from its labels: classification, regression or multi-label."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING

from lamina.errors import DataError
from lamina.tasks import label_cells as cell_forms
from lamina.tasks.label_cells import SEPARATORS, trimmed
from lamina.tasks.labels import bad_cell
from lamina.tasks.stratify import MAX_CLASSES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from lamina.data.read import Table
    from lamina.tasks.base import ColumnSpec

_FEW_CLASSES = 20  # distinct whole numbers that are hardly meant as amounts
_SCORES = 8  # distinct whole numbers that may be scores; they are told of at level INFO, more than 20 in a warning
_LISTED = re.compile(r"\[.*,.*\]|\{.*,.*\}", re.DOTALL)  # as Postgres writes arrays
_HIDE = "set problem_type='classification' to hide this line"
logger = logging.getLogger(__name__)


def infer_problem_type(table: Table, spec: ColumnSpec) -> str:
    """Return the problem type that the labels of a table suggest.

    Lists, and texts that spell lists, are "multi_label". Numbers are "regression" if one of them has a decimal point
    and `spec.labels` does not name at least two classes. Everything else is "classification". A log message tells of
    numbers that may be meant otherwise.

    Raises:
        DataError: If some labels are lists and others are not. Without two class names in `spec.labels`, also if
            numbers with a decimal point stand among names; or if all are whole, as 1.0, and `spec.missing_labels` is
            "drop" or rows without a label were masked. Without any name in `spec.labels`, also if a text has more than
            one meaning (`_refuse_ambiguous`).
    """
    first: dict[str, tuple[int, object]] = {}  # form of a label -> the first row with it, and the cell
    are_whole, labels, values = True, spec.labels or (), set[float]()
    for row, cell in zip(table.rows, table.column(spec.label), strict=True):
        first.setdefault(_form(cell, labels), (row, cell))
        are_whole = are_whole and cell_forms.number(cell).is_integer()
        if are_whole and len(values) <= _FEW_CLASSES:
            values.add(cell_forms.number(cell))
    has_classes = len(labels) > 1
    clash = ["list", *(form for form in first if form != "list")] if "list" in first else ["number", "name"]
    if len(clash) > 1 and first.keys() >= {*clash} and not (clash[0] == "number" and has_classes):
        (first_row, first_cell), (row, cell) = sorted((first[form] for form in clash[:2]), key=itemgetter(0))
        got = f"has {cell!r} in column '{spec.label}' and row {first_row} has {first_cell!r}"
        hint = "Correct the file, or set problem_type"
        raise bad_cell(table, row, spec.label, f"{got}; all labels must have one form. {hint}.")
    if "list" in first:
        return "multi_label"
    if not labels:
        _refuse_ambiguous(table, spec.label)
    if "number" not in first or has_classes:
        if are_whole and len(values) >= _SCORES and not labels:
            level, count = logging.INFO, str(len(values))
            if len(values) > _FEW_CLASSES:
                level, count = logging.WARNING, f"more than {_FEW_CLASSES}"
            what = "label column '%s' has %s different whole numbers, each of which is read as a class"
            hint = "Set problem_type='regression' to predict numbers, or 'classification' to hide this line"
            logger.log(level, f"task: %s: {what}. {hint}.", table.path, spec.label, count)
        return "classification"
    if are_whole and (spec.missing_labels == "drop" or table.whole is not None):
        got = f"the labels in column '{spec.label}' are whole numbers with a decimal point"
        rule = "class ids are often written like that beside empty cells. Set problem_type"
        raise DataError(f"task: {got}; {rule} 'classification' or 'regression'.", path=table.path)
    what = "label column '%s' has numbers with a decimal point, so the task is a regression"
    hint = "Set problem_type='classification' if they are names of classes, or 'regression' to hide this line"
    logger.warning(f"task: %s: {what}. {hint}.", table.path, spec.label)
    return "regression"


def _form(cell: object, labels: Sequence[str]) -> str:
    """Return which form a label has: "list", "whole" (a number without a decimal point), other "number", or "name".

    A text that spells several labels is a "list", unless it is itself in `labels`.
    """
    if cell_forms.has_several(cell, labels):
        return "list"
    return "whole" if cell_forms.is_whole(cell) else "number" if cell_forms.is_number(cell) else "name"


def _refuse_ambiguous(table: Table, column: str | int) -> None:
    """Raise DataError if labels of a column may be numbers with signs, such as "1,5", or several names in one text.

    One "1,5" is enough, even beside names; numbers with other signs count only if all labels are numbers. If all of
    these are amounts such as "25%" or "$10", and at most 20, they are classes, and a warning is logged.

    A text counts as several names if one of the signs `,` `;` `|` divides it into known parts: parts that are labels of
    other rows, or parts of several texts. With a comma all parts must be known, with the other signs one is enough.
    Warnings tell of other labels that may be several names.
    """
    rows, are_numbers = dict[str, int](), True  # text -> the first row with it
    for row, cell in zip(table.rows, table.column(column), strict=True):
        if isinstance(cell, str):
            rows.setdefault(trimmed(cell), row)
        are_numbers = are_numbers and (cell_forms.is_number(cell) or cell_forms.is_formatted_number(cell))
    may_be = cell_forms.is_formatted_number if are_numbers else cell_forms.has_decimal_comma
    if signed := [text for text in rows if may_be(text)]:
        text = next((text for text in signed if not cell_forms.is_amount(text)), signed[0])
        if len(signed) > _FEW_CLASSES or not cell_forms.is_amount(text):
            got = f"has '{text}' in column '{column}', which may be a number with a comma or another sign"
            hint = "Write numbers as in 1234.5, or set problem_type to 'classification' or 'multi_label'"
            raise bad_cell(table, rows[text], column, f"{got}; labels must have one meaning. {hint}.")
        what = "label column '%s' has numbers such as '%s', each of which is read as a class"
        hint = "Write them as in 12.5 and set problem_type='regression' if they are amounts"
        logger.warning(f"task: %s: {what}. {hint}.", table.path, column, text)
    for sign in SEPARATORS:
        joined = {text: [trimmed(part) for part in text.split(sign)] for text in rows if sign in text}
        uses = Counter(part for parts in joined.values() for part in set(parts))
        for text, names in joined.items():
            known = [name in rows or uses[name] > 1 for name in names if name]
            if len(known) > 1 and (all(known) if sign == "," else any(known)):
                got = f"has '{text}' in column '{column}', and parts of it are labels of other rows"
                hint = f"Set problem_type='multi_label' and separator='{sign}' if it is several classes"
                problem = f"{got}; a label must have one meaning. {hint}, or problem_type='classification' if not."
                raise bad_cell(table, rows[text], column, problem)
    if text := next(filter(_LISTED.fullmatch, rows), None):
        what = "label column '%s' has '%s', which is read as one class"
        hint = f"If it is several classes, write every label as a list in JSON, or {_HIDE}"
        logger.warning(f"task: %s: {what}. {hint}.", table.path, column, text)
    if not are_numbers and len(rows) <= MAX_CLASSES:
        _warn_of_joined(table, column, rows)


def _warn_of_joined(table: Table, column: str | int, texts: Collection[str]) -> None:
    """Warn if a sign of punctuation or a symbol, such as "/", divides one label of a column into others.

    `texts` are the column's different labels. Hyphens, underscores and apostrophes do not count.
    """
    signs = {sign for text in texts for sign in text if unicodedata.category(sign)[0] in "PS"} - {*"-_'"}
    for sign in sorted(signs):
        names = {text: [trimmed(part) for part in text.split(sign) if trimmed(part)] for text in texts if sign in text}
        for text, parts in names.items():
            if len(parts) > 1 and all(part in texts for part in parts):
                what = "label column '%s' has %r, whose parts are labels of other rows, and it is read as one class"
                hint = f"If it is several classes, set problem_type='multi_label' and separator=%r, or {_HIDE}"
                logger.warning(f"task: %s: {what}. {hint}.", table.path, column, text, sign)
                return
