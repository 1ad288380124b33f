"""Checks before the runs of a recipe start, without loading weights: output folder, device, edits and model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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

    from lamina.layers.types import Processor
    from lamina.recipes.schema import Recipe
    from lamina.tasks.base import KindedTask
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

_ROWS = 8  # number of rows of each task that are encoded


def check_output(recipe: Recipe, specs: Mapping[str, RunSpec], folder: Path | None) -> None:
    """Check that the runs of a recipe can write to the output folder and use the cache.

    Args:
        recipe: The recipe.
        specs: All of its runs by name.
        folder: The output folder, in which nothing is changed. None: nothing will be written.

    Raises:
        StoreError: If the output folder cannot be written, or holds something that would be overwritten.
        CacheError: If `cache` is "on" and states cannot be cached: the model is trained too, or the cache folder cannot
            be read.
    """
    is_separate = recipe.separately or recipe.methods
    with nullcontext() if folder is None else claimed(folder) if is_separate else claimed_output(dict(specs), folder):
        for spec in specs.values():
            options = FitOptions.of(spec.options)
            if options.cache == "on" and recipe.train_base:
                raise CacheError("cache: the model is trained too, so its states change. Use cache='auto' or 'off'.")
            if options.cache == "on":
                entries(cache_folder(options.cache_dir))  # raises CacheError if the folder cannot be read


def check_machine(specs: Mapping[str, RunSpec], folder: Path | None) -> None:
    """Raise ConfigError if this machine lacks the device or precision that a run's options ask for.

    `specs` is run name -> run, and `folder` the output folder or None.
    """
    for spec in specs.values():
        check_device(FitOptions.of(spec.options), folder)


def check_edits(recipe: Recipe, specs: Mapping[str, RunSpec], tasks: Mapping[str, Sequence[KindedTask]]) -> None:
    """Apply the edits of every run to a model without weights, to check that they can be applied.

    Nothing is checked if the recipe's model was edited before it was saved, because such a model cannot be built from
    its config alone.

    Args:
        recipe: The recipe.
        specs: All of its runs by name.
        tasks: Task name -> copies of the task; the first copy gives the labels of the model's head.

    Raises:
        LaminaError: If an edit cannot be applied.
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


class _EncodingRunner(NamedTuple):
    """A runner that can only encode examples: it has the model and its processor, and no training."""

    base: PreTrainedModel
    processor: Processor


def check_model(
    recipe: Recipe,
    specs: Mapping[str, RunSpec],
    models: Mapping[str, PreTrainedModel],
    tasks: Mapping[str, list[Task]],
) -> None:
    """Check that the files of a recipe's model are complete, and that each run can start with the model.

    Per run, the parameter names in its options are looked up in the model, and the first rows of its task are encoded.

    Args:
        recipe: The recipe.
        specs: All of its runs by name.
        models: Run name -> the run's model, without weights.
        tasks: Task name -> copies of the task. Tasks that are missing here are not encoded.

    Raises:
        LaminaError: If weights or the processor are missing, or an option or row does not fit. A note of the error
            names the run.
    """
    first = next(iter(models.values()))
    check_weights(recipe.model, first.config, revision=recipe.revision)
    processor = load_processor(recipe.model, first, revision=recipe.revision)
    if processor is None:
        raise ConfigError(
            f"recipe: {recipe.model} has no tokenizer or image processor; one is needed to read examples."
        )
    # runs with the same task, options and model would be checked in the same way: only one of them is
    distinct = {repr((spec.task, spec.options, id(models[name]))): name for name, spec in specs.items()}
    for name in distinct.values():
        spec, options = specs[name], FitOptions.of(specs[name].options)
        runner = _EncodingRunner(models[name], processor)
        with error_context(f"run {name}"):
            if recipe.methods or recipe.train_base:
                parameter_groups(models[name], options, 1.0, "fit")
            for task in tasks.get(spec.task, ())[:1]:
                part = task.split("train")
                few = replace(task, splits={"train": part.select_rows(range(min(len(part), _ROWS)))})
                groups_of(runner, {spec.task: few}, "train", options)  # pyright: ignore[reportArgumentType]
