"""An exported bank in onnxruntime beside PyTorch: the same pass of MiniLM with 8 readers of whole texts, 16 x 64 tokens.

    python benchmarks/onnx.py [--json]

Both run on the CPU with one thread. The ratio is that of onnxruntime's time to PyTorch's; `--repeats` turns are counted.
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
    """The graph of a folder, with one thread."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    path = str(folder / "model.onnx")
    return onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=9)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for fusion in FUSIONS:
        batch, length = SHAPES["minilm"]
        bank = bank_of(base("minilm"), 8, fusion)
        inputs = tokens(bank.model, batch, length)
        with tempfile.TemporaryDirectory() as folder:
            facts = export_onnx(bank, folder)
            graph = session(Path(folder))
        given = {name: value.numpy() for name, value in inputs.items()}
        runs: dict[Any, Any] = {"torch": lambda: bank(**inputs), "onnx": lambda: graph.run(None, given)}
        with torch.inference_mode():
            taken = in_turn(runs, repeats=asked.repeats)
        rows.append(
            {
                "fusion": fusion,
                "batch": f"{batch}x{length}",
                "readers": len(bank),
                "torch ms": 1000 * statistics.median(taken["torch"]),
                "onnx ms": 1000 * statistics.median(taken["onnx"]),
                "ratio": ratio(taken, "onnx", to="torch"),
                "difference": f"{facts.max_difference:.0e}",
            }
        )
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
