"""Steps that studies share: run cells, copy models, check tasks, make linear readers, and build the final `Study`."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast, final

import pandas as pd
import torch

from lamina.cells import run_cells as runner
from lamina.cells.run_cells import Cell, Failure, Shelf, note_failures
from lamina.data.encode import Windows
from lamina.data.state_cache import hash_processor
from lamina.editing.editable import select_blocks
from lamina.errors import ConfigError, DataError, LaminaError, error_context
from lamina.heads import HEADS
from lamina.layers.fingerprints import fingerprint_outside
from lamina.layers.wrappers import checked_model
from lamina.recipes.schema import ReaderRecipe
from lamina.store.files import claimed
from lamina.store.load_model import load
from lamina.store.models import load_processor, saved_class
from lamina.studies.study import Study, library_versions, model_facts
from lamina.tasks.base import EncodeOptions
from lamina.tasks.recorded_rows import recorded_of
from lamina.tasks.task import Task
from lamina.train.checkpoint import data_digests, task_settings
from lamina.train.groups import tasks_by_name
from lamina.train.options import FitOptions
from lamina.utils import JSON, JSONObject, Row, seed_torch

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.bank import Reader
    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.study import Figure
    from lamina.tasks.base import Inputs
    from lamina.tasks.split import Split


_LINEAR = {"pooling": "mean", "encoder_layers": 0}  # settings that leave a head nothing but one linear map
CELLS = "cells"  # the folder with the files of finished cells, inside a study's output folder


class Training(TypedDict):
    """The training options that studies share; the keys are parameters of `lamina.fit` and `lamina.finetune`.

    Attributes:
        epochs: Number of passes over the training rows.
        batch_size: Rows per step.
        learning_rate: Peak learning rate; it falls to 0 linearly.
        max_length: Maximum tokens per text; None: what the model allows.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    max_length: int | None


@final
@dataclass(frozen=True)
class CellInputs:
    """What all cells of a study that edits models share.

    Attributes:
        model: A model, which each cell copies; or the name or folder that each cell loads it from.
        processor: Its processor. None: the one that was saved with the model.
        stack: Name of the stack that is edited. None: the only one, or the encoder.
        training: The training options of each cell.
    """

    model: PreTrainedModel | str | Path
    processor: Processor | None
    stack: str | None
    training: Training

    def check(
        self, op: str, tasks: Mapping[str, Task], seeds: Sequence[int], **study_options: JSON
    ) -> tuple[LayerStack, dict[str, JSON], str]:
        """Check the inputs before any cell runs; return the stack of a copy of the model, the settings, and a hash.

        The settings are all that the results of the cells depend on, JSON-ready: facts of the model and the tasks, a
        hash of the processor, the name of the stack, the training options, the seeds, and `study_options` (options of
        this study alone). Without tasks, `max_length` is the only training option that is checked. `op` is the
        operation, for messages. Raises LaminaError if an option or a seed is not allowed, a task has recorded states,
        the model cannot be loaded, the stack does not exist or has no module per block, or the processor or
        `max_length` suits none of the tasks. If they suit some tasks, only the cells of the others fail.

        The hash is that of the model's weights outside the layers. Cells that use them, such as the head, must have it
        in their digests. Cells that only read layers do without it, and can resume on another head.
        """
        options = self.training if tasks else {"max_length": self.training["max_length"]}
        for seed in seeds if tasks else (0,):
            FitOptions.checked(op, seed=seed, **options)
        if recorded := [name for name, task in tasks.items() if any(map(recorded_of, task.splits.values()))]:
            got = f"task '{recorded[0]}' has recorded states, which no edit of the model changes"
            raise ConfigError(f"{op}: {got}. Give a task that reads texts.")
        model = self.model if isinstance(self.model, str | Path) else checked_model(self.model, op)
        with torch.random.fork_rng():
            seed_torch(0)  # weights that the files lack start at random, and must be the same when a study resumes
            model, processor, stack = replace(self, model=model).fresh(op)
        errors: list[LaminaError] = []
        for name, task in tasks.items():
            try:
                with error_context(f"task '{name}'"):
                    _length_limit(task, model, processor, self.training["max_length"])
            except LaminaError as error:
                errors.append(error)
        if errors and len(errors) == len(tasks):
            raise errors[0]
        facts: dict[str, JSON] = {"models": {"model": model_facts(model)}, "tasks": task_facts(tasks)}
        if processor is not None:
            facts["processor"] = hash_processor(processor)
        settings = {**facts, "seeds": list(seeds), **study_options, **cast("dict[str, JSON]", self.training)}
        return stack, {**settings, "stack": stack.name}, fingerprint_outside(model)

    def fresh(self, op: str) -> tuple[PreTrainedModel, Processor | None, LayerStack]:
        """Return a model that the caller may change, its processor (None: it has none), and the stack that is edited.

        Raises LaminaError if the model cannot be loaded, or there is no such stack, or it has no module per block.
        """
        model, processor = fresh_model(self.model, self.processor)
        return model, processor, select_blocks(model, "all", self.stack, op)[0]


