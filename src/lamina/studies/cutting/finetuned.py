"""The studies `insertion` and `reinit`, which edit a model, fine-tune it, and compare scores seed by seed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch

from lamina.errors import ConfigError, check_known
from lamina.prediction.evaluate import evaluate
from lamina.recipes.edits import apply_edits
from lamina.studies.runner import (
    Cell,
    CellInputs,
    Training,
    check_given,
    fresh_model,
    named_tasks,
    run_cells,
    study_of_cells,
    whole_digests,
)
from lamina.studies.study import Figure, rows_where, scores_by_seed
from lamina.tasks.metrics import LOWER
from lamina.train.fit import finetune
from lamina.train.results import summarise
from lamina.utils import JSON, Row, check_range, check_types, derive_seed, pluralize, seed_torch

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

# Names of edits with their arguments, as in the methods of a recipe: [("insert", {"position": "ffn", ...})].
Edits: TypeAlias = Sequence[tuple[str, Mapping[str, JSON]]]


def finetuned_rows(inputs: CellInputs, task: Task, edits: Edits, seed: int, *, score_start: bool = False) -> list[Row]:
    """Load or copy a model, edit it, fine-tune all of its weights, and return its scores after the last epoch.

    Raises LaminaError if the model cannot be loaded, an edit cannot be applied, or training fails.

    Args:
        inputs: The model, processor and training options. A model given by name or folder is loaded with a new head for
            the task; otherwise the model is copied with its head. The stack is not used: the edits name theirs.
        task: The task to train on ("train" split) and to score on ("validation" split).
        edits: Edits to apply before training; may be empty.
        seed: Decides the weights of a new head, the new weights of the edits, and the order of the rows.
        score_start: Whether to score the edited model before training as well.

    Returns:
        One table row per metric of the task ("measure"), with the score on the validation split and the "stage":
        "trained", after the last epoch. With `score_start`, rows of the stage "start", before training, come first.
    """
    kind, training = task.kind, inputs.training
    with torch.random.fork_rng():
        seed_torch(derive_seed(seed, "head"))
        labels = task.labels if kind.has_classes else None
        edited, used_processor = fresh_model(inputs.model, inputs.processor, head=kind.auto_class, labels=labels)
    apply_edits(edited, edits, seed=seed, where="study")
    stages: dict[str, Mapping[str, float]] = {}
    if score_start:
        scores = evaluate(edited, {"task": task}, processor=used_processor, max_length=training["max_length"])
        stages["start"] = scores["task"]
    result = finetune(edited, task, processor=used_processor, seed=seed, keep="last", progress=False, **training)
    (stages["trained"],) = result.best.values()
    return [
        {"stage": stage, "measure": metric, "score": scores[metric]}
        for stage, scores in stages.items()
        for metric in task.metrics
        if metric in scores
    ]


def block_counts(op: str, counts: Literal["all"] | Collection[int], depth: int) -> list[int]:
    """Return the `counts` of blocks that a study edits, one per fine-tuned model; "all" stands for 0 to `depth`.

    Raises ConfigError, whose message begins with `op`, if a number is below 0 or above `depth`; UnknownNameError if
    `counts` is another string.
    """
    check_known(op, [counts] if isinstance(counts, str) else [], ["all"], "text of counts")
    chosen = list(range(depth + 1)) if counts == "all" else list(counts)
    for count in chosen:
        check_range(op, "counts", count, 0, depth)
    return chosen


def comparison_sentence(what: str, scores: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Return a sentence that compares the scores of edited and unedited models, seed by seed.

    `what` begins the sentence, and says what the two kinds of models are. `scores` and `reference` are seed -> score of
    the edited, and of the unedited, model that was trained with this seed. With fewer than three seeds in both, no
    interval is claimed; with none, the sentence says that there is nothing to compare.
    """
    seeds = [seed for seed in scores if seed in reference]
    if not seeds:
        return f"{what}: nothing to compare it with: no score without the edit."
    difference = summarise([scores[seed] - reference[seed] for seed in seeds])
    facts = f"{summarise(list(scores.values())).mean:.3f}, {difference.mean:+.3f}"
    half = difference.shown_interval
    if half is None:
        count = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return f"{what}: {facts} ({count}; no interval is claimed)."
    interval = f"95 % {difference.mean - half:+.3f} to {difference.mean + half:+.3f}"
    verdict = "a difference" if abs(difference.mean) > half else "no difference can be concluded"
    return f"{what}: {facts} ({interval}, {difference.count} seeds): {verdict}."


