"""Bulk prediction: the time of `predict_file` with 8 AdaLayers readers, relative to the forward of the base model.

    python benchmarks/bulk.py [--json] [--backend onnx]      (or int8)

The time of `predict_file` includes reading, tokenising, sorting, the readers' predictions and writing. The forward
alone runs in PyTorch and starts from finished batches of 32 rows of similar length. Each text consists of 1
to 8 sentences of the demo. The two are measured in turn. `ratio` is the median of the ratios of all rounds, `from` and
`to` are the lowest and the highest ratio. `cpu ratio` is the ratio of processor times, which other processes on a busy
machine disturb less. Budget: at most 1.15, and 0.8 with ONNX Runtime.

The second table, of PyTorch only, has the peak resident memory of processes that predict N and 4 N rows, where N rows
are one chunk of `predict_file`. Budget: equal within 5 %. It is measured with the usual allocator of the C library and
with `MALLOC_MMAP_THRESHOLD_=131072`, which gives freed tensors back to the system at once.
"""

from __future__ import annotations

import argparse
import json
import os
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
from lamina.prediction.int8 import export_int8
from lamina.store import load

if TYPE_CHECKING:
    from collections.abc import Callable

READERS, BATCH, CHUNK, ROWS = 8, 32, 256, 512
BUDGETS = {"torch": 1.15, "onnx": 0.8, "int8": 0.8}
ALLOCATORS = {"usual": {}, "mmap": {"MALLOC_MMAP_THRESHOLD_": "131072"}}  # name -> environment variables


def texts(folder: Path, rows: int) -> Path:
    """Write `rows` texts to a file in a folder, one per line, and return the path of the file."""
    corpus = write(folder / "corpus", rows=1000)["train"].read_text(encoding="utf-8").splitlines()
    sentences, rng = [json.loads(line)["text"] for line in corpus], random.Random(0)
    path = folder / f"{rows}.txt"
    lines = (" ".join(rng.choices(sentences, k=rng.randint(1, 8))) for _ in range(rows))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def bank_of(device: str) -> ReaderBank:
    """Return a bank of MiniLM with eight untrained AdaLayers readers, in eval mode on a device."""
    model, tokenizer = load("minilm")
    bank = ReaderBank(model, tokenizer)
    for number in range(READERS):
        bank.add(f"r{number}", Reader(AdaLayers(dim=64), SequenceClassification(("no", "yes")), seed=number))
    return bank.to(device).eval()


def sorted_batches(bank: ReaderBank, source: Path) -> list[dict[str, torch.Tensor]]:
    """Return batches of rows of similar length from the texts in a file, on the device of the bank."""
    lines, batches = source.read_text(encoding="utf-8").splitlines(), []
    for start in range(0, len(lines), CHUNK):
        encoded = bank.processor(lines[start : start + CHUNK], truncation=True)["input_ids"]
        for rows in length_batches([len(ids) for ids in encoded], BATCH):
            padded = bank.processor.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt")
            batches.append(dict(padded.to(bank.device)))
    return batches


def quantised(bank: ReaderBank, folder: Path) -> ReaderBank:
    """Return the bank, loaded from a subfolder of `folder` in which it has an int8 export.

    The readers are untrained, so the scores on the export's rows mean nothing, and any loss is accepted.
    """
    bank.save_pretrained(folder / "bank")
    rows = [{"text": f"A film of {number} hours.", "label": ("no", "yes")[number % 2]} for number in range(8)]
    labelled = folder / "labelled.jsonl"
    labelled.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    loaded = ReaderBank.from_pretrained(folder / "bank", bank.model, bank.processor)
    export_int8(loaded, folder / "bank" / "onnx-int8", labelled, max_loss=1.0, text="text", labels="label")
    return loaded.eval()


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Call a function and return its duration in seconds and the processor time that it used in seconds."""
    start, used = time.perf_counter(), time.process_time()
    run()
    synchronise()
    return time.perf_counter() - start, time.process_time() - used


def speed(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the row of the first table: `predict_file` relative to the forward alone; files go to `folder`."""
    bank, source = bank_of(arguments.device), texts(folder, ROWS)
    bank = quantised(bank, folder) if arguments.backend == "int8" else bank
    batches, settings = sorted_batches(bank, source), {"chunk_rows": CHUNK, "progress": False}

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                bank.model(**batch)

    runs = {
        "forward": forward,
        "bulk": lambda: predict_file(bank, source, folder / "out.jsonl", backend=arguments.backend, **settings),
    }
    rounds = [{name: timed(run) for name, run in runs.items()} for _ in range(arguments.repeats + 1)][1:]
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
        "budget": BUDGETS[arguments.backend],
    }


def peak(rows: int) -> int:
    """Predict `rows` texts and return the peak resident memory of this process in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source = texts(Path(folder), rows)
        predict_file(bank_of("cpu"), source, Path(folder) / "out.jsonl", progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory() -> list[dict[str, Any]]:
    """Return the rows of the second table: the peak memory of a process for each allocator and number of rows."""
    listed: list[dict[str, Any]] = []
    for allocator, variables in ALLOCATORS.items():
        first = 0
        for rows in (1000, 4000):
            command = [sys.executable, __file__, "--peak", str(rows)]
            ended = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
            size = int(ended.stdout)
            first = first or size
            row = {"rows": rows, "allocator": allocator, "peak MiB": size / 2**20, "ratio": size / first}
            listed.append({**row, "budget": 1.05 if rows > 1000 else ""})
    return listed


def main() -> None:
    """Measure speed and memory, and print both tables."""
    arguments = options(__doc__ or "", repeats=7, backend=True)
    with tempfile.TemporaryDirectory() as folder:
        report([speed(arguments, Path(folder))], as_json=arguments.json)
    if arguments.backend == "torch":
        report(memory(), as_json=arguments.json)


if __name__ == "__main__":
    if "--peak" in sys.argv:
        print(peak(int(sys.argv[-1])))
    else:
        main()
