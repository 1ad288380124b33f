"""The runs of a recipe with their sizes: rows and tokens, parameters, steps, operations and memory.

A pass is shared if several readers read the states of one forward pass of the base model.
"""

from __future__ import annotations

import copy
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, cast

from lamina.errors import error_context
from lamina.recipes.load_tasks import NOT_DATA
from lamina.recipes.model_size import EditSize, Sizes
from lamina.tasks.base import PARTS, TaskOutline
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lamina.recipes.model_size import ReaderSize
    from lamina.recipes.schema import Recipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec

FORWARD, TRAINING = 2, 6  # operations per parameter and token; the backward pass takes twice as many as the forward
WEIGHT_BYTES = 4  # size of a weight, a gradient or a moment of the optimizer
CACHED_BYTES = 2  # size of a number in a cached hidden state


class SizedRun:
    """A run of a recipe with the sizes of its data and of its model; the model is on the meta device.

    Attributes:
        recipe: The recipe.
        spec: The run.
        task: The run's task with its number of rows and tokens.
        options: The run's options of `lamina.fit`.
        model: The model.
        reader: The reader; None if the model itself is fine-tuned.
        edits: How the run's edits change the model's size.
        rows: Split -> number of model inputs per epoch. A long text may become several inputs.
        tokens: Tokens of an average training input.
        max_length: Most tokens of an input.
        target: Maximum tokens of a text to generate; 0 if the task generates none.
        added: Number of parameters that edits add.
        parameters: Number of parameters of the reader, or of the edited model.
        trained: Number of parameters that are trained.
        steps_per_epoch: Optimizer steps of an epoch.
        epochs: Number of epochs that begin.
        steps: Optimizer steps of all epochs together.
    """

    reader: ReaderSize | None = None
    edits = EditSize(added=0, frozen=0, deep=True)

    def __init__(self, recipe: Recipe, spec: RunSpec, task: TaskOutline, sizes: Sizes, base_class: str) -> None:
        self.recipe, self.spec, self.task = recipe, spec, task
        self.options, kind = FitOptions.of(spec.options), task.kind
        with error_context(f"run {spec.name}"):
            if spec.reader is None:
                self.model = sizes.model(kind.auto_class, task.labels if kind.has_classes else ())
                self.edits = self.model.edited(spec.edits, where=f"recipe, methods.{spec.settings['method']}")
            else:
                self.model = sizes.model(base_class)
                self.reader = self.model.reader(spec.reader)
        self.max_length = max_length = int(
            self.options.max_length or getattr(sizes.config, "max_position_embeddings", None) or 512
        )
        config = copy.copy(sizes.config)
        if task.image_size is not None:
            config.image_size = task.image_size
        rows = {
            part: kind.model_rows(task.rows.get(part, 0), task.tokens, max_length, config, by_row=task.by_row)
            for part in PARTS
        }
        self.rows = {part: count for part, (count, _) in rows.items()}
        self.tokens = rows["train"][1]
        self.target = self.options.max_target_length if kind.generates else 0
        self.added = self.edits.added
        self.parameters = self.reader.parameters if self.reader else self.model.parameters + self.added
        self.trained = self.parameters - self.edits.frozen
        batches = ceil(self.rows["train"] / self.options.batch_size)
        self.steps_per_epoch = ceil(batches / self.options.gradient_accumulation_steps)
        max_steps = self.options.max_steps
        epochs = cast("int", self.options.epochs)  # never a mapping here: each reader has its own options
        self.epochs = epochs if max_steps is None else ceil(max_steps / self.steps_per_epoch)
        self.steps = max_steps or self.epochs * self.steps_per_epoch

    @property
    def trained_rows(self) -> int:
        """Number of training inputs in all epochs together."""
        whole, rest = divmod(self.steps, self.steps_per_epoch)
        return whole * self.rows["train"] + rest * self.options.step_size

    @cached_property
    def flops(self) -> int:
        """Operations of the run, without the passes of a base model that several readers share.

        A generated text counts once for each beam.
        """
        scored = self.epochs * self.rows["validation"] + (self.rows["test"] if self.recipe.evaluate else 0)
        if self.reader is not None:
            return self.parameters * self.tokens * (TRAINING * self.trained_rows + FORWARD * scored)
        row = self.model.row(self.tokens, self.target) + self.added * self.tokens
        beams = self.options.num_beams if self.target else 1
        return row * ((TRAINING if self.edits.deep else FORWARD) * self.trained_rows + FORWARD * scored * beams)


