"""Run a recipe: train every reader or method on every task with every seed, and write tables of the scores."""

from __future__ import annotations

import json
import logging
import os
import pickle
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import datasets
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as bars

from lamina.bank import ReaderBank
from lamina.cells.run_cells import Cell, Failure, State, note_failures, run_cells
from lamina.errors import ConfigError, error_context
from lamina.recipes.edits import apply_edits
from lamina.recipes.estimate import BATCHES, Batches, fitted_batches, save_batches
from lamina.recipes.expand import expand_recipe
from lamina.recipes.load_tasks import load_tasks
from lamina.recipes.monitor_keys import monitored_report
from lamina.recipes.paper_tables import SummaryRow, markdown, pivot, summaries
from lamina.recipes.preflight import check_edits, check_packages, measured
from lamina.recipes.report_file import REPORT, Report, TableRow, with_drawn_files, write_report_file
from lamina.recipes.separate_runs import SeparateRuns
from lamina.store import load
from lamina.store.files import Files, claimed, staged
from lamina.store.models import writing_class
from lamina.train.groups import warn_of_texts
from lamina.train.options import FitOptions
from lamina.train.results import IMPORTANCES, FitResult, Scores, sorted_rows, write_parquet
from lamina.train.training_run import READER_RATE, Tables, train
from lamina.utils import check_type, derive_seed, rank, run_in_first, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.recipes.schema import Recipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec
    from lamina.train.groups import Encodings

logger = logging.getLogger(__name__)

SAVE_STEPS = 1000  # optimizer steps between two checkpoints, unless the recipe sets `save_steps`
TABLES = ("table.json", "table.md", "table.parquet", "importances.parquet", REPORT)
_LISTS, _DICTS = ("rows", "importances", "history"), ("truncated", "baselines", "unlabelled")
_SAVED_FIELDS = (*_LISTS, "steps", "seconds", *_DICTS)  # saved of each separate run


@dataclass(frozen=True)
class RecipeResult:
    """The results of a recipe.

    Each row in `rows` has the settings of one run and every validation score at its best epoch. With `evaluate: test`
    it also has the test scores: column "test" for the task's own metric, "test_f1" for F1, and so on.

    Attributes:
        table: One row per task, method and setting; see `summaries`.
        rows: One row per reader or fine-tuned model.
        importances: One row per reader, epoch (or step) and layer.
        history: One row per reader or model, and epoch.
        report: The recipe's tables and figures.
        steps: Optimizer steps of all runs together.
        seconds: Wall-clock time of all runs together.
        truncated: Task -> number of training texts that were truncated.
        baselines: Task -> as in `FitResult.baselines`.
        unlabelled: Task -> number of training rows without a label.
        failures: Separate runs that ended with an error.
        bank: The bank with all readers; None if readers were trained separately, or methods trained the model.
    """

    table: list[SummaryRow] = field(default_factory=list)
    rows: list[TableRow] = field(default_factory=list)
    importances: list[TableRow] = field(default_factory=list)
    history: list[TableRow] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report([], []))
    steps: int = 0
    seconds: float = 0.0
    truncated: dict[str, int] = field(default_factory=dict)
    baselines: Scores = field(default_factory=dict)
    unlabelled: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    bank: ReaderBank | None = None


