"""Run a recipe: every reader of every task and seed in one training run, and a table of what came out."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.bank import Reader, ReaderBank
from lamina.data.task import Task
from lamina.errors import ConfigError
from lamina.files import write_text
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.recipe import build, slug
from lamina.store import load_model
from lamina.train.fit import FitResult, fit

if TYPE_CHECKING:
    from lamina.recipe import ReaderRecipe, Recipe, TaskRecipe


@dataclass(frozen=True)
class Run:
    """What a recipe gave.

    Attributes:
        table: One row per task and method: metric, mean, spread (sample standard deviation; 0 with one seed), the
            value of every seed, number of parameters, and the mean best epoch.
        result: Of the training run.
        bank: Every reader, at its best epoch.
    """

    table: list[dict[str, Any]]
    result: FitResult
    bank: ReaderBank


def run_recipe(
    recipe: Recipe, *, data: str | Path | None = None, output: str | Path | None = None, **options: Any
) -> Run:
    """Train what a recipe says.

    Args:
        recipe: From `load_recipe`.
        data: Folder with one subfolder per preset, or (for `files`) the folder they are relative to; None: presets
            come from the hub.
        output: Folder for the bank, `table.json`, `table.md` and checkpoints.
        **options: Override the recipe's `fit` options, e.g. resume or progress.

    Raises:
        LaminaError: If the recipe does not fit the model or the data.
    """
    fit_options = {**recipe.fit, **options}
    tasks = {name: load_task(name, task, data) for name, task in recipe.tasks.items()}
    model, processor = load_model(recipe.model, revision=recipe.revision)
    bank = ReaderBank(model, processor)
    members: dict[str, tuple[str, str, int]] = {}
    for name, task in recipe.tasks.items():
        for method, reader in task.readers.items():
            for seed in recipe.seeds:
                member = f"{slug(name)}-{slug(method)}-{seed}"
                bank.add(member, _reader(reader, tasks[name], seed, f"tasks.{name}.readers.{method}"))
                members[member] = (name, method, seed)
    per_reader = _per_reader(recipe, members, fit_options)
    result = fit(bank, {m: tasks[of[0]] for m, of in members.items()}, output=output, **{**fit_options, **per_reader})
    table = _table(members, tasks, result, bank)
    if output is not None:
        write_text(Path(output) / "table.json", json.dumps(table, indent=1))
        write_text(Path(output) / "table.md", markdown(table))
    return Run(table, result, bank)


def load_task(name: str, recipe: TaskRecipe, data: str | Path | None) -> Task:
    """Read the data of one task of a recipe."""
    if recipe.preset is not None:
        short = recipe.preset.removeprefix("glue/")
        files = None if data is None else Path(data) / short
        return Task.preset(recipe.preset, files=files, limit=recipe.limit)
    files = {part: Path(data or ".") / path for part, path in (recipe.files or {}).items()}
    unknown = set(files) - {"train", "validation", "test"}
    if unknown:
        raise ConfigError(f"recipe, tasks.{name}.files: '{unknown.pop()}' is no part. Use train, validation or test.")
    return Task.from_files(
        recipe.kind,
        train=files.get("train"),
        validation=files.get("validation"),
        test=files.get("test"),
        text=recipe.text,
        text_pair=recipe.text_pair,
        label=recipe.label,
        labels=recipe.labels,
        metric=recipe.metric,
        problem=recipe.problem,
        limit=recipe.limit,
        name=name,
    )


def _reader(recipe: ReaderRecipe, task: Task, seed: int, where: str) -> Reader:
    given = {"name": task.kind, "labels": task.labels}
    if task.kind == "sequence_classification":
        given["problem"] = task.problem
    fusion = build(FUSIONS, recipe.fusion, f"{where}.fusion")
    head = build(HEADS, {**given, **recipe.head}, f"{where}.head")
    return Reader(fusion, head, stack=recipe.stack, seed=seed)


def _per_reader(
    recipe: Recipe, members: dict[str, tuple[str, str, int]], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Epochs and learning rate of every reader: its own, else its task's, else the run's."""
    epochs: dict[str, Any] = {}
    rates: dict[str, Any] = {}
    for member, (name, method, _) in members.items():
        task = recipe.tasks[name]
        epochs[member] = task.epochs or options.get("epochs", 3)
        rates[member] = task.readers[method].learning_rate or task.learning_rate or options.get("learning_rate", 1e-3)
    return {"epochs": epochs, "learning_rate": rates}


def _table(
    members: dict[str, tuple[str, str, int]], tasks: dict[str, Task], result: FitResult, bank: ReaderBank
) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for member, (name, method, seed) in members.items():
        metric = tasks[name].metric
        row = rows.setdefault(
            (name, method), {"task": name, "method": method, "metric": metric, "seeds": {}, "epochs": []}
        )
        row["seeds"][seed] = result.best[member][metric]
        row["epochs"].append(result.best[member]["epoch"])
        row["parameters"] = bank[member].size()
    table = []
    for row in rows.values():
        values = list(row["seeds"].values())
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        best_epoch = statistics.mean(row.pop("epochs"))
        table.append({**row, "mean": statistics.mean(values), "spread": spread, "best_epoch": best_epoch})
    return table


def markdown(table: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = ["| task | method | metric | mean | spread | seeds | parameters |", "|---|---|---|---|---|---|---|"]
    for row in table:
        lines.append(
            f"| {row['task']} | {row['method']} | {row['metric']} | {row['mean']:.3f} | {row['spread']:.3f} "
            f"| {len(row['seeds'])} | {row['parameters']:,} |"
        )
    return "\n".join(lines) + "\n"
