"""Store the states of a vLLM model that has no interface for them, even if the model is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from lamina.layers import LayerStack
    from lamina.vllm.engine_types import Runner

_STATE = "lamina_state"  # name of the buffer in a block that holds the block's input
_CALLS = "lamina_calls"  # name of the buffer in a block that counts its passes


@final
class Taps:
    """Buffers with the input of every block of a model. Each pass of the model fills them.

    Compiled code calls no hooks. So the blocks' own `forward` writes the buffers, and compilers see it as a part of the
    model. For that, each block's class is replaced by a subclass. Every block is tapped, so that the compiled code,
    which vLLM stores for later engines, does not depend on the layers that a bank reads. Raises ConfigError if the
    blocks of the model are not found, or do not get their state as `hidden_states`.

    Args:
        model: The model, loaded and not yet compiled.
        depth: Number of its blocks.
        tokens: Maximum number of tokens of a pass.
        width: Width of a state.
        dtype: Data type of a state.
    """

    def __init__(self, model: nn.Module, *, depth: int, tokens: int, width: int, dtype: torch.dtype) -> None:
        blocks = _blocks_of(model, depth)
        device = next(model.parameters()).device
        self._buffers = [torch.empty(tokens, width, dtype=dtype, device=device) for _ in blocks]
        self._counts = [torch.zeros(1, dtype=torch.long, device=device) for _ in blocks]
        self._seen = torch.cat(self._counts)  # the counts after the last pass that was read
        for block, buffer, count in zip(blocks, self._buffers, self._counts, strict=True):
            block.register_buffer(_STATE, buffer, persistent=False)
            block.register_buffer(_CALLS, count, persistent=False)
            block.__class__ = _tapped(type(block))

    def states(self, layers: Sequence[int], tokens: int) -> list[Tensor]:
        """Return copies of layers' states in the last pass, each `[tokens, width]`: the first `tokens` of the buffers.

        Layer i is the input of block i, both from 0, so the last layer cannot be read. Raises RuntimeError if the last
        pass did not write every buffer.
        """
        states = [self._buffers[layer][:tokens].clone() for layer in layers]
        self.check()
        return states

    def check(self) -> None:
        """Raise RuntimeError if a buffer has not been written since the last check, or since the start."""
        counts = torch.cat(self._counts)
        if (counts <= self._seen).any():
            raise RuntimeError("vllm: the readers got no states from a pass of the model. Start with --enforce-eager.")
        self._seen = counts


def tap(runner: Runner, stack: LayerStack) -> Taps:
    """Install `Taps` in a model runner's model, and return them. Raises ConfigError if the model's blocks do not fit.

    From now on, each warm-up pass of the runner ends with `Taps.check`.
    """
    dummy_run = runner._dummy_run
    taps = Taps(
        runner.get_model(),
        depth=stack.depth,
        tokens=runner.max_num_tokens,
        width=stack.width,
        dtype=runner.model_config.dtype,
    )

    def dummy_run_and_check(*args: object, **kwargs: object) -> object:
        result = dummy_run(*args, **kwargs)
        taps.check()
        return result

    runner._dummy_run = dummy_run_and_check
    return taps


def _blocks_of(model: nn.Module, depth: int) -> nn.ModuleList:
    """Return the list of a model's `depth` blocks; raise ConfigError if no list, or several, could be it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth]
    lists = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
    if len(lists) != 1:
        what = f"the model class {type(model).__name__} has {len(lists)} lists of {depth} equal modules"
        raise ConfigError(f"vllm: {what}; one is needed to find its blocks. Use a model with one stack of blocks.")
    return lists[0]


def _tapped(block: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a block class whose `forward` first copies the block's input into the buffer `lamina_state`.

    The input is `hidden_states`, plus `residual` if there is one. The block's buffer `lamina_calls` grows by 1.
    Raises ConfigError if `forward` has no argument `hidden_states`.
    """
    names = list(inspect.signature(block.forward).parameters)[1:]
    if "hidden_states" not in names:
        what = f"blocks of the class {block.__name__} take no argument hidden_states"
        raise ConfigError(f"vllm: {what}, so their states are not found. Use a model of another class.")

    def forward(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> object:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        state, residual = given["hidden_states"], given.get("residual")
        if residual is not None:
            state = state + residual
        self.lamina_state[: state.shape[0]].copy_(state)  # pyright: ignore[reportIndexIssue]  buffers that `tap` adds
        self.lamina_calls.add_(1)  # pyright: ignore[reportCallIssue]
        return block.forward(self, *args, **kwargs)

    return type(block.__name__, (block,), {"forward": forward})
