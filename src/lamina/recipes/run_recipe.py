"""Run a recipe: every reader or method of every task and seed, and a table of the results."""

from __future__ import annotations

import json
import logging
import os
import pickle
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as bars

from lamina.bank import ReaderBank
from lamina.cells.run_cells import Cell, Failure, Shelf, note_failures, run_cells
from lamina.errors import ConfigError, StoreError, error_context
from lamina.recipes.edits import apply_edits
from lamina.recipes.expand import expand_recipe
from lamina.recipes.load_tasks import load_tasks
from lamina.recipes.paper_tables import pivot
from lamina.recipes.preflight import check_edits
from lamina.recipes.report_file import REPORT, Report, read_report_file, write_report_file
from lamina.recipes.schema import slug
from lamina.recipes.summary_table import markdown, summaries
from lamina.store import load, save
from lamina.store.bank_folder import saved_bytes
from lamina.store.files import check_room, claimed, staged
from lamina.store.save_model import discard, move
from lamina.train.checkpoint import Checkpoints
from lamina.train.identity import data_digests, reader_settings, starting_weights
from lamina.train.options import FitOptions
from lamina.train.results import IMPORTANCES, sort_key, sorted_rows, write_parquet
from lamina.train.training_run import RATES, Tables, train
from lamina.utils import derive_seed, is_dir, rank, write_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.recipes.schema import Recipe
    from lamina.store.files import Files
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec
    from lamina.train.groups import Encodings
    from lamina.train.results import FitResult

logger = logging.getLogger(__name__)

SAVE_STEPS = 1000  # between checkpoints, where a recipe does not say
TABLES = ("table.json", "table.md", "table.parquet", "importances.parquet", REPORT)
_OF_EACH = ("rows", "importances", "history", "steps", "seconds", "truncated")  # noted of a run that ended


@dataclass(frozen=True)
class Run:
    """The results of a recipe.

    Rows have their settings, every validation score at the best epoch, and with `evaluate: test` every test score
    ("test" by the task's metric, "test_f1" and so on).
    """

    table: list[dict[str, Any]] = field(default_factory=list)  # one row per task, method and setting; see `summaries`
    rows: list[dict[str, Any]] = field(default_factory=list)  # one per reader or fine-tuned model
    importances: list[dict[str, Any]] = field(default_factory=list)  # one row per reader, epoch (or step) and layer
    history: list[dict[str, Any]] = field(default_factory=list)  # one row per reader or model, and epoch
    report: Report = field(default_factory=lambda: Report([], []))  # the recipe's tables and figures
    steps: int = 0
    seconds: float = 0.0
    truncated: dict[str, int] = field(default_factory=dict)  # task -> how many training texts lost their end
    failures: list[Failure] = field(default_factory=list)  # of separate runs
    bank: ReaderBank | None = None  # every reader, at its best epoch; None if each was trained separately


def run_recipe(
    recipe: Recipe,
    *,
    data: str | Path | None = None,
    output: str | Path | None = None,
    ray: str | None = None,
    **options: Any,
) -> Run:
    """Train the readers or fine-tune the models of a recipe.

    Args:
        recipe: From `load_recipe`.
        data: Folder with one subfolder per preset, or (for `files`) the folder they are relative to; None: presets
            come from the hub.
        output: Folder for the bank (none of readers trained separately), fine-tuned models (in `models`), checkpoints
            and tables: a row per method, per reader, and per epoch and layer.
        ray: Where to train separate runs as tasks of Ray; see `lamina.cells.run_cells`. None: one by one, here.
        **options: Of `lamina.fit`, in place of those under the recipe's own `fit`; what a task, reader, method or grid
            says of itself stays. With resume, runs that ended are not repeated, and the one that
            was killed goes on from its checkpoint.

    Returns:
        What came out. Of separate runs, one that fails is recorded, in `failures.json` too, and the others go on.

    Raises:
        ConfigError: If `ray` is given and readers share their passes, or no run came to its end.
    """
    with _bars_of_others(show=_shown(recipe, options)):
        return _run(recipe, data, None if output is None else Path(output), options, ray)


@contextmanager
def _bars_of_others(*, show: bool) -> Iterator[None]:
    """Keep transformers, datasets and the hub from showing bars of their own here, unless `show`."""
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


