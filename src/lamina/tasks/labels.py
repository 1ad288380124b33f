"""Read the columns of a table: texts, class ids, numbers, and 0 and 1 per class.

A cell that has another form raises a DataError that names the file, the row and the column.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from typing import TypeVar, cast

from lamina.data.arrow import Column
from lamina.data.read import Table
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError
from lamina.tasks import label_cells as cell_forms
from lamina.tasks.annotator_marks import kept_rows, skipped_rows
from lamina.tasks.base import ColumnSpec
from lamina.tasks.label_cells import SEPARATORS, LabelCellError, class_name, is_hidden, is_missing, plain, trimmed
from lamina.tasks.metrics import usual_positive
from lamina.tasks.stratify import label_columns

T = TypeVar("T")
_FLAGS = re.compile(r"[01]{2,}|[01](\s+[01])+")
_SHOWN = 10  # rows that a warning names
logger = logging.getLogger(__name__)


# Rows without a label


def labelled(tables: Mapping[str, Table], spec: ColumnSpec, *, texts: bool = False) -> dict[str, Table]:
    """Handle rows without a label, log how many there are, and return the tables without them.

    `spec.missing_labels` says how: "drop" removes them, "error" and "ignore" raise DataError, and "mask" keeps them in
    `Table.whole`, from which the examples are made (see `with_gaps`). None: "mask" if the kind allows it and
    another column looks like the labels of another task (see `label_columns`), else "error". Rows that an annotator
    rejected, skipped or did not finish (see `skipped_rows`) count as rows without a label, whatever their cell holds.
    For them None means "drop", and "ignore" means "mask".

    A label is missing if the cell is None, NaN or blank, or a text such as "NA" or "null" that is not among
    `spec.labels`. A list with a missing entry counts as missing too. Splits that `with_labels` leaves out are left out
    here too. Any other split without a label, or without the label column, raises DataError.

    Args:
        tables: Split name -> table.
        spec: Which column has the labels, and what to do with rows without a label.
        texts: Whether labels are texts to generate; then "null" is a text like any other.
    """
    return {part: labelled_table(table, spec, texts=texts) for part, table in with_labels(tables, spec).items()}


def with_labels(tables: Mapping[str, Table], spec: ColumnSpec) -> dict[str, Table]:
    """Return the tables without the splits whose labels are secret, as in published test sets; a warning names these.

    A split other than "train" is left out if it has no column with the label's or a similar name, but "train" has one
    (or, without "train", another split). A split whose labels are all empty or -1 is left out too, except if -1 is a
    class (in `spec.labels` or in "train"), or if no split would be left. Raises DataError if any other split beside
    "train" lacks the column.
    """
    others = {part: table for part, table in tables.items() if part != "train" and len(tables) > 1}
    lacking = {part for part, table in others.items() if not _has_like(table, str(spec.label))}
    if ("train" in tables and not _has_like(tables["train"], str(spec.label))) or len(lacking) == len(tables):
        lacking = set[str]()  # the column is missing everywhere
    hidden = {part for part in others.keys() - lacking if all(map(is_hidden, others[part].cells(spec.label)))}
    train = tables["train"].cells(spec.label) if hidden and "train" in tables else ()
    if "-1" in (spec.labels or ()) or any(is_hidden(cell) and not is_missing(cell, texts=True) for cell in train):
        hidden = set[str]()  # -1 is a class
    if len(lacking | hidden) == len(tables):
        hidden = set[str]()  # no split would be left
    for part in sorted(lacking | hidden):
        what = "has no label in column '%s' (every cell is -1 or empty)" if part in hidden else "has no column '%s'"
        logger.warning(f"task: %s {what}, so it is left out of the task", others[part].path, spec.label)
    return {part: table for part, table in tables.items() if part not in lacking | hidden}


def _has_like(table: Table, column: str) -> bool:
    """Return whether a table has a column, or one of a similar name, which may be meant.

    Always True for a table whose columns are numbers (CoNLL).
    """
    names, either = [name.lower() for name in table.columns], (column.lower(), column.lower().partition(".")[0])
    return table.numbered or any(get_close_matches(name, names, cutoff=0.75) for name in either)


def with_gaps(labels: Iterable[T], table: Table, gap: Callable[[int], T]) -> Iterator[T]:
    """Yield a label for every row of `table.whole`: the next of `labels` for a row that is in `table`, else `gap(row)`.

    `row` is the row's index in `table.whole`. If `table.whole` is None, no row lacks a label: yield just `labels`.
    """
    if table.whole is None:
        yield from labels
        return
    following, places = iter(labels), set(table.places)
    for row in range(len(table.whole)):
        yield next(following) if row in places else gap(row)


def labelled_table(table: Table, spec: ColumnSpec, *, texts: bool) -> Table:
    """Return one table without the rows that have no label, or raise DataError; see `labelled`.

    If rows are masked, they stay in `whole` of the result.
    """
    column, labels = spec.label, () if texts else spec.labels or ()
    cells, skipped, how = enumerate(table.cells(column)), skipped_rows(table, spec), spec.missing_labels
    missing = {at: cell for at, cell in cells if at in skipped or is_missing(cell, labels, texts=texts)}
    if not missing:
        return table
    refused = [at for at in missing if how == "error" or at not in skipped]
    is_allowed = how in ("drop", "mask", cell_forms.EvaluateOnly.MASK_NULLS)
    if refused and how is None and "mask" in spec.kind.missing:  # allowed if another task may share the rows
        own = {str(column) for column in (spec.text, spec.text_pair, spec.label)}
        is_allowed = bool(label_columns(table, own, spec.label))
    if refused and not is_allowed:
        at = refused[0]
        raise _no_label(table, table.rows[at], spec, missing[at], is_skipped=at in skipped)
    kept = kept_rows(table, spec, texts=texts)
    if not (present := [at for at in kept if at not in missing]):
        hint = "a part of a task needs one. Fill the column, or name another with label (--label)"
        raise DataError(f"task: {table.path} has no row with a label in column '{column}'; {hint}.", path=table.path)
    masked = {at: missing[at] for at in kept if at in missing}
    dropped = {at: cell for at, cell in missing.items() if at not in masked}
    _warn_of_missing(table, spec, dropped, skipped, "are left out")
    _warn_of_missing(table, spec, masked, skipped, "give no loss and no score")
    rest, places = table.select_rows(present), [place for place, at in enumerate(kept) if at not in masked]
    whole = table if len(kept) == len(table) else table.select_rows(kept)
    return replace(rest, whole=whole, places=places) if masked else rest


def listed(rows: Sequence[int | str]) -> str:
    """Return the first ten of some row numbers or names as text for a warning, and "..." if there are more."""
    return ", ".join(map(str, rows[:_SHOWN])) + ", ..." * (len(rows) > _SHOWN)


def _warn_of_missing(
    table: Table, spec: ColumnSpec, missing: Mapping[int, object], skipped: Collection[int], fate: str
) -> None:
    """Log which rows of a table have no label. `missing` has their indices and label cells; {}: nothing is logged.

    Texts that count as missing are quoted if `spec.missing_labels` is None. `skipped` has the indices of rows that an
    annotator rejected, skipped or did not finish. `fate` says what becomes of the rows, as in "are left out".
    """
    if not missing:
        return
    what, hint = f"have no label in column '{spec.label}' and {fate}", ""
    texts = [trimmed(cell) for at, cell in missing.items() if at not in skipped and isinstance(cell, str)]
    quoted = [repr(text) for text in texts if text]
    if quoted and spec.missing_labels is None:
        label = "empty or " * (len(quoted) < len(missing)) + listed([*dict.fromkeys(quoted)])
        what = f"{fate}, because their label in column '{spec.label}' is {label}"
        hint = ". If one of these texts is a class, name all classes in labels"
    unfinished = sum(at in skipped for at in missing)
    if unfinished:
        hint += f". The annotator rejected, skipped or did not finish {unfinished} of them"
    count, numbers = f"{len(missing)} of {len(table)}", listed([table.rows[at] for at in missing])
    logger.warning("task: %s: %s rows %s (rows %s)%s", table.path, count, what, numbers, hint)


def _no_label(table: Table, row: int, spec: ColumnSpec, cell: object, *, is_skipped: bool) -> DataError:
    """Return the DataError for the row with the number `row`, whose label `cell` is missing.

    A text such as "NA" is quoted, as it may be a name. `is_skipped` says that the row's annotator rejected, skipped or
    did not finish it.
    """
    got, hint = f"has no label in column '{spec.label}'", "Give missing_labels='drop' to leave such rows out"
    cells, is_open = table.cells(spec.label), spec.problem_type is None and "multi_label" in spec.kind.problem_types
    if "mask" in spec.kind.missing:
        hint = f"{hint}, 'mask' to keep them for other tasks over the same rows"
    if is_skipped:
        got = f"{got} that counts: its annotator rejected, skipped or did not finish it"
    elif isinstance(cell, str) and (name := cell.strip()):
        got, hint = f"{got} ({name})", f"{hint}, or labels=['{name}', ...] if that is a class"
    elif spec.problem_type == "multi_label" and spec.missing_labels is not None and cell == [None]:
        hint += ", or leave missing_labels out, and an empty text is no class"
    elif is_open and isinstance(cell, str) and any(";" in text or "|" in text for text in map(str, cells)):
        hint += ", or problem_type='multi_label' if a cell has several classes and may be empty"
    return bad_cell(table, row, spec.label, f"{got}; every row needs one. {hint}.")


# Class names


def infer_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct class names in order: sorted as numbers if all are whole numbers, otherwise as texts."""
    names = sorted(set(names))
    return tuple(sorted(names, key=Decimal if all(map(cell_forms.is_whole, names)) else None))


