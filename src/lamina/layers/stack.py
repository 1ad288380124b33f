"""The description of a stack: its blocks, and where in the model the state of each layer can be read.

A model may have towers: parts that can run alone, one for each kind of input (CLIP has one for texts, one for images).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from lamina.layers.probe_input import MAIN_INPUTS
from lamina.layers.state_forms import Form

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNLIMITED = 10**9  # tokens: larger than any real limit; a tokenizer without a limit says 1e30
_POSITIONS = re.compile(r"(^|\.)(position_embeddings?|embed_positions?|pos_embeddings?|wpe)$")
Side = Literal["output", "input"]
Swap = tuple[int, int]  # axes to exchange if a module keeps a state as [batch, width, tokens] or [tokens, batch, width]


@dataclass(frozen=True, eq=False)
class TapPoint:
    """The place where one layer's state can be read.

    Attributes:
        module: The module; `path` is its dotted name in the model ("" is the model itself).
        side: "output" or "input": a result or an argument of the module.
        index: Position or key among the arguments or results; None if the result is the state itself.
        call: Which of the module's calls within a pass, from 0.
        swap: Axes to exchange to get the state; None: none.
        form: How the value becomes the state; None: it is the state.
    """

    module: nn.Module
    path: str
    side: Side
    index: int | str | None
    call: int
    swap: Swap | None = None
    form: Form | None = None


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A sequence of blocks of a model, and the places where its layers' states can be read. `stacks` returns it.

    Attributes:
        name: "main", "encoder", "decoder", or the name of a tower: "text", "vision".
        width: Size of the last axis of every state.
        blocks: The blocks, bottom first. A block that serves as several layers comes several times. Empty if no module
            is a block.
        points: Entry i is where layer i can be read.
        scope: The innermost module around all points that is called once per pass and gets the attention mask; if none
            gets it, the innermost that is called once. Its call begins a pass over the stack.
        scope_path: Dotted name of `scope` in the model.
        run: All modules with weights that the last layer depends on, in order of registration. They are the same for a
            backbone alone and inside a model with a head.
        tower: The part of the model that runs this stack alone, in models like CLIP; else None.
        needs_tokens: Whether reading states needs the number of the input's tokens; see `Form`.
    """

    name: str
    width: int
    blocks: tuple[nn.Module, ...]
    points: tuple[TapPoint, ...]
    scope: nn.Module
    scope_path: str
    run: tuple[nn.Module, ...]
    tower: nn.Module | None = None

    needs_tokens: bool = field(init=False)

    def __post_init__(self) -> None:
        needs_tokens = any(point.form is not None and point.form.needs_tokens for point in self.points)
        object.__setattr__(self, "needs_tokens", needs_tokens)

    def __repr__(self) -> str:
        # the default would print all modules
        return f"LayerStack('{self.name}', depth={self.depth}, width={self.width})"

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.points) - 1

    @property
    def layers(self) -> int:
        """Number of layers: the blocks and the embeddings."""
        return len(self.points)

    @property
    def is_converted(self) -> bool:
        """Whether the states between the blocks have a form other than `[batch, tokens, width]`; see `Form`."""
        return any(point.form is not None for point in self.points)


def by_path(model: nn.Module, *, every_path: bool = False) -> dict[str, nn.Module]:
    """Return path -> module for all modules of a model; the path of the model itself is "".

    A module with several paths is at the first one only, or at all of them if `every_path` is set.
    """
    return dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=not every_path)))


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for the direct submodules of a module, each module once."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", module.named_children()))


def own_state(module: nn.Module) -> dict[str, object]:
    """Return the entries of the state dict that belong to a module itself, not to its submodules.

    Unlike the parameters, these include packed (quantised) weights.
    """
    state: dict[str, object] = {}
    module._save_to_state_dict(state, "", True)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    return state


def swapped(state: Tensor, swap: Swap | None) -> Tensor:
    """Return a view of the state with the two axes in `swap` exchanged; the state itself if `swap` is None."""
    return state if swap is None else state.transpose(*swap)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the content of a tensor, in the order of its elements, as bytes on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def alike(value: Tensor, state: Tensor, tolerance: float) -> bool:
    """Return whether the shapes are equal and `value` differs from `state` by at most `tolerance * max |state|`."""
    if value.shape != state.shape or torch.equal(value, state):
        return value.shape == state.shape
    return bool((value.float() - state.float()).abs().max() <= tolerance * state.float().abs().max())


def towers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return tower name ("text", "vision") -> tower, for the parts of a model that are models with inputs of their own.

    The result is {} unless there are at least two parts, with different inputs. Encoder and decoder of an
    encoder-decoder are not towers.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    children = {name: child for name, child in children_of(model).items() if hasattr(child, "config")}
    reads = {name: getattr(child, "main_input_name", None) for name, child in children.items()}
    known = [name for name, main_input in reads.items() if main_input in MAIN_INPUTS]
    several = len({reads[name] for name in known}) == len(known) > 1
    return {name.removesuffix("_model"): children[name] for name in known} if several else {}


def tower_for(stacks: Mapping[str, LayerStack], inputs: Iterable[str]) -> str | None:
    """Return the name of the stack whose tower has one of the arguments `inputs` as its main input.

    The first such argument decides. None if the model has no towers, or no tower reads any of `inputs`.
    """
    towers = {name: getattr(stack.tower, "main_input_name", None) for name, stack in stacks.items()}
    return next((name for known in inputs for name, main_input in towers.items() if main_input == known), None)


def position_limit(model: PreTrainedModel) -> int:
    """Return how many positions a model has for text, from its smallest position table or else from its config.

    If a model reads more than text, only its part for text counts. Without a limit the result is `UNLIMITED`. With
    relative attention, the config's limit does not count.
    """
    text_towers = (tower for tower in towers_of(model).values() if tower.main_input_name == "input_ids")
    module: nn.Module = next(iter(text_towers), model)
    text_config: object = getattr(module.config, "text_config", None)
    if text_config is not None:  # such as that of LLaVA
        kind = type(text_config)
        module = next((part for part in module.modules() if type(getattr(part, "config", None)) is kind), module)
    sizes = table_sizes(module)
    config: object = module.config
    limit = getattr(config, "max_position_embeddings", None)
    if not sizes and isinstance(limit, int) and limit > 0 and not getattr(config, "relative_attention", False):
        return limit
    return min(sizes, default=UNLIMITED)


def table_sizes(module: nn.Module) -> list[int]:
    """Return how many positions each learned position table of a module has."""
    sizes = list[int]()
    for name, part in by_path(module).items():
        if _POSITIONS.search(name) and isinstance(weight := getattr(part, "weight", None), nn.Parameter):
            # rows up to the padding row (RoBERTa), or the first `offset` rows (BART), stand for no position
            padding = getattr(part, "padding_idx", None)
            sizes.append(len(weight) - (0 if padding is None else padding + 1) - getattr(part, "offset", 0))
    return sizes
