"""Readers that listen to the main job's own passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lamina.bank.reader import BankOutput
from lamina.bank.streaming import StackPass
from lamina.layers.hooks import argument, token_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MASKS = ("attention_mask", "decoder_attention_mask")


@contextmanager
def listening(model: PreTrainedModel, passes: Sequence[StackPass]) -> Iterator[BankOutput]:
    """Read the model's own passes, one per stack, for as long as the context lasts; the output fills as it runs."""
    heard = BankOutput()
    batch: dict[str, Any] = {}  # the masks that the running call of the whole model was given

    def before(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        batch.update({name: argument(module, name, args, kwargs) for name in MASKS})

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        hooks.enter_context(model.register_forward_hook(lambda *_: batch.clear(), always_call=True))
        for stack_pass in passes:
            listener = _Listener(model, stack_pass, heard, batch)
            hooks.enter_context(stack_pass.hooked(listener.take, listener.start))
        yield heard


class _Listener:
    """Listens to one stack: a new pass begins whenever its readers have heard nothing yet."""

    def __init__(self, model: PreTrainedModel, first: StackPass, heard: BankOutput, batch: Mapping[str, Any]) -> None:
        self._model, self._first, self._heard, self._batch = model, first, heard, batch
        self._pass: StackPass | None = None

    def start(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._pass = None
        if not any(name in self._heard for name in self._first.readers):
            self._pass = StackPass(self._first.stack, self._first.readers, grad=False)
            self._pass.mask = token_mask(self._first.stack, self._batch, args, kwargs)

    def take(self, layer: int, state: Tensor) -> None:
        if self._pass is not None and self._pass.take(layer, state):
            outputs, self._pass = self._pass.finish(self._model), None
            self._heard.readers.update(outputs)