def _trained_sentence(
    table: DataFrame, what: str, where: Mapping[str, JSON], edited: Mapping[str, JSON], unedited: Mapping[str, JSON]
) -> str:
    """Return a sentence that begins with `what` and compares the scores of two settings after the last epoch.

    `where` (column -> value) chooses rows of the study's `table`. The values in `edited` then choose the rows of edited
    models, and the values in `unedited` the rows of the others.
    """
    scores, reference = (
        scores_by_seed(table, {**where, "stage": "trained", **setting}) for setting in (edited, unedited)
    )
    return comparison_sentence(what, scores, reference)


_OP = "insertion"
_STARTS: dict[str, dict[str, JSON]] = {  # name of a start -> the arguments of `insert_` that give it
    "identity": {"init": "identity"},
    "xavier": {"init": "xavier", "placement": "output"},
}
_NONE = "none"  # the end and the start of a model without inserted layers


class _Insertion(NamedTuple):
    """One setting of the study: which blocks get inserted layers, and how the layers are initialised.

    Its fields are table columns; see `insertion`.
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
    counts: Literal["all"] | Collection[int] = "all",
    ends: Sequence[Literal["top", "bottom"]] = ("top", "bottom"),
    starts: Sequence[Literal["identity", "xavier"]] = ("identity", "xavier"),
    position: Literal["attention", "ffn", "both"] = "attention",
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    max_length: int | None = None,
    stack: str | None = None,
    output: str | Path | None = None,
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
        seeds: Each seed decides the new weights, the head (if the model is loaded) and the order of the rows.
        epochs: Number of fine-tuning epochs. This and all further options are the same as in `reinit`.

    Returns:
        A study with the columns "task", "end", "start" (both "none" if nothing is inserted), "inserted" (number of
        blocks with inserted layers), "seed", "stage" ("start": before training; "trained": after it), "measure" (each
        metric of the task) and "score".
        Cells that raised an error have no rows; the study's `settings["failures"]` lists them.

    Raises:
        ConfigError: If an option is out of range, a list or `tasks` is empty, an entry of a list occurs twice, the
            processor fits no task, the stack has no module per block, or all cells failed; if `resume` is set without
            `output`, or the cells in `output` were run with other settings or library versions.
        UnknownNameError: If an end, a start, the position or the stack does not exist, or a task does not have both
            splits.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found.
        StoreError: If files of `model` are damaged, `output` cannot be written, or a finished cell in it is damaged.
        MissingExtraError: If `ray` is set and Ray is not installed.

    Source:
        The insertion paper, figures 3, 4 and 6: layers in the top k and bottom k blocks; "xavier" is its "without the
        proposed method". Here the identity start is exact; the paper's is gelu(1) = 0.84 times the identity.
    """
    check_known(_OP, ends, ("top", "bottom"), "end")
    check_known(_OP, starts, _STARTS, "start")
    check_known(_OP, [position], ("attention", "ffn", "both"), "position")
    named = named_tasks(_OP, tasks)
    check_given(_OP, tasks=named, counts=counts, seeds=seeds)
    training = Training(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, max_length=max_length)
    inputs = CellInputs(model, processor, stack, training)
    edited, settings, head = inputs.check(_OP, named, seeds, ends=list(ends), starts=list(starts), position=position)
    settings["counts"] = chosen = block_counts(_OP, counts, edited.depth)
    if any(chosen):
        check_given(_OP, ends=ends, starts=starts)
    insertions = [_Insertion(_NONE, _NONE, 0)] if 0 in chosen else []
    insertions += [_Insertion(end, start, count) for end in ends for start in starts for count in chosen if count]
    cells = [
        Cell(
            {"task": name, **inserted._asdict(), "seed": seed},
            partial(finetuned_rows, inputs, task, _edits(edited, inserted, position), seed, score_start=True),
            digests=whole_digests(head),
        )
        for name, task in named.items()
        for inserted in insertions
        for seed in seeds
    ]
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    most = [inserted for inserted in insertions if inserted.inserted == max(chosen) > 0]
    sentences = [
        _sentence(table, name, task.metric, inserted)
        for name, task in named.items()
        for inserted in (most if len(table) else ())
    ]
    return study_of_cells(_OP, table, failures, settings, _figures(named, ends), sentences)


