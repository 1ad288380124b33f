"""How large models, their edits and their readers are, counted on the meta device: no weights, no memory."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lamina.bank import ReaderModule
from lamina.errors import UnsupportedModelError
from lamina.layers import default_stack, stacks
from lamina.layers.discovery import same_stacks
from lamina.layers.stack import by_path
from lamina.recipes.edits import apply_edits
from lamina.store.models import empty_model, model_class, name_classes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.bank import Reader

_IN_PLACE = ("insert", "reinit", "freeze")  # edits after which the blocks are where they were


@dataclass(frozen=True)
class ModelSize:
    """A model without weights, and where its parameters are; embeddings count only in `parameters`.

    Attributes:
        key: Tells models of different architectures apart.
        model: On the meta device.
        parameters: All of them.
        blocks: Stack -> parameters of each block, as often as it is run.
        rest: Parameters outside the blocks.
        layered: Paths of what belongs to layers.
    """

    key: tuple[str, str]
    model: PreTrainedModel
    parameters: int
    blocks: Mapping[str, Sequence[int]]
    rest: int
    layered: tuple[str, ...]

    def row(self, tokens: int, target: int) -> int:
        """Parameters times tokens of a pass over one row; what follows the encoder reads the target, if any."""
        first, *others = [sum(blocks) for blocks in self.blocks.values()] or [0]
        return first * tokens + (sum(others) + self.rest) * (target or tokens)

    def up_to(self, deepest: Mapping[str, int]) -> int:
        """Parameters that a token meets in a pass that ends after the highest layer that is read.

        Args:
            deepest: Stack -> that layer.
        """
        found, left = 0, set(deepest)
        for stack, blocks in self.blocks.items():
            found += sum(blocks[: deepest[stack]] if left == {stack} else blocks)
            left.discard(stack)
            if not left:
                break
        return found


class EditSize(NamedTuple):
    """What edits do to a model, whatever the number of its classes.

    Attributes:
        added: Parameters that it has more.
        frozen: How many are not trained.
        deep: Whether one in a layer is trained, so that training goes back through the layers.
    """

    added: int
    frozen: int
    deep: bool


class ReaderSize(NamedTuple):
    """What a reader has and reads.

    Attributes:
        parameters: All are trained.
        stack: What it reads.
        layers: The layers of it.
        width: Of their states.
    """

    parameters: int
    stack: str
    layers: tuple[int, ...]
    width: int


# A recipe has many runs of few shapes: each is built once per process.
_models: dict[tuple[object, ...], ModelSize] = {}
_edits: dict[tuple[object, ...], EditSize] = {}
_readers: dict[tuple[object, ...], ReaderSize] = {}


def model_size(config: PretrainedConfig, auto_class: str, labels: Sequence[str] = ()) -> ModelSize:
    """Build a model.

    Args:
        config: Stays as it is.
        auto_class: Name of an auto class of transformers, which decides the head.
        labels: Classes of the head; none: those of the config.
    """
    key = (config.to_json_string(use_diff=False), auto_class)
    if (*key, len(labels)) not in _models:
        config = copy.deepcopy(config)
        if labels:
            name_classes(config, labels)
        model = empty_model(config, model_class(auto_class))
        _models[(*key, len(labels))] = ModelSize(key, model, model.num_parameters(), *_parts(model))
    return _models[(*key, len(labels))]


def _parts(model: PreTrainedModel) -> tuple[dict[str, list[int]], int, tuple[str, ...]]:
    try:
        found = stacks(model)
    except UnsupportedModelError:  # such as a convolutional network, which is fine-tuned all the same
        return {}, _active([model]), (model.base_model_prefix,)
    paths = {module: path for path, module in by_path(model).items()}
    blocks = {name: [_active([block]) for block in stack.blocks] for name, stack in found.items()}
    inside = [block for stack in found.values() for block in stack.blocks]
    layered = {paths[module] for stack in found.values() for module in (*stack.run, *stack.blocks)}
    return blocks, _active([model]) - _active(inside), tuple(sorted(layered))


def _active(modules: Iterable[nn.Module]) -> int:
    """Parameters of modules, each once, that are more than looked up."""
    parts = [part for module in modules for part in module.modules() if not isinstance(part, nn.Embedding)]
    return sum({id(one): one.numel() for part in parts for one in part.parameters(recurse=False)}.values())


def edit_size(size: ModelSize, edits: Sequence[tuple[str, Any]], *, where: str) -> EditSize:
    """What edits do to a model.

    Args:
        size: The model, which stays as it is.
        edits: Name and arguments of each.
        where: The place in the recipe, named in errors.

    Raises:
        LaminaError: If an edit does not fit the model.
    """
    key = (*size.key, json.dumps(edits))
    if key not in _edits:
        model = copy.deepcopy(size.model)
        for number, edit in enumerate(edits):
            if all(name in _IN_PLACE for name, _ in edits[:number]):
                same_stacks(size.model, model)  # to look for them again is most of the work
            apply_edits(model, [edit], seed=0, where=where)
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        deep = not frozen or any(f"{name}.".startswith(f"{path}.") for name in trained for path in size.layered)
        _edits[key] = EditSize(model.num_parameters() - size.parameters, frozen, deep)
    return _edits[key]


def reader_size(size: ModelSize, reader: Reader) -> ReaderSize:
    """Build a reader.

    Args:
        size: The model that it reads.
        reader: Its config.

    Raises:
        LaminaError: If the reader does not fit the model.
    """
    key = (*size.key, replace(reader, seed=0))
    if key not in _readers:
        stack = default_stack(size.model, reader.stack, op="estimate")
        with torch.device("meta"):
            module = ReaderModule(reader, stack, size.model)
        _readers[key] = ReaderSize(module.size(), stack.name, module.layers, stack.width)
    return _readers[key]
