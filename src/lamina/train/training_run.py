"""One training run: from tasks to trained readers or a trained model, with its scores and files."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lamina.bank import ReaderBank, ReaderModule
from lamina.bank.reader import READS_WORDS, WATCHES
from lamina.editing.record import set_location
from lamina.errors import ConfigError, DataError
from lamina.layers.devices import check_has_weights
from lamina.store.bank_folder import claimed_output, save_bank, saved_bytes
from lamina.store.files import Files, check_room
from lamina.store.processors import record_inputs
from lamina.store.save_model import save
from lamina.tasks.metrics import LOWER, require_metrics
from lamina.tasks.recorded_rows import recorded_of
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.base import Runner, checked_target
from lamina.train.checkpoint import Checkpoints, identity
from lamina.train.grid import RunSpec, expand_into, undo_grid_on_error
from lamina.train.groups import groups_of, max_length, tasks_by_name
from lamina.train.model_runner import ModelRunner
from lamina.train.options import FitOptions, PassOptions, per_reader
from lamina.train.plan import LEAST_STEPS, Group, Plan
from lamina.train.results import IMPORTANCES, FitResult, Scores, TableRow, sorted_rows, write_parquet
from lamina.utils import barrier, check_type, pluralize, rank, run_in_first, write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.data.recorded_states import RowStates
    from lamina.layers.types import Processor
    from lamina.train.engine import Engine
    from lamina.train.groups import Encodings
    from lamina.train.learner import Learner


logger = logging.getLogger(__name__)

_FEW_STEPS = 30  # with fewer optimizer steps, a reader has learnt little
_FEW_ROWS = 8  # with fewer validation rows, the choice of the best epoch is a matter of chance
_NEARLY_ALL = 0.9  # if one class has a larger share of the rows, accuracy says little about the others
_ROWS_TO_COMPARE = 20  # with fewer validation rows, which of two scores is better is a matter of chance
_READ_PARTS = ("train", "validation")  # parts that are read in every epoch
_FILES = ("history.json", "table.parquet", "importances.parquet")  # the last one only for a bank, see `_write`
READER_RATE, MODEL_RATE = 1e-3, 2e-5  # default learning rates of readers, and of a whole model


@dataclass(frozen=True)
class Tables:
    """Additional files for a run's output folder, beside those that `fit` writes.

    Attributes:
        names: Names of the files. They are reserved before training.
        files: Called with the result of the run; returns file name -> function that writes the file to a path.
    """

    names: Sequence[str]
    files: Callable[[FitResult], Files]


def train(  # noqa: PLR0913
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    options: FitOptions,
    *,
    op: str = "fit",
    grid: Mapping[str, Mapping[str, Sequence[object]]] | None = None,
    processor: Processor | None = None,
    output: str | Path | None = None,
    checkpoints: str | Path | None = None,
    events: Path | None = None,
    encodings: Encodings | None = None,
    states: Mapping[str, RowStates] | None = None,
    tables: Tables | None = None,
) -> FitResult:
    """Train a bank's readers or a whole model in place; replace each trained reader's `info` (`_record_training`).

    Args:
        target: The bank or model. It is moved to the device of the run.
        tasks: Learner name -> task, or a single task.
        options: Options of the run.
        op: The public operation, for messages.
        grid: Reader name -> its grid; see `fit`. None: no grids.
        processor: Tokenizer, image processor or feature extractor. None: the bank's or the model's.
        output: Folder for the bank or model, tables and checkpoints. None: nothing is saved.
        checkpoints: Folder for the checkpoints of this run, which the caller removes later. None: "checkpoints" in
            `output`; without `output` there are none.
        events: Folder for TensorBoard events if there is no `output`.
        encodings: Encoded examples of earlier runs, which are reused; new ones are added in place. None: encode all.
        states: Digest of encoded training examples -> their hidden states, which the caller has computed for all layers
            that the readers need. The model does not read these examples. None: there are none.
        tables: More files to write into `output`. None: only the files of `fit`.

    Returns:
        The result, in the form of `fit`.

    Raises:
        LaminaError: The errors of `fit`.
    """
    from lamina.train.engine import Engine, start_accelerator

    check_type(op, "output", output, "str | Path | None")
    check_type(op, "processor", processor, "Processor | None")
    target, folder = checked_target(op, target), None if output is None else Path(output)
    place = folder / "checkpoints" if folder and checkpoints is None else checkpoints
    if options.resume and place is None:
        raise ConfigError(f"{op}: resume is set but no output folder; checkpoints are saved in one.")
    tasks = tasks_by_name(op, tasks)
    runner = open_runner(target, tasks, op, processor, options)
    scored, accelerator = _scored_tasks(op, runner, tasks, options), start_accelerator(options, folder or events)
    names = [*_FILES[: 3 if isinstance(target, ReaderBank) else 2], *(tables.names if tables else ())] if folder else ()
    with ExitStack() as claims, undo_grid_on_error(target, grid or {}) as begin_training:
        if place is not None:
            run_in_first(lambda: claims.enter_context(claimed_output(target, Path(folder or place), names, op)))
        specs = _specs(target, tasks, {} if grid is None else grid, options)
        tasks = {name: tasks[spec.task] for name, spec in specs.items()}
        target.to(accelerator.device)  # pyright: ignore
        groups = _training_groups(runner, tasks, specs, options, encodings, states or {})
        validated = {name: task for name, task in tasks.items() if specs[name].task in scored}
        validation = list(groups_of(runner, validated, "validation", options, encodings))
        start, epochs = time.perf_counter(), {name: int(spec.epochs or 1) for name, spec in specs.items()}
        plan = _checked_plan(target, Plan(groups, epochs, options.step_size, options.seed, options.max_steps))
        _keep_learnt(runner, groups)
        runner.prepare([*groups, *validation], options, plan.last_epoch())
        rates = {name: float(spec.learning_rate or 0) for name, spec in specs.items()}
        learners, saved = runner.learners(tasks, plan, rates, options), None
        if place is not None:
            saved = Checkpoints(Path(place), op, identity(runner, learners, plan, validation, rates, options))
            run_in_first(partial(_check_space, saved, learners, target, folder))
        engine = Engine(runner, learners, plan, validation, options=options, accelerator=accelerator, checkpoints=saved)
        begin_training()
        engine.run()
        _record_training(engine)
        scores = runner.score(groups_of(runner, tasks, "test", options, encodings) if options.test else [], options)
        result = _result(engine, specs, scores, seconds=time.perf_counter() - start, folder=folder)
        if folder is not None:
            run_in_first(partial(_write, target, runner.processor, folder, result, tables))
        barrier()
    _warn_of_few_rows(op, scored, options, {specs[name].task for name, count in plan.epochs.items() if count > 1})
    return _warned_of_little(op, engine, result)


def _check_space(
    saved: Checkpoints, learners: Sequence[Learner], target: ReaderBank | PreTrainedModel, folder: Path | None
) -> None:
    """Raise StoreError if the disk lacks room for a run's checkpoints and, with `folder`, for what is saved there."""
    size = sum(learner.checkpoint_bytes for learner in learners)
    check_room(folder or saved.folder, saved.needed_bytes(size) + (saved_bytes(target) if folder else 0))