def _edits(stack: LayerStack, inserted: _Insertion, position: str) -> Edits:
    """Return the edits that insert the layers of one setting, at `position` in its blocks; [] if it has none."""
    if not inserted.inserted:
        return []
    first = 1 if inserted.end == "bottom" else stack.depth - inserted.inserted + 1
    layers = list(range(first, first + inserted.inserted))
    return [("insert", {"position": position, "layers": layers, "stack": stack.name, **_STARTS[inserted.start]})]


def _sentence(table: DataFrame, task: str, metric: str, inserted: _Insertion) -> str:
    """Return a sentence that compares a task's scores with the inserted layers of one setting and without layers."""
    blocks = f"the {inserted.end} {pluralize(inserted.inserted, 'block')}"
    what = f"{task}: {metric} with layers in {blocks}, {inserted.start} start, against none"
    where = {"task": task, "measure": metric}
    return _trained_sentence(table, what, where, inserted._asdict(), {"inserted": 0})


def _figures(tasks: Mapping[str, Task], ends: Sequence[str]) -> dict[str, Figure]:
    """Return chart name -> line chart of the score over the number of blocks with new layers, per metric and end.

    Each chart also shows the model without inserted layers, as a point of the start "none".
    """
    metrics = dict.fromkeys((task.metric, end) for task in tasks.values() for end in ends)
    level = "The identity start should stay level with the model without inserted layers (start none)."
    return {
        f"{metric} {end}": Figure(
            "line",
            x="inserted",
            colour="start",
            facet="task",
            where={"measure": metric, "stage": "trained", "end": [end, _NONE]},
            title=f"Fine-tuned with layers inserted in the {end} blocks",
            x_title=f"blocks with inserted layers, from the {end}",
            value_title=metric,
            note=f"{level} A line that {_worse(metric)} shows that its start damages the model.",
        )
        for metric, end in metrics
    }


def _worse(metric: str) -> str:
    """Return the verb for a score that gets worse."""
    return "rises" if metric in LOWER else "falls"


_REINIT = "reinit"


