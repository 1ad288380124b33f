"""The speed of an exported bank: a pass of MiniLM with 8 readers of whole texts in onnxruntime.

    python benchmarks/onnx_speed.py [--json]

onnxruntime and PyTorch both run on the CPU with one thread. `ratio` is onnxruntime's time over that of the bank
in PyTorch, `over bare` over that of MiniLM alone in PyTorch, without readers. Aim for one text: `over bare` <= 0.65.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import SHAPES, bank_of, base, options, report, tokens

from lamina.demo.timing import in_turn, ratio
from lamina.store.onnx import GRAPH, export_onnx, open_session

if TYPE_CHECKING:
    from lamina import ReaderBank

FUSIONS = ("ada_layers", "pooled_layers")
TEXTS = ((1, 8), (1, 32), (1, 128), SHAPES["minilm"])  # batch size and tokens per text


def measured(fusion: str, repeats: int) -> list[dict[str, Any]]:
    """Return the table rows of a fusion, one per shape; the passes in onnxruntime and in PyTorch take turns."""
    bank = bank_of(base("minilm"), 8, fusion)
    with tempfile.TemporaryDirectory() as folder:
        facts = export_onnx(bank, folder)
        graph: Any = open_session(Path(folder) / GRAPH)
    return [row(bank, graph, fusion, shape, repeats, facts.max_difference) for shape in TEXTS]


def row(
    bank: ReaderBank, graph: Any, fusion: str, shape: tuple[int, int], repeats: int, difference: float
) -> dict[str, Any]:
    """Return the table row of a fusion for batches of `shape`, texts and tokens of each."""
    batch, length = shape
    inputs = tokens(bank.model, batch, length)
    given = {name: value.numpy() for name, value in inputs.items()}
    with torch.inference_mode():
        runs: dict[str, Any] = {
            "bare": lambda: bank.model(**inputs),
            "torch": lambda: bank(**inputs),
            "onnx": lambda: graph.run(None, given),
        }
        taken = in_turn(runs, repeats=repeats)
    return {
        "fusion": fusion,
        "batch": f"{batch}x{length}",
        "readers": len(bank),
        "torch ms": 1000 * statistics.median(taken["torch"]),
        "onnx ms": 1000 * statistics.median(taken["onnx"]),
        "ratio": ratio(taken, "onnx", to="torch"),
        "over bare": ratio(taken, "onnx", to="bare"),
        "difference": f"{difference:.0e}",
    }


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=9)
    torch.set_num_threads(1)
    report([row for fusion in FUSIONS for row in measured(fusion, asked.repeats)], as_json=asked.json)


if __name__ == "__main__":
    main()