def _run(recipe: Recipe, data: str | Path | None, folder: Path | None, options: dict[str, Any], ray: str | None) -> Run:
    alone = bool(recipe.separately or recipe.methods)  # each run has a fresh model
    if ray is not None and not alone:
        what = "the readers of the recipe share each pass of the model, in one process"
        raise ConfigError(f"recipe: ray is given; {what}. Leave it out, or set separately: true.")
    with nullcontext() if folder is None or rank() else claimed(folder, TABLES if alone else ()):
        session = _Session(recipe, load_tasks(recipe, data), folder)
        specs = session.expand(options)
        if not alone:
            return session.train(specs, output=folder)
        check_edits(recipe, specs, session.tasks)
        given = None if ray is None else pickle.dumps((Path.cwd(), recipe, data, folder, options))
        show = _shown(recipe, options) and len(specs) > 1
        run = session.apart(specs, given, progress=show, ray=ray)
        if folder is not None and rank() == 0:
            with staged(folder, TABLES) as stage:
                for name, write in _files(run, folder).items():
                    write(stage / name)
        return run


def _shown(recipe: Recipe, options: dict[str, Any]) -> bool:
    return {"progress": True, **recipe.fit, **options}["progress"]


def _files(run: Run, folder: Path | None) -> Files:
    with suppress(StoreError):  # what was drawn before is drawn anew, or goes, by `lamina report`
        drawn = [] if folder is None else read_report_file(folder).files
        run = replace(run, report=replace(run.report, files=drawn))
    return dict(
        zip(
            TABLES,
            (
                lambda path: write_text(path, json.dumps(run.table, indent=1)),
                lambda path: write_text(path, markdown(run.table)),
                lambda path: write_parquet(run.rows, path),
                lambda path: write_parquet(run.importances, path, IMPORTANCES),
                lambda path: write_report_file(path, run.report),
            ),
            strict=True,
        )
    )


@dataclass(frozen=True)
class _Session:
    """What all runs of a recipe share: the tasks, whose data is read and encoded once, and the output folder."""

    recipe: Recipe
    tasks: dict[str, list[Task]]
    folder: Path | None
    encodings: Encodings = field(default_factory=dict)

    def expand(self, options: dict[str, Any]) -> dict[str, RunSpec]:
        """Return every run of the recipe, by name."""
        return expand_recipe(self.recipe, options, {name: copies[0] for name, copies in self.tasks.items()})

    def train(self, specs: dict[str, RunSpec], *, output: Path | None = None, own: Separate | None = None) -> Run:
        """Train some readers in one pass, or one model, on a fresh base; `output` gets everything.

        One that is trained by itself has its `own` checkpoints, from which it goes on.
        """
        tasks = {name: self.tasks[spec.task][spec.repeat] for name, spec in specs.items()}
        options = {name: FitOptions.of(spec.options) for name, spec in specs.items()}
        target, processor = self._load(specs, tasks)
        checkpoints = None if own is None else own.checkpoints(*specs)
        changes: dict[str, Any] = {}
        (shared, *_) = options.values()
        if isinstance(target, ReaderBank):
            changes["epochs"] = {name: chosen.epochs for name, chosen in options.items()}
            rates = {name: chosen.learning_rate or RATES[True] for name, chosen in options.items()}
            changes["learning_rate"] = rates
        if output is None:
            changes["resume"] = own is not None
        if not (output is None and own is None) and shared.save_steps is None:
            changes["save_steps"] = SAVE_STEPS
        shared = shared.model_copy(update=changes)
        bank = target if isinstance(target, ReaderBank) else None
        places: dict[str, Any] = {"output": output, "checkpoints": checkpoints}
        if own is not None and self.folder is not None:
            places["events"] = self.folder.joinpath("events", *specs)
        tables = Tables(TABLES, lambda result: _files(self._run(specs, result, bank), self.folder))
        result = train(target, tasks, shared, processor=processor, encodings=self.encodings, tables=tables, **places)
        run = self._run(specs, result, bank)
        if own is not None and not isinstance(target, ReaderBank):
            (name,) = specs
            own.offer(name, target, processor, run.rows[0])
        return run

    def _run(self, specs: dict[str, RunSpec], result: FitResult, bank: ReaderBank | None) -> Run:
        """Return the results of a training run with the tasks, methods and settings of the recipe."""
        rows = []
        for row in result.table:
            name, metric = row["reader"], row["metric"]
            spec, tests = specs[name], result.test.get(name, {})
            row = {"task": spec.task, "reader": name, **spec.settings} | {**row, "task": spec.task}
            rows.append(row | {"test" if key == metric else f"test_{key}": value for key, value in tests.items()})
        truncated = {specs[name].task: count for name, count in result.truncated.items()}
        rows = sorted_rows(rows)
        table = self._table(rows, specs)
        report = pivot(self.recipe, table, result.history, list(specs))
        more: dict[str, Any] = {"steps": result.steps, "seconds": result.seconds, "truncated": truncated, "bank": bank}
        return Run(table, rows, result.importances, result.history, report, **more)

    def _table(self, rows: list[dict[str, Any]], specs: dict[str, RunSpec]) -> list[dict[str, Any]]:
        return summaries(rows, specs, {name: copies[0].metrics for name, copies in self.tasks.items()})

    def separate(self, specs: dict[str, RunSpec]) -> Separate | None:
        """Return the folder of runs that are trained separately; None without an output folder."""
        return None if self.folder is None else Separate(self.recipe, self.folder, specs, self.tasks)

    def apart(self, specs: dict[str, RunSpec], given: bytes | None, **how: Any) -> Run:
        """Train each as a cell of its own; with an output folder, what was ended goes on where it was.

        Cells for workers are made of what is `given` to open a session from.
        """
        own = self.separate(specs)
        work = partial(self.alone, specs, own) if given is None else partial(_in_worker, given)
        cells = [Cell({"run": name}, partial(work, name), name) for name in specs]
        done, on_end = ({}, lambda _cell, _state: None) if own is None else (own.begin(cells), own.end)
        states, failures = run_cells(cells, op="recipe", done=done, on_end=on_end, **how)
        if own is not None and rank() == 0:
            note_failures(own.folder, failures)
        if not states:
            what = f"the first, {failures[0].key['run']}: {failures[0].error}"
            raise ConfigError(f"recipe: none of {len(failures)} runs came to its end; {what}")
        return self._joined(specs, states, failures)

    def alone(self, specs: dict[str, RunSpec], own: Separate | None, name: str) -> dict[str, Any]:
        """Train one run separately, from its checkpoint if there is one, and return its results as JSON."""
        logger.info("%s, %d of %d", name, 1 + list(specs).index(name), len(specs))
        run = self.train({name: specs[name]}, own=own)
        return {key: getattr(run, key) for key in _OF_EACH}

    def _joined(self, specs: dict[str, RunSpec], states: list[dict[str, Any]], failures: list[Failure]) -> Run:
        """Return the results of separate runs as one; runs that failed are not in the tables."""
        joined = Run(failures=failures)
        for state in states:
            for row in state["rows"]:
                row["importances"] = {int(layer): share for layer, share in row["importances"].items()}
            for key in ("rows", "importances", "history"):
                getattr(joined, key).extend(state[key])
            joined.truncated.update(state["truncated"])
        ended = {row["reader"]: specs[row["reader"]] for row in joined.rows}
        table = self._table(joined.rows, ended)
        sums = {key: sum(state[key] for state in states) for key in ("steps", "seconds")}
        return replace(joined, table=table, report=pivot(self.recipe, table, joined.history, list(ended)), **sums)

    def _load(self, specs: dict[str, RunSpec], tasks: dict[str, Task]) -> tuple[ReaderBank | PreTrainedModel, Any]:
        """Return a new bank with the readers, or a new model with its edits, and the processor."""
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
        model, processor = load(recipe.model, base, revision=recipe.revision)
        bank = ReaderBank(model, processor, train_base=recipe.train_base)
        for name, spec in specs.items():
            with error_context(f"reader {name}"):
                bank.add(name, spec.reader)  # pyright: ignore[reportArgumentType]
        return bank, processor


