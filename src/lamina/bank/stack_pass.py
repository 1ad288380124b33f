"""One pass of the model over one stack, read by any number of readers, and the ways to take part in a run of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lamina.bank.reader import ReaderModule, ReaderOutput
from lamina.bank.segments import segments_of, separators_of
from lamina.errors import ConfigError
from lamina.fusion.base import LayerView, Stream, fed
from lamina.layers import LayerStack, Site, at_site, select
from lamina.layers.hooks import OnStart, OnState, arguments, token_mask, watch
from lamina.layers.towers import tower_inputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel


States = dict[str, dict[int, Tensor]]  # stack -> layer -> [batch, tokens, width]


class StackPass:
    """Feeds each state to the readers that need it, at the moment it exists, then lets it go.

    Readers on the same layers whose fusions have the same `group` run as one stream.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stack: LayerStack,
        readers: Mapping[str, ReaderModule],
        *,
        grad: bool,
        processor: Any = None,
    ) -> None:
        self.model, self.stack, self.readers, self.processor = model, stack, readers, processor
        self.mask: Tensor | None = None  # of the tokens, as the model was given it; None: all are real
        self._grad = grad
        self._ids: Tensor | None = None  # of the tokens, where a reader asks which text of a pair each is of
        self._real: Tensor | None = None  # True at real tokens, once a state came
        self._segments: Tensor | None = None  # which text each token is of, once a state came; None: nobody asks
        groups: dict[object, list[str]] = defaultdict(list)
        for name, reader in readers.items():
            group = reader.fusion.group()
            groups[name if group is None else (type(reader.fusion), reader.layers, group)].append(name)
        self._streams: list[tuple[list[str], Stream]] = []
        self._takers: dict[int, dict[Site, list[tuple[Stream, int]]]] = defaultdict(lambda: defaultdict(list))
        for names in groups.values():
            fusions = [readers[name].fusion for name in names]
            with torch.set_grad_enabled(grad):
                stream = fusions[0].stream(fusions)
            self._streams.append((names, stream))
            layers = readers[names[0]].layers
            for index in sorted({index for fusion in fusions for index in fusion.active_layers()}):
                self._takers[layers[index]][fusions[0].config.site].append((stream, index))
        sites: set[Site] = {site for takers in self._takers.values() for site in takers if site != "output"}
        self._sites: dict[Site, LayerStack] = {site: at_site(model, stack, site) for site in sites}
        self.layers = sorted(self._takers)  # that are needed
        self._seen: list[int] = []
        self._inside: dict[tuple[Site, int], Tensor] = {}  # what was read within the block that runs

    def again(self, readers: Mapping[str, ReaderModule] | None = None) -> StackPass:
        """A new pass over the stack, without gradients, for all or some of the readers."""
        members = self.readers if readers is None else readers
        return StackPass(self.model, self.stack, members, grad=False, processor=self.processor)

    def begin(
        self, batch: Mapping[str, Any], args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> None:
        """Note what the model was called with, and the stack, if known: which tokens are real, and of which text.

        A pass that goes on from a cache reads its own tokens alone, the last of the mask.

        Raises:
            ConfigError: If that cannot be told.
        """
        batch = tower_inputs(self.stack, batch)
        self.mask, own = token_mask(self.stack, batch, args, kwargs), arguments(self.stack.scope, args, kwargs or {})
        if self.mask is not None and self.stack.name != "encoder":  # of a pass that goes on from a cache, it is of both
            self.mask = self.mask[:, past_tokens(batch) or past_tokens(own) :]
        key = "decoder_input_ids" if self.stack.name == "decoder" else "input_ids"
        ids = batch.get(key, own.get("input_ids"))
        if isinstance(ids, Tensor):
            self._ids = ids if any(reader.config.fusion.reads_pairs for reader in self.readers.values()) else None
        else:
            refuse_pairs(self.readers, key)

    @contextmanager
    def hooked(self, on_state: OnState, on_start: OnStart) -> Iterator[None]:
        """Call back as `watch` does, and show the fusions that need them the inputs of the model's blocks."""
        with ExitStack() as hooks:
            for reader in self.readers.values():
                hooks.enter_context(reader.fusion.block_inputs(self.stack))
            for site, seen in self._sites.items():
                own = [layer for layer, takers in self._takers.items() if site in takers]
                hooks.enter_context(watch(seen, own, partial(self._note, site)))
            hooks.enter_context(watch(self.stack, self.layers, on_state, on_start))
            yield

    def _note(self, site: Site, layer: int, state: Tensor) -> None:
        self._inside[site, layer] = state

    def on_state(self, layer: int, state: Tensor) -> bool:
        """Hand one state on; True once the last layer that anyone needs was seen."""
        self._seen.append(layer)
        check_layers_seen("bank", self.stack, self.layers[: len(self._seen)], self._seen)
        if self._real is None:
            self._real = real_tokens(self.mask, state, self.model)
            if self._ids is not None:
                self._segments = segments_of(self._ids.to(state.device), separators_of(self.processor), self._real)
        segments = None if self._segments is None else self._segments.to(state.device)
        with torch.set_grad_enabled(self._grad):
            for site, takers in self._takers[layer].items():
                seen = state if site == "output" else self._inside.pop((site, layer))
                view = LayerView(seen, self._real, segments)
                for stream, index in takers:
                    stream.step(index, view)
        return len(self._seen) == len(self.layers)

    def features(self) -> dict[str, Tensor]:
        """What each reader's fusion makes of the states that were seen, by name."""
        check_layers_seen("bank", self.stack, self.layers, self._seen)
        features: dict[str, Tensor] = {}
        with torch.set_grad_enabled(self._grad):
            for names, stream in self._streams:
                features |= zip(names, stream.finish(fed(self._real)), strict=True)
        return features

    def finish(self, labels: Mapping[str, Tensor] | None = None) -> dict[str, ReaderOutput]:
        """What each reader says, by name."""
        features = self.features()
        return run_heads(self.readers, features, fed(self._real), labels or {}, grad=self._grad)


def past_tokens(batch: Mapping[str, Any]) -> int:
    """How many tokens the cache that a pass is given holds."""
    length = getattr(batch.get("past_key_values"), "get_seq_length", int)
    return int(length())


def refuse_pairs(readers: Mapping[str, ReaderModule], key: str) -> None:
    """Raise ConfigError if a reader asks which of two texts each token is of; the batch has no `key` to tell."""
    for name, reader in readers.items():
        if reader.config.fusion.reads_pairs:
            came = f"reader '{name}' compares two texts, and the batch has no {key} to tell them apart"
            raise ConfigError(f"bank: {came}. Call the model with them.")


def run_heads(
    readers: Mapping[str, ReaderModule],
    features: Mapping[str, Tensor],
    real: Bool[Tensor, "batch tokens"],
    labels: Mapping[str, Tensor],
    *,
    grad: bool,
    together: bool = False,
) -> dict[str, ReaderOutput]:
    """What readers say of features, by name; alike heads run as one, some for the positions that have labels alone.

    On a CPU without gradients heads that read every token run one by one, which keeps them in its caches, unless they
    are to run `together`, which is quicker for few tokens.
    """
    given = {name: _said_once(readers[name], part) for name, part in features.items()}
    logits: dict[str, Tensor] = {}
    with torch.set_grad_enabled(grad):
        for names in _head_groups(readers, given, together=together or grad or real.is_cuda):
            first, heads = names[0], [readers[name].head for name in names]
            mask = real if given[first].shape[1] == real.shape[1] else real.new_ones(real.shape[0], 1)
            if len(heads) == 1:
                logits[first] = readers[first].logits(given[first], mask, labels.get(first))
            else:
                stacked = _stacked([given[name] for name in names])
                logits |= zip(names, heads[0].many(heads, stacked, mask), strict=True)
    return {name: ReaderOutput(logits[name], real) for name in readers}


def _said_once(reader: ReaderModule, features: Float[Tensor, "batch tokens dim"]) -> Tensor:
    """Features, of a whole text where they are said to every token alike: one token's say it all."""
    return features[:, :1] if reader.head.reads_first and features.stride(1) == 0 else features


def _head_groups(
    readers: Mapping[str, ReaderModule], features: Mapping[str, Tensor], *, together: bool
) -> list[list[str]]:
    """Names of readers whose heads run as one; those that read the same features are apart from the others."""
    shared = Counter(map(id, features.values()))
    groups: dict[object, list[str]] = defaultdict(list)
    for name, given in features.items():
        head = readers[name].head
        group = head.group() if together or given.shape[1] == 1 else None
        same = id(given) if shared[id(given)] > 1 else None
        groups[name if group is None else (type(head), group, given.shape[1:], given.dtype, same)].append(name)
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

    def on_state(stack_pass: StackPass, layer: int, state: Tensor) -> None:
        nonlocal left
        if stack_pass.on_state(layer, state):
            left -= 1
            if left == 0 and stop is not None:
                raise stop

    def start(stack_pass: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        stack_pass.begin(batch, args, kwargs)

    with ExitStack() as hooks:
        for stack_pass in passes:
            hooks.enter_context(stack_pass.hooked(partial(on_state, stack_pass), partial(start, stack_pass)))
        yield


@contextmanager
def recording(layers: Mapping[LayerStack, Sequence[int]], stop: BaseException) -> Iterator[States]:
    """Keep the states of some layers, by stack and layer; raise `stop` after the last."""
    wanted = [(stack, select(list(chosen), stack.layers, op="bank.record_states")) for stack, chosen in layers.items()]
    states: States = {stack.name: {} for stack, _ in wanted}

    def on_state(name: str, layer: int, state: Tensor) -> None:
        states[name][layer] = state
        if all(len(states[stack.name]) == len(chosen) for stack, chosen in wanted):
            raise stop

    with ExitStack() as hooks:
        for stack, chosen in wanted:
            hooks.enter_context(watch(stack, chosen, partial(on_state, stack.name)))
        yield states
    for stack, chosen in wanted:
        check_layers_seen("bank.record_states", stack, chosen, list(states[stack.name]))


def check_layers_seen(op: str, stack: LayerStack, needed: Sequence[int], seen: Sequence[int]) -> None:
    """Raise ConfigError unless the layers that a pass came to are those that are needed, in their order."""
    if list(needed) != list(seen):
        layer = next(at if layer is None else layer for layer, at in zip_longest(needed, seen) if layer != at)
        came = f"layer {layer} of the stack '{stack.name}' did not run in its turn"
        raise ConfigError(f"{op}: {came}; it is needed. Run the whole model, with the blocks that were found in it.")


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
    if mask.shape[0] == shape[0] and mask.shape[1] != shape[1]:
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
    if count is None or int(count(mask.shape[1])) != frames:
        return mask  # not a mask of samples, or the states are fewer than the model's own frames
    if convert is None:  # Whisper, whose encoder takes no mask: two columns of a spectrogram make a frame
        return torch.arange(frames, device=mask.device) < count(mask.sum(1, keepdim=True))
    return convert(frames, mask)
