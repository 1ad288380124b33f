"""Models as studies of cells take them, by name or as objects; their tasks by name, and the plainest readers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.editing.editable import select_blocks
from lamina.errors import ConfigError
from lamina.heads import HEADS
from lamina.recipes.schema import ReaderRecipe
from lamina.store.load_model import load
from lamina.store.models import load_processor, saved_class
from lamina.studies.study import Study, library_versions, model_facts
from lamina.tasks.task import Task
from lamina.train.identity import data_digests

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.bank import Reader
    from lamina.layers import LayerStack
    from lamina.studies.runner import Failure
    from lamina.studies.study import Figure

_LINEAR = {"pooling": "mean", "encoder_layers": 0}  # of a head: nothing but a linear map


def opened(
    model: PreTrainedModel | str | Path,
    processor: Any = None,
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """A model of one's own to change: loaded by its name (with `head`, or the class it was saved as), or a copy."""
    if isinstance(model, str | Path):
        loaded, own = load(model, head or saved_class(model), labels)
        return loaded, own if processor is None else processor
    return copy.deepcopy(model), own_processor(model, processor)


def own_processor(model: PreTrainedModel, given: Any) -> Any:
    """The processor that was given, or else the one that belongs to the model's name, if it has a name."""
    return load_processor(model.name_or_path, model) if given is None and model.name_or_path else given


def source_facts(model: PreTrainedModel | str | Path) -> dict[str, Any]:
    """What decides what a model gives, JSON-ready."""
    return model_facts(load(model, saved_class(model))[0] if isinstance(model, str | Path) else model)


def named_tasks(tasks: Mapping[str, Task] | Task | None) -> dict[str, Task]:
    """Tasks by name, each with a train and a validation part: an UnknownNameError if one has none."""
    named = {tasks.name: tasks} if isinstance(tasks, Task) else dict(tasks or {})
    for task in named.values():
        for part in ("train", "validation"):
            task.split(part)
    return named


def task_facts(tasks: Mapping[str, Task]) -> dict[str, Any]:
    """What decides what tasks give, JSON-ready."""
    return {
        name: {
            "kind": task.kind.name,
            "metric": task.metric,
            **{part: {"rows": len(split), **data_digests(split)} for part, split in task.splits.items()},
        }
        for name, task in tasks.items()
    }


def cell_settings(
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task],
    stack: LayerStack,
    training: Mapping[str, Any],
    **own: Any,
) -> dict[str, Any]:
    """What the cells of a study depend on besides their keys, JSON-ready."""
    facts = {"models": {"model": source_facts(model)}, "tasks": task_facts(tasks)}
    return {**facts, **own, **training, "stack": stack.name}


def edited_stack(model: PreTrainedModel | str | Path, processor: Any, stack: str | None, op: str) -> LayerStack:
    """The stack of a model that is to be edited, or a copy's; an error if there is none, or its blocks cannot be."""
    return select_blocks(opened(model, processor)[0], "all", stack, op)[0]


def linear_reader(task: Task, *, fusion: str = "last_layer", stack: str | None = None, seed: int = 0) -> Reader:
    """A reader with a linear head, of the kind of a task."""
    known = {field.name for field in fields(HEADS.get(task.kind.name))}
    head = {key: value for key, value in _LINEAR.items() if key in known}
    return replace(ReaderRecipe(fusion={"name": fusion}, head=head, stack=stack).template(task), seed=seed)


def finished(
    name: str,
    table: DataFrame,
    failures: Sequence[Failure],
    settings: Mapping[str, Any],
    figures: Mapping[str, Figure],
    conclusions: Sequence[str] = (),
) -> Study:
    """The study of cells that ended; its settings name those that failed.

    Raises:
        ConfigError: If every cell failed, or none had anything to measure.
    """
    if not len(table) and not failures:
        raise ConfigError(f"{name}: nothing could be measured. Load the model with a head over words, or give tasks.")
    if failures and not len(table):
        what = f"{name}: all {len(failures)} cells failed; the first, {dict(failures[0].key)}: {failures[0].error}"
        raise ConfigError(what)
    facts = {**settings, "versions": library_versions(), "failures": [asdict(failure) for failure in failures]}
    return Study(name, table, facts, figures, tuple(conclusions))
