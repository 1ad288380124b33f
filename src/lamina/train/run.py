"""One training run, from tasks to results."""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.bank import ReaderBank, ReaderModule
from lamina.data.encode import length_limit
from lamina.errors import ConfigError
from lamina.layers.wrappers import unwrapped
from lamina.store.bank import claimed_output
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
from lamina.train.scoring import score
from lamina.utils import barrier, derive_seed, rank, world_size, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.train.engine import Engine
    from lamina.train.learner import Learner
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

    `checkpoints` is a folder of this run's checkpoints alone, which the caller removes, in place of one in `output`;
    `encodings` is what earlier runs encoded, which is used and filled.
    """
    from lamina.train.engine import Engine, start_accelerator

    target, folder = unwrapped(target), None if output is None else Path(output)
    place = checkpoints if folder is None or checkpoints is not None else folder / "checkpoints"
    if options.resume and place is None:
        raise ConfigError(f"{op}: resume is set but no output folder; checkpoints are kept in one.")
    tasks = {tasks.name: tasks} if isinstance(tasks, Task) else dict(tasks)
    subject = open_subject(target, tasks, op, processor, options)
    subject.check(tasks, ("train", "validation", *(["test"] if options.test else [])))
    accelerator = start_accelerator(options, folder)
    held = folder or place
    with nullcontext() if held is None or rank() else claimed_output(target, Path(held)):
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
        kept = None if place is None else Checkpoints(Path(place), op, _same_run(subject, plan, rates, options))
        engine = Engine(subject, learners, plan, validation, options=options, accelerator=accelerator, checkpoints=kept)
        engine.run()
        for tracker in accelerator.trackers:  # `end_training` would end the process group as well
            tracker.finish()
        _note(engine, op)
        tests = groups_of(subject, tasks, "test", options, encodings) if options.test else []
        scores = score(subject, tests, options)
        result = _result(engine, specs, scores, seconds=time.perf_counter() - start, folder=folder)
        if folder is not None and rank() == 0:
            _write(target, subject.processor, result, folder)
        barrier()
        return result


def open_subject(
    target: ReaderBank | PreTrainedModel, tasks: Mapping[str, Task], op: str, processor: Any, options: FitOptions
) -> Subject:
    """What is trained or scored: a bank's readers, or a whole model for its one task."""
    bank = target if isinstance(target, ReaderBank) else None
    kinds = [task.kind for task in tasks.values()]
    options.check_use(op, kinds, bank=bank is not None, train_base=bank is not None and bank.train_base)
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
    given = options.model_dump(include={"stride", "seed", "prefix", "max_target_length", "augment"})
    how = EncodeOptions(part=part, max_length=max_length(subject, tasks, options.max_length), **given)
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
    rows = {}
    for group in plan.groups:
        for name, task in group.tasks.items():
            split = task.split("train")
            rows[name] = derive_seed(list(group.inputs.lengths), split.key, list(split.labels))
    shapes = [(name, *weight.shape) for module in subject.modules for name, weight in module.named_parameters()]
    return {
        "epochs": dict(plan.epochs),
        "rates": dict(rates),
        "labels": {name: list(task.labels) for name, task in plan.tasks.items()},
        "rows": rows,
        "model": type(subject.base).__name__,
        "model's parameters": derive_seed(shapes),
        "processes": world_size(),
        **options.model_dump(exclude=_FREE),
    }


def _note(engine: Engine, op: str) -> None:
    """Warn of weights that are no numbers, and have readers say what they were trained on."""
    for learner in engine.everyone:
        if not all(parameter.isfinite().all() for parameter in learner.parameters):
            reason = "the learning rate is too high, or a label is none"
            logger.warning("%s: the weights of '%s' are no longer numbers; %s", op, learner.name, reason)
    for name, task in engine.plan.tasks.items():
        learner = engine.learners[name]
        if isinstance(learner.module, ReaderModule):
            learner.module.info = {
                "task": task.name,
                "metric": task.metric,
                "scores": learner.progress.scores,
                "epoch": learner.progress.best_epoch,
                "rows": len(task.split("train")),
                "pair": task.split("train").pairs,
                "max_length": max_length(engine.subject, {name: task}, engine.options.max_length),
                "stride": engine.options.stride,
            }


def _row(engine: Engine, learner: Learner, spec: RunSpec) -> dict[str, Any]:
    """The row of a learner in `FitResult.table`."""
    progress = learner.progress
    epochs = max((row["epoch"] for row in engine.history if row["reader"] == learner.name), default=0)
    others = {metric: value for metric, value in progress.scores.items() if metric != learner.metric}
    return {
        "task": spec.task,
        "reader": learner.name,
        **spec.settings,
        "metric": learner.metric,
        "score": progress.scores[learner.metric],
        **others,
        "best_epoch": progress.best_epoch,
        "epochs_run": epochs,
        "stopped": epochs < engine.plan.epochs[learner.name],
        "parameters": sum(parameter.numel() for parameter in learner.module.parameters()),
        "trained": sum(parameter.numel() for parameter in learner.parameters),
        "importances": learner.importance(),
    }


def _result(engine: Engine, specs: Mapping[str, RunSpec], tests: dict[str, dict[str, float]], **run: Any) -> FitResult:
    learners = engine.learners.items()
    return FitResult(
        best={name: {"epoch": own.progress.best_epoch, **own.progress.scores} for name, own in learners},
        history=engine.history,
        importances=engine.importances,
        truncated={name: group.truncated(name) for group in engine.plan.groups for name in group.names},
        table=sorted_rows([_row(engine, learner, specs[name]) for name, learner in learners]),
        test=tests,
        steps=engine.steps,
        **run,
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
