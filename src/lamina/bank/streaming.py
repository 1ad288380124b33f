"""One pass of the model over one stack, read by any number of readers, and the ways to take part in a run of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lamina.bank.reader import BankOutput, ReaderModule, ReaderOutput
from lamina.errors import ConfigError
from lamina.fusion.base import LayerView, Stream
from lamina.layers import LayerStack, select
from lamina.layers.hooks import OnStart, OnState, argument, token_mask, watch

if TYPE_CHECKING:
    from jaxtyping import Bool
    from transformers import PreTrainedModel


States = dict[str, dict[int, Tensor]]  # stack -> layer -> [batch, tokens, width]


class StackPass:
    """Feeds each state to the readers that need it, at the moment it exists, then lets it go.

    Readers on the same layers whose fusions have the same `group` run as one stream.
    """

    def __init__(self, stack: LayerStack, readers: Mapping[str, ReaderModule], *, grad: bool) -> None:
        self.stack, self.readers = stack, readers
        self.mask: Tensor | None = None  # of the tokens, as the model was given it; None: all are real
        self._grad = grad
        self._place: tuple[torch.Size, torch.device] | None = None  # batch and tokens of the states
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
        self.layers = sorted(self._takers)  # that are needed

    @contextmanager
    def hooked(self, on_state: OnState, on_start: OnStart) -> Iterator[None]:
        """Call back as `watch` does, and show the fusions that need them the inputs of the model's blocks."""
        with ExitStack() as hooks:
            for reader in self.readers.values():
                hooks.enter_context(reader.fusion.block_inputs(self.stack))
            hooks.enter_context(watch(self.stack, self.layers, on_state, on_start))
            yield

    def take(self, layer: int, state: Tensor) -> bool:
        """Hand one state on; True once the last layer that anyone needs was taken."""
        self._place = state.shape[:2], state.device
        view = LayerView(state)
        with torch.set_grad_enabled(self._grad):
            for stream, index in self._takers[layer]:
                stream.step(index, view)
        return layer == self.layers[-1]

    def finish(self, model: PreTrainedModel, labels: Mapping[str, Tensor] | None = None) -> dict[str, ReaderOutput]:
        """What each reader says, by name; alike heads run as one, some for the positions that have labels alone."""
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
                first, heads = names[0], [self.readers[name].head for name in names]
                if len(heads) == 1:
                    logits[first] = self.readers[first].logits(features[first], real, (labels or {}).get(first))
                else:
                    stacked = torch.stack([features[name] for name in names])
                    logits |= zip(names, heads[0].many(heads, stacked, real), strict=True)
        return {name: ReaderOutput(logits[name], real) for name in self.readers}

    def _real(self, model: PreTrainedModel) -> Bool[Tensor, "batch tokens"]:
        """True at real tokens; a row without any keeps its first, so that its result is defined."""
        if self._place is None:
            came = f"the pass never reached layer {self.layers[0]}, so no state was read"
            raise ConfigError(f"bank: {came}; run the whole model.")
        (shape, device), mask = self._place, self.mask
        if mask is None:
            return torch.ones(shape, dtype=torch.bool, device=device)
        if len(mask) == shape[0] and mask.shape[1] != shape[1]:
            mask = _frame_mask(mask, shape[1], model)
        if mask.shape != shape:
            came = f"the attention mask is {tuple(mask.shape)}; the states have batch and tokens {tuple(shape)}"
            raise ConfigError(f"bank: {came}. Give a mask [batch, tokens] of the tokens that the model reads.")
        real = mask.to(device).bool().clone()
        real[:, 0] |= ~real.any(1)
        return real


@contextmanager
def attach(passes: Sequence[StackPass], batch: Mapping[str, Any], stop: BaseException | None = None) -> Iterator[None]:
    """Let passes over several stacks take part in a run of the model on `batch`; after all last states raise `stop`."""
    left = len(passes)

    def take(stack_pass: StackPass, layer: int, state: Tensor) -> None:
        nonlocal left
        if stack_pass.take(layer, state):
            left -= 1
            if left == 0 and stop is not None:
                raise stop

    def start(stack_pass: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        stack_pass.mask = token_mask(stack_pass.stack, batch, args, kwargs)

    with ExitStack() as hooks:
        for stack_pass in passes:
            hooks.enter_context(stack_pass.hooked(partial(take, stack_pass), partial(start, stack_pass)))
        yield


@contextmanager
def recording(layers: Mapping[LayerStack, Sequence[int]], stop: BaseException) -> Iterator[States]:
    """Keep the states of some layers, by stack and layer; raise `stop` after the last."""
    wanted = [(stack, select(list(chosen), stack.layers, op="bank.record_states")) for stack, chosen in layers.items()]
    states: States = {stack.name: {} for stack, _ in wanted}

    def take(name: str, layer: int, state: Tensor) -> None:
        states[name][layer] = state
        if all(len(states[stack.name]) == len(chosen) for stack, chosen in wanted):
            raise stop

    with ExitStack() as hooks:
        for stack, chosen in wanted:
            hooks.enter_context(watch(stack, chosen, partial(take, stack.name)))
        yield states


@contextmanager
def listening(model: PreTrainedModel, passes: Sequence[StackPass]) -> Iterator[BankOutput]:
    """Read the model's own passes, one per stack, for as long as the context lasts; the output fills as it runs."""
    heard = BankOutput()
    batch: dict[str, Any] = {}  # the masks that the running call of the whole model was given
    running: dict[StackPass, StackPass] = {}  # the present pass of each; none where its readers have heard one already

    def before(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        for name in ("attention_mask", "decoder_attention_mask"):
            batch[name] = argument(module, name, args, kwargs)

    def start(template: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        running.pop(template, None)
        if not any(name in heard for name in template.readers):
            running[template] = StackPass(template.stack, template.readers, grad=False)
            running[template].mask = token_mask(template.stack, batch, args, kwargs)

    def take(template: StackPass, layer: int, state: Tensor) -> None:
        if template in running and running[template].take(layer, state):
            heard.readers.update(running.pop(template).finish(model))

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        hooks.enter_context(model.register_forward_hook(lambda *_: batch.clear(), always_call=True))
        for stack_pass in passes:
            hooks.enter_context(stack_pass.hooked(partial(take, stack_pass), partial(start, stack_pass)))
        yield heard


def _frame_mask(mask: Tensor, frames: int, model: PreTrainedModel) -> Tensor:
    """The mask of a speech model's frames, from the mask of its samples; other masks come back as they are."""
    convert = getattr(model.base_model, "_get_feature_vector_attention_mask", None)
    count = getattr(model.base_model, "_get_feat_extract_output_lengths", None)
    if convert is None or count is None or int(count(mask.shape[1])) != frames:
        return mask  # not a mask of samples, or the states are fewer than the model's own frames
    return convert(frames, mask)
