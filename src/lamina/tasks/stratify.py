"""Choose which rows are held out for validation, so that both splits have the same share of every class.

The choice depends on all label columns of the table, not on the one of a task. So tasks over one file hold out the same
rows, and share every pass of the model.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lamina.data.arrow import Column
from lamina.errors import ConfigError
from lamina.tasks.label_cells import plain

if TYPE_CHECKING:
    from lamina.data.read import Table


Strata: TypeAlias = Sequence[tuple[int, ...]]  # for each row the numbers of its classes, in all label columns
MAX_CLASSES = 1000  # a column with more values than this is not one of labels
_MOST_FIELDS = 50  # objects with more different fields, such as one per annotator, are not searched for labels
_LONGEST = 200  # characters of the longest class name
_PLAIN_FEATURES = frozenset({"Value", "ClassLabel", "List", "LargeList", "Sequence"})  # types of `datasets`


def label_columns(table: Table, texts: Collection[str], label: str | int) -> dict[str, list[list[Hashable]]]:
    """Find the columns of a table that look like labels; return column name -> one list of labels per row.

    A column counts if its cells are names, numbers or lists of them (or spans with a "label"), and it has 2 to 1,000
    different labels, at most half as many as the table has rows. An empty cell has an empty list. If no column counts,
    and `label` is a field of a column of objects ("column.field"), those fields of this column that look like labels
    are returned under such names. Objects with more than 50 different fields give {}.

    Args:
        table: The table.
        texts: Names of columns, and of fields as "column.field", that do not count.
        label: The label column of the task.
    """
    limit = min(MAX_CLASSES, len(table) // 2)
    columns = {name: cells for name, cells in table.columns.items() if _is_plain(cells)}
    labels = {name: _column_labels(cells, limit) for name, cells in columns.items() if name not in texts}
    outer, dot, _ = str(label).partition(".")
    if dot and str(label) not in table.columns and outer in columns and not any(labels.values()):
        fields = _fields(outer, columns[outer])
        labels = {name: _column_labels(cells, limit) for name, cells in fields.items() if name not in texts}
    return {name: rows for name, rows in labels.items() if rows is not None}


def _fields(column: str, cells: Sequence[object]) -> dict[str, list[list[Hashable]]]:
    """Return "column.field" -> the labels of the field in each row, for the fields whose values all can be labels.

    The dict is empty if a cell is neither an object nor missing, or there are too many fields.
    """
    fields: dict[str, list[list[Hashable] | None]] = {}
    for row, cell in enumerate(cells):
        if not isinstance(cell, Mapping | None):
            return {}
        for field, value in (cell or {}).items():
            fields.setdefault(f"{column}.{field}", [[]] * len(cells))[row] = _labels_in(value)
        if len(fields) > _MOST_FIELDS:
            return {}
    return {name: [labels or [] for labels in rows] for name, rows in fields.items() if None not in rows}


def _is_plain(cells: Sequence[object]) -> bool:
    """Return whether `cells`, a column, can be read without decoding images or audio."""
    features = cells.rows.features.values() if isinstance(cells, Column) else ()
    return all(type(part).__name__ in _PLAIN_FEATURES for feature in features for part in _nested(feature))


def _nested(feature: object) -> list[object]:
    """Return a feature of `datasets` and, if it is a list, the features of its items; for an object, those of fields.

    Lists of dicts (spans) are not opened.
    """
    if isinstance(feature, Mapping):
        return [part for field in feature.values() for part in _nested(field)]
    inner = getattr(feature, "feature", None)
    return [feature] if inner is None or isinstance(inner, dict) else [feature, *_nested(inner)]


def _column_labels(cells: Iterable[object], limit: int) -> list[list[Hashable]] | None:
    """Return the labels in each cell of a column ([] for an empty cell); None if it is not a label column.

    A label column has 2 to `limit` different labels, and each cell is empty, a label, or a list of labels.
    """
    seen: set[Hashable] = set()
    known: dict[object, list[Hashable]] = {}  # cell -> its labels; True and 1.0 would be the key 1
    rows: list[list[Hashable]] = []
    for cell in cells:
        is_key = type(cell) in (str, int)
        if (labels := known.get(cell) if is_key else None) is None:
            if (labels := _labels_in(cell)) is None:
                return None
            seen.update(labels)
            if len(seen) > limit:
                return None
            if is_key:
                known[cell] = labels
        rows.append(labels)
    return rows if len(seen) > 1 else None


def _labels_in(cell: object) -> list[Hashable] | None:
    """Return the labels in a cell as a list, empty for an empty cell; None for a long text or another type."""
    if isinstance(cell, list | tuple):
        parts = [_labels_in(part.get("label") if isinstance(part, Mapping) else part) for part in cell]
        return None if None in parts else list(dict.fromkeys(label for part in parts for label in part or ()))
    if isinstance(cell, str):
        name = cell.strip()
        return None if len(name) > _LONGEST else [name] if name else []
    cell = plain(cell) if isinstance(cell, Decimal) else cell
    if isinstance(cell, float) and math.isnan(cell):
        return []
    return [] if cell is None else [cell] if isinstance(cell, bool | int | float) else None


def strata_of(table: Table, texts: Collection[str], label: str | int) -> Strata | None:
    """Return each row's class ids over all `label_columns` of a table; None if the table has no such column.

    In a column with empty cells, "has a label" counts as one more class. For `texts` and `label` see `label_columns`.
    """
    columns, count = label_columns(table, texts, label), itertools.count()
    rows: list[list[int]] = [[] for _ in range(len(table))]
    for cells in columns.values():
        number: dict[tuple[type, Hashable], int] = defaultdict(count.__next__)
        has_gaps = not all(cells)
        for row, labels in zip(rows, cells, strict=True):
            row += [number[type(label), label] for label in labels]
            if has_gaps and labels:
                row.append(number[type(None), None])
    return [tuple(row) for row in rows] if columns else None


def choose(strata: Strata, count: int, seed: int) -> set[int]:
    """Choose `count` rows, in which each class has about the same share as in all rows; return their indices.

    `strata` has the classes of each row. At least one row of each class stays unchosen, unless too few other rows can
    replace it.

    Source:
        Rows with several classes are drawn by iterative stratification: Sechidis et al. 2011, "On the stratification of
        multi-label data".
    """
    rng = random.Random(seed)
    draw = _by_class if all(len(row) == 1 for row in strata) else _iteratively
    return spare_last(draw(strata, count, rng), strata, seed)


def _by_class(strata: Strata, count: int, rng: random.Random) -> set[int]:
    """Draw `count` rows with `rng`, from each class in proportion to its size; `strata` has one class per row."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, label in enumerate(strata):
        groups[label].append(row)
    sizes = shares([len(group) for group in groups.values()], count)
    return {row for group, size in zip(groups.values(), sizes, strict=True) for row in rng.sample(group, size)}


