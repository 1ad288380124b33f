"""Run a recipe: every reader or method of every task and seed, and a table of what came out."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as bars

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, StoreError, noted
from lamina.recipes.edits import apply_edits
from lamina.recipes.expand import expand_recipe
from lamina.recipes.loading import load_tasks
from lamina.recipes.pivot import pivot
from lamina.recipes.report_file import REPORT, Report, read_report_file, write_report_file
from lamina.recipes.schema import slug
from lamina.recipes.summary import markdown, summaries
from lamina.store import load, save
from lamina.store.bank import saved_bytes
from lamina.store.files import check_room, claimed, staged
from lamina.tasks import kind_of
from lamina.tasks.metrics import better
from lamina.train.checkpoint import Checkpoints
from lamina.train.identity import data_digests, difference, reader_settings, starting_weights
from lamina.train.options import FitOptions
from lamina.train.results import IMPORTANCES, sorted_rows, write_parquet
from lamina.train.run import RATES, Tables, train
from lamina.train.sealed import seal, unseal
from lamina.utils import derive_seed, rank, sweep, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from lamina.recipes.schema import Recipe
    from lamina.store.files import Files
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec
    from lamina.train.plan import Encodings
    from lamina.train.results import FitResult

logger = logging.getLogger(__name__)

SAVE_STEPS = 1000  # between checkpoints, where a recipe does not say
TABLES = ("table.json", "table.md", "table.parquet", "importances.parquet", REPORT)
_OF_EACH = ("rows", "importances", "history", "steps", "seconds", "truncated")  # noted of a run that ended
_FREE = {"resume", "progress", "tensorboard", "save_steps", "num_workers", "cache_dir"}  # change nothing that is learnt


@dataclass(frozen=True)
class Run:
    """What a recipe gave.

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
    bank: ReaderBank | None = None  # every reader, at its best epoch; None if each was trained separately


def run_recipe(
    recipe: Recipe, *, data: str | Path | None = None, output: str | Path | None = None, **options: Any
) -> Run:
    """Train what a recipe says.

    Args:
        recipe: From `load_recipe`.
        data: Folder with one subfolder per preset, or (for `files`) the folder they are relative to; None: presets
            come from the hub.
        output: Folder for the bank (none of readers trained separately), fine-tuned models (in `models`), checkpoints
            and tables: a row per method, per reader, and per epoch and layer.
        **options: Override the recipe's `fit` options. With resume, runs that ended are not repeated, and the one that
            was killed goes on from its checkpoint.
    """
    with _bars_of_others(show={"progress": True, **recipe.fit, **options}["progress"]):
        return _run(recipe, data, None if output is None else Path(output), options)


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


