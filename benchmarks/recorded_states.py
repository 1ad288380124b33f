"""Memory and time of training readers on recorded states: 10,000 rows x 4 layers x width 4096, without a model.

    python benchmarks/recorded_states.py [--json] [--rows 10000]

The states are random numbers in float16, pooled to one per row, 328 MB in one file. Three processes run, each with a
peak of resident memory: one that only imports Lamina, one that trains a reader on the mean of 4 layers (ScalarMix) for
3 epochs, and one that trains four readers of single layers (SingleLayer). Aim: at most 500 MB more than the import.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from lamina import Reader, ReaderBank, ScalarMix, SequenceClassification, SingleLayer, Task, fit
from lamina.data.describe_states import describe_states

LAYERS, DEPTH, WIDTH = [8, 16, 24, 32], 32, 4096
VARIANTS = ("import", "one reader", "four readers")


def write(folder: Path, rows: int) -> None:
    """Write random states of two classes, in parts, and their labels."""
    rng = np.random.default_rng(0)
    states = np.lib.format.open_memmap(folder / "states.npy", "w+", np.float16, (rows, len(LAYERS), WIDTH))
    labels = rng.integers(0, 2, rows)
    direction = rng.normal(size=WIDTH)
    for start in range(0, rows, 500):
        part = rng.normal(size=states[start : start + 500].shape)
        states[start : start + 500] = part + 0.1 * np.outer(labels[start : start + 500], direction)[:, None]
    states.flush()
    text = "".join(json.dumps({"label": "ab"[label]}) + "\n" for label in labels)
    (folder / "labels.jsonl").write_text(text, encoding="utf-8")
    axes = ("rows", "layers", "width")
    describe_states(folder, axes=axes, layers=LAYERS, depth=DEPTH, pooling="first", table="labels.jsonl")


def run(variant: str, folder: Path) -> None:
    """Train, and print the peak of resident memory, the seconds and the accuracy."""
    seconds, accuracy = 0.0, 0.0
    if variant != "import":
        task = Task.from_states("sequence_classification", train=folder)
        bank = ReaderBank.from_states(folder)
        head = SequenceClassification(task.labels, pooling="first")
        fusions = {"mix": ScalarMix(layers=LAYERS)}
        if variant == "four readers":
            fusions = {f"layer{layer}": SingleLayer(layer) for layer in LAYERS}
        for name, fusion in fusions.items():
            bank.add(name, Reader(fusion, head))
        start = time.perf_counter()
        result = fit(bank, dict.fromkeys(fusions, task), epochs=3, batch_size=32, progress=False)
        seconds = time.perf_counter() - start
        accuracy = min(best["accuracy"] for best in result.best.values())
    peak = peak_bytes()
    print(json.dumps({"variant": variant, "peak MB": peak / 1e6, "seconds": seconds, "accuracy": accuracy}))


def peak_bytes() -> int:
    """Return the peak of this process's resident memory, without that of the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():  # `ru_maxrss` begins with what the parent process had in memory
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Write the states, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rows", type=int, default=10_000, help="number of rows (default %(default)s)")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.variant:
        run(asked.variant, asked.folder)
        return
    with TemporaryDirectory() as folder:
        write(Path(folder), asked.rows)
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--variant", variant, "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            line = done.stdout.strip().splitlines()[-1]
            row = json.loads(line)
            shown = f"{variant:14} {row['peak MB']:7.0f} MB {row['seconds']:7.1f} s  accuracy {row['accuracy']:.3f}"
            print(line if asked.json else shown)


if __name__ == "__main__":
    main()