def _iteratively(strata: Strata, count: int, rng: random.Random) -> set[int]:
    """Draw `count` rows with `rng` by iterative stratification, for rows with several classes; return their indices.

    Classes are handled in turn, the rarest first. Each of a class's rows goes to the side, chosen or not, that lacks
    most rows of this class.
    """
    members: dict[int, list[int]] = defaultdict(list)
    order = rng.sample(range(len(strata)), len(strata))
    for row in order:
        for label in strata[row]:
            members[label].append(row)
    share = count / len(strata)
    left, done = np.zeros(max(members, default=0) + 1, np.int64), len(strata) + 1
    for label, rows in members.items():
        left[label] = len(rows)
    room, side_of = [len(strata) - count, count], dict[int, int]()
    while True:
        left[left == 0] = done
        if left[label := int(left.argmin())] == done:  # an array, since rows change the counts of thousands of classes
            break
        wanted = [len(members[label]) * (1 - share), len(members[label]) * share]
        for row in (row for row in members[label] if row in side_of):
            wanted[side_of[row]] -= 1
        for row in (row for row in members[label] if row not in side_of):
            side = int(wanted[1] > wanted[0])
            side_of[row] = side = side if room[side] > 0 else 1 - side
            room[side] -= 1
            wanted[side] -= 1
            np.subtract.at(left, list(strata[row]), 1)  # a class may come twice in a row
    rest = [row for row in order if row not in side_of]
    return {row for row, side in side_of.items() if side} | set(rest[: room[1]])


