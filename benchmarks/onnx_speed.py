"""The speed of an exported bank: a pass of MiniLM with 8 readers of whole texts, 16 x 64 tokens, in onnxruntime.

    python benchmarks/onnx_speed.py [--json]

onnxruntime and PyTorch both run on the CPU with one thread. The ratio is onnxruntime's time over PyTorch's.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from common import SHAPES, bank_of, base, options, report, tokens

from lamina.demo.timing import in_turn, ratio
from lamina.store.onnx import export_onnx

FUSIONS = ("ada_layers", "pooled_layers")


def session(folder: Path) -> Any:
    """Return an inference session for the graph in a folder, with one thread."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    path = str(folder / "model.onnx")
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def measured(fusion: str, repeats: int) -> dict[str, Any]:
    """Return the table row of a fusion; the passes in onnxruntime and in PyTorch take turns."""
    batch, length = SHAPES["minilm"]
    bank = bank_of(base("minilm"), 8, fusion)
    inputs = tokens(bank.model, batch, length)
    with tempfile.TemporaryDirectory() as folder:
        facts = export_onnx(bank, folder)
        graph = session(Path(folder))
    given = {name: value.numpy() for name, value in inputs.items()}
    with torch.inference_mode():
        runs: dict[str, Any] = {"torch": lambda: bank(**inputs), "onnx": lambda: graph.run(None, given)}
        taken = in_turn(runs, repeats=repeats)
    return {
        "fusion": fusion,
        "batch": f"{batch}x{length}",
        "readers": len(bank),
        "torch ms": 1000 * statistics.median(taken["torch"]),
        "onnx ms": 1000 * statistics.median(taken["onnx"]),
        "ratio": ratio(taken, "onnx", to="torch"),
        "difference": f"{facts.max_difference:.0e}",
    }


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=9)
    torch.set_num_threads(1)
    report([measured(fusion, asked.repeats) for fusion in FUSIONS], as_json=asked.json)


if __name__ == "__main__":
    main()
