"""ExtraLayers: more transformer blocks of the base's own kind on top of its last layer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lamina.errors import ConfigError, first_line
from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, fed
from lamina.layers.devices import main_device
from lamina.layers.hooks import ContextHooks, watch
from lamina.layers.preserve import preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.stack import LayerStack, alike, swapped
from lamina.utils import check_range, seed_torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

Swap = tuple[int, int] | None

_SWAPS = (None, (0, 1), (1, 2))  # how blocks keep [batch, tokens, width]


@final
@dataclass(frozen=True)
class ExtraLayers(FusionConfig):
    """Run `n` new blocks on the top layer's state and train them: the deeper baseline, Base+n.

    On a model, a new block is a copy of its last block, freshly initialised by the model's own rule and called as the
    model calls the last one in the same pass: same mask, same positions, no cache. The features have the model's width.
    Where a model ends in a final norm, the new blocks read what comes out of it.

    Args:
        n: How many blocks, at least 1.

    Raises:
        ConfigError: When attached, if the model's last block cannot be run on its own.

    Source:
        ElNokrashy et al. 2024, arXiv:2209.15168, the baseline "+n layers". Without a model at hand (`build`) the blocks
        are BERT's: post-norm, heads of size 64, feed-forward 4 x width.
    """

    n: int = 1

    layers: ClassVar[int] = -1
    needs_block_inputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("extra_layers", "n", self.n, 1, 1000)

    def build_on(self, model: PreTrainedModel, stack: LayerStack, layers: int) -> ExtraLayersFusion:
        """Make blocks of the kind of the stack's last one; ConfigError if a copy does not compute what it computes."""
        copied, swap = _checked_copy(model, stack)
        blocks = [copied, *(copy.deepcopy(copied) for _ in range(self.n - 1))]
        for block in blocks:
            _start_afresh_(block, model, stack.blocks[-1])
        return ExtraLayersFusion(self, layers=layers, width=stack.width, blocks=blocks, swap=swap)


@final
class ExtraLayersFusion(Fusion, config=ExtraLayers):
    """The module of `ExtraLayers`: `blocks`, run one after the other on the last state; without a model plain ones."""

    def __init__(
        self, config: ExtraLayers, *, layers: int, width: int, blocks: Sequence[nn.Module] = (), swap: Swap = None
    ) -> None:
        super().__init__(config, layers=layers, width=width)
        self.blocks = nn.ModuleList(blocks or [_plain_block(width) for _ in range(config.n)])
        self.copied, self.swap = bool(blocks), swap

    def active_layers(self) -> tuple[int, ...]:
        """The last state."""
        return (self.layers - 1,)

    @contextmanager
    def block_inputs(self, stack: LayerStack) -> Iterator[None]:
        """Remember how the pass calls the stack's last block: mask, positions and whatever else there is."""

        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _calls.set({**_calls.get({}), self: _Call.of(block, args, kwargs, stack.depth - 1)})

        with ContextHooks() as hooks:
            hooks.callback(lambda: _calls.set({key: call for key, call in _calls.get({}).items() if key != self}))
            if self.copied:
                hooks.add(stack.blocks[-1].register_forward_pre_hook, before, with_kwargs=True)
            yield

    def stream(self, members: object) -> Stream:
        """Wait for the last state."""
        return _TopStream(self)

    def block_call(self) -> _Call | None:
        """How the pass called the base's last block; None for blocks that need nothing but the mask."""
        if not self.copied:
            return None
        call = _calls.get({}).get(self)
        if call is None:
            reason = "the states came without the model's pass; these blocks are called as its last block is"
            raise ConfigError(f"extra_layers: {reason}. Call the bank, or run it under `fusion.block_inputs(stack)`.")
        if call.past:
            reason = f"the pass continues from a cache of {call.past} tokens; the new blocks never saw those"
            raise ConfigError(f"extra_layers: {reason}. Give the whole text in one pass.")
        return call


class _TopStream(Stream):
    """Takes the last state, and along with it how the base's last block was called for it."""

    def __init__(self, fusion: ExtraLayersFusion) -> None:
        self._fusion = fusion
        self._taken: tuple[Tensor, _Call | None] | None = None

    def step(self, index: int, view: LayerView) -> None:
        self._taken = (view.state, self._fusion.block_call())  # forgotten elsewhere once the pass ends

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        (state, call), self._taken = fed(self._taken), None
        fusion, dtype = self._fusion, next(self._fusion.parameters()).dtype
        state, call = state.to(dtype), (call or _plain_call(mask)).to(dtype)
        seeded = fusion.training and fusion.generator is not None
        with torch.random.fork_rng(devices=[state.device] if state.is_cuda else [], enabled=seeded):
            if seeded:  # torch's own generators: dropout inside the blocks knows no other
                seed_torch(int(torch.randint(1 << 62, (), generator=fusion.generator, device=state.device)))
            for block in fusion.blocks:
                state = call.run(block, state, fusion.swap)
        return [state]