def are_unnamed(names: Sequence[str]) -> bool:
    """Return whether class names are LABEL_0, LABEL_1 and so on, which transformers writes if no names are given."""
    return list(names) == [f"LABEL_{number}" for number in range(len(names))]


def class_labels(tables: Mapping[str, Table], column: str | int, *, several: bool = False) -> tuple[str, ...]:
    """Return the class names that occur in a column of the train split, in the order of `infer_labels`.

    With `several`, a cell may have any number of classes. If the cells are lists of 0 and 1 per class, the names are
    "0", "1" and so on. Raises DataError if only some lists are like that, there is no train split, a cell is no class
    name, a list has a negative whole number, the column has no classes, two names mean the same number, or bools stand
    among numbers.
    """
    table = label_source(tables)
    if several and (width := hot_width([table], column, None)):
        return tuple(map(str, range(width)))
    seen: dict[str, tuple[int, object]] = {}
    for row, cell in _cells(table, column):
        with cell_errors(table, row, column):
            for part in cell_forms.parts(cell) if several else [_single(cell)]:
                seen.setdefault(name := class_name(part), (row, part))
                if several and name[:1] == "-" and cell_forms.is_whole(name):
                    raise LabelCellError(cell_forms.shown(cell), "; a list holds names, or 0 and 1 per class, not -1.")
    if not seen:
        raise DataError(f"task: {table.path} has no class in any row of column '{column}'.", path=table.path)
    _refuse_two_spellings(table, column, seen)
    return infer_labels(seen)


