"""Fewer rows to learn from: how many, which, and which classes that leaves without a row."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lamina.errors import ConfigError
from lamina.tasks.kinds import GENERATION, MASKED, TOKEN
from lamina.tasks.split import shares
from lamina.tasks.tags import marks_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.tasks.split import Split


@dataclass(frozen=True)
class Classes:
    """What the rows of a part are counted by.

    Attributes:
        names: The classes. Token tasks whose tags mark spans: the span types, so that the four of CoNLL-2003 are
            PER, ORG, LOC and MISC, as the papers count; "O" is none. Regression, masked language modelling, summaries
            and translations: none.
        rows: Per row the numbers of the classes in it, without repeats.
    """

    names: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, kind: str, problem: str, labels: Sequence[str], split: Split) -> Classes:
        """Read them off a part of a task."""
        if kind in (MASKED, *GENERATION) or problem == "regression":
            return cls((), ((),) * len(split))
        if problem == "multi_label":
            return cls(tuple(labels), tuple(tuple(i for i, on in enumerate(row) if on) for row in split.labels))
        if kind != TOKEN:
            return cls(tuple(labels), tuple((label,) for label in split.labels))
        spans = marks_spans(labels)
        kinds = [label.partition("-")[2] if spans else label for label in labels]
        names = tuple(dict.fromkeys(kind for kind in kinds if kind))
        number = [names.index(kind) if kind else None for kind in kinds]
        found = ({number[tag] for tag in row} for row in split.labels)
        return cls(names, tuple(tuple(sorted(one for one in row if one is not None)) for row in found))

    def missing(self, rows: Sequence[int]) -> list[str]:
        """Classes of which none of these rows has any."""
        seen = {one for row in rows for one in self.rows[row]}
        return [name for number, name in enumerate(self.names) if number not in seen]


@dataclass(frozen=True)
class Amount:
    """How many rows to draw: exactly one of the three.

    Attributes:
        per_class: So many times the number of classes.
        fraction: Of all rows; above 0, at most 1.
        rows: So many.
    """

    per_class: int | None = None
    fraction: float | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        given = self.given()
        if len(given) != 1:
            raise ConfigError(
                f"draw: {' and '.join(given) or 'nothing'} given; one of per_class, fraction and rows says how much is "
                "drawn. Give one of them."
            )
        for name, value in given.items():
            fits = 0 < value <= 1 if name == "fraction" else isinstance(value, int) and value >= 1
            if not fits or isinstance(value, bool):
                rule = "above 0 and at most 1" if name == "fraction" else "a whole number from 1 up"
                raise ConfigError(f"draw: {name} is {value}; it must be {rule}. Change it.")

    def given(self) -> dict[str, float]:
        """The one that was given, by its name."""
        named = {"per_class": self.per_class, "fraction": self.fraction, "rows": self.rows}
        return {name: value for name, value in named.items() if value is not None}

    def count(self, classes: int, total: int) -> int:
        """Rows to draw, of `total`.

        Raises:
            ConfigError: If that is none, more than there are, or there are no classes to multiply by.
        """
        if self.per_class is not None and not classes:
            raise ConfigError(
                f"draw: per_class is {self.per_class}; this task has no classes. Give fraction or rows instead."
            )
        if self.fraction is not None:
            count, said = round(self.fraction * total), f"a fraction of {self.fraction}"
        else:
            count = self.rows or (self.per_class or 0) * classes
            said = f"{self.rows} rows" if self.rows else f"{self.per_class} x {classes} classes = {count} rows"
        if not 1 <= count <= total:
            raise ConfigError(
                f"draw: {said} of {total} rows {'is no row' if count < 1 else 'were asked'}; a draw has at least one "
                "row, and none twice. Change the number."
            )
        return count


def draw_rows(classes: Classes, amount: Amount, *, stratified: bool, seed: int) -> list[int]:
    """Which rows, in the order they have.

    Args:
        classes: Of every row.
        amount: How many.
        stratified: As many rows of each class (per_class), or as large a share of each (fraction, rows); else
            uniformly, whatever their classes.
        seed: Which rows; the same seed draws the same.

    Raises:
        ConfigError: If there are not enough rows, or rows have not one class each and `stratified` is set.
    """
    count = amount.count(len(classes.names), len(classes.rows))
    rng = random.Random(seed)
    if not stratified:
        return sorted(rng.sample(range(len(classes.rows)), count))
    members: list[list[int]] = [[] for _ in classes.names]
    for row, found in enumerate(classes.rows):
        if len(found) == 1:
            members[found[0]].append(row)
    sizes = [len(group) for group in members]
    each = shares(sizes, count) if amount.per_class is None else [amount.per_class] * len(members)
    for name, group, wanted in zip(classes.names, members, each, strict=True):
        if wanted > len(group):
            raise ConfigError(
                f"draw: {wanted} rows of class '{name}' were asked; there are {len(group)}. Ask for fewer, or draw "
                "without stratified."
            )
    return sorted(row for group, wanted in zip(members, each, strict=True) for row in rng.sample(group, wanted))
