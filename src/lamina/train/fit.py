"""Train readers on tasks, all of them in one pass of the model."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lamina.data.encode import length_limit
from lamina.errors import ConfigError
from lamina.files import write_text
from lamina.train.checks import check_tasks
from lamina.train.options import FitOptions, each
from lamina.train.plan import Plan, group_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import TrainingArguments

    from lamina.bank import ReaderBank
    from lamina.data.task import Task
    from lamina.train.engine import BankTrainer


@dataclass(frozen=True)
class FitResult:
    """What a training run found.

    Attributes:
        best: Reader name -> its best epoch and all scores at it; those weights are in the bank.
        history: One row per reader and epoch, with every score.
        importances: One row per reader, epoch and layer, for fusions that mix layers.
        truncated: Reader name -> how many training texts lost their end.
        steps: Training steps taken.
        seconds: Wall-clock time.
        folder: Where the bank was saved, or None.
    """

    best: dict[str, dict[str, float]]
    history: list[dict[str, Any]]
    importances: list[dict[str, Any]]
    truncated: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    folder: Path | None = None


def fit(bank: ReaderBank, tasks: Mapping[str, Task], *, output: str | Path | None = None, **options: Any) -> FitResult:
    """Train readers. The bank ends with every reader at its best epoch.

    Tasks over the same texts share every pass; others take turns. Each reader has its own gradient clipping,
    learning-rate schedule, early stop and choice of best epoch, so what it learns does not depend on its neighbours.

    Args:
        bank: The readers and their model; readers without a task are left alone.
        tasks: Reader name -> task with "train" and "validation" parts.
        output: Folder for the bank, `history.json`, and checkpoints to resume from; None: nothing is written.
        **options: See `FitOptions`: epochs, batch_size, learning_rate, patience, seed, resume ...

    Returns:
        Scores, their history, and the history of the importances.

    Raises:
        UnknownNameError: If an option or a reader does not exist.
        ConfigError: If an option cannot be, or a task does not fit its reader.
    """
    chosen = FitOptions.of(options)
    check_tasks(bank, tasks, parts=("train", "validation"))
    if chosen.resume and output is None:
        raise ConfigError("fit: resume is set but no output folder; checkpoints are kept in one. Give `output`.")
    names = list(tasks)
    epochs, rates = each(chosen.epochs, names, "epochs"), each(chosen.learning_rate, names, "learning_rate")
    limit = length_limit(bank.model, bank.processor, chosen.max_length)
    groups = group_tasks(tasks, "train", bank.processor, max_length=limit, stride=chosen.stride)
    validation = group_tasks(tasks, "validation", bank.processor, max_length=limit, stride=chosen.stride)
    plan = Plan(groups, epochs, chosen.batch_size, chosen.seed)
    start = time.perf_counter()
    with _own_randomness(), _folder(output) as checkpoints:
        from lamina.train.engine import BankTrainer

        arguments = _arguments(chosen, checkpoints, keep=output is not None)
        trainer = BankTrainer(bank, tasks, plan, validation, rates, options=chosen, arguments=arguments)
        _train(trainer, checkpoints, resume=chosen.resume)
    result = FitResult(
        best={name: {"epoch": state.best_epoch, **state.scores} for name, state in trainer.states.items()},
        history=trainer.history,
        importances=trainer.importances,
        truncated={name: group.cut(name) for group in groups for name in group.names},
        steps=trainer.state.global_step,
        seconds=time.perf_counter() - start,
        folder=None if output is None else Path(output),
    )
    _keep_best(trainer, limit)
    if output is not None:
        bank.save_pretrained(output)
        facts = {"best": result.best, "history": result.history, "importances": result.importances}
        write_text(Path(output) / "history.json", json.dumps(facts, indent=1))
    return result


def _train(trainer: BankTrainer, checkpoints: Path, *, resume: bool) -> None:
    from lamina.train.engine import COMPLETE, newest_checkpoint

    for folder in checkpoints.glob("checkpoint-*"):  # of another run, or not written to its end
        if not (resume and (folder / COMPLETE).is_file()):
            shutil.rmtree(folder)
    newest = newest_checkpoint(checkpoints) if resume else None
    if newest is not None:
        trainer.restore(newest)
    was_training = trainer.bank.training
    try:
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
    finally:
        trainer.bank.train(was_training)
        for name in ("forward", "_original_forward"):  # accelerate's mixed precision, which would outlive the run
            trainer.bank.__dict__.pop(name, None)


def _keep_best(trainer: BankTrainer, max_length: int) -> None:
    """Put every reader's best weights in the bank, and note where they came from."""
    for name, state in trainer.states.items():
        task, reader = trainer.tasks[name], trainer.bank[name]
        reader.load_state_dict(state.weights)
        reader.info = {
            "task": task.name,
            "metric": task.metric,
            "scores": state.scores,
            "epoch": state.best_epoch,
            "rows": len(task.split("train")),
            "pair": not isinstance(task.split("train").texts[0], str),
            "max_length": max_length,
            "stride": trainer.options.stride,
        }


def _arguments(options: FitOptions, folder: Path, *, keep: bool) -> TrainingArguments:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,  # the plan holds every epoch
        per_device_train_batch_size=options.batch_size,
        max_grad_norm=options.clip,
        seed=options.seed,
        bf16=options.precision == "bfloat16",
        fp16=options.precision == "float16",
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        save_only_model=not keep,
        save_total_limit=2,
        ignore_data_skip=True,
        remove_unused_columns=False,
        report_to=["tensorboard"] if options.tensorboard else "none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one device; several processes each bring their own
    return arguments


@contextmanager
def _folder(output: str | Path | None) -> Iterator[Path]:
    if output is not None:
        yield Path(output) / "checkpoints"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def _own_randomness() -> Iterator[None]:
    """The trainer seeds every global generator; give them back as they were."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])
