"""Where the default reader is behind regressions: the sets, and how well any regression does on them.

    python benchmarks/probe_losses.py RUN... [--json]

Each RUN is a folder that `lamina bench probes` wrote, with the methods default, embedding, best_layer and all_layers.
There are three tables. A pair is a set in a run (and at one of its points).

1. The sets on which the default is more than .01 below the best of the three regressions: the training rows and the
   scored rows, the mean AUC of the default over its seeds, that of the best regression, and the difference.
2. The pairs by the AUC of the best regression: their number, the mean difference of the default to all_layers, and how
   many of them are in table 1. Where no regression is better than chance, differences are mostly noise.
3. The default against the best of the three regressions, which is picked for each pair on the scored rows; and against
   the best of these and TF-IDF, in runs that have it. Columns: the mean difference, and the number of pairs on which
   the default is more than .005 ahead, at most .005 apart, and behind.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from common import report

from lamina.studies.benchmarking.benchmark import LEVEL
from lamina.studies.study import Study

REGRESSIONS = ["embedding", "best_layer", "all_layers"]
BEHIND = 0.01
BANDS = (0.0, 0.6, 0.7, 0.8, 0.9, 1.0)


def main() -> None:
    """Read the runs, and print the tables."""
    arguments = _options()
    runs: Any = pd.concat([_compared(folder) for folder in arguments.runs], ignore_index=True)
    lost = runs[runs["difference"] < -BEHIND].sort_values(["run", "difference"], kind="stable")
    report(lost.drop(columns=["all_layers", "with tfidf"]).to_dict("records"), as_json=arguments.json)
    bands = []
    for low, high in pairwise(BANDS):
        part = runs[(runs["regression"] > low) & (runs["regression"] <= high)]
        if len(part):
            row = {"best regression": f"{low:.1f} to {high:.1f}", "pairs": len(part)}
            row |= {"above all_layers": float((part["default"] - part["all_layers"]).mean())}
            bands.append({**row, "behind": int((part["difference"] < -BEHIND).sum())})
    report(bands, as_json=arguments.json)
    report(_against_the_best(runs), as_json=arguments.json)


def _against_the_best(runs: Any) -> list[dict[str, Any]]:
    """Return the rows of the third table."""
    rows = []
    for (run, point), part in runs.groupby(["run", "point"], sort=False):
        for name, column in (("three regressions", "difference"), ("these and tfidf", "with tfidf")):
            apart = part[column].dropna()
            if len(apart):
                row = {"run": run, "point": point, "best of": name, "pairs": len(apart), "above": float(apart.mean())}
                ahead, behind = int((apart > LEVEL).sum()), int((apart < -LEVEL).sum())
                rows.append({**row, "ahead": ahead, "level": len(apart) - ahead - behind, "behind": behind})
    return rows


def _compared(folder: Path) -> Any:
    """Return a row per set and point of one run, as a pandas table."""
    table: Any = Study.load(folder).table
    table = table[table["measure"] == "score"].assign(
        point=table["point"].astype(object).where(table["point"].notna(), "")
    )
    sizes = table.groupby(["set", "point"], sort=False)[["trained", "rows"]].first()
    wide = table.pivot_table("score", ["set", "point"], "method", sort=False).join(sizes)
    best = wide[REGRESSIONS].max(axis=1)
    words = np.maximum(best, wide["tfidf"]) if "tfidf" in wide else np.nan
    rows = wide.assign(regression=best, difference=wide["default"] - best).reset_index()
    rows["with tfidf"] = (wide["default"] - words).to_numpy()
    rows.insert(0, "run", folder.name)
    shown = ["run", "point", "set", "trained", "rows", "default", "regression", "difference"]
    return rows[[*shown, "all_layers", "with tfidf"]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that `lamina bench probes` wrote")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


if __name__ == "__main__":
    main()
