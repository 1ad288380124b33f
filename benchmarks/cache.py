"""The cache of hidden states: the time of an epoch that reads it, relative to an epoch that runs the model.

    python benchmarks/cache.py [--data FOLDER] [--json]

One AdaLayers reader on MiniLM is trained for every seed without the cache and with a cache of each dtype. With --data,
the folder that contains `cola` in its published format, the texts are those of CoLA; otherwise they are sentences that
the demo makes. An epoch includes scoring the validation split. `first s` is the time of a call of `fit` for one epoch
with an empty cache, with tokenising and writing; `epoch s` is an epoch of a later run. Budget: a cached epoch takes at
most 1/5 of an uncached epoch, and the cache changes scores by no more than the seeds do.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import report

from lamina import AdaLayers, Reader, ReaderBank, SequenceClassification, Task, fit
from lamina.demo.corpus import ACCEPTABILITY, write
from lamina.demo.timing import ratio
from lamina.store import load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUDGET = 0.2
ROWS = 8551 * 4 // 3  # rows of all splits together, so that the training split is as large as CoLA's


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cola/train.tsv and cola/dev.tsv")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each run (default 3)")
    parser.add_argument("--rows", type=int, help="maximum number of training rows (default: all)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default %(default)s)"
    )
    return parser.parse_args()


def texts(arguments: argparse.Namespace, folder: Path) -> Task:
    """Return CoLA if --data is given, otherwise a task on acceptability whose sentences are written to `folder`."""
    if arguments.data is not None:
        return Task.preset("cola", files=arguments.data / "cola", limit=arguments.rows)
    files = write(folder, rows=arguments.rows * 4 // 3 if arguments.rows else ROWS)
    return Task.from_files(
        "sequence_classification",
        train=files["train"],
        validation=files["validation"],
        text="text",
        label="acceptability",
        labels=ACCEPTABILITY,
        metric="mcc",
    )


def run(loaded: tuple[PreTrainedModel, Any], task: Task, *, seed: int, **settings: Any) -> tuple[float, float, float]:
    """Train a reader once and return the seconds of the whole call, the seconds per epoch, and the best score.

    Args:
        loaded: The model and its tokenizer.
        task: The task.
        seed: Seed of the reader and of the order of rows.
        **settings: More options of `lamina.fit`; "epochs" is required.
    """
    bank = ReaderBank(*loaded)
    bank.add("reader", Reader(AdaLayers(dim=64), SequenceClassification(task.labels), seed=seed))
    start = time.perf_counter()
    result = fit(bank, {"reader": task}, batch_size=32, seed=seed, progress=False, **settings)
    whole = time.perf_counter() - start
    return whole, result.seconds / settings["epochs"], result.best["reader"][task.metric]


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the table: no cache, and a cache of each dtype. Corpus and cache are written to `folder`."""
    model, tokenizer = load("minilm")
    loaded = (model.to(arguments.device), tokenizer)
    task = texts(arguments, folder)
    ways: dict[str, dict[str, Any]] = {"no cache": {"cache": "off"}}
    for dtype in ("float16", "float32"):
        ways[dtype] = {"cache": "on", "cache_dtype": dtype, "cache_dir": str(folder / "cache")}
    run(loaded, task, seed=0, epochs=1, cache="off")  # to warm up
    first = {way: run(loaded, task, seed=0, epochs=1, **settings)[0] for way, settings in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    scores: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(arguments.repeats):
        for way, settings in ways.items():
            _, per_epoch, score = run(loaded, task, seed=seed, epochs=arguments.epochs, **settings)
            seconds[way].append(per_epoch)
            scores[way].append(score)
    return [
        {
            "states": way,
            "first s": first[way],
            "epoch s": statistics.median(seconds[way]),
            "ratio": ratio(seconds, way, to="no cache"),
            "budget": BUDGET if way != "no cache" else "",
            task.metric: statistics.fmean(scores[way]),
            "over seeds": max(scores[way]) - min(scores[way]),
            "from no cache": max(abs(a - b) for a, b in zip(scores[way], scores["no cache"], strict=True)),
        }
        for way in ways
    ]


def main() -> None:
    """Measure and print the table."""
    arguments = options()
    with tempfile.TemporaryDirectory() as folder:
        report(measure(arguments, Path(folder)), as_json=arguments.json)


if __name__ == "__main__":
    main()
