"""One forward pass over one stack of the model, for the readers that read this stack."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.bank.reader import ReaderModule
from lamina.bank.segments import segments_of, separators_of
from lamina.errors import ConfigError
from lamina.fusion.base import Fusion, LayerView, Stream, is_full, require_fed
from lamina.heads.base import IGNORE
from lamina.layers import LayerStack, Site, at_site, select
from lamina.layers.hooks import ContextHooks, OnStart, OnState, arguments, token_mask, tower_inputs, watch_selected
from lamina.utils import derive_seed, seed_torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor


States = dict[str, dict[int, Tensor]]  # stack -> layer -> [batch, tokens, width]
Inputs = Mapping[str, object]  # keyword arguments of a call of the model: tensors, caches and flags
Features = Sequence[tuple[Sequence[str], Sequence[Tensor] | Tensor]]  # for each stream its readers' names and features
OnInnerState = Callable[[Site, int, Tensor], None]
_FEW = 32  # tokens up to which starting the operations of a head takes longer than computing them
# Whether a bank runs the model itself. Such a pass is not part of the main job, so no listening reader reads it.
is_internal: ContextVar[bool] = ContextVar("is_internal", default=False)


class StackPass:
    """One forward pass over one stack, for the readers that read the stack.

    The pass receives each hidden state when the model computes it (`on_state`), and gives it to the fusions that need
    it; only fusions that need all states at once keep them. Afterwards `finish` runs the heads. Fusions that read the
    same layers and have equal `group`s are computed together, by one `Stream`.

    Attributes:
        mask: Attention mask `[batch, tokens]` of the call. None: there is no padding.
        ids: Token ids `[batch, tokens]` of the call. None: it has none.
        real: True at tokens, False at padding, `[batch, tokens]`. None until the first state has come.
        layers: Numbers of the layers that at least one reader needs, ascending.

    Args:
        model: The model that is called.
        stack: The stack of the model that is read.
        readers: Reader name -> module; all of them read this stack.
        grad: Whether the readers' computations record gradients.
        processor: Tokenizer of the model; only readers of pairs need it.

    Raises:
        UnsupportedModelError: If a fusion reads inside the blocks, and the place is not found in this model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stack: LayerStack,
        readers: Mapping[str, ReaderModule],
        *,
        grad: bool,
        processor: Processor | None = None,
    ) -> None:
        self.model, self.stack, self.readers, self.processor = model, stack, readers, processor
        self.mask: Tensor | None = None
        self.grad = grad
        self.ids: Tensor | None = None
        self._types: Tensor | None = None  # token types, only if a reader compares two texts and the call has some
        self.real: Tensor | None = None
        self._is_padded = True  # False if it is known that all tokens are real
        self._segments: Tensor | None = None  # segment ids [batch, tokens], from the first state on if `_compares`
        self._compares = False  # whether a reader compares two texts
        groups: dict[object, dict[str, Fusion]] = {}
        for name, reader in readers.items():
            self._compares |= reader.config.fusion.reads_pairs
            group = reader.fusion.group() if len(readers) > 1 else None  # a single reader is computed alone
            key = name if group is None else (type(reader.fusion), reader.layers, group)
            groups.setdefault(key, {})[name] = reader.fusion
        self._streams: list[tuple[list[str], Stream]] = []
        # layer -> site in the block -> the streams that read there, each with the layer's index among its own layers
        self._routes: dict[int, dict[Site, list[tuple[Stream, int]]]] = {}
        self._sites: dict[Site, LayerStack] = {}  # site inside the blocks -> the stack as it is read there
        for members in groups.values():
            names, fusions = list(members), list(members.values())
            with torch.set_grad_enabled(grad):
                stream = fusions[0].stream(fusions)
            self._streams.append((names, stream))
            layers, site = readers[names[0]].layers, fusions[0].config.site
            if site != "output" and site not in self._sites:
                self._sites[site] = at_site(model, stack, site)
            for index in stream.active_layers(fusions):
                self._routes.setdefault(layers[index], {}).setdefault(site, []).append((stream, index))
        self.layers = sorted(self._routes)
        self._layers_seen: list[int] = []
        self._inside: dict[tuple[Site, int], Tensor] = {}  # states from within the block that runs now

    def restart(self, readers: Mapping[str, ReaderModule] | None = None) -> StackPass:
        """Return a new pass over the same stack, without gradients, for `readers`. None: all readers of this pass."""
        members = self.readers if readers is None else readers
        return StackPass(self.model, self.stack, members, grad=False, processor=self.processor)

    def renewed(self) -> StackPass:
        """Return a new pass with the same readers that reuses values which this pass computed from their parameters.

        The parameters must not change between the passes, and this pass must not record gradients; neither is checked.
        """
        fresh = copy(self)
        fresh.mask = fresh.ids = fresh._types = fresh.real = fresh._segments = None
        fresh._layers_seen, fresh._inside, fresh._streams = [], {}, []
        streams: dict[Stream, Stream] = {}
        with torch.no_grad():
            for names, stream in self._streams:
                fusions = [self.readers[name].fusion for name in names]
                streams[stream] = stream.renewed() or fusions[0].stream(fusions)
                fresh._streams.append((names, streams[stream]))
        fresh._routes = {
            layer: {site: [(streams[stream], index) for stream, index in routes] for site, routes in sites.items()}
            for layer, sites in self._routes.items()
        }
        return fresh

    def begin(self, batch: Inputs, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None) -> None:
        """Find the mask, the token ids and the token types of a pass in the arguments of the model's call.

        A pass that continues from a key-value cache reads only the new tokens, so the mask's columns for the cached
        tokens are dropped.

        Args:
            batch: Keyword arguments of the whole model, which take precedence; {} if they are not known.
            args: Positional arguments of the module whose call runs the stack, such as the model.
            kwargs: Keyword arguments of that module. None: it has none.

        Raises:
            ConfigError: If the mask does not say which tokens are padding, or a reader of pairs gets no token ids.
        """
        if self.stack.tower is not None:
            batch = tower_inputs(self.stack.tower, batch)
        self.mask = token_mask(self.stack, batch, args, kwargs)
        named = arguments(self.stack.scope, args, kwargs or {})
        if self.mask is not None and self.stack.name != "encoder":  # the mask covers the cached tokens too
            self.mask = self.mask[:, past_tokens(batch) or past_tokens(named) :]
        key = "decoder_input_ids" if self.stack.name == "decoder" else "input_ids"
        ids = batch.get(key, named.get("input_ids"))
        if isinstance(ids, Tensor):
            self.ids = ids
            types = batch.get("token_type_ids", named.get("token_type_ids"))  # those of an encoder beside a decoder
            if self._compares and isinstance(types, Tensor) and types.shape == ids.shape and key == "input_ids":
                self._types = types
        else:
            refuse_pairs(self.readers, key)

    def hook(self, hooks: ContextHooks, on_state: OnState, on_start: OnStart, on_inner_state: OnInnerState) -> None:
        """Put hooks on the model until `hooks` exits; they call the three functions.

        `on_start(args, kwargs)` is called before the stack runs, and `on_state(layer, state)` for each layer that
        readers need. Before that, `on_inner_state(site, layer, state)` gets the values inside the layer's block that
        fusions need. The hooks also record the arguments of blocks for fusions that need these.
        """
        for reader in self.readers.values():
            if reader.config.fusion.needs_block_inputs:
                hooks.enter_context(reader.fusion.block_inputs(self.stack))
        for site, stack in self._sites.items():
            layers = [layer for layer, routes in self._routes.items() if site in routes]
            watch_selected(hooks, stack, layers, partial(on_inner_state, site))
        watch_selected(hooks, self.stack, self.layers, on_state, on_start)

    def on_inner_state(self, site: Site, layer: int, state: Tensor) -> None:
        """Store the value `state` that was read at `site` inside the block of `layer`.

        The fusions use it once the block's output is computed.
        """
        self._inside[site, layer] = state

    def on_state(self, layer: int, state: Tensor) -> bool:
        """Give the state of one layer to the fusions that need it.

        Args:
            layer: The layer; the layers in `layers` must come in ascending order, each once.
            state: The hidden state `[batch, tokens, width]` of the layer.

        Returns:
            True after the last layer that any reader needs.

        Raises:
            ConfigError: If a layer was skipped, the mask does not have the shape of the state, a reader of pairs has no
                tokenizer that separates two texts, or a fusion reads inside the block and no value of it came.
        """
        self._layers_seen.append(layer)
        if self.layers[len(self._layers_seen) - 1 : len(self._layers_seen)] != [layer]:
            check_layer_order("bank", self.stack, self.layers[: len(self._layers_seen)], self._layers_seen)
        if self.real is None:
            self.real = real_tokens(self.mask, state, self.model)
            self._is_padded = not is_full(self.real)
            if self._compares and self.ids is not None:
                ids, types = self.ids.to(state.device), self._types
                types = None if types is None else types.to(state.device)
                self._segments = segments_of(ids, separators_of(self.processor), self.real, types)
        segments = None if self._segments is None else self._segments.to(state.device)
        with torch.set_grad_enabled(self.grad):
            for site, routes in self._routes[layer].items():
                if (seen := state if site == "output" else self._inside.pop((site, layer), None)) is None:
                    problem = f"a fusion reads '{site}' inside the block of layer {layer}, which was not recorded"
                    raise ConfigError(f"bank: {problem}. Call the bank itself on the whole text.")
                view = LayerView(seen, self.real, segments, self._is_padded)
                for stream, index in routes:
                    stream.step(index, view)
        return len(self._layers_seen) == len(self.layers)

    def features(self) -> dict[str, Tensor]:
        """Return reader name -> features `[batch, tokens, dim]` of its fusion; ConfigError if a layer is missing."""
        return {name: part for names, parts in self._stream_features() for name, part in zip(names, parts, strict=True)}

    def _stream_features(self) -> Features:
        """Return for each stream its readers' names and their features; ConfigError if a layer is missing."""
        check_layer_order("bank", self.stack, self.layers, self._layers_seen)
        real = require_fed(self.real)
        with torch.set_grad_enabled(self.grad):
            return [(names, stream.finish(real)) for names, stream in self._streams]

    def finish(self, labels: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Run the heads, and return reader name -> logits, shaped as in `ReaderOutput`.

        `labels` (reader name -> labels) only choose positions: a head over a vocabulary then returns
        `[labelled tokens, classes]`. None: all positions. Raises ConfigError if a layer is missing.
        """
        by_stream, real = self._stream_features(), require_fed(self.real)
        names, features = by_stream[0]
        if len(by_stream) == 1 and len(names) > 1 and isinstance(features, Tensor):
            heads = [self.readers[name].head for name in names]
            groups = {(type(head), head.group()) for head in heads}
            if features.stride(2) == 0 and heads[0].reads_first:
                features = features[:, :, :1]
            if len(groups) == 1 and heads[0].group() and _is_batched(features, real, grad=self.grad):
                with torch.set_grad_enabled(self.grad):
                    logits = heads[0].forward_many(heads, features, _mask_of(features, real))
                return dict(zip(names, logits, strict=True))
        return run_heads(self.readers, by_stream, real, labels or {}, grad=self.grad)


def _is_batched(
    features: Float[Tensor, "*readers batch positions dim"], real: Bool[Tensor, "batch tokens"], *, grad: bool
) -> bool:
    """Return whether heads with equal settings are computed as one operation on these features, because it is faster.

    With one position per text it always is. With more, on a CPU without gradients (`grad`), it is slower if `real`, the
    mask, has more than 32 entries: the features of several readers do not fit into the CPU's caches. An export is
    treated as if there were more than 32.
    """
    if features.shape[-2] == 1 or grad or real.is_cuda:
        return True
    return not torch.compiler.is_exporting() and real.numel() <= _FEW


def _mask_of(features: Float[Tensor, "*readers batch positions dim"], real: Bool[Tensor, "batch tokens"]) -> Tensor:
    """Return the mask of the tokens, `real`; for features with one vector per text, a mask `[batch, 1]` of True."""
    return real if features.shape[-2] == real.shape[1] else real.new_ones(real.shape[0], 1)


def past_tokens(inputs: Inputs) -> int:
    """Return the number of tokens in the key-value cache, if one is among the arguments of a call; else 0."""
    length = getattr(inputs.get("past_key_values"), "get_seq_length", int)
    return int(length())


def refuse_pairs(readers: Mapping[str, ReaderModule], key: str) -> None:
    """Raise ConfigError if one of the readers compares two texts: the batch has no token ids (`key`) to do it by."""
    for name, reader in readers.items():
        if reader.config.fusion.reads_pairs:
            problem = f"reader '{name}' compares two texts, and the batch has no {key} to tell them apart"
            raise ConfigError(f"bank: {problem}. Call the model with them.")


def run_heads(
    readers: Mapping[str, ReaderModule],
    by_stream: Features,
    real: Bool[Tensor, "batch tokens"],
    labels: Mapping[str, Tensor],
    *,
    grad: bool,
    together: bool = False,
) -> dict[str, Tensor]:
    """Run the readers' heads on their features, and return reader name -> logits.

    Heads with equal `group`s are computed as one batched operation, or one by one where this is quicker; see
    `_is_batched`.

    Args:
        readers: Reader name -> module.
        by_stream: Names of readers, and their features `[batch, tokens, dim]`; every reader is named once.
        real: True at tokens, False at padding.
        labels: Reader name -> labels. A head over a vocabulary computes only the labelled positions.
        grad: Whether to record gradients.
        together: Compute heads with equal `group`s as one operation in any case.
    """
    # A fusion that pools the sequence returns one vector per text, expanded over the tokens: its stride there is 0.
    # A head that reads the first token only then gets no others.
    features = {
        name: part[:, :1] if part.stride(1) == 0 and readers[name].head.reads_first else part
        for names, parts in by_stream
        for name, part in zip(names, parts, strict=True)
    }
    groups, logits = [[*features]], dict[str, Tensor]()
    if len(features) > 1:
        groups = _head_groups(readers, features, real, grad=grad or together)
    with torch.set_grad_enabled(grad):
        for names in groups:
            first, mask = names[0], _mask_of(features[names[0]], real)
            if len(names) == 1:
                logits[first] = _logits_of(readers[first], features[first], mask, labels.get(first))
            else:
                heads = [readers[name].head for name in names]
                parts = [features[name] for name in names]
                is_shared = all(part is parts[0] for part in parts)  # one tensor, which is expanded and not copied
                stacked = parts[0].expand(len(parts), *parts[0].shape) if is_shared else torch.stack(parts)
                logits |= zip(names, heads[0].forward_many(heads, stacked, mask), strict=True)
    return logits


def _logits_of(
    reader: ReaderModule,
    features: Float[Tensor, "batch tokens dim"],
    mask: Bool[Tensor, "batch tokens"],
    labels: Tensor | None,
) -> Tensor:
    """Run a reader's head by itself on features, and return the logits, shaped as in `ReaderOutput`.

    `mask` is True at tokens. With `labels`, a head over a vocabulary computes only the logits of labelled positions;
    other heads ignore them. In training mode, torch's global generator is seeded for the call and restored afterwards.
    """
    options: dict[str, Tensor] = {}
    if reader.head.logits_to_keep and labels is not None:
        options["logits_to_keep"] = (labels != IGNORE).to(features.device)
    with torch.random.fork_rng(devices=[features.device] if features.is_cuda else [], enabled=reader.training):
        if reader.training:
            seed_torch(derive_seed(reader.config.seed, reader.step, "head"))
        return reader.head(features, mask, **options)


def _head_groups(
    readers: Mapping[str, ReaderModule], features: Mapping[str, Tensor], real: Tensor, *, grad: bool
) -> list[list[str]]:
    """Return groups of reader names. The heads of a group are computed as one operation; see `_is_batched`.

    `features` is reader name -> features; `readers`, `real` and `grad` are those of `_is_batched` and `run_heads`.
    Readers that share one tensor of features get a group of their own.
    """
    shared = Counter(map(id, features.values()))
    groups: dict[object, list[str]] = defaultdict(list)
    for name, part in features.items():
        head = readers[name].head
        group = head.group() if _is_batched(part, real, grad=grad) else None
        same = id(part) if shared[id(part)] > 1 else None
        groups[name if group is None else (type(head), group, part.shape[1:], part.dtype, same)].append(name)
    return list(groups.values())


@contextmanager
def attach(passes: Sequence[StackPass], batch: Inputs, stop: BaseException | None = None) -> Iterator[None]:
    """Give each pass the states of its stack, while the caller calls the model once inside the `with` block.

    The call counts as the bank's own (`is_internal`): readers inside `bank.listen` ignore it.

    Args:
        passes: One pass per stack.
        batch: Keyword arguments with which the caller calls the model.
        stop: Raised from a hook once every pass has its last layer, to end the call early. None: the call continues.
    """
    unfinished = len(passes)

    def on_state(stack_pass: StackPass, layer: int, state: Tensor) -> None:
        nonlocal unfinished
        if stack_pass.on_state(layer, state):
            unfinished -= 1
            if unfinished == 0 and stop is not None:
                raise stop

    with ContextHooks() as hooks:
        hooks.callback(is_internal.reset, is_internal.set(True))
        for stack_pass in passes:
            on_start = partial(stack_pass.begin, batch)
            stack_pass.hook(hooks, partial(on_state, stack_pass), on_start, stack_pass.on_inner_state)
        yield


@contextmanager
def recording(layers: Mapping[LayerStack, Selector], stop: BaseException | None) -> Iterator[States]:
    """Record the states of chosen layers, while the caller runs a forward inside the `with` block.

    The forward counts as the bank's own, so readers inside `bank.listen` ignore it.

    Args:
        layers: Stack -> the layers to record, as a selector.
        stop: Raised from a hook once all these layers have run, to end the forward early. None: the forward continues.

    Yields:
        Stack name -> layer -> state, filled while the model runs.

    Raises:
        LayerIndexError: If a stack does not have a layer.
        ConfigError: At the end of the context, if a layer was skipped or ran out of order.
    """
    wanted = [(stack, select(chosen, stack.layers, op="bank.record_states")) for stack, chosen in layers.items()]
    states: States = {stack.name: {} for stack, _ in wanted}

    def on_state(name: str, layer: int, state: Tensor) -> None:
        states[name][layer] = state
        if stop is not None and all(len(states[stack.name]) == len(chosen) for stack, chosen in wanted):
            raise stop

    with ContextHooks() as hooks:
        hooks.callback(is_internal.reset, is_internal.set(True))
        for stack, chosen in wanted:
            watch_selected(hooks, stack, chosen, partial(on_state, stack.name))
        yield states
    for stack, chosen in wanted:
        check_layer_order("bank.record_states", stack, chosen, list(states[stack.name]))


def check_layer_order(op: str, stack: LayerStack, needed: Sequence[int], seen: Sequence[int]) -> None:
    """Raise ConfigError, about the operation `op`, unless the layers that ran (`seen`) are those `needed`, in order."""
    if list(needed) != list(seen):
        layer = next(other if layer is None else layer for layer, other in zip_longest(needed, seen) if layer != other)
        problem = f"layer {layer} of the stack '{stack.name}' did not run in order"
        raise ConfigError(f"{op}: {problem}; it is needed. Run the whole model, with the blocks that were found in it.")


def real_tokens(
    mask: Tensor | None, state: Float[Tensor, "batch tokens width"], model: PreTrainedModel
) -> Bool[Tensor, "batch tokens"]:
    """Return a mask `[batch, tokens]` that is True at the tokens of a hidden state and False at padding.

    In a row that is all padding, the first token counts as True, so that pooling stays finite.

    Args:
        mask: Attention mask as `token_mask` returns it. None: no padding. For audio models it may be a mask of samples,
            which is converted to the frames of the state.
        state: A hidden state of the pass.
        model: The model, which converts samples to frames.

    Raises:
        ConfigError: If the shape of the mask does not fit the state.
    """
    shape, device = state.shape[:2], state.device
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if mask.shape[0] == shape[0] and mask.shape[1] != shape[1]:
        mask = _frame_mask(mask, shape[1], model)
    if mask.shape != shape:
        problem = f"the attention mask is {tuple(mask.shape)}; the states have batch and tokens {tuple(shape)}"
        raise ConfigError(f"bank: {problem}. Give a mask [batch, tokens] of the tokens that the model reads.")
    real = mask.to(device, torch.bool, copy=True)
    if not is_full(real):
        real[:, 0] |= ~real.any(1)
    return real


def _frame_mask(mask: Tensor, frames: int, model: PreTrainedModel) -> Tensor:
    """Convert a mask of audio samples to a mask of the model's `frames`.

    The mask is returned unchanged if the model reads no audio, or would not make `frames` frames of that many samples.
    """
    convert = getattr(model.base_model, "_get_feature_vector_attention_mask", None)
    count = getattr(model.base_model, "_get_feat_extract_output_lengths", None)
    if count is None or int(count(mask.shape[1])) != frames:
        return mask  # not a mask of samples, or the state is shorter than the model's frames
    if convert is None:  # Whisper's encoder takes no mask, and two columns of its spectrogram make one frame
        return torch.arange(frames, device=mask.device) < count(mask.sum(1, keepdim=True))
    return convert(frames, mask)
