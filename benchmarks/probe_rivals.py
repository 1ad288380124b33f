"""SetFit, LoRA and fine-tuning beside the default reader and regressions, with few rows of 20 public probing sets.

    python benchmarks/probe_rivals.py --data FOLDER [--sets 20] [--rows 64] [--methods default SetFit] [--seeds 0 1]
        [--output out/probe-rivals] [--json]

FOLDER holds the package sae-probes 0.4.2 (`pip download --no-deps`, unpacked). The sets are the first of the 73 that
`default_search.py --confirm` prints and that have enough rows. All methods start from MiniLM and learn from the same
rows, half of each class; none of them is held out. LoRA and fine-tuning (30 epochs in batches of 16) have a row per
learning rate, so that nothing is chosen: compare with the best row. SetFit (`pip install setfit`) has its own settings.
Each combination of set, method and seed is saved when it ends, and the same command continues an interrupted run.
Columns:

    mean AUC           mean over sets and seeds, each scored on at most 300 rows
    default is ahead   mean over the sets of the default reader's AUC minus the method's
    low, high          95 % interval of that mean: paired bootstrap over sets and seeds
    wins, losses       sets on which the default is more than .005 above or below the method
    train s            median of the seconds of one training run
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import report
from default_search import divided
from rivals import RATES, fine_tuned, lora, setfit

import lamina
from lamina.errors import DataError
from lamina.studies.benchmarking.benchmark import compare_methods
from lamina.studies.benchmarking.benchmark_cell import CellSettings, cell_portion, cell_rows
from lamina.studies.benchmarking.probing_sets import find_data
from lamina.studies.runner import Cell, run_cells
from lamina.tasks import kind_of
from lamina.tasks.split import Split

LENGTH, SCORED, EPOCHS = 64, 300, 30
OURS, SETFIT = "default", "SetFit"
PROBES = (OURS, "all_layers", "embedding")  # methods of `lamina bench probes`
TRAINERS = {"LoRA": lora, "fine-tuning": fine_tuned}
METHODS = (*PROBES, SETFIT, *TRAINERS)


def main() -> None:
    """Run the combinations that have not ended yet, and print a row per method."""
    arguments = _options()
    folder = find_data(arguments.data)
    cells = [
        Cell({"set": name, "method": method, "seed": seed}, partial(_cell, folder, name, method, arguments.rows, seed))
        for name in _sets(folder, arguments)
        for seed in arguments.seeds
        for method in _variants(arguments.methods)
    ]
    settings: dict[str, Any] = {"rows": arguments.rows, "length": LENGTH, "scored": SCORED, "epochs": EPOCHS}
    done: Any = run_cells(cells, settings=settings, output=arguments.output, resume=True)
    table, failures = done
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    if not len(table):
        return
    wide = table.pivot_table("score", ["method", "seed"], "set", sort=False).dropna(axis=1)
    scores = {str(method): own.to_numpy() for method, own in wide.groupby(level="method", sort=False)}
    compared = {str(row["against"]): row for row in compare_methods(scores, OURS)}
    rows: list[dict[str, Any]] = []
    for method, own in sorted(scores.items(), key=lambda item: -item[1].mean()):
        row: dict[str, Any] = {"method": method, "sets": own.shape[1], "mean AUC": float(own.mean())}
        other = compared.get(method, {})
        row["default is ahead"] = other.get("score")
        row |= {name: other.get(name) for name in ("low", "high", "wins", "losses")}
        rows.append({**row, "train s": float(table.loc[table["method"] == method, "seconds"].median())})
    report(rows, as_json=arguments.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the package sae-probes")
    parser.add_argument("--sets", type=int, default=20, help="number of sets (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="training rows (default %(default)s)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="seeds (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("out/probe-rivals"), help="folder for finished cells")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    arguments.methods = list(dict.fromkeys([OURS, *arguments.methods]))  # the others are compared with it
    return arguments


def _variants(methods: list[str]) -> list[str]:
    """Return the methods, with one entry per learning rate for LoRA and fine-tuning, such as "LoRA, rate 0.001"."""
    named = [
        [f"{method}, rate {rate:g}" for rate in RATES[method]] if method in RATES else [method] for method in methods
    ]
    return [variant for variants in named for variant in variants]


def _sets(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Return the names of the first sets that have enough rows."""
    chosen: list[str] = []
    for name in divided(folder)[1]:
        try:
            cell_portion(folder, name, arguments.rows, _settings(0))
        except DataError as error:
            print(f"left out: {error}")
        else:
            chosen.append(name)
        if len(chosen) == arguments.sets:
            break
    return chosen


def _settings(seed: int, *methods: str) -> CellSettings:
    return CellSettings("scarce", methods, (seed,), scored=SCORED, max_length=LENGTH)


def _cell(folder: Path, name: str, method: str, rows: int, seed: int) -> list[dict[str, Any]]:
    """Train one method on one set; return a single row with "score" (AUC) and "seconds" (of training)."""
    if method in PROBES:
        model, tokenizer = lamina.load("minilm")
        (row,) = cell_rows(model, tokenizer, folder, name, rows, _settings(seed, method))
        return [{"score": row["score"], "seconds": row["seconds"]}]
    drawn = cell_portion(folder, name, rows, _settings(seed))
    if method == SETFIT:
        from sklearn.metrics import roc_auc_score

        classifier, seconds, _ = setfit(list(drawn.train.texts), drawn.train.labels, seed=seed, length=LENGTH)
        chances = np.asarray(classifier.predict_proba(list(drawn.test.texts)))[:, 1]
        return [{"score": float(roc_auc_score(drawn.test.labels, chances)), "seconds": seconds}]
    splits = {
        part: Split.of(list(half.texts), half.labels.tolist())
        for part, half in (("train", drawn.train), ("test", drawn.test))
    }
    kind = kind_of("sequence_classification")
    task = lamina.Task(kind, "classification", ("0", "1"), "auroc", ("auroc",), splits, name, "1")
    trainer, _, variant = method.partition(", ")
    row = TRAINERS[trainer](task, seed=seed, max_length=LENGTH, epochs=EPOCHS, only=variant)
    return [{"score": row["score"], "seconds": row["seconds"]}]


if __name__ == "__main__":
    main()