def _refuse_two_spellings(table: Table, column: str | int, seen: Mapping[str, tuple[int, object]]) -> None:
    """Raise DataError if two class names mean the same number, such as "1" and "1.0", or bools are mixed with numbers.

    `seen` maps each name to its row and cell.
    """
    bools = [(row, cell) for row, cell in seen.values() if isinstance(plain(cell), bool)]
    others = [cell for _, cell in seen.values() if cell_forms.is_number(cell)]
    if bools and others:
        got = f"has {bools[0][1]} in column '{column}', and another row has {others[0]!r}"
        raise bad_cell(table, bools[0][0], column, f"{got}; labels are bools or numbers, not both. Correct the file.")
    numbers: dict[Decimal, str] = {}
    for name, (row, _) in seen.items():
        if cell_forms.is_number(name) and (other := numbers.setdefault(Decimal(name), name)) != name:
            got = f"has label '{name}' in column '{column}', and another row has '{other}'"
            raise bad_cell(table, row, column, f"{got}, the same number; a class has one spelling. Correct the file.")


def label_source(tables: Mapping[str, Table]) -> Table:
    """Return the train split's table, from which class names are read; raise DataError if there is no such split."""
    if "train" not in tables:
        raise DataError("task: neither a train split nor labels were given; class names come from one of them.")
    return tables["train"]


def check_names(labels: object) -> tuple[str, ...] | None:
    """Return the class names that a user passed, in form NFC and without blanks at their ends; None stays None.

    Raises ConfigError if `labels` is no list (or another ordered iterable), or one of the names is not a text.
    """
    if labels is None:
        return None
    if isinstance(labels, Iterable) and not isinstance(labels, str | Mapping | set | frozenset):
        names = cast("list[str]", [*labels])
        if all(isinstance(name, str) for name in names):
            return tuple(map(trimmed, names))  # the value of a name that is an enum of texts
    raise ConfigError(f"task: labels are {labels!r}; a list of class names is needed.")


