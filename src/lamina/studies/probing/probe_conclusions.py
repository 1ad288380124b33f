"""Conclusions of a probing study: which layers beat the baselines that read the text alone, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np

from lamina.studies.probing.probe_cell import Place
from lamina.studies.probing.row_scores import row_counts
from lamina.studies.statistics import Difference, corrected, mean_and_interval, paired_bootstrap
from lamina.utils import Row, pluralize

if TYPE_CHECKING:
    from lamina.layers import Site
    from lamina.studies.probing.row_scores import Label
    from lamina.studies.statistics import Array
    from lamina.tasks.task import Task

REPEATS = 5000  # resamples per comparison


class ScoredRow(TypedDict):
    """A row of measure "score" of a probe or a baseline, with its scored predictions under "guesses".

    Baselines have neither layer nor seed.
    """

    task: str
    seed: NotRequired[int | None]
    layer: NotRequired[int | None]
    site: NotRequired[Site]
    probe: str  # or the name of a baseline
    measure: str
    score: float
    guesses: list[Label]


@dataclass(frozen=True)
class ProbeComparison:
    """The probes of one task, compared with the best baseline and with the embeddings.

    Attributes:
        metric: Name of the task's metric.
        rows_scored: Number of rows that every probe and baseline was scored on.
        scores: Probe -> its scores, one per seed.
        baseline: Name and score of the best baseline that reads the text alone. None: no baseline was scored.
        ahead: Probe -> its score minus the score of that baseline.
        over_embeddings: Score of the best probe minus the score of the same kind of probe at layer 0. None: layer 0 has
            no such probe, or has the best probe.
    """

    metric: str
    rows_scored: int
    scores: dict[Place, list[float]]
    baseline: tuple[str, float] | None
    ahead: dict[Place, Difference]
    over_embeddings: Difference | None

    @property
    def best(self) -> Place:
        """Place of the probe with the best mean score over seeds."""
        return max(self.scores, key=lambda place: float(np.mean(self.scores[place])))

    def rows(self) -> Iterator[Row]:
        """Yield one table row of measure "ahead" per probe, with the interval and the p value."""
        for place, difference in self.ahead.items():
            low, high = difference.low, difference.high
            p = difference.p if difference.holm is None else difference.holm
            if difference.seeds < 2:  # one seed has no interval over seeds
                low = high = p = math.nan
            yield {
                **place._asdict(),
                "measure": "ahead",
                "metric": self.metric,
                "rows": difference.rows,
                "score": difference.value,
                "low": low,
                "high": high,
                "p": p,
            }


def compare_probes(rows: Sequence[ScoredRow], task: Task, split: str) -> ProbeComparison:
    """Compare the probes of one task with the best baseline and with the embeddings, on the same rows.

    Args:
        rows: The task's table rows; only those of measure "score" are used.
        task: The task.
        split: Name of the split that was scored.
    """
    truths: list[Label] = list(task.split(split).labels)
    scored = [row for row in rows if row["measure"] == "score"]
    baselines = [row for row in scored if row.get("seed") is None]
    probes: dict[Place, list[ScoredRow]] = {}
    for row in scored:
        if row.get("seed") is not None:
            place = Place(int(row.get("layer") or 0), row.get("site", "output"), row["probe"])
            probes.setdefault(place, []).append(row)
    scores = {place: [row["score"] for row in place_rows] for place, place_rows in probes.items()}
    _, metric = row_counts(task, task.metric, truths, truths)

    def counts(row: ScoredRow) -> Array:
        return row_counts(task, task.metric, row["guesses"], truths)[0]

    def probe_counts(place: Place) -> Array:
        return np.stack([counts(row) for row in probes[place]])

    best = max(baselines, key=lambda row: row["score"], default=None)
    ahead: dict[Place, Difference] = {}
    if best is not None:
        baseline_counts = counts(best)
        for place in probes:
            own_counts = probe_counts(place)
            repeated = np.broadcast_to(baseline_counts, own_counts.shape)  # the baseline has no seeds
            names = title(place), best["probe"]
            ahead[place] = paired_bootstrap(own_counts, repeated, metric=metric, names=names, repeats=REPEATS)
        ahead = dict(zip(ahead, corrected(list(ahead.values())), strict=True))
    baseline = None if best is None else (best["probe"], best["score"])
    comparison = ProbeComparison(task.metric, len(truths), scores, baseline, ahead, None)
    if not scores or comparison.best.layer == 0:
        return comparison
    embeddings = Place(0, "output", comparison.best.probe)
    if embeddings not in scores:
        return comparison
    both = probe_counts(comparison.best), probe_counts(embeddings)
    names = title(comparison.best), title(embeddings)
    return replace(comparison, over_embeddings=paired_bootstrap(*both, metric=metric, names=names, repeats=REPEATS))


def title(place: Place) -> str:
    """Return the name of a probe in sentences, such as "attention of layer 3 (linear)"."""
    return f"{_site_of(place.site)}layer {place.layer} ({place.probe})"


def _site_of(site: Site) -> str:
    """Return the words that name a site before a layer: "attention of ", "ffn of ", or "" for the layer's output."""
    return "" if site == "output" else f"{site} of "


def conclusions(task: str, comparison: ProbeComparison) -> list[str]:
    """Return the conclusions about one task, one sentence each, the most important first; [] if there is no score.

    Args:
        task: Name of the task; each sentence begins with it.
        comparison: The task's probes, compared with the baselines.
    """
    if not comparison.scores:
        return []
    best = comparison.scores[comparison.best]
    over = f", 95 % over {len(best)} seeds" if len(best) > 1 else ""
    score = f"{comparison.metric} {mean_and_interval(best)}{over}, n = {pluralize(comparison.rows_scored, 'row')}"
    probes = pluralize(len(comparison.scores), "probe")
    sentences = [f"{task}: {title(comparison.best)} has the best score of {probes}: {score}."]
    if comparison.baseline is not None:
        name, value = comparison.baseline
        baseline = f"the best baseline that reads the text alone, {name} ({comparison.metric} {value:.3f})"
        sentences.append(f"{task}: {_probes_that_beat(comparison, baseline)}")
        sentences.append(f"{task}: {comparison.ahead[comparison.best]}")
    if comparison.over_embeddings is not None:
        sentences.append(f"{task}: {comparison.over_embeddings}")
    return sentences


def _probes_that_beat(comparison: ProbeComparison, baseline: str) -> str:
    """Return a clause that lists the probes that are conclusively better than the baseline; `baseline` is its name."""
    if max(map(len, comparison.scores.values())) < 2:
        return f"with one seed no probe can be said to beat {baseline}."
    layers: dict[tuple[str, Site], list[int]] = {}
    values: list[float] = []
    for place, difference in comparison.ahead.items():
        if difference.conclusive and difference.value > 0:
            layers.setdefault((place.probe, place.site), []).append(place.layer)
            values.append(difference.value)
    if not layers:
        return f"no probe is shown to beat {baseline}; the layers are no better than the text alone."
    named = [
        f"{probe} probes of {_site_of(site)}layer{'s' * (len(numbers) > 1)} {_ranges(numbers)}"
        for (probe, site), numbers in layers.items()
    ]
    by = " to ".join(dict.fromkeys(f"{value:.3f}" for value in (min(values), max(values))))
    rest = "; the others are no better than the text alone" if len(values) < len(comparison.ahead) else ""
    return f"{' and '.join(named)} beat {baseline}, by {by}{rest}."


def _ranges(layers: Sequence[int]) -> str:
    """Return a list of layer numbers as text with ranges, such as "1, 3-5" for 1, 3, 4 and 5."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
