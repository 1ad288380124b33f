"""The cost of inserted layers: forward passes with them, and after merging them, over those of the untouched model.

    python benchmarks/merge.py [--json]

MiniLM at 16 x 64 tokens, with layers inserted in all six blocks. Budget: merged 1.00 ± 0.03.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from common import SHAPES, base, options, report, synchronise, tokens

import lamina
from lamina.demo.timing import in_turn, ratio

POSITIONS = ("attention", "ffn", "both")
BUDGET = "0.97-1.03"


def main() -> None:
    """Measure and print."""
    asked = options(__doc__ or "", repeats=25)
    model = base("minilm").to(asked.device)
    inputs = tokens(model, *SHAPES["minilm"])
    models: dict[str, Any] = {"untouched": model}
    for position in POSITIONS:
        models[position] = copy.deepcopy(model)
        lamina.insert_(models[position], position, layers="1-")
    models["merged"] = copy.deepcopy(models["both"])
    lamina.merge_(models["merged"])
    runs = {name: lambda one=one: (one(**inputs), synchronise()) for name, one in models.items()}
    with torch.no_grad():
        taken = in_turn(runs, repeats=asked.repeats)
    rows = [
        {
            "model": name,
            "parameters": sum(parameter.numel() for parameter in one.parameters()),
            "ms": 1000 * statistics.median(taken[name]),
            "ratio": ratio(taken, name, to="untouched"),
            "budget": BUDGET if name == "merged" else "",
        }
        for name, one in models.items()
    ]
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
