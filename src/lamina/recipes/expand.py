"""Expand a recipe into its runs: one `RunSpec` per task, reader or method, setting, seed and repeat."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import yaml

from lamina.errors import ConfigError, DataError, check_known, error_context
from lamina.recipes.edits import is_applied
from lamina.recipes.schema import MethodRecipe, ReaderRecipe, Recipe, check_options, full_only, parse_recipe, slug
from lamina.recipes.strict_yaml import Fields, parse_yaml
from lamina.recipes.table_layouts import Grid, matches
from lamina.train.grid import MOST_RUNS, RunSpec, apply_sweep, expand, full_key
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from lamina.tasks.base import KindedTask


def expand_recipe(
    recipe: Recipe, options: Mapping[str, object], tasks: Mapping[str, KindedTask] | None = None
) -> dict[str, RunSpec]:
    """Return name -> `RunSpec` for every run of a recipe, in the recipe's order.

    A run is one training of a reader or model. Its name is "<task>-<method>-<seed>". With a grid, the method is
    followed by the number of the setting; with a subsample, the seed is followed by the number of the repeat. Its
    settings are "method", the values of the grid, "seed" (another one for each repeat), and with a subsample "repeat".
    Runs that the recipe's key `only` excludes are left out. Options without an effect in a run are left out of its
    options. Raises ConfigError if an option or a combination of settings is not allowed, an option has no effect in any
    run, two runs get the same name, there are more than 100,000 runs, or readers that train their base together have
    different numbers of epochs; UnknownNameError if an option does not exist.

    Args:
        recipe: The recipe.
        options: Options of `lamina.fit` that replace those under `fit` of the recipe. Options that a task, reader,
            method or grid sets itself stay; `evaluate: test` sets `test`.
        tasks: Task name -> task, whose labels the heads get. None: the labels that the recipe names.
    """
    check_options(options)
    if recipe.methods and "seed" in options:
        raise ConfigError(f"recipe: seed is {options['seed']}; methods take theirs from the recipe's 'seeds'.")
    options = {**recipe.fit, **options, **({"test": True} if recipe.evaluate else {})}
    specs: dict[str, RunSpec] = {}
    idle: list[dict[str, str]] = []  # for each run: option -> why it has no effect there
    for name, task in recipe.chosen_tasks.items():
        known = task.outline() if tasks is None else tasks[name]
        task_options = task.model_dump(include={"epochs", "learning_rate"}, exclude_none=True)
        for method, body in (recipe.methods or task.readers).items():
            template = RunSpec(f"{slug(name)}-{slug(method)}", name, options={**options, **task_options})
            with error_context(
                f"recipe, methods.{method}" if recipe.methods else f"recipe, tasks.{name}.readers.{method}"
            ):
                is_method = isinstance(body, MethodRecipe)
                settings = _method_specs(body, template) if is_method else _reader_specs(body, known, template)
                for spec in _repeated(recipe, method, settings):
                    if not matches(recipe.only, {"task": name, **spec.settings}):
                        continue
                    if spec.name in specs:
                        problem = f"'{spec.name}' is the name of another run too; names are made of the task's and"
                        raise ConfigError(f"recipe: {problem} the method's letters and digits. Rename one of them.")
                    idle.append(dict(FitOptions.of(spec.options).without_effect([known.kind])))
                    spec = replace(
                        spec, options={key: value for key, value in spec.options.items() if key not in idle[-1]}
                    )
                    use = {"bank": spec.reader is not None, "train_base": recipe.train_base}
                    FitOptions.of(spec.options).check_use("fit", [known.kind], **use)
                    specs[spec.name] = spec
                    if len(specs) > MOST_RUNS:
                        raise ConfigError(f"recipe: it has more than {MOST_RUNS:,} runs.")
    _check_effects(idle)
    epochs = {spec.options.get("epochs") for spec in specs.values()}
    if recipe.train_base and not recipe.separately and len(epochs) > 1:
        rule = "with train_base they share the model that is trained, so all must end together"
        got = f"the readers have {sorted(map(str, epochs))} epochs"
        raise ConfigError(f"recipe: {got}; {rule}, or be trained 'separately'.")
    return specs


def _check_effects(idle: Sequence[Mapping[str, str]]) -> None:
    """Raise ConfigError if an option has no effect in any run.

    `idle` has a dict for each run: option that has no effect there -> the reason.
    """
    for option, reason in idle[0].items() if idle else ():
        if all(option in others for others in idle):
            raise ConfigError(f"fit: {option} is set {reason}.")


def _repeated(recipe: Recipe, method: str, settings: Iterable[RunSpec]) -> Iterator[RunSpec]:
    """Yield a run for each setting, seed and repeat of a method.

    `settings` has one run per setting of the method's grid. A seed in the grid replaces the recipe's seeds. The
    run's setting "seed" is seed x number of repeats + repeat (from 0); its name has the seed itself.
    """
    for setting in settings:
        subsample = recipe.tasks[setting.task].subsample
        count = 1 if subsample is None else subsample.repeats
        seeds = [setting.settings["seed"]] if "seed" in setting.settings else recipe.seeds
        for seed, repeat in itertools.product(seeds, range(count)):
            name, values = f"{setting.name}-{seed}", {"method": method, **setting.settings}
            values["seed"] = run_seed = seed * count + repeat
            if subsample is not None:
                name, values["repeat"] = f"{name}-{repeat}", repeat
            reader, options = setting.reader, setting.options
            if reader is None:
                options = {**options, "seed": run_seed}
            else:
                reader = replace(reader, seed=run_seed)
            yield replace(setting, name=name, settings=values, repeat=repeat, reader=reader, options=options)


def _reader_specs(body: ReaderRecipe, task: KindedTask, template: RunSpec) -> Iterator[RunSpec]:
    """Yield a run for each setting of a reader's grid; `template` is a run with the name, task and default options.

    The learning rate of the reader, `body`, replaces the template's, and the grid's values replace both.
    Raises ConfigError or UnknownNameError if a setting is not allowed.
    """
    for spec in expand(body.template(task), body.grid, name=template.name):
        changes = {"epochs": spec.epochs, "learning_rate": spec.learning_rate or body.learning_rate}
        options = {**template.options, **{key: value for key, value in changes.items() if value is not None}}
        yield replace(spec, name=spec.name if body.grid else template.name, task=template.task, options=options)


def _method_specs(method: MethodRecipe, template: RunSpec) -> Iterator[RunSpec]:
    """Yield a run for each setting of a method's grid; `template` is a run with the name, task and default options.

    The method's options replace the template's, and the grid's values replace both, except a "seed", which is only a
    setting. Grid keys such as "insert.layers" set an argument of all edits of this name; edits whose layers are None
    are left out. Raises ConfigError if an edit lacks a required argument, and UnknownNameError if a key of the grid or
    an edit does not exist.
    """
    grid = {full_key(key, method.keys(), "grid"): values for key, values in method.grid.items()}
    for number, values in enumerate(itertools.product(*grid.values()), start=1):
        chosen = dict(zip(grid, values, strict=True))
        grid_options = {key: value for key, value in chosen.items() if "." not in key and key != "seed"}
        edits = []
        for name, fixed in (pair for edit in method.edits for pair in edit.items()):
            changed = {key.partition(".")[2]: value for key, value in chosen.items() if key.startswith(f"{name}.")}
            if is_applied(name, arguments := {**fixed, **changed}):
                edits.append((name, arguments))
        name = f"{template.name}_{number:04}" if grid else template.name
        options = {**template.options, **method.fit, **grid_options}
        yield replace(template, name=name, settings=chosen, options=options, edits=tuple(edits))


def grid_of(spec: RunSpec) -> dict[str, object]:
    """Return those settings of a run that come from a grid: all but "method", "seed" and "repeat"."""
    return {key: value for key, value in spec.settings.items() if key not in ("method", "seed", "repeat")}


def with_sweep(recipe: Recipe, sweeps: Mapping[str, Sequence[object]]) -> Recipe:
    """Return a copy of a recipe in which a sweep's values replace those of the grids.

    `sweeps` is key of a grid -> values, from the command line; a key may be short, such as "alpha" for "fusion.alpha".
    A grid that could have the key and lacks it gets it; readers and methods without such a setting stay as they are.
    Raises UnknownNameError if no reader or method could have a key. Raises ConfigError if a value is not allowed, a
    short key may mean two full ones, or two sweeps set one key.
    """
    fields: Fields = recipe.model_dump(exclude_unset=True)
    bodies: list[tuple[Grid, Fields, list[str]]] = [  # a grid, the fields of its reader or method, all keys it may have
        (method.grid, fields["methods"][name], method.keys()) for name, method in recipe.methods.items()
    ]
    for name, task in recipe.tasks.items():
        outline, readers = task.outline(), fields["tasks"][name].get("readers", {})
        bodies += [(reader.grid, readers[method], reader.keys(outline)) for method, reader in task.readers.items()]
    used: set[str] = set()
    for grid, body, keys in bodies:
        body["grid"], matched = apply_sweep(grid, keys, sweeps)
        used |= matched
    unused = [key for key in sweeps if key not in used]
    check_known("sweep", unused, dict.fromkeys(key for _, _, keys in bodies for key in keys), "key")
    return parse_recipe(fields, op="sweep", swept=True)


def with_part(recipe: Recipe, only: Mapping[str, list[str]], seeds: int | None = None) -> Recipe:
    """Return a copy of a recipe that runs only some of its runs.

    `only` has patterns that runs must match, as `read_only` returns them (empty: the recipe's). `seeds` is the number
    of seeds, which are 0, 1 and so on (None: the recipe's). Runs keep the names that they have in the whole recipe.
    Raises UnknownNameError if a key or pattern matches nothing, and ConfigError if no run matches all keys, or `seeds`
    is given and a grid of the recipe sets the seeds.
    """
    changes: dict[str, object] = {} if not only else {"only": full_only(recipe, only)}
    if seeds is not None:
        bodies = [recipe.methods, *(task.readers for task in recipe.tasks.values())]
        if any("seed" in body.grid for group in bodies for body in group.values()):
            raise ConfigError("seeds: the recipe sets 'seed' in a grid, which decides the seeds. Change them there.")
        changes["seeds"] = list(range(seeds))
    return recipe.model_copy(update=changes)


def read_sweeps(texts: Sequence[str]) -> dict[str, list[object]]:
    """Return key -> values, read as YAML, from sweeps on the command line, such as "fusion.dim=32,64".

    Raises ConfigError if a text has another form, or two texts have the same key.
    """
    sweeps: dict[str, list[object]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        try:
            listed = parse_yaml(f"[{values}]", "sweep")[1]
        except (yaml.YAMLError, DataError):
            listed = []
        if not key or not listed:
            raise ConfigError(f"sweep: '{text}' names no values; the form is key=value,value, as in fusion.dim=32,64.")
        if key in sweeps:
            raise ConfigError(f"sweep: '{key}' occurs twice; put all of its values in one list.")
        sweeps[key] = listed
    return sweeps