def with_declared_names(spec: ColumnSpec, tables: Mapping[str, Table]) -> ColumnSpec:
    """Return `spec` with the class names that the data declare for the label column; names in `spec` take precedence.

    For a regression, or if nothing is declared, `spec` is returned unchanged. Raises ConfigError if the names in `spec`
    do not contain the declared names in the same order. Declared names that are just the numbers of the classes may be
    replaced by as many names.
    """
    for table in tables.values() if spec.kind.has_classes and spec.problem_type != "regression" else ():
        names = tuple(map(trimmed, table.class_names.get(str(spec.label), ())))
        if not names:
            continue
        if spec.labels is None:
            return replace(spec, labels=names)
        in_order = [name for name in spec.labels if name in names]
        if in_order != list(names) and names != tuple(map(str, range(len(spec.labels)))):
            got = f"labels are {', '.join(spec.labels)}, but column '{spec.label}' of {table.path} has the class names"
            rule = "the same names must come in the same order. Leave labels out, or rename the column's classes"
            raise ConfigError(f"task: {got} {', '.join(names)}; {rule}.")
    return spec


# Columns


def texts(table: Table, column: str | int) -> Sequence[str]:
    """Return a column of texts; raise DataError if it does not exist, or for the first cell that is not a text."""
    for row, cell in _cells(table, column):
        if not isinstance(cell, str):
            got = type(cell).__name__
            raise bad_cell(table, row, column, f"has no text in column '{column}' but {got}; this kind reads text.")
    return table.column(column)


def numbers(table: Table, column: str | int) -> Iterator[float]:
    """Yield a column of numbers as floats; raise DataError if it is missing, or for a cell that is no finite number."""
    for row, cell in _cells(table, column):
        value = cell_forms.number(cell)
        if not math.isfinite(value):
            hint = " Write it as in 1234.5." if cell_forms.is_formatted_number(cell) else ""
            got = f"has '{cell}' in column '{column}'; a regression task needs a number"
            raise bad_cell(table, row, column, f"{got}.{hint}")
        yield value


def has_known_ids(spec: ColumnSpec, labels: Sequence[str]) -> bool:
    """Return whether label cells may hold class ids: positions in `labels`, the class names of a task.

    They may if the user gave the names, or the data declare them (both are in `spec.labels`). Names that were read from
    the train split are sorted, and another split may number its classes in another order. They have ids only if their
    order is the usual one, as that of "no" and "yes", or LABEL_0 and LABEL_1.
    """
    return spec.labels is not None or _has_usual_order(labels)


def _has_usual_order(names: Sequence[str]) -> bool:
    """Return whether `names` are unnamed classes, or a pair like "no" and "yes" in the usual order."""
    return (len(names) == 2 and usual_positive(names) == names[1]) or are_unnamed(names)


def warn_of_ids(tables: Mapping[str, Table], spec: ColumnSpec, *, is_hot: bool = False) -> None:
    """Log a warning for each table whose labels are class ids, if `spec.labels` are sorted and there is no train split.

    Such names were probably sorted by Lamina in an earlier training, so a user may not know the order. Names like "no"
    and "yes", the second of which is the usual positive class, have a known order, as do numbers, and LABEL_0 and
    LABEL_1. `is_hot` says that the labels are lists of 0 and 1 per class.
    """
    names = spec.labels or ()
    is_clear = list(names) != sorted(names) or any(map(cell_forms.is_number, names)) or _has_usual_order(names)
    unclear = () if is_clear or "train" in tables else tables.values()
    for table in unclear:
        if not any(map(_holds_ids, table.cells(spec.label))):
            continue
        what, order = "class ids", listed([f"{number} = {name}" for number, name in enumerate(names)])
        if is_hot:
            what, order = "lists of 0 and 1 per class", f"{listed(names)}, in this order"
        hint = "If that is wrong, write the names into the file"
        logger.warning("task: %s: %s in column '%s' are read as %s. %s.", table.path, what, spec.label, order, hint)


def _holds_ids(cell: object) -> bool:
    """Return whether a label cell is a whole number, or a list of nothing else; one of them is not -100."""
    cell = plain(cell)
    entries = [_whole(entry) for entry in (cell if isinstance(cell, list) else [cell])]
    return all(map(cell_forms.is_whole, entries)) and any(str(entry).strip() != str(IGNORED) for entry in entries)


