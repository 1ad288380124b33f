"""From a recipe to its tasks and to every reader that it trains."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import yaml

from lamina.bank import Reader
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.recipes.schema import Recipe, build, slug
from lamina.tasks.kinds import MASKED, one_class
from lamina.tasks.presets import find_preset
from lamina.tasks.split import held_out
from lamina.tasks.task import Task
from lamina.train.grid import Member, expand, keys_of, swept
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lamina.recipes.schema import ReaderRecipe, TaskRecipe


@runtime_checkable
class About(Protocol):
    """What a reader must know of its task."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def problem(self) -> str: ...  # noqa: D102
    @property
    def labels(self) -> tuple[str, ...]: ...  # noqa: D102


class Planned(NamedTuple):
    """One reader of a recipe.

    Attributes:
        member: The reader, its epochs and its learning rate; its settings begin with "method" and end with "seed"
            and, with trials, "draw", the seed of the rows that were drawn.
        task: Name of its task.
        trial: Which draw of the rows it learns from, from 0.
    """

    member: Member
    task: str
    trial: int

    @property
    def settings(self) -> dict[str, Any]:
        """The member's."""
        return self.member.settings


def load_task(name: str, recipe: TaskRecipe, data: str | Path | None) -> Task:
    """Read the data of one task of a recipe, without its draws."""
    limits: dict[str, Any] = {"limit": recipe.limit}
    if recipe.limit_validation is not None:
        limits["limit_validation"] = recipe.limit_validation
    if recipe.preset is not None:
        short = find_preset(recipe.preset)[0]
        task = Task.preset(recipe.preset, files=None if data is None else Path(data) / short, **limits)
    else:
        task = _from_files(name, recipe, data, limits)
    if recipe.masked_lm:
        task = task.masked_lm()
    if recipe.hold_out:
        task = _held_out(task)
    return task if recipe.metric is None else _by_metric(task, recipe.metric)


def _from_files(name: str, recipe: TaskRecipe, data: str | Path | None, limits: Mapping[str, Any]) -> Task:
    root = Path(data or ".")
    files: dict[str, Any] = {
        part: root / path if isinstance(path, str) else tuple(root / one for one in path)
        for part, path in (recipe.files or {}).items()
    }
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
        problem=recipe.problem,
        name=name,
        **limits,
    )


def _held_out(task: Task) -> Task:
    """Validate on a tenth of the training rows, and test on what was published for one or the other."""
    stratify = one_class(task.kind, task.problem)
    train, validation = held_out(task.split("train"), stratify=stratify, seed=0, last=task.kind == MASKED)
    test = task.splits.get("test", task.split("validation"))
    return replace(task, splits={"train": train, "validation": validation, "test": test})


def _by_metric(task: Task, metric: str) -> Task:
    if metric not in task.metrics:
        raise UnknownNameError(op=f"task {task.name}", got=metric, known=task.metrics, what="metric")
    return replace(task, metric=metric)


def trials(recipe: TaskRecipe, task: Task) -> list[Task]:
    """The task itself, or a copy per trial with the rows that it drew; trial t draws with the seed t."""
    draw = recipe.draw
    if draw is None:
        return [task]
    return [task.draw(**draw.size(), stratified=draw.stratified, seed=seed) for seed in range(draw.trials)]


def plan(recipe: Recipe, abouts: Mapping[str, About], options: Mapping[str, Any]) -> dict[str, Planned]:
    """Every reader of a recipe: each method, setting, seed and trial.

    Args:
        recipe: The recipe.
        abouts: Its tasks, or what stands for them.
        options: Of `fit`, for the epochs and the learning rate of those that have none of their own.

    Returns:
        Name -> reader, "<task>-<method>-<seed>", with the number of the setting and of the trial where there are
        several.

    Raises:
        UnknownNameError: If a fusion, or a key of a fusion, head or grid does not exist.
        ConfigError: If a value cannot be, or two methods have one name.
    """
    found: dict[str, Planned] = {}
    for name, task in recipe.tasks.items():
        for method, reader in task.readers.items():
            where = f"tasks.{name}.readers.{method}"
            template = template_of(reader, abouts[name], where)
            for one in _settled(
                expand(template, reader.grid, name=f"{slug(name)}-{slug(method)}"), task, reader, options
            ):
                for made in _repeated(recipe, name, method, one, single=not reader.grid):
                    if made.member.name in found:
                        raise ConfigError(
                            f"recipe, {where}: '{made.member.name}' is the name of another reader too; names are made "
                            "of the task's and the method's letters and digits. Rename one of them."
                        )
                    found[made.member.name] = made
    return found


