"""Inserted layers: the score against how many there are, at the top or the bottom, with and without the identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamina.errors import check_known
from lamina.studies.cutting.finetuned import block_counts, compared, finetuned, trained_scores
from lamina.studies.runner import Cell, run_cells
from lamina.studies.sources import cell_settings, edited_stack, named_tasks, study_of_cells
from lamina.studies.study import Figure
from lamina.utils import pluralize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

_OP = "insertion"
_STARTS: dict[str, dict[str, str]] = {
    "identity": {"init": "identity"},
    "xavier": {"init": "xavier", "placement": "output"},
}
_NONE = "none"  # the end and start of a model without inserted layers
Row = dict[str, Any]


def insertion(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Any = None,
    counts: Literal["all"] | Sequence[int] = "all",
    ends: Sequence[Literal["top", "bottom"]] = ("top", "bottom"),
    starts: Sequence[Literal["identity", "xavier"]] = ("identity", "xavier"),
    position: Literal["attention", "ffn", "both"] = "attention",
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    max_length: int | None = None,
    stack: str | None = None,
    output: Path | None = None,
    resume: bool = False,
    progress: bool = False,
    ray: str | None = None,
) -> Study:
    """Insert layers into the top k or the bottom k blocks, fine-tune everything, and score the last epoch.

    Each model is scored right after the insertion too: with a task of hidden tokens (`Task.masked_lm`) that says what
    the insertion breaks, and what of it training mends.

    Args:
        model: A folder or name, which is loaded with a new head for each task; or a model with a head for them.
        tasks: Name -> task, with train and validation parts.
        processor: Tokenizer or image processor; None: the one of the name.
        counts: How many blocks get inserted layers; "all": 0 to the depth.
        ends: Whether they are counted from the "top" or the "bottom".
        starts: "identity", so that nothing changes at first; or "xavier" with the activation on the output.
        position: Where in a block; see `lamina.insert_`.
        seeds: Each decides the new weights, the head and the order of the rows.
        epochs: Of fine-tuning, as in `reinit`; so are the options that follow.

    Returns:
        A study whose table has "task", "end", "start" (both "none" where nothing is inserted), "inserted" (how many
        blocks have layers), "seed", "stage" ("start", "trained"), "measure" (each metric of the task) and "score".

    Raises:
        ConfigError: If a count is out of range, there is no seed, or all cells failed.
        UnknownNameError: If there is no such end or start.

    Source:
        The insertion paper, figures 3, 4 and 6: layers in the top k and bottom k blocks; "xavier" is its "without the
        proposed method". The identity start here is exact, where the paper's is gelu(1) = 0.84 of it.
    """
    check_known(_OP, ends, ("top", "bottom"), "end")
    check_known(_OP, starts, _STARTS, "start")
    named = named_tasks(tasks)
    edited = edited_stack(model, processor, stack, _OP)
    chosen = block_counts(_OP, counts, edited.depth, seeds)
    training = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "max_length": max_length}
    ways = [(end, start, count) for end in ends for start in starts for count in chosen if count]
    ways = [*[(_NONE, _NONE, 0)] * (0 in chosen), *ways]
    cells = [
        Cell(
            {"task": name, "end": end, "start": start, "inserted": count, "seed": seed},
            partial(_cell, model, processor, task, _edits(edited, end, start, count, position), seed, training),
        )
        for name, task in named.items()
        for end, start, count in ways
        for seed in seeds
    ]
    own = {"counts": chosen, "ends": list(ends), "starts": list(starts), "position": position, "seeds": list(seeds)}
    settings = cell_settings(model, named, edited, training, **own)
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    tried = [(name, task.metric, way) for name, task in named.items() for way in _most(ways)] if len(table) else []
    return study_of_cells(_OP, table, failures, settings, _figures(named), [_sentence(table, *what) for what in tried])


def _edits(stack: LayerStack, end: str, start: str, count: int, position: str) -> list[tuple[str, Row]]:
    if not count:
        return []
    first = 1 if end == "bottom" else stack.depth - count + 1
    layers = list(range(first, first + count))
    return [("insert", {"position": position, "layers": layers, "stack": stack.name, **_STARTS[start]})]


def _cell(
    model: Any, processor: Any, task: Task, edits: Any, seed: int, training: Mapping[str, Any]
) -> list[dict[str, Any]]:
    return finetuned(model, processor, task, edits, seed, training, start=True)


def _most(ways: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Of each end and start the way with most layers."""
    return list({way[:2]: way for way in sorted(ways, key=lambda way: way[2]) if way[2]}.values())


def _sentence(table: Any, task: str, metric: str, way: tuple[str, str, int]) -> str:
    end, start, count = way
    what = f"{task}: {metric} with layers in the {end} {pluralize(count, 'block')}, {start} start, against none"
    scores = trained_scores(table, task, metric, end=end, start=start, inserted=count)
    return compared(what, scores, trained_scores(table, task, metric, inserted=0))


def _figures(tasks: Mapping[str, Task]) -> dict[str, Figure]:
    metrics = dict.fromkeys((task.metric, end) for task in tasks.values() for end in ("top", "bottom"))
    return {
        f"{metric} {end}": Figure(
            "line",
            x="inserted",
            colour="start",
            facet="task",
            where={"measure": metric, "stage": "trained", "end": end},
            title=f"Fine-tuned with layers inserted in the {end} blocks",
            x_title=f"blocks with inserted layers, from the {end}",
            value_title=metric,
            note="The identity start should stay level; another start breaks the model.",
        )
        for metric, end in metrics
    }
