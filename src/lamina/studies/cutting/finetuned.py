"""Fine-tune an edited model in a cell of a study, and compare the scores of models trained with the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

import torch

from lamina.errors import ConfigError
from lamina.prediction.evaluate import evaluate
from lamina.recipes.edits import apply_edits
from lamina.studies.runner import fresh_model
from lamina.studies.study import rows_where
from lamina.train.fit import finetune
from lamina.train.results import summarise
from lamina.utils import JSON, check_range, derive_seed, seed_torch

if TYPE_CHECKING:
    from pathlib import Path

    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.studies.runner import Training
    from lamina.tasks.task import Task

# Names of edits with their arguments, as in the methods of a recipe: [("insert", {"position": "ffn", ...})].
Edits: TypeAlias = Sequence[tuple[str, Mapping[str, JSON]]]


class FinetunedRow(TypedDict):
    """A table row of a cell that fine-tunes a model.

    Attributes:
        stage: When it was scored: at the "start", before training, or "trained", after the last epoch.
        measure: Name of the metric.
        score: The metric on the validation split.
    """

    stage: str
    measure: str
    score: float


def finetuned_rows(
    model: PreTrainedModel | str | Path,
    processor: Processor | None,
    task: Task,
    edits: Edits,
    seed: int,
    training: Training,
    *,
    score_start: bool = False,
) -> list[FinetunedRow]:
    """Load or copy a model, edit it, fine-tune all of its weights, and return its scores after the last epoch.

    Raises LaminaError if the model cannot be loaded, an edit cannot be applied, or training fails.

    Args:
        model: A name or folder, loaded with a new head for the task; or a model, which is copied with its head.
        processor: The processor. None: the one saved with the model.
        task: The task to train on ("train" split) and to score on ("validation" split).
        edits: Edits to apply before training; may be empty.
        seed: Decides the weights of a new head, the new weights of the edits, and the order of the rows.
        training: The training options.
        score_start: Whether to score the edited model before training as well.

    Returns:
        One table row per metric of the task. With `score_start`, rows of the stage "start" come first.
    """
    kind = task.kind
    with torch.random.fork_rng():
        seed_torch(derive_seed(seed, "head"))
        labels = task.labels if kind.has_classes else None
        edited, used_processor = fresh_model(model, processor, head=kind.auto_class, labels=labels)
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


def block_counts(op: str, counts: Literal["all"] | Sequence[int], depth: int, seeds: Sequence[int]) -> list[int]:
    """Return the `counts` of blocks that a study edits, one per fine-tuned model; "all" stands for 0 to `depth`.

    Raises ConfigError, whose message begins with `op`, if a number is below 0 or above `depth`, or there is no seed.
    """
    chosen = list(range(depth + 1)) if counts == "all" else list(counts)
    for count in chosen:
        check_range(op, "counts", count, 0, depth)
    if not seeds:
        raise ConfigError(f"{op}: there is no seed; at least one is needed.")
    return chosen


def trained_scores(table: DataFrame, task: str, metric: str, **columns: JSON) -> dict[int, float]:
    """Return seed -> score after the last epoch, for one task and metric, from a study's table.

    `columns` are further conditions: column = value that a table row must have.
    """
    rows = rows_where(table, {"task": task, "measure": metric, "stage": "trained", **columns})
    return {int(seed): float(score) for seed, score in zip(rows["seed"], rows["score"], strict=True)}


def comparison_sentence(what: str, scores: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """Return a sentence that compares the scores of edited and unedited models, seed by seed.

    `what` begins the sentence, and says what the two kinds of models are. `scores` and `reference` are seed -> score of
    the edited, and of the unedited, model that was trained with this seed. With one seed in both, no interval is
    claimed; with none, the sentence says that there is nothing to compare.
    """
    seeds = [seed for seed in scores if seed in reference]
    if not seeds:
        return f"{what}: nothing to compare it with: no score without the edit."
    difference = summarise([scores[seed] - reference[seed] for seed in seeds])
    facts = f"{summarise(list(scores.values())).mean:.3f}, {difference.mean:+.3f}"
    if difference.interval is None:
        return f"{what}: {facts} (one seed; no interval is claimed)."
    interval = f"95 % {difference.mean - difference.interval:+.3f} to {difference.mean + difference.interval:+.3f}"
    verdict = "a difference" if abs(difference.mean) > difference.interval else "no difference can be concluded"
    return f"{what}: {facts} ({interval}, {difference.count} seeds): {verdict}."