def _scored_tasks(op: str, runner: Runner, tasks: Mapping[str, Task], options: FitOptions) -> dict[str, Task]:
    """Check that every task has the splits that the run needs, and return the tasks to score after each epoch.

    These are all tasks if a score decides something: the best epoch, an early stop, the "plateau" schedule, or the end
    of a base model that is trained with its readers. Otherwise they are the tasks that have a validation split. A
    warning is logged if tasks have the same rows but cannot share passes.

    Raises:
        UnknownNameError: If a task does not have a split that is needed, or the bank has no reader of a task's name.
        ConfigError: If a split has no labelled row, a task does not fit its reader, or the frozen model has changed.
        MissingExtraError: If a metric of a task needs a package that is not installed.
    """
    runner.check(tasks, ("train", *(["test"] if options.test else [])))
    decides = options.keep == "best" or options.early_stopping_patience or options.schedule == "plateau"
    decides = decides or len(runner.modules) > 1  # a base that is trained with its readers has a best epoch of its own
    scored = {name: task for name, task in tasks.items() if decides or "validation" in task.splits}
    if scored:
        runner.check(scored, ("validation",))
    require_metrics(op, (metric for name in (tasks if options.test else scored) for metric in tasks[name].metrics))
    _warn_of_separate_passes(op, scored)
    return scored


