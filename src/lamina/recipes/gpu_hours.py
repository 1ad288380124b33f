"""Convert operations to hours on GPUs that people rent, for each part of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.report_file import TableRow
    from lamina.recipes.sized_runs import SharedPass, SizedRun

# Card -> precision -> operations per second at its peak, without sparsity, from NVIDIA's data sheets (SXM). PyTorch
# computes float32 products in float32 by default, not in TF32.
CARDS = {
    "A100": {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
    "H100": {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
}
REACHED = 0.4  # share of the peak that training reaches with long texts and full batches


def gpu_hours(flops: float, precision: str) -> dict[str, float]:
    """Return GPU name -> hours that one GPU takes for a number of operations, at `REACHED` of its peak rate."""
    return {card: flops / (peak[precision] * REACHED) / 3600 for card, peak in CARDS.items()}


def parts(planned: Sequence[SizedRun], passes: Sequence[SharedPass]) -> list[TableRow]:
    """Return the cost of each part of a recipe: one row per task and method, and one per task for shared passes.

    Args:
        planned: All runs.
        passes: The passes of the base model that readers share; empty if every run trains a whole model.

    Returns:
        Rows with "task", "method" (None: the base model, whose passes all readers of the task share), "runs", "flops"
        and "hours" (card -> hours).
    """
    costs: dict[tuple[str, str | None], tuple[int, int, str]] = {}
    for shared in passes:
        _, flops, precision = costs.get((shared.task, None), (0, 0, shared.runs[0].options.precision))
        costs[shared.task, None] = (len(shared.runs), flops + shared.flops, precision)
    for run in planned:
        key = (run.spec.task, str(run.spec.settings["method"]))
        count, flops, precision = costs.get(key, (0, 0, run.options.precision))
        costs[key] = (count + 1, flops + run.flops, precision)
    return [
        {"task": task, "method": method, "runs": count, "flops": flops, "hours": gpu_hours(flops, precision)}
        for (task, method), (count, flops, precision) in costs.items()
    ]
