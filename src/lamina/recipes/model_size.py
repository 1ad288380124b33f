"""Estimate sizes, operations and GPU hours on models of the meta device, which need no memory for weights."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import transformers
from torch import nn

from lamina.bank import Reader, ReaderModule
from lamina.errors import UnsupportedModelError, error_context
from lamina.layers import stacks
from lamina.layers.discovery import pick_stack, same_stacks
from lamina.layers.stack import LayerStack, by_path, tower_for
from lamina.recipes.edits import Arguments, apply_edits
from lamina.recipes.load_tasks import NOT_DATA
from lamina.store.models import empty_model, name_classes
from lamina.tasks.base import PARTS, TaskOutline
from lamina.train.memory import BatchBytes, RowShape, model_memory, reader_memory
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.recipes.report_file import TableRow
    from lamina.recipes.schema import Recipe
    from lamina.tasks.task import Task
    from lamina.train.grid import RunSpec


_IN_PLACE = ("insert", "reinit", "freeze")  # edits that leave every block at its position
FORWARD, TRAINING = 2, 6  # operations per parameter and token; the backward pass takes twice as many as the forward
WEIGHT_BYTES = 4  # size of a weight, a gradient or a moment of the optimizer
CACHED_BYTES = 2  # size of a number in a cached hidden state
# Card -> precision -> operations per second at its peak, without sparsity, from NVIDIA's data sheets (SXM). PyTorch
# computes float32 products in float32 by default, not in TF32.
CARDS = {
    "A100": {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12},
    "H100": {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
}
REACHED = 0.4  # share of the peak that training reaches with long texts and full batches


class EditSize(NamedTuple):
    """How the edits of a run change the size of a model. `ModelSize.edited` returns it.

    Attributes:
        added: Number of parameters by which the model grows; negative if it shrinks.
        frozen: Number of parameters that are not trained.
        deep: Whether a parameter inside a layer is trained, so that gradients flow through the layers.
    """

    added: int
    frozen: int
    deep: bool


class ReaderSize(NamedTuple):
    """A reader's size. `ModelSize.reader` returns it.

    Attributes:
        parameters: Number of parameters; all are trained.
        stack: Name of the stack that it reads.
        layers: The layers that it reads.
        width: Size of a hidden state.
        module: The reader, on the meta device.
    """

    parameters: int
    stack: str
    layers: tuple[int, ...]
    width: int
    module: ReaderModule


@dataclass(frozen=True, eq=False)
class ModelSize:
    """A model on the meta device, and the sizes of its parts. `Sizes.model` makes it.

    Embeddings count only in `parameters`, the number of all parameters, and in sizes of edits. Sizes of edits and
    readers are cached.
    """

    model: PreTrainedModel
    parameters: int
    _edits: dict[str, EditSize] = field(default_factory=dict)
    _readers: dict[Reader, ReaderSize] = field(default_factory=dict)
    _kept: dict[Hashable, BatchBytes] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Stack name -> number of parameters of each block; a block that is computed twice counts twice.

        Empty for a model without stacks, such as a convolutional network.
        """
        return {name: [_active([block]) for block in stack.blocks] for name, stack in self._stacks.items()}

    @cached_property
    def rest(self) -> int:
        """Number of parameters outside the blocks, without embeddings."""
        return _active([self.model]) - _active(block for stack in self._stacks.values() for block in stack.blocks)

    @cached_property
    def _stacks(self) -> Mapping[str, LayerStack]:
        """Stack name -> stack; empty for a model without stacks, which can still be fine-tuned."""
        try:
            return stacks(self.model)
        except UnsupportedModelError:
            return {}

    def row(self, tokens: int, target: int) -> int:
        """Return the work of a forward pass over one row: the sum of parameters x tokens over all parts but embeddings.

        The first stack reads `tokens` tokens, and all parts after it `target` tokens, those of the text to generate. If
        `target` is 0, all parts read `tokens` tokens.
        """
        first, *others = [sum(blocks) for blocks in self.blocks.values()] or [0]
        return first * tokens + (sum(others) + self.rest) * (target or tokens)

    def up_to(self, deepest: Mapping[str, int]) -> int:
        """Return the number of parameters in the blocks that compute the layers in `deepest` and all below them.

        `deepest` is stack name -> highest layer that is read, for at least one stack. The last of these stacks counts
        up to this layer, and all stacks of the model before it count whole.
        """
        names = list(self.blocks)
        last = max(deepest, key=names.index)
        before = names[: names.index(last)]
        return sum(sum(self.blocks[name]) for name in before) + sum(self.blocks[last][: deepest[last]])

    def edited(self, edits: Sequence[tuple[str, Arguments]], *, where: str) -> EditSize:
        """Return how edits (names and arguments) change the model's size, found by applying them to a copy.

        Raises LaminaError, which tells `where` the edits come from, if an edit cannot be applied.
        """
        # models that differ in their heads share results, unless a list of parts to train may name parts of the head
        names_parts = any(isinstance(arguments.get("train"), list) for _, arguments in edits)
        key = json.dumps([edits, self.parameters if names_parts else None])
        if key not in self._edits:
            model = copy.deepcopy(self.model)
            for number, edit in enumerate(edits):
                if self._stacks and all(name in _IN_PLACE for name, _ in edits[:number]):
                    same_stacks(self.model, model)  # saves the search for stacks, which takes most of the time
                apply_edits(model, [edit], seed=0, where=where)
            trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
            deep = not frozen or any(f"{name}.".startswith(path) for name in trained for path in self._layered)
            self._edits[key] = EditSize(model.num_parameters() - self.parameters, frozen, deep)
        return self._edits[key]

    @cached_property
    def _layered(self) -> list[str]:
        """Paths of the modules that make up the layers, each with a dot at its end; "" for the model itself.

        In a model without stacks, the only path is that of its base model.
        """
        paths = {module: f"{path}." if path else "" for path, module in by_path(self.model).items()}
        modules = [module for stack in self._stacks.values() for module in (*stack.run, *stack.blocks)]
        return [paths[module] for module in modules or [self.model.base_model]]

    def reader(self, reader: Reader) -> ReaderSize:
        """Return the size of a reader on this model, built on the meta device.

        Raises LaminaError if the reader does not fit the model, for example because a layer does not exist.
        """
        key = replace(reader, seed=0)
        if key not in self._readers:
            by_name = self._stacks or stacks(self.model)  # the latter compares all modules with those it knows
            name = reader.stack or tower_for(by_name, reader.head.inputs)
            stack = pick_stack(by_name, name, op="estimate")
            with torch.device("meta"):
                module = ReaderModule(reader, stack, self.model)
            self._readers[key] = ReaderSize(module.size(), stack.name, module.layers, stack.width, module)
        return self._readers[key]

    def kept(self, readers: Sequence[ReaderSize], tokens: int) -> BatchBytes:
        """Return how much memory these readers need for the gradients of one batch, of rows with `tokens` tokens."""
        key = (tuple(id(reader.module) for reader in readers), tokens)
        if key not in self._kept:
            named = {str(at): (self._stacks[reader.stack], reader.module) for at, reader in enumerate(readers)}
            self._kept[key] = reader_memory(self.model, named, tokens)
        return self._kept[key]

    def activations(self, edits: Sequence[tuple[str, Arguments]], shape: RowShape) -> BatchBytes:
        """Return the memory that a batch takes for the gradients of the model itself, with these edits applied.

        The result is an upper limit: what autograd saves in float32, if attention has no fused kernels. `shape` is the
        number of tokens, or the size of an image, of each row. Raises LaminaError if an edit cannot be applied.
        """
        key = (json.dumps([edits]), shape)
        if key not in self._kept:
            model = copy.deepcopy(self.model)
            if self._stacks:
                same_stacks(self.model, model)
            apply_edits(model, edits, seed=0, where="estimate")
            self._kept[key] = model_memory(model, shape)
        return self._kept[key]