def _training_groups(
    runner: Runner,
    tasks: Mapping[str, Task],
    specs: Mapping[str, RunSpec],
    options: FitOptions,
    encodings: Encodings | None,
    states: Mapping[str, RowStates],
) -> list[Group]:
    """Return the encoded training examples of a run's learners, together with their entries in `states`.

    `specs` is learner name -> its `RunSpec`; `encodings` and `states` are as in `train`. Raises the errors of
    `groups_of`, and DataError if a task has rows without a label, its `missing_labels` is None and no other task shares
    its rows. In `lamina.fit` and `lamina.finetune`, a warning says how many examples are cut.
    """
    groups = list(groups_of(runner, tasks, "train", options, encodings))
    for group in groups if states else ():
        group.states = states.get(group.inputs.digest)
    for group in groups:
        task: Task = group.tasks[group.names[0]]
        names = {specs[name].task for name in group.names}  # the readers of a grid have one task
        if len(names) == 1 and task.missing_labels is None and (count := task.split("train").unlabelled):
            got = f"{count} of {len(task.split('train'))} training rows of '{names.pop()}' have no label"
            rule = "no other task shares these rows"
            hint = "Give the task missing_labels='mask' to train on the others, or 'drop' to leave them out"
            raise DataError(f"{runner.op}: {got}, and {rule}. {hint}.")
    if encodings is None and runner.op in ("fit", "finetune"):  # recipes and studies have many runs on the same texts
        _warn_of_cut(runner.op, groups)
    return groups


def _warn_of_cut(op: str, groups: Sequence[Group]) -> None:
    """Log a warning if training examples are too long to be read whole. Only rank 0 warns. `op` begins the message."""
    cut: list[str] = []
    for group in groups if not rank() else ():
        names: dict[int, list[str]] = defaultdict(list)
        for name in group.names:
            names[group.truncated(name)].append(f"'{name}'")
        rows = len(group.tasks[group.names[0]].split("train"))
        cut += [f"{count} of {rows} training examples of {_first_ten(same)}" for count, same in names.items() if count]
    if cut:
        hint = "Raise max_length, if the model reads more"
        logger.warning("%s: too long to be read whole, and cut off: %s. %s.", op, "; ".join(cut), hint)


def _warn_of_few_rows(op: str, scored: Mapping[str, Task], options: FitOptions, several: set[str]) -> None:
    """Log a warning for each task whose best epoch is chosen by fewer than 8 labelled validation rows.

    With few rows, many epochs have the same score, and the first of these counts as the best. Only rank 0 warns, and
    only if the best epoch is kept. Left out are tasks that train for a single epoch (all that `several` does not name),
    and those whose metric is perplexity or the mean absolute error. `op` begins the message.
    """
    for name, task in scored.items() if options.keep == "best" and not rank() else ():
        rows = len(task.split("validation")) - task.split("validation").unlabelled
        if name in several and rows < _FEW_ROWS and task.metric not in LOWER:
            problem = f"'{name}' has {rows} validation rows, which can hardly tell which epoch is best"
            logger.warning('%s: %s. Use more, or keep="last".', op, problem)


