"""Count the sizes of models, edits and readers on models of the meta device, which need no memory for weights."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import transformers
from torch import nn

from lamina.bank import ReaderModule
from lamina.errors import UnsupportedModelError
from lamina.layers import stacks
from lamina.layers.discovery import pick_stack, same_stacks
from lamina.layers.stack import by_path
from lamina.layers.towers import tower_for
from lamina.recipes.edits import apply_edits
from lamina.store.models import empty_model, name_classes
from lamina.train.memory import model_memory, reader_memory

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.bank import Reader
    from lamina.layers.stack import LayerStack
    from lamina.recipes.edits import Arguments
    from lamina.train.memory import BatchBytes, RowShape

_IN_PLACE = ("insert", "reinit", "freeze")  # edits that leave every block at its position


class EditSize(NamedTuple):
    """The changes that edits make to the size of a model."""

    added: int  # number of parameters by which the model grows; negative if it shrinks
    frozen: int  # number of parameters that are not trained
    deep: bool  # whether a parameter inside a layer is trained, so that gradients flow through the layers


class ReaderSize(NamedTuple):
    """A reader's size, and the layers that it reads."""

    parameters: int  # number of parameters; all are trained
    stack: str  # name of the stack that it reads
    layers: tuple[int, ...]
    width: int  # size of a hidden state
    module: ReaderModule  # on the meta device


@dataclass(frozen=True, eq=False)
class ModelSize:
    """A model on the meta device, and the sizes of its parts.

    Embeddings count only in `parameters`, the number of all parameters. Sizes of edits and readers are cached, because
    the many runs of a recipe have only a few different ones.
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
        """Return parameters x tokens for a pass over one row, summed over all parts of the model except embeddings.

        Args:
            tokens: Tokens of the row, which the first stack reads.
            target: Tokens of the text to generate, which all parts after the first stack read. 0: these parts read the
                tokens of the row.
        """
        first, *others = [sum(blocks) for blocks in self.blocks.values()] or [0]
        return first * tokens + (sum(others) + self.rest) * (target or tokens)

    def up_to(self, deepest: Mapping[str, int]) -> int:
        """Return the number of parameters that a token passes until all layers that readers need are computed.

        `deepest` is stack name -> highest layer that is read. Stacks before the last one of them are computed
        completely.
        """
        names = list(self.blocks)
        last = max(deepest, key=names.index)
        before = names[: names.index(last)]
        return sum(sum(self.blocks[name]) for name in before) + sum(self.blocks[last][: deepest[last]])

    def edited(self, edits: Sequence[tuple[str, Arguments]], *, where: str) -> EditSize:
        """Return how edits change the model's size, found by applying them to a copy of the model.

        Args:
            edits: The name and the arguments of each edit.
            where: Source of the edits, for error messages.

        Raises:
            LaminaError: If an edit cannot be applied.
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
        """Paths of the modules that layers consist of, each with a dot at its end.

        Without stacks, the base model's path.
        """
        paths = {module: path for path, module in by_path(self.model).items()}
        modules = [module for stack in self._stacks.values() for module in (*stack.run, *stack.blocks)]
        return [f"{path}." for path in (map(paths.__getitem__, modules) if modules else [self.model.base_model_prefix])]

    def reader(self, reader: Reader) -> ReaderSize:
        """Return the size of a reader on this model, built on the meta device.

        Raises:
            LaminaError: If the reader does not fit the model, for example because a layer does not exist.
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
        """Return the memory for the gradients of a batch of rows of `tokens` tokens, for readers that share passes."""
        key = (tuple(id(reader.module) for reader in readers), tokens)
        if key not in self._kept:
            named = {str(at): (self._stacks[reader.stack], reader.module) for at, reader in enumerate(readers)}
            self._kept[key] = reader_memory(self.model, named, tokens)
        return self._kept[key]

    def activations(self, edits: Sequence[tuple[str, Arguments]], shape: RowShape) -> BatchBytes:
        """Return the memory for the gradients of a batch, when the edited model itself is trained.

        It counts what autograd saves in float32, attention without fused kernels, and is an upper limit.

        Args:
            edits: The name and the arguments of each edit.
            shape: Tokens, or size of an image, of each row.
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
    """Builds models on the meta device from one config, and caches their sizes.

    Args:
        config: The config, which is not changed.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.config, self._key = config, config.to_json_string(use_diff=False)

    def model(self, auto_class: str, labels: Sequence[str] = ()) -> ModelSize:
        """Return the sizes of the model with the head of an auto class of transformers.

        Args:
            auto_class: Name of the auto class, such as "AutoModelForSequenceClassification".
            labels: Class names of the head. Empty: the class names in the config.
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
    """Return the number of parameters in modules, without embeddings; a shared parameter counts once."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    unique = {id(parameter): parameter.numel() for part in parts for parameter in part.parameters(recurse=False)}
    return sum(unique.values())
