"""Score a model with a head of its own on one part of a task."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.batches import bar, length_batches
from lamina.data.windows import IGNORED
from lamina.tasks.kinds import GENERATION
from lamina.tasks.metrics import TokenSums, compute, per_class
from lamina.train.answers import MOST_SCORES, asking, blank, guess, places_of, put
from lamina.train.rows import TextRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.tasks.split import Split
    from lamina.tasks.task import Task
    from lamina.train.options import TuneOptions
    from lamina.train.rows import Rows


def score_model(
    model: PreTrainedModel,
    rows: Rows,
    task: Task,
    split: Split,
    processor: Any,
    options: TuneOptions,
    *,
    details: bool = False,
) -> dict[str, Any]:
    """Score a model.

    Args:
        model: The model, which stays in the mode it is in.
        rows: One part of the task, encoded.
        task: The task.
        split: The same part, with the right answers.
        processor: Reads the texts that are written.
        options: Rows per forward, precision, progress bar, and how texts are written.
        details: Add "per_class".

    Returns:
        Metric -> value, for all of the task's metrics.
    """
    size, masked = options.eval_batch_size or 2 * options.batch_size, _masked(rows)
    lengths = rows.lengths
    if masked:
        size = min(size, max(1, MOST_SCORES // (max(lengths) * model.config.get_text_config().vocab_size)))
    batches = bar(length_batches(lengths, size), options.progress)
    with asking(model), _precision(model, options):
        if masked:
            return {**_hidden(model, rows, task, batches), **({"per_class": []} if details else {})}
        if task.kind in GENERATION:
            guesses: Sequence[Any] = _written(model, rows, processor, batches, options)
        else:
            guesses = [guess(one, task.problem) for one in _answers(model, rows, task, split, batches)]
    scores: dict[str, Any] = compute(task, task.metrics, guesses, split.labels)
    return scores | ({"per_class": per_class(task, guesses, split.labels)} if details else {})


def _precision(model: PreTrainedModel, options: TuneOptions) -> AbstractContextManager[Any]:
    """The mixed precision that the model was, or would be, trained in."""
    if options.precision == "float32":
        return nullcontext()
    return torch.autocast(model.device.type, getattr(torch, options.precision))


def _masked(rows: Rows) -> bool:
    return isinstance(rows, TextRows) and rows.group.masking is not None


def _answers(
    model: PreTrainedModel, rows: Rows, task: Task, split: Split, batches: Iterable[list[int]]
) -> list[Tensor]:
    """Logits of every row, or of every word of it."""
    texts = rows.group.encoded if isinstance(rows, TextRows) else None
    words = None if texts is None else split.words
    places = None if texts is None or words is None else places_of(texts, {task.name: words})[task.name]
    found = blank(task.labels, words, len(split))
    for numbers in batches:
        logits = model(**_inputs(model, rows, numbers)).logits.float().cpu()
        if texts is not None:
            put(logits, numbers, texts, places, found)
            continue
        for number, one in zip(numbers, logits, strict=True):
            found[number] = one
    return found


def _hidden(model: PreTrainedModel, rows: Rows, task: Task, batches: Iterable[list[int]]) -> dict[str, float]:
    """Masked language modelling: nothing is kept but sums."""
    sums = TokenSums()
    for numbers in batches:
        batch = {key: value.to(model.device) for key, value in rows.batch(numbers).items()}
        labels = batch.pop("labels")
        given = labels != IGNORED
        sums.add(model(**batch).logits[given], labels[given])
    return sums.scores(task.metrics)


def _written(model: Any, rows: Rows, processor: Any, batches: Iterable[list[int]], options: TuneOptions) -> list[str]:
    """The texts that the model writes."""
    from lamina.tasks.seq2seq import texts_of

    found = [""] * len(rows.lengths)
    search = {"num_beams": options.beams, "length_penalty": options.length_penalty} if options.beams > 1 else {}
    for numbers in batches:
        ids = model.generate(
            **_inputs(model, rows, numbers), do_sample=False, max_new_tokens=options.max_target_length, **search
        )
        for number, text in zip(numbers, texts_of(ids, processor), strict=True):
            found[number] = text
    return found


def _inputs(model: PreTrainedModel, rows: Rows, numbers: Sequence[int]) -> dict[str, Tensor]:
    """A batch without its labels, on the model's device."""
    return {key: value.to(model.device) for key, value in rows.batch(numbers).items() if key != "labels"}
