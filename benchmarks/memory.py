"""Memory that 8 streaming readers add to a pass, relative to the memory that keeping every hidden state adds.

    python benchmarks/memory.py [--json]

Each variant runs in its own process, with the same base and the same readers loaded, and prints its peak resident
memory; "base" runs the model alone. Budget: on a model of RoBERTa-large's shape at most 1/10.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from typing import Any

import torch
from common import bank_of, base, options, report, tokens

BATCH, LENGTH, READERS = 16, 128, 8
VARIANTS = ("base", "readers", "all states")


def peak(variant: str) -> int:
    """Return the peak resident bytes of one pass."""
    model = base("roberta-large")
    bank = bank_of(model, READERS)
    inputs = tokens(model, BATCH, LENGTH)
    with torch.no_grad():
        if variant == "readers":
            bank(**inputs, main=True)
        else:
            model(**inputs, output_hidden_states=variant == "all states")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=3)
    peaks: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
    # big blocks straight from the system, so that what was freed does not count
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for _ in range(asked.repeats):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--peak", variant]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            peaks[variant].append(int(done.stdout))
    medians = {variant: statistics.median(values) for variant, values in peaks.items()}
    extra = {variant: (medians[variant] - medians["base"]) / 2**20 for variant in VARIANTS[1:]}
    row: dict[str, Any] = {
        "batch": f"{BATCH}x{LENGTH}",
        "readers": READERS,
        "readers add MiB": extra["readers"],
        "all states add MiB": extra["all states"],
        "ratio": extra["readers"] / extra["all states"],
        "budget": 0.1,
        "floor": 64 * READERS / (1024 * 25),
    }
    report([row], as_json=asked.json)


if __name__ == "__main__":
    if "--peak" in sys.argv:
        print(peak(sys.argv[-1]))
    else:
        main()
