"""What pre-training gave each layer: re-initialise the top blocks, fine-tune, and see what is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamina.studies.cutting.finetuned import block_counts, compared, finetuned, trained_scores
from lamina.studies.runner import Cell, run_cells
from lamina.studies.sources import cell_settings, edited_stack, named_tasks, study_of_cells
from lamina.studies.study import Figure
from lamina.utils import check_range, pluralize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.studies.study import Study
    from lamina.tasks.task import Task

_OP = "reinit"


def reinit(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Any = None,
    counts: Literal["all"] | Sequence[int] = "all",
    fractions: Sequence[float] = (1.0, 0.1, 0.01),
    seeds: Sequence[int] = (0, 1, 2),
    scope: Literal["linear", "block"] = "linear",
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
    """Re-initialise the top n blocks, n = 0 to the depth, fine-tune everything, and score the last epoch.

    Where the curve stays flat, what the blocks had learnt was of no use to the task; fewer rows show it more clearly.

    Args:
        model: A folder or name, which is loaded with a new head for each task; or a model with a head for them.
        tasks: Name -> task, with train and validation parts.
        processor: Tokenizer or image processor; None: the one of the name.
        counts: How many blocks, from the top; "all": 0 to the depth.
        fractions: Shares of the training rows, drawn anew for each seed.
        seeds: Each decides the new weights, the head, the rows drawn and their order.
        scope: What of the blocks is drawn anew; see `lamina.reinit_`.
        epochs: Of fine-tuning.
        batch_size: Rows per step.
        learning_rate: The highest one, which falls to 0 linearly.
        max_length: Tokens of a text; None: what the model reads.
        stack: Which stack; None: the only one, or the encoder.
        output: Folder for the cells that ended; None: memory alone.
        resume: Run no cell again that ended there.
        progress: Show a progress bar.
        ray: See `lamina.studies.runner.run_cells`.

    Returns:
        A study whose table has "task", "fraction", "reinitialised" (how many blocks), "seed", "stage" ("trained"),
        "measure" (each metric of the task) and "score".

    Raises:
        ConfigError: If a count or fraction is out of range, there is no seed, or all cells failed.

    Source:
        Singh and Giovanardi 2020, "How much does pre-trained information help?", figure 1: n = 0 to 12 of BERT, on all
        rows, a tenth and a hundredth, learning rate 2e-5, 3 epochs. Biases and norms, of which it says nothing,
        are kept.
    """
    named = named_tasks(tasks)
    edited = edited_stack(model, processor, stack, _OP)
    chosen = block_counts(_OP, counts, edited.depth, seeds)
    for fraction in fractions:
        check_range(_OP, "fractions", fraction, 0, 1)
    training = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "max_length": max_length}
    cells = [
        Cell(
            {"task": name, "fraction": fraction, "reinitialised": count, "seed": seed},
            partial(
                _cell, model, processor, task, fraction, _edits(count, edited.depth, scope, edited.name), seed, training
            ),
        )
        for name, task in named.items()
        for fraction in fractions
        for count in chosen
        for seed in seeds
    ]
    own = {"counts": chosen, "fractions": list(fractions), "seeds": list(seeds), "scope": scope}
    settings = cell_settings(model, named, edited, training, **own)
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    tried = [(name, task.metric, fraction) for name, task in named.items() for fraction in fractions]
    figures = {
        metric: Figure(
            "line",
            x="reinitialised",
            colour="fraction",
            facet="task",
            where={"measure": metric},
            title="Fine-tuned after the top blocks were drawn anew",
            x_title="blocks re-initialised, from the top",
            value_title=metric,
            note="Flat: what those blocks had learnt was of no use to the task.",
        )
        for metric in dict.fromkeys(task.metric for task in named.values())
    }
    said = [_sentence(table, *what) for what in tried] if len(table) else []
    return study_of_cells(_OP, table, failures, settings, figures, said)


def _edits(count: int, depth: int, scope: str, stack: str) -> list[tuple[str, dict[str, Any]]]:
    layers = list(range(depth - count + 1, depth + 1))
    return [("reinit", {"layers": layers, "scope": scope, "stack": stack})] if count else []


def _cell(
    model: Any, processor: Any, task: Task, fraction: float, edits: Any, seed: int, training: Mapping[str, Any]
) -> list[dict[str, Any]]:
    sample = task if fraction == 1 else task.subsample(fraction=fraction, seed=seed)
    return finetuned(model, processor, sample, edits, seed, training)


def _sentence(table: Any, task: str, metric: str, fraction: float) -> str:
    """What is lost with the most blocks drawn anew."""
    reached = table[(table["task"] == task) & (table["fraction"] == fraction)]["reinitialised"]
    most = int(reached.max()) if len(reached) else 0
    scores, none = (trained_scores(table, task, metric, fraction=fraction, reinitialised=count) for count in (most, 0))
    top = f"the top {pluralize(most, 'block')} re-initialised"
    what = f"{task}, {fraction:.0%} of the rows: {metric} with {top}, against none"
    return compared(what, scores, none)
