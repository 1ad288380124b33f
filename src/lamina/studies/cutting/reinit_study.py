"""The study `reinit`: what pre-training gave each layer, found by re-initialising the top blocks before fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lamina.errors import ConfigError
from lamina.studies.cutting.finetuned import block_counts, comparison_sentence, finetuned_rows, trained_scores
from lamina.studies.runner import Cell, Training, cell_settings, edited_stack, named_tasks, run_cells, study_of_cells
from lamina.studies.study import Figure, rows_where
from lamina.utils import JSON, check_types, pluralize

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.cutting.finetuned import Edits, FinetunedRow
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

_OP = "reinit"


@check_types("reinit")
def reinit(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Processor | None = None,
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
    """Re-initialise the top n blocks (n = 0 to the depth), fine-tune the whole model, and score it after training.

    Where the score stays the same as n grows, the task did not need what these blocks had learnt in pre-training. With
    fewer training rows the differences are larger.

    Args:
        model: A folder or name, which is loaded with a new head for each task; or a model with a head for the tasks,
            which is copied.
        tasks: Task name -> task, with the splits "train" and "validation"; or a single task.
        processor: Tokenizer or image processor. None: the one saved with the model.
        counts: Values of n: the numbers of top blocks to re-initialise. "all": 0 to the depth.
        fractions: Shares of the training rows to train on, each above 0 and at most 1; each seed draws other rows.
        seeds: Each seed decides the new weights, the head, which rows are drawn, and their order.
        scope: Which weights of the blocks are re-initialised; see `lamina.reinit_`.
        epochs: Number of fine-tuning epochs.
        batch_size: Rows per step.
        learning_rate: Peak learning rate; it falls to 0 linearly.
        max_length: Maximum tokens per text. None: what the model allows.
        stack: Name of the stack. None: the only one, or the encoder.
        output: Folder for the finished cells. None: nothing is written.
        resume: Do not repeat cells that are already finished in `output`.
        progress: Show a progress bar.
        ray: Where to run the cells as Ray tasks; see `lamina.studies.runner.run_cells`. None: in this process.

    Returns:
        A study with the columns "task", "fraction", "reinitialised" (number of blocks), "seed", "stage" ("trained"),
        "measure" (each metric of the task) and "score", on the validation rows after the last epoch.

    Raises:
        ConfigError: If a count or fraction is out of range, there is no seed, the stack has no module per block, or all
            cells failed; if `resume` is set without `output`, or the cells in `output` were run with other settings.
        UnknownNameError: If a task does not have both splits, or the stack does not exist.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found.
        StoreError: If `output` cannot be written, or a finished cell in it is damaged.

    Source:
        Singh and Giovanardi 2020, "How much does pre-trained information help?", figure 1: n = 0 to 12 of BERT, on all
        rows, a tenth and a hundredth, learning rate 2e-5, 3 epochs. The paper says nothing about biases and norms; here
        they keep their values.
    """
    named = named_tasks(tasks)
    edited = edited_stack(model, processor, stack, _OP)
    chosen = block_counts(_OP, counts, edited.depth, seeds)
    if wrong := [fraction for fraction in fractions if not 0 < fraction <= 1]:
        raise ConfigError(f"{_OP}: fractions has {wrong[0]}; each must be above 0 and at most 1.")
    training = Training(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, max_length=max_length)
    cells = [
        Cell(
            {"task": name, "fraction": fraction, "reinitialised": count, "seed": seed},
            partial(_cell, model, processor, task, fraction, _edits(edited, count, scope), seed, training),
        )
        for name, task in named.items()
        for fraction in fractions
        for count in chosen
        for seed in seeds
    ]
    options: dict[str, JSON] = {"counts": chosen, "fractions": list(fractions), "seeds": list(seeds), "scope": scope}
    settings = cell_settings(model, named, edited, training, **options)
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    sentences = [
        _sentence(table, name, task.metric, fraction)
        for name, task in named.items()
        for fraction in (fractions if len(table) else ())
    ]
    figures = {
        metric: Figure(
            "line",
            x="reinitialised",
            colour="fraction",
            facet="task",
            where={"measure": metric},
            title="Fine-tuned after the top blocks were re-initialised",
            x_title="blocks re-initialised, from the top",
            value_title=metric,
            note="While the line stays level, the task does not need what pre-training taught these blocks.",
        )
        for metric in dict.fromkeys(task.metric for task in named.values())
    }
    return study_of_cells(_OP, table, failures, settings, figures, sentences)


def _edits(stack: LayerStack, count: int, scope: str) -> Edits:
    """Return the edits that re-initialise the top `count` blocks of a stack; [] if `count` is 0.

    `scope` says which of their weights; see `lamina.reinit_`.
    """
    layers = list(range(stack.depth - count + 1, stack.depth + 1))
    return [("reinit", {"layers": layers, "scope": scope, "stack": stack.name})] if count else []


def _cell(
    model: PreTrainedModel | str | Path,
    processor: Processor | None,
    task: Task,
    fraction: float,
    edits: Edits,
    seed: int,
    training: Training,
) -> list[FinetunedRow]:
    """Run one cell: edit a new copy of the model, fine-tune it on a share of the training rows, and return its scores.

    `fraction` is the share, and `seed` decides the new weights, the rows and their order. Raises ConfigError if the
    share has no row, and the errors of `finetuned_rows`.
    """
    sample = task if fraction == 1 else task.subsample(fraction=fraction, seed=seed)
    return finetuned_rows(model, processor, sample, edits, seed, training)


def _sentence(table: DataFrame, task: str, metric: str, fraction: float) -> str:
    """Return a sentence that compares a task's scores with the most re-initialised blocks and with none.

    `fraction` is the share of the training rows that both models were trained on.
    """
    counts = rows_where(table, {"task": task, "fraction": fraction})["reinitialised"]
    most = max(map(int, counts), default=0)
    scores, reference = (
        trained_scores(table, task, metric, fraction=fraction, reinitialised=count) for count in (most, 0)
    )
    top = f"the top {pluralize(most, 'block')} re-initialised"
    return comparison_sentence(
        f"{task}, {fraction:.0%} of the rows: {metric} with {top}, against none", scores, reference
    )
