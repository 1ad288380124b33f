"""The effect of an int8 base on the scores of trained readers: CoLA, SST-2 and CoNLL-2003 on MiniLM.

    python benchmarks/int8_scores.py --data FOLDER [--json] [--rows 2000] [--validation 1000] [--seeds 3]

FOLDER has `cola`, `sst2` and `conll2003` in their published formats. For each task and seed the default reader is
trained for 3 epochs on `rows` training rows, all of them in one bank. Then the bank is exported in int8, and every
reader is scored in PyTorch and with the quantised graph, on at most `validation` rows. `float32` and `int8` are
means over the seeds, `change` is the mean of their differences and `largest` the largest of these in size. Aim: the
mean change is within the standard deviation of the seeds (`spread`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import report

import lamina
from lamina.prediction.int8 import export_int8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.store.onnx import Int8Score

TASKS = ("cola", "sst2", "conll2003")
EPOCHS = 3


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cola, sst2 and conll2003")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rows", type=int, default=2000, help="training rows of each task (default %(default)s)")
    parser.add_argument("--validation", type=int, default=1000, help="validation rows of each (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="readers of each task (default %(default)s)")
    return parser.parse_args()


def trained(asked: argparse.Namespace) -> tuple[lamina.ReaderBank, dict[str, lamina.Task]]:
    """Return a bank with a trained reader "TASK-SEED" for each task and seed, and reader name -> task."""
    bank, tasks = lamina.ReaderBank(*lamina.load("minilm")), dict[str, lamina.Task]()
    for name in TASKS:
        task = lamina.Task.preset(name, files=asked.data / name, limit=asked.rows, limit_validation=asked.validation)
        for seed in range(asked.seeds):
            tasks[f"{name}-{seed}"] = task
            default = lamina.Reader.default(task)
            bank.add(f"{name}-{seed}", lamina.Reader(default.fusion, default.head, seed=seed))
    lamina.fit(bank, tasks, epochs=EPOCHS, progress=False)
    return bank.eval(), tasks


def row(name: str, scores: Mapping[str, Int8Score]) -> dict[str, Any]:
    """Return the table row of a task from the scores of all readers."""
    own = [score for reader, score in scores.items() if reader.startswith(f"{name}-")]
    changes = [score.int8 - score.float32 for score in own]
    return {
        "task": name,
        "metric": own[0].metric,
        "seeds": len(own),
        "float32": statistics.fmean(score.float32 for score in own),
        "spread": statistics.stdev(score.float32 for score in own) if len(own) > 1 else 0.0,
        "int8": statistics.fmean(score.int8 for score in own),
        "change": statistics.fmean(changes),
        "largest": max(changes, key=abs),
    }


def main() -> None:
    """Train, export, and print the table."""
    arguments = options()
    torch.set_num_threads(1)
    bank, tasks = trained(arguments)
    with tempfile.TemporaryDirectory() as folder:
        facts = export_int8(bank, Path(folder) / "int8", tasks, max_loss=1.0)
    report([row(name, facts.int8 or {}) for name in TASKS], as_json=arguments.json)


if __name__ == "__main__":
    main()
