"""The time that one text waits: a forward pass with 8 readers over the forward pass alone, batch 1, one thread.

    python benchmarks/latency.py [--json]

`CPU ms` and `CPU ratio` are processor time, which other work on the machine distorts less than the time that passes.
Budgets for 8 readers of whole texts on MiniLM: at most 1.15 for 8 tokens, 1.10 for 32 and 1.08 for 128.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import bank_of, base, options, report, synchronise, tokens

from lamina.demo.timing import in_turn, ratio

BUDGETS = {8: 1.15, 32: 1.10, 128: 1.08}


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=99)
    torch.set_num_threads(1)
    model = base("minilm").to(asked.device)
    rows: list[dict[str, Any]] = []
    for fusion in ("pooled_layers", "ada_layers"):
        bank = bank_of(model, 8, fusion)
        for length, budget in BUDGETS.items():
            inputs = tokens(model, 1, length)
            runs: dict[Any, Any] = {
                "base": lambda inputs=inputs: (model(**inputs), synchronise()),
                "bank": lambda bank=bank, inputs=inputs: (bank(**inputs, main=True), synchronise()),
            }
            used: dict[Any, list[float]] = {}
            with torch.inference_mode():
                taken = in_turn(runs, repeats=asked.repeats, processor=used)
            rows.append(
                {
                    "fusion": fusion,
                    "tokens": length,
                    "base ms": 1000 * statistics.median(taken["base"]),
                    "with readers ms": 1000 * statistics.median(taken["bank"]),
                    "ratio": ratio(taken, "bank", to="base"),
                    "base CPU ms": 1000 * statistics.median(used["base"]),
                    "with readers CPU ms": 1000 * statistics.median(used["bank"]),
                    "CPU ratio": ratio(used, "bank", to="base"),
                    "budget": budget if fusion == "pooled_layers" else "",
                }
            )
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
