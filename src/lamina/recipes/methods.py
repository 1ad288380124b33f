"""From a recipe to every way in which it fine-tunes its model: edits, options, seeds."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.merge import merge_
from lamina.editing.reinit import reinit_
from lamina.editing.truncate import truncate_
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.recipes.schema import slug
from lamina.store.loading import load
from lamina.tasks.kinds import IMAGE, SEQUENCE, TOKEN
from lamina.train.finetune import HEADS
from lamina.train.grid import swept
from lamina.train.options import TuneOptions
from lamina.utils import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.recipes.schema import MethodRecipe, Recipe

EDITS: dict[str, Any] = {
    "insert": insert_,
    "reinit": reinit_,
    "truncate": truncate_,
    "freeze": freeze_,
    "merge": merge_,
}
_LAYERS = {"truncate": "keep"}  # what names the layers of an edit, where it is not "layers"
_GIVEN = ("model", "generator")


@dataclass(frozen=True)
class Variant:
    """One fine-tuning run of a recipe.

    Attributes:
        name: "<task>-<method>-<seed>", with the numbers of setting and trial where there are several.
        task: Name of its task.
        trial: Which draw of the rows it learns from, from 0.
        settings: "method", the values of the grid, "seed", and with trials "draw".
        edits: Name and arguments of what is done to the model beforehand.
        options: Of `lamina.finetune`.
    """

    name: str
    task: str
    trial: int
    settings: dict[str, Any]
    edits: tuple[tuple[str, dict[str, Any]], ...]
    options: dict[str, Any]

    @property
    def seed(self) -> int:
        """Decides the start of a new head, the edits' random numbers, the order of the rows, and dropout."""
        return self.settings["seed"]


def plan_methods(recipe: Recipe, options: Mapping[str, Any]) -> dict[str, Variant]:
    """Every fine-tuning run of a recipe: each task, method, setting, seed and trial.

    Args:
        recipe: With methods.
        options: Of `lamina.finetune`, for what a method does not say itself.

    Returns:
        Name -> variant.

    Raises:
        UnknownNameError: If an edit, an argument or an option does not exist.
        ConfigError: If an option cannot be, two runs have one name, or a seed is not among the recipe's seeds.
    """
    _check_seeds(recipe, options)
    found: dict[str, Variant] = {}
    for task in recipe.tasks:
        for method, fields_of in recipe.methods.items():
            for one in _variants(recipe, task, method, fields_of, options):
                if one.name in found:
                    raise ConfigError(
                        f"recipe, methods.{method}: '{one.name}' is the name of another run too; names are made of the "
                        "task's and the method's letters and digits. Rename one of them."
                    )
                found[one.name] = one
    return found


def _check_seeds(recipe: Recipe, options: Mapping[str, Any]) -> None:
    places = {"fit": options}
    for name, method in recipe.methods.items():
        places |= {f"methods.{name}.fit": method.fit, f"methods.{name}.grid": method.grid}
    for place, given in places.items():
        if "seed" in given:
            raise ConfigError(
                f"recipe, {place}: seed is {given['seed']}; the seeds of methods are the recipe's own. Give it 'seeds'."
            )


def _variants(
    recipe: Recipe, task: str, method: str, given: MethodRecipe, options: Mapping[str, Any]
) -> Iterator[Variant]:
    where = f"recipe, methods.{method}"
    about, own = recipe.tasks[task], {}
    for key in ("epochs", "learning_rate"):
        if (value := getattr(about, key)) is not None:
            own[key] = value
    draw = about.draw
    count = 1 if draw is None else draw.trials
    combinations = list(itertools.product(*given.grid.values()))
    for number, values in enumerate(combinations):
        chosen = dict(zip(given.grid, values, strict=True))
        edits, more = _settled(given.edits, chosen, where)
        settled = {**options, **own, **given.fit, **more}
        for seed in recipe.seeds:
            for trial in range(count):
                parts = [slug(task), slug(method), *([f"{number:04}"] if given.grid else []), seed]
                settings = {"method": method, **chosen, "seed": seed * count + trial}
                if draw is not None:
                    parts, settings["draw"] = [*parts, trial], trial
                run = {**settled, "seed": settings["seed"]}
                _check_options(run, where)
                yield Variant("-".join(map(str, parts)), task, trial, settings, edits, run)


