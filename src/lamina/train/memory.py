"""What readers keep for the gradients of a batch: measured on a few rows, whatever the fusions and heads are."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from lamina.bank.streaming import StackPass
from lamina.layers.isolation import MetaValues, evaluating, preserve_randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack


class KeptBytes(NamedTuple):
    """Bytes that stay in memory until the backward pass: `fixed`, and those of every row of a batch."""

    fixed: int
    row: int

    def of(self, rows: int) -> int:
        """Bytes of a batch."""
        return self.fixed + rows * self.row

    def accumulation(self, rows: int, free: int) -> int | None:
        """Into how many equal batches to part `rows` rows so that each fits into `free` bytes; None: no row does."""
        fit = (free - self.fixed) // max(1, self.row)
        if fit < 1:
            return None
        parts = range(math.ceil(rows / fit), rows + 1)
        return next((count for count in parts if rows % count == 0), rows)


def saved_bytes(run: Callable[[], object], own: Iterable[Tensor] = ()) -> int:
    """Bytes that autograd saves while `run` runs, which must hold its results; each storage once, but for `own`."""
    known = {tensor.untyped_storage()._cdata for tensor in own}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(sizes.values())


def reader_memory(
    model: PreTrainedModel,
    readers: Mapping[str, tuple[LayerStack, ReaderModule]],
    tokens: int,
    labels: Callable[[int], Mapping[str, Tensor]] | None = None,
) -> KeptBytes:
    """What readers of one pass keep for the gradients of rows of so many `tokens`; what they share counts once.

    States of zeros stand for the model's; readers that need more of its pass than its states are left out. On the meta
    device nothing is computed.

    Args:
        model: The model, for which no gradients are counted.
        readers: Name -> the stack that is read, and the reader.
        tokens: Of a row, padding included.
        labels: Rows -> labels of so many rows, by reader; without them the losses are left out.
    """
    modules = {name: module for name, (_, module) in readers.items() if not module.config.fusion.needs_block_inputs}
    stacks = {name: stack for name, (stack, _) in readers.items()}
    own = [tensor for module in modules.values() for tensor in (*module.parameters(), *module.buffers())]
    own += [*model.parameters()]

    def run(rows: int) -> list[Any]:
        given, held = {} if labels is None else labels(rows), []
        for stack in dict.fromkeys(stacks[name] for name in modules):
            members = {name: module for name, module in modules.items() if stacks[name] is stack}
            stack_pass = StackPass(model, stack, members, grad=True)
            for layer in stack_pass.layers:
                stack_pass.take(layer, torch.zeros(rows, tokens, stack.width, dtype=model.dtype, device=model.device))
            outputs = stack_pass.finish(given)
            held += outputs.values()
            held += [members[name].loss(outputs[name].logits, given[name]) for name in members if name in given]
        return held

    if not modules:
        return KeptBytes(0, 0)
    values = _EveryLayer() if model.device.type == "meta" else nullcontext()
    with preserve_randomness(), evaluating(*modules.values()), torch.enable_grad(), values:
        for module in modules.values():
            module.train()
        two, three = (saved_bytes(lambda rows=rows: run(rows), own) for rows in (2, 3))  # of one row views may do
        for module in modules.values():
            module.eval()  # what fusions counted meanwhile is forgotten
    return KeptBytes(max(0, 3 * two - 2 * three), three - two)


class _EveryLayer(MetaValues):
    """Without values no weight of a layer counts as 0: every layer is read."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func in _VALUES and args[0].is_meta:
            return _VALUES[func](args[0].shape)
        return super().__torch_function__(func, types, args, kwargs)


_VALUES: dict[Any, Callable[[torch.Size], object]] = {
    torch.Tensor.tolist: lambda shape: torch.zeros(shape, device="cpu").tolist(),
    torch.Tensor.nonzero: lambda shape: torch.ones(shape, device="cpu").nonzero(),
}
