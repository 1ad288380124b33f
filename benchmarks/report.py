"""The time to write the report page of a large study, and the size of the page.

    python benchmarks/report.py [--cells 1000] [--json]

A cell is one run of a study: a task and a seed, with the scores of linear and MLP probes at seven layers. The page is
written as `lamina report` does, without files beside it. Budget: at most 10 s and 5 MB at 1,000 cells.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import pandas as pd
from common import report

from lamina.report import write_page
from lamina.studies.study import Figure, Study

SEEDS, LAYERS = 10, 7
BUDGET_S, BUDGET_MB = 10, 5


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=1000, help="of the study (default 1,000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs (default 3)")
    return parser.parse_args()


def study(cells: int) -> Study:
    """Return a study with `cells` cells and every kind of figure."""
    rng, rows = random.Random(0), []
    for cell in range(cells):
        place = {"task": f"task {cell // SEEDS}", "seed": cell % SEEDS, "rows": 872}
        for layer in range(LAYERS):
            for probe in ("linear", "mlp"):
                score = 0.6 + 0.04 * layer + rng.gauss(0, 0.02)
                rows.append({**place, "layer": layer, "probe": probe, "score": score, "selectivity": rng.random()})
    figures = {
        "by layer": Figure("line", x="layer", colour="task", facet="probe", title="Scores by layer"),
        "map": Figure("heat", x="layer", y="task", where={"probe": "linear"}, title="Tasks and layers"),
        "tasks": Figure("bar", x="task", where={"probe": "linear", "layer": 3}, title="Tasks at layer 3"),
        "scatter": Figure("scatter", x="selectivity", colour="probe", title="Scores and selectivity"),
    }
    return Study("probe", pd.DataFrame(rows), {"cells": cells}, figures, ("A conclusion.",))


def main() -> None:
    """Measure and print."""
    asked = options()
    with tempfile.TemporaryDirectory() as folder:
        made, page = study(asked.cells), Path(folder) / "page.html"
        made.save(Path(folder) / "study")
        taken = []
        for _ in range(1 + asked.repeats):
            start = time.perf_counter()
            write_page([Path(folder) / "study"], page)
            taken.append(time.perf_counter() - start)
        row = {
            "cells": asked.cells,
            "rows": len(made.table),
            "first_s": taken[0],
            "seconds": statistics.median(taken[1:]),
            "budget_s": BUDGET_S,
            "MB": page.stat().st_size / 1e6,
            "budget_MB": BUDGET_MB,
        }
    report([row], as_json=asked.json)


if __name__ == "__main__":
    main()