@dataclass(frozen=True)
class _Call:
    """How a block was called, without the caches."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str = 0  # where among them the hidden state is
    past: int = 0  # tokens of the text that are in a cache and not in this call

    @classmethod
    def of(cls, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], layer: int) -> _Call:
        """Note a call, so that it can be repeated for the whole text at once."""
        past = [int(value.get_seq_length(layer)) for value in (*args, *kwargs.values()) if _is_cache(value)]
        options = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        if "use_cache" in options:
            options["use_cache"] = False
        place = 0 if args else next(iter(inspect.signature(block.forward).parameters))
        return cls(tuple(None if _is_cache(value) else value for value in args), options, place, max(past, default=0))

    @property
    def state(self) -> Tensor:
        """The hidden state it was called with."""
        return self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]

    def to(self, dtype: torch.dtype) -> _Call:
        """The same call with every floating-point tensor in another precision."""
        args, kwargs = tree_map_only(
            Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, (self.args, self.kwargs)
        )
        return _Call(args, kwargs, self.place, self.past)

    def run(self, block: nn.Module, state: Tensor, swap: Swap) -> Tensor:
        """Repeat it on another block with another state `[batch, tokens, width]`; returns the new state."""
        args, kwargs = list(self.args), dict(self.kwargs)
        cast("Any", args if isinstance(self.place, int) else kwargs)[self.place] = swapped(state, swap)
        output = block(*args, **kwargs)
        return swapped(output if isinstance(output, Tensor) else output[0], swap)


_calls: ContextVar[dict[nn.Module, _Call]] = ContextVar("calls")  # by fusion, of the pass that runs in this context


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length")  # every cache of transformers 5 has it


def _plain_block(width: int) -> nn.Module:
    """A block as in BERT, with its initialiser's values."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer, BertPreTrainedModel

    wanted = max(1, width // 64)  # heads are of this size in BERT and RoBERTa of every size
    heads = next(heads for heads in range(wanted, 0, -1) if width % heads == 0)
    config = BertConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width)
    config._attn_implementation = "sdpa"
    return BertLayer(config).apply(BertPreTrainedModel(config)._init_weights)


def _plain_call(mask: Bool[Tensor, "batch tokens"]) -> _Call:
    """A call of a plain block: padding is attended to with the lowest score there is, so a row of it is no NaN."""
    scores = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return _Call((None,), {"attention_mask": scores[:, None, None, :]})


def _checked_copy(model: PreTrainedModel, stack: LayerStack) -> tuple[nn.Module, Swap]:
    """A trainable copy of the last block in single precision, and how it keeps its states."""
    if not stack.blocks:
        raise _refusal(model, "it has no module per block")
    try:
        copied = _copy(stack.blocks[-1])
        return copied, stack.points[-1].swap if main_device(model).type == "meta" else _rehearse(model, stack, copied)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise _refusal(model, f"a copy of its last block does not run ({reason})") from error


def _refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    came = f"no blocks of the kind of '{model.config.model_type}' can be made; {reason}"
    return ConfigError(f"extra_layers: {came}. Use another fusion, such as DWAtt or Concat.")


def _copy(block: nn.Module) -> nn.Module:
    """A copy without hooks: those belong to the base's pass, and may hold on to much more than the block."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        for name, value in vars(module).items():
            if name.startswith(("_forward", "_backward")) and "hooks" in name:
                memo[id(value)] = type(value)()
    copied = copy.deepcopy(block, memo).float().requires_grad_(True)
    for module in copied.modules():
        vars(module).pop("gradient_checkpointing", None)  # back to the class's own value, off
    return copied


def _rehearse(model: PreTrainedModel, stack: LayerStack, copied: nn.Module) -> Swap:
    """Run the model once on a tiny input, and the copy as its last block was called; the axes the block exchanges."""
    block, layer = stack.blocks[-1], stack.depth - 1
    seen: dict[Any, Any] = {}

    def after(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen["call"] = _Call.of(block, args, kwargs, stack.depth)  # a layer no cache has: what it holds is this text
        seen["output"] = output if isinstance(output, Tensor) else output[0]

    tolerance = 1e-4 if next(block.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    with preserve_model(model), watch(stack, [layer], seen.__setitem__):
        block.register_forward_hook(after, with_kwargs=True)  # `preserve_model` takes it off again
        inputs = probe_input(model, 7, seed=1).inputs
        try:
            model(**inputs)
        except Exception:  # of its head, perhaps
            model.base_model(**inputs)
        call: _Call = seen["call"]
        swaps = [swap for swap in _SWAPS if alike(swapped(call.state, swap), seen[layer], tolerance)]
        if not swaps:
            raise _refusal(model, "its last block does not take the state of the layer below")
        dtype = next(copied.parameters()).dtype
        again = call.to(dtype).run(copied.eval(), seen[layer].to(dtype), swaps[0])
        if not alike(again, swapped(seen["output"], swaps[0]), tolerance):
            raise _refusal(model, "a copy of its last block gives another result")
    return swaps[0]


@torch.no_grad()
def _start_afresh_(block: nn.Module, model: PreTrainedModel, of: nn.Module) -> None:
    """Initialise every parameter as the model does, and what it leaves out as torch does."""
    around = [part for part in model.modules() if hasattr(part, "_init_weights") and of in set(part.modules())]
    owner: Any = around[-1]  # the innermost model
    for parameter in block.parameters():
        parameter.fill_(torch.nan)
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            cast("Any", module).reset_parameters()
    block.apply(owner._init_weights)  # not `_initialize_weights`, which leaves alone what is marked as loaded
    for name, parameter in block.named_parameters():
        if parameter.is_meta or not bool(parameter.isnan().any()):
            continue
        if parameter.ndim < 2 and not name.endswith("bias"):
            raise _refusal(model, f"nothing says how '{name}' of its blocks starts")
        std = float(getattr(model.config, "initializer_range", 0.02))
        parameter.normal_(std=std) if parameter.ndim > 1 else parameter.zero_()
