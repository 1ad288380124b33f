"""Stacks and layers: how layers are named, where and in which form states are read, how edits move blocks.

A model may have towers: parts that can run alone, one for each kind of input (CLIP has one for texts, one for images).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, LayerIndexError
from lamina.layers.probe_input import MAIN_INPUTS, Probe


@dataclass(frozen=True)
class Form:
    """A form in which a model keeps a layer's state, other than `[batch, tokens, width]`, and its conversion.

    Attributes:
        kind: "streams": several residual streams, as in models with hyper-connections; the state is their mean.
            "patches": `[batch, rows, columns, width]`; the state is the sequence of patches, row by row. "channels":
            `[batch, width, rows, columns]`, read in the same way. "packed": `[patches, width]`, the patches of all
            images in one sequence; the state has a batch of 1. "first": tokens that the model added after the real ones
            are cut off. "last": tokens that the model added before the real ones are cut off. "repeated": one state
            stands for several tokens in a row, and is repeated for each of them.
        axis: For "streams", the axis of the streams.
        each: For "repeated", the number of tokens that share a state.
        skip: For "repeated", the number of states at the start that stand for no token. Tokens at the end without a
            state get the last one.
    """

    kind: Literal["streams", "patches", "channels", "packed", "first", "last", "repeated"]
    axis: int = 0
    each: int = 1
    skip: int = 0

    @property
    def needs_tokens(self) -> bool:
        """Whether the conversion needs the number of tokens in the input."""
        return self.kind in ("first", "last") or self.skip > 0

    def state(self, value: Tensor, tokens: int | None) -> Tensor:
        """Convert a hidden state from the form in which the model keeps it to `[batch, tokens, width]`.

        Args:
            value: The model's hidden state, in this form.
            tokens: Number of tokens in the model's input; None if it has no tokens, as with images. The forms for which
                `needs_tokens` is True use it, to return a state for each of these tokens.
        """
        if self.kind == "streams":
            return value.mean(self.axis)
        if self.kind == "patches":
            return value.flatten(1, 2)
        if self.kind == "channels":
            return value.flatten(2).transpose(1, 2)
        if self.kind == "packed":
            return value[None]
        if self.kind == "repeated":
            own = value[:, self.skip :].repeat_interleave(self.each, 1)
            missing = 0 if tokens is None else tokens - own.shape[1]
            return torch.cat([own, value[:, -1:].expand(-1, missing, -1)], 1) if missing > 0 else own[:, :tokens]
        if tokens is None or tokens >= value.shape[1]:  # nothing was added
            return value
        return value[:, :tokens] if self.kind == "first" else value[:, value.shape[1] - tokens :]


def state_of(value: Tensor, form: Form | None, tokens: int | None) -> Tensor:
    """Convert a value to a state `[batch, tokens, width]` by its form; if `form` is None, return the value itself."""
    return value if form is None else form.state(value, tokens)


def count_tokens(arguments: Mapping[str, object]) -> int | None:
    """Return the number of tokens that a module receives, from its arguments by name; None if it reads no tokens."""
    for name in _TOKENS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[1]
    return None


_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "attention_mask")


def token_counts(probe: Probe) -> tuple[int, ...]:
    """Return the numbers of tokens in the texts of a probe input, of encoder and decoder; equal numbers come once."""
    return tuple({value.shape[1] for name, value in probe.inputs.items() if name.endswith("input_ids")})


def first_tensors(states: Sequence[object]) -> tuple[object, ...]:
    """Return the hidden states of a stack as single tensors.

    Some models return a state as a tuple, together with the state of global tokens; its first tensor is taken.
    """
    return tuple(map(_first_tensor, states))


def _first_tensor(state: object) -> object:
    if not isinstance(state, tuple):
        return state
    parts = cast("tuple[object, ...]", state)
    return parts[0] if parts and all(isinstance(part, Tensor) for part in parts) else parts


def forms_of(states: Sequence[object], probe: Probe, tokens: int | None, *, downsampling: int = 0) -> list[Form | None]:
    """Return the form of each hidden state that a model returned. None: it is already a state, or its form is unknown.

    Args:
        states: The hidden states, from layer 0.
        probe: The input of the model.
        tokens: The number of tokens in the stack's own input. None: it reads no text.
        downsampling: In a model that reads characters (CANINE), the number of characters that share a state; the first
            state is for the whole text. 0: states are not shared.
    """
    padding: Form | None = None
    # states longer than the text are padded only if others are not: some models add tokens of their own for good
    lengths = {state.shape[1] for state in states if isinstance(state, Tensor) and state.ndim == 3}
    is_cut = tokens is not None and tokens in lengths and max(lengths) > tokens
    maps = {state.shape for state in states if isinstance(state, Tensor) and state.ndim == 4}
    is_pyramid = tokens is None and len(maps) > 1  # a convolutional network, whose maps are not sequences of tokens
    forms: list[Form | None] = []
    for state in states:
        form = _form_of(state, probe, tokens) if isinstance(state, Tensor) and not is_pyramid else None
        if is_cut and isinstance(state, Tensor) and state.ndim == 3 and state.shape[1] != tokens:
            # only in layer 0 is padding the same in all rows, as later layers may attend to other tokens there
            form = padding = padding or (None if forms else _side_of_padding(state, tokens or 0))
        forms.append(form or _repeated(states, len(forms), probe, tokens, downsampling))
    return forms


def _repeated(states: Sequence[object], layer: int, probe: Probe, tokens: int | None, downsampling: int) -> Form | None:
    """Return the form of a layer in which several tokens of layer 0 share a state; None if no tokens do.

    `states` has all layers; the other arguments are those of `forms_of`. Without text, only the last layer of audio can
    have this form, because some encoders pool it over time. States of images never have it, since it is not known how
    patches were joined.
    """
    first, state = states[0], states[layer]
    if not isinstance(first, Tensor) or not isinstance(state, Tensor) or not first.ndim == state.ndim == 3:
        return None
    length, count = first.shape[1], state.shape[1]
    if (first.shape[0], first.shape[2]) != (state.shape[0], state.shape[2]) or count >= length:
        return None
    if tokens is not None:
        is_shared = downsampling > 1 and (length, count) == (tokens, tokens // downsampling)
        return Form("repeated", each=downsampling, skip=1) if is_shared else None
    is_pooled = layer == len(states) - 1 and count and length % count == 0 and not _AUDIO.isdisjoint(probe.inputs)
    return Form("repeated", each=length // count) if is_pooled else None


_AUDIO = frozenset({"input_features", "input_values"})


def _form_of(state: Tensor, probe: Probe, tokens: int | None) -> Form | None:
    """Return the form of a hidden state with two or four axes; None if it has three, or if its form is unknown.

    `probe` and `tokens` are those of `forms_of`.
    """
    shape = tuple(state.shape)
    if len(shape) == 2 and probe.rows == 1:
        return Form("packed")
    if len(shape) != 4:
        return None
    if tokens is not None:
        others = [shape[:axis] + shape[axis + 1 :] for axis in range(3)]
        axes = [axis for axis, rest in enumerate(others) if rest[:2] == (probe.rows, tokens)]
        return Form("streams", axes[0]) if len(axes) == 1 else None
    image = next((value for name, value in probe.inputs.items() if name.startswith("pixel_values")), None)
    if image is None or shape[0] != probe.rows:
        return None
    height, width = image.shape[-2:]
    last, first = shape[1] * width == shape[2] * height, shape[2] * width == shape[3] * height
    if last == first:  # no axes have the proportions of the image, or it cannot be said which
        return None
    return Form("patches" if last else "channels")


def _side_of_padding(state: Tensor, tokens: int) -> Form | None:
    """Return the form of a sequence that the model has padded to more than `tokens` tokens: "first" or "last".

    It is padded at the end ("first": keep the first tokens) or at the start, where all rows are equal. None if they are
    equal on neither side, or if `state` has no values (meta device).
    """
    if state.is_meta:
        return None
    after, before = state[:, tokens:], state[:, : state.shape[1] - tokens]
    if bool((after == after[:1]).all()):
        return Form("first")
    return Form("last") if bool((before == before[:1]).all()) else None


Selector = int | str | Sequence[int]

FORMS = "an int (negative counts from the top), a list of ints, 'all', 'bottom:4', 'top:4', '2-6', or '1-' (to the top)"


def is_all(selector: object) -> bool:
    """Return whether a layer selector is "all"."""
    return isinstance(selector, str) and selector == "all"


def select(selector: object, layers: int, *, op: str) -> list[int]:
    """Return the layer numbers that a selector selects, in ascending order.

    Args:
        selector: One of the forms in `FORMS`.
        layers: Number of layers that exist, embeddings included.
        op: The operation that error messages begin with.

    Raises:
        LayerIndexError: If a layer does not exist.
        ConfigError: If the selector is in no valid form, selects no layer, or selects a layer twice.
    """
    if (to_list := getattr(selector, "tolist", None)) is not None:  # an array or a tensor
        selector = cast("Selector", to_list())
    if isinstance(selector, str):
        return _from_text(selector, layers, op)
    items = cast("Sequence[object]", selector) if isinstance(selector, (list, tuple, range)) else (selector,)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ConfigError(f"{op}: layers is {selector!r}, which is not a layer selector. Use {FORMS}.")
    chosen = sorted(_index(cast("int", item), layers, op) for item in items)
    if not chosen:
        raise ConfigError(f"{op}: layers is {selector!r}, which names no layer; at least one is needed. Use {FORMS}.")
    twice = [str(layer) for layer, following in pairwise(chosen) if layer == following]
    if twice:
        raise ConfigError(f"{op}: layers {selector!r} names layer {twice[0]} twice; each counts once.")
    return chosen


def _from_text(selector: str, layers: int, op: str) -> list[int]:
    """Return the layer numbers of a selector that is a string, such as "top:4"; see `select` for `layers` and `op`.

    Raises ConfigError if the string is not a selector, selects nothing, or has a range that runs backwards, and
    LayerIndexError if a layer does not exist.
    """
    text = selector.strip()
    if text == "all":
        return list(range(layers))
    if re.fullmatch(r"\d{1,9}", text):
        return [_index(int(text), layers, op)]
    if end := re.fullmatch(r"(bottom|top):(\d{1,9})", text):
        count = int(end[2])
        if count == 0:
            raise ConfigError(f"{op}: '{text}' names no layer; at least one is needed. Use '{end[1]}:1' or more.")
        _index(count - 1, layers, op)
        return list(range(layers))[:count] if end[1] == "bottom" else list(range(layers))[-count:]
    if span := re.fullmatch(r"(\d{1,9})-(\d{0,9})", text):
        low, high = span.groups()
        first, last = _index(int(low), layers, op), _index(int(high), layers, op) if high else layers - 1
        if first > last:
            raise ConfigError(f"{op}: '{text}' is descending; a range must ascend. Use '{high}-{low}'.")
        return list(range(first, last + 1))
    raise ConfigError(f"{op}: layers is {selector!r}, which is not a layer selector. Use {FORMS}.")


def _index(layer: int, layers: int, op: str) -> int:
    """Return a layer's number from 0; a negative one counts from the top.

    Raises LayerIndexError, about the operation `op`, if there are not so many layers (`layers` is their number).
    """
    if not -layers <= layer < layers:
        raise LayerIndexError(op=op, got=layer, layers=layers)
    return layer % layers


def ranges(layers: Sequence[int]) -> str:
    """Return ascending layer numbers as text, with runs of numbers joined: "1-6", "0, 3-5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


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
        scope: The innermost module around all points that is called once per pass, preferably one that gets the
            attention mask. Its call begins a pass over the stack.
        scope_path: Dotted name of `scope` in the model.
        run: All modules with weights that the last layer depends on, in order of registration. They are the same for a
            backbone alone and inside a model with a head.
        tower: The part of the model that runs this stack alone, in models like CLIP; else None.
        needs_tokens: Whether reading states needs the number of tokens; see `Form`.
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
        return (
            f"LayerStack('{self.name}', depth={self.depth}, width={self.width})"  # the default would print all modules
        )

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


