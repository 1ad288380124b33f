"""From a recipe to every single run: each task, reader or method, setting, seed and repeat."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from lamina.bank import Reader
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.recipes.edits import is_left_out, missing_arguments
from lamina.recipes.schema import MethodRecipe, ReaderRecipe, parse_recipe, slug
from lamina.train.grid import expand, full_key, swept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lamina.recipes.schema import Recipe
    from lamina.tasks.base import TaskLike

Edits = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class RunSpec:
    """One thing to train: a reader, or the model itself.

    Attributes:
        name: "<task>-<method>-<seed>", with the numbers of setting and repeat where there are several.
        task: Name of its task.
        repeat: Which subsample of the rows it learns from, from 0.
        settings: "method", the values of the grid, "seed", and with a subsample "repeat".
        options: Of `lamina.fit`, as the closest place in the recipe gives them.
        reader: What is trained; None: the model.
        edits: Name and arguments of what is done to the model beforehand.
    """

    name: str
    task: str
    repeat: int
    settings: dict[str, Any]
    options: dict[str, Any]
    reader: Reader | None = None
    edits: Edits = ()

    @property
    def method(self) -> str:
        """Name of the reader or method in the recipe."""
        return self.settings["method"]

    @property
    def seed(self) -> int:
        """Decides how new parameters start, the edits' random numbers, and dropout."""
        return self.settings["seed"]

    @property
    def grid(self) -> dict[str, Any]:
        """The settings that come from a grid."""
        return {key: value for key, value in self.settings.items() if key not in ("method", "seed", "repeat")}


class _Setting(NamedTuple):
    """One combination of a grid's values, and what it makes of a reader or method."""

    values: dict[str, Any]
    options: dict[str, Any]
    reader: Reader | None = None
    edits: Edits = ()


def expand_recipe(
    recipe: Recipe, options: Mapping[str, Any], tasks: Mapping[str, TaskLike] | None = None
) -> dict[str, RunSpec]:
    """Every single run of a recipe, in its order.

    Args:
        recipe: The recipe.
        options: Of `lamina.fit`, for what tasks, readers and methods do not say themselves.
        tasks: Its tasks by name, whose labels the readers' heads get; None: what the recipe itself tells of them.

    Returns:
        Name -> run.

    Raises:
        UnknownNameError: If a fusion, or a key of a fusion, head or grid, does not exist.
        ConfigError: If a value does not fit, an edit lacks an argument, or two runs have one name.
    """
    found: dict[str, RunSpec] = {}
    for name, task in recipe.tasks.items():
        known = task.outline() if tasks is None else tasks[name]
        own = {key: value for key in ("epochs", "learning_rate") if (value := getattr(task, key)) is not None}
        for method, body in (recipe.methods or task.readers).items():
            where = f"methods.{method}" if recipe.methods else f"tasks.{name}.readers.{method}"
            for spec in _specs(recipe, name, method, _settings(body, known, where)):
                if spec.name in found:
                    raise ConfigError(
                        f"recipe, {where}: '{spec.name}' is the name of another run too; names are made of the task's "
                        "and the method's letters and digits. Rename one of them."
                    )
                seed = {} if spec.reader else {"seed": spec.seed}
                found[spec.name] = replace(spec, options={**options, **own, **spec.options, **seed})
    return found


def _specs(recipe: Recipe, task: str, method: str, settings: Sequence[_Setting]) -> Iterator[RunSpec]:
    """A run per setting, seed and repeat; every repeat has a seed of its own."""
    subsample = recipe.tasks[task].subsample
    count = 1 if subsample is None else subsample.repeats
    for number, setting in enumerate(settings, start=1):
        numbered = f"_{number:04}" if setting.values else ""
        seeds = [setting.values["seed"]] if "seed" in setting.values else recipe.seeds
        for seed, repeat in itertools.product(seeds, range(count)):
            own, name = seed * count + repeat, f"{slug(task)}-{slug(method)}{numbered}-{seed}"
            values = {"method": method, **setting.values, "seed": own}
            if subsample is not None:
                name, values["repeat"] = f"{name}-{repeat}", repeat
            reader = None if setting.reader is None else replace(setting.reader, seed=own)
            yield RunSpec(name, task, repeat, values, setting.options, reader, setting.edits)


