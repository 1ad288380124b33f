"""What readers keep for the gradients of a batch, and hold to score one: measured on a few rows, whatever they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.bank.stack_pass import StackPass
from lamina.layers.devices import MetaValues, main_device
from lamina.layers.preserve import evaluating, preserve_randomness

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack


_SCORED = 256  # tokens, of which fusions that read a few at a time read as many at once as of a whole batch


class KeptBytes(NamedTuple):
    """Bytes that a batch takes: `fixed`, and those of every row of it."""

    fixed: int
    row: int

    def of(self, rows: int) -> int:
        """Bytes of a batch."""
        return self.fixed + rows * self.row

    def fitting(self, free: int) -> int:
        """How many rows fit into `free` bytes."""
        return max(0, free - self.fixed) // max(1, self.row)

    def accumulation(self, rows: int, free: int) -> int | None:
        """Into how many equal batches to part `rows` rows so that each fits into `free` bytes; None: no row does."""
        fit = self.fitting(free)
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


@final
class _Living(TorchDispatchMode):
    """Counts the bytes that operations take up, for as long as they do, but for those of `own` tensors."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in own}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._count(storage._cdata, storage.nbytes())
                finalize(storage, self._uncount, storage._cdata, storage.nbytes())
        return made

    def _count(self, storage: int, size: int) -> None:
        self._known.add(storage)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _uncount(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.now -= size


def peak_bytes(run: Callable[[], object], own: Iterable[Tensor] = ()) -> int:
    """The most bytes of tensors that exist at once while `run` runs and did not before; `own` are not counted."""
    with _Living(own) as living:
        run()
    return living.peak


Readers = Mapping[str, "tuple[LayerStack, ReaderModule]"]
Labels = Callable[[int], Mapping[str, Tensor]]


def reader_memory(model: PreTrainedModel, readers: Readers, tokens: int, labels: Labels | None = None) -> KeptBytes:
    """What readers of one pass keep for the gradients of rows of so many `tokens`; what they share counts once.

    States of zeros stand for the model's; readers that need more of its pass than its states are left out. On the meta
    device nothing is computed.

    Args:
        model: The model, for which no gradients are counted.
        readers: Name -> the stack that is read, and the reader.
        tokens: Of a row, padding included.
        labels: Rows -> labels of so many rows, by reader; without them the losses are left out.
    """
    return _measured(model, readers, tokens, labels, grad=True)


def scoring_memory(model: PreTrainedModel, readers: Readers, tokens: int, labels: Labels | None = None) -> KeptBytes:
    """What readers of one pass hold at most while they score rows of so many `tokens`, as `reader_memory` measures.

    With `labels`, heads that read only positions which have one are given them.
    """
    return _measured(model, readers, tokens, labels, grad=False)


def _measured(model: PreTrainedModel, readers: Readers, tokens: int, labels: Labels | None, *, grad: bool) -> KeptBytes:
    readers = {name: own for name, own in readers.items() if not own[1].config.fusion.needs_block_inputs}
    if not readers:
        return KeptBytes(0, 0)
    modules = [module for _, module in readers.values()]
    own = [tensor for module in (*modules, model) for tensor in (*module.parameters(), *module.buffers())]
    few = 2 if grad else max(2, math.ceil(_SCORED / tokens))  # of one row views may do
    values = _EveryLayer() if main_device(model).type == "meta" else nullcontext()
    with preserve_randomness(), evaluating(*modules), torch.set_grad_enabled(grad), values:
        for module in modules:
            module.train(grad)
        less, more = (
            (saved_bytes if grad else peak_bytes)(partial(_run, model, readers, (rows, tokens), labels, grad=grad), own)
            for rows in (few, few + 1)
        )
        for module in modules:
            module.train(not grad)  # what fusions counted meanwhile is forgotten
    row = more - less
    return KeptBytes(max(0, less - few * row), row)


def _run(
    model: PreTrainedModel, readers: Readers, shape: tuple[int, int], labels: Labels | None, *, grad: bool
) -> list[Any]:
    """What readers make of zeros, and with gradients their losses."""
    given, held = {} if labels is None else labels(shape[0]), []
    for stack in dict.fromkeys(stack for stack, _ in readers.values()):
        members = {name: module for name, (own, module) in readers.items() if own is stack}
        stack_pass = StackPass(model, stack, members, grad=grad)
        for layer in stack_pass.layers:
            stack_pass.on_state(layer, torch.zeros(*shape, stack.width, dtype=model.dtype, device=main_device(model)))
        outputs = stack_pass.finish(given)
        held += outputs.values()
        if grad:
            held += [members[name].loss(outputs[name].logits, given[name]) for name in members if name in given]
    return held


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
