"""Score what was trained: the readers of a bank, or a whole model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lamina.bank import ReaderBank
from lamina.errors import UnknownNameError
from lamina.train import inference
from lamina.train.finetune import find_processor, fit_head
from lamina.train.options import TuneOptions
from lamina.train.rows import open_rows
from lamina.train.scoring import score_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

    from lamina.tasks.task import Task

logger = logging.getLogger(__name__)

_OF_READERS = ("split", "batch_size", "per_class", "max_length", "progress")
_OF_MODELS = ("processor", "stride", "precision", "prefix", "max_target_length", "beams", "length_penalty")


def evaluate(
    bank: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    *,
    split: str = "validation",
    batch_size: int = 64,
    per_class: bool = False,
    max_length: int | None = None,
    progress: bool = False,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Score the readers of a bank, or a model with a head of its own, on a part of their tasks.

    Readers whose tasks have the same texts share every pass.

    Args:
        bank: The readers and their model; or a fine-tuned model.
        tasks: Reader name -> task; for a model any name -> task that its head is for.
        split: "train", "validation" or "test".
        batch_size: Windows (or rows) per pass.
        per_class: Add "per_class", a list of rows with label, precision, recall, F1 and count.
        max_length: Tokens per window; None: what each group's readers were trained with, or what the model allows.
        progress: Show a progress bar.
        **options: For a model: `processor` (None: the one that belongs to `model.name_or_path`), and of the options of
            `finetune` stride, precision, prefix, max_target_length, beams and length_penalty.

    Returns:
        Reader name (or the name given) -> metric -> value.

    Raises:
        UnknownNameError: If a reader, the part or an option does not exist.
        ConfigError: If a task does not fit its reader, or the model.
    """
    if isinstance(bank, ReaderBank):
        for name in options:
            raise UnknownNameError(op="evaluate", got=name, known=_OF_READERS, what="option of a bank's readers")
        return inference.evaluate(
            bank,
            tasks,
            split=split,
            batch_size=batch_size,
            per_class=per_class,
            max_length=max_length,
            progress=progress,
        )
    processor = options.pop("processor", None)
    for name in options:
        if name not in _OF_MODELS:
            raise UnknownNameError(op="evaluate", got=name, known=_OF_MODELS, what="option of a model")
    chosen = TuneOptions.of({**options, "eval_batch_size": batch_size, "max_length": max_length, "progress": progress})
    processor = processor if processor is not None else find_processor(bank, "evaluate")
    return {name: _scores(bank, task, split, processor, chosen, details=per_class) for name, task in tasks.items()}


def _scores(
    model: PreTrainedModel, task: Task, part: str, processor: Any, options: TuneOptions, *, details: bool
) -> dict[str, Any]:
    rows = open_rows(task, part, model, processor, options)
    fit_head(model, task, rows, keep=False)
    if rows.truncated:
        logger.warning("evaluate: %d texts of task %s are longer than the model reads", rows.truncated, task.name)
    return score_model(model, rows, task, task.split(part), processor, options, details=details)
