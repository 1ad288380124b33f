"""Search for a better default reader on 40 of the 113 probing sets; the other 73 are for one confirming run.

    python benchmarks/default_search.py --data FOLDER [--rows 64 1024] [--sets 7 26] [--max-length 128]
        [--candidates default "rate 3e-3"] [--seeds 0] [--cache FOLDER] [--output out/default-search] [--json]

FOLDER holds the package sae-probes 0.4.2 (`pip download --no-deps`, unpacked). The 40 sets are drawn by a fixed
seed. Each candidate is trained as `LaminaClassifier` trains its reader, except for what its name says, on MiniLM's
states, which each set computes once. Two regressions run beside them. Each pair of set and number of rows is saved when
it ends, and the same command continues an interrupted run. Columns:

    mean AUC       mean over the sets that have ended, each scored on at most 500 rows
    above default  the same minus that of today's default
    wins, losses   sets on which the candidate is more than .005 above or below the default

`lamina bench probes --sets ...` with the numbers that `--confirm` prints is the confirming run.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import report

import lamina
from lamina import PooledLayers, Reader, SequenceClassification
from lamina.studies.benchmarking.benchmark import LEVEL
from lamina.studies.benchmarking.benchmark_cell import CellSettings, ReaderOf, cell_rows
from lamina.studies.benchmarking.probing_sets import MOST_TRAINED, find_data, set_names
from lamina.studies.runner import Cell, run_cells

SEED, SEARCHED = 38, 40
RIVALS = ("embedding", "all_layers")


def _pooled(**fusion: Any) -> ReaderOf:
    """Return a function that makes the default reader with other settings of its fusion."""
    return lambda task, seed: Reader(
        PooledLayers(**fusion), SequenceClassification(task.labels, pooling="first"), seed=seed
    )


CANDIDATES: dict[str, tuple[ReaderOf, dict[str, Any]]] = {  # name -> its reader, and options of the training
    "default": (_pooled(), {}),
    "rate 3e-3": (_pooled(), {"learning_rate": 3e-3}),
    "rate 1e-2": (_pooled(), {"learning_rate": 1e-2}),
    "decay 0.1": (_pooled(), {"weight_decay": 0.1}),
    "dropout 0.3": (_pooled(dropout=0.3), {}),
    "4 queries": (_pooled(queries=4), {}),
    "4 heads": (_pooled(heads=4), {}),
    "dim 16": (_pooled(dim=16), {}),
    "dim 256": (_pooled(dim=256), {}),
    "last layer": (_pooled(layers=-1), {}),
}


def main() -> None:
    """Run the cells that have not ended yet, and print a row per number of training rows and method."""
    arguments = _options()
    arguments.candidates = list(dict.fromkeys(["default", *arguments.candidates]))  # the others are compared with it
    folder = find_data(arguments.data)
    searched, confirming = divided(folder)
    if arguments.confirm:
        print(" ".join(f"--sets {name.partition('_')[0]}" for name in confirming))
        return
    searched = [name for name in searched if not arguments.sets or name.partition("_")[0] in arguments.sets]
    model, tokenizer = lamina.load("minilm")
    cells = [
        Cell({"set": name, "rows": rows}, partial(_cell, arguments, model, tokenizer, folder, name, rows))
        for name in searched
        for rows in arguments.rows
    ]
    settings: dict[str, Any] = {"seeds": arguments.seeds, "max_length": arguments.max_length}
    settings["candidates"] = arguments.candidates
    done: Any = run_cells(cells, settings=settings, output=arguments.output, resume=True, progress=False)
    table, failures = done
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    rows: list[dict[str, Any]] = []
    for size in arguments.rows if len(table) else ():
        wide = table[table["rows"] == size].pivot_table("score", "set", "method", sort=False)
        for method in wide.mean().sort_values(ascending=False).index:
            apart = wide[method] - wide["default"]
            row = {"rows": size, "method": method, "sets": len(wide), "mean AUC": float(wide[method].mean())}
            row |= {"above default": float(apart.mean()), "wins": int((apart > LEVEL).sum())}
            rows.append({**row, "losses": int((apart < -LEVEL).sum())})
    report(rows, as_json=arguments.json)


def divided(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the 40 sets to search on, and of the 73 others. `folder` holds the data."""
    names = set_names(folder)
    order = [names[number] for number in np.random.default_rng(SEED).permutation(len(names))]
    return order[:SEARCHED], order[SEARCHED:]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the package sae-probes")
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 1024], help="training rows (default %(default)s)")
    parser.add_argument("--sets", nargs="+", help="numbers of sets among the 40 (default: all)")
    parser.add_argument("--max-length", type=int, default=128, help="maximum tokens per text (default %(default)s)")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the readers (default %(default)s)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the states for later runs (default: none)")
    parser.add_argument("--output", type=Path, default=Path("out/default-search"), help="folder for finished cells")
    parser.add_argument("--confirm", action="store_true", help="print the other 73 sets as options, and run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def _cell(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, folder: Path, name: str, rows: int
) -> list[dict[str, Any]]:
    """Return a row per method: "method" and "score" (AUC, the mean over seeds).

    Candidates with the same options of the training run in one call; later calls find the states of the first.
    """
    scores: list[dict[str, Any]] = []
    point = None if rows >= MOST_TRAINED else rows  # as many as the set has, up to 1,024
    by_options: dict[str, list[str]] = {}
    for candidate in arguments.candidates:
        by_options.setdefault(repr(CANDIDATES[candidate][1]), []).append(candidate)
    for number, candidates in enumerate(by_options.values()):
        settings = CellSettings(
            "scarce",
            (*(RIVALS if not number else ()), *candidates),
            tuple(arguments.seeds),
            max_length=arguments.max_length,
            readers={candidate: CANDIDATES[candidate][0] for candidate in candidates},
            training=CANDIDATES[candidates[0]][1],
        )
        done = cell_rows(model, tokenizer, folder, name, point, settings, arguments.cache)
        for method in dict.fromkeys(row["method"] for row in done):
            own = [float(str(row["score"])) for row in done if row["method"] == method]
            scores.append({"method": method, "score": float(np.mean(own))})
    return scores


if __name__ == "__main__":
    main()
