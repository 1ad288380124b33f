"""One training run, from tasks to results."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.bank import ReaderBank
from lamina.data.encode import length_limit
from lamina.errors import ConfigError
from lamina.store.bank import check_output
from lamina.store.edited import save
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.task import Task
from lamina.train.checkpoint import Checkpoints
from lamina.train.grid import RunSpec, expand_into
from lamina.train.model import ModelSubject
from lamina.train.options import each
from lamina.train.plan import Plan, group_tasks
from lamina.train.readers import BankSubject
from lamina.train.results import IMPORTANCES, FitResult, sorted_rows, write_parquet
from lamina.train.scoring import autocast, score
from lamina.utils import barrier, derive_seed, rank, world_size, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.train.engine import Engine
    from lamina.train.options import FitOptions
    from lamina.train.plan import Encodings, Group
    from lamina.train.subjects import Subject

logger = logging.getLogger(__name__)

RATES = {True: 1e-3, False: 2e-5}
"""The learning rate where none is given: of readers (True), of a whole model (False)."""
_FREE = {"epochs", "learning_rate", "resume", "progress", "tensorboard", "save_steps", "eval_batch_size"}
_FREE |= {"cache_dir", "num_workers", "test"}  # may change when a run resumes; the first two are compared per learner


def train(  # noqa: PLR0913
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    options: FitOptions,
    *,
    op: str = "fit",
    grid: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    processor: Any = None,
    output: str | Path | None = None,
    checkpoints: str | Path | None = None,
    encodings: Encodings | None = None,
) -> FitResult:
    """What `fit` and `finetune` do, for callers that train many times.

    Args:
        target: A bank, or a whole model.
        tasks: Reader name -> task, or one task.
        options: How.
        op: Named in errors.
        grid: See `fit`.
        processor: See `fit`.
        output: See `fit`.
        checkpoints: Folder of this run's checkpoints alone, which the caller removes; None: one in `output`.
        encodings: What earlier runs encoded; used and filled.
    """
    from lamina.train.engine import Engine, start_accelerator

    folder = None if output is None else Path(output)
    place = Path(checkpoints) if checkpoints is not None else None if folder is None else folder / "checkpoints"
    if options.resume and place is None:
        raise ConfigError(f"{op}: resume is set but no output folder; checkpoints are kept in one.")
    tasks = {tasks.name: tasks} if isinstance(tasks, Task) else dict(tasks)
    subject = open_subject(target, tasks, op, processor, options)
    subject.check(tasks, ("train", "validation", *(["test"] if options.test else [])))
    accelerator = start_accelerator(options, folder)
    if folder is not None and rank() == 0:
        check_output(target, folder)
    specs = _specs(target, tasks, grid or {}, options)
    tasks = {name: tasks[spec.task] for name, spec in specs.items()}
    target.to(accelerator.device)  # pyright: ignore
    groups = groups_of(subject, tasks, "train", options, encodings)
    validation = groups_of(subject, tasks, "validation", options, encodings)
    epochs = {name: int(spec.epochs or 1) for name, spec in specs.items()}
    plan = Plan(groups, epochs, options.step_size, options.seed, options.max_steps)
    start = time.perf_counter()
    subject.prepare([*groups, *validation], options, max(plan.epochs.values()))
    rates = {name: float(spec.learning_rate or 0) for name, spec in specs.items()}
    learners = subject.learners(tasks, plan, rates, options)
    run = {} if place is None else _same_run(subject, plan, rates, options)
    kept = None if place is None else Checkpoints(place, op, run)
    engine = Engine(subject, learners, plan, validation, options=options, accelerator=accelerator, checkpoints=kept)
    engine.run()
    for tracker in accelerator.trackers:  # `end_training` would end the process group as well
        tracker.finish()
    _check_finite(engine, op)
    _note(engine, options)
    tests = _test(engine, tasks, encodings) if options.test else {}
    result = _result(engine, specs, tests, seconds=time.perf_counter() - start, folder=folder)
    if folder is not None and rank() == 0:
        _write(target, subject.processor, result, folder)
    barrier()
    return result


def open_subject(
    target: ReaderBank | PreTrainedModel, tasks: Mapping[str, Task], op: str, processor: Any, options: FitOptions
) -> Subject:
    """What is trained or scored: a bank's readers, or a whole model for its one task.

    Raises:
        ConfigError: If there is no processor, there are several tasks for a model, or a prefix for a kind without one.
    """
    kinds = {task.kind for task in tasks.values()}
    for kind in kinds:
        if options.prefix and not kind_of(kind).takes_prefix:
            raise ConfigError(f"{op}: prefix is '{options.prefix}' for a task of kind {kind}, which has none.")
    if isinstance(target, ReaderBank):
        return BankSubject(target, op, processor)
    if len(tasks) != 1:
        raise ConfigError(f"{op}: {len(tasks)} tasks were given; a whole model is trained on one.")
    (task,) = tasks.values()
    return ModelSubject(target, task, op, processor, options)


def groups_of(
    subject: Subject,
    tasks: Mapping[str, Task],
    part: str,
    options: FitOptions,
    encodings: Encodings | None = None,
) -> list[Group]:
    """The tasks' examples in one part, encoded for a subject."""
    how = EncodeOptions(
        part=part,
        max_length=max_length(subject, tasks, options.max_length),
        stride=options.stride,
        seed=options.seed,
        prefix=options.prefix,
        max_target_length=options.max_target_length,
        augment=options.augment,
    )
    return group_tasks(tasks, how, subject.processor, encodings)