def _settled(
    edits: Sequence[Mapping[str, Mapping[str, Any]]], chosen: Mapping[str, Any], where: str
) -> tuple[tuple[tuple[str, dict[str, Any]], ...], dict[str, Any]]:
    """The edits and options of one combination of a grid's values."""
    named = [(name, arguments) for edit in edits for name, arguments in edit.items()]
    _check_edits([name for name, _ in named], where)
    changed, more = _places([name for name, _ in named], chosen, where)
    made = [(name, {**arguments, **changed.get(name, {})}) for name, arguments in named]
    for name, arguments in made:
        for argument in arguments:
            if argument not in (known := _arguments(name)):
                raise UnknownNameError(op=f"{where}, {name}", got=argument, known=known, what="argument")
    return tuple(one for one in made if one[1].get(_LAYERS.get(one[0], "layers"), "") is not None), more


def _places(
    names: Sequence[str], chosen: Mapping[str, Any], where: str
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The values of a grid's keys that change edits, and those that are options."""
    changed: dict[str, dict[str, Any]] = {}
    more: dict[str, Any] = {}
    for key, value in chosen.items():
        name, dot, argument = key.partition(".")
        if dot and name in names:
            changed.setdefault(name, {})[argument] = value
        elif key in (known := _keys(names)):
            more[key] = value
        else:
            raise UnknownNameError(op=f"{where}.grid", got=key, known=known, what="key")
    return changed, more


def _keys(names: Iterable[str]) -> list[str]:
    """Every key that a grid may have, over edits of these names."""
    places = [f"{name}.{argument}" for name in dict.fromkeys(names) for argument in _arguments(name)]
    return [*places, *(field.name for field in fields(TuneOptions))]


def sweep_methods(recipe: Recipe, sweeps: Mapping[str, Sequence[Any]]) -> Recipe:
    """Add a grid to every method that has its keys.

    Args:
        recipe: With methods.
        sweeps: Key, in full or short, to its values; they take the place of those that a method's grid has.

    Raises:
        UnknownNameError: If no method has a key, or an edit does not exist.
        ConfigError: If a short key may mean either of two.
    """
    known: dict[str, None] = {}
    used: set[str] = set()
    methods = {}
    for name, method in recipe.methods.items():
        edits = [edit for one in method.edits for edit in one]
        _check_edits(edits, f"recipe, methods.{name}")
        grid, fitted = swept(method.grid, keys := _keys(edits), sweeps)
        known |= dict.fromkeys(keys)
        used |= fitted
        methods[name] = method.model_copy(update={"grid": grid})
    for key in sweeps:
        if key not in used:
            raise UnknownNameError(op="sweep", got=key, known=known, what="key")
    return recipe.model_copy(update={"methods": methods})


def _check_edits(names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in EDITS:
            raise UnknownNameError(op=where, got=name, known=EDITS, what="edit")


def _arguments(edit: str) -> list[str]:
    return [name for name in inspect.signature(EDITS[edit]).parameters if name not in _GIVEN]


def _check_options(options: Mapping[str, Any], where: str) -> None:
    try:
        TuneOptions.of(options)
    except LaminaError as error:
        error.add_note(where)
        raise


def apply_edits(model: PreTrainedModel, variant: Variant) -> None:
    """Edit a model as a variant says, with random numbers of its seed.

    Raises:
        LaminaError: If an edit does not fit the model.
    """
    for number, (name, arguments) in enumerate(variant.edits):
        function = EDITS[name]
        random = {}
        if "generator" in inspect.signature(function).parameters:
            random["generator"] = torch.Generator().manual_seed(derive_seed(variant.seed, "edit", number))
        where = f"recipe, methods.{variant.settings['method']}, {name}"
        try:
            function(model, **arguments, **random)
        except LaminaError as error:
            error.add_note(where)
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: {error}. Correct the value there.") from error


def load_for(recipe: Recipe, variant: Variant, *, kind: str, labels: Sequence[str]) -> tuple[PreTrainedModel, Any]:
    """Load a recipe's model with a head for a task, edited as a variant says.

    Args:
        recipe: Names the model.
        variant: Its edits, and the seed of a new head.
        kind: Of the task.
        labels: Names of its classes.

    Returns:
        The model and its tokenizer or image processor.
    """
    classes = labels if kind in (SEQUENCE, TOKEN, IMAGE) else None
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(variant.seed, "head"))
        model, processor = load(recipe.model, HEADS[kind], labels=classes, revision=recipe.revision)
    apply_edits(model, variant)
    return model, processor
