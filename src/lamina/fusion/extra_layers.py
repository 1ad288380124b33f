"""ExtraLayers: new transformer blocks of the base model's architecture on top of its last layer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeGuard, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lamina.errors import ConfigError, first_line
from lamina.fusion.base import Fusion, FusionConfig, LayerView, Range, Stream, require_fed
from lamina.layers.devices import main_device
from lamina.layers.hooks import ContextHooks, watch
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import run_probe
from lamina.layers.stack import LayerStack, alike, swapped
from lamina.utils import seed_torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import Cache, PreTrainedModel

Swap = tuple[int, int] | None  # axes that a block exchanges compared with [batch, tokens, width]

_SWAPS = (None, (0, 1), (1, 2))


@final
@dataclass(frozen=True)
class ExtraLayers(FusionConfig):
    """A fusion that runs `n` new, trainable blocks on the top layer's state: the baseline of a deeper model.

    When the reader is attached to a model, each new block is a copy of the model's last block with newly initialised
    weights. In each pass it gets the same mask and positions as the model's last block, but no cache. If the model ends
    with a final norm, the new blocks read its output. The features have the model's width.

    Args:
        n: Number of blocks, at least 1.

    Raises:
        ConfigError: If `n` is not an int in 1..1000. When the reader is attached: if the model's last block cannot be
            called by itself or newly initialised. In a pass: if the states are not from a pass of this model, or the
            pass continues from a cache of earlier tokens.

    Source:
        ElNokrashy et al. 2024, arXiv:2209.15168, the baseline "+n layers". `build`, which has no model, makes blocks as
        in BERT: post-norm, heads of size 64 or more, a feed-forward network of 4 x width.
    """

    _ranges: ClassVar = {"n": Range(1, 1000)}
    layers: ClassVar[int] = -1
    needs_block_inputs: ClassVar[bool] = True

    n: int = 1

    def build_on(self, model: PreTrainedModel, stack: LayerStack, layers: int) -> ExtraLayersFusion:
        """Return the module with copies of the last block of `stack`, newly initialised.

        Raises ConfigError if the block cannot be copied, or nothing says how a weight of it is initialised.
        """
        copied, swap = _checked_copy(model, stack)
        blocks = [copied, *(copy.deepcopy(copied) for _ in range(self.n - 1))]
        for block in blocks:
            _reinitialize_(block, model, stack.blocks[-1])
        return ExtraLayersFusion(self, layers=layers, width=stack.width, blocks=blocks, swap=swap)


@final
class ExtraLayersFusion(Fusion, config=ExtraLayers):
    """The module of `ExtraLayers`. It applies its `blocks` one after the other to the last state.

    Args:
        config: The settings.
        layers: Number of layers whose states it gets; only the last is read.
        width: Size of each state.
        blocks: Copies of a model's last block. Empty: blocks as in BERT are made.
        swap: Two axes of `[batch, tokens, width]` that are exchanged in what these blocks read and return. None: no
            exchange.
    """

    def __init__(
        self, config: ExtraLayers, *, layers: int, width: int, blocks: Sequence[nn.Module] = (), swap: Swap = None
    ) -> None:
        super().__init__(config, layers=layers, width=width)
        self.blocks = nn.ModuleList(blocks or [_plain_block(width) for _ in range(config.n)])
        self.copied, self.swap = bool(blocks), swap

    def active_layers(self) -> tuple[int, ...]:
        """Return the index of the last of the selected layers, the only one that is read."""
        return (self.layers - 1,)

    @contextmanager
    def block_inputs(self, stack: LayerStack) -> Iterator[None]:
        """Return a context manager that records, for `block_call`, how the stack's last block was last called.

        The record ends with the context. Nothing is recorded if the new blocks are BERT-like and no copies.
        """

        def before(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            _calls.set({**_calls.get({}), self: _Call.record(block, args, kwargs, stack.depth - 1)})

        with ContextHooks() as hooks:
            hooks.callback(lambda: _calls.set({key: call for key, call in _calls.get({}).items() if key != self}))
            if self.copied:
                hooks.add(stack.blocks[-1].register_forward_pre_hook, before, with_kwargs=True)
            yield

    def stream(self, members: object) -> Stream:
        """Return a stream that stores the last state, and finally runs the new blocks on it. `members` is unused."""
        return _TopStream(self)

    def block_call(self) -> _Call | None:
        """Return how the current pass called the model's last block; None for BERT-like blocks, which need only a mask.

        Raises:
            ConfigError: If no call was recorded, or the call continued from a cache of earlier tokens.
        """
        if not self.copied:
            return None
        call = _calls.get({}).get(self)
        if call is None:
            reason = "the states are not from a pass of the model; these blocks are called as its last block was"
            raise ConfigError(f"extra_layers: {reason}. Call the bank, or run it under `fusion.block_inputs(stack)`.")
        if call.past:
            reason = f"the pass continues from a cache of {call.past} tokens; the new blocks never saw those"
            raise ConfigError(f"extra_layers: {reason}. Give the whole text in one pass.")
        return call


class _TopStream(Stream):
    """One forward pass of ExtraLayers: it stores the last state, and the call of the model's last block."""

    def __init__(self, fusion: ExtraLayersFusion) -> None:
        self._fusion = fusion
        self._last: tuple[Tensor, _Call | None] | None = None

    def step(self, index: int, view: LayerView) -> None:
        """Store the last layer's state, and the arguments that the model passed to its last block, for `finish`.

        It is called once per pass, because only the last layer is active. Raises ConfigError as
        `ExtraLayersFusion.block_call` does.
        """
        self._last = (view.state, self._fusion.block_call())  # now: the record of the call ends with the pass

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        """Run the new blocks on the last state, and return the result in a list; ConfigError if there is no state.

        `mask` is for BERT-like blocks. In training, dropout in the blocks is seeded from the fusion's `generator`, if
        any.
        """
        (state, call), self._last = require_fed(self._last), None
        fusion, dtype = self._fusion, next(self._fusion.parameters()).dtype
        state, call = state.to(dtype), (call or _plain_call(mask)).to(dtype)
        seeded = fusion.training and fusion.generator is not None
        with torch.random.fork_rng(devices=[state.device] if state.is_cuda else [], enabled=seeded):
            if seeded:  # dropout inside the blocks can only use torch's global generators
                seed_torch(int(torch.randint(1 << 62, (), generator=fusion.generator, device=state.device)))
            for block in fusion.blocks:
                state = call.run(block, state, fusion.swap)
        return [state]


