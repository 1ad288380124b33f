"""Compare methods over many data sets: wins and losses, a paired bootstrap over the sets, and mean ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from lamina.studies.statistics import corrected, paired_bootstrap
from lamina.utils import Row, pluralize

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Scores: TypeAlias = Mapping[str, NDArray[np.floating]]  # method -> scores `[seeds, sets]`, of all methods one set

# With five sets or fewer even a method that is ahead on all of them has a sign-test p of 2 / 2**5 = 0.0625 or more.
# The bootstrap would draw the same few differences again and again, and give an interval that is much too narrow.
LEAST_SETS = 6
LEVEL = 0.005  # two scores that differ by at most this count as level
_ALPHA = 0.05


def compare_methods(scores: Scores, best: str) -> list[Row]:
    """Compare one method with each of the others over the same data sets.

    Args:
        scores: Method -> its scores `[seeds, sets]`. Methods without seeds have one row.
        best: The method that is compared with the others.

    Returns:
        A row per other method: "method" (`best`), "against", "score" (mean difference; positive: `best` is ahead),
        "low", "high" (95 % interval of the paired bootstrap over sets and seeds), "p" (after Holm's correction), and
        "wins", "level" and "losses" (numbers of sets; level: at most 0.005 apart). With fewer than six sets "low",
        "high" and "p" are None.
    """
    first = scores[best]
    others, several = [name for name in scores if name != best], first.shape[1] >= LEAST_SETS
    differences = corrected([paired_bootstrap(*_paired(first, scores[name]), names=(best, name)) for name in others])
    rows: list[Row] = []
    for name, difference in zip(others, differences, strict=True):
        apart = first.mean(0) - scores[name].mean(0)
        rows.append(
            {
                "method": best,
                "against": name,
                "score": difference.value,
                "low": difference.low if several else None,
                "high": difference.high if several else None,
                "p": (difference.p if difference.holm is None else difference.holm) if several else None,
                "wins": int((apart > LEVEL).sum()),
                "level": int((np.abs(apart) <= LEVEL).sum()),
                "losses": int((apart < -LEVEL).sum()),
            }
        )
    return rows


def _paired(first: NDArray[np.floating], second: NDArray[np.floating]) -> tuple[NDArray[np.floating], ...]:
    """Return two score matrices with the same number of seeds; a matrix with one row is repeated."""
    seeds = max(len(first), len(second))
    return tuple(np.repeat(matrix, seeds, 0) if len(matrix) == 1 else matrix[:seeds] for matrix in (first, second))


def mean_ranks(scores: Scores) -> dict[str, float]:
    """Return method -> mean rank over the sets, from 1 (the best); equal scores share the mean of their ranks."""
    from scipy.stats import rankdata

    table = np.stack([matrix.mean(0) for matrix in scores.values()])
    ranks = rankdata(-table, axis=0).mean(1)
    return dict(zip(scores, (float(rank) for rank in ranks), strict=True))


def critical_difference(methods: int, sets: int) -> float:
    """Return how far two mean ranks must be apart to differ at the 5 % level, by Nemenyi's test.

    Source:
        Demšar 2006, "Statistical Comparisons of Classifiers over Multiple Data Sets", section 3.2.2.
    """
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(1 - _ALPHA, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * sets))


def sentences(compared: Sequence[Row], sets: int, seeds: int) -> list[str]:
    """Return one sentence for each comparison of `compare_methods`.

    `sets` and `seeds` are the numbers of data sets and of seeds.
    """
    return [_sentence(row, sets, seeds) for row in compared]


def _sentence(row: Row, sets: int, seeds: int) -> str:
    value = float(row["score"])  # pyright: ignore
    counts = f"ahead on {row['wins']}, level on {row['level']}, behind on {row['losses']} of {pluralize(sets, 'set')}"
    mean = f"{row['method']} is {abs(value):.3f} {'above' if value >= 0 else 'below'} {row['against']} on average"
    interval = ""
    if row["p"] is not None:
        low, high, p = (float(row[name]) for name in ("low", "high", "p"))  # pyright: ignore
        low, high = (low, high) if value >= 0 else (-high, -low)
        interval = f"95 % interval {low:.3f} to {high:.3f}, Holm p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}; "
    return f"{mean} ({interval}{pluralize(seeds, 'seed')}), {counts}."