def max_length(subject: Subject, tasks: Mapping[str, Any], asked: int | None) -> int:
    """Tokens per window; 1 where nothing has any."""
    if any(kind_of(task.kind).processor == "tokenizer" for task in tasks.values()):
        return length_limit(subject.base, subject.processor, asked)
    return 1


def _specs(
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    grid: Mapping[str, Mapping[str, Sequence[Any]]],
    options: FitOptions,
) -> dict[str, RunSpec]:
    """Everything that is trained, by name; the readers of grids are put into the bank."""
    bank = target if isinstance(target, ReaderBank) else None
    rate = RATES[bank is not None] if options.learning_rate is None else options.learning_rate
    rates, epochs = each(rate, list(tasks), "learning_rate"), each(options.epochs, list(tasks), "epochs")
    if bank is None:
        if grid:
            raise ConfigError("fit: a grid was given for a whole model; grids are of readers.")
        return {name: RunSpec(name, task=name, learning_rate=rates[name], epochs=epochs[name]) for name in tasks}
    specs = expand_into(bank, tasks, grid, rates, epochs)
    different = sorted({int(spec.epochs or 0) for spec in specs.values()})
    if bank.train_base and len(different) > 1:
        raise ConfigError(
            f"fit: the readers have {different} epochs; with train_base they share the model that is trained, so all "
            "must end together."
        )
    return specs


def _same_run(subject: Subject, plan: Plan, rates: Mapping[str, float], options: FitOptions) -> dict[str, Any]:
    """What must be the same for a run to go on from a checkpoint."""
    tasks = {name: task for group in plan.groups for name, task in group.tasks.items()}
    data = {}
    for group in plan.groups:
        for name, task in group.tasks.items():
            split = task.split("train")
            data[name] = derive_seed(list(group.inputs.lengths), split.key, list(split.labels))
    names = [(name, *one.shape) for module in subject.modules for name, one in module.named_parameters()]
    settings = {key: value for key, value in options.model_dump().items() if key not in _FREE}
    return {
        "epochs": dict(plan.epochs),
        "rates": dict(rates),
        "labels": {name: list(task.labels) for name, task in tasks.items()},
        "rows": data,
        "model": type(subject.base).__name__,
        "model's parameters": derive_seed(names),
        "processes": world_size(),
        **settings,
    }


def _check_finite(engine: Engine, op: str) -> None:
    for learner in engine.everyone:
        if not all(one.isfinite().all() for one in learner.parameters):
            logger.warning(
                "%s: the weights of '%s' are no longer numbers; the learning rate is too high, or a label is none",
                op,
                learner.name,
            )


def _note(engine: Engine, options: FitOptions) -> None:
    """Have readers say what they were trained on."""
    for name, learner in engine.learners.items():
        task = engine.tasks[name]
        engine.subject.note(
            name,
            {
                "task": task.name,
                "metric": task.metric,
                "scores": learner.progress.scores,
                "epoch": learner.progress.best_epoch,
                "rows": len(task.split("train")),
                "pair": task.split("train").pairs,
                "max_length": max_length(engine.subject, {name: task}, options.max_length),
                "stride": options.stride,
            },
        )


def _test(engine: Engine, tasks: Mapping[str, Task], encodings: Encodings | None) -> dict[str, dict[str, float]]:
    options, subject = engine.options, engine.subject
    found: dict[str, dict[str, float]] = {}
    for group in groups_of(subject, tasks, "test", options, encodings):
        with autocast(subject.device, options.precision):
            size, workers = options.scoring_batch_size, options.num_workers
            found |= score(subject, group, group.names, batch_size=size, num_workers=workers)
    return found


def _result(
    engine: Engine,
    specs: Mapping[str, RunSpec],
    tests: dict[str, dict[str, float]],
    *,
    seconds: float,
    folder: Path | None,
) -> FitResult:
    rows: list[dict[str, Any]] = []
    for name, learner in engine.learners.items():
        spec, task, progress = specs[name], engine.tasks[name], learner.progress
        run = max((row["epoch"] for row in engine.history if row["reader"] == name), default=0)
        others = {metric: value for metric, value in progress.scores.items() if metric != task.metric}
        row = {
            "task": spec.task,
            "reader": name,
            **spec.settings,
            "metric": task.metric,
            "score": progress.scores[task.metric],
            **others,
            "best_epoch": progress.best_epoch,
            "epochs_run": run,
            "stopped": run < engine.plan.epochs[name],
            "parameters": sum(one.numel() for one in learner.module.parameters()),
            "trained": sum(one.numel() for one in learner.parameters),
            "importances": engine.subject.importance(name),
        }
        rows.append(row)
    return FitResult(
        best={name: {"epoch": one.progress.best_epoch, **one.progress.scores} for name, one in engine.learners.items()},
        history=engine.history,
        importances=engine.importances,
        truncated={name: group.truncated(name) for group in engine.plan.groups for name in group.names},
        table=sorted_rows(rows),
        test=tests,
        steps=engine.steps,
        seconds=seconds,
        folder=folder,
    )


def _write(target: ReaderBank | PreTrainedModel, processor: Any, result: FitResult, folder: Path) -> None:
    if isinstance(target, ReaderBank):
        target.save_pretrained(folder)
        write_parquet(result.importances, folder / "importances.parquet", IMPORTANCES)
    else:
        save(target, folder, processor)
    facts = {"best": result.best, "test": result.test, "history": result.history, "importances": result.importances}
    write_text(folder / "history.json", json.dumps(facts, indent=1))
    write_parquet(result.table, folder / "table.parquet")