def _run(recipe: Recipe, data: str | Path | None, folder: Path | None, options: dict[str, Any]) -> Run:
    alone = bool(recipe.separately or recipe.methods)  # each run has a fresh model
    with nullcontext() if folder is None or rank() else claimed(folder, TABLES if alone else ()):
        tasks = load_tasks(recipe, data)
        specs = expand_recipe(recipe, options, {name: copies[0] for name, copies in tasks.items()})
        session = _Session(recipe, tasks, folder)
        if not alone:
            return session.train(specs, output=folder)
        run = session.one_by_one(specs)
        if folder is not None and rank() == 0:
            with staged(folder, TABLES) as stage:
                for name, write in _files(run, folder).items():
                    write(stage / name)
        return run


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
    """What all runs of a recipe share: their data, read and encoded once, their folder, and rows of the runs before."""

    recipe: Recipe
    tasks: dict[str, list[Task]]
    folder: Path | None
    encodings: Encodings = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)

    def train(
        self,
        specs: dict[str, RunSpec],
        *,
        output: Path | None = None,
        checkpoints: Path | None = None,
        kept_models: int = 0,
    ) -> Run:
        """Train some readers in one pass, or one model, on a fresh base; `output` gets everything.

        So many models are yet to be kept, for which there must be room.
        """
        tasks = {name: self.tasks[spec.task][spec.repeat] for name, spec in specs.items()}
        options = {name: FitOptions.of(spec.options) for name, spec in specs.items()}
        target, processor = self._load(specs, tasks)
        if self.folder is not None:
            check_room(self.folder, kept_models * saved_bytes(target))
        changes: dict[str, Any] = {}
        (shared, *_) = options.values()
        if isinstance(target, ReaderBank):
            changes["epochs"] = {name: own.epochs for name, own in options.items()}
            changes["learning_rate"] = {name: own.learning_rate or RATES[True] for name, own in options.items()}
        if output is None and checkpoints is None:
            changes["resume"] = False
        elif shared.save_steps is None:
            changes["save_steps"] = SAVE_STEPS
        shared = shared.model_copy(update=changes)
        bank = target if isinstance(target, ReaderBank) else None
        places: dict[str, Any] = {"output": output, "checkpoints": checkpoints}
        tables = Tables(TABLES, lambda result: _files(self._run(specs, result, bank), self.folder))
        result = train(target, tasks, shared, processor=processor, encodings=self.encodings, tables=tables, **places)
        run = self._run(specs, result, bank)
        if not isinstance(target, ReaderBank):
            self._keep(target, processor, run.rows[0])
        return run

    def _run(self, specs: dict[str, RunSpec], result: FitResult, bank: ReaderBank | None) -> Run:
        """What a training run gave, in the words of the recipe."""
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

    def one_by_one(self, specs: dict[str, RunSpec]) -> Run:
        """Train each by itself; with an output folder, what was ended goes on where it was."""
        joined = Run(rows=self.done)
        for number, (name, spec) in enumerate(specs.items(), start=1):
            place = None if self.folder is None else self.folder / "separate" / f"{name}.json"
            checkpoints = None if place is None else place.with_suffix(".checkpoints")
            if spec.options.get("resume") and place is not None and place.exists():
                own = _read(place, self._identity(spec))
            else:
                logger.info("%s, %d of %d", name, number, len(specs))
                run = self.train({name: spec}, checkpoints=checkpoints, kept_models=self._models_left(specs))
                own = {key: getattr(run, key) for key in _OF_EACH}
                if place is not None and rank() == 0:
                    place.parent.mkdir(parents=True, exist_ok=True)
                    sweep(place)
                    write_text(place, seal(self._identity(spec), own))
            if checkpoints is not None and rank() == 0:
                Checkpoints(checkpoints, "recipe").clear()
            joined.rows.extend(own["rows"])
            joined.importances.extend(own["importances"])
            joined.history.extend(own["history"])
            joined.truncated.update(own["truncated"])
            joined = replace(joined, steps=joined.steps + own["steps"], seconds=joined.seconds + own["seconds"])
        table = self._table(joined.rows, specs)
        return replace(joined, table=table, report=pivot(self.recipe, table, joined.history, list(specs)))

    def _models_left(self, specs: dict[str, RunSpec]) -> int:
        """How many models are yet to be written, at most, the one that another takes the place of counted too."""
        if not self.recipe.methods or self.recipe.keep == "none":
            return 0
        if self.recipe.keep == "all":
            return len(specs) - len(self.done)
        return len({spec.task for spec in specs.values()} - {row["task"] for row in self.done}) + 1

    def _load(self, specs: dict[str, RunSpec], tasks: dict[str, Task]) -> tuple[ReaderBank | PreTrainedModel, Any]:
        """A fresh bank with the readers, or a fresh model, edited; and its processor."""
        (first, *_), recipe = specs.values(), self.recipe
        kinds = {name: kind_of(task.kind) for name, task in tasks.items()}
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
            with noted(f"reader {name}"):
                bank.add(name, spec.reader)  # pyright: ignore[reportArgumentType]
        return bank, processor

    def _keep(self, model: PreTrainedModel, processor: Any, row: dict[str, Any]) -> None:
        """Save a model if it is to be kept."""
        name, keep = slug(row["task"]), self.recipe.keep
        others = [other["score"] for other in self.done if other["task"] == row["task"]]
        best = all(better(row["metric"], row["score"], other) for other in others)
        if self.folder is not None and rank() == 0 and (keep == "all" or (keep == "best" and best)):
            save(model, self.folder / "models" / (name if keep == "best" else row["reader"]), processor)

    @cached_property
    def _weights(self) -> str:
        model, _ = load(self.recipe.model, revision=self.recipe.revision)
        return starting_weights(model, list(model.parameters()))

    def _identity(self, spec: RunSpec) -> dict[str, Any]:
        """What decides what a run learns, JSON-ready; see `lamina.train.identity`."""
        recipe, task = self.recipe, self.tasks[spec.task][spec.repeat]
        facts = {"model": recipe.model, "revision": recipe.revision, "train_base": recipe.train_base, **spec.settings}
        facts |= {"edits": list(spec.edits), "metric": task.metric, "labels": list(task.labels)}
        facts |= {key: getattr(task, key) for key in ("by_row", "label_all_tokens", "image_size")}
        facts |= FitOptions.of(spec.options).model_dump(exclude=_FREE)
        settings = {"": facts | ({} if spec.reader is None else reader_settings(spec.reader))}
        digests: dict[str, Any] = {"": {"weights of the model": self._weights}}
        for part, split in task.splits.items():
            settings[where := f"in the {part} part of '{spec.task}'"] = {"rows": len(split)}
            digests[where] = data_digests(split)
        return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))


def _read(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """What a run that ended before gave: a ConfigError if it was another run, a StoreError if the file is damaged."""
    try:
        before, done = unseal(path)
    except StoreError as error:
        raise StoreError(f"recipe: {path} cannot be used ({error}). Remove it to train that run again.") from error
    if differs := difference(before, run):
        rule = "a run goes on as it began. Give another output folder, or leave resume out"
        raise ConfigError(f"recipe: {path} is of a run with {differs}; {rule}.")
    for row in done["rows"]:
        row["importances"] = {int(layer): share for layer, share in row["importances"].items()}
    return done
