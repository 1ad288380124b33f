"""What the removal of blocks cost beside what proxies foretold: drops, rank correlations, and what may be concluded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from lamina.studies.statistics import rank_correlation
from lamina.tasks.metrics import LOWER
from lamina.train.results import summarise
from lamina.utils import pluralize

if TYPE_CHECKING:
    from pandas import DataFrame

SAME = "same_tokens"  # of a continuation, before it first differs from the whole model's
PROXIES = ("block_influence", "cka_distance", "nu")


def with_predictions(table: DataFrame) -> tuple[DataFrame, list[str]]:
    """Measured rows, drops beside each proxy's numbers, rank correlations; and sentences.

    `table` has the rows of the cells: "task", "seed", "layer", "blocks", "measure" and "score", perhaps "text".
    """
    proxies: Any = table[table["measure"].isin(PROXIES)]
    measured: Any = table[~table["measure"].isin(PROXIES)]
    drops = _drops(measured)
    rows = [measured.to_dict("records")]
    conclusions: list[str] = []
    for task, own in drops.groupby("task", sort=False):
        conclusions.append(_least(str(task), own))
        for proxy in PROXIES:
            foretold = proxies[(proxies["task"] == task) & (proxies["measure"] == proxy)]
            if not len(foretold):
                continue
            joined = own.merge(
                foretold[["layer", "blocks", "score"]].rename(columns={"score": "predicted"}), on=["layer", "blocks"]
            )
            rows.append(joined.assign(measure="drop", proxy=proxy).to_dict("records"))
            mean = joined.groupby(["layer", "blocks"])[["score", "predicted"]].mean()
            found = rank_correlation(mean["predicted"].tolist(), mean["score"].tolist())
            rows.append([{"task": task, "measure": "rank_correlation", "proxy": proxy, **found}])
            conclusions.append(_sentence(str(task), proxy, found))
    columns = ["task", "seed", "layer", "blocks", "measure", "proxy", "predicted", "n", "p", "score"]
    columns += ["text"] * ("text" in table)
    whole = dict.fromkeys(("seed", "layer", "blocks", "n"), "Int64")
    return pd.DataFrame([row for part in rows for row in part], columns=columns).astype(whole), conclusions


def _drops(measured: Any) -> Any:
    """By how much each score is worse than that of the whole model, of the same task and seed."""
    parts = []
    for _, own in measured.groupby(["task", "seed"], sort=False, dropna=False):
        whole = float(own.loc[own["blocks"] == 0, "score"].iloc[0])
        out = own[own["blocks"] > 0].drop(columns="text", errors="ignore")
        if own["measure"].iloc[0] in LOWER:
            drop = out["score"].map(lambda score, whole=whole: math.log(score) - math.log(whole))
        else:
            drop = whole - out["score"]
        parts.append(out.assign(score=drop))
    return pd.concat(parts) if parts else measured


def _sentence(task: str, proxy: str, found: dict[str, Any]) -> str:
    name, n = proxy.replace("_", " "), f"n = {pluralize(found['n'], 'run')} of blocks"
    if math.isnan(found["score"]):
        return f"{task}: whether {name} foretells the measured drop cannot be said ({n})."
    facts = f"rank correlation {found['score']:.2f}, p = {found['p']:.2g}, {n}"
    if found["p"] > 0.05:
        return f"{task}: that {name} foretells the measured drop cannot be concluded ({facts})."
    return f"{task}: {name} {'foretells' if found['score'] > 0 else 'contradicts'} the measured drop ({facts})."


def _least(task: str, drops: Any) -> str:
    """Which run costs least."""
    mean = drops.groupby(["layer", "blocks"])["score"].mean()
    first, count = mean.idxmin()
    own = drops[(drops["layer"] == first) & (drops["blocks"] == count)]["score"].tolist()
    summary = summarise(own)
    seeds = "one value; no interval" if summary.interval is None else f"95 % ± {summary.interval:.3f}, n = {len(own)}"
    what = f"block {int(first)}" if count == 1 else f"blocks {int(first)} to {int(first + count - 1)}"
    measure = drops["measure"].iloc[0]
    kind = "rise of log perplexity" if measure in LOWER else "drop"
    kind += " of the share of same tokens" * (measure == SAME)
    return f"{task}: least is lost without {what}, a {kind} of {summary.mean:.3f} ({seeds})."