def _warned_of_little(op: str, engine: Engine, result: FitResult) -> FitResult:
    """Return `result` unchanged, after warnings about the learners that may have learnt little, if `op` is "fit".

    One names the readers that took fewer than 30 optimizer steps, if the options that decide their number have the
    defaults. Another names the other learners that are not better on their validation split than the best constant
    answer, by the deciding metric or, if the task has it, the mean absolute error. Splits with fewer than 20 labelled
    rows, or with a constant answer that is always right, are left out. If one class has over 90 % of the rows, other
    metrics than accuracy are suggested. A warning lists at most 10 names. Only rank 0 warns.
    """
    if op != "fit" or rank():
        return result
    plan, options, usual = engine.plan, engine.options, FitOptions()
    chosen = options.max_steps is not None or options.step_size != usual.step_size
    names = engine.learners if isinstance(engine.runner, BankRunner) and not chosen else ()
    steps = {name: plan.steps_of(name) for name in names if plan.epochs[name] == usual.epochs}
    few = {name: count for name, count in steps.items() if count < _FEW_STEPS}
    if few:
        most = "at most " if len({*few.values()}) > 1 else ""
        took = f"took {most}{pluralize(max(few.values()), 'optimizer step')}, perhaps too few to learn from"
        enough = math.ceil(LEAST_STEPS * plan.epochs[next(iter(few))] / min(few.values()))
        hint = f"Raise epochs, for instance to {enough}, or lower batch_size"
        logger.warning("fit: %s %s. %s.", _first_ten([f"'{name}'" for name in few]), took, hint)
    poor: list[str] = []
    uneven: list[Task] = []
    for name, constant in result.baselines.items():
        metric = "mae" if "mae" in constant else engine.learners[name].metric
        rows = plan.tasks[name].split("validation")
        sign = -1 if metric in LOWER else 1
        perfect = constant.get(metric) == (0 if metric in LOWER else 1)  # the split has one answer only
        if name in few or len(rows) - rows.unlabelled < _ROWS_TO_COMPARE or metric not in constant or perfect:
            continue
        if sign * result.best[name][metric] <= sign * constant[metric]:
            poor.append(f"'{name}' ({metric} {result.best[name][metric]:.3f}, always '{constant['always']}')")
            uneven += [plan.tasks[name]] if metric == "accuracy" and constant[metric] > _NEARLY_ALL else []
    if poor:
        names, hint = _first_ten(poor), _other_metrics(uneven[0]) if uneven else ""
        logger.warning("fit: not better on validation than one and the same answer: %s%s", names, hint)
    return result


def _other_metrics(task: Task) -> str:
    """Return the end of a warning: which metrics to choose for a task in which one answer is right for most rows."""
    kind, facts = task.kind, (task.problem_type, task.labels)
    known = {*kind.metrics(*facts), *kind.further_metrics(*facts)}
    names = [repr(name) for name in ("macro_f1", "auroc", "f1") if name in known]
    return f". Over 90 % of the rows have one answer: choose metric={' or '.join(names[:2])} when you make the task"


def _first_ten(names: Sequence[str]) -> str:
    """Return names joined by commas: all of them, or the first 10 and how many others there are."""
    others = len(names) - 10
    return ", ".join(names[:10]) + (f" and {others} other{'s' * (others > 1)}" if others > 0 else "")


def _warn_of_separate_passes(op: str, tasks: Mapping[str, Task]) -> None:
    """Log a warning if tasks have the same texts in total, but divided differently into train and validation splits.

    Such tasks cannot share passes of the model. `op` begins the message. Only rank 0 logs.
    """
    by_examples = {task.split("train").key: task for task in tasks.values() if not rank()}
    counts = Counter(sum(len(task.split(part)) for part in _READ_PARTS) for task in by_examples.values())
    same_rows: dict[tuple[str, frozenset[int]], list[object]] = defaultdict(list)
    for key, task in by_examples.items():
        parts = [task.split(part) for part in _READ_PARTS]
        # texts are compared only if another task has as many rows, since hashing all of them takes a while
        if counts[sum(map(len, parts))] > 1 and all(part.written for part in parts):
            texts = frozenset(hash(text) for part in parts for text in part.texts)
            same_rows[task.kind.inputs, texts].append(key)
    for keys in (keys for keys in same_rows.values() if len(keys) > 1):
        names = [name for name, task in tasks.items() if task.split("train").key in keys]
        problem = f"{', '.join(map(repr, names))} have the same rows but different validation parts"
        hint = "Give them one validation part, or read them from one file with the same seed"
        logger.warning("%s: %s, so they cannot all share a pass. %s.", op, problem, hint)


