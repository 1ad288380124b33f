"""Expand a recipe into its runs: one `RunSpec` per task, reader or method, setting, seed and repeat."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from lamina.errors import ConfigError, DataError, check_known, error_context
from lamina.recipes.edits import is_made
from lamina.recipes.schema import MethodRecipe, check_options, parse_recipe, slug
from lamina.recipes.strict_yaml import parse_yaml
from lamina.tasks import kind_of
from lamina.train.grid import MOST_RUNS, RunSpec, expand, full_key, swept
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lamina.heads.base import ReadTask
    from lamina.recipes.schema import ReaderRecipe, Recipe


def expand_recipe(
    recipe: Recipe, options: Mapping[str, Any], tasks: Mapping[str, ReadTask] | None = None
) -> dict[str, RunSpec]:
    """Return every run of a recipe by name, in its order; `options` of `lamina.fit` replace those of its `fit`.

    Its name is "<task>-<method>-<seed>", with the numbers of setting and repeat where there are several; its settings
    are "method", the values of the grid, "seed", and with a subsample "repeat". Heads get the labels of `tasks`; None:
    those that the recipe itself tells.
    """
    check_options(options)
    if recipe.methods and "seed" in options:
        raise ConfigError(f"recipe: seed is {options['seed']}; methods take theirs from the recipe's 'seeds'.")
    options = {**recipe.fit, **options, **({"test": True} if recipe.evaluate else {})}
    specs: dict[str, RunSpec] = {}
    for name, task in recipe.tasks.items():
        known = task.outline() if tasks is None else tasks[name]
        own = task.model_dump(include={"epochs", "learning_rate"}, exclude_none=True)
        for method, body in (recipe.methods or task.readers).items():
            template = RunSpec(f"{slug(name)}-{slug(method)}", name, options={**options, **own})
            with error_context(
                f"recipe, methods.{method}" if recipe.methods else f"recipe, tasks.{name}.readers.{method}"
            ):
                of_method = isinstance(body, MethodRecipe)
                settings = _of_method(body, template) if of_method else _of_reader(body, known, template)
                for spec in _repeated(recipe, method, settings):
                    if spec.name in specs:
                        raise ConfigError(
                            f"recipe: '{spec.name}' is the name of another run too; names are made of the task's and "
                            "the method's letters and digits. Rename one of them."
                        )
                    use = {"bank": spec.reader is not None, "train_base": recipe.train_base}
                    FitOptions.of(spec.options).check_use("fit", [kind_of(str(known.kind))], **use)
                    specs[spec.name] = spec
                    if len(specs) > MOST_RUNS:
                        raise ConfigError(f"recipe: it amounts to more than {MOST_RUNS:,} runs.")
    epochs = {spec.options.get("epochs") for spec in specs.values()}
    if recipe.train_base and not recipe.separately and len(epochs) > 1:
        raise ConfigError(
            f"recipe: the readers have {sorted(map(str, epochs))} epochs; with train_base they share the model that is "
            "trained, so all must end together, or be trained 'separately'."
        )
    return specs


def _repeated(recipe: Recipe, method: str, settings: Iterable[RunSpec]) -> Iterator[RunSpec]:
    """Yield a run per setting, seed and repeat; every repeat has a different seed."""
    for setting in settings:
        subsample = recipe.tasks[setting.task].subsample
        count = 1 if subsample is None else subsample.repeats
        seeds = [setting.settings["seed"]] if "seed" in setting.settings else recipe.seeds
        for seed, repeat in itertools.product(seeds, range(count)):
            name, values = f"{setting.name}-{seed}", {"method": method, **setting.settings}
            values["seed"] = own = seed * count + repeat
            if subsample is not None:
                name, values["repeat"] = f"{name}-{repeat}", repeat
            reader, options = setting.reader, setting.options
            if reader is None:
                options = {**options, "seed": own}
            else:
                reader = replace(reader, seed=own)
            yield replace(setting, name=name, settings=values, repeat=repeat, reader=reader, options=options)


def _of_reader(body: ReaderRecipe, task: ReadTask, template: RunSpec) -> Iterator[RunSpec]:
    for spec in expand(body.template(task), body.grid, name=template.name):
        own = {"epochs": spec.epochs, "learning_rate": spec.learning_rate or body.learning_rate}
        options = {**template.options, **{key: value for key, value in own.items() if value is not None}}
        yield replace(spec, name=spec.name if body.grid else template.name, task=template.task, options=options)


def _of_method(method: MethodRecipe, template: RunSpec) -> Iterator[RunSpec]:
    grid = {full_key(key, method.keys(), "grid"): values for key, values in method.grid.items()}
    for number, values in enumerate(itertools.product(*grid.values()), start=1):
        chosen = dict(zip(grid, values, strict=True))
        own = {key: value for key, value in chosen.items() if "." not in key and key != "seed"}
        edits = []
        for name, given in (pair for edit in method.edits for pair in edit.items()):
            changed = {key.partition(".")[2]: value for key, value in chosen.items() if key.startswith(f"{name}.")}
            if is_made(name, arguments := {**given, **changed}):
                edits.append((name, arguments))
        name = f"{template.name}_{number:04}" if grid else template.name
        options = {**template.options, **method.fit, **own}
        yield replace(template, name=name, settings=chosen, options=options, edits=tuple(edits))


def grid_of(spec: RunSpec) -> dict[str, Any]:
    """Return the settings of a run that come from a grid."""
    return {key: value for key, value in spec.settings.items() if key not in ("method", "seed", "repeat")}


def with_sweep(recipe: Recipe, sweeps: Mapping[str, Sequence[Any]]) -> Recipe:
    """Return a recipe with the values of a sweep in the grid of every reader or method that has the key.

    Keys may be short ("alpha" for "fusion.alpha"). Values replace those that a grid has for the key.

    Raises:
        UnknownNameError: If no reader or method has a key.
    """
    given = recipe.model_dump(exclude_unset=True)
    places: list[Any] = [(method, given["methods"][name], method.keys()) for name, method in recipe.methods.items()]
    for name, task in recipe.tasks.items():
        outline, fields = task.outline(), given["tasks"][name]
        places += [(reader, fields["readers"][method], reader.keys(outline)) for method, reader in task.readers.items()]
    used: set[str] = set()
    for body, fields, keys in places:
        fields["grid"], fitted = swept(body.grid, keys, sweeps)
        used |= fitted
    unused = [key for key in sweeps if key not in used]
    check_known("sweep", unused, dict.fromkeys(key for _, _, keys in places for key in keys), "key")
    return parse_recipe(given, op="sweep", swept=True)


def read_sweeps(given: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of texts such as "fusion.dim=32,64", by key; lists are in brackets."""
    sweeps: dict[str, list[Any]] = {}
    for text in given:
        key, _, values = text.partition("=")
        key = key.strip()
        try:
            listed = [_number(value) for value in parse_yaml(f"[{values}]", "sweep")[1]]
        except (yaml.YAMLError, DataError):
            listed = []
        if not key or not listed:
            raise ConfigError(f"sweep: '{text}' names no values; the form is key=value,value, as in fusion.dim=32,64.")
        if key in sweeps:
            raise ConfigError(f"sweep: '{key}' is there twice; put all its values in one list.")
        sweeps[key] = listed
    return sweeps


def _number(value: Any) -> Any:
    """Return a text that is a number as a float, since YAML reads 1e-3 as text; all other values unchanged."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value
