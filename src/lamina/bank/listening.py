"""Readers that listen: they take part in the model's own passes, whoever runs them, and in calls of `generate`."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, final, get_args

from torch import Tensor, nn

from lamina.bank.generation import GenerateCall, following
from lamina.bank.generation_states import Follower, GenerationStates, Over, inputs_of
from lamina.bank.reader import BankOutput
from lamina.bank.stack_pass import StackPass, past_tokens
from lamina.errors import ConfigError, check_known
from lamina.layers.hooks import ContextHooks, arguments
from lamina.layers.wrappers import uncompiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Begin = Callable[[GenerateCall], Follower]


@contextmanager
def listening(
    model: PreTrainedModel, passes: Sequence[StackPass], over: Over, begin: Begin | None = None
) -> Iterator[BankOutput]:
    """Read the model's own passes, one per stack, for as long as the context lasts; the output fills as it runs.

    With `begin` nothing is heard, but every text that `generate` writes is handed to the follower that it makes for it.
    """
    listener = _Listener(model, passes, over, begin)
    with uncompiled(), _alone(listener), following(model, listener.follow), ContextHooks() as hooks:
        for stack_pass in passes:
            on_state, start = partial(listener.on_state, stack_pass), partial(listener.start, stack_pass)
            hooks.enter_context(stack_pass.hooked(on_state, start))
            hooks.add(stack_pass.stack.scope.register_forward_hook, partial(listener.end, stack_pass))
        paths = [stack_pass.stack.scope_path.split(".") for stack_pass in passes]
        for around in dict.fromkeys(".".join(path[:count]) for path in paths for count in range(len(path))):
            module = model.get_submodule(around)
            hooks.add(module.register_forward_pre_hook, listener.before, with_kwargs=True, prepend=True)
            hooks.add(module.register_forward_hook, listener.after, always_call=True)
        yield listener.heard


@contextmanager
def _alone(listener: _Listener) -> Iterator[None]:
    """Raise ConfigError if a reader is listening in this context already."""
    for other in _present.get():
        twice = [name for name, reader in other.readers.items() if listener.readers.get(name) is reader]
        if twice and other.open:
            came = f"reader '{twice[0]}' is listening already"
            raise ConfigError(f"bank.listen: {came}; a text is heard once. Leave the context around this one first.")
    _present.set((*_present.get(), listener))
    try:
        yield
    finally:
        listener.open = False  # for tasks that began inside, whose contexts are copies
        _present.set(tuple(other for other in _present.get() if other is not listener))


@final
class _Listener:
    """What is under way, by thread, since tasks of one context may run the model at once."""

    def __init__(self, model: PreTrainedModel, passes: Sequence[StackPass], over: Over, begin: Begin | None) -> None:
        self.heard = BankOutput()
        self._model, self._passes, self._begin = model, passes, begin
        self.over: Over = over
        self.open = True
        self.readers = {name: reader for template in passes for name, reader in template.readers.items()}
        # what the modules around a stack, outermost first, are being called with
        self._calls: dict[int, dict[nn.Module, dict[str, object]]] = defaultdict(dict)
        # the present pass of each stack, none where its readers have heard one already
        self._running: dict[tuple[int, StackPass], StackPass] = {}
        # the text that each decoder stack reads, while `generate` runs; None where its readers have heard one already
        self._texts: dict[tuple[int, StackPass], GenerationStates | None] = {}
        for template in passes:
            self._miss(template, f"no pass of the stack '{template.stack.name}' ran while the bank listened")

    def _miss(self, template: StackPass, why: str) -> None:
        self.heard.unheard.update(dict.fromkeys(template.readers, why))

    def before(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        given = arguments(module, args, kwargs)
        self._calls[get_ident()][module] = {name: value for name, value in given.items() if value is not None}

    def after(self, module: nn.Module, *_: object) -> None:
        self._calls[get_ident()].pop(module, None)

    def start(self, template: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if _own_pass.get():
            ran = f"only a bank's own pass over the stack '{template.stack.name}' ran, which is no part of the main job"
            self._miss(template, ran)
            return
        thread = get_ident()
        batch = ChainMap(*self._calls[thread].values())
        self._running.pop((thread, template), None)
        if (thread, template) in self._texts:
            if text := self._texts[thread, template]:
                text.start(batch, args, kwargs)
            return
        if self._begin is not None or not self.heard.readers.keys().isdisjoint(template.readers):
            return
        if decodes(template, self._model) and self.over != "prompt":
            if past_tokens(inputs_of(template, batch, args, kwargs)):
                raise ConfigError(
                    "bank.listen: a pass goes on from a cache of tokens, and not in a call of generate; what is "
                    "written in another way is not followed. Use over='prompt'."
                )
            if self.over == "output":
                self._miss(template, "the model was called, which writes no output; only generate does")
                return
        self._running[thread, template] = begun = template.again()
        begun.begin(batch, args, kwargs)

    def on_state(self, template: StackPass, layer: int, state: Tensor) -> None:
        key = get_ident(), template
        if _own_pass.get():
            return
        if text := self._texts.get(key):
            text.on_state(layer, state)
        elif (begun := self._running.get(key)) is not None and begun.on_state(layer, state):
            self.heard.readers.update(self._running.pop(key).finish() | self.heard.readers)

    def end(self, template: StackPass, *_: object) -> None:
        key = get_ident(), template
        if _own_pass.get():
            return
        if text := self._texts.get(key):
            text.end()
        elif begun := self._running.pop(key, None):
            begun.finish()  # tells which layer is missing

    def _new_text(self, template: StackPass, call: GenerateCall, follower: Follower | None) -> GenerationStates:
        return GenerationStates(template, call, self.over, follower)

    @contextmanager
    def follow(self, call: GenerateCall) -> Iterator[Callable[[Tensor, Tensor | None], None]]:
        """Around a call of `generate`: read the steps of each decoder stack whose readers have heard no text yet."""
        thread, heard = get_ident(), self.heard.readers
        decoders = [template for template in self._passes if decodes(template, self._model)]
        if self.over == "prompt" and not call.in_pieces:  # the first pass is the prompt
            decoders = []
        waiting = [template for template in decoders if heard.keys().isdisjoint(template.readers)]
        if waiting:
            call.check()
        follower = self._begin(call) if waiting and self._begin is not None else None
        texts = {
            (thread, t): GenerationStates(t, call, self.over, follower) if t in waiting else None for t in decoders
        }
        self._texts.update(texts)

        def hear(sequences: Tensor, rows: Tensor | None) -> None:
            for (_, template), text in texts.items():
                said = text.finish(sequences, rows) if text is not None else {}
                if isinstance(said, str):
                    self._miss(template, said)
                else:
                    heard.update(said | heard)

        try:
            yield hear
        finally:
            for key in texts:
                del self._texts[key]


_present: ContextVar[tuple[_Listener, ...]] = ContextVar("present", default=())
_own_pass: ContextVar[bool] = ContextVar("own_pass", default=False)


@contextmanager
def unheard() -> Iterator[None]:
    """A bank's own pass runs within, which nobody listens to: it is no part of the main job."""
    before = _own_pass.set(True)
    try:
        yield
    finally:
        _own_pass.reset(before)


def decodes(stack_pass: StackPass, model: PreTrainedModel) -> bool:
    """Whether a stack reads what `generate` writes."""
    return stack_pass.stack.name == "decoder" or (stack_pass.stack.name == "main" and generates(model))


def generates(model: PreTrainedModel) -> bool:
    """Whether a model has `generate`."""
    return bool(getattr(model, "can_generate", bool)())


def check_over(model: PreTrainedModel, passes: Sequence[StackPass], over: str) -> None:
    """Raise ConfigError if readers cannot hear what `over` says."""
    check_known("bank.listen", [over], get_args(Over), "over")
    if over == "prompt":
        return
    if not generates(model):
        came = f"over is '{over}', but {type(model).__name__} has no head that generates text"
        raise ConfigError(f"bank.listen: {came}. Load it with one, or use over='prompt'.")
    for stack_pass in passes:
        for name, reader in stack_pass.readers.items():
            if decodes(stack_pass, model) and reader.config.fusion.needs_block_inputs:
                came = f"over is '{over}', and the fusion of reader '{name}' runs along with the model's own blocks"
                raise ConfigError(f"bank.listen: {came}, not from one token to the next. Use over='prompt'.")