def sized_runs(
    recipe: Recipe, specs: Mapping[str, RunSpec], outlines: Mapping[str, TaskOutline], sizes: Sizes
) -> list[SizedRun]:
    """Return the runs of a recipe with their sizes.

    Args:
        recipe: The recipe.
        specs: Its runs by name.
        outlines: Task name -> its number of rows and tokens.
        sizes: Sizes of the recipe's model.
    """
    heads = [body.outline().kind.base_class for body in recipe.chosen_tasks.values()]
    base_class = next((head for head in heads if head != "AutoModel"), "AutoModel")  # of the model that readers share
    return [SizedRun(recipe, spec, outlines[spec.task], sizes, base_class) for spec in specs.values()]


class SharedPass(NamedTuple):
    """The forward passes of the base model over one split; several readers share its states."""

    part: str  # the split: "train", "validation" or "test"
    task: str  # name of the first reader's task; the others have the same data
    steps: int  # optimizer steps
    flops: int  # operations of the base model
    cache_bytes: int  # size of the hidden states in a cache
    runs: Sequence[SizedRun]  # the runs of the readers


class ReaderMemory(NamedTuple):
    """The bytes that readers need for the gradients of one batch, and the batch's number of rows."""

    bytes: int
    rows: int


def reader_batch(runs: Sequence[SizedRun]) -> ReaderMemory:
    """Return the memory for the gradients of one batch, for readers that share each pass of the model."""
    first, readers = runs[0], [run.reader for run in runs if run.reader is not None]
    rows = min(first.options.batch_size, first.rows["train"])
    kept = first.model.kept(readers, first.options.max_length or first.tokens)
    return ReaderMemory(kept.total(rows), rows)


def _pass(part: str, runs: list[SizedRun]) -> SharedPass:
    """Return the base model's computation on one split for several runs that share its passes.

    The base model is computed up to the highest layer that a reader of these runs needs. There are as many epochs as
    the longest run has; the test split is read once.
    """
    first, longest = runs[0], max(runs, key=lambda run: run.epochs)
    readers = [run.reader for run in runs if run.reader is not None]
    deepest: dict[str, int] = {}
    for reader in readers:
        deepest[reader.stack] = max(reader.layers[-1], deepest.get(reader.stack, 0))
    widths = {(reader.stack, layer): reader.width for reader in readers for layer in reader.layers}
    rows = longest.trained_rows if part == "train" else longest.rows[part] * (1 if part == "test" else longest.epochs)
    times = TRAINING if part == "train" and first.recipe.train_base else FORWARD
    flops = times * rows * longest.tokens * longest.model.up_to(deepest)
    cache_bytes = 0 if part == "test" else first.rows[part] * first.tokens * sum(widths.values()) * CACHED_BYTES
    return SharedPass(part, first.spec.task, longest.steps, flops, cache_bytes, runs)


def shared_passes(planned: Iterable[SizedRun], tasks: Mapping[str, Sequence[Task]]) -> list[SharedPass]:
    """Return all passes of the base model for a recipe, each with the runs of the readers that share it."""
    passes: dict[tuple[str, ...], list[SizedRun]] = {}
    named: dict[str, str] = {}
    for run in planned:
        recipe, spec = run.recipe, run.spec
        task = recipe.tasks[spec.task]
        if spec.task not in named:
            named[spec.task] = task.model_dump_json(exclude={*NOT_DATA, "metric"})
        separate = spec.name if recipe.separately else ""
        sample = "" if task.subsample is None else task.subsample.model_dump_json()
        for part in ("train", "validation", *([recipe.evaluate] if recipe.evaluate else [])):
            if spec.task in tasks:
                read = tasks[spec.task][spec.repeat]
                data = (read.kind.inputs, read.split(part).key, str(read.by_row), str(read.image_size))
            else:
                data = (named[spec.task], *((sample, str(spec.repeat)) if part == "train" else ()))
            passes.setdefault((part, separate, *data), []).append(run)
    return [_pass(part, runs) for (part, *_), runs in passes.items()]


def weight_memory(recipe: Recipe, planned: list[SizedRun]) -> int:
    """Return the bytes of weights, gradients and optimizer moments that are in memory at the same time.

    They belong to the base model and all readers that are trained together, or to the largest fine-tuned model.
    """
    moments = planned[0].options.moments
    if recipe.methods:
        return max(map(training_weights, planned))
    together = (max if recipe.separately else sum)(run.trained for run in planned)
    base = planned[0].model.parameters * (2 + moments if recipe.train_base else 1)
    return WEIGHT_BYTES * ((2 + moments) * together + base)


def training_weights(run: SizedRun) -> int:
    """Return the bytes of a whole model's weights, gradients and optimizer moments in a run."""
    return WEIGHT_BYTES * (run.parameters + (1 + run.options.moments) * run.trained)