def open_runner(
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    op: str,
    processor: Processor | None,
    options: PassOptions,
) -> Runner:
    """Return the runner of a bank (a `BankRunner`) or of a whole model (a `ModelRunner`).

    Args:
        target: The bank or model.
        tasks: Learner name -> task.
        op: The public operation, which errors name.
        processor: Tokenizer, image processor or feature extractor. None: the bank's or the model's.
        options: Options of the passes, which are checked against the kinds of the tasks.

    Raises:
        ConfigError: If a whole model has more than one task or recorded states, an option has no effect, there is no
            processor, or the model has no weights (meta device).
        LaminaError: The other errors of `BankRunner` and `ModelRunner`.
    """
    bank = target if isinstance(target, ReaderBank) else None
    check_has_weights(op, target if bank is None else bank.model)
    kinds = [task.kind for task in tasks.values()]
    options.check_kinds(op, kinds)
    if isinstance(options, FitOptions):
        options.check_use(op, kinds, bank=bank is not None, train_base=bank is not None and bank.train_base)
    recorded = [all(map(recorded_of, task.splits.values())) for task in tasks.values()]
    if bank is not None:
        readers = {name: bank[name] for name in tasks if name in bank}
        return BankRunner(bank, op, processor, reads_inputs=not all(recorded), readers=readers)
    if any(recorded):
        raise ConfigError(f"{op}: states were recorded for a task of a whole model; readers of a bank learn from them.")
    if len(tasks) != 1:
        raise ConfigError(f"{op}: {len(tasks)} tasks were given; a whole model is trained on one task.")
    (task,) = tasks.values()
    return ModelRunner(cast("PreTrainedModel", target), task, op, processor, options)


def _specs(
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    grid: Mapping[str, Mapping[str, Sequence[object]]],
    options: FitOptions,
) -> dict[str, RunSpec]:
    """Return learner name -> its `RunSpec`, with learning rate and epochs, for every learner that is trained.

    The readers of grids are added to the bank; see `expand_into`.

    Raises:
        UnknownNameError: If an option or a grid names a reader that has no task, or a key of a grid does not exist.
        ConfigError: If a whole model has a grid, a grid is not valid, a learner has no learning rate or epochs, or
            a trained reader has no task while the base model that it reads is trained.
    """
    bank = target if isinstance(target, ReaderBank) else None
    default_rate = MODEL_RATE if bank is None else READER_RATE
    rate = default_rate if options.learning_rate is None else options.learning_rate
    rates, epochs = per_reader(rate, list(tasks), "learning_rate"), per_reader(options.epochs, list(tasks), "epochs")
    if bank is None:
        if grid:
            raise ConfigError("fit: a grid was given for a whole model; only readers have grids.")
        return {name: RunSpec(name, task=name, learning_rate=rates[name], epochs=epochs[name]) for name in tasks}
    if others := [name for name in bank if bank.train_base and name not in tasks and "task" in bank[name].info]:
        problem = f"the model is trained too, and the trained readers {', '.join(map(repr, others))} have no task"
        raise ConfigError(f"fit: {problem}; they would read another model. Give them tasks, or remove them.")
    return expand_into(bank, tasks, grid, rates, epochs)


def _checked_plan(target: ReaderBank | PreTrainedModel, plan: Plan) -> Plan:
    """Return `plan`; raise ConfigError if readers that train their base model too have different numbers of epochs."""
    different = sorted({*plan.epochs.values()})
    if isinstance(target, ReaderBank) and target.train_base and len(different) > 1:
        rule = "with train_base they share the model that is trained, so all must end together"
        hint = "" if plan.max_steps is None else " Set epochs instead of max_steps."
        raise ConfigError(f"fit: the readers have {different} epochs; {rule}.{hint}")
    return plan


def _keep_learnt(runner: Runner, groups: Sequence[Group]) -> None:
    """Store the facts that `Kind.learnt` finds in the train split, in place of older ones, in each learner's `info`."""
    for group in groups:
        for name, task in group.tasks.items():
            info = runner.info(name)
            for key in task.kind.learnt_keys:
                info.pop(key, None)
            runner.set_learnt(name, task.kind.learnt(task, task.split("train"), group.inputs))


