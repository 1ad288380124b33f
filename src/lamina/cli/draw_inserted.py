"""`lamina inspect --inserted-weights`: what training made of inserted layers, drawn and as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamina.cli.output import print_json, print_table

_TITLE = "Means of the inserted weights, on the diagonal and off it; of the change those of its absolute value"


def draw_inserted(names: list[str], path: Path, head: int, chosen: dict[str, Any], *, as_json: bool) -> None:
    """Draw one inserted layer of some models, and print the means of all their inserted layers."""
    from lamina.report.weight_maps import weight_maps
    from lamina.report.weights import chosen_weight, diagonals, inserted_weights
    from lamina.store import load, saved_class

    found = {name: inserted_weights(load(name, saved_class(name))[0]) for name in dict.fromkeys(names)}
    labels = [Path(name).name for name in found]
    shown = dict(zip(found if len(set(labels)) < len(labels) else labels, found.values(), strict=True))
    weight_maps({label: chosen_weight(weights, **chosen) for label, weights in shown.items()}, path, head=head)
    rows = [{"model": label, **row} for label, weights in shown.items() for row in diagonals(weights)]
    if as_json:
        print_json(rows)
        return
    print_table(_TITLE, [column.replace("_", " ") for column in rows[0]], [list(row.values()) for row in rows])
    print(f"drawn in {path}")