def run_recipe(
    recipe: Recipe,
    *,
    data: str | Path | None = None,
    output: str | Path | None = None,
    ray: str | None = None,
    memory_bytes: int | None = None,
    **options: object,
) -> RecipeResult:
    """Train the readers of a recipe, or fine-tune its models, and return tables of the scores.

    Raises ConfigError if an option is not allowed, `ray` is given for readers that share passes of the model, not even
    one row fits `memory_bytes`, every separate run failed, or a run to resume had other settings or data. Raises
    UnknownNameError if an option, or a metric of a task, does not exist; DataError if the data of a task cannot be read
    or used; StoreError if the output folder cannot be written or is in use, or a file in it is damaged;
    MissingExtraError if SciPy (for means over several runs) or a package of a metric is missing. Readers that share
    passes also raise the errors of `lamina.load`, `lamina.fit` and, with monitors, `lamina.monitors.calibrate`; methods
    those of their edits.

    Args:
        recipe: The recipe, from `load_recipe`.
        data: Folder with one subfolder per preset; paths under `files` are relative to this folder. None: presets come
            from the hub, and paths are relative to the working directory.
        output: Folder for the tables, the checkpoints, the bank (unless readers are trained separately) and, in
            `models`, the fine-tuned models. None: nothing is written.
        ray: Address of a Ray cluster that trains separate runs as tasks; see `lamina.cells.run_cells`. None: they are
            trained one after the other in this process.
        memory_bytes: Memory of each GPU. Batches that do not fit are split; `gradient_accumulation_steps` then keeps
            the rows per step as in the recipe. None: batches are as in the recipe.
        **options: Options of `lamina.fit` that replace those under `fit` of the recipe. Options that a task, reader,
            method or grid sets itself stay. With `resume=True`, finished runs are not repeated, and interrupted runs
            continue from their last checkpoint.

    Returns:
        The results. A separate run that fails does not stop the others: it is listed in `failures`, and in
        `failures.json` of the output folder.
    """
    check_type("recipe", "recipe", recipe, "Recipe")
    is_separate = bool(recipe.separately or recipe.methods)  # each run starts from a fresh model
    if ray is not None and not is_separate:
        problem = "the readers of the recipe share each pass of the model, in one process"
        raise ConfigError(f"recipe: ray is set; {problem}. Leave it out, or set separately: true.")
    folder = None if output is None else Path(output)
    show = {"progress": True, **recipe.fit, **options}["progress"]
    lock = nullcontext() if folder is None or rank() else claimed(folder, TABLES if is_separate else ())
    with _other_progress_bars(show=bool(show)), lock:
        session = _Session(recipe, load_tasks(recipe, data), folder)
        warn_of_texts("recipe", (copies[0] for copies in session.tasks.values()))
        _mention_unused(recipe)
        session.fit_batches(memory_bytes, options)
        specs = session.expand(options)
        check_packages(recipe, specs)
        if not is_separate:
            run = session.train(specs, output=folder)
            tasks = {name: copies[0] for name, copies in session.tasks.items()}
            report = monitored_report(recipe.monitors, run.bank, run.report, run.rows, specs, tasks, folder)
            return replace(run, report=report)
        check_edits(recipe, specs, session.tasks)
        source = None
        if ray is not None:
            call = uuid4().hex  # a worker that stays reads the data again in the next call
            source = pickle.dumps((call, Path.cwd(), recipe, data, folder, session.batches, options))
        run = session.train_separately(specs, source, progress=bool(show) and len(specs) > 1, ray=ray)
        if folder is not None:
            run_in_first(partial(_write_tables, run, folder))
        return run


def _write_tables(run: RecipeResult, folder: Path) -> None:
    with staged(folder, TABLES) as stage:
        for name, write in _table_files(run, folder).items():
            write(stage / name)


@contextmanager
def _other_progress_bars(*, show: bool) -> Iterator[None]:
    """Hide the progress bars of transformers, datasets and huggingface_hub inside the `with` block, unless `show`.

    Afterwards they are shown or hidden as before.
    """
    shown = {
        (bars.disable_progress_bar, bars.enable_progress_bar): bars.is_progress_bar_enabled(),
        (datasets.disable_progress_bars, datasets.enable_progress_bars): datasets.is_progress_bar_enabled(),
        (disable_progress_bars, enable_progress_bars): not are_progress_bars_disabled(),
    }
    changed = [switch for switch, is_shown in shown.items() if is_shown and not show]
    try:
        for disable, _ in changed:
            disable()
        yield
    finally:
        for _, enable in changed:
            enable()


def _table_files(run: RecipeResult, folder: Path | None) -> Files:
    """Return file name -> function that writes this file of a recipe's results to a path, for each name in `TABLES`.

    The report takes over the list of drawn files from an earlier report in `folder`. If there is no folder or no
    earlier report, the new report is written unchanged.
    """
    report = run.report if folder is None else with_drawn_files(run.report, folder)
    writers: tuple[Callable[[Path], None], ...] = (
        lambda path: write_text(path, json.dumps(run.table, indent=1)),
        lambda path: write_text(path, markdown(run.table)),
        lambda path: write_parquet(run.rows, path),
        lambda path: write_parquet(run.importances, path, IMPORTANCES),
        lambda path: write_report_file(path, report),
    )
    return dict(zip(TABLES, writers, strict=True))