def _record_training(engine: Engine) -> None:
    """Replace the `info` of each trained reader by what it was trained on, and its scores.

    The facts that `Kind.learnt` found stay, and whether the reader was added with `watch=True`. Monitors and cascades
    that use the reader are dropped. Each reader also records the processor's facts (`record_inputs`). The location from
    which a trained base or whole model was loaded is cleared, because the weights there are now different.
    """
    options = engine.options
    if engine.runner.base in engine.runner.modules:
        set_location(engine.runner.base, "")
    for name, task in engine.plan.tasks.items():
        learner = engine.learners[name]
        if isinstance(learner.module, ReaderModule):
            record_inputs([learner.module], engine.runner.processor)
            kept = (*task.kind.learnt_keys, WATCHES, READS_WORDS)
            learnt = {key: value for key, value in learner.module.info.items() if key in kept}
            split = task.split("train")
            length, spaced, pairs, missing = None, None, split.pairs, task.missing_labels
            if (recorded := recorded_of(split)) is not None:
                length, spaced = recorded.manifest.max_length, recorded.manifest.add_prefix_space
                length, pairs = length or options.max_length, pairs or bool(recorded.manifest.pairs)
            else:
                length = max_length(engine.runner, {task.name: task}, options.max_length)
            learner.module.info = {
                **learnt,
                "task": task.name,
                "metric": task.metric,
                "scores": learner.progress.scores,
                "epoch": learner.progress.best_epoch,
                "rows": len(split) - split.unlabelled,
                "pair": pairs,
                "max_length": length,
                "stride": options.stride,
                "add_prefix_space": options.add_prefix_space if spaced is None else spaced,
                **({"columns": dict(task.columns)} if task.columns else {}),
                **({"positive": task.positive} if task.positive else {}),
                **({"missing_labels": missing} if missing and task.problem_type == "multi_label" else {}),
            }
    if isinstance(engine.runner, BankRunner):
        for name in engine.runner.bank:
            engine.runner.bank[name].drop_cascades_of(engine.plan.tasks)


def _row(engine: Engine, learner: Learner, spec: RunSpec) -> TableRow:
    """Return a learner's row of `FitResult.table`; `spec` has its task and its settings in the grid."""
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


def _result(
    engine: Engine,
    specs: Mapping[str, RunSpec],
    test: dict[str, dict[str, float]],
    *,
    seconds: float,
    folder: Path | None,
) -> FitResult:
    """Return the result of a run. Learners whose best epoch precedes a resumed run's checkpoint are scored again.

    `test` has the scores on the test split, `seconds` the duration, and `folder` is where the target is saved, or None.
    """
    progress = {name: learner.progress for name, learner in engine.learners.items()}
    results, tasks = dict(engine.best_results), engine.plan.tasks
    # a resumed run lacks the results of best epochs before its checkpoint
    if missing := {name for group in engine.validation for name in group.names} - results.keys():
        engine.runner.score(engine.validation, engine.options, names=missing, collected=results)
    return FitResult(
        best={name: {"epoch": state.best_epoch, **state.scores} for name, state in progress.items()},
        history=engine.history,
        importances=engine.importances,
        truncated={name: group.truncated(name) for group in engine.plan.groups for name in group.names},
        baselines=_baselines(engine),
        results={name: (result, tasks[name].metrics) for name, result in results.items()},
        unlabelled={name: count for name, task in tasks.items() if (count := task.split("train").unlabelled)},
        table=sorted_rows([_row(engine, learner, specs[name]) for name, learner in engine.learners.items()]),
        test=test,
        steps=engine.steps,
        seconds=seconds,
        folder=folder,
    )


def _baselines(engine: Engine) -> Scores:
    """Return learner name -> its entry of `FitResult.baselines`. Kinds of task without one are left out."""
    baselines: Scores = {}
    for group in engine.validation:
        for name, task in group.tasks.items():
            results = task.kind.results(task, task.split(group.part), group.inputs)
            if (found := results.baseline(task.metrics)) is not None:
                always, scores = found
                baselines[name] = {"always": always, **scores}
    return baselines


def _write(
    target: ReaderBank | PreTrainedModel, processor: Processor, folder: Path, result: FitResult, tables: Tables | None
) -> None:
    """Save the bank, or the model with its processor, to a folder, with the result and `tables`, all or nothing.

    The result is in "history.json", "table.parquet" and, for a bank, "importances.parquet". `tables` are more files;
    None: there are none. Errors are those of `save_bank` or `lamina.save`.
    """
    others = tables.files(result) if tables else {}
    facts = {"best": result.best, "test": result.test, "history": result.history, "importances": result.importances}
    files: Files = {
        "history.json": lambda path: write_text(path, json.dumps(facts, indent=1)),
        "table.parquet": lambda path: write_parquet(result.table, path),
    }
    if isinstance(target, ReaderBank):
        files["importances.parquet"] = lambda path: write_parquet(result.importances, path, IMPORTANCES)
        save_bank(target, folder, files={**files, **others})
    else:
        save(target, folder, processor, files={**files, **others})
