"""The cost of probes of all layers, with their controls, relative to one probe of the top layer in the same passes.

    python benchmarks/probe.py [--json]

All of `lamina.studies.probe` is timed (tokenising, training, scoring), on texts of four sentences from the demo's
generator, on MiniLM: 3 epochs, batch 32, without baselines and without a cache. "all" has linear probes and MLPs of all
7 layers, each with a control: 28 readers. The variants take turns; `ratio` is the median of the rounds' ratios, and
`cpu ratio` is the same for processor time, which other processes on a busy machine disturb less. Budget: at most 1.1 x
one probe. Online codes train more probes in the same passes; their cost is printed, and has no budget.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import base, options, report, synchronise

from lamina import Task
from lamina.demo.corpus import write
from lamina.store import load
from lamina.studies import probe

ROWS, BUDGET, FIRST = 256, 1.1, "one probe"


def texts(rows: int) -> Task:
    """Return a task of texts of four sentences, labelled with the sentiment of the first."""
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder), rows=8 * rows)["train"]
        lines = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    together = [lines[start : start + 4] for start in range(0, 4 * (rows + rows // 4), 4)]
    made = [{"sentence": " ".join(row["text"] for row in four), "label": four[0]["sentiment"]} for four in together]
    return Task.from_dataset("sequence_classification", {"train": made[:rows], "validation": made[rows:]})


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=5)
    logging.getLogger("lamina").setLevel(logging.ERROR)
    model, processor = base("minilm").to(asked.device), load("minilm")[1]
    task = texts(ROWS)
    plain: dict[str, Any] = {"controls": False, "code_length": False}
    given: dict[str, dict[str, Any]] = {
        FIRST: {"layers": -1, "probes": ["linear"], **plain},
        "all, without controls": plain,
        "all": {"code_length": False},
        "all, with codes": {},
    }

    def timed(name: str) -> tuple[float, float]:
        """Run a probe study; return its wall-clock seconds and its processor seconds."""
        start = time.perf_counter(), time.process_time()
        probe(model, task, processor=processor, seeds=[0], epochs=3, baselines=False, progress=False, **given[name])
        synchronise()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    rounds = [{name: timed(name) for name in given} for _ in range(asked.repeats + 1)][1:]  # the first warms up
    rows = [
        {
            "run": name,
            "seconds": statistics.median(taken[name][0] for taken in rounds),
            "ratio": statistics.median(taken[name][0] / taken[FIRST][0] for taken in rounds),
            "cpu ratio": statistics.median(taken[name][1] / taken[FIRST][1] for taken in rounds),
            "budget": BUDGET if name == "all" else "",
        }
        for name in given
    ]
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