def _mention_unused(recipe: Recipe) -> None:
    """Log a warning if tasks name a file of test rows, and the recipe does not score it. Only rank 0 logs."""
    unused = [name for name, task in recipe.tasks.items() if "test" in (task.files or {})]
    if unused and recipe.evaluate is None and not rank():
        names = ", ".join(map(repr, unused))
        logger.warning("recipe: the test part of %s was not scored. Set evaluate: test, or use lamina evaluate.", names)


@dataclass(frozen=True)
class _Session:
    """The tasks, whose data is read and encoded once, and the output folder (or None) that all runs of a recipe share.

    `tasks` is task name -> copies of the task, one per repeat of its subsample. `batches` is run name -> batches that
    fit the memory; {}: batches are as in the recipe. `encodings` is filled during training.
    """

    recipe: Recipe
    tasks: dict[str, list[Task]]
    folder: Path | None
    batches: dict[str, Batches] = field(default_factory=dict)
    encodings: Encodings = field(default_factory=dict)

    def expand(self, options: Mapping[str, object]) -> dict[str, RunSpec]:
        """Return run name -> run for every run of the recipe. `options` replace those under `fit` of the recipe.

        Batches that were fitted to the memory replace those of the recipe. Raises ConfigError if an option or a
        combination of settings is not allowed, and UnknownNameError if an option does not exist.
        """
        specs = expand_recipe(self.recipe, options, {name: copies[0] for name, copies in self.tasks.items()})
        for name, (size, steps) in self.batches.items():
            changes = {"batch_size": size, "gradient_accumulation_steps": steps}
            specs[name] = replace(specs[name], options={**specs[name].options, **changes})
        return specs

    def fit_batches(self, memory_bytes: int | None, options: Mapping[str, object]) -> None:
        """Fill `batches` with those that fit the memory of each GPU, and save them in the output folder, if any.

        None as `memory_bytes`: `batches` stays empty, and the file of an earlier run is deleted, unless the run is
        resumed. `options` replace those of the recipe's `fit`. Only the first process writes. Raises the errors of
        `expand` and `fitted_batches`, such as ConfigError if no batch fits, and those of `save_batches`.
        """
        resume = bool({**self.recipe.fit, **options}.get("resume"))
        if memory_bytes is not None:
            specs = self.expand(options)
            outlines = {name: measured(copies[0]) for name, copies in self.tasks.items()}
            self.batches.update(fitted_batches(self.recipe, specs, outlines, memory_bytes, self.folder))
        if self.folder is None or rank():
            return
        if self.batches:
            save_batches(self.folder, self.batches, resume=resume)
        elif not resume:
            (self.folder / BATCHES).unlink(missing_ok=True)

    def train(
        self, specs: dict[str, RunSpec], *, output: Path | None = None, separate: SeparateRuns | None = None
    ) -> RecipeResult:
        """Train several readers together on a newly loaded base model, or fine-tune one newly loaded model.

        Raises LaminaError if the model cannot be loaded, a reader or edit does not fit it, or training fails.

        Args:
            specs: Name -> run: readers that share passes, or a single run.
            output: Folder for the bank or model, the checkpoints and the tables. None: none of them is written,
                except the checkpoints of a separate run.
            separate: The files of separate runs, if this is one of them. If so, the run has its own checkpoints,
                resumes from the last of them, and passes a fine-tuned model on to be saved (a bank is not saved). None:
                readers share the run, or there is no output folder.
        """
        tasks = {name: self.tasks[spec.task][spec.repeat] for name, spec in specs.items()}
        options = {name: FitOptions.of(spec.options) for name, spec in specs.items()}
        target, processor = self._load(specs, tasks)
        changes: dict[str, object] = {}
        (shared, *_) = options.values()
        if isinstance(target, ReaderBank):
            changes["epochs"] = {name: chosen.epochs for name, chosen in options.items()}
            rates = {name: chosen.learning_rate or READER_RATE for name, chosen in options.items()}
            changes["learning_rate"] = rates
        if output is None:
            changes["resume"] = separate is not None
        if not (output is None and separate is None) and shared.save_steps is None:
            changes["save_steps"] = SAVE_STEPS
        shared = shared.model_copy(update=changes)
        bank = target if isinstance(target, ReaderBank) else None
        result = train(
            target,
            tasks,
            shared,
            processor=processor,
            output=output,
            checkpoints=None if separate is None else separate.checkpoints(*specs),
            events=None if separate is None else separate.folder.joinpath("events", *specs),
            encodings=self.encodings,
            tables=Tables(TABLES, lambda result: _table_files(self._result(specs, result, bank), self.folder)),
        )
        run = self._result(specs, result, bank)
        if separate is not None and not isinstance(target, ReaderBank):
            (name,) = specs
            separate.offer(name, target, processor, run.rows[0])
        return run

    def _result(self, specs: dict[str, RunSpec], result: FitResult, bank: ReaderBank | None) -> RecipeResult:
        """Return the results of one training as a `RecipeResult`. Each row names its task, method and settings.

        `specs` is run name -> run, and `result` the outcome of the training. `bank` is the trained bank; None if a
        whole model was trained.
        """
        rows: list[TableRow] = []
        for row in result.table:
            name, metric = row["reader"], row["metric"]
            spec, tests = specs[name], result.test.get(name, {})
            row = {"task": spec.task, "reader": name, **spec.settings} | {**row, "task": spec.task}
            rows.append(row | {"test" if key == metric else f"test_{key}": value for key, value in tests.items()})
        truncated = {specs[name].task: count for name, count in result.truncated.items()}
        rows = sorted_rows(rows)
        table = self._table(rows, specs)
        return RecipeResult(
            table=table,
            rows=rows,
            importances=result.importances,
            history=result.history,
            report=pivot(self.recipe, table, result.history, list(specs)),
            steps=result.steps,
            seconds=result.seconds,
            truncated=truncated,
            baselines={specs[name].task: facts for name, facts in result.baselines.items()},
            unlabelled={specs[name].task: count for name, count in result.unlabelled.items()},
            bank=bank,
        )

    def _table(self, rows: list[TableRow], specs: dict[str, RunSpec]) -> list[SummaryRow]:
        return summaries(rows, specs, {name: copies[0].metrics for name, copies in self.tasks.items()})

    def separate_runs(self, specs: dict[str, RunSpec]) -> SeparateRuns | None:
        return None if self.folder is None else SeparateRuns(self.recipe, self.folder, specs, self.tasks)

    def train_separately(
        self, specs: dict[str, RunSpec], source: bytes | None, *, progress: bool, ray: str | None
    ) -> RecipeResult:
        """Train every run by itself, as a cell that starts from a newly loaded model.

        With an output folder, the results of each run are saved as soon as it ends, and failures at the end, in
        `failures.json`. If the options set `resume`, finished runs are read from there, and interrupted runs continue
        from their last checkpoint. Raises ConfigError if every run failed, or a run to resume had other settings or
        data; StoreError if the output folder cannot be written, or a file in it is damaged.

        Args:
            specs: All runs by name.
            source: Pickled arguments with which a Ray worker opens its session; see `_open_session`. None: no workers.
            progress: Whether to show how many runs have ended.
            ray: Address of the Ray cluster. None: train in this process.
        """
        separate = self.separate_runs(specs)
        work = partial(self.train_one, specs, separate) if source is None else partial(_train_in_worker, source)
        cells = [Cell({"run": name}, partial(work, name), name) for name in specs]
        done, on_end = ({}, lambda _cell, _state: None) if separate is None else (separate.begin(cells), separate.end)
        states, failures = run_cells(cells, op="recipe", done=done, on_end=on_end, progress=progress, ray=ray)
        if separate is not None:
            run_in_first(partial(note_failures, separate.folder, failures))
        if not states:
            first = f"the first, {failures[0].key['run']}: {failures[0].error}"
            raise ConfigError(f"recipe: none of {len(failures)} runs finished; {first}")
        return self._joined(specs, states, failures)

    def train_one(self, specs: dict[str, RunSpec], separate: SeparateRuns | None, name: str) -> State:
        """Train only the run `name` of `specs`, from its last checkpoint if there is one.

        Returns the saved fields of its `RecipeResult`, JSON-ready. `separate` writes the run's files and finds its
        checkpoint. None: nothing is written or continued. Raises LaminaError as `train` does.
        """
        logger.info("%s, %d of %d", name, 1 + list(specs).index(name), len(specs))
        run = self.train({name: specs[name]}, separate=separate)
        return {key: getattr(run, key) for key in _SAVED_FIELDS}

    def _joined(self, specs: dict[str, RunSpec], states: list[State], failures: list[Failure]) -> RecipeResult:
        """Return the results of the separate runs in `specs` as one; its tables have only the runs that finished.

        `states` are the results of `train_one` for each finished run, as read from JSON; `failures` are the failed
        runs.
        """
        joined = RecipeResult(failures=failures)
        for state in states:
            for row in state["rows"]:
                row["importances"] = {int(layer): share for layer, share in row["importances"].items()}
            for key in _LISTS:
                getattr(joined, key).extend(state[key])
            for key in _DICTS:
                getattr(joined, key).update(state[key])
        ended = {row["reader"]: specs[row["reader"]] for row in joined.rows}
        table = self._table(joined.rows, ended)
        sums = {key: sum(state[key] for state in states) for key in ("steps", "seconds")}
        return replace(joined, table=table, report=pivot(self.recipe, table, joined.history, list(ended)), **sums)

    def _load(
        self, specs: dict[str, RunSpec], tasks: dict[str, Task]
    ) -> tuple[ReaderBank | PreTrainedModel, Processor]:
        """Load the recipe's model, and add the readers of the runs to it, or apply the edits of the single run.

        `specs` is run name -> run (several readers, or one run that fine-tunes the model), and `tasks` is run name ->
        task. Returns the bank or the edited model, and the processor. Weights of a new head and of edits are drawn with
        the run's seed. A model with monitors is loaded with the head that it writes text with, if any. Raises
        LaminaError if the model cannot be loaded, an edit cannot be applied, or a reader does not fit the model.
        """
        (first, *_), recipe = specs.values(), self.recipe
        kinds = {name: task.kind for name, task in tasks.items()}
        if first.reader is None:
            kind = kinds[first.name]
            labels = tasks[first.name].labels if kind.has_classes else None
            with torch.random.fork_rng():
                torch.manual_seed(derive_seed(first.settings["seed"], "head"))
                model, processor = load(recipe.model, kind.auto_class, labels=labels, revision=recipe.revision)
            where = f"recipe, methods.{first.settings['method']}"
            apply_edits(model, first.edits, seed=first.settings["seed"], where=where)
            return model, processor
        base = next((kind.base_class for kind in kinds.values() if kind.base_class != "AutoModel"), "AutoModel")
        if recipe.monitors and base == "AutoModel":  # a monitor reads the text that the model writes
            base = writing_class(recipe.model, revision=recipe.revision) or base
        model, processor = load(recipe.model, base, revision=recipe.revision)
        bank = ReaderBank(model, processor, train_base=recipe.train_base)
        for name, spec in specs.items():
            with error_context(f"reader {name}"):
                bank.add(name, spec.reader)  # pyright: ignore[reportArgumentType]
        return bank, processor


def _train_in_worker(source: bytes, name: str) -> State:
    """Train the separate run `name` in a Ray worker, and return what `train_one` does. See `_open_session`."""
    session, specs, separate = _open_session(source)
    return session.train_one(specs, separate, name)


@lru_cache(maxsize=1)
def _open_session(source: bytes) -> tuple[_Session, dict[str, RunSpec], SeparateRuns | None]:
    """Open the session of a recipe in a worker process of Ray; return it, all runs by name, and files of separate runs.

    `source` is a pickled tuple: id of the call of `run_recipe`, working directory, recipe, data folder, output folder,
    batches that fit the memory (by run), and options of `lamina.fit`. Calls with an equal `source` share one session.
    The process changes to that working directory. Without an output folder, None is returned in place of the files.
    Raises the errors of `load_tasks` and `_Session.expand`.
    """
    _, directory, recipe, data, folder, batches, options = pickle.loads(source)
    os.chdir(directory)
    session = _Session(recipe, load_tasks(recipe, data), folder, batches)
    specs = session.expand({**options, "progress": False})
    return session, specs, session.separate_runs(specs)
