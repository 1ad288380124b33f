"""The cost of CKA between all pairs of layers, relative to the model's own forward passes on the same texts.

    python benchmarks/similarity.py [--texts 10000] [--json]

Both tokenise sentences from the demo's generator and run MiniLM over the same batches of 32 texts; `CKA` is all of
`lamina.studies.similarity(..., measures=["cka"])`. Budget: at most 1.1 x the forward passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import base, report, synchronise

from lamina.demo.corpus import write
from lamina.demo.timing import in_turn, ratio
from lamina.store import load
from lamina.studies import similarity
from lamina.studies.passes import group_batches, row_groups, text_inputs

BATCH, GROUP, BUDGET = 32, 256, 1.1


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=10_000, help="sentences (default 10,000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each (default 3)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs (default %(default)s)"
    )
    return parser.parse_args()


def sentences(count: int) -> list[str]:
    """Return sentences of the demo's corpus."""
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), rows=count)
        lines = [line for file in files.values() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["text"] for line in lines]


@torch.no_grad()
def forward(model: Any, processor: Any, texts: list[str]) -> None:
    """Tokenise, and run the model alone on the same batches as the study."""
    inputs = text_inputs(model, texts, processor, None, op="forward")
    for group in row_groups(len(texts), GROUP, 0):
        for _, batch in group_batches(inputs, group, BATCH):
            model(**{name: value.to(model.device) for name, value in batch.items()})
    synchronise()


def main() -> None:
    """Measure and print."""
    asked = options()
    model, processor = base("minilm").to(asked.device), load("minilm")[1]
    texts = sentences(asked.texts)

    def cka() -> None:
        similarity(model, texts, processor=processor, measures=["cka"], minibatch=GROUP, batch_size=BATCH)
        synchronise()

    runs = {"forward": lambda: forward(model, processor, texts), "CKA": cka}
    taken = in_turn(runs, repeats=asked.repeats)
    rows = [
        {
            "run": name,
            "texts": len(texts),
            "seconds": statistics.median(taken[name]),
            "ratio": ratio(taken, name, to="forward"),
            "budget": BUDGET if name == "CKA" else "",
        }
        for name in runs
    ]
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
