"""From a recipe to every single run: each task, reader or method, setting, seed and repeat."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.recipes.edits import is_left_out, missing_arguments
from lamina.recipes.schema import MethodRecipe, ReaderRecipe, parse_recipe, slug
from lamina.train.grid import RunSpec, expand, full_key, swept

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lamina.recipes.schema import Recipe
    from lamina.tasks.base import TaskLike


def expand_recipe(
    recipe: Recipe, options: Mapping[str, Any], tasks: Mapping[str, TaskLike] | None = None
) -> dict[str, RunSpec]:
    """Every single run of a recipe, in its order.

    Args:
        recipe: The recipe.
        options: Of `lamina.fit`, for what tasks, readers and methods do not say themselves.
        tasks: Its tasks by name, whose labels the readers' heads get; None: what the recipe itself tells of them.

    Returns:
        Name -> run, "<task>-<method>-<seed>", with the numbers of setting and repeat where there are several. Its
        settings are "method", the values of the grid, "seed", and with a subsample "repeat".

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
            template = RunSpec(f"{slug(name)}-{slug(method)}", name, options={**options, **own})
            for spec in _repeated(recipe, method, _settings(body, known, template, where)):
                if spec.name in found:
                    raise ConfigError(
                        f"recipe, {where}: '{spec.name}' is the name of another run too; names are made of the task's "
                        "and the method's letters and digits. Rename one of them."
                    )
                found[spec.name] = spec
    return found


def _repeated(recipe: Recipe, method: str, settings: Sequence[RunSpec]) -> Iterator[RunSpec]:
    """A run per setting, seed and repeat; every repeat has a seed of its own."""
    for setting in settings:
        subsample = recipe.tasks[setting.task].subsample
        count = 1 if subsample is None else subsample.repeats
        seeds = [setting.settings["seed"]] if "seed" in setting.settings else recipe.seeds
        for seed, repeat in itertools.product(seeds, range(count)):
            own, name = seed * count + repeat, f"{setting.name}-{seed}"
            values = {"method": method, **setting.settings, "seed": own}
            if subsample is not None:
                name, values["repeat"] = f"{name}-{repeat}", repeat
            spec = replace(setting, name=name, settings=values, repeat=repeat)
            if spec.reader is None:
                yield replace(spec, options={**spec.options, "seed": own})
            else:
                yield replace(spec, reader=replace(spec.reader, seed=own))


def _settings(body: ReaderRecipe | MethodRecipe, task: TaskLike, template: RunSpec, where: str) -> list[RunSpec]:
    """What a grid makes of a reader or method; without one, a single setting."""
    if isinstance(body, MethodRecipe):
        return _method_settings(body, template, where)
    try:
        specs = expand(body.template(task), body.grid, name=template.name)
    except LaminaError as error:
        error.add_note(f"recipe, {where}")
        raise
    found = []
    for spec in specs:
        own = {"epochs": spec.epochs, "learning_rate": spec.learning_rate or body.learning_rate}
        options = {**template.options, **{key: value for key, value in own.items() if value is not None}}
        name = spec.name if body.grid else template.name
        found.append(replace(template, name=name, reader=spec.reader, settings=spec.settings, options=options))
    return found


def _method_settings(method: MethodRecipe, template: RunSpec, where: str) -> list[RunSpec]:
    keys = method.keys()
    grid = {full_key(key, keys, where): values for key, values in method.grid.items()}
    found = []
    for number, values in enumerate(itertools.product(*grid.values()), start=1):
        chosen = dict(zip(grid, values, strict=True))
        own = {key: value for key, value in chosen.items() if "." not in key and key != "seed"}
        edits = []
        for name, given in (pair for edit in method.edits for pair in edit.items()):
            changed = {key.partition(".")[2]: value for key, value in chosen.items() if key.startswith(f"{name}.")}
            arguments = {**given, **changed}
            if missing := missing_arguments(name, arguments):
                raise ConfigError(f"recipe, {where}, {name}: no '{missing[0]}' was given; it is required.")
            if not is_left_out(name, arguments):
                edits.append((name, arguments))
        name = f"{template.name}_{number:04}" if grid else template.name
        options = {**template.options, **method.fit, **own}
        found.append(replace(template, name=name, settings=chosen, options=options, edits=tuple(edits)))
    return found


def grid_of(spec: RunSpec) -> dict[str, Any]:
    """The settings of a run that come from a grid."""
    return {key: value for key, value in spec.settings.items() if key not in ("method", "seed", "repeat")}


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
