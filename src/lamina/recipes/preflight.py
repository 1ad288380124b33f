"""Checks before a run: output folder, device, edits and model, all without weights."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.data.disk_cache import cache_folder, entries
from lamina.errors import CacheError, ConfigError, error_context
from lamina.recipes.model_size import Sizes
from lamina.store import load_config, load_processor
from lamina.store.bank_folder import claimed_output
from lamina.store.files import claimed
from lamina.store.models import check_weights
from lamina.store.replay import read_record
from lamina.train.engine import check_device
from lamina.train.groups import groups_of
from lamina.train.options import FitOptions
from lamina.train.parameter_groups import parameter_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.recipes.schema import Recipe
    from lamina.tasks.base import KindedTask
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

_ROWS = 8  # of a task that are encoded


def check_output(recipe: Recipe, specs: Mapping[str, RunSpec], folder: Path | None) -> None:
    """Raise an error unless the runs could write to the output folder and to the cache; nothing is written."""
    alone = recipe.separately or recipe.methods
    with nullcontext() if folder is None else claimed(folder) if alone else claimed_output(dict(specs), folder):
        for spec in specs.values():
            options = FitOptions.of(spec.options)
            if options.cache == "on" and recipe.train_base:
                raise CacheError("cache: the model is trained too, so its states change. Use cache='auto' or 'off'.")
            if options.cache == "on":
                entries(cache_folder(options.cache_dir))  # a CacheError if that is no folder


def check_machine(specs: Mapping[str, RunSpec], folder: Path | None) -> None:
    """Raise an error unless this machine has the device that each run's options name."""
    for spec in specs.values():
        check_device(FitOptions.of(spec.options), folder)


def check_edits(recipe: Recipe, specs: Mapping[str, RunSpec], tasks: Mapping[str, Sequence[KindedTask]]) -> None:
    """Raise an error unless the edits of every run can be applied, by trying them on models without weights.

    A model that was edited before is not built from its config alone, and is left out.
    """
    edited = [spec for spec in specs.values() if spec.edits]
    if not edited or read_record(recipe.model, recipe.revision)[1]:
        return
    sizes = Sizes(load_config(recipe.model, revision=recipe.revision))
    for spec in edited:
        task = tasks[spec.task][0]
        kind = task.kind
        model = sizes.model(kind.auto_class, task.labels if kind.has_classes else ())
        model.edited(spec.edits, where=f"recipe, methods.{spec.settings['method']}")


class _Subject(NamedTuple):
    """The model and processor of a run, which is all that encoding needs."""

    base: PreTrainedModel
    processor: Any


def check_model(
    recipe: Recipe,
    specs: Mapping[str, RunSpec],
    models: Mapping[str, PreTrainedModel],
    tasks: Mapping[str, list[Task]],
) -> None:
    """Raise an error unless the model's files are complete and fit the options and the first rows of each run.

    `models` are those of the runs, without weights; of `tasks` there are those whose data is read.
    """
    first = next(iter(models.values()))
    check_weights(recipe.model, first.config, revision=recipe.revision)
    processor = load_processor(recipe.model, first, revision=recipe.revision)
    if processor is None:
        raise ConfigError(
            f"recipe: {recipe.model} has no tokenizer or image processor; one is needed to read examples."
        )
    different = {repr((spec.task, spec.options, id(models[name]))): name for name, spec in specs.items()}
    for name in different.values():
        spec, subject, options = specs[name], _Subject(models[name], processor), FitOptions.of(specs[name].options)
        with error_context(f"run {name}"):
            if recipe.methods or recipe.train_base:
                parameter_groups(models[name], options, 1.0, "fit")
            for task in tasks.get(spec.task, ())[:1]:
                part = task.split("train")
                few = replace(task, splits={"train": part.select_rows(range(min(len(part), _ROWS)))})
                groups_of(subject, {spec.task: few}, "train", options)  # pyright: ignore[reportArgumentType]
