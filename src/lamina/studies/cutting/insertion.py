"""The study `insertion`: what inserted layers cost, by their number, their position and their initial weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from lamina.errors import check_known
from lamina.studies.cutting.finetuned import block_counts, comparison_sentence, finetuned_rows, trained_scores
from lamina.studies.runner import Cell, Training, cell_settings, edited_stack, named_tasks, run_cells, study_of_cells
from lamina.studies.study import Figure
from lamina.utils import JSON, check_types, pluralize

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.cutting.finetuned import Edits
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

_OP = "insertion"
_STARTS: dict[str, dict[str, JSON]] = {  # name of a start -> the arguments of `insert_` that give it
    "identity": {"init": "identity"},
    "xavier": {"init": "xavier", "placement": "output"},
}
_NONE = "none"  # the end and the start of a model without inserted layers


class _Insertion(NamedTuple):
    """One setting of the study: which blocks get inserted layers, and how the layers are initialised.

    Its fields are table columns.

    Attributes:
        end: Whether the blocks are the "top" or the "bottom" ones of the stack; "none" if no block gets a layer.
        start: Initial weights: "identity", "xavier", or "none".
        inserted: Number of blocks that get inserted layers.
    """

    end: str
    start: str
    inserted: int


@check_types("insertion")
def insertion(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Processor | None = None,
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
    """Insert layers into the top k or the bottom k blocks, fine-tune the whole model, and score it after training.

    Each model is also scored right after the insertion, before training. On a masked language modelling task
    (`Task.masked_lm`) that score shows how much the insertion harms the model, and the score after training shows how
    much of the harm is repaired.

    Args:
        model: A folder or name, which is loaded with a new head for each task; or a model with a head for the tasks,
            which is copied.
        tasks: Task name -> task, with the splits "train" and "validation"; or a single task.
        processor: Tokenizer or image processor. None: the one saved with the model.
        counts: Values of k: the numbers of blocks that get inserted layers. "all": 0 to the depth.
        ends: Whether the k blocks are the "top" ones, the "bottom" ones, or each in turn.
        starts: Initial weights: "identity", which changes no output at first, or "xavier", with the activation applied
            to the inserted layer's output.
        position: Where in a block the layers are inserted; see `lamina.insert_`.
        seeds: Each seed decides the new weights, the head and the order of the rows.
        epochs: Number of fine-tuning epochs. This and all further options are the same as in `reinit`.

    Returns:
        A study with the columns "task", "end", "start" (both "none" if nothing is inserted), "inserted" (number of
        blocks with inserted layers), "seed", "stage" ("start": before training; "trained": after it), "measure" (each
        metric of the task) and "score".

    Raises:
        ConfigError: If a count is out of range, there is no seed, the stack has no module per block, or all cells
            failed; if `resume` is set without `output`, or the cells in `output` were run with other settings.
        UnknownNameError: If an end, a start or the stack does not exist, or a task does not have both splits.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found.
        StoreError: If `output` cannot be written, or a finished cell in it is damaged.

    Source:
        The insertion paper, figures 3, 4 and 6: layers in the top k and bottom k blocks; "xavier" is its "without the
        proposed method". Here the identity start is exact; the paper's is gelu(1) = 0.84 times the identity.
    """
    check_known(_OP, ends, ("top", "bottom"), "end")
    check_known(_OP, starts, _STARTS, "start")
    named = named_tasks(tasks)
    edited = edited_stack(model, processor, stack, _OP)
    chosen = block_counts(_OP, counts, edited.depth, seeds)
    training = Training(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, max_length=max_length)
    insertions = [_Insertion(_NONE, _NONE, 0)] if 0 in chosen else []
    insertions += [_Insertion(end, start, count) for end in ends for start in starts for count in chosen if count]
    score = partial(finetuned_rows, model, processor, training=training, score_start=True)
    cells = [
        Cell(
            {"task": name, **inserted._asdict(), "seed": seed},
            partial(score, task, _edits(edited, inserted, position), seed),
        )
        for name, task in named.items()
        for inserted in insertions
        for seed in seeds
    ]
    options: dict[str, JSON] = {
        "counts": chosen,
        "ends": list(ends),
        "starts": list(starts),
        "position": position,
        "seeds": list(seeds),
    }
    settings = cell_settings(model, named, edited, training, **options)
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    sentences = [
        _sentence(table, name, task.metric, inserted)
        for name, task in named.items()
        for inserted in (_with_most_layers(insertions) if len(table) else ())
    ]
    return study_of_cells(_OP, table, failures, settings, _figures(named), sentences)


def _edits(stack: LayerStack, inserted: _Insertion, position: str) -> Edits:
    """Return the edits that insert the layers of one setting, at `position` in its blocks; [] if it has none."""
    if not inserted.inserted:
        return []
    first = 1 if inserted.end == "bottom" else stack.depth - inserted.inserted + 1
    layers = list(range(first, first + inserted.inserted))
    return [("insert", {"position": position, "layers": layers, "stack": stack.name, **_STARTS[inserted.start]})]


def _with_most_layers(insertions: Sequence[_Insertion]) -> list[_Insertion]:
    """Return the settings with layers in the most blocks, one for each combination of `end` and `start`."""
    by_count = sorted(
        (inserted for inserted in insertions if inserted.inserted), key=lambda inserted: inserted.inserted
    )
    return list({(inserted.end, inserted.start): inserted for inserted in by_count}.values())


def _sentence(table: DataFrame, task: str, metric: str, inserted: _Insertion) -> str:
    """Return a sentence that compares a task's scores with the inserted layers of one setting and without layers."""
    blocks = f"the {inserted.end} {pluralize(inserted.inserted, 'block')}"
    what = f"{task}: {metric} with layers in {blocks}, {inserted.start} start, against none"
    scores = trained_scores(table, task, metric, **inserted._asdict())
    return comparison_sentence(what, scores, trained_scores(table, task, metric, inserted=0))


def _figures(tasks: Mapping[str, Task]) -> dict[str, Figure]:
    """Return chart name -> line chart of the score over the number of blocks with new layers, per metric and end."""
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
            note="The identity start should stay level. A line that falls shows that its start damages the model.",
        )
        for metric, end in metrics
    }
