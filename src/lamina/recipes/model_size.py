"""Sizes of models, of their edits and of their readers, counted on the meta device, which needs no memory."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import nn

from lamina.bank import ReaderModule
from lamina.errors import UnsupportedModelError
from lamina.layers import default_stack, stacks
from lamina.layers.discovery import same_stacks
from lamina.layers.stack import by_path
from lamina.layers.towers import tower_for
from lamina.recipes.edits import apply_edits
from lamina.store.models import empty_model, name_classes
from lamina.train.memory import reader_memory

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.bank import Reader
    from lamina.train.memory import KeptBytes

_IN_PLACE = ("insert", "reinit", "freeze")  # edits after which the blocks are where they were


class EditSize(NamedTuple):
    """The effect of edits on a model's size."""

    added: int  # parameters that it has more
    frozen: int  # parameters that are not trained
    deep: bool  # whether one in a layer is trained, so that training goes back through the layers


class ReaderSize(NamedTuple):
    """The size of a reader and the layers that it reads."""

    parameters: int  # all of them are trained
    stack: str
    layers: tuple[int, ...]
    width: int
    module: ReaderModule  # without weights


@dataclass(frozen=True, eq=False)
class ModelSize:
    """A model on the meta device with the sizes of its parts; embeddings count only in `parameters`.

    Its edits and readers, of which a recipe has few shapes for its many runs, are each built once.
    """

    model: PreTrainedModel
    parameters: int
    _edits: dict[str, EditSize] = field(default_factory=dict)
    _readers: dict[Reader, ReaderSize] = field(default_factory=dict)
    _kept: dict[Hashable, KeptBytes] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> dict[str, list[int]]:
        """Parameters of each block, by stack; a block that runs twice counts twice. {} for convolutional networks."""
        return {name: [_active([block]) for block in stack.blocks] for name, stack in self._stacks.items()}

    @cached_property
    def rest(self) -> int:
        """Number of parameters outside the blocks."""
        return _active([self.model]) - _active(block for stack in self._stacks.values() for block in stack.blocks)

    @cached_property
    def _stacks(self) -> Mapping[str, Any]:
        try:
            return stacks(self.model)
        except UnsupportedModelError:  # it is fine-tuned all the same
            return {}

    def row(self, tokens: int, target: int) -> int:
        """Return parameters times tokens of a pass over one row; parts after the encoder read the target, if any."""
        first, *others = [sum(blocks) for blocks in self.blocks.values()] or [0]
        return first * tokens + (sum(others) + self.rest) * (target or tokens)

    def up_to(self, deepest: Mapping[str, int]) -> int:
        """Return the parameters that a token passes up to the highest layer that is read in each stack."""
        names = list(self.blocks)
        last = max(deepest, key=names.index)
        before = names[: names.index(last)]
        return sum(sum(self.blocks[name]) for name in before) + sum(self.blocks[last][: deepest[last]])

    def edited(self, edits: Sequence[tuple[str, Any]], *, where: str) -> EditSize:
        """Return the effect of edits, tried on a copy of the model; `where` is named in errors."""
        of_head = any(isinstance(given.get("train"), list) for _, given in edits)  # which may be frozen, or in part
        key = json.dumps([edits, self.parameters if of_head else None])
        if key not in self._edits:
            model = copy.deepcopy(self.model)
            for number, edit in enumerate(edits):
                if self._stacks and all(name in _IN_PLACE for name, _ in edits[:number]):
                    same_stacks(self.model, model)  # to look for them again is most of the work
                apply_edits(model, [edit], seed=0, where=where)
            trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
            deep = not frozen or any(f"{name}.".startswith(path) for name in trained for path in self._layered)
            self._edits[key] = EditSize(model.num_parameters() - self.parameters, frozen, deep)
        return self._edits[key]

    @cached_property
    def _layered(self) -> list[str]:
        """Paths of the modules that belong to layers, each ending with a dot."""
        paths = {module: path for path, module in by_path(self.model).items()}
        modules = [module for stack in self._stacks.values() for module in (*stack.run, *stack.blocks)]
        return [f"{path}." for path in (map(paths.__getitem__, modules) if modules else [self.model.base_model_prefix])]

    def reader(self, reader: Reader) -> ReaderSize:
        """Return the size of a reader of this model."""
        key = replace(reader, seed=0)
        if key not in self._readers:
            name = reader.stack or tower_for(stacks(self.model), reader.head.inputs)
            stack = default_stack(self.model, name, op="estimate")
            with torch.device("meta"):
                module = ReaderModule(reader, stack, self.model)
            self._readers[key] = ReaderSize(module.size(), stack.name, module.layers, stack.width, module)
        return self._readers[key]

    def kept(self, readers: Sequence[ReaderSize], tokens: int) -> KeptBytes:
        """Return the memory that readers of one pass keep for the gradients of rows with `tokens` tokens each."""
        key = (tuple(id(reader.module) for reader in readers), tokens)
        if key not in self._kept:
            named = {str(at): (self._stacks[reader.stack], reader.module) for at, reader in enumerate(readers)}
            self._kept[key] = reader_memory(self.model, named, tokens)
        return self._kept[key]


# Recipes share their architectures: each model is built, and its stacks are found, once per process.
_models: dict[tuple[str, str], dict[int, ModelSize]] = {}


class Sizes:
    """Builds models from one config and caches their sizes; the config is not changed."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config, self._key = config, config.to_json_string(use_diff=False)

    def model(self, auto_class: str, labels: Sequence[str] = ()) -> ModelSize:
        """Return a model with the head of an auto class of transformers and these labels; none: those of the config."""
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
                    same_stacks(like.model, model)  # their modules are the same but for the last layer's width
            built[len(labels)] = size
        return built[len(labels)]


def _active(modules: Iterable[nn.Module]) -> int:
    """Return the number of parameters of modules, each counted once, without embeddings."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    unique = {id(parameter): parameter.numel() for part in parts for parameter in part.parameters(recurse=False)}
    return sum(unique.values())