def _whole(cell: object) -> object:
    """Return a float that is a whole number as an int, and any other cell as it is: a gap makes a column floats."""
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell


def class_ids(table: Table, column: str | int, labels: Sequence[str], *, has_known_ids: bool = True) -> Iterator[int]:
    """Yield a column of class names, or of lists with one name, as ids (positions in `labels`).

    With `has_known_ids`, cells may also hold ids, unless a class name is a number. A number stands for the class whose
    name has its value, as 1 for "1.0". Raises DataError for a missing column, a name that is not in `labels`, and a
    cell that is empty or not a name.
    """
    index = _index(labels, has_known_ids=has_known_ids)
    for row, cell in _cells(table, column):
        yield _id(table, row, column, cell, index, labels)


def _index(labels: Sequence[str], *, has_known_ids: bool) -> dict[str, int]:
    """Return class name -> id, its position in `labels`.

    With `has_known_ids`, ids as texts are keys too, unless a name is a number.
    """
    index = {trimmed(name): number for number, name in enumerate(labels)}
    if has_known_ids and not any(map(cell_forms.is_number, labels)):
        index |= {str(number): number for number in range(len(labels))}
    return index


def _id(table: Table, row: int, column: str | int, cell: object, index: dict[str, int], labels: Sequence[str]) -> int:
    """Return the id of the class in a cell, looked up in `index`; raise DataError if it is not a class of `labels`.

    Another spelling of a number among `labels` is added to `index`, so that it is searched for only once.
    """
    with cell_errors(table, row, column):
        name = class_name(_single(cell, index), index)
    if name not in index:
        numbers = enumerate(labels if cell_forms.is_number(name) else ())
        same = [at for at, label in numbers if cell_forms.is_number(label) and Decimal(label) == Decimal(name)]
        if len(same) != 1:
            raise unknown_label(table, row, column, cell, labels)
        index[name] = same[0]
    return index[name]


def _single(cell: object, labels: Collection[str] = ()) -> object:
    """Return the only entry of a list, or of a text that spells one and is not in `labels`; other cells unchanged.

    Raises LabelCellError if a list has a list or a mapping in it.
    """
    entries = cell_forms.parts(cell) if cell_forms.has_several(cell, labels) else ()
    return entries[0] if len(entries) == 1 else cell


@contextmanager
def cell_errors(table: Table, row: int, column: str | int) -> Iterator[None]:
    """Convert a LabelCellError raised in the `with` block to a DataError that names file, row and column."""
    try:
        yield
    except LabelCellError as error:
        raise bad_cell(table, row, column, f"has {error.got} in column '{column}'{error.rule}") from None


def _cells(table: Table, column: str | int) -> Iterator[tuple[int, object]]:
    """Return pairs (row number in the file, cell) of a column; DataError if the column or a cell is missing."""
    return zip(table.rows, table.column(column), strict=True)


# Several classes per row


def _check_flags(tables: Mapping[str, Table], spec: ColumnSpec) -> None:
    """Raise DataError if every label is a text of 0 and 1 per class, such as "010", and `spec.labels` is not set."""
    cells = [cell for table in tables.values() for cell in table.cells(spec.label)]
    if cells and not spec.labels and all(isinstance(cell, str) and _FLAGS.fullmatch(cell.strip()) for cell in cells):
        got = f"has {cells[0]!r} in column '{spec.label}', and so has every row: 0 and 1 per class"
        hint = "Write it as [0, 1, 0], or give labels= if these are names of classes"
        table = next(iter(tables.values()))
        raise bad_cell(table, table.rows[0], spec.label, f"{got}. {hint}.")