@dataclass(frozen=True)
class _Call:
    """The recorded arguments of one call of a transformer block, without key-value caches.

    Attributes:
        arguments: Position or name of an argument -> its value, in the order of the call.
        place: Position or name of the argument that is the hidden state.
        past: Number of earlier tokens that were in a cache; 0 without a cache.
    """

    arguments: dict[int | str, object]
    place: int | str = 0
    past: int = 0

    @classmethod
    def record(cls, block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], layer: int) -> _Call:
        """Return a record of the call `block(*args, **kwargs)`.

        Key-value caches among the arguments are replaced by None, and an argument `use_cache` by False. `past` of the
        record is the number of tokens that the caches hold for the block with index `layer`, from 0; without a cache it
        is 0. The state is the first positional argument or, if there is none, the argument for the first parameter of
        `block.forward`.
        """
        given: dict[int | str, object] = {**dict(enumerate(args)), **kwargs}
        past = [int(value.get_seq_length(layer)) for value in given.values() if _is_cache(value)]
        arguments = {key: None if _is_cache(value) else value for key, value in given.items()}
        if "use_cache" in arguments:
            arguments["use_cache"] = False
        place = 0 if args else next(iter(inspect.signature(block.forward).parameters))
        return cls(arguments, place, max(past, default=0))

    def to(self, dtype: torch.dtype) -> _Call:
        """Return a copy of the record with every floating-point tensor converted to `dtype`."""

        def converted(value: Tensor) -> Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return replace(self, arguments=tree_map_only(Tensor, converted, self.arguments))

    def run(self, block: nn.Module, state: Tensor, swap: Swap) -> Tensor:
        """Return the state that `block` makes from `state` `[batch, tokens, width]` and the other recorded arguments.

        `swap` names two axes that are exchanged before the call and back after it. None: nothing is exchanged.
        """
        arguments = {**self.arguments, self.place: swapped(state, swap)}
        args = [value for key, value in arguments.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
        output = block(*args, **kwargs)
        return swapped(output if isinstance(output, Tensor) else output[0], swap)


_calls: ContextVar[dict[nn.Module, _Call]] = ContextVar("calls")  # fusion -> call in the current pass of this context


def _is_cache(value: object) -> TypeGuard[Cache]:
    return hasattr(value, "get_seq_length")  # every cache of transformers 5 has it


def _plain_block(width: int) -> nn.Module:
    """Return a new block as BERT builds and initialises it. Its heads have size 64 or more, or the full `width`."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer, BertPreTrainedModel

    most = max(1, width // 64)  # heads have size 64 in BERT and RoBERTa
    heads = next(heads for heads in range(most, 0, -1) if width % heads == 0)
    config = BertConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width)
    config._attn_implementation = "sdpa"
    return BertLayer(config).apply(BertPreTrainedModel(config)._init_weights)


def _plain_call(mask: Bool[Tensor, "batch tokens"]) -> _Call:
    """Return the arguments with which a BERT-like block is called for a padding mask (True at tokens).

    The hidden state in them is None. Padding gets the lowest finite attention score instead of -inf, so that fully
    padded sequences stay finite.
    """
    scores = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return _Call({0: None, "attention_mask": scores[:, None, None, :]})


def _checked_copy(model: PreTrainedModel, stack: LayerStack) -> tuple[nn.Module, Swap]:
    """Return a trainable float32 copy of the stack's last block, and the block's `Swap`.

    The `Swap` is the pair of axes that the block exchanges compared with `[batch, tokens, width]`; None if none. On the
    meta device the copy is not tried.

    Raises:
        ConfigError: If the stack has no module per block, its blocks pass on states in another form, or the copy does
            not run or computes different values than the block.
    """
    if not stack.blocks:
        raise _unsupported(model, "it has no module per block")
    if stack.is_converted:
        raise _unsupported(model, "its blocks pass on states that are not [batch, tokens, width]")
    try:
        copied = _copy_block(stack.blocks[-1])
        return copied, stack.points[-1].swap if main_device(model).type == "meta" else _check_copy(model, stack, copied)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise _unsupported(model, f"a copy of its last block does not run ({reason})") from error


def _unsupported(model: PreTrainedModel, reason: str) -> ConfigError:
    problem = f"no blocks like those of '{model.config.model_type}' can be made; {reason}"
    return ConfigError(f"extra_layers: {problem}. Use another fusion, such as DWAtt or Concat.")


def _copy_block(block: nn.Module) -> nn.Module:
    """Return a trainable float32 copy of a block, without gradient checkpointing, and without hooks.

    Hooks may refer to the whole model.
    """
    memo: dict[int, object] = {}  # `deepcopy` uses these empty dicts in place of copies of the hooks
    for module in block.modules():
        for name, value in vars(module).items():
            if name.startswith(("_forward", "_backward")) and "hooks" in name:
                memo[id(value)] = type(value)()
    copied = copy.deepcopy(block, memo).float().requires_grad_(True)
    for module in copied.modules():
        vars(module).pop("gradient_checkpointing", None)  # back to the class attribute: off
    return copied


def _check_copy(model: PreTrainedModel, stack: LayerStack, copied: nn.Module) -> Swap:
    """Check that `copied` computes the same as the stack's last block; return the block's `Swap` (see `_checked_copy`).

    The model runs once on a tiny input, then the copy with the arguments of the model's last block. `copied` is left in
    eval mode.

    Raises:
        ConfigError: If the results differ, or the last block does not read the state of the layer below.
    """
    block, layer = stack.blocks[-1], stack.depth - 1
    states: dict[int, Tensor] = {}
    calls: list[tuple[_Call, Tensor]] = []  # each call of the last block, and its output

    def after(
        _block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Tensor | Sequence[Tensor]
    ) -> None:
        # a cache now also holds this text, so ask for a layer that it does not have: nothing is in the past
        call = _Call.record(block, args, kwargs, stack.depth)
        calls.append((call, output if isinstance(output, Tensor) else output[0]))

    tolerance = 1e-4 if next(block.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    with preserve_model(model), watch(stack, [layer], states.__setitem__):
        block.register_forward_hook(after, with_kwargs=True)  # `preserve_model` removes it
        run_probe(model, 7, seed=1)
        call, output = calls[-1]
        received = cast("Tensor", call.arguments[call.place])
        swaps = [swap for swap in _SWAPS if alike(swapped(received, swap), states[layer], tolerance)]
        if not swaps:
            raise _unsupported(model, "its last block does not get the state of the layer below")
        dtype = next(copied.parameters()).dtype
        again = call.to(dtype).run(copied.eval(), states[layer].to(dtype), swaps[0])
        if not alike(again, swapped(output, swaps[0]), tolerance):
            raise _unsupported(model, "a copy of its last block gives another result")
    return swaps[0]


@torch.no_grad()
def _reinitialize_(block: nn.Module, model: PreTrainedModel, original: nn.Module) -> None:
    """Initialise `block` in place as `model` initialises its blocks; `original` is the model's block that was copied.

    Parameters that the model does not initialise get torch's own initialisation. If there is none, matrices are drawn
    with the standard deviation `initializer_range` of the config, biases are 0, and any other parameter raises
    ConfigError.
    """
    around = [part for part in model.modules() if hasattr(part, "_init_weights") and original in set(part.modules())]
    owner = cast("PreTrainedModel", around[-1])  # the innermost model that contains the block
    for parameter in block.parameters():
        parameter.fill_(torch.nan)  # to see later which parameters nobody initialised
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            cast("nn.Linear", module).reset_parameters()  # or another module with this method
    block.apply(owner._init_weights)  # not `_initialize_weights`, which skips modules that are marked as loaded
    for name, parameter in block.named_parameters():
        if parameter.is_meta or not bool(parameter.isnan().any()):
            continue
        if parameter.ndim < 2 and not name.endswith("bias"):
            raise _unsupported(model, f"nothing says how '{name}' of its blocks is initialised")
        std = float(getattr(model.config, "initializer_range", 0.02))
        parameter.normal_(std=std) if parameter.ndim > 1 else parameter.zero_()
