"""`bank.listen`: let readers read forward passes and calls of `generate` that the bank did not start itself."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, final, get_args

from torch import Tensor, nn
from transformers import GenerationMixin

from lamina.bank.generation import (
    DECODING_METHODS,
    GenerateCall,
    Generated,
    Interception,
    intercept_generate,
    is_hidden,
)
from lamina.bank.generation_states import GenerationObserver, GenerationStates, Over, inputs_of
from lamina.bank.reader import BankOutput, ReaderOutput
from lamina.bank.stack_pass import StackPass, is_internal, past_tokens
from lamina.errors import ConfigError, check_known
from lamina.fusion.base import require_fed
from lamina.layers.adapters import without_wrapper
from lamina.layers.hooks import ContextHooks, arguments
from lamina.layers.preserve import uncompiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank.reader_collection import ReaderCollection
    from lamina.layers import Site

NewObserver = Callable[[GenerateCall], GenerationObserver]


@contextmanager
def listening(
    bank: ReaderCollection, passes: Sequence[StackPass], over: Over, new_observer: NewObserver | None = None
) -> Iterator[BankOutput]:
    """Let readers read the model's forward passes inside the `with` block.

    Args:
        bank: The bank, whose model runs.
        passes: One pass per stack, with the readers. A new pass is started from it for each call of the model that its
            readers read: the first one, and the first after `outputs.clear()`.
        over: Which part of a generated text the readers of a decoder read.
        new_observer: Called with each call of `generate`; returns an observer that receives the tokens and states.
            Readers then have no output. None: not called.

    Yields:
        The readers' outputs, filled while the model is called.

    Raises:
        ConfigError: If an enclosing `with` block already uses one of the readers.
    """
    listener, model = _Listener(bank, passes, over, new_observer), bank.model
    interception = Interception(model, listener.on_generate, listener.is_waiting, listener.is_reading)
    with uncompiled(), _registered(listener), intercept_generate(interception), ContextHooks() as hooks:
        for template in passes:
            on_state, on_start = partial(listener.on_state, template), partial(listener.on_start, template)
            template.hook(hooks, on_state, on_start, partial(listener.on_inner_state, template))
            hooks.add(template.stack.scope.register_forward_hook, partial(listener.on_end, template))
        # the modules around a stack, since only they see the arguments of the whole model, such as the mask
        paths = [template.stack.scope_path.split(".") for template in passes]
        for around in dict.fromkeys(".".join(path[:count]) for path in paths for count in range(len(path))):
            module = model.get_submodule(around)
            hooks.add(module.register_forward_pre_hook, listener.on_call, with_kwargs=True, prepend=True)
            hooks.add(module.register_forward_hook, listener.on_return, always_call=True)
        yield listener.outputs


@contextmanager
def _registered(listener: _Listener) -> Iterator[None]:
    """Register a listener inside the `with` block; ConfigError if an open listener already uses one of the readers."""
    for other in _listeners.get():
        twice = [name for name, reader in listener.readers.items() if reader in other.readers.values()]
        if twice and other.is_open:
            problem = f"reader '{twice[0]}' is listening already"
            raise ConfigError(f"bank.listen: {problem}; a reader reads a pass once. Leave the context around this one.")
    _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        listener.is_open = False  # tasks started in the block have a copy of `_listeners`, and check this
        _listeners.set(tuple(other for other in _listeners.get() if other is not listener))


@final
class _Listener:
    """The hooks of one `listening` context, and their state.

    Threads that share the context may call the model at the same time, so each has its own state, and no lock is
    needed. For each stack there is a template: a `StackPass` with the readers of the stack, from which a new pass is
    started for each call of the model.

    The arguments are those of `listening`; `passes` are the templates. If `new_observer` is None, readers have outputs.
    """

    def __init__(
        self, bank: ReaderCollection, passes: Sequence[StackPass], over: Over, new_observer: NewObserver | None
    ) -> None:
        self.outputs = BankOutput()
        self.over: Over = over
        self.is_open = True
        self.readers = {name: reader for template in passes for name, reader in template.readers.items()}
        self._bank, self._model, self._templates, self._new_observer = bank, bank.model, passes, new_observer
        # thread -> the context of eval mode in which the outermost of these calls runs
        self._modes: dict[int, AbstractContextManager[None]] = {}
        # thread -> arguments of the calls around a stack that are under way, outermost module first
        self._calls: dict[int, dict[nn.Module, dict[str, object]]] = defaultdict(dict)
        # (thread, template) -> the pass that runs now; no entry if its readers have an output already
        self._running: dict[tuple[int, StackPass], StackPass] = {}
        # (thread, template) -> the text of the `generate` that runs now; None if its readers have an output already
        self._texts: dict[tuple[int, StackPass], GenerationStates | None] = {}
        for template in passes:
            problem = f"no pass of the stack '{template.stack.name}' ran in this context"
            threads = "a thread started by hand must run contextvars.copy_context().run; generate_batch cannot be read"
            self._explain(template, f"{problem} ({threads})")

    def _explain(self, template: StackPass, reason: str) -> None:
        self.outputs.missing.update(dict.fromkeys(template.readers, reason))

    def _has_output(self, template: StackPass) -> bool:
        return not self.outputs.readers.keys().isdisjoint(template.readers)

    def is_waiting(self) -> bool:
        """Return whether readers wait for a generated text: `over` includes new tokens, and some have no output yet."""
        stacks = [template for template in self._templates if reads_generated_text(template, self._model)]
        return self.over != "prompt" and not is_hidden(self) and not all(map(self._has_output, stacks))

    def is_reading(self) -> bool:
        return not is_hidden(self) and not all(map(self._has_output, self._templates))

    def _ignores(self) -> bool:
        """Return whether the pass that runs now is a bank's own, or one of a callback of a `generate` that is read."""
        return is_internal.get() or is_hidden(self)

    def on_call(self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Store the arguments of a call of a module around a stack; a forward pre-hook of that module.

        If no such call is under way in this thread, also put a frozen model in eval mode, until `on_return`.
        """
        if self._ignores():
            return
        thread, named = get_ident(), arguments(module, args, kwargs)
        if not self._calls[thread] and not self._is_trained():
            self._modes[thread] = mode = self._bank.eval_pass()
            mode.__enter__()
        self._calls[thread][module] = {name: value for name, value in named.items() if value is not None}

    def on_return(self, module: nn.Module, *_: object) -> None:
        """Drop what `on_call` stored; after the outermost call, restore the model's mode. Also called on errors."""
        if self._ignores():
            return
        thread = get_ident()
        self._calls[thread].pop(module, None)
        if not self._calls[thread] and (mode := self._modes.pop(thread, None)):
            mode.__exit__(None, None, None)

    def _is_trained(self) -> bool:
        """Return whether the caller trains the model: it is in training mode and not frozen."""
        return self._model.training and any(weight.requires_grad for weight in self._model.parameters())

    def _refusal(self, template: StackPass) -> str | None:
        """Return why the readers of `template` cannot read the model now, a phrase for a message; None if they can."""
        if change := self._bank.change_of_base([template.stack.name]):
            return f"the model has changed since the bank was made: {change}"
        return "the model is being trained: it is in training mode and not frozen" if self._is_trained() else None

    def on_start(self, template: StackPass, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begin to read a pass over a stack, if the readers of `template` wait for it and may read it.

        A bank's own passes are not read. With `over` "output" or monitors, a stack that writes text is only read inside
        of `generate`. If readers may not read a pass, the reason is recorded. `args` and `kwargs` are the arguments of
        the module that contains the stack. Unless `over` is "prompt", a text that is continued from a cache outside of
        `generate` drops all outputs and raises ConfigError.
        """
        if self._ignores():
            whose = "bank's own" if is_internal.get() else "callback's"
            ran = f"only a {whose} pass over the stack '{template.stack.name}' ran"
            self._explain(template, f"{ran}, which is not part of the main job")
            return
        thread = get_ident()
        batch = ChainMap(*self._calls[thread].values())
        self._running.pop((thread, template), None)  # left over from a pass that was stopped
        if (thread, template) in self._texts:
            if text := self._texts[thread, template]:
                text.on_start(batch, args, kwargs)
            return
        generated = reads_generated_text(template, self._model) and self.over != "prompt"
        # even if the readers have an output already: it may be the output for the prompt of this text
        if generated and past_tokens(inputs_of(template, batch, args, kwargs)):
            self.outputs.clear()
            raise ConfigError(
                "bank.listen: a pass continues from a cache of tokens outside generate; only texts that "
                "generate writes can be followed. Use over='prompt'."
            )
        if self._has_output(template):
            return
        if generated:
            if self._new_observer is not None:
                return
            if self.over == "output":
                self._explain(template, "the model was called, which writes no output; only generate does")
                return
        if reason := self._refusal(template):
            self._explain(template, reason)
            return
        self._running[thread, template] = stack_pass = template.restart()
        stack_pass.begin(batch, args, kwargs)

    def on_state(self, template: StackPass, layer: int, state: Tensor) -> None:
        """Pass a layer's state to the generated text that `template` reads now, or else to its single pass, if any.

        The last state of a single pass completes the outputs of its readers.
        """
        key = get_ident(), template
        if self._ignores():
            return
        if text := self._texts.get(key):
            text.on_state(layer, state)
        elif (stack_pass := self._running.get(key)) is not None and stack_pass.on_state(layer, state):
            del self._running[key]
            logits, real = stack_pass.finish(), require_fed(stack_pass.real)
            outputs = {name: ReaderOutput(logits[name], real) for name in stack_pass.readers}
            # outputs that another thread has stored meanwhile take precedence
            self.outputs.readers.update(outputs | self.outputs.readers)

    def on_inner_state(self, template: StackPass, site: Site, layer: int, state: Tensor) -> None:
        """Pass a value from inside the block of `layer` to the single pass that `template` reads now, if any."""
        if not self._ignores() and (stack_pass := self._running.get((get_ident(), template))) is not None:
            stack_pass.on_inner_state(site, layer, state)

    def on_end(self, template: StackPass, *_: object) -> None:
        """End a pass over a stack; raise ConfigError if it did not compute a layer that a reader needs."""
        key = get_ident(), template
        if self._ignores():
            return
        if text := self._texts.get(key):
            text.on_end()
        elif stack_pass := self._running.pop(key, None):
            stack_pass.finish()  # the pass is incomplete, so this raises the error that names the missing layer

    def _readable(self, templates: Sequence[StackPass]) -> list[StackPass]:
        """Return the `templates` whose readers have no output yet and can read the model as it is now; see `_refusal`.

        If readers cannot, the reason is recorded for `outputs[name]`; if a monitor needs them, ConfigError is raised.
        """
        waiting: list[StackPass] = []
        for template in templates:
            if self._has_output(template):
                continue
            if (reason := self._refusal(template)) is None:
                waiting.append(template)
            elif self._new_observer is not None:  # a monitor without scores would look like one that flags nothing
                raise ConfigError(f"bank.watch: {reason}.")
            else:
                self._explain(template, reason)
        return waiting

    def _new_text(
        self, template: StackPass, call: GenerateCall, observer: GenerationObserver | None
    ) -> GenerationStates | None:
        """Return an object that reads the text of `call` for the readers of `template`; None if none of them can.

        Readers whose fusion reads inside the blocks cannot; the reason is recorded for them. They are only here if
        `over` is "prompt", and the prompt may be read in pieces.
        """
        inside = {name for name, reader in template.readers.items() if reader.config.fusion.reads_inside}
        if inside:
            problem = "its fusion reads inside the blocks, and generate may not read the whole prompt in one pass"
            causes = "prefill_chunk_size, assisted decoding, and caches that hold tokens already or have a fixed size"
            self.outputs.missing.update(dict.fromkeys(inside, f"{problem}. Leave out {causes}"))
            template = template.restart({name: r for name, r in template.readers.items() if name not in inside})
        return GenerationStates(template, call, self.over, observer) if template.readers else None

    @contextmanager
    def on_generate(self, call: GenerateCall) -> Iterator[Callable[[Generated], None]]:
        """Read the states of decoder stacks during a call of `generate`, where their readers have no output yet.

        With `over` "prompt" it does so only if `call.prompt_in_pieces`; otherwise `on_start` reads the prompt. This
        context manager yields a function that completes the outputs; the caller passes it the result of `generate`. If
        readers without monitors cannot read the model now, the reason is recorded. Raises ConfigError if monitors'
        readers cannot, or if the call decodes in an unsupported way.
        """
        thread, outputs = get_ident(), self.outputs.readers
        templates = [template for template in self._templates if reads_generated_text(template, self._model)]
        if is_hidden(self) or (self.over == "prompt" and not call.prompt_in_pieces):
            templates = []  # a callback generates; or the first pass reads the whole prompt, like any other pass
        else:
            call.listeners.append(self)
        waiting = self._readable(templates)
        if waiting:
            call.check()
        observer = self._new_observer(call) if waiting and self._new_observer is not None else None
        texts = {
            template: self._new_text(template, call, observer) if template in waiting else None
            for template in templates
        }
        self._texts.update({(thread, template): text for template, text in texts.items()})

        def on_result(result: Generated) -> None:
            for text in filter(None, texts.values()):
                finished = text.finish(result)
                if isinstance(finished, str):
                    self._explain(text.template, finished)
                else:
                    outputs.update(finished | outputs)

        try:
            yield on_result
        finally:
            for template in texts:
                del self._texts[thread, template]
            if observer is not None:
                observer.close()


_listeners: ContextVar[tuple[_Listener, ...]] = ContextVar("listeners", default=())


def reads_generated_text(stack_pass: StackPass, model: PreTrainedModel) -> bool:
    """Return whether a pass is over a stack that reads generated tokens.

    Such a stack is a decoder, or the only stack of a generative model.
    """
    return stack_pass.stack.name == "decoder" or (stack_pass.stack.name == "main" and can_generate(model))


def can_generate(model: PreTrainedModel) -> bool:
    """Return whether a model has a head that generates text."""
    return bool(getattr(model, "can_generate", bool)())


def check_over(model: PreTrainedModel, passes: Sequence[StackPass], over: str) -> None:
    """Check that the readers in `passes` can read the part `over` of a generated text.

    Raises:
        UnknownNameError: If `over` is none of "prompt", "output" and "both".
        ConfigError: Unless `over` is "prompt": if the model does not generate text or decodes by a loop of its own, or
            a fusion over the stack that generates reads inside its blocks.
    """
    check_known("bank.listen", [over], get_args(Over), "over")
    if over == "prompt":
        return
    if not can_generate(model):
        problem = f"over is '{over}', but {type(model).__name__} has no head that generates text"
        raise ConfigError(f"bank.listen: {problem}. Load it with one, or use over='prompt'.")
    kind = type(without_wrapper(model))  # a PEFT wrapper leaves the decoding to the model inside
    if any(getattr(kind, name, None) is not getattr(GenerationMixin, name) for name in DECODING_METHODS):
        problem = f"over is '{over}', and {kind.__name__} decodes by its own loop, which is not known"
        raise ConfigError(f"bank.listen: {problem}. Use over='prompt'.")
    for stack_pass in passes:
        for name, reader in stack_pass.readers.items():
            if reads_generated_text(stack_pass, model) and reader.config.fusion.reads_inside:
                problem = f"over is '{over}', and the fusion of reader '{name}' runs along with the model's own blocks"
                raise ConfigError(f"bank.listen: {problem}, not from one token to the next. Use over='prompt'.")