def as_lists(tables: Mapping[str, Table], spec: ColumnSpec) -> dict[str, Table]:
    """Return the tables of `with_labels` with each label cell as a list, for tasks with any number of classes per row.

    A cell with text holds a list in JSON or Python, or names with a separator between them. The separator is
    `spec.separator`. If it is None, and only one of the signs `,` `;` `|` occurs in the column, that sign is the
    separator. If several occur, it is the sign that divides all texts into names of `spec.labels`. A blank text becomes
    [] (no class), or [None] (a missing label) if the user set `missing_labels` and the problem type "multi_label". A
    warning is logged if all cells are texts with at most one label, or if each is a list with one and
    `spec.problem_type` is None.

    Raises DataError if the column is missing, `label_cells.parts` cannot read a cell (such as a mapping, or a list in a
    list), all labels are texts such as "010", or several signs occur and `spec.labels` does not decide.
    """
    tables, labels = with_labels(tables, spec), frozenset(spec.labels or ())
    separator = spec.separator or _separator(tables, spec.label, labels)
    by_default = spec.missing_labels in (None, cell_forms.EvaluateOnly.MASK_NULLS)
    is_chosen = spec.problem_type == "multi_label" and not by_default
    decode = partial(cell_forms.parts, separator=separator, labels=labels, is_blank_missing=is_chosen)
    changed: dict[str, Table] = {}
    counts, are_texts, are_flags = set[int](), True, True
    for part, table in tables.items():
        cells = table.cells(spec.label)
        for row, cell in zip(table.rows, cells, strict=True):
            with cell_errors(table, row, spec.label):
                counts.add(len(names := decode(cell)))
                are_texts = are_texts and isinstance(cell, str)
                are_flags = are_flags and all(map(cell_forms.is_flag, names))
        lists = cells.then(decode) if isinstance(cells, Column) else [decode(cell) for cell in cells]
        changed[part] = replace(table, columns={**table.columns, str(spec.label): lists})
    if are_texts and max(counts, default=0) <= 1:
        _check_flags(tables, spec)
        what = "task: no row has more than one label in column '%s'; if another sign divides them, give separator="
        logger.warning(what, spec.label)
    elif counts == {1} and spec.problem_type is None and not are_flags:
        what = "task: every row has a list with one label in column '%s', and is read as if it could have several"
        logger.warning(f"{what}. Set problem_type='classification' if a row has exactly one class.", spec.label)
    return changed


def _separator(tables: Mapping[str, Table], column: str | int, labels: Collection[str]) -> str | None:
    """Return the sign that divides the texts of a column into names; None if no sign occurs.

    Raises DataError if several signs occur, and `labels` do not settle which one divides names.
    """
    first: dict[str, tuple[Table, int]] = {}  # sign -> the first row with it
    fits = dict.fromkeys(SEPARATORS, True)  # sign -> whether it divides all texts into labels
    for table in tables.values():
        for row, cell in zip(table.rows, table.cells(column), strict=True):
            if not isinstance(cell, str) or trimmed(cell) in labels or cell_forms.has_several(cell):
                continue
            for sign in SEPARATORS:
                fits[sign] = fits[sign] and all(trimmed(part) in labels for part in cell.split(sign))
                if sign in cell:
                    first.setdefault(sign, (table, row))
    signs = [sign for sign in first if fits[sign]] if labels and len(first) > 1 else list(first)
    if len(signs) == 1 or not first:
        return signs[0] if signs else None
    *others, last = (f"'{sign}'" for sign in first)
    which = "which both" if len(first) == 2 else "all of which"
    got = f"has one of the signs {', '.join(others)} and {last}, {which} occur in column '{column}'"
    table, row = first[list(first)[1]]
    raise bad_cell(table, row, column, f"{got}; one of them divides labels. Give separator='{next(iter(first))}'.")


def hot_width(tables: Iterable[Table], column: str | int, labels: Sequence[str] | None) -> int | None:
    """Return the number of classes if a column's lists are 0 and 1 per class; None if they hold names or ids.

    Lists count as 0 and 1 per class if all entries are 0 or 1 and all lists have the same length: the length of
    `labels`, or at least 2 if `labels` is None.

    Raises DataError if only some lists are like that, and a list of 0 and 1 cannot hold ids. It cannot if it has bools,
    or if it has 0 or 1 twice and an entry per label. With 0 or 1 twice and another length, it can only hold ids if (a)
    its table has a list with a single entry or with entries other than 0 and 1, and (b) the table's lists differ in
    length, or none has an entry per label.
    """
    width, sure = None if labels is None else len(labels), False
    other: tuple[Table, int, Sequence[object]] | None = None  # the first list that is not 0 and 1 per class
    for table in tables:
        lengths, are_ids, twice = set[int](), False, False
        for row, cell in _cells(table, column):
            entries = cell_forms.parts(cell)
            is_hot = all(map(cell_forms.is_flag, entries))
            width = len(entries) if width is None else width
            if other is None and not (is_hot and len(entries) == width):
                other = table, row, entries
            lengths.add(len(entries))
            are_ids |= not is_hot or len(entries) == 1
            repeats = is_hot and len(set(entries)) < len(entries)
            twice |= repeats
            sure |= is_hot and any(isinstance(part, bool) for part in entries)
            sure |= repeats and labels is not None and len(entries) == width
        sure |= twice and not (are_ids and (len(lengths) > 1 or width not in lengths))
    if sure and other is not None:
        table, row, entries = other
        rule = f"lists of 0 and 1 have one entry for each of {width} classes"
        got = f"has a list of {len(entries)} in column '{column}' ({cell_forms.shown(entries)})"
        raise bad_cell(table, row, column, f"{got}; {rule}. Correct the file, or give the right labels.")
    return width if other is None and width and (sure or labels or width > 1) else None


