"""Check that the regression of `lamina bench probes` is that of the package sae-probes: both on the same states.

    python benchmarks/probes_agree.py --data FOLDER [--sets 7 26 87] [--max-length 128] [--cache FOLDER] [--json]

FOLDER holds the package sae-probes 0.4.2 (`pip download --no-deps`, unpacked). The regression is the file
`utils_training.py` of the package, loaded by itself, since the package as a whole needs libraries that Lamina does not.
A row per set: AUC of both on the mean of the last layer's states of MiniLM, and their difference.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from common import report

import lamina
from lamina.studies.benchmarking import regressions
from lamina.studies.benchmarking.benchmark_cell import CellSettings, States, cell_portion
from lamina.studies.benchmarking.probing_sets import chosen_sets, find_data

TEN = ["7", "26", "47", "50", "51", "52", "65", "74", "77", "83"]
SEED = 42


def main() -> None:
    """Fit both regressions on each set, and print a row per set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the package sae-probes")
    parser.add_argument("--sets", nargs="+", default=TEN, help="numbers of the sets (default: ten)")
    parser.add_argument("--max-length", type=int, default=128, help="maximum tokens per text (default 128)")
    parser.add_argument("--cache", type=Path, help="folder that keeps the states for later runs (default: none)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    folder = find_data(arguments.data)
    package, (model, tokenizer) = _package(folder.parent / "utils_training.py"), lamina.load("minilm")
    settings = CellSettings("normal", (), (), max_length=arguments.max_length)
    rows: list[dict[str, Any]] = []
    for name in chosen_sets(folder, "normal", arguments.sets):
        drawn = cell_portion(folder, name, None, settings)
        with TemporaryDirectory() as temporary:
            means = States(model, tokenizer, drawn, settings, arguments.cache or temporary).means
        train, test = (means[part][:, -1] for part in ("train", "test"))
        start = time.perf_counter()
        theirs = package.find_best_reg(train, drawn.train.labels, test, drawn.test.labels, seed=SEED).metrics
        middle = time.perf_counter()
        ours = regressions.logistic(train, drawn.train.labels, test, seed=SEED)
        seconds = {"their s": middle - start, "our s": time.perf_counter() - middle}
        score = regressions.auc(drawn.test.labels, ours.scores)
        row = {"set": name, "package": theirs.test_auc, "ours": score, "difference": score - theirs.test_auc}
        rows.append({**row, **seconds})
    report(rows, as_json=arguments.json)


def _package(path: Path) -> Any:
    """Return the package's module of regressions; an empty module stands in for XGBoost, which it also imports."""
    sys.modules.setdefault("xgboost", ModuleType("xgboost"))
    spec = spec_from_file_location("sae_probes_training", path)
    if spec is None or spec.loader is None:
        sys.exit(f"{path} cannot be loaded; it is a file of sae-probes 0.4.2")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
