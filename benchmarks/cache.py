"""A later epoch from the hidden-state cache: its time over that of an epoch that runs the model.

    python benchmarks/cache.py [--data FOLDER] [--json]

One AdaLayers reader on MiniLM, for every seed without a cache and with one of each dtype. With --data, the folder that
holds `cola` in its published format, the texts are CoLA's; without, sentences that the demo makes. An epoch ends with
scoring the validation part. `first s` is a whole call of `fit` for one epoch that finds the cache empty, tokenising and
writing included; `epoch s` is an epoch of a later run. Budget: a cached epoch takes at most 1/5 of an uncached one, and
the scores differ by no more than those of the seeds.
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
ROWS = 8551 * 4 // 3  # of all three parts, so that as many train as CoLA has


def options() -> argparse.Namespace:
    """What may be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with cola/train.tsv and cola/dev.tsv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each run (default 3)")
    parser.add_argument("--rows", type=int, help="at most so many training rows")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs (default %(default)s)"
    )
    return parser.parse_args()


def texts(asked: argparse.Namespace, folder: Path) -> Task:
    """CoLA, or sentences of the same kind."""
    if asked.data is not None:
        return Task.preset("cola", files=asked.data / "cola", limit=asked.rows)
    files = write(folder, rows=asked.rows * 4 // 3 if asked.rows else ROWS)
    parts: dict[str, Any] = {"train": files["train"], "validation": files["validation"]}
    columns: dict[str, Any] = {"text": "text", "label": "acceptability", "labels": ACCEPTABILITY, "metric": "mcc"}
    return Task.from_files("sequence_classification", **parts, **columns)


def run(loaded: tuple[PreTrainedModel, Any], task: Task, *, seed: int, **settings: Any) -> tuple[float, float, float]:
    """One training run: seconds of the whole call, seconds per epoch, best score."""
    bank = ReaderBank(*loaded)
    bank.add("reader", Reader(AdaLayers(dim=64), SequenceClassification(task.labels), seed=seed))
    start = time.perf_counter()
    result = fit(bank, {"reader": task}, batch_size=32, seed=seed, progress=False, **settings)
    whole = time.perf_counter() - start
    return whole, result.seconds / settings["epochs"], result.best["reader"][task.metric]


def measure(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row per way of getting the states."""
    model, tokenizer = load("minilm")
    loaded = (model.to(asked.device), tokenizer)
    task = texts(asked, folder)
    ways: dict[str, dict[str, Any]] = {"no cache": {"cache": "off"}}
    for dtype in ("float16", "float32"):
        ways[dtype] = {"cache": "on", "cache_dtype": dtype, "cache_dir": str(folder / "cache")}
    run(loaded, task, seed=0, epochs=1, cache="off")  # to warm up
    first = {way: run(loaded, task, seed=0, epochs=1, **settings)[0] for way, settings in ways.items()}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    scores: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(asked.repeats):
        for way, settings in ways.items():
            _, seconds, score = run(loaded, task, seed=seed, epochs=asked.epochs, **settings)
            taken[way].append(seconds)
            scores[way].append(score)
    return [
        {
            "states": way,
            "first s": first[way],
            "epoch s": statistics.median(taken[way]),
            "ratio": ratio(taken, way, to="no cache"),
            "budget": BUDGET if way != "no cache" else "",
            task.metric: statistics.fmean(scores[way]),
            "over seeds": max(scores[way]) - min(scores[way]),
            "from no cache": max(abs(a - b) for a, b in zip(scores[way], scores["no cache"], strict=True)),
        }
        for way in ways
    ]


def main() -> None:
    """Measure and print."""
    asked = options()
    with tempfile.TemporaryDirectory() as folder:
        report(measure(asked, Path(folder)), as_json=asked.json)


if __name__ == "__main__":
    main()
