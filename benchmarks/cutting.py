"""Compare three ways to choose two of MiniLM's blocks to drop: block influence, measured loss, and trained readers.

    lamina train recipes/small/cutting.yaml --data ../shared/data --output out/cutting
    python benchmarks/cutting.py out/cutting/models --data ../shared/data [--output out/cut] [--json]

The first command fine-tunes a model per seed on 2,000 rows of SST-2. The second cuts each of them in three ways with
`lamina edit MODEL --drop auto:2 --by WAY --heal 1`, and scores the whole, the cut and the healed model (fine-tuned for
one epoch again) on all 872 validation rows. Each edit is saved when it ends, with what it printed, and the same command
continues an interrupted run. The table has the mean over seeds, and half the width of the 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import report

from lamina.train.results import summarise

WAYS = ("influence", "loss", "readers")
TASK = "preset: sst2\nlimit: 2000\n"


def cut(model: Path, way: str, data: Path, output: Path) -> dict[str, Any]:
    """Return what one edit lost; it is only made if the file with what it printed is not there yet."""
    seed = model.name.rpartition("-")[2]
    printed = output / f"{way}-{seed}.json"
    if not printed.exists():
        task = output / "sst2.yaml"
        task.write_text(TASK, encoding="utf-8")
        command = [sys.executable, "-m", "lamina", "edit", str(model), "--drop", "auto:2", "--by", way, "--json"]
        options = ["--task", str(task), "--data", str(data), "--heal", "1", "--seed", seed, "--overwrite"]
        folder = ["-o", str(output / f"{way}-{seed}")]
        done = subprocess.run([*command, *options, *folder], check=True, stdout=subprocess.PIPE, text=True)
        printed.write_text(done.stdout, encoding="utf-8")
    return json.loads(printed.read_text(encoding="utf-8"))["lost"][0]


def row(way: str, lost: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a way to choose, over seeds."""

    def over_seeds(*values: float) -> str:
        summary = summarise(values)
        return f"{summary.mean:.3f}" + ("" if summary.interval is None else f" ± {summary.interval:.3f}")

    return {
        "by": way,
        "dropped": " / ".join(",".join(map(str, seed["dropped"])) for seed in lost),
        "whole": over_seeds(*(seed["whole"] for seed in lost)),
        "cut - whole": over_seeds(*(seed["cut"] - seed["whole"] for seed in lost)),
        "healed - whole": over_seeds(*(seed["healed"] - seed["whole"] for seed in lost)),
        "times as fast": over_seeds(*(seed["speedup"] for seed in lost)),
    }


def main() -> None:
    """Cut all models, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder with a fine-tuned model per seed, named ...-SEED")
    parser.add_argument("--data", type=Path, required=True, help="folder of public data sets")
    parser.add_argument("--output", type=Path, default=Path("out/cut"), help="folder for the cut models")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    models = sorted(folder for folder in arguments.models.iterdir() if (folder / "config.json").exists())
    rows = [row(way, [cut(model, way, arguments.data, arguments.output) for model in models]) for way in WAYS]
    report(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
