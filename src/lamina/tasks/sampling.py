"""Subsamples of a train split: how many rows they have, and which rows these are."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.errors import ConfigError
from lamina.tasks.stratify import shares


@dataclass(frozen=True)
class SampleSize:
    """The size of a subsample; exactly one of the three fields is set.

    Attributes:
        per_class: Number of rows per class.
        fraction: Fraction of all rows, above 0 and at most 1.
        rows: Number of rows.

    Raises:
        ConfigError: If none or several are set, or a value is out of range.
    """

    per_class: int | None = None
    fraction: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        chosen = self.chosen()
        if len(chosen) != 1:
            got = " and ".join(chosen) or "nothing"
            raise ConfigError(f"subsample: {got} given; exactly one of per_class, fraction and rows is needed.")
        for name, value in chosen.items():
            is_number = isinstance(value, int | float if name == "fraction" else int) and not isinstance(value, bool)
            if not is_number or not 0 < value <= (1 if name == "fraction" else math.inf):
                rule = "above 0 and at most 1" if name == "fraction" else "a whole number of at least 1"
                raise ConfigError(f"subsample: {name} is {value!r}; it must be {rule}.")

    def chosen(self) -> dict[str, float]:
        """Return {name: value} of the field that is set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def count(self, classes: int, total: int) -> int:
        """Return the number of rows of the subsample.

        Args:
            classes: Number of classes.
            total: Number of rows to draw from.

        Raises:
            ConfigError: If the result is below 1 or above `total`, or `per_class` is set and there are no classes.
        """
        if self.per_class is not None and not classes:
            raise ConfigError(f"subsample: per_class is {self.per_class}; this task has no classes.")
        if self.fraction is not None:
            count, described = round(self.fraction * total), f"a fraction of {self.fraction}"
        else:
            count = self.rows or (self.per_class or 0) * classes
            described = f"{self.rows} rows" if self.rows else f"{self.per_class} x {classes} classes = {count} rows"
        if not 1 <= count <= total:
            got = f"{described} of {total} rows {'is no row' if count < 1 else 'were asked for'}"
            raise ConfigError(f"subsample: {got}; it must be 1 to {total} rows.")
        return count


def subsample_rows(
    names: Sequence[str], classes: Sequence[Sequence[int]], size: SampleSize, *, stratified: bool, seed: int
) -> list[int]:
    """Draw rows without replacement, and return their indices in ascending order.

    Args:
        names: Class names.
        classes: The class ids of each row.
        size: Size of the subsample.
        stratified: Whether to draw the same number of rows of each class (with `size.per_class`), or the same fraction
            of each class. False: rows are drawn uniformly.
        seed: Seed of the draw.

    Raises:
        ConfigError: If the size does not fit, or a class has too few rows.
    """
    count = size.count(len(names), len(classes))
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
