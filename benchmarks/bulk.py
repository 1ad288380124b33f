"""Bulk prediction: `predict_file` with 8 AdaLayers readers over the base's forward on the same sorted batches.

    python benchmarks/bulk.py [--json]

`predict_file` is timed whole: reading, tokenising, sorting, the readers' answers and writing. The forward alone finds
its batches ready: the same rows, in the same order and padding. Texts are 1 to 8 of the demo's sentences. The two take
turns; `ratio` is the median of the rounds' ratios, `from` and `to` its range, and `cpu ratio` the same of processor
time, which neighbours on a busy machine disturb less. Budget: at most 1.25.

The second table has the peak resident memory of processes that predict N and 4 N rows. Budget: the same, within 5 %.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import options, report, synchronise

from lamina import AdaLayers, Reader, ReaderBank, SequenceClassification, predict_file
from lamina.data.batches import length_batches
from lamina.demo.corpus import write
from lamina.store import load

if TYPE_CHECKING:
    from collections.abc import Callable

READERS, BATCH, CHUNK, ROWS, BUDGET = 8, 32, 256, 512, 1.25


def texts(folder: Path, rows: int) -> Path:
    """A file with a text per line."""
    corpus = write(folder / "corpus", rows=1000)["train"].read_text(encoding="utf-8").splitlines()
    sentences, rng = [json.loads(line)["text"] for line in corpus], random.Random(0)
    path = folder / f"{rows}.txt"
    lines = (" ".join(rng.choices(sentences, k=rng.randint(1, 8))) for _ in range(rows))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def bank_of(device: str) -> ReaderBank:
    """MiniLM with its readers."""
    model, tokenizer = load("minilm")
    bank = ReaderBank(model, tokenizer)
    for number in range(READERS):
        bank.add(f"r{number}", Reader(AdaLayers(dim=64), SequenceClassification(("no", "yes")), seed=number))
    return bank.to(device).eval()


def sorted_batches(bank: ReaderBank, source: Path) -> list[dict[str, torch.Tensor]]:
    """The batches that `predict_file` makes, ready for the model."""
    lines, batches = source.read_text(encoding="utf-8").splitlines(), []
    for start in range(0, len(lines), CHUNK):
        encoded = bank.processor(lines[start : start + CHUNK], truncation=True)["input_ids"]
        for rows in length_batches([len(ids) for ids in encoded], BATCH):
            padded = bank.processor.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt")
            batches.append(dict(padded.to(bank.device)))
    return batches


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    start, used = time.perf_counter(), time.process_time()
    run()
    synchronise()
    return time.perf_counter() - start, time.process_time() - used


def speed(asked: Any, folder: Path) -> dict[str, Any]:
    """One row: what the whole takes over the forward alone."""
    bank, source = bank_of(asked.device), texts(folder, ROWS)
    batches, given = sorted_batches(bank, source), {"batch_size": BATCH, "chunk_rows": CHUNK, "progress": False}

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                bank.model(**batch)

    runs = {"forward": forward, "bulk": lambda: predict_file(bank, source, folder / "out.jsonl", **given)}
    rounds = [{name: timed(run) for name, run in runs.items()} for _ in range(asked.repeats + 1)][1:]
    ratios, cpu = ([both["bulk"][at] / both["forward"][at] for both in rounds] for at in (0, 1))
    return {
        "rows": ROWS,
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "forward s": statistics.median(both["forward"][0] for both in rounds),
        "bulk s": statistics.median(both["bulk"][0] for both in rounds),
        "ratio": statistics.median(ratios),
        "from": min(ratios),
        "to": max(ratios),
        "cpu ratio": statistics.median(cpu),
        "budget": BUDGET,
    }


def peak(rows: int) -> int:
    """Peak resident bytes of a process that predicts so many rows."""
    with tempfile.TemporaryDirectory() as folder:
        source = texts(Path(folder), rows)
        predict_file(bank_of("cpu"), source, Path(folder) / "out.jsonl", batch_size=BATCH, progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory() -> list[dict[str, Any]]:
    """One row per number of rows."""
    peaks: dict[int, int] = {}
    for rows in (ROWS, 4 * ROWS):
        command = [sys.executable, __file__, "--peak", str(rows)]
        peaks[rows] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [
        {"rows": rows, "peak MiB": size / 2**20, "ratio": size / peaks[ROWS], "budget": 1.05 if rows > ROWS else ""}
        for rows, size in peaks.items()
    ]


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=7)
    with tempfile.TemporaryDirectory() as folder:
        report([speed(asked, Path(folder))], as_json=asked.json)
    report(memory(), as_json=asked.json)


if __name__ == "__main__":
    if "--peak" in sys.argv:
        print(peak(int(sys.argv[-1])))
    else:
        main()
