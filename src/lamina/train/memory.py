"""Measure how much memory a batch needs in the readers of a bank (on states of zeros) or a model (on random inputs).

For training this is what autograd saves for the gradients; for scoring it is the peak of all intermediate tensors. The
need is taken to be linear in the number of rows, so two measurements that differ by one row determine it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, NamedTuple, Self, final
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.bank.stack_pass import StackPass
from lamina.errors import UnsupportedModelError
from lamina.fusion.ada_layers import KEPT, KEPT_BYTES, ProjectedFusion, recomputing
from lamina.layers.devices import MetaValues, main_device
from lamina.layers.preserve import evaluating, preserve_randomness
from lamina.layers.probe_input import NoInputError, probe_input
from lamina.layers.roles import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack


# Tokens of the smallest batch that scoring is measured on. Some fusions process a bounded number of tokens at a time. A
# batch of this size fills such a chunk, so one more row needs as much memory as it does in a large batch.
_MIN_SCORED_TOKENS = 256


class BatchBytes(NamedTuple):
    """The memory in bytes that a batch needs: `fixed`, and `row` for each of its rows.

    Small batches may keep more: `small_row` for each row, up to `small_most` (see `lamina.fusion.ada_layers`).
    """

    fixed: int
    row: int
    small_row: int = 0
    small_most: int = 0

    @classmethod
    def of(cls, measure: Callable[[int], int], few: int) -> Self:
        """Return the memory from two calls of `measure` (rows -> bytes): with `few` rows, and with one more."""
        less, more = measure(few), measure(few + 1)
        return cls(max(0, less - few * (more - less)), more - less)

    def total(self, rows: int) -> int:
        """Return the bytes that a batch of `rows` rows needs."""
        return self.fixed + rows * self.row + min(rows * self.small_row, self.small_most)

    def plus(self, other: BatchBytes) -> BatchBytes:
        """Return the bytes that this and `other` need together, at most."""
        return BatchBytes(*(own + more for own, more in zip(self, other, strict=True)))

    def max_rows(self, free_bytes: int) -> int:
        """Return the largest number of rows in a batch that fits into `free_bytes`; 0 if not even one row fits."""
        free = max(0, free_bytes - self.fixed)
        return max(free // max(1, self.row + self.small_row), max(0, free - self.small_most) // max(1, self.row))

    def accumulation_steps(self, rows: int, free_bytes: int) -> int | None:
        """Return the least number of equal batches into which `rows` can be split so that each fits into `free_bytes`.

        None if not even one row fits.
        """
        if (fit := self.max_rows(free_bytes)) < 1:
            return None
        return next(count for count in range(math.ceil(rows / fit), rows + 1) if rows % count == 0)


def saved_bytes(run: Callable[[], object], excluded: Iterable[Tensor] = ()) -> int:
    """Call `run`, and return how many bytes autograd saves during the call for the backward pass.

    A storage that several tensors share counts once.

    Args:
        run: The computation. It must return its results, so that they stay alive until everything is counted.
        excluded: Tensors whose storages do not count, such as the parameters, which exist anyway.
    """
    known = {tensor.untyped_storage()._cdata for tensor in excluded}
    sizes: dict[int, int] = {}

    def record_size(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(record_size, lambda tensor: tensor):
        run()
    return sum(sizes.values())


@final
class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors created inside the `with` block, until they are freed.

    The storages of `excluded` tensors do not count. `now` is the number of bytes that are alive, `peak` its largest
    value.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in excluded}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run one operation of torch, and count the storages of its results, except those already counted."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                finalize(storage, self._uncount, storage._cdata, storage.nbytes())
        return result

    def _uncount(self, storage: int, size: int) -> None:
        """Subtract a freed storage, and forget its address (`storage`), because a new storage may get it."""
        self._known.discard(storage)
        self.now -= size


def peak_bytes(run: Callable[[], object], excluded: Iterable[Tensor] = ()) -> int:
    """Call `run`, and return the largest number of bytes that its new tensors occupy at the same time.

    Args:
        run: The computation.
        excluded: Tensors that exist before the call, whose storages do not count.
    """
    with _LiveBytes(excluded) as live:
        run()
    return live.peak


Readers = Mapping[str, "tuple[LayerStack, ReaderModule]"]  # reader name -> the stack that it reads, and its module
Labels = Callable[[int], Mapping[str, Tensor]]  # number of rows -> reader name -> labels of so many rows


class RowShape(NamedTuple):
    """The size of a row: `tokens` of its text, `target` tokens of its target text, or its `image_size`.

    If `target` is 0, the target text has as many tokens as the text. If `image_size` is None, the config has the size.
    """

    tokens: int
    target: int = 0
    image_size: int | None = None


def model_memory(model: PreTrainedModel, shape: RowShape) -> BatchBytes:
    """Measure the memory that autograd keeps for the gradients of a whole model, on random inputs.

    The logits are counted as for a loss in float32. On the meta device nothing is computed.

    Args:
        model: The model. Parameters that need no gradients stay frozen.
        shape: Tokens, or size of an image, of each row. By default, images have the size in the config.

    Raises:
        UnsupportedModelError: If no input can be made for the model.
    """
    try:
        probe = probe_input(model, shape.tokens + 2, seed=0)
    except NoInputError as error:
        hint = "Give batch sizes by hand."
        raise UnsupportedModelError(op="memory", model_type=family_of(model), reason=str(error), hint=hint) from error
    sizes = {key: shape.target or shape.tokens if key.startswith("decoder_") else shape.tokens for key in probe.inputs}
    inputs = {key: value[:1, : sizes[key]] if value.ndim == 2 else value[:1] for key, value in probe.inputs.items()}
    options: dict[str, bool] = {}
    if shape.image_size is not None and "pixel_values" in inputs:
        size, options = (shape.image_size,) * 2, {"interpolate_pos_encoding": True}
        inputs["pixel_values"] = inputs["pixel_values"][..., :1, :1].expand(-1, -1, *size)
        options = {key: value for key, value in options.items() if key in signature(model.forward).parameters}

    def run(rows: int) -> object:
        output = model(**{key: value.expand(rows, *value.shape[1:]) for key, value in inputs.items()}, **options)
        logits = getattr(output, "logits", None)
        return output, None if logits is None else logits.float().log_softmax(-1)

    excluded = [*model.parameters(), *model.buffers()]
    values = _EveryLayer() if main_device(model).type == "meta" else nullcontext()
    with preserve_randomness(), evaluating(model), torch.enable_grad(), values:
        model.train()
        return BatchBytes.of(lambda rows: saved_bytes(partial(run, rows), excluded), 2)


def _measure(
    model: PreTrainedModel, readers: Readers, tokens: int, labels: Labels | None = None, *, grad: bool
) -> BatchBytes:
    """Measure the memory that readers need for a batch: in training with `grad`, else in scoring.

    In training, it is what autograd keeps for the gradients; in scoring, the peak. The readers run on states of zeros.
    The model itself does not run, and neither its weights nor its gradients count. Readers that need more of the
    model's pass than stored states are left out; if no other is there, both numbers are 0.

    `readers` is reader name -> (the stack that it reads, its module), and `tokens` the length of a row with padding.
    `labels` returns reader name -> labels for a number of rows. None: no losses are computed, and heads over a
    vocabulary compute the logits of all positions.
    """
    readers = {name: entry for name, entry in readers.items() if not entry[1].config.fusion.reads_inside}
    if not readers:
        return BatchBytes(0, 0)
    modules = [module for _, module in readers.values()]
    excluded = [tensor for module in (*modules, model) for tensor in (*module.parameters(), *module.buffers())]
    # at least 2 rows: with a single one, some operations return views where they would copy a batch
    few = 2 if grad else max(2, math.ceil(_MIN_SCORED_TOKENS / tokens))
    values = _EveryLayer() if main_device(model).type == "meta" else nullcontext()
    with preserve_randomness(), evaluating(*modules), torch.set_grad_enabled(grad), values, recomputing():
        for module in modules:
            module.train(grad)
        count = saved_bytes if grad else peak_bytes
        found = BatchBytes.of(
            lambda rows: count(partial(_run, model, readers, (rows, tokens), labels, grad=grad), excluded), few
        )
        for module in modules:
            module.train(not grad)  # a change of mode resets the importances that fusions counted on the zeros
    if not grad:
        return found
    # small batches keep what was computed again here
    projected = [(id(stack), one.fusion) for stack, one in readers.values() if isinstance(one.fusion, ProjectedFusion)]
    streams = {(stack, fusion.group()) for stack, fusion in projected}
    features = sum(fusion.projection.shape[:2].numel() for _, fusion in projected)
    return found._replace(small_row=KEPT_BYTES // KEPT * features * tokens, small_most=KEPT_BYTES * len(streams))


reader_memory, scoring_memory = partial(_measure, grad=True), partial(_measure, grad=False)


def _run(
    model: PreTrainedModel, readers: Readers, shape: tuple[int, int], labels: Labels | None, *, grad: bool
) -> list[object]:
    """Call readers with states of zeros, and return their outputs; with `grad`, return their losses too.

    `shape` is the number of rows and of tokens. The states have the dtype and device of the model. `labels` returns
    reader name -> labels for a number of rows. None: no losses are computed.
    """
    labels_by_reader: Mapping[str, Tensor] = {} if labels is None else labels(shape[0])
    results: list[object] = []
    for stack in dict.fromkeys(stack for stack, _ in readers.values()):
        members = {name: module for name, (read_stack, module) in readers.items() if read_stack is stack}
        stack_pass = StackPass(model, stack, members, grad=grad)
        for layer in stack_pass.layers:
            stack_pass.on_state(layer, torch.zeros(*shape, stack.width, dtype=model.dtype, device=main_device(model)))
        outputs = stack_pass.finish(labels_by_reader)
        results += (*outputs.values(), stack_pass.real)
        if grad:
            labelled = [name for name in members if name in labels_by_reader]
            results += [members[name].loss(outputs[name], labels_by_reader[name]) for name in labelled]
    return results


class _EveryLayer(MetaValues):
    """A context manager: inside it, fusions on the meta device read all of their layers.

    Fusions skip layers whose weight is 0. On the meta device weights have no values. So `tolist` gives zeros here, and
    `nonzero` finds every position, so that no layer is skipped.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call a function of torch, as the class says."""
        if func in _VALUES and isinstance(args[0], Tensor) and args[0].is_meta:
            return _VALUES[func](args[0].shape)
        return super().__torch_function__(func, types, args, kwargs)


_VALUES: dict[Callable[..., object], Callable[[torch.Size], object]] = {
    torch.Tensor.tolist: lambda shape: torch.zeros(shape, device="cpu").tolist(),
    torch.Tensor.nonzero: lambda shape: torch.ones(shape, device="cpu").nonzero(),
}