def multi_hot(
    table: Table, column: str | int, labels: Sequence[str], *, is_hot: bool, has_known_ids: bool = True
) -> Iterator[tuple[int, ...]]:
    """Yield each list of a column as 0 and 1 per class. The lists hold that already (`is_hot`), or names or ids.

    Names and ids follow the rules and errors of `class_ids`, as does `has_known_ids`. DataError is also raised for a
    list of 0 and 1 per class if the column's type declares class ids. Such a list has an entry per class, all 0 or 1,
    and one of these twice.
    """
    index = _index(labels, has_known_ids=has_known_ids)
    for row, cell in _cells(table, column):
        with cell_errors(table, row, column):
            entries = cell_forms.parts(cell)
        if is_hot:
            yield tuple(int(part) for part in entries)  # pyright: ignore[reportArgumentType]  flags
        else:
            ids = {_id(table, row, column, part, index, labels) for part in entries}
            if len(ids) < len(entries) == len(labels) and max(ids) < 2 and str(column) in table.class_names:
                got = f"has {cell_forms.shown(entries)} in column '{column}', which seems to be 0 and 1 per class"
                rule = "its type says that it holds class ids. Cast it to a list of Value('int64'), and give labels="
                raise bad_cell(table, row, column, f"{got}; {rule}.")
            yield tuple(int(number in ids) for number in range(len(labels)))


def usual_column(column: str | int, default: str, usual: str, tables: Mapping[str, Table]) -> str | int:
    """Return the column to read: the user's choice `column`, which is `default` if the user made none.

    If no table has a column `default`, but some table has a column `usual`, `usual` takes the place of the default.
    """
    absent = column == default and not any(default in table.columns for table in tables.values())
    return usual if absent and any(usual in table.columns for table in tables.values()) else column


def without_classes(spec: ColumnSpec, labels: tuple[str, ...], problem_type: str, instead: str) -> ColumnSpec:
    """Return `spec` with fixed labels and problem type, for a kind whose classes users cannot choose.

    Raises:
        ConfigError: If the user passed other labels. The message says what the kind has in their place: `instead`.
    """
    if spec.labels not in (None, labels):
        got = f"labels are {', '.join(spec.labels or ())}"
        raise ConfigError(f"task: {got}; a task of kind {spec.kind} has {instead} in their place.")
    return replace(spec, labels=labels, problem_type=problem_type)


# Errors


def bad_cell(table: Table, row: int, column: str | int, problem: str) -> DataError:
    """Return a DataError for a cell; its message is the file, the `row` as the file numbers it, and `problem`.

    `problem` begins with a verb, and names the column itself.
    """
    return DataError(f"task: {table.path} row {row} {problem}", path=table.path, row=row, column=str(column))


def unknown_label(table: Table, row: int, column: str | int, cell: object, labels: Sequence[str]) -> DataError:
    """Return the DataError for a cell with a label that is not one of `labels`.

    It suggests a similar label, if any; for a whole number that could be an id, `labels=`.
    """
    lowered = [] if cell_forms.is_number(cell) else [name.lower() for name in labels]
    close = get_close_matches(str(cell).strip().lower(), lowered, n=1, cutoff=0.75)
    hint = f" Did you mean '{labels[lowered.index(close[0])]}'?" if close and lowered.count(close[0]) == 1 else ""
    if cell_forms.is_number(cell) and str(_whole(cell)).strip() in map(str, range(len(labels))):
        hint = " If it is a class id, give labels=[...] with the names in the order of their ids."
        if any(map(cell_forms.is_number, labels)):
            hint = " Some of these names are numbers, so cells hold names, never ids."
    return bad_cell(table, row, column, f"has label '{cell}'; the labels are: {', '.join(labels)}.{hint}")
