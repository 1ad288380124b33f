"""What cells of studies that fine-tune an edited model have in common, and sentences of paired runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from lamina.errors import ConfigError
from lamina.prediction.evaluate import evaluate
from lamina.recipes.edits import apply_edits
from lamina.studies.sources import fresh_model
from lamina.train.fit import finetune
from lamina.train.results import summarise
from lamina.utils import check_range, derive_seed, seed_torch

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.tasks.task import Task

Edits = Sequence[tuple[str, Mapping[str, Any]]]  # names of edits with their arguments, as in a recipe's methods


def finetuned(
    model: PreTrainedModel | str | Path,
    processor: Any,
    task: Task,
    edits: Edits,
    seed: int,
    training: Mapping[str, Any],
    *,
    start: bool = False,
) -> list[dict[str, Any]]:
    """Edit a fresh model, fine-tune all of it, and score its last epoch: a row per metric, with `start` before too."""
    kind = task.kind
    with torch.random.fork_rng():
        seed_torch(derive_seed(seed, "head"))
        labels = task.labels if kind.has_classes else None
        own, reader = fresh_model(model, processor, head=kind.auto_class, labels=labels)
    apply_edits(own, edits, seed=seed, where="study")
    stages: dict[str, Mapping[str, float]] = {}
    if start:
        stages["start"] = evaluate(own, {"task": task}, processor=reader, max_length=training["max_length"])["task"]
    result = finetune(own, task, processor=reader, seed=seed, keep="last", progress=False, **training)
    (stages["trained"],) = result.best.values()
    return [
        {"stage": stage, "measure": metric, "score": scores[metric]}
        for stage, scores in stages.items()
        for metric in task.metrics
        if metric in scores
    ]


def block_counts(op: str, counts: Literal["all"] | Sequence[int], depth: int, seeds: Sequence[int]) -> list[int]:
    """How many blocks are edited, "all" for 0 to the depth; a ConfigError if there are not so many, or no seeds."""
    chosen = list(range(depth + 1)) if counts == "all" else list(counts)
    for count in chosen:
        check_range(op, "counts", count, 0, depth)
    if not seeds:
        raise ConfigError(f"{op}: there is no seed; at least one is needed.")
    return chosen


def trained_scores(table: Any, task: str, metric: str, **place: Any) -> dict[int, float]:
    """The scores of a task's last epoch by seed, of the rows with these values in other columns."""
    own = table[(table["task"] == task) & (table["measure"] == metric) & (table["stage"] == "trained")]
    for column, value in place.items():
        own = own[own[column] == value]
    return own.set_index("seed")["score"].to_dict()


def compared(what: str, scores: Mapping[int, float], reference: Mapping[int, float]) -> str:
    """A sentence on two ways to train with the same seeds: seed -> score of each."""
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
