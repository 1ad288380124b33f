"""Early end of a pass: the time of a reader that needs only low layers, relative to a full pass of the base model.

    python benchmarks/early_stop.py [--json]

Budget: a reader that needs layers up to l of L takes at most l/L + 0.1 of the full pass of the base model alone.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import SHAPES, base, options, report, synchronise, tokens

from lamina import Reader, ReaderBank, SequenceClassification, SingleLayer
from lamina.demo.timing import in_turn, ratio


def main() -> None:
    """Measure and print a row per layer."""
    arguments = options(__doc__ or "", repeats=15)
    model = base("minilm").to(arguments.device)
    inputs = tokens(model, *SHAPES["minilm"])
    depth = model.config.num_hidden_layers
    runs: dict[str | int, Any] = {"base": lambda: (model(**inputs), synchronise())}
    for layer in range(1, depth + 1):
        bank = ReaderBank(model)
        bank.add("reader", Reader(SingleLayer(layer, dim=64), SequenceClassification(("no", "yes"))))
        bank.eval()
        runs[layer] = lambda bank=bank: (bank(**inputs), synchronise())
    with torch.no_grad():
        seconds = in_turn(runs, repeats=arguments.repeats)
    rows = [
        {
            "layer": layer,
            "of": depth,
            "base ms": 1000 * statistics.median(seconds["base"]),
            "reader ms": 1000 * statistics.median(seconds[layer]),
            "ratio": ratio(seconds, layer, to="base"),
            "budget": layer / depth + 0.1,
        }
        for layer in range(1, depth + 1)
    ]
    report(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
