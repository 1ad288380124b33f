"""Fewer rows to learn from: how many, and which."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lamina.errors import ConfigError
from lamina.tasks.split import shares


@dataclass(frozen=True)
class SampleSize:
    """How many rows a subsample has: so many times the number of classes, a fraction of all, or so many."""

    per_class: int | None = None
    fraction: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        given = self.given()
        if len(given) != 1:
            came = " and ".join(given) or "nothing"
            raise ConfigError(f"subsample: {came} given; exactly one of per_class, fraction and rows is needed.")
        for name, value in given.items():
            is_number = isinstance(value, int | float if name == "fraction" else int) and not isinstance(value, bool)
            if not is_number or not 0 < value <= (1 if name == "fraction" else math.inf):
                rule = "above 0 and at most 1" if name == "fraction" else "a whole number of at least 1"
                raise ConfigError(f"subsample: {name} is {value!r}; it must be {rule}.")

    def given(self) -> dict[str, float]:
        """The one that was given, by its name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def count(self, classes: int, total: int) -> int:
        """Rows of the subsample, 1 to `total`; else, or without classes to multiply by, a ConfigError."""
        if self.per_class is not None and not classes:
            raise ConfigError(f"subsample: per_class is {self.per_class}; this task has no classes.")
        if self.fraction is not None:
            count, said = round(self.fraction * total), f"a fraction of {self.fraction}"
        else:
            count = self.rows or (self.per_class or 0) * classes
            said = f"{self.rows} rows" if self.rows else f"{self.per_class} x {classes} classes = {count} rows"
        if not 1 <= count <= total:
            came = f"{said} of {total} rows {'is no row' if count < 1 else 'were asked for'}"
            raise ConfigError(f"subsample: {came}; it must be 1 to {total} rows.")
        return count


def subsample_rows(
    names: Sequence[str], classes: Sequence[Sequence[int]], size: SampleSize, *, stratified: bool, seed: int
) -> list[int]:
    """Which rows, in the order they have; `classes` are per row the numbers of the classes in it.

    Stratified: as many rows of each class (per_class), or as large a share of each; else they are drawn uniformly.
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
