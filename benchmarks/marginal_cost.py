"""The cost that readers add to a pass: a forward pass with n readers of whole texts over the forward pass alone.

    python benchmarks/marginal_cost.py [--json]

Budgets: 8 AdaLayers readers on a model of RoBERTa-large's shape, batch 4 x 128 tokens, at most 1.10; on MiniLM, 16 x
64, at most 1.25; 8 PooledLayers readers on MiniLM at most 1.06. PairedLayers reads the same tokens as pairs of texts of
equal length. It is not measured on RoBERTa's shape, which has no tokenizer that could separate the texts of a pair.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import SHAPES, bank_of, base, options, report, synchronise, tokens

import lamina
from lamina.demo.timing import in_turn, ratio

BUDGETS = {("minilm", "ada_layers"): 1.15, ("minilm", "pooled_layers"): 1.06, ("roberta-large", "ada_layers"): 1.04}
COUNTS = (1, 2, 4, 8, 16)
FUSIONS = {
    "minilm": ("ada_layers", "pooled_layers", "paired_layers"),
    "roberta-large": ("ada_layers", "pooled_layers"),
}


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=9)
    rows: list[dict[str, Any]] = []
    for name, (batch, length) in SHAPES.items():
        model = base(name).to(asked.device)
        inputs, processor = tokens(model, batch, length), None
        if "paired_layers" in FUSIONS[name]:
            processor = lamina.load(name)[1]
            inputs["input_ids"][:, [length // 2, -1]] = processor.sep_token_id
        banks = {(f, count): bank_of(model, count, f, processor) for f in FUSIONS[name] for count in COUNTS}
        runs: dict[Any, Any] = {"base": lambda model=model, inputs=inputs: (model(**inputs), synchronise())}
        for key, bank in banks.items():
            runs[key] = lambda bank=bank, inputs=inputs: (bank(**inputs, main=True), synchronise())
        used: dict[Any, list[float]] = {}
        with torch.no_grad():
            taken = in_turn(runs, repeats=asked.repeats, processor=used)
        for fusion, count in banks:
            rows.append(
                {
                    "base": name,
                    "batch": f"{batch}x{length}",
                    "fusion": fusion,
                    "readers": count,
                    "base ms": 1000 * statistics.median(taken["base"]),
                    "with readers ms": 1000 * statistics.median(taken[fusion, count]),
                    "ratio": ratio(taken, (fusion, count), to="base"),
                    "CPU ratio": ratio(used, (fusion, count), to="base"),
                    "budget": BUDGETS.get((name, fusion), "") if count == 8 else "",
                }
            )
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