def fresh_model(
    model: PreTrainedModel | str | Path,
    processor: Processor | None = None,
    *,
    head: str | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[PreTrainedModel, Processor | None]:
    """Return a model that the caller may change, and its processor (None: none was given or saved with the model).

    Raises the errors of `lamina.load`, such as ModelNotFoundError, for a name or folder; for a model, StoreError as
    `own_processor` does.

    Args:
        model: A name or folder, which is loaded; or a model, which is copied with all its weights.
        processor: The processor to return. None: the one that was saved with the model.
        head: For a name or folder: kind of task or class whose head the model gets. None: the class that was saved.
        labels: For a name or folder: class names of the head. None: those that its config names.
    """
    if isinstance(model, str | Path):
        loaded, saved_processor = load(model, head or saved_class(model), labels)
        return loaded, saved_processor if processor is None else processor
    return copy.deepcopy(model), own_processor(model, processor)


def own_processor(model: PreTrainedModel, processor: Processor | None) -> Processor | None:
    """Return `processor`; if it is None, the one saved with `model.name_or_path`; None if there is neither.

    Raises StoreError if there are files of a processor that cannot be read.
    """
    return load_processor(model.name_or_path, model) if processor is None and model.name_or_path else processor


def check_given(op: str, **options: Sized) -> None:
    """Raise ConfigError, about the operation `op`, if an option is an empty collection."""
    for name, value in options.items():
        if not len(value):
            raise ConfigError(f"{op}: {name} is empty; give at least one.")


def check_each_once(op: str, what: str, chosen: Collection[object]) -> None:
    """Raise ConfigError, about the operation `op`, if `chosen` is empty or has an entry twice; `what` names it."""
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigError(f"{op}: {what} are {list(chosen)}; at least one is needed, none twice.")


def labelled_task(op: str, task: Task, *parts: str) -> Task:
    """Return a task without the rows of the splits `parts` that have no label.

    Raises UnknownNameError if a split does not exist; DataError, about `op`, if such a split has rows, but no label.
    """
    splits = dict(task.splits)
    for part in parts:
        split = task.split(part)
        if split and split.unlabelled == len(split):
            raise DataError(f"{op}: no row of task '{task.name}' ({part}) has a label; at least one needs one.")
        splits[part] = split.select_rows(split.labelled_rows()) if split.unlabelled else split
    return replace(task, splits=splits)


def named_tasks(op: str, tasks: Mapping[str, Task] | Task | None) -> dict[str, Task]:
    """Return task name -> task for a mapping, a single task (under its own name) or None, which becomes {}.

    If there are several tasks, those without a `missing_labels` are returned with "mask", as `fit` treats them when it
    trains them together. Raises UnknownNameError if a task has no "train" or no "validation" split; ConfigError, about
    `op`, if `tasks` is or holds anything else.
    """
    named = {} if tasks is None else tasks_by_name(op, tasks)
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
    """Return the rows of a split, encoded for a model as for prediction: without augmentation.

    `max_length` is the maximum tokens per text; None: what the model allows. Raises ConfigError if there is no
    processor, the processor does not fit the task, or the model does not allow `max_length`.
    """
    limit = _length_limit(task, model, processor, max_length)
    inputs = task.kind.encode(split, processor, EncodeOptions(part="predict", max_length=limit))
    return inputs.for_model(model) if isinstance(inputs, Windows) else inputs


def _length_limit(task: Task, model: PreTrainedModel, processor: Processor | None, max_length: int | None) -> int:
    # without a processor there is no limit to find, and `encode` says that one is missing
    return task.kind.length_limit(model, cast("Processor", processor), max_length)


def task_facts(tasks: Mapping[str, Task]) -> dict[str, JSON]:
    """Return task name -> `task_settings`, and for each split its number of rows and digests; JSON-ready."""
    return {
        name: {
            **task_settings(task),
            **{split: {"rows": len(rows), **data_digests(rows)} for split, rows in task.splits.items()},
        }
        for name, task in tasks.items()
    }


def cell_digests(name: str, task: Task, *parts: str) -> dict[str, dict[str, str]]:
    """Return `Cell.digests` of a cell that reads the splits `parts` of a task. `name` is its name in messages."""
    return {f"in the {part} part of '{name}'": data_digests(task.split(part)) for part in parts}


def whole_digests(head: str, texts: Iterable[str | Sequence[str]] = ()) -> dict[str, dict[str, str]]:
    """Return `Cell.digests` of a cell that uses the whole model, and reads texts or pairs of texts in this order.

    `head` is the hash of the weights outside the layers, from `CellInputs.check`.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        content = getattr(text, "messages", text)  # a chat differs by its roles too
        # repr keeps the parts of a pair apart; str makes a text of numpy equal to the same plain text
        plain = [str(part) for part in content] if isinstance(content, list | tuple) else str(content)
        digest.update(repr(plain).encode() + b"\0")
    return {"": {"texts": digest.hexdigest(), "weights outside the layers": head}}


def linear_reader(task: Task, *, stack: str | None = None, seed: int = 0) -> Reader:
    """Return the config of an untrained reader of the last layer; its head is one linear map.

    If the head classifies texts, the map reads the mean over the tokens. Raises UnknownNameError if the task's kind has
    no readers.

    Args:
        task: The task; its kind decides the head, and its labels become the classes.
        stack: Name of the stack to read. None: the only one, or the encoder.
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
    """Return the study whose `table` came from cells. Its settings also get the library "versions" and the "failures".

    `figures` is chart name -> chart, and `conclusions` are sentences. Raises ConfigError if every cell failed, or there
    were no rows.
    """
    if not len(table) and not failures:
        hint = "Load the model with a language modelling head, or pass tasks."
        raise ConfigError(f"{name}: there was nothing to measure. {hint}")
    if failures and not len(table):
        first = failures[0]
        raise ConfigError(f"{name}: all {len(failures)} cells failed; the first, {dict(first.key)}: {first.error}")
    facts = {**settings, "versions": library_versions(), "failures": [asdict(failure) for failure in failures]}
    return Study(name, table, facts, figures, tuple(conclusions))


def run_cells(
    cells: Iterable[Cell],
    *,
    settings: Mapping[str, JSON] | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> tuple[DataFrame, list[Failure]]:
    """Run a study's cells (independent pieces of work, such as training runs), and return their rows as one table.

    A cell that raises an error is recorded as a failure, and the others continue; under `torchrun` the error is raised.

    Args:
        cells: The cells, each with a different key. `cell.work()` returns a list of rows: mappings from column to a
            string, a number or None, with a column "score". The entries of the key are added as columns.
        settings: Everything else that the rows depend on, JSON-ready. It is kept with each finished cell, together with
            the library versions.
        output: Folder to write to. Each finished cell becomes one file in its subfolder "cells", and `failures.json`
            lists the failures. None: nothing is written.
        resume: Read the rows of cells that are already finished in `output` instead of running these cells again. Cells
            that failed before are run again. False: all cells are run, and replace their older files. Files of other
            cells stay in the folder.
        progress: Show a bar with the number of finished cells and the remaining time.
        ray: Run the cells as tasks of Ray: "local" (on this machine), "auto" (the cluster that runs on this machine),
            or the address of a cluster. None: in this process, one by one.

    Returns:
        The table (empty if all cells failed), in the order of the cells, with the columns of the keys first; and the
        failed cells in the same order.

    Raises:
        ConfigError: If two cells have the same key; if `resume` is set without `output`, or for finished cells that
            were run with other settings or library versions; if no Ray cluster answers, or a cell cannot be pickled.
        StoreError: If the folder cannot be written, another process is writing to it, or a finished cell is damaged.
        MissingExtraError: If `ray` is given and Ray is not installed.
    """
    output = None if output is None else Path(output)
    keyed_cells = [replace(cell, work=partial(_run_cell, cell)) for cell in cells]
    if resume and output is None:
        raise ConfigError("study: resume is True, but there is no output to resume from. Pass the output folder.")
    common = {"versions": library_versions(), **(settings or {})}
    shelf = None
    if output is not None:
        shelf = Shelf(output / CELLS, partial(_identity, common), op="study", what="study")
    with nullcontext() if output is None else claimed(output):
        done = shelf.read(keyed_cells) if resume and shelf else {}
        on_end = shelf.write if shelf else lambda _cell, _state: None
        states, failures = runner.run_cells(
            keyed_cells, done=done, on_end=on_end, op="study", progress=progress, ray=ray
        )
        if output is not None:
            note_failures(output, failures)
    return pd.DataFrame([row for state in states for row in state["rows"]]), failures


def _identity(common: JSONObject, cell: Cell) -> JSONObject:
    """Return what a cell's result depends on besides its key; `common` are the settings that all cells share."""
    return {"settings": {"": common | cell.settings}, "digests": dict(cell.digests)}


def _run_cell(cell: Cell) -> dict[str, object]:
    """Run a cell; return {"key": its key, "rows": its table rows}. Each row begins with the entries of the key."""
    rows = cast("list[Row]", cell.work())
    return {"key": dict(cell.key), "rows": [{**cell.key, **row} for row in rows]}
