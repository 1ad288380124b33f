"""What `lamina train --dry-run` prints: what a recipe would do and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.cli.output import print_table
from lamina.recipes.estimate import readable
from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.recipes.estimate import Estimate


def print_estimate(cost: Estimate) -> None:
    """Print what a recipe would do and cost."""
    model, flops = cost.model, cost.flops
    print(f"{model['name']}: {model['parameters']:,} parameters, {'trained' if model['trained'] else 'frozen'}")
    columns = ("task", "method", "settings", "runs", "epochs", "steps", "parameters", "by edits", "trained", "FLOPs")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in cost.runs:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    print_table("Runs", columns, [_run(rows) for rows in groups.values()])
    names = ("task", "rows", "validation", "tokens", "repeats", "runs", "steps_per_epoch", "steps")
    tasks = [{**row, "tokens": f"{row['tokens']} + {row['target']}"} if row["target"] else row for row in cost.tasks]
    print_table("Tasks", [name.replace("_", " ") for name in names], [[row[name] for name in names] for row in tasks])
    shared = f", {readable(flops['base'])} of them in the model that readers share" if flops["base"] else ""
    steps = pluralize(sum(row["steps"] for row in tasks), "step")
    print(
        f"At most {steps}, about {readable(flops['total'])}FLOPs{shared}: "
        f"2 x parameters x tokens, 3 times that with gradients; {flops['total'] / 3.6e15:.2g} h at 1 TFLOP/s."
    )
    cache = f"; a cache of the states would take {readable(cost.cache_bytes)}B" if cost.cache_bytes else ""
    print(f"Weights, gradients and the optimizer's moments take up to {readable(cost.memory_bytes)}B{cache}.")
    batch = f"a batch of {pluralize(cost.kept_rows, 'row')}"
    kept = f"readers keep up to {readable(cost.kept_bytes)}B for the gradients of {batch}"
    for note in [*([kept] if cost.kept_rows else []), *cost.notes]:
        print(f"({note})")


def _run(rows: list[dict[str, Any]]) -> tuple[object, ...]:
    """One line for all settings of a task and method: how many values there are, or the lowest and the highest."""
    values = {key: list(dict.fromkeys(str(row["settings"][key]) for row in rows)) for key in rows[0]["settings"]}
    settings = [f"{key}={given[0]}" if len(given) == 1 else f"{len(given)} x {key}" for key, given in values.items()]
    columns = ("epochs", "steps", "parameters", "added", "trained")
    spans = ([min(row[key] for row in rows), max(row[key] for row in rows)] for key in columns)
    return (
        *(rows[0]["task"], rows[0]["method"], ", ".join(settings), sum(row["count"] for row in rows)),
        *(low if low == high else f"{readable(low)} to {readable(high)}" for low, high in spans),
        readable(sum(row["flops"] for row in rows)),
    )
