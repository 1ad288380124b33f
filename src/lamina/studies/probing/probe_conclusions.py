"""What a probing study allows to conclude: which layers beat what the text alone gives away, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lamina.studies.probing.probe_cell import Place
from lamina.studies.probing.row_scores import row_counts
from lamina.studies.statistics import Difference, corrected, mean_and_interval, paired_bootstrap
from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.layers import Site
    from lamina.tasks.task import Task

Row = dict[str, Any]  # of the table, with "guesses"
REPEATS = 5000  # draws per comparison


@dataclass(frozen=True)
class Compared:
    """The probes of one task: their scores by place and kind, and how far each is ahead of the best baseline."""

    metric: str
    rows_scored: int
    scores: dict[Place, list[float]]  # over seeds
    baseline: tuple[str, float] | None  # the best one that reads the text alone
    ahead: dict[Place, Difference]  # of that baseline
    of_embeddings: Difference | None  # the best probe, ahead of the same probe at layer 0

    @property
    def best(self) -> Place:
        """The probe with the best mean score."""
        return max(self.scores, key=lambda key: float(np.mean(self.scores[key])))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of measure "ahead"."""
        for place, own in self.ahead.items():
            numbers = {
                "score": own.value,
                "low": own.low,
                "high": own.high,
                "p": own.p if own.holm is None else own.holm,
            }
            if own.seeds < 2:  # no interval is claimed
                numbers |= dict.fromkeys(("low", "high", "p"), float("nan"))
            facts = {**place._asdict(), "measure": "ahead", "metric": self.metric}
            yield {**facts, "rows": own.rows, **numbers}


def compare_probes(rows: Sequence[Row], task: Task, split: str) -> Compared:
    """Compare the probes of one task with each other and with the baselines, on the same rows."""
    truths = list(task.split(split).labels)
    keyed: dict[Place, list[Row]] = {}
    of_text: list[Row] = []
    for row in rows:
        if row["measure"] == "score" and row.get("seed") is None:
            of_text.append(row)
        elif row["measure"] == "score":
            place = Place(int(row["layer"]), row.get("site", "output"), row["probe"])
            keyed.setdefault(place, []).append(row)
    scores = {key: [row["score"] for row in own] for key, own in keyed.items()}
    _, metric = row_counts(task, task.metric, truths, truths)

    def counts(guesses: Sequence[Any]) -> Any:
        return row_counts(task, task.metric, guesses, truths)[0]

    def probe_counts(key: Place) -> Any:
        return np.stack([counts(row["guesses"]) for row in keyed[key]])

    text = max(of_text, key=lambda row: row["score"], default=None)
    ahead: dict[Place, Difference] = {}
    if text is not None:
        base = counts(text["guesses"])
        for key in keyed:
            own = probe_counts(key)
            names = title(key), text["probe"]
            same = np.broadcast_to(base, own.shape)
            ahead[key] = paired_bootstrap(own, same, metric=metric, names=names, repeats=REPEATS)
        ahead = dict(zip(ahead, corrected(list(ahead.values())), strict=True))
    baseline = None if text is None else (text["probe"], text["score"])
    found = Compared(task.metric, len(truths), scores, baseline, ahead, None)
    if not scores or (first := Place(0, "output", found.best.probe)) not in scores or found.best.layer == 0:
        return found
    names = title(found.best), title(first)
    both = probe_counts(found.best), probe_counts(first)
    of_embeddings = paired_bootstrap(*both, metric=metric, names=names, repeats=REPEATS)
    return Compared(task.metric, len(truths), scores, baseline, ahead, of_embeddings)


def title(place: Place) -> str:
    """What a sentence calls a probe."""
    return f"{_of(place.site)}layer {place.layer} ({place.probe})"


def _of(site: Site) -> str:
    return "" if site == "output" else f"{site} of "


def conclusions(task: str, found: Compared) -> list[str]:
    """Sentences, the most important first."""
    if not found.scores:
        return []
    best = found.scores[found.best]
    over = f", 95 % over {len(best)} seeds" if len(best) > 1 else ""
    score = f"{found.metric} {mean_and_interval(best)}{over}, n = {pluralize(found.rows_scored, 'row')}"
    said = [f"{task}: {title(found.best)} has the best score of {pluralize(len(found.scores), 'probe')}: {score}."]
    if found.baseline is not None:
        name, value = found.baseline
        against = f"the best baseline that reads the text alone, {name} ({found.metric} {value:.3f})"
        said.append(f"{task}: {_beating(found, against)}")
        said.append(f"{task}: {found.ahead[found.best]}")
    if found.of_embeddings is not None:
        said.append(f"{task}: {found.of_embeddings}")
    return said


def _beating(found: Compared, against: str) -> str:
    """Which probes beat the baseline."""
    if max(map(len, found.scores.values())) < 2:
        return f"with one seed no probe can be said to beat {against}."
    beating: dict[tuple[str, Site], list[int]] = {}
    values: list[float] = []
    for place, own in found.ahead.items():
        if own.conclusive and own.value > 0:
            beating.setdefault((place.probe, place.site), []).append(place.layer)
            values.append(own.value)
    if not beating:
        return f"no probe is shown to beat {against}; such probes have found nothing that the words do not tell."
    named = [
        f"{probe} probes of {_of(site)}layer{'s' * (len(layers) > 1)} {_ranges(layers)}"
        for (probe, site), layers in beating.items()
    ]
    by = " to ".join(dict.fromkeys(f"{value:.3f}" for value in (min(values), max(values))))
    rest = "; the others have found nothing" if len(values) < len(found.ahead) else ""
    return f"{' and '.join(named)} beat {against}, by {by}{rest}."


def _ranges(layers: Sequence[int]) -> str:
    """As "1, 3-5"."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
