"""Where the default reader is behind regressions: the sets, and how well any regression does on them.

    python benchmarks/probe_losses.py RUN... [--json]

Each RUN is a folder that `lamina bench probes` wrote, with the methods default, embedding, best_layer and all_layers.
There are two tables:

1. The sets on which the default is more than .01 below the best of the three regressions: the training rows and the
   scored rows, the mean AUC of the default over its seeds, that of the best regression, and the difference.
2. The sets by the AUC of the best regression: their number, the mean difference of the default to all_layers, and on
   how many of them the default is in table 1. Where no regression is better than chance, differences are mostly noise.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from common import report

from lamina.studies.study import Study

REGRESSIONS = ["embedding", "best_layer", "all_layers"]
BEHIND = 0.01
BANDS = (0.0, 0.6, 0.7, 0.8, 0.9, 1.0)


def main() -> None:
    """Read the runs, and print both tables."""
    arguments = _options()
    runs: Any = pd.concat([_compared(folder) for folder in arguments.runs], ignore_index=True)
    lost = runs[runs["difference"] < -BEHIND].sort_values(["run", "difference"], kind="stable")
    report(lost.drop(columns=["all_layers"]).to_dict("records"), as_json=arguments.json)
    bands = []
    for low, high in pairwise(BANDS):
        part = runs[(runs["regression"] > low) & (runs["regression"] <= high)]
        if len(part):
            row = {"best regression": f"{low:.1f} to {high:.1f}", "sets": len(part)}
            row |= {"above all_layers": float((part["default"] - part["all_layers"]).mean())}
            bands.append({**row, "behind": int((part["difference"] < -BEHIND).sum())})
    report(bands, as_json=arguments.json)


def _compared(folder: Path) -> Any:
    """Return a row per set and point of one run, as a pandas table."""
    table: Any = Study.load(folder).table
    table = table[table["measure"] == "score"].assign(
        point=table["point"].astype(object).where(table["point"].notna(), "")
    )
    sizes = table.groupby(["set", "point"], sort=False)[["trained", "rows"]].first()
    wide = table.pivot_table("score", ["set", "point"], "method", sort=False)[["default", *REGRESSIONS]].join(sizes)
    best = wide[REGRESSIONS].max(axis=1)
    rows = wide.assign(regression=best, difference=wide["default"] - best).reset_index()
    rows.insert(0, "run", folder.name)
    return rows[["run", "point", "set", "trained", "rows", "default", "regression", "difference", "all_layers"]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders that `lamina bench probes` wrote")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


if __name__ == "__main__":
    main()
