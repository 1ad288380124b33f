"""Run a recipe: every reader of every task and seed, and a table of what came out."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, LaminaError
from lamina.recipes.members import load_task, plan, trials
from lamina.recipes.methods import load_for, plan_methods
from lamina.recipes.schema import slug
from lamina.store.edited import save
from lamina.store.loading import load
from lamina.tasks.kinds import MASKED, better
from lamina.train import evaluate
from lamina.train.finetune import finetune
from lamina.train.fit import fit
from lamina.train.intervals import Summary, summarise
from lamina.train.tables import IMPORTANCES, sort_key, table, write_parquet
from lamina.utils import rank, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.recipes.members import Planned
    from lamina.recipes.methods import Variant
    from lamina.recipes.schema import Recipe
    from lamina.tasks.task import Task

    One = Planned | Variant

logger = logging.getLogger(__name__)

_FREE = ("resume", "progress", "tensorboard")  # options that change nothing of what is learnt


@dataclass(frozen=True)
class Run:
    """What a recipe gave.

    Attributes:
        table: One row per task, method and setting: mean and spread (sample standard deviation) of the best validation
            scores over seeds and trials, half the width of their 95 % t interval, every run, number of parameters,
            mean best epoch; "test" in short, if the recipe asks for it. Settings of a grid are sorted, best first.
        rows: One row per reader; see `lamina.train.tables.table`.
        importances: One row per reader, epoch and layer.
        steps: Training steps.
        seconds: Wall-clock time.
        truncated: Task -> how many training texts lost their end.
        bank: Every reader, at its best epoch; None if they were trained separately.
    """

    table: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    importances: list[dict[str, Any]]
    steps: int
    seconds: float
    truncated: dict[str, int]
    bank: ReaderBank | None = None


def run_recipe(
    recipe: Recipe, *, data: str | Path | None = None, output: str | Path | None = None, **options: Any
) -> Run:
    """Train what a recipe says.

    Args:
        recipe: From `load_recipe`.
        data: Folder with one subfolder per preset, or (for `files`) the folder they are relative to; None: presets
            come from the hub.
        output: Folder for the bank, checkpoints, `table.json` and `table.md` (a row per method), `table.parquet` (a
            row per reader) and `importances.parquet` (their history). Readers trained separately leave no bank; of a
            recipe with methods the best model of each task is saved in `models`, see `Recipe.keep`.
        **options: Override the recipe's `fit` options, e.g. resume or progress.

    Raises:
        LaminaError: If the recipe does not fit the model or the data.
    """
    fit_options = {**recipe.fit, **options}
    tasks = {name: load_task(name, task, data) for name, task in recipe.tasks.items()}
    _check_test(recipe, tasks)
    drawn = {name: trials(recipe.tasks[name], task) for name, task in tasks.items()}
    folder = None if output is None else Path(output)
    if recipe.methods:
        variants = plan_methods(recipe, fit_options)
        run = _one_by_one(_Tuning(recipe, _drawn(variants, drawn), fit_options), variants, folder)
    else:
        planned = plan(recipe, tasks, fit_options)
        job = _Job(recipe, _drawn(planned, drawn), fit_options)
        run = _one_by_one(job, planned, folder) if recipe.separately else job.run(planned, folder)
    if folder is not None and rank() == 0:
        write_text(folder / "table.json", json.dumps(run.table, indent=1))
        write_text(folder / "table.md", markdown(run.table))
        write_parquet(run.rows, folder / "table.parquet")
        write_parquet(run.importances, folder / "importances.parquet", IMPORTANCES)
    return run


def _drawn(planned: Mapping[str, One], drawn: Mapping[str, list[Task]]) -> dict[str, Task]:
    """The task of each reader or variant, with the rows that it learns from."""
    return {name: drawn[one.task][one.trial] for name, one in planned.items()}


def _check_test(recipe: Recipe, tasks: Mapping[str, Task]) -> None:
    for name, task in tasks.items():
        if recipe.evaluate is not None and recipe.evaluate not in task.splits:
            raise ConfigError(
                f"recipe: evaluate is {recipe.evaluate}, but task '{name}' has only {', '.join(task.splits)}. "
                "Give it a test part, set hold_out, or leave evaluate out."
            )


@dataclass(frozen=True)
class _Job:
    """What all readers of a run have in common, and the task of each."""

    recipe: Recipe
    tasks: dict[str, Task]
    options: dict[str, Any]

    def facts(self, one: Planned) -> dict[str, Any]:
        """What decides what a reader of its own run learns, JSON-ready."""
        settings = {key: value for key, value in self.options.items() if key not in (*_FREE, "epochs", "learning_rate")}
        found = {"model": self.recipe.model, **one.member.settings, "reader": repr(one.member.reader), **settings}
        found |= {"epochs": one.member.epochs, "learning_rate": one.member.learning_rate}
        return json.loads(json.dumps(found, default=str))

    def one(self, name: str, planned: Planned, _output: Path | None, _before: list[dict[str, Any]]) -> Run:
        """Train one reader by itself; its run resumes as a whole or not at all."""
        return replace(self, options={**self.options, "resume": False}).run({name: planned}, None)

    def run(self, planned: Mapping[str, Planned], output: Path | None) -> Run:
        """Train some of the readers in one pass, on a fresh model."""
        masked = any(self.tasks[name].kind == MASKED for name in planned)
        head = "AutoModelForMaskedLM" if masked else "AutoModel"
        model, processor = load(self.recipe.model, head, revision=self.recipe.revision)
        bank = ReaderBank(model, processor, train_base=self.recipe.train_base)
        for name, one in planned.items():
            try:
                bank.add(name, one.member.reader)
            except LaminaError as error:
                error.add_note(f"reader {name}")
                raise
        tasks = {name: self.tasks[name] for name in planned}
        own = {
            "epochs": {name: one.member.epochs for name, one in planned.items()},
            "learning_rate": {name: one.member.learning_rate for name, one in planned.items()},
        }
        result = fit(bank, tasks, output=output, **{**self.options, **own})
        rows = table({name: one.member for name, one in planned.items()}, result, tasks, bank)
        if self.recipe.evaluate is not None:
            scores = evaluate(bank, tasks, split=self.recipe.evaluate)
            for row in rows:
                row["test"] = scores[row["reader"]][row["metric"]]
        cut = {planned[name].task: count for name, count in result.truncated.items()}
        return Run(summaries(rows, planned), rows, result.importances, result.steps, result.seconds, cut, bank)


@dataclass(frozen=True)
class _Tuning:
    """What all fine-tuning runs of a recipe have in common, and the task of each."""

    recipe: Recipe
    tasks: dict[str, Task]
    options: dict[str, Any]

    def facts(self, variant: Variant) -> dict[str, Any]:
        """What decides what a variant learns, JSON-ready."""
        settings = {key: value for key, value in variant.options.items() if key not in _FREE}
        rows = {part: len(split) for part, split in self.tasks[variant.name].splits.items()}
        found = {"model": self.recipe.model, "revision": self.recipe.revision, "rows": rows, **variant.settings}
        found |= {"edits": list(variant.edits), **settings}
        return json.loads(json.dumps(found, default=str))

    def one(self, name: str, variant: Variant, output: Path | None, before: list[dict[str, Any]]) -> Run:
        """Fine-tune a fresh model, and save it if it is to be kept.

        Args:
            name: Of the run.
            variant: What is done.
            output: Folder whose "models" the model goes to.
            before: Rows of the runs that came before.
        """
        task = self.tasks[name]
        model, processor = load_for(self.recipe, variant, kind=task.kind, labels=task.labels)
        options = {**variant.options, "resume": False, "test": self.recipe.evaluate is not None}
        result = finetune(model, task, processor=processor, **options)
        (row,) = result.table
        row = {**row, "task": variant.task, "reader": name, **variant.settings, "importances": {}}
        if result.test:
            row["test"] = result.test[task.name][task.metric]
        if output is not None and rank() == 0 and (folder := self._folder(row, before)) is not None:
            save(model, output / "models" / folder, processor)
        cut = {variant.task: sum(result.truncated.values())}
        return Run(summaries([row], {name: variant}), [row], [], result.steps, result.seconds, cut)

    def _folder(self, row: dict[str, Any], before: list[dict[str, Any]]) -> str | None:
        """Where a model is kept; None if it is not."""
        if self.recipe.keep != "best":
            return row["reader"] if self.recipe.keep == "all" else None
        others = [one["score"] for one in before if one["task"] == row["task"]]
        best = all(better(row["metric"], row["score"], other) for other in others)
        return slug(row["task"]) if best else None


def _one_by_one(job: _Job | _Tuning, planned: Mapping[str, Any], output: Path | None) -> Run:
    """Train one by one; with an output folder, a run that was ended goes on with the next."""
    found: list[dict[str, Any]] = []
    for number, (name, one) in enumerate(planned.items(), start=1):
        done = None if output is None else output / "separate" / f"{name}.json"
        if job.options.get("resume") and done is not None and done.is_file():
            found.append(_read(done, job.facts(one)))
            continue
        logger.info("%s, %d of %d", name, number, len(planned))
        run = job.one(name, one, output, [row for each in found for row in each["rows"]])
        kept = {key: getattr(run, key) for key in ("rows", "importances", "steps", "seconds", "truncated")}
        found.append(kept)
        if done is not None and rank() == 0:
            done.parent.mkdir(parents=True, exist_ok=True)
            write_text(done, json.dumps({"run": job.facts(one), **kept}))
    rows = [row for one in found for row in one["rows"]]
    importances = [row for one in found for row in one["importances"]]
    cut = {task: count for one in found for task, count in one["truncated"].items()}
    steps, seconds = sum(one["steps"] for one in found), sum(one["seconds"] for one in found)
    return Run(summaries(rows, planned), rows, importances, steps, seconds, cut)


def _read(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a reader that was trained before gave.

    Raises:
        ConfigError: If it was trained in another way.
    """
    kept = json.loads(path.read_text(encoding="utf-8"))
    before = kept.pop("run")
    for key, now in facts.items():
        if before.get(key) != now:
            raise ConfigError(
                f"recipe: {path} is of a run whose {key} is {before.get(key)}, here {now}; a run goes on as it began. "
                "Give another output folder, or leave resume out."
            )
    for row in kept["rows"]:
        row["importances"] = {int(layer): share for layer, share in row["importances"].items()}
    return kept


