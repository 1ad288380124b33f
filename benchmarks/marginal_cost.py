"""What readers add to a pass: the base's forward with n AdaLayers readers over the forward alone.

    python benchmarks/marginal_cost.py [--json]

Budgets: 8 readers at RoBERTa-large's shape, batch 4 x 128 tokens, at most 1.10; on MiniLM, 16 x 64, at most 1.25.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import SHAPES, ada_bank, base, options, report, synchronise, tokens

from lamina.demo.timing import in_turn, ratio

BUDGETS = {("minilm", 8): 1.25, ("roberta-large", 8): 1.10}


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=9)
    rows: list[dict[str, Any]] = []
    for name, (batch, length) in SHAPES.items():
        model = base(name).to(asked.device)
        inputs = tokens(model, batch, length)
        banks = {count: ada_bank(model, count) for count in (1, 2, 4, 8, 16)}
        runs: dict[str | int, Any] = {"base": lambda model=model, inputs=inputs: (model(**inputs), synchronise())}
        for count, bank in banks.items():
            runs[count] = lambda bank=bank, inputs=inputs: (bank(**inputs, main=True), synchronise())
        with torch.no_grad():
            taken = in_turn(runs, repeats=asked.repeats)
        for count in banks:
            rows.append(
                {
                    "base": name,
                    "batch": f"{batch}x{length}",
                    "readers": count,
                    "base ms": 1000 * statistics.median(taken["base"]),
                    "with readers ms": 1000 * statistics.median(taken[count]),
                    "ratio": ratio(taken, count, to="base"),
                    "budget": BUDGETS.get((name, count), ""),
                }
            )
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