def spare_last(chosen: set[int], strata: Strata, seed: int, *, strict: bool = False) -> set[int]:
    """Exchange chosen rows so that no class has all of its rows chosen; return the new choice.

    For a class without unchosen rows, a chosen row is given back, and a row of larger classes, drawn by `seed`, is
    chosen in its place. If no row can replace it, it stays chosen; with `strict`, it is given back all the same.
    `chosen` has the indices of the chosen rows, and `strata` the class ids of each row.
    """
    left = Counter(label for row, labels in enumerate(strata) if row not in chosen for label in labels)
    lost = [row for row in sorted(chosen) if any(not left[label] for label in strata[row])]
    if not lost:
        return chosen
    chosen, returned = set(chosen), set[int]()
    others = iter(random.Random(seed).sample(range(len(strata)), len(strata)))
    for row in lost:
        if all(left[label] for label in strata[row]):  # rows of its classes were given back before
            continue
        spare = (at for at in others if all(left[label] > 1 for label in strata[at]))
        other = next((at for at in spare if at not in chosen | returned), None)
        if other is None and not strict:
            break
        chosen.remove(row)
        returned.add(row)
        left.update(strata[row])
        if other is not None:
            chosen.add(other)
            left.subtract(strata[other])
    return chosen


def shares(sizes: list[int], total: int) -> list[int]:
    """Return how many items to draw from each group: `total` in all, in proportion to the groups' `sizes`.

    Counts are rounded down, and the rest goes to the groups with the largest remainders.
    """
    exact = [total * size / sum(sizes) for size in sizes]
    whole = [int(x) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: (whole[i] - exact[i], -sizes[i]))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


@dataclass(frozen=True)
class SampleSize:
    """The size of a subsample; exactly one of the three fields is set.

    Raises ConfigError if none or several are set, or a value is out of range.

    Attributes:
        per_class: Number of rows per class.
        fraction: Fraction of all rows, above 0 and at most 1.
        rows: Number of rows.
    """

    per_class: int | None = None
    fraction: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        chosen: dict[str, Any] = {name: plain(value) for name, value in vars(self).items() if value is not None}
        if len(chosen) != 1:
            got = " and ".join(chosen) or "nothing"
            raise ConfigError(f"subsample: {got} given; exactly one of per_class, fraction and rows is needed.")
        for name, value in chosen.items():
            types, most = ((int, float), 1) if name == "fraction" else ((int,), math.inf)
            if type(value) not in types or not 0 < value <= most:
                rule = "above 0 and at most 1" if name == "fraction" else "a whole number of at least 1"
                raise ConfigError(f"subsample: {name} is {value!r:.60}; it must be {rule}.")
            object.__setattr__(self, name, value)

    def chosen(self) -> dict[str, float]:
        """Return {name: value} of the field that is set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def count(self, classes: int, total: int) -> int:
        """Return the (rounded) number of rows of the subsample, given the numbers of classes and of rows to draw from.

        Raises ConfigError if the result is below 1 or above `total`, or `per_class` is set and there are no classes.
        """
        if self.per_class is not None and not classes:
            raise ConfigError(f"subsample: per_class is {self.per_class}; this task has no classes.")
        if self.fraction is not None:
            count, described = round(self.fraction * total), f"a fraction of {self.fraction}"
        else:
            count = self.rows or (self.per_class or 0) * classes
            described = f"{self.rows} rows" if self.rows else f"{self.per_class} x {classes} classes = {count} rows"
        if not 1 <= count <= total:
            got = f"{described} of {total} rows {'is less than one row' if count < 1 else 'were asked for'}"
            raise ConfigError(f"subsample: {got}; it must be 1 to {total} rows.")
        return count


def subsample_rows(
    names: Sequence[str], classes: Sequence[Sequence[int]], size: SampleSize, *, stratified: bool, seed: int
) -> list[int]:
    """Draw rows by `seed` without replacement, and return their indices in ascending order.

    Rows are drawn uniformly. If `stratified`, each class gets the same number of rows (with `size.per_class`) or the
    same fraction of its rows; rows without exactly one class are then neither drawn nor counted. `names` are the class
    names, and `classes` the class ids of each row. Raises ConfigError if the size does not fit, or a class has too few
    rows.
    """
    count = size.count(len(names), sum(not stratified or len(numbers) == 1 for numbers in classes))
    rng = random.Random(seed)
    if not stratified:
        return sorted(rng.sample(range(len(classes)), count))
    members: list[list[int]] = [[] for _ in names]
    for row, numbers in enumerate(classes):
        if len(numbers) == 1:
            members[numbers[0]].append(row)
    sizes = [len(group) for group in members]
    counts = shares(sizes, count) if size.per_class is None else [size.per_class] * len(members)
    for name, group, needed in zip(names, members, counts, strict=True):
        if needed > len(group):
            raise ConfigError(f"subsample: {needed} rows of class '{name}' were asked for; there are {len(group)}.")
    return sorted(row for group, needed in zip(members, counts, strict=True) for row in rng.sample(group, needed))