def summaries(rows: list[dict[str, Any]], planned: Mapping[str, One]) -> list[dict[str, Any]]:
    """One row per task, method and setting, in the recipe's order; settings of a grid best first.

    Args:
        rows: One per reader or variant.
        planned: The same readers or variants.
    """
    by_reader = {row["reader"]: row for row in rows}
    groups: dict[str, list[dict[str, Any]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name, one in planned.items():
        grid = {key: value for key, value in one.settings.items() if key not in ("method", "seed", "draw")}
        key = json.dumps([one.task, one.settings["method"], grid])
        groups.setdefault(key, []).append(by_reader[name])
        settings[key] = grid
    found = [_summary(group, settings[key]) for key, group in groups.items()]
    if any(row["settings"] for row in found):
        order = list(dict.fromkeys(row["task"] for row in found))
        found.sort(key=lambda row: (order.index(row["task"]), sort_key(row["metric"], row["mean"])))
    return found


def _summary(rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    first = rows[0]
    score = summarise([row["score"] for row in rows])
    keys = ("reader", "seed", "draw", "score", "test", "best_epoch")
    summary = {
        **{key: first[key] for key in ("task", "method", "metric", "parameters")},
        "settings": settings,
        **_figures(score),
        "runs": [{key: row[key] for key in keys if key in row} for row in rows],
        "best_epoch": fmean(row["best_epoch"] for row in rows),
    }
    if "test" in first:
        summary["test"] = _figures(summarise([row["test"] for row in rows]))
    return summary


def _figures(summary: Summary) -> dict[str, Any]:
    return {"mean": summary.mean, "spread": summary.spread, "interval": summary.interval}


def columns_of(table: list[dict[str, Any]]) -> list[str]:
    """Columns that every printed form of a table has: those of settings and test scores only where there are any."""
    extra = [key for row in table for key in row["settings"]]
    tested = ["test"] if any("test" in row for row in table) else []
    return ["task", "method", *dict.fromkeys(extra), "metric", "mean", "spread", *tested, "runs", "parameters"]


def cell(row: dict[str, Any], column: str) -> str:
    """One cell of a printed table; means with half the width of their 95 % interval."""
    if column in row["settings"]:
        return str(row["settings"][column])
    if column == "mean":
        return plus_minus(row)
    if column == "test":
        return plus_minus(row["test"]) if "test" in row else ""
    if column == "spread":
        return f"{row['spread']:.3f}"
    if column == "runs":
        return str(len(row["runs"]))
    value = row.get(column, "")
    return f"{value:,}" if isinstance(value, int) else str(value)


def plus_minus(figures: Mapping[str, Any]) -> str:
    """A mean with half the width of its interval, where there is one."""
    if figures["interval"] is None:
        return f"{figures['mean']:.3f}"
    return f"{figures['mean']:.3f} ± {figures['interval']:.3f}"


def markdown(table: list[dict[str, Any]]) -> str:
    """The table as Markdown; means with half the width of their 95 % interval."""
    columns = columns_of(table)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row, column) for column in columns) + " |" for row in table]
    return "\n".join(lines) + "\n"
