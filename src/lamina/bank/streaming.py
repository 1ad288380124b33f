"""One pass of the model over one stack, read by any number of readers, and the ways to take part in a run of it."""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lamina.bank.reader import BankOutput, ReaderModule, ReaderOutput
from lamina.errors import ConfigError
from lamina.fusion.base import LayerView, Stream, fed
from lamina.layers import LayerStack, select
from lamina.layers.hooks import ContextHooks, OnStart, OnState, arguments, token_mask, watch
from lamina.layers.wrappers import uncompiled

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel


States = dict[str, dict[int, Tensor]]  # stack -> layer -> [batch, tokens, width]


class StackPass:
    """Feeds each state to the readers that need it, at the moment it exists, then lets it go.

    Readers on the same layers whose fusions have the same `group` run as one stream.
    """

    def __init__(
        self, model: PreTrainedModel, stack: LayerStack, readers: Mapping[str, ReaderModule], *, grad: bool
    ) -> None:
        self.model, self.stack, self.readers = model, stack, readers
        self.mask: Tensor | None = None  # of the tokens, as the model was given it; None: all are real
        self._grad = grad
        self._real: Tensor | None = None  # True at real tokens, once a state came
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
        self._taken: list[int] = []

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
        self._taken.append(layer)
        _check_taken("bank", self.stack, self.layers[: len(self._taken)], self._taken)
        if self._real is None:
            self._real = real_tokens(self.mask, state, self.model)
        view = LayerView(state, self._real)
        with torch.set_grad_enabled(self._grad):
            for stream, index in self._takers[layer]:
                stream.step(index, view)
        return len(self._taken) == len(self.layers)

    def finish(self, labels: Mapping[str, Tensor] | None = None) -> dict[str, ReaderOutput]:
        """What each reader says, by name; alike heads run as one, some for the positions that have labels alone."""
        _check_taken("bank", self.stack, self.layers, self._taken)
        real = fed(self._real)
        with torch.set_grad_enabled(self._grad):
            features: dict[str, Tensor] = {}
            for names, stream in self._streams:
                features |= zip(names, stream.finish(real), strict=True)
            for name in features:
                if self.readers[name].head.reads_first and features[name].stride(1) == 0:
                    features[name] = features[name][:, :1]  # of a whole text, said to every token: one says it all
            logits: dict[str, Tensor] = {}
            for names in self._head_groups(features):
                first, heads = names[0], [self.readers[name].head for name in names]
                mask = real if features[first].shape[1] == real.shape[1] else real.new_ones(len(real), 1)
                if len(heads) == 1:
                    logits[first] = self.readers[first].logits(features[first], mask, (labels or {}).get(first))
                else:
                    given = _stacked([features[name] for name in names])
                    logits |= zip(names, heads[0].many(heads, given, mask), strict=True)
        return {name: ReaderOutput(logits[name], real) for name in self.readers}

    def _head_groups(self, features: Mapping[str, Tensor]) -> list[list[str]]:
        """Names of readers whose heads run as one; those that read the same features are apart from the others."""
        together = self._grad or next(iter(features.values())).is_cuda  # one by one, heads stay in a CPU's caches
        shared = Counter(map(id, features.values()))
        groups: dict[object, list[str]] = defaultdict(list)
        for name, given in features.items():
            head = self.readers[name].head
            group = head.group() if together else None
            same = id(given) if shared[id(given)] > 1 else None
            groups[name if group is None else (type(head), group, given.shape, given.dtype, same)].append(name)
        return list(groups.values())


def _stacked(parts: Sequence[Tensor]) -> Float[Tensor, "readers batch tokens dim"]:
    """Features of several readers as one; those that all read are not copied."""
    if all(part is parts[0] for part in parts):
        return parts[0].expand(len(parts), *parts[0].shape)
    return torch.stack(list(parts))


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
    for stack, chosen in wanted:
        _check_taken("bank.record_states", stack, chosen, list(states[stack.name]))


def _check_taken(op: str, stack: LayerStack, needed: Sequence[int], taken: Sequence[int]) -> None:
    """Raise ConfigError unless the layers that a pass came to are those that are needed, in their order."""
    if list(needed) != list(taken):
        layer = next(at if layer is None else layer for layer, at in zip_longest(needed, taken) if layer != at)
        came = f"layer {layer} of the stack '{stack.name}' did not run in its turn"
        raise ConfigError(f"{op}: {came}; it is needed. Run the whole model, with the blocks that were found in it.")


@contextmanager
def listening(model: PreTrainedModel, passes: Sequence[StackPass]) -> Iterator[BankOutput]:
    """Read the model's own passes, one per stack, for as long as the context lasts; the output fills as it runs."""
    heard = BankOutput()
    # by thread, since tasks of one context may run the model at once: what the modules around a stack, outermost first,
    # are being called with; the present pass of each stack, none where its readers have heard one already
    calls: dict[int, dict[nn.Module, dict[str, object]]] = defaultdict(dict)
    running: dict[tuple[int, StackPass], StackPass] = {}

    def before(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        given = arguments(module, args, kwargs)
        calls[get_ident()][module] = {name: value for name, value in given.items() if value is not None}

    def start(template: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        running.pop((get_ident(), template), None)
        if heard.readers.keys().isdisjoint(template.readers):
            running[get_ident(), template] = begun = StackPass(model, template.stack, template.readers, grad=False)
            begun.mask = token_mask(template.stack, ChainMap(*calls[get_ident()].values()), args, kwargs)

    def take(template: StackPass, layer: int, state: Tensor) -> None:
        begun = running.get((get_ident(), template))
        if begun is not None and begun.take(layer, state):
            heard.readers.update(running.pop((get_ident(), template)).finish() | heard.readers)

    def end(template: StackPass, *_: object) -> None:
        if begun := running.pop((get_ident(), template), None):
            begun.finish()  # tells which layer is missing

    with uncompiled(), ContextHooks() as hooks:
        for stack_pass in passes:
            hooks.enter_context(stack_pass.hooked(partial(take, stack_pass), partial(start, stack_pass)))
            hooks.add(stack_pass.stack.scope.register_forward_hook, partial(end, stack_pass))
        paths = [stack_pass.stack.scope_path.split(".") for stack_pass in passes]
        for around in dict.fromkeys(".".join(path[:count]) for path in paths for count in range(len(path))):
            module = model.get_submodule(around)
            hooks.add(module.register_forward_pre_hook, before, with_kwargs=True, prepend=True)
            hooks.add(module.register_forward_hook, lambda ran, *_: calls[get_ident()].pop(ran, None), always_call=True)
        yield heard


def real_tokens(
    mask: Tensor | None, state: Float[Tensor, "batch tokens width"], model: PreTrainedModel
) -> Bool[Tensor, "batch tokens"]:
    """True at real tokens of a state, by what `token_mask` gave; a row without any keeps its first.

    Raises:
        ConfigError: If the mask has another shape.
    """
    shape, device = state.shape[:2], state.device
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


def _frame_mask(mask: Tensor, frames: int, model: PreTrainedModel) -> Tensor:
    """The mask of a speech model's frames, from the mask of its samples; other masks come back as they are."""
    convert = getattr(model.base_model, "_get_feature_vector_attention_mask", None)
    count = getattr(model.base_model, "_get_feat_extract_output_lengths", None)
    if convert is None or count is None or int(count(mask.shape[1])) != frames:
        return mask  # not a mask of samples, or the states are fewer than the model's own frames
    return convert(frames, mask)
