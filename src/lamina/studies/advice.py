"""From scores by layer to a proposal, and what may be said of it once it was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from lamina.tasks.metrics import LOWER
from lamina.train.results import summarise
from lamina.utils import pluralize

if TYPE_CHECKING:
    from pandas import DataFrame


@final
@dataclass(frozen=True)
class Proposal:
    """How many blocks to keep, and at which layers to read."""

    keep: int
    read: tuple[int, ...]
    stack: str


def proposals(table: DataFrame, metrics: Mapping[str, str], tolerance: float) -> dict[str, Proposal]:
    """Per task the fewest blocks whose top layer scores within `tolerance` of the best layer, by the mean over seeds.

    `table` has "task", "layer", "stack" and "score", a row per seed. One block at least stays. Layers to read are that
    one, and those below that come within `tolerance` of it.
    """
    found: dict[str, Proposal] = {}
    for name, rows in table.groupby("task", sort=False):
        sign = -1 if metrics[str(name)] in LOWER else 1
        means: dict[int, float] = {int(k): sign * v for k, v in rows.groupby("layer")["score"].mean().items()}  # pyright: ignore
        best = max(score for layer, score in means.items() if layer)
        keep = min(layer for layer, score in means.items() if layer and score >= best - tolerance)
        read = tuple(layer for layer in sorted(means) if layer <= keep and means[layer] >= means[keep] - tolerance)
        found[str(name)] = Proposal(keep, read, str(rows["stack"].iloc[0]))
    return found


def sentence(task: str, proposal: Proposal, depth: int, table: Any, metric: str, tolerance: float) -> str:
    """What is proposed, what came of it, and whether the interval allows to say so."""
    if proposal.keep == depth:
        return f"{task}: keep all {depth} blocks; no lower layer comes within {tolerance:g} of the best {metric}."
    own = table[table["task"] == task]
    what = f"{task}: read at {_and(proposal.read)}; keep {proposal.keep} of {pluralize(depth, 'block')}"
    sides = [own[(own["measure"] == metric) & (own["phase"] == phase)] for phase in ("whole", "cut")]
    whole, cut = (side.dropna(subset=["seed"]).set_index("seed")["score"].to_dict() for side in sides)
    changes = [cut[seed] - whole[seed] for seed in cut if seed in whole]
    if not changes:
        return f"{what}. It could not be measured: its cells failed."
    summary = summarise(changes)
    interval = "" if summary.interval is None else f" ± {summary.interval:.3f}"
    said = f"{what}: {metric} {summary.mean:+.3f}{interval}{_costs(own)}"
    return f"{said}. {_verdict(-1 if metric in LOWER else 1, summary.mean, summary.interval, tolerance, len(changes))}"


def _verdict(sign: int, mean: float, interval: float | None, tolerance: float, seeds: int) -> str:
    if interval is None:
        return "One seed allows no interval, and no conclusion."
    worst, best = sign * mean - interval, sign * mean + interval
    facts = f"(95 % interval over {seeds} seeds)"
    if worst >= -tolerance:
        return f"No more than {tolerance:g} is lost {facts}."
    if best < -tolerance:
        return f"More than {tolerance:g} is lost {facts}: do not cut there."
    return f"The interval does not allow to conclude that no more than {tolerance:g} is lost {facts}."


def _costs(own: Any) -> str:
    scores = {(row.phase, row.measure): row.score for row in own.itertuples()}
    parts: list[str] = []
    if ("cut", "speedup") in scores:
        parts.append(f"{scores['cut', 'speedup']:.2f} x as fast")
    if ("cut", "parameters") in scores:
        parts.append(f"{1 - scores['cut', 'parameters'] / scores['whole', 'parameters']:.0%} fewer parameters")
    if ("cut", "perplexity") in scores:
        parts.append(f"perplexity {scores['whole', 'perplexity']:.2f} -> {scores['cut', 'perplexity']:.2f}")
    return "".join(f", {part}" for part in parts)


def _and(layers: Sequence[int]) -> str:
    *most, last = map(str, layers)
    return f"{', '.join(most)} and {last}" if most else last
