"""Forms other than `[batch, tokens, width]` in which a model keeps the state of a layer, and how to convert them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from lamina.layers.probe_input import Probe


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
    """Return `form.state(value, tokens)`, or `value` itself if `form` is None."""
    return value if form is None else form.state(value, tokens)


def count_tokens(arguments: Mapping[str, object]) -> int | None:
    """Return the number of tokens that a module receives, from its arguments by name; None if it reads no tokens.

    Token ids and embeddings are looked up first, the encoder's before the decoder's, and the mask last.
    """
    for name in _TOKENS:
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.ndim >= 2:
            return value.shape[1]
    return None


_TOKENS = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "attention_mask")


def first_tensor(state: object) -> object:
    """Return the first tensor if `state` is a tuple, whose second entry is the state of global tokens.

    Anything else, which should be a tensor, is returned as it is.
    """
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
    have this form, because some encoders pool it over time. States of images never have it.
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

    All rows of the batch are equal where they are padded: at the end ("first": keep the first tokens) or at the start.
    None if they are equal on neither side, or if `state` has no values (meta device).
    """
    if state.is_meta:
        return None
    after, before = state[:, tokens:], state[:, : state.shape[1] - tokens]
    if bool((after == after[:1]).all()):
        return Form("first")
    return Form("last") if bool((before == before[:1]).all()) else None
