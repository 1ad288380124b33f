"""One pass of the model over one stack, read by any number of readers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.bank.reader import ReaderModule, ReaderOutput
from lamina.errors import ConfigError
from lamina.fusion.base import LayerView, Stream
from lamina.layers import LayerStack, select
from lamina.layers.hooks import token_mask, watch

if TYPE_CHECKING:
    from jaxtyping import Bool
    from transformers import PreTrainedModel


class StackPass:
    """Feeds each state to the readers that need it, at the moment it exists, then lets it go.

    Readers on the same layers whose fusions have the same `group` run as one stream.

    Attributes:
        layers: The layers that are needed, ascending.
        mask: Of the tokens that the model reads, as the model was given it; None: all are real.
    """

    def __init__(self, stack: LayerStack, readers: Mapping[str, ReaderModule], *, grad: bool) -> None:
        self.stack, self.readers = stack, readers
        self.mask: Tensor | None = None
        self._grad = grad
        self._shape: torch.Size | None = None
        self._device: torch.device | None = None
        groups: dict[object, list[str]] = defaultdict(list)
        for name, reader in readers.items():
            group = reader.fusion.group()
            groups[name if group is None else (type(reader.fusion), reader.layers, group)].append(name)
        self._streams: list[tuple[list[str], Stream]] = []
        self._takers: dict[int, list[tuple[Stream, int]]] = defaultdict(list)
        for names in groups.values():
            fusions = [readers[name].fusion for name in names]
            with torch.set_grad_enabled(grad):
                stream = fusions[0].stream(fusions)
            self._streams.append((names, stream))
            layers = readers[names[0]].layers
            for index in sorted({index for fusion in fusions for index in fusion.active_layers()}):
                self._takers[layers[index]].append((stream, index))
        self.layers = sorted(self._takers)

    @contextmanager
    def block_inputs(self) -> Iterator[None]:
        """Let the fusions that need the inputs of the model's blocks see them."""
        with ExitStack() as watched:
            for reader in self.readers.values():
                if reader.config.fusion.needs_block_inputs:
                    watched.enter_context(reader.fusion.block_inputs(self.stack))
            yield

    def take(self, layer: int, state: Tensor) -> bool:
        """Hand one state on; True once the last layer that anyone needs was taken."""
        self._shape, self._device = state.shape, state.device
        view = LayerView(state)
        with torch.set_grad_enabled(self._grad):
            for stream, index in self._takers[layer]:
                stream.step(index, view)
        return layer == self.layers[-1]

    def finish(self, model: PreTrainedModel, labels: Mapping[str, Tensor] | None = None) -> dict[str, ReaderOutput]:
        """What each reader says, by name; alike heads run as one.

        Args:
            model: The model.
            labels: Name -> labels, for heads that compute the logits of labelled positions alone.

        Raises:
            ConfigError: If no state was taken, or the mask is not one of these states.
        """
        real = self._real(model)
        with torch.set_grad_enabled(self._grad):
            features: dict[str, Tensor] = {}
            for names, stream in self._streams:
                features |= zip(names, stream.finish(real), strict=True)
            groups: dict[object, list[str]] = defaultdict(list)
            together = self._grad or real.is_cuda  # on a CPU without gradients, heads one by one stay in its caches
            for name in features:
                head = self.readers[name].head
                group = head.group() if together else None
                groups[name if group is None else (type(head), group, features[name].dtype)].append(name)
            logits: dict[str, Tensor] = {}
            for names in groups.values():
                logits |= self._logits(names, features, real, (labels or {}).get(names[0]))
        return {name: ReaderOutput(logits[name], real) for name in self.readers}

    def _logits(
        self, names: list[str], features: Mapping[str, Tensor], real: Tensor, labels: Tensor | None
    ) -> dict[str, Tensor]:
        heads = [self.readers[name].head for name in names]
        if len(heads) == 1:
            return {names[0]: self.readers[names[0]].logits(features[names[0]], real, labels)}
        stacked = torch.stack([features[name] for name in names])
        return dict(zip(names, heads[0].many(heads, stacked, real), strict=True))

    def _real(self, model: PreTrainedModel) -> Bool[Tensor, "batch tokens"]:
        """True at real tokens; a row without any keeps its first, so that its result is defined."""
        if self._shape is None:
            raise ConfigError(
                f"bank: the pass never reached layer {self.layers[0]}, so no state was read; run the whole model."
            )
        shape, mask = self._shape[:2], self.mask
        if mask is None:
            return torch.ones(shape, dtype=torch.bool, device=self._device)
        if len(mask) == shape[0] and mask.shape[1] != shape[1]:
            mask = _frame_mask(mask, shape[1], model)
        if mask.shape != shape:
            raise ConfigError(
                f"bank: the attention mask is {tuple(mask.shape)}; the states have batch and tokens {tuple(shape)}. "
                "Give a mask [batch, tokens] of the tokens that the model reads."
            )
        real = mask.to(self._device).bool().clone()
        real[:, 0] |= ~real.any(1)
        return real


class StateRecorder:
    """Takes part in a pass only to keep the states of some layers."""

    mask: Tensor | None = None

    def __init__(self, stack: LayerStack, layers: Sequence[int]) -> None:
        self.stack = stack
        self.layers = select(list(layers), stack.layers, op="bank.record_states")
        self.states: dict[int, Tensor] = {}

    @contextmanager
    def block_inputs(self) -> Iterator[None]:
        """Nothing but states is kept."""
        yield

    def take(self, layer: int, state: Tensor) -> bool:
        """Keep one state; True once all were taken."""
        self.states[layer] = state
        return len(self.states) == len(self.layers)


@contextmanager
def attach(
    passes: Sequence[StackPass | StateRecorder], batch: Mapping[str, Any], stop: BaseException | None = None
) -> Iterator[None]:
    """Let passes over several stacks take part in one run of the model on `batch`.

    `stop` is raised once every pass has taken its last state; None: the model runs to its end.
    """
    left = len(passes)

    def take(stack_pass: StackPass | StateRecorder, layer: int, state: Tensor) -> None:
        nonlocal left
        if stack_pass.take(layer, state):
            left -= 1
            if left == 0 and stop is not None:
                raise stop

    def start(stack_pass: StackPass | StateRecorder, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if isinstance(stack_pass, StackPass):
            stack_pass.mask = token_mask(stack_pass.stack, batch, args, kwargs)

    with ExitStack() as hooks:
        for stack_pass in passes:
            hooks.enter_context(stack_pass.block_inputs())
            hooks.enter_context(
                watch(stack_pass.stack, stack_pass.layers, partial(take, stack_pass), partial(start, stack_pass))
            )
        yield


def _frame_mask(mask: Tensor, frames: int, model: PreTrainedModel) -> Tensor:
    """The mask of a speech model's frames, from the mask of its samples; other masks come back as they are."""
    convert = getattr(model.base_model, "_get_feature_vector_attention_mask", None)
    count = getattr(model.base_model, "_get_feat_extract_output_lengths", None)
    if convert is None or count is None or int(count(mask.shape[1])) != frames:
        return mask  # not a mask of samples, or the states are fewer than the model's own frames
    return convert(frames, mask)