@check_types("reinit")
def reinit(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Processor | None = None,
    counts: Literal["all"] | Collection[int] = "all",
    fractions: Sequence[float] = (1.0, 0.1, 0.01),
    seeds: Sequence[int] = (0, 1, 2),
    scope: Literal["linear", "block"] = "linear",
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    max_length: int | None = None,
    stack: str | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    ray: str | None = None,
) -> Study:
    """Re-initialise the top n blocks (n = 0 to the depth), fine-tune the whole model, and score it after training.

    Where the score stays the same as n grows, the task did not need what these blocks had learnt in pre-training.

    Args:
        model: A folder or name, which is loaded with a new head for each task; or a model with a head for the tasks,
            which is copied.
        tasks: Task name -> task, with the splits "train" and "validation"; or a single task.
        processor: Tokenizer or image processor. None: the one saved with the model.
        counts: Values of n: the numbers of top blocks to re-initialise. "all": 0 to the depth.
        fractions: Shares of the training rows to train on, each above 0 and at most 1; each seed draws other rows. A
            share that is named twice counts once.
        seeds: Each seed decides the new weights, the head (if the model is loaded), which rows are drawn, and their
            order.
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
        Cells that raised an error have no rows; the study's `settings["failures"]` lists them.

    Raises:
        ConfigError: If an option is out of range, a list or `tasks` is empty, a count or seed occurs twice, the
            processor fits no task, the stack has no module per block, a task has recorded states, or all cells failed;
            if `resume` is set without `output`, or the cells in `output` were run with other settings or library
            versions.
        UnknownNameError: If the scope or the stack does not exist, or a task does not have both splits.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found.
        StoreError: If files of `model` are damaged, `output` cannot be written, or a finished cell in it is damaged.
        MissingExtraError: If `ray` is set and Ray is not installed.

    Source:
        Singh and Giovanardi 2020, "How much does pre-trained information help?", figure 1: n = 0 to 12 of BERT, on all
        rows, a tenth and a hundredth, learning rate 2e-5, 3 epochs. The paper says nothing about biases and norms; here
        they keep their values.
    """
    named = named_tasks(_REINIT, tasks)
    check_known(_REINIT, [scope], ("linear", "block"), "scope")
    check_given(_REINIT, tasks=named, counts=counts, fractions=fractions, seeds=seeds)
    fractions = list(dict.fromkeys(fractions))
    if wrong := [fraction for fraction in fractions if not 0 < fraction <= 1]:
        raise ConfigError(f"{_REINIT}: fractions has {wrong[0]}; each must be above 0 and at most 1.")
    training = Training(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, max_length=max_length)
    inputs = CellInputs(model, processor, stack, training)
    edited, settings, head = inputs.check(_REINIT, named, seeds, fractions=fractions, scope=scope)
    settings["counts"] = chosen = block_counts(_REINIT, counts, edited.depth)
    cells = [
        Cell(
            {"task": name, "fraction": fraction, "reinitialised": count, "seed": seed},
            partial(_reinit_cell, inputs, task, fraction, _reinit_edits(edited, count, scope), seed),
            digests=whole_digests(head),
        )
        for name, task in named.items()
        for fraction in fractions
        for count in chosen
        for seed in seeds
    ]
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    sentences = [
        _reinit_sentence(table, name, task.metric, fraction)
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
    return study_of_cells(_REINIT, table, failures, settings, figures, sentences)


def _reinit_edits(stack: LayerStack, count: int, scope: str) -> Edits:
    """Return the edits that re-initialise the top `count` blocks of a stack; [] if `count` is 0.

    `scope` says which of their weights; see `lamina.reinit_`.
    """
    layers = list(range(stack.depth - count + 1, stack.depth + 1))
    return [("reinit", {"layers": layers, "scope": scope, "stack": stack.name})] if count else []


def _reinit_cell(inputs: CellInputs, task: Task, fraction: float, edits: Edits, seed: int) -> list[Row]:
    """Run one cell: edit a new copy of the model, fine-tune it on a share of the training rows, and return its scores.

    `fraction` is the share, and `seed` decides the new weights, the rows and their order. Raises ConfigError if the
    share has no row, and the errors of `finetuned_rows`.
    """
    sample = task if fraction == 1 else task.subsample(fraction=fraction, seed=seed)
    return finetuned_rows(inputs, sample, edits, seed)


def _reinit_sentence(table: DataFrame, task: str, metric: str, fraction: float) -> str:
    """Return a sentence that compares a task's scores with the most re-initialised blocks and with none.

    `fraction` is the share of the training rows that both models were trained on.
    """
    where = {"task": task, "fraction": fraction}
    most = max(map(int, rows_where(table, where)["reinitialised"]), default=0)
    top = f"the top {pluralize(most, 'block')} re-initialised"
    what = f"{task}, {fraction:.0%} of the rows: {metric} with {top}, against none"
    edited, unedited = {"reinitialised": most}, {"reinitialised": 0}
    return _trained_sentence(table, what, {**where, "measure": metric}, edited, unedited)
