"""One training run: from tasks to trained readers or a trained model, its scores, and the files of both."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lamina.bank import ReaderBank, ReaderModule
from lamina.editing.record import set_location
from lamina.errors import ConfigError
from lamina.layers.wrappers import unwrapped
from lamina.store.bank_folder import claimed_output, save_bank, saved_bytes
from lamina.store.files import check_room
from lamina.store.save_model import save
from lamina.tasks.metrics import LOWER, require_metrics
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.checkpoint import Checkpoints
from lamina.train.grid import RunSpec, expand_into, templates_kept
from lamina.train.groups import groups_of, max_length, tasks_by_name
from lamina.train.identity import identity
from lamina.train.model_runner import ModelRunner
from lamina.train.options import FitOptions, per_reader
from lamina.train.plan import Plan
from lamina.train.results import IMPORTANCES, FitResult, sorted_rows, write_parquet
from lamina.train.scoring import score
from lamina.utils import barrier, rank, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.store.files import Files
    from lamina.train.base import Runner
    from lamina.train.engine import Engine
    from lamina.train.groups import Encodings
    from lamina.train.learner import Learner
    from lamina.train.options import PassOptions


logger = logging.getLogger(__name__)

_FEW = 8  # rows to choose an epoch on
_HELD = ("train", "validation")
RATES = {True: 1e-3, False: 2e-5}
"""The learning rate where none is given: of readers (True), of a whole model (False)."""


@dataclass(frozen=True)
class Tables:
    """More files for the output of a run: their names, and what writes them once the result is there."""

    names: Sequence[str]
    files: Callable[[FitResult], Files]


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
    events: Path | None = None,
    encodings: Encodings | None = None,
    tables: Tables | None = None,
) -> FitResult:
    """What `fit` and `finetune` do, for callers that train many times.

    `checkpoints` is a folder of this run's checkpoints alone, which the caller removes, in place of one in `output`;
    `events` is where TensorBoard's files go without an `output`;
    `encodings` is what earlier runs encoded, which is used and filled; `tables` are other files to write into `output`.
    """
    from lamina.train.engine import Engine, start_accelerator

    target, folder = unwrapped(target), None if output is None else Path(output)
    place = folder / "checkpoints" if folder and checkpoints is None else checkpoints
    if options.resume and place is None:
        raise ConfigError(f"{op}: resume is set but no output folder; checkpoints are kept in one.")
    tasks = tasks_by_name(op, tasks)
    runner = open_runner(target, tasks, op, processor, options)
    scored, accelerator = _scored(op, runner, tasks, options), start_accelerator(options, folder or events)
    held, names = folder or place, [*_names(target), *(tables.names if tables else ())] if folder else ()
    with (
        nullcontext() if held is None or rank() else claimed_output(target, Path(held), names),
        templates_kept(target, grid or {}) as settle,
    ):
        specs = _specs(target, tasks, grid or {}, options)
        tasks = {name: tasks[spec.task] for name, spec in specs.items()}
        target.to(accelerator.device)  # pyright: ignore
        groups = groups_of(runner, tasks, "train", options, encodings)
        validated = {name: task for name, task in tasks.items() if specs[name].task in scored}
        validation = groups_of(runner, validated, "validation", options, encodings)
        plan = Plan(
            groups,
            {name: int(spec.epochs or 1) for name, spec in specs.items()},
            options.step_size,
            options.seed,
            options.max_steps,
        )
        start = time.perf_counter()
        runner.prepare([*groups, *validation], options, max(plan.epochs.values()))
        rates, kept = {name: float(spec.learning_rate or 0) for name, spec in specs.items()}, None
        learners = runner.learners(tasks, plan, rates, options)
        if place is not None and held is not None:
            kept = Checkpoints(Path(place), op, identity(runner, learners, plan, validation, rates, options))
            if rank() == 0:
                needed = kept.needed_bytes(sum(learner.checkpoint_bytes for learner in learners))
                check_room(Path(held), needed + (saved_bytes(target) if folder else 0))
        engine = Engine(runner, learners, plan, validation, options=options, accelerator=accelerator, checkpoints=kept)
        settle()
        engine.run()
        for tracker in accelerator.trackers:  # `end_training` would end the process group as well
            tracker.finish()
        _note(engine)
        scores = score(runner, groups_of(runner, tasks, "test", options, encodings) if options.test else [], options)
        result = _result(engine, specs, scores, seconds=time.perf_counter() - start, folder=folder)
        if folder is not None and rank() == 0:
            files = {name: file for name, file in _files(result).items() if name in _names(target)}
            _write(target, runner.processor, folder, files | (tables.files(result) if tables else {}))
        barrier()
    _warn_of_few(op, scored, options)
    return result


def _scored(op: str, runner: Runner, tasks: Mapping[str, Task], options: FitOptions) -> dict[str, Task]:
    """Check the tasks' parts; which are scored after each epoch: all, or if no score decides, those that can be."""
    runner.check(tasks, ("train", *(["test"] if options.test else [])))
    decides = options.keep == "best" or options.early_stopping_patience or options.schedule == "plateau"
    decides = decides or len(runner.modules) > 1  # a base that is trained along has a best epoch of its own
    scored = {name: task for name, task in tasks.items() if decides or "validation" in task.splits}
    if scored:
        runner.check(scored, ("validation",))
    require_metrics(op, (metric for name in (tasks if options.test else scored) for metric in tasks[name].metrics))
    _warn_of_turns(op, scored)
    return scored