def template_of(recipe: ReaderRecipe, about: About, where: str) -> Reader:
    """The reader of a recipe, before its grid.

    Args:
        recipe: The reader's part of the recipe.
        about: Its task.
        where: The place in the recipe, named in errors.
    """
    known = [field.name for field in fields(HEADS.get(about.kind)) if field.init]
    offered = {"labels": about.labels, "problem_type": about.problem}
    given = {key: value for key, value in offered.items() if key in known and value is not None}
    fusion = build(FUSIONS, recipe.fusion, f"{where}.fusion")
    return Reader(fusion, build(HEADS, {"name": about.kind, **given, **recipe.head}, f"{where}.head"), recipe.stack)


def _settled(
    members: Sequence[Member], task: TaskRecipe, reader: ReaderRecipe, options: Mapping[str, Any]
) -> Iterator[Member]:
    """Members with epochs and learning rate: their own, else the reader's, the task's, the run's."""
    epochs = task.epochs or options.get("epochs", FitOptions.epochs)
    rate = reader.learning_rate or task.learning_rate or options.get("learning_rate", FitOptions.learning_rate)
    for one in members:
        yield replace(
            one,
            epochs=epochs if one.epochs is None else one.epochs,
            learning_rate=rate if one.learning_rate is None else one.learning_rate,
        )


def _repeated(recipe: Recipe, task: str, method: str, member: Member, *, single: bool) -> Iterator[Planned]:
    """A member once per seed and trial; every trial's readers start differently too."""
    draw = recipe.tasks[task].draw
    count = 1 if draw is None else draw.trials
    for seed in [member.reader.seed] if "seed" in member.settings else recipe.seeds:
        for trial in range(count):
            name = f"{member.name.rpartition('_')[0] if single else member.name}-{seed}"
            own = seed * count + trial
            settings = {"method": method, **member.settings, "seed": own}
            if draw is not None:
                name, settings["draw"] = f"{name}-{trial}", trial
            reader = replace(member.reader, seed=own)
            yield Planned(replace(member, name=name, reader=reader, settings=settings, template=task), task, trial)


def with_sweep(recipe: Recipe, sweeps: Mapping[str, Sequence[Any]]) -> Recipe:
    """Add a grid to every reader that has its keys.

    Args:
        recipe: The recipe.
        sweeps: Key, in full or short, to its values; they take the place of those that a reader's grid has.

    Raises:
        UnknownNameError: If no reader has a key.
        ConfigError: If a short key may mean either of two.
    """
    known: dict[str, None] = {}
    used: set[str] = set()
    tasks = {}
    for name, task in recipe.tasks.items():
        readers = {}
        for method, reader in task.readers.items():
            keys = _grid_keys(reader, task)
            known |= dict.fromkeys(keys)
            grid, fitted = swept(reader.grid, keys, sweeps)
            used |= fitted
            readers[method] = reader.model_copy(update={"grid": grid})
        tasks[name] = task.model_copy(update={"readers": readers})
    for key in sweeps:
        if key not in used:
            raise UnknownNameError(op="sweep", got=key, known=known, what="key")
    return recipe.model_copy(update={"tasks": tasks})


def _grid_keys(reader: ReaderRecipe, task: TaskRecipe) -> list[str]:
    kind = task.kind if task.preset is None else find_preset(task.preset)[1].kind
    return keys_of(FUSIONS.get(str(reader.fusion.get("name"))), HEADS.get(kind))


def read_sweeps(given: Sequence[str]) -> dict[str, list[Any]]:
    """Values of `key=value,value` texts: numbers where they are numbers, lists in brackets.

    Raises:
        ConfigError: If a text has another form, or a key comes twice.
    """
    sweeps: dict[str, list[Any]] = {}
    for one in given:
        key, _, values = one.partition("=")
        try:
            listed = [_number(value) for value in yaml.safe_load(f"[{values}]")]
        except yaml.YAMLError:
            listed = []
        if not key.strip() or not listed:
            raise ConfigError(f"sweep: '{one}' names no values; the form is key=value,value. Write fusion.dim=32,64.")
        if key.strip() in sweeps:
            raise ConfigError(f"sweep: '{key.strip()}' is there twice; a key has one list. Put all values in one.")
        sweeps[key.strip()] = listed
    return sweeps


def _number(value: Any) -> Any:
    """A number that YAML reads as a text, as it does 1e-3."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