def by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> module for all modules of a model, each module once; the path of the model itself is ""."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


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


def alike(value: Tensor, state: Tensor, tolerance: float) -> bool:
    """Return whether two tensors have equal shapes and differ by at most `tolerance` times the maximum of `|state|`."""
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
    """Return the name of the stack whose tower reads the first known name in `inputs` (names of the model's arguments).

    None if the model has no towers, or no tower reads any of `inputs`.
    """
    towers = {name: getattr(stack.tower, "main_input_name", None) for name, stack in stacks.items()}
    return next((name for known in inputs for name, main_input in towers.items() if main_input == known), None)


MOVES = ("keep", "drop", "duplicate")  # edits that give blocks other numbers; their settings have the new order


class Move(Protocol):
    """The attributes of an `editing.record.Edit` that this module uses; see there."""

    @property
    def kind(self) -> str:
        """Name of the kind of edit, such as "truncate" or one of `MOVES`."""
        ...

    @property
    def stack(self) -> str:
        """Name of the stack that was changed."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Numbers of the edited layers; for the kind "truncate", of those that were cut off."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """The arguments of the edit.

        Edits whose kind is in `MOVES` have the "order" of the blocks and the "path" of their list.
        """
        ...


def order_of(edit: Move) -> list[int] | None:
    """Return the blocks that a stack has after an edit, as numbers from before the edit; None if it moves no blocks.

    A number that occurs twice stands for a block and its copy.
    """
    if edit.kind == "truncate":
        return list(range(1, min(edit.layers, default=1)))
    return list(edit.settings["order"]) if edit.kind in MOVES else None


def name_then(made: Sequence[Move], number: int, name: str) -> str:
    """Return the name that a parameter, now called `name`, had after edit `number` in `made`, the list of all edits.

    For a copy, it is the name of the parameter that was copied.
    """
    for later in reversed(made[number + 1 :]):
        path, order = later.settings.get("path"), order_of(later)
        if path and order and name.startswith(f"{path}."):
            place, _, rest = name.removeprefix(f"{path}.").partition(".")
            if place.isdecimal() and not is_first(rest, later.settings.get("first", ())):
                name = f"{path}.{order[int(place)] - 1}.{rest}"
    return name


def moved(name: str, edit: Move) -> list[str]:
    """Return a parameter's names after an edit that moves blocks: several if it was copied, [] if it was dropped.

    If the edit has no path of blocks, the name stays.
    """
    path = edit.settings["path"]
    return [name] if path is None else names_after(name, path, edit.settings["order"], edit.settings.get("first", ()))


def names_after(name: str, path: str, order: Sequence[int], first: Sequence[str] = ()) -> list[str]:
    """Return the new names of a parameter after the blocks at `path` were put in the order `order`.

    `order` has the blocks' old numbers, from 1. There are several names if the parameter's block was copied, and none
    if the block was dropped. A parameter outside these blocks keeps its name. `first` are paths, relative to a block,
    of parts that always belong to the first block.
    """
    if not name.startswith(f"{path}."):
        return [name]
    place, _, rest = name.removeprefix(f"{path}.").partition(".")
    if not place.isdecimal():
        return [name]
    if is_first(rest, first):
        return [f"{path}.0.{rest}"]
    return [f"{path}.{new}.{rest}" for new, layer in enumerate(order) if layer == int(place) + 1]


def is_first(name: str, first: Iterable[str]) -> bool:
    """Return whether a path relative to a block lies in one of the paths `first`. These may contain wildcards."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in first)
