"""The tables of `frontier.py`: scores, the default's leads, shares of the way to fine-tuning, and costs."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rivals import MIXED

from lamina.train.results import INTERVAL_SEEDS, half_interval, summarise

LAST, TUNED, OURS = "last layer", "fine-tuning", "default"


def summed(table: Any, answering: dict[str, float]) -> list[dict[str, Any]]:
    """Return a row per task and method, and a row per method over all tasks.

    Args:
        table: All results, a row per task, method and seed.
        answering: Method -> time to answer eight tasks, in passes of the model.
    """
    rows = []
    for (task, method), part in table.groupby(["task", "method"], sort=False):
        summary = summarise(list(part["score"]))
        rows.append(
            {
                "task": task,
                "method": method,
                "metric": part["metric"].iloc[0],
                "variant": " ".join(dict.fromkeys(part["variant"])),
                "seeds": len(part),
                "score": summary.mean,
                "±": "" if summary.interval is None else summary.interval,
                "trained": int(part["trained"].median()),
                "MB": part["stored"].median() * 4 / 1e6,
                "train s": part["seconds"].median(),
            }
        )
    return _with_shares(rows, answering)


def recorded(table: Any, answering: dict[str, float]) -> list[dict[str, Any]]:
    """Return the rows of `summed` for recorded scores, without the columns about training.

    Args:
        table: The pandas table of the file, with the columns task, method, seeds, score, and ± (empty for one seed and
            for regressions). Several rows of one task and method are runs with different seeds, which are put together.
        answering: Method -> time to answer eight tasks, in passes of the model.
    """
    rows = []
    for (task, method), part in table.groupby(["task", "method"], sort=False):
        seeds, scores = part["seeds"].to_numpy(), part["score"].to_numpy()
        count, score = int(seeds.sum()), float((scores * seeds).sum() / seeds.sum())
        unit = [half_interval(int(own), 1.0) if own > 1 else math.inf for own in seeds]  # ± of a spread of 1
        spreads = part["±"].fillna(0).to_numpy() / unit
        squares = float(((seeds - 1) * spreads**2 + seeds * (scores - score) ** 2).sum())
        half = half_interval(count, math.sqrt(squares / (count - 1))) if count > 1 else ""
        rows.append({"task": task, "method": method, "seeds": count, "score": score, "±": half})
    return _with_shares(rows, answering)


def _with_shares(rows: list[dict[str, Any]], answering: dict[str, float]) -> list[dict[str, Any]]:
    """Return `rows`, one per task and method, with the columns "closed" and "answer"; and a row per method over all.

    "closed" is the share of the gap between `LAST` and `TUNED` that a method closes, "answer" its entry in `answering`.
    """
    scores = {(row["task"], row["method"]): row["score"] for row in rows}
    shares: dict[str, list[float]] = {}
    for row in rows:
        task, method = row["task"], row["method"]
        low, high = scores.get((task, LAST)), scores.get((task, TUNED))
        share = (row["score"] - low) / (high - low) if low is not None and high is not None and high > low else None
        if share is not None:
            shares.setdefault(method, []).append(share)
        row |= {"closed": "" if share is None else share, "answer": answering.get(method, "")}
    empty = dict.fromkeys(rows[0], "")
    several = len({task for task, _ in scores}) > 1
    means = []
    for method, by_task in shares.items() if several else ():
        mean = {"method": method, "closed": statistics.fmean(by_task), "answer": answering.get(method, "")}
        means.append({**empty, "task": f"mean of {len(by_task)}", **mean})
    mixed = [{**empty, "method": MIXED, "answer": answering[MIXED]}] if MIXED in answering else []
    return [*rows, *means, *mixed]


def tables(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the tables: scores, leads and shares, with a column per task, and costs; each has a row per method."""
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["task"]))
    named = [task for task in tasks if not task.startswith("mean")]
    found: list[list[dict[str, Any]]] = [[], [], [], []]
    ours = {row["task"]: row for row in rows if row["method"] == OURS}
    for method in dict.fromkeys(row["method"] for row in rows):
        by_task = {row["task"]: row for row in rows if row["method"] == method}
        scored = {task: row for task, row in by_task.items() if row["score"] != ""}
        if not scored:  # only timed
            found[-1].append({**dict.fromkeys(found[-1][0], ""), "method": method, "answer": by_task[""]["answer"]})
            continue
        found[0].append({"method": method} | {task: _score_text(scored.get(task)) for task in named})
        if ours and method != OURS:
            leads = {task: _lead_text(ours.get(task), scored.get(task)) for task in named}
            found[1].append({f"{OURS} minus": method} | leads)
        shares = {task: by_task[task]["closed"] if task in by_task else "" for task in tasks}
        found[2].append({"method": method} | shares)
        costs = [key for key in ("trained", "MB", "train s") if key in next(iter(scored.values()))]
        cost = {key: statistics.median(row[key] for row in scored.values()) for key in costs}
        found[3].append({"method": method, **cost, "answer": next(iter(by_task.values()))["answer"]})
    return [table for table in found if table]


def _score_text(row: dict[str, Any] | None) -> str:
    """Return the score of a row as text, with half the width of its interval if it has one; "" for None."""
    return "" if row is None else f"{row['score']:.3f}" + (f" ± {row['±']:.3f}" if row["±"] != "" else "")


def _lead_text(ours: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Return how far the default's row is ahead of another row of the same task, as text; "" if one is None.

    If both have at least three seeds, half the width of Welch's interval stands behind it.
    """
    if ours is None or other is None:
        return ""
    lead = f"{ours['score'] - other['score']:+.3f}"
    if min(ours["seeds"], other["seeds"]) < INTERVAL_SEEDS:
        return lead
    parts = []  # variance of the mean, degrees of freedom
    for row in (ours, other):
        count = int(row["seeds"])
        parts.append(((row["±"] / half_interval(count, 1.0)) ** 2 / count, count - 1))
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return f"{lead} ± 0.000"
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
    half = half_interval(freedom + 1, math.sqrt(variance * (freedom + 1)))
    return f"{lead} ± {half:.3f}"
