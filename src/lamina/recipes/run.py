"""Run a recipe: every reader or method of every task and seed, and a table of what came out."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging as bars

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, foreign_errors, noted
from lamina.recipes.edits import apply_edits
from lamina.recipes.expand import expand_recipe
from lamina.recipes.loading import load_tasks
from lamina.recipes.schema import slug
from lamina.recipes.summary import markdown, summaries
from lamina.store import load, save
from lamina.store.files import damaged
from lamina.tasks import kind_of
from lamina.tasks.metrics import better
from lamina.train.options import FitOptions
from lamina.train.results import IMPORTANCES, sorted_rows, write_parquet
from lamina.train.run import RATES, train
from lamina.utils import derive_seed, rank, write_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from lamina.recipes.schema import Recipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec
    from lamina.train.plan import Encodings

logger = logging.getLogger(__name__)

SAVE_STEPS = 1000  # between checkpoints, where a recipe does not say
_RESULTS = {"rows": list, "importances": list, "steps": int, "seconds": float, "truncated": dict}  # of one run
_FREE = {"resume", "progress", "tensorboard", "save_steps", "num_workers", "cache_dir"}  # change nothing that is learnt


@dataclass(frozen=True)
class Run:
    """What a recipe gave.

    Rows have their settings, every validation score at the best epoch, and with `evaluate: test` every test score
    ("test" by the task's metric, "test_f1" and so on).
    """

    table: list[dict[str, Any]] = field(default_factory=list)  # one row per task, method and setting; see `summaries`
    rows: list[dict[str, Any]] = field(default_factory=list)  # one per reader or fine-tuned model
    importances: list[dict[str, Any]] = field(default_factory=list)  # one row per reader, epoch and layer
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
    tasks = load_tasks(recipe, data)
    specs = expand_recipe(recipe, options, {name: copies[0] for name, copies in tasks.items()})
    session = _Session(recipe, tasks, folder)
    alone = recipe.separately or recipe.methods  # each run has a fresh model
    run = session.one_by_one(specs) if alone else session.train(specs, output=folder)
    run.table.extend(summaries(run.rows, specs, {name: copies[0].metrics for name, copies in tasks.items()}))
    if folder is not None and rank() == 0:
        write_text(folder / "table.json", json.dumps(run.table, indent=1))
        write_text(folder / "table.md", markdown(run.table))
        write_parquet(run.rows, folder / "table.parquet")
        write_parquet(run.importances, folder / "importances.parquet", IMPORTANCES)
    return run


@dataclass(frozen=True)
class _Session:
    """What all runs of a recipe share: their data, read and encoded once, their folder, and rows of the runs before."""

    recipe: Recipe
    tasks: dict[str, list[Task]]
    folder: Path | None
    encodings: Encodings = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)

    def train(self, specs: dict[str, RunSpec], *, output: Path | None = None, checkpoints: Path | None = None) -> Run:
        """Train some readers in one pass, or one model, on a fresh base; `output` gets everything."""
        tasks = {name: self.tasks[spec.task][spec.repeat] for name, spec in specs.items()}
        options = {name: FitOptions.of(spec.options) for name, spec in specs.items()}
        target, processor = self._load(specs, tasks)
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
        places: dict[str, Any] = {"output": output, "checkpoints": checkpoints}
        result = train(target, tasks, shared, processor=processor, encodings=self.encodings, **places)
        rows = []
        for row in result.table:
            name, metric = row["reader"], row["metric"]
            spec, tests = specs[name], result.test.get(name, {})
            row = {"task": spec.task, "reader": name, **spec.settings} | {**row, "task": spec.task}
            rows.append(row | {"test" if key == metric else f"test_{key}": value for key, value in tests.items()})
        truncated = {specs[name].task: count for name, count in result.truncated.items()}
        bank = target if isinstance(target, ReaderBank) else None
        if not isinstance(target, ReaderBank):
            self._keep(target, processor, rows[0])
        return Run([], sorted_rows(rows), result.importances, result.steps, result.seconds, truncated, bank)

    def one_by_one(self, specs: dict[str, RunSpec]) -> Run:
        """Train each by itself; with an output folder, what was ended goes on where it was."""
        joined = Run(rows=self.done)
        for number, (name, spec) in enumerate(specs.items(), start=1):
            place = None if self.folder is None else self.folder / "separate" / f"{name}.json"
            checkpoints = None if place is None else place.with_suffix(".checkpoints")
            if spec.options.get("resume") and place is not None and place.is_file():
                own = _read(place, self._facts(spec))
            else:
                logger.info("%s, %d of %d", name, number, len(specs))
                run = self.train({name: spec}, checkpoints=checkpoints)
                own = {key: getattr(run, key) for key in _RESULTS}
                if place is not None and rank() == 0:
                    write_text(place, json.dumps({"run": self._facts(spec), **own}))
            if checkpoints is not None and rank() == 0:
                shutil.rmtree(checkpoints, ignore_errors=True)
            joined.rows.extend(own["rows"])
            joined.importances.extend(own["importances"])
            joined.truncated.update(own["truncated"])
            joined = replace(joined, steps=joined.steps + own["steps"], seconds=joined.seconds + own["seconds"])
        return joined

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

    def _facts(self, spec: RunSpec) -> dict[str, Any]:
        """What decides what a run learns, JSON-ready."""
        recipe, task = self.recipe, self.tasks[spec.task][spec.repeat]
        facts = {"model": recipe.model, "revision": recipe.revision, "train_base": recipe.train_base, **spec.settings}
        facts |= {"reader": repr(spec.reader), "edits": list(spec.edits), "metric": task.metric}
        facts |= {"rows": {part: len(split) for part, split in task.splits.items()}}
        return json.loads(json.dumps(facts | FitOptions.of(spec.options).model_dump(exclude=_FREE), default=str))


def _read(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a run that ended before gave; a ConfigError if it was another run."""
    with foreign_errors(lambda reason: damaged(path, f"cannot be read ({reason})")):
        done = json.loads(path.read_text(encoding="utf-8"))
        before = dict(done.pop("run"))
        done = {key: _RESULTS[key](done[key]) for key in _RESULTS}
        for row in done["rows"]:
            row["importances"] = {int(layer): float(share) for layer, share in row["importances"].items()}
    for key, now in facts.items():
        if before.get(key) != now:
            raise ConfigError(
                f"recipe: {path} is of a run whose {key} is {before.get(key)}, here {now}; a run goes on as it began. "
                "Give another output folder, or leave resume out."
            )
    return done
