"""Run a model as if some of its blocks were not there; nothing of it changes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lamina.errors import UnsupportedModelError
from lamina.layers.roles import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack


@contextmanager
def skipping(model: PreTrainedModel, stack: LayerStack, layers: Collection[int], *, op: str) -> Generator[None]:
    """Let blocks hand on the state that they were given, in passes of this thread.

    They still run, so that what they hand on besides (a cache, position biases) is there for the others. Where blocks
    share weights, block i is the i-th call. Norms after the last block stay.

    Raises:
        UnsupportedModelError: In a pass, if a block gives no state of the shape of one that it was given.
    """
    places: dict[nn.Module, set[int]] = {}
    for layer in layers:
        block = stack.blocks[layer - 1]
        places.setdefault(block, set()).add(stack.blocks[: layer - 1].count(block))
    thread, calls = get_ident(), dict.fromkeys(places, 0)

    def start(_module: nn.Module, _args: object) -> None:
        if get_ident() == thread:
            calls.update(dict.fromkeys(calls, 0))

    def skip(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        if get_ident() != thread:
            return None
        calls[block] += 1
        if calls[block] - 1 not in places[block]:
            return None
        single = isinstance(output, Tensor)
        state = output if single else output[0]
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        given = [value for value in given if value.shape == state.shape and value.dtype == state.dtype]
        if not given:
            reason = f"block {min(layers)} changes the shape of its state, and cannot be taken out"
            hint = "Use a model whose blocks keep it."
            raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=hint)
        return given[0] if single else (given[0], *output[1:])

    with ExitStack() as hooks:
        hooks.callback(stack.scope.register_forward_pre_hook(start, prepend=True).remove)
        for block in places:
            hooks.callback(block.register_forward_hook(skip, with_kwargs=True).remove)
        yield