def _settings(body: ReaderRecipe | MethodRecipe, task: TaskLike, where: str) -> list[_Setting]:
    """What a grid makes of a reader or method; without one, a single setting."""
    try:
        if isinstance(body, MethodRecipe):
            return _method_settings(body, where)
        own = {} if body.learning_rate is None else {"learning_rate": body.learning_rate}
        members = expand(body.template(task), body.grid, name="setting")
    except LaminaError as error:
        error.add_note(f"recipe, {where}")
        raise
    more = [{"epochs": one.epochs, "learning_rate": one.learning_rate} for one in members]
    return [
        _Setting(one.settings, {**own, **{key: value for key, value in given.items() if value is not None}}, one.reader)
        for one, given in zip(members, more, strict=True)
    ]


def _method_settings(method: MethodRecipe, where: str) -> list[_Setting]:
    keys = method.keys()
    grid = {full_key(key, keys, where): values for key, values in method.grid.items()}
    found = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        options = {key: value for key, value in chosen.items() if "." not in key and key != "seed"}
        edits = []
        for name, given in (pair for edit in method.edits for pair in edit.items()):
            arguments = {
                **given,
                **{key.partition(".")[2]: chosen[key] for key in chosen if key.startswith(f"{name}.")},
            }
            if missing := missing_arguments(name, arguments):
                raise ConfigError(f"recipe, {where}, {name}: no '{missing[0]}' was given; it is required.")
            if not is_left_out(name, arguments):
                edits.append((name, arguments))
        found.append(_Setting(chosen, {**method.fit, **options}, None, tuple(edits)))
    return found


def with_sweep(recipe: Recipe, sweeps: Mapping[str, Sequence[Any]]) -> Recipe:
    """Add a grid to every reader or method that has its keys.

    Args:
        recipe: The recipe.
        sweeps: Key, in full or short, to its values; they take the place of those that a grid has.

    Raises:
        UnknownNameError: If no reader or method has a key.
        ConfigError: If a short key may mean either of two, or a value does not fit.
    """
    given = recipe.model_dump(exclude_unset=True)
    known: dict[str, None] = {}
    used: set[str] = set()

    def sweep(body: ReaderRecipe | MethodRecipe, fields: dict[str, Any], kind: str) -> None:
        keys = body.keys(kind)
        fields["grid"], fitted = swept(body.grid, keys, sweeps)
        known.update(dict.fromkeys(keys))
        used.update(fitted)

    for name, method in recipe.methods.items():
        sweep(method, given["methods"][name], "")
    for name, task in recipe.tasks.items():
        for method, reader in task.readers.items():
            sweep(reader, given["tasks"][name]["readers"][method], task.outline().kind)
    for key in sweeps:
        if key not in used:
            raise UnknownNameError(op="sweep", got=key, known=known, what="key")
    return parse_recipe(given, op="sweep")


def read_sweeps(given: Sequence[str]) -> dict[str, list[Any]]:
    """Values of `key=value,value` texts: numbers where they are numbers, lists in brackets.

    Raises:
        ConfigError: If a text has another form, or a key comes twice.
    """
    sweeps: dict[str, list[Any]] = {}
    for text in given:
        key, _, values = text.partition("=")
        try:
            listed = [_number(value) for value in yaml.safe_load(f"[{values}]")]
        except yaml.YAMLError:
            listed = []
        if not key.strip() or not listed:
            raise ConfigError(f"sweep: '{text}' names no values; the form is key=value,value, as in fusion.dim=32,64.")
        if key.strip() in sweeps:
            raise ConfigError(f"sweep: '{key.strip()}' is there twice; put all its values in one list.")
        sweeps[key.strip()] = listed
    return sweeps


def _number(value: Any) -> Any:
    """A number that YAML reads as a text, as it does 1e-3."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
