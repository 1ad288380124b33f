"""Train readers on tasks, all of them in one pass of the model."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.batches import collate
from lamina.data.cache import CacheSettings, obstacle, open_states
from lamina.data.encode import length_limit
from lamina.errors import ConfigError
from lamina.layers.fingerprints import fingerprint_of
from lamina.train.checks import check_tasks
from lamina.train.grid import expand_into
from lamina.train.memory import check_memory
from lamina.train.options import FitOptions
from lamina.train.plan import Plan, group_tasks
from lamina.train.runs import begin, checkpoint_folder, own_randomness, put_back
from lamina.train.tables import IMPORTANCES, table, write_parquet
from lamina.utils import barrier, rank, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from transformers import TrainingArguments

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.engine import BankTrainer
    from lamina.train.plan import Group


@dataclass(frozen=True)
class FitResult:
    """What a training run found.

    Attributes:
        best: Reader name -> its best epoch and all scores at it; those weights are in the bank.
        history: One row per reader and epoch, with every score.
        importances: One row per reader, epoch and layer, for fusions that mix layers.
        truncated: Reader name -> how many training texts lost their end.
        table: One row per reader, best validation score first: its settings in the grid, score, best epoch, epochs run,
            parameters and importances; see `lamina.train.tables.table`.
        test: Name -> scores of the best weights on the test part, where `finetune` was asked for them.
        steps: Training steps taken.
        seconds: Wall-clock time.
        folder: Where the bank was saved, or None.
    """

    best: dict[str, dict[str, float]]
    history: list[dict[str, Any]]
    importances: list[dict[str, Any]]
    truncated: dict[str, int] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    folder: Path | None = None


def fit(
    bank: ReaderBank,
    tasks: Mapping[str, Task],
    *,
    grid: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    output: str | Path | None = None,
    **options: Any,
) -> FitResult:
    """Train readers. The bank ends with every reader at its best epoch.

    Tasks over the same texts share every pass; others take turns. Each reader has its own gradient clipping,
    learning-rate schedule, early stop and choice of best epoch, so what it learns does not depend on its neighbours.
    (A bank with `train_base` has one best epoch and one stop, by the mean of its readers' scores.)

    Started under `torchrun`, every process takes its share of each batch, and process 0 saves.

    Args:
        bank: The readers and their model; readers without a task are left alone.
        tasks: Reader name -> task with "train" and "validation" parts.
        grid: Reader name -> key -> values, such as `{"cola": {"fusion.alpha": [1, 8], "seed": [0, 1]}}`: the reader
            makes room for one reader per combination, "cola_0001" and so on, all trained in the same passes. Keys are
            fields of the fusion and the head, "fusion" (whole methods), "seed", "learning_rate" and "epochs".
        output: Folder for the bank, `history.json`, `table.parquet`, `importances.parquet` and checkpoints to resume
            from; None: nothing is written.
        **options: See `FitOptions`: epochs, batch_size, learning_rate, patience, seed, cache, resume ...

    Returns:
        Scores, their history, and the history of the importances.

    Raises:
        UnknownNameError: If an option, a reader or a key of a grid does not exist.
        ConfigError: If an option cannot be, a task does not fit its reader, or kept states do not fit in memory.
        CacheError: If states are to be cached and cannot be.
    """
    chosen = FitOptions.of(options)
    check_tasks(bank, tasks, parts=("train", "validation"))
    if chosen.resume and output is None:
        raise ConfigError("fit: resume is set but no output folder; checkpoints are kept in one. Give `output`.")
    sweep = expand_into(bank, tasks, grid or {}, chosen)
    _check_epochs(bank, sweep.epochs)
    limit = length_limit(bank.model, bank.processor, chosen.max_length)
    groups = group_tasks(sweep.tasks, "train", bank.processor, max_length=limit, stride=chosen.stride)
    validation = group_tasks(sweep.tasks, "validation", bank.processor, max_length=limit, stride=chosen.stride)
    check_memory(bank, groups, chosen.batch_size)
    start = time.perf_counter()
    _open_states(bank, [*groups, *validation], chosen, passes=max(sweep.epochs.values()))
    plan = Plan(groups, sweep.epochs, chosen.batch_size, chosen.seed)
    with own_randomness(), checkpoint_folder(output) as checkpoints:
        from lamina.train.engine import BankTrainer

        arguments = _arguments(chosen, checkpoints, keep=output is not None)
        trainer = BankTrainer(
            bank, sweep.tasks, plan, validation, sweep.learning_rate, options=chosen, arguments=arguments
        )
        _train(trainer, checkpoints, resume=chosen.resume)
    _keep_best(trainer, limit)
    result = FitResult(
        best={name: {"epoch": state.best_epoch, **state.scores} for name, state in trainer.states.items()},
        history=trainer.history,
        importances=trainer.importances,
        truncated={name: group.cut(name) for group in groups for name in group.names},
        steps=trainer.state.global_step,
        seconds=time.perf_counter() - start,
        folder=None if output is None else Path(output),
    )
    result = replace(result, table=table(sweep.members, result, sweep.tasks, bank))
    if output is not None and rank() == 0:
        _write(bank, result, Path(output))
    barrier()
    return result


def _check_epochs(bank: ReaderBank, epochs: Mapping[str, int]) -> None:
    if bank.train_base and len(set(epochs.values())) > 1:
        raise ConfigError(
            f"fit: the readers have {sorted(set(epochs.values()))} epochs; with train_base they share the model that "
            "is trained, so all must end together. Give one number of epochs."
        )


def _write(bank: ReaderBank, result: FitResult, folder: Path) -> None:
    bank.save_pretrained(folder)
    facts = {"best": result.best, "history": result.history, "importances": result.importances}
    write_text(folder / "history.json", json.dumps(facts, indent=1))
    write_parquet(result.table, folder / "table.parquet")
    write_parquet(result.importances, folder / "importances.parquet", IMPORTANCES)


def _open_states(bank: ReaderBank, groups: list[Group], options: FitOptions, *, passes: int) -> None:
    """Let groups read their states from the cache, where that was asked for."""
    if options.cache == "off":
        return
    settings = CacheSettings(
        mode=options.cache,
        dtype=options.cache_dtype,
        folder=options.cache_dir,
        precision=options.precision,
        batch_size=options.eval_batch_size or 2 * options.batch_size,
        passes=passes,
        progress=options.progress,
    )
    inputs = [_GroupInputs(group, bank) for group in groups]
    readable = [group for group, some in zip(groups, inputs, strict=True) if obstacle(bank, group.names, some) is None]
    used = {bank[name].stack for group in readable for name in group.names}
    marks = {name: fingerprint_of(stack) for name, stack in bank.stacks.items() if name in used}
    for group, some in zip(groups, inputs, strict=True):
        group.states = open_states(bank, some, group.names, fingerprints=marks, settings=settings)


class _GroupInputs:
    """A group's windows as the cache reads them."""

    def __init__(self, group: Group, bank: ReaderBank) -> None:
        self.group, self.processor, self.lengths = group, bank.processor, group.encoded.lengths

    @property
    def uncacheable(self) -> str | None:
        if self.group.masking is not None:
            return "the texts are masked anew in each epoch"
        return None

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.group.encoded.features).encode()).hexdigest()

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        return collate([self.group.encoded.features[row] for row in rows], self.processor)


def _train(trainer: BankTrainer, checkpoints: Path, *, resume: bool) -> None:
    newest = begin(checkpoints, resume=resume)
    if newest is not None:
        trainer.restore(newest)
    with put_back(trainer.bank):
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))


def _keep_best(trainer: BankTrainer, max_length: int) -> None:
    """Put every reader's (and a trained base's) best weights in place, and note where they came from."""
    if trainer.bank.train_base:
        trainer.bank.model.load_state_dict(trainer.base.weights)
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
