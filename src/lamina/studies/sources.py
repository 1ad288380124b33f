"""Parts of every study: fresh models, their processors, checked tasks, linear readers, and the final `Study`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from lamina.editing.editable import select_blocks
from lamina.errors import ConfigError
from lamina.heads import HEADS
from lamina.recipes.schema import ReaderRecipe
from lamina.store.load_model import load
from lamina.store.models import load_processor, saved_class
from lamina.studies.study import Study, library_versions, model_facts
from lamina.tasks.base import EncodeOptions
from lamina.tasks.task import Task
from lamina.train.identity import data_digests
from lamina.utils import JSON

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.bank import Reader
    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.runner import Failure
    from lamina.studies.study import Figure
    from lamina.tasks.base import Inputs
    from lamina.tasks.split import Split

_LINEAR = {"pooling": "mean", "encoder_layers": 0}  # settings that leave a head nothing but one linear map


class Training(TypedDict):
    """The training options that studies share; the keys are parameters of `lamina.fit` and `lamina.finetune`.

    Attributes:
        epochs: Number of passes over the training rows.
        batch_size: Rows per step.
        learning_rate: Peak learning rate; it falls to 0 linearly.
        max_length: Maximum tokens per text. None: what the model allows.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    max_length: int | None


def fresh_model(
    model: PreTrainedModel | str | Path,
    processor: Processor | None = None,
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[PreTrainedModel, Processor | None]:
    """Return a model that the caller may change, and its processor.

    Args:
        model: A name or folder, which is loaded; or a model, which is copied with all its weights.
        processor: The processor to return. None: the one that was saved with the model.
        head: For a name or folder: kind of task or class whose head the model gets. None: the class that was saved.
        labels: For a name or folder: class names of the head.

    Returns:
        The model and its processor. The processor is None if none was given and `model.name_or_path` is empty.
    """
    if isinstance(model, str | Path):
        loaded, saved_processor = load(model, head or saved_class(model), labels)
        return loaded, saved_processor if processor is None else processor
    return copy.deepcopy(model), own_processor(model, processor)


def own_processor(model: PreTrainedModel, processor: Processor | None) -> Processor | None:
    """Return `processor`. If it is None, return the processor that was saved with `model.name_or_path`.

    If there is neither, None is returned; code that needs a processor raises the error.
    """
    return load_processor(model.name_or_path, model) if processor is None and model.name_or_path else processor


def source_facts(model: PreTrainedModel | str | Path) -> dict[str, JSON]:
    """Return the `model_facts` of a model; a name or folder is loaded first."""
    return model_facts(load(model, saved_class(model))[0] if isinstance(model, str | Path) else model)


def named_tasks(tasks: Mapping[str, Task] | Task | None) -> dict[str, Task]:
    """Return task name -> task for a mapping, a single task or None; None becomes {}.

    Label columns of one file often lack labels in some rows. `fit` masks these rows if the tasks are trained together;
    a study trains each task alone, so they are masked here.

    Raises:
        UnknownNameError: If a task has no "train" or no "validation" split.
    """
    named = {tasks.name: tasks} if isinstance(tasks, Task) else dict(tasks or {})
    for task in named.values():
        for split in ("train", "validation"):
            task.split(split)
    if len(named) == 1:
        return named
    return {
        name: replace(task, missing_labels="mask") if task.missing_labels is None else task
        for name, task in named.items()
    }


def encode_rows(
    task: Task, split: Split, model: PreTrainedModel, processor: Processor | None, max_length: int | None
) -> Inputs:
    """Encode the rows of a split for a model, as for prediction: without augmentation.

    Args:
        task: The task, whose kind encodes the rows.
        split: The rows.
        model: The model that will read the encoded rows.
        processor: The model's processor.
        max_length: Maximum tokens per text. None: what the model allows.

    Raises:
        ConfigError: If there is no processor or it does not fit the task, or `max_length` is not possible.
    """
    # without a processor there is no limit to find, and `encode` says that one is missing
    limit = task.kind.length_limit(model, cast("Processor", processor), max_length)
    return task.kind.encode(split, processor, EncodeOptions(part="predict", max_length=limit))


def task_facts(tasks: Mapping[str, Task]) -> dict[str, JSON]:
    """Return task name -> its kind, its metric, and for each split the number of rows and a digest; JSON-ready."""
    return {
        name: {
            "kind": task.kind.name,
            "metric": task.metric,
            **{split: {"rows": len(rows), **data_digests(rows)} for split, rows in task.splits.items()},
        }
        for name, task in tasks.items()
    }


def cell_settings(
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task],
    stack: LayerStack,
    training: Training,
    **study_options: JSON,
) -> dict[str, JSON]:
    """Return the settings that the rows of all cells of a study depend on, JSON-ready.

    Args:
        model: The model that the cells start from.
        tasks: Task name -> task.
        stack: The stack that the study reads or edits; its name is recorded.
        training: The training options.
        **study_options: Options of this study alone, such as `seeds`.
    """
    facts: dict[str, JSON] = {"models": {"model": source_facts(model)}, "tasks": task_facts(tasks)}
    return {**facts, **study_options, **cast("dict[str, JSON]", training), "stack": stack.name}


def edited_stack(
    model: PreTrainedModel | str | Path, processor: Processor | None, stack: str | None, op: str
) -> LayerStack:
    """Return a stack of a model, and check that its blocks can be edited.

    Args:
        model: A model, or the name or folder to load it from. It is not changed.
        processor: The processor of the model.
        stack: Name of the stack. None: the only one, or the encoder.
        op: Name of the study, for error messages.

    Raises:
        LaminaError: If the stack does not exist, or its blocks cannot be edited.
    """
    return select_blocks(fresh_model(model, processor)[0], "all", stack, op)[0]


def linear_reader(task: Task, *, stack: str | None = None, seed: int = 0) -> Reader:
    """Return an untrained reader of the last layer; its head is one linear map over the mean of the tokens.

    Args:
        task: The task; its kind decides the head, and its labels become the classes.
        stack: Name of the stack to read.
        seed: Seed of the initial weights.
    """
    known = {field.name for field in fields(HEADS.get(task.kind.name))}
    head = {key: value for key, value in _LINEAR.items() if key in known}
    return replace(ReaderRecipe(fusion={"name": "last_layer"}, head=head, stack=stack).template(task), seed=seed)


def study_of_cells(
    name: str,
    table: DataFrame,
    failures: Sequence[Failure],
    settings: Mapping[str, JSON],
    figures: Mapping[str, Figure],
    conclusions: Sequence[str] = (),
) -> Study:
    """Return the study from the table of its cells; the library versions and failed cells are added to its settings.

    Args:
        name: Name of the study.
        table: Rows of all finished cells.
        failures: Cells that failed.
        settings: Settings of the study.
        figures: Chart name -> chart.
        conclusions: Sentences that say what may be concluded.

    Raises:
        ConfigError: If every cell failed, or no cell returned rows.
    """
    if not len(table) and not failures:
        hint = "Load the model with a language modelling head, or pass tasks."
        raise ConfigError(f"{name}: there was nothing to measure. {hint}")
    if failures and not len(table):
        first = failures[0]
        raise ConfigError(f"{name}: all {len(failures)} cells failed; the first, {dict(first.key)}: {first.error}")
    facts = {**settings, "versions": library_versions(), "failures": [asdict(failure) for failure in failures]}
    return Study(name, table, facts, figures, tuple(conclusions))