# Many recipes have the same model, so each model is built, and its stacks are searched, only once per process:
# (config as JSON, auto class) -> number of labels -> the model with its sizes.
_models: dict[tuple[str, str], dict[int, ModelSize]] = {}


class Sizes:
    """Builds models on the meta device from one config, which is not changed, and caches their sizes."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config, self._key = config, config.to_json_string(use_diff=False)

    def model(self, auto_class: str, labels: Sequence[str] = ()) -> ModelSize:
        """Return the sizes of the model with the head of `auto_class`, the name of an auto class of transformers.

        `labels` are the class names of the head; empty: those in the config. Raises UnsupportedModelError if the class
        does not fit the config, and StoreError if no model can be built from it.
        """
        built = _models.setdefault((self._key, auto_class), {})
        if len(labels) not in built:
            config = copy.deepcopy(self.config)
            if labels:
                name_classes(config, labels)
            model = empty_model(config, getattr(transformers, auto_class))
            size, like = ModelSize(model, model.num_parameters()), next(iter(built.values()), None)
            if like is not None:
                size = replace(size, _edits=like._edits, _readers=like._readers)
                if like._stacks:
                    same_stacks(like.model, model)  # the models differ only in the width of the head's last layer
            built[len(labels)] = size
        return built[len(labels)]


def _active(modules: Iterable[nn.Module]) -> int:
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    unique = {id(parameter): parameter.numel() for part in parts for parameter in part.parameters(recurse=False)}
    return sum(unique.values())


class SizedRun:
    """A run of a recipe with the sizes of its data and of its model; the model is on the meta device.

    Attributes:
        task: The run's task with its number of rows and tokens.
        options: The run's options of `lamina.fit`.
        model: The model with the sizes of its parts; with a reader, the model of the auto class `base_class`.
        reader: The reader's size; None if the model itself is fine-tuned.
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
        steps: Optimizer steps of the run: `max_steps`, or else those of all epochs.
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
        """Number of training inputs in all optimizer steps together."""
        whole, rest = divmod(self.steps, self.steps_per_epoch)
        return whole * self.rows["train"] + rest * self.options.step_size

    @cached_property
    def flops(self) -> int:
        """Number of operations that it takes to train and score the run.

        If the run trains a reader, the passes of the base model are not counted, because readers share them. If edits
        leave no layer to train, training counts as forward passes. Each beam of a search counts as one generated text.
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
    """Return the runs of a recipe with their sizes; raise LaminaError if a reader or an edit does not fit the model.

    `specs` is run name -> run, and `outlines` is task name -> its number of rows and tokens.
    """
    heads = [body.outline().kind.base_class for body in recipe.chosen_tasks.values()]
    base_class = next((head for head in heads if head != "AutoModel"), "AutoModel")  # of the model that readers share
    return [SizedRun(recipe, spec, outlines[spec.task], sizes, base_class) for spec in specs.values()]


class SharedPass(NamedTuple):
    """The forward passes of the base model over one split, in all epochs; several readers share their states.

    Attributes:
        part: The split: "train", "validation" or "test".
        task: Name of the first reader's task; the others have the same data.
        steps: Optimizer steps.
        flops: Operations of the base model.
        cache_bytes: Size of the hidden states in a cache; 0 for the test split.
        runs: The runs of the readers.
    """

    part: str
    task: str
    steps: int
    flops: int
    cache_bytes: int
    runs: Sequence[SizedRun]


def reader_batch(runs: Sequence[SizedRun]) -> tuple[int, int]:
    """Return (bytes, rows) of one batch of `runs` that share each pass; the bytes are what readers keep for gradients.

    The rows are the recipe's `batch_size`, or all training rows if they are fewer. Each has `max_length` tokens, or the
    average number if that is not set.
    """
    first, readers = runs[0], [run.reader for run in runs if run.reader is not None]
    rows = min(first.options.batch_size, first.rows["train"])
    return first.model.kept(readers, first.options.max_length or first.tokens).total(rows), rows


def _pass(part: str, runs: list[SizedRun]) -> SharedPass:
    """Return the passes of the base model over the split `part`, for several runs that share them.

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
    """Return all passes of the base model for a recipe, each with the runs of the readers that share it.

    Runs share a pass if they read the same data and the readers are not trained separately. `planned` are all runs.
    `tasks` has the tasks whose data was read; others are compared by their keys in the recipe.
    """
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
    """Return the most bytes of weights, gradients and optimizer moments that the runs in `planned` hold at a time.

    The base model counts, with all readers that are trained at a time. If models are fine-tuned, the largest counts.
    `planned` is not empty.
    """
    moments = planned[0].options.moments
    if recipe.methods:
        return max(map(training_weights, planned))
    together = (max if recipe.separately else sum)(run.trained for run in planned)
    base = planned[0].model.parameters * (2 + moments if recipe.train_base else 1)
    return WEIGHT_BYTES * ((2 + moments) * together + base)


