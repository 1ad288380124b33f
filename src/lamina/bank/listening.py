"""Readers that listen to the main job's own passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lamina.bank.reader import BankOutput
from lamina.bank.streaming import StackPass
from lamina.layers.hooks import argument, token_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def listening(model: PreTrainedModel, passes: Sequence[StackPass]) -> Iterator[BankOutput]:
    """Read the model's own passes, one per stack, for as long as the context lasts; the output fills as it runs."""
    heard = BankOutput()
    batch: dict[str, Any] = {}  # the masks that the running call of the whole model was given

    running: dict[StackPass, StackPass] = {}  # the present pass of each; none where its readers have heard one already

    def before(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        for name in ("attention_mask", "decoder_attention_mask"):
            batch[name] = argument(module, name, args, kwargs)

    def start(given: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        running.pop(given, None)
        if not any(name in heard for name in given.readers):
            running[given] = StackPass(given.stack, given.readers, grad=False)
            running[given].mask = token_mask(given.stack, batch, args, kwargs)

    def take(given: StackPass, layer: int, state: Tensor) -> None:
        if given in running and running[given].take(layer, state):
            heard.readers.update(running.pop(given).finish(model))

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        hooks.enter_context(model.register_forward_hook(lambda *_: batch.clear(), always_call=True))
        for stack_pass in passes:
            hooks.enter_context(stack_pass.hooked(partial(take, stack_pass), partial(start, stack_pass)))
        yield heard