def _in_worker(given: bytes, name: str) -> dict[str, Any]:
    """Train one run in a worker process, which reads the data once for all of its runs."""
    session, specs, own = _opened(given)
    return session.alone(specs, own, name)


@lru_cache(maxsize=1)
def _opened(given: bytes) -> tuple[_Session, dict[str, RunSpec], Separate | None]:
    where, recipe, data, folder, options = pickle.loads(given)
    os.chdir(where)  # what is relative is so there, and a worker belongs to one run
    session = _Session(recipe, load_tasks(recipe, data), folder)
    specs = session.expand({**options, "progress": False})
    return session, specs, session.separate(specs)


_FREE = {"resume", "progress", "tensorboard", "save_steps", "num_workers", "cache_dir"}  # change nothing that is learnt


@dataclass(frozen=True)
class Separate:
    """The folder of a recipe's separate runs, and the scores of those that ended.

    A run has a file in "separate", and beside it, until it has ended, its checkpoints and its model.
    """

    recipe: Recipe
    folder: Path
    specs: Mapping[str, RunSpec]
    tasks: Mapping[str, Sequence[Task]]  # with a copy per repeat
    scores: dict[str, tuple[str, float]] = field(default_factory=dict)  # run -> metric and score

    @property
    def place(self) -> Path:
        """The folder of the files of separate runs."""
        return self.folder / "separate"

    @cached_property
    def _base(self) -> tuple[str, int]:
        """The fingerprint of the model that all runs start from, and its bytes."""
        model, _ = load(self.recipe.model, revision=self.recipe.revision)
        return starting_weights(model, list(model.parameters())), saved_bytes(model)

    @cached_property
    def _shelf(self) -> Shelf:
        return Shelf(self.place, lambda cell: self._identity(cell.name), op="recipe", what="run")

    def begin(self, cells: Iterable[Cell]) -> dict[str, dict[str, Any]]:
        """What the runs gave that ended before and go on; what other runs left behind is cleared.

        Raises:
            ConfigError: If one that goes on was another run.
            StoreError: If its file is damaged, there is no room for the models that are yet to be kept, or something
                else is in the way.
        """
        done = self._shelf.read(cell for cell in cells if self.specs[cell.name].options.get("resume"))
        for name, state in done.items():
            self._note(name, state)
        check_room(self.folder, self._models_left() * self._base[1])
        for name, spec in self.specs.items():
            if name in done or not spec.options.get("resume"):
                self._clear(name)
        return done

    def end(self, cell: Cell, state: dict[str, Any]) -> None:
        """Keep what a run gave; if its model is the best of its task, put it where that is.

        Raises:
            StoreError: If the model is not where its worker wrote it, or the folder cannot be written.
        """
        self._note(cell.name, state)
        if rank() == 0:
            if self.recipe.methods and self.recipe.keep != "none":
                self._keep(cell.name)
            self._shelf.write(cell, state)
        self._clear(cell.name)

    def checkpoints(self, name: str) -> Path:
        """Return the folder of a run's checkpoints."""
        return self.place / f"{name}.checkpoints"

    def _clear(self, name: str) -> None:
        """Remove the checkpoints of a run, and its model unless it is kept."""
        if rank() == 0:
            Checkpoints(self.checkpoints(name), "recipe").clear()
            discard(self._own_model(name))

    def _note(self, name: str, state: Mapping[str, Any]) -> None:
        (row,) = state["rows"]
        self.scores[name] = row["metric"], row["score"]

    def _models_left(self) -> int:
        """How many models are yet to be written, at most, the one that another takes the place of counted too."""
        left = self.specs.keys() - self.scores.keys()
        if not self.recipe.methods or self.recipe.keep == "none" or not left:
            return 0
        if self.recipe.keep == "all":
            return len(left)
        tasks = ({self.specs[name].task for name in names} for names in (left, self.scores))
        return len(set.difference(*tasks)) + 1

    def _is_best(self, name: str, metric: str, score: float) -> bool:
        """Whether no run of its task that ended has a better score; of equals the first in the recipe is the best."""
        own = sort_key(metric, score), self._order[name]
        others = [other for other in self.scores if other != name and self.specs[other].task == self.specs[name].task]
        return all(own < (sort_key(*self.scores[other]), self._order[other]) for other in others)

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.specs)}

    def _own_model(self, name: str) -> Path:
        return self.place / f"{name}.model"

    def _model(self, name: str) -> Path:
        """Return the folder that a run writes its model to."""
        return self.folder / "models" / name if self.recipe.keep == "all" else self._own_model(name)

    def offer(self, name: str, model: PreTrainedModel, processor: Any, row: Mapping[str, Any]) -> None:
        """Write the model of a run that ended, if it may be kept for all that is known here."""
        keep = self.recipe.keep
        if rank() == 0 and keep != "none" and (keep == "all" or self._is_best(name, row["metric"], row["score"])):
            save(model, self._model(name), processor)

    def _keep(self, name: str) -> None:
        wanted, place = self.recipe.keep == "all" or self._is_best(name, *self.scores[name]), self._model(name)
        if wanted and not is_dir(place):
            hint = "Give an output folder that all workers share, or `keep: none`."
            raise StoreError(f"recipe: the model of {name} is not in {place}, where its worker wrote it. {hint}")
        if wanted and self.recipe.keep == "best":
            move(place, self.folder / "models" / slug(self.specs[name].task))

    def _identity(self, name: str) -> dict[str, Any]:
        """What decides what a run learns, JSON-ready; see `lamina.train.identity`."""
        recipe, spec = self.recipe, self.specs[name]
        task = self.tasks[spec.task][spec.repeat]
        facts = {"model": recipe.model, "revision": recipe.revision, "train_base": recipe.train_base, **spec.settings}
        facts |= {"edits": list(spec.edits), "metric": task.metric, "labels": list(task.labels)}
        facts |= {key: getattr(task, key) for key in ("by_row", "label_all_tokens", "image_size")}
        facts |= FitOptions.of(spec.options).model_dump(exclude=_FREE)
        settings = {"": facts | ({} if spec.reader is None else reader_settings(spec.reader))}
        digests: dict[str, Any] = {"": {"weights of the model": self._base[0]}}
        for part, split in task.splits.items():
            settings[where := f"in the {part} part of '{spec.task}'"] = {"rows": len(split)}
            digests[where] = data_digests(split)
        return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))