def _warn_of_few(op: str, scored: Mapping[str, Task], options: FitOptions) -> None:
    """The best epoch is the first of equals, and so on few rows may be one that has learnt next to nothing."""
    for name, task in scored.items() if options.keep == "best" and options.epochs != 1 and not rank() else ():
        if (rows := len(task.split("validation"))) < _FEW and task.metric not in LOWER:
            told = f"'{name}' has {rows} validation rows, which can hardly tell which epoch is best"
            logger.warning('%s: %s. Give more, or keep="last".', op, told)


def _warn_of_turns(op: str, tasks: Mapping[str, Task]) -> None:
    """Tasks over the same rows that hold out others of them learn from others too, and so share no pass."""
    apart = {task.split("train").key: task for task in tasks.values() if not rank()}
    counts = Counter(sum(len(task.split(part)) for part in _HELD) for task in apart.values())
    alike: dict[tuple[str, frozenset[int]], list[str]] = defaultdict(list)
    for task in apart.values():
        parts = [task.split(part) for part in _HELD]
        if counts[sum(map(len, parts))] > 1 and all(part.written for part in parts):
            texts = frozenset(hash(text) for part in parts for text in part.texts)
            alike[task.kind.inputs, texts].append(task.name)
    for names in (names for names in alike.values() if len(names) > 1):
        told = f"{', '.join(map(repr, names))} have the same rows but hold out others of them, so they share no pass"
        logger.warning("%s: %s. Give them one validation part, or make them with stratify=False.", op, told)


def open_runner(
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    op: str,
    processor: Processor | None,
    options: PassOptions,
) -> Runner:
    """Return what runs `target` for its tasks: a BankRunner for a bank, a ModelRunner for a whole model.

    Raises:
        ConfigError: If a whole model has more than one task, or an option has no effect on it.
    """
    bank = target if isinstance(target, ReaderBank) else None
    kinds = [task.kind for task in tasks.values()]
    options.check_kinds(op, kinds)
    if isinstance(options, FitOptions):
        options.check_use(op, kinds, bank=bank is not None, train_base=bank is not None and bank.train_base)
    if bank is not None:
        return BankRunner(bank, op, processor)
    if len(tasks) != 1:
        raise ConfigError(f"{op}: {len(tasks)} tasks were given; a whole model is trained on one.")
    (task,) = tasks.values()
    return ModelRunner(cast("PreTrainedModel", target), task, op, processor, options)


def _specs(
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    grid: Mapping[str, Mapping[str, Sequence[Any]]],
    options: FitOptions,
) -> dict[str, RunSpec]:
    """Everything that is trained, by name; the readers of grids are put into the bank."""
    bank = target if isinstance(target, ReaderBank) else None
    rate = RATES[bank is not None] if options.learning_rate is None else options.learning_rate
    rates, epochs = per_reader(rate, list(tasks), "learning_rate"), per_reader(options.epochs, list(tasks), "epochs")
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


def _note(engine: Engine) -> None:
    """Have readers say what they were trained on, and a model that it is no longer what it was."""
    if engine.runner.base in engine.runner.modules:
        set_location(engine.runner.base, "")
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
                "max_length": max_length(engine.runner, {name: task}, engine.options.max_length),
                "stride": engine.options.stride,
                "add_prefix_space": engine.options.add_prefix_space,
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
        "score": progress.scores.get(learner.metric),
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


def _names(target: ReaderBank | PreTrainedModel) -> list[str]:
    """The files beside a bank or a model."""
    return ["history.json", "table.parquet", *(["importances.parquet"] if isinstance(target, ReaderBank) else [])]


def _files(result: FitResult) -> Files:
    facts = {"best": result.best, "test": result.test, "history": result.history, "importances": result.importances}
    return {
        "history.json": lambda path: write_text(path, json.dumps(facts, indent=1)),
        "table.parquet": lambda path: write_parquet(result.table, path),
        "importances.parquet": lambda path: write_parquet(result.importances, path, IMPORTANCES),
    }


def _write(target: ReaderBank | PreTrainedModel, processor: Any, folder: Path, files: Files) -> None:
    """Replace the bank or model in a folder, and all that is beside it, at once."""
    if isinstance(target, ReaderBank):
        save_bank(target, folder, files=files)
    else:
        save(target, folder, processor, files=files)