def training_weights(run: SizedRun) -> int:
    """Return the bytes of weights, gradients and optimizer moments in a run that trains a whole model."""
    return WEIGHT_BYTES * (run.parameters + (1 + run.options.moments) * run.trained)


def parts(planned: Sequence[SizedRun], passes: Sequence[SharedPass]) -> list[TableRow]:
    """Return the cost of each part of a recipe: one row per task and method, and one per task for shared passes.

    Args:
        planned: All runs.
        passes: The passes of the base model that readers share; empty if every run trains a whole model.

    Returns:
        Rows with "task", "method", "runs", "flops" and "hours". A row with the method None has the passes of the base
        model that readers share, under the task of the first; a run counts once even if it reads several of these
        passes. "hours" is card -> hours that one such GPU takes at 40 % (`REACHED`) of its peak.
    """
    costs: dict[tuple[str, str | None], list[tuple[Sequence[SizedRun], int]]] = defaultdict(list)
    for shared in passes:
        costs[shared.task, None].append((shared.runs, shared.flops))
    for run in planned:
        costs[run.spec.task, str(run.spec.settings["method"])].append(([run], run.flops))
    rows: list[TableRow] = []
    for (task, method), summands in costs.items():
        runs = {run.spec.name: run for some, _ in summands for run in some}
        flops = sum(flops for _, flops in summands)
        precision = next(iter(runs.values())).options.precision
        hours = {card: flops / (peak[precision] * REACHED) / 3600 for card, peak in CARDS.items()}
        rows.append({"task": task, "method": method, "runs": len(runs), "flops": flops, "hours": hours})
    return rows
