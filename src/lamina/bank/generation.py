"""Intercept calls of `generate` without changing the model, and assign hidden states to the returned sequences."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from lamina.bank.stack_pass import past_tokens
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from transformers import GenerationConfig, PreTrainedModel

Method = Callable[..., Any]  # a method of `GenerationMixin`, or a function in its place

# The methods in which `generate` decodes, once it has prepared the prompt, the options and the stopping criteria. It
# looks them up when it runs, so they are intercepted even where `model.generate` was bound before.
DECODING_METHODS = ("_sample", "_beam_search", "_assisted_decoding")

# option of `generate` -> (whether a value of it is refused, why its states could not be assigned to the text)
_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "custom_generate": (bool, "decodes by its own loop, which is not known"),
    "guidance_scale": (lambda scale: scale != 1, "runs the model on a second prompt between the steps"),
    "token_healing": (bool, "writes a text before the one that it returns"),
    "assistant_early_exit": (bool, "drafts with the lower layers of the model itself"),
    "cache_implementation": (lambda name: name == "paged", "puts several texts into one row"),
}


# What does not read the passes that run now: the listeners of each `generate` of which a callback runs.
_hidden: ContextVar[tuple[object, ...]] = ContextVar("hidden", default=())


@contextmanager
def in_callback(listeners: Sequence[object]) -> Iterator[None]:
    """Hide the passes inside the `with` block, in which a callback runs, from the listeners of its `generate`.

    Listeners that the callback opens, or those of other models, read as usual.
    """
    before = _hidden.set((*_hidden.get(), *listeners))
    try:
        yield
    finally:
        _hidden.reset(before)


def is_hidden(listener: object) -> bool:
    """Return whether a callback of a `generate` that `listener` reads is running in this context."""
    return listener in _hidden.get()


class Generated(NamedTuple):
    """The result of a call of `generate`, for its caller and for the readers.

    Attributes:
        output: The return value that the caller expects.
        sequences: Token ids `[sequences, tokens]`, as `generate` returns them.
        beam_indices: `[sequences, steps]`, see `GenerateCall`; None without beam search.
    """

    output: object
    sequences: Tensor
    beam_indices: Tensor | None


@final
class _RecordedCriteria(StoppingCriteriaList):
    """The stopping criteria of one call of `generate`, wrapped to record what they decide."""

    def __init__(self, criteria: list[object], listeners: list[object]) -> None:
        super().__init__(criteria)
        self.results: list[Tensor] = []  # one per call, [rows]: True where the criteria end the sequence
        self._listeners = listeners

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Record and return a mask `[rows]`: True for each sequence of `input_ids` that ends with its newest token."""
        with in_callback(self._listeners):
            ended = super().__call__(input_ids, scores, **kwargs)
        self.results.append(ended)
        return ended


@final
class _SeparateProcessors(LogitsProcessorList):
    """The logits processors of one call of `generate`. Passes of the model that they run are no part of its text."""

    def __init__(self, processors: list[object], listeners: list[object]) -> None:
        super().__init__(processors)
        self._listeners = listeners

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with in_callback(self._listeners):
            return super().__call__(input_ids, scores, **kwargs)


@final
class _SeparateStreamer:
    """The streamer of one call of `generate`. Passes of the model that it runs are no part of the text."""

    def __init__(self, streamer: Any, listeners: list[object]) -> None:  # noqa: ANN401
        self._streamer, self._listeners = streamer, listeners

    def put(self, value: Any) -> None:  # noqa: ANN401
        """Pass new tokens on."""
        with in_callback(self._listeners):
            self._streamer.put(value)

    def end(self) -> None:
        """Say that the text has ended."""
        with in_callback(self._listeners):
            self._streamer.end()


@final
class GenerateCall:
    """One call of `generate`. It tells which pass of the model read which token of each returned sequence.

    Each decoding step reads the token that the step before chose. The last new token is read by no step, so it has no
    state. Row i of a pass belongs to row i of the result, except in beam search. There `beam_indices` has, for each
    step, the row that the winning sequence had at that time; it is -1 after the end of the sequence. Without beams, the
    stopping criteria of `generate` say where a sequence ends.

    Args:
        model: The model that generates.
        method: Name of its decoding method, one of `DECODING_METHODS`.
        input_ids: Ids `[rows, tokens]` of the prompt as the decoder reads it, one row per beam or sample.
        kwargs: Keyword arguments of the decoding method.

    Attributes:
        config: The options of the call, as `generate` uses them.
        beams: Whether it decodes by beam search.
        assisted: Whether it uses speculative decoding: some passes then read draft tokens that may be rejected.
        prompt_in_pieces: Whether it is uncertain that the first pass reads the whole prompt with its mask: with prompts
            in chunks, with drafts, or with a cache that holds tokens already or has a fixed size.
        prompt_tokens: Number of tokens of the prompt at the start of the returned sequences, which is the width of
            `prompts`; 0 if the prompt is embeddings.
        prompt: Length of the prompt that the decoder reads, in tokens.
        prompts: `input_ids`, with padding. In an encoder-decoder, these are the decoder's start tokens; if the prompts
            are embeddings, there are none: `[rows, 0]`.
        listeners: What reads the text. The call's callbacks hide their own passes of a model from them.
    """

    def __init__(
        self, model: PreTrainedModel, method: str, input_ids: Int[Tensor, "rows tokens"], kwargs: Mapping[str, Any]
    ) -> None:
        self.listeners = list[object]()
        self._criteria = _RecordedCriteria(kwargs["stopping_criteria"], self.listeners)
        processors = _SeparateProcessors(kwargs["logits_processor"], self.listeners)
        self._kwargs = {**kwargs, "stopping_criteria": self._criteria, "logits_processor": processors}
        if kwargs.get("streamer") is not None:
            self._kwargs["streamer"] = _SeparateStreamer(kwargs["streamer"], self.listeners)
        self.prompts = input_ids
        self.model, self.config = model, kwargs["generation_config"]
        self.beams, self.assisted = method == "_beam_search", method == "_assisted_decoding"
        is_fixed = bool(getattr(kwargs.get("past_key_values"), "is_compileable", False))
        has_cache = is_fixed or past_tokens(kwargs) > 0
        self.prompt_in_pieces = self.assisted or has_cache or self.config.prefill_chunk_size is not None
        embedded = None if model.config.is_encoder_decoder else kwargs.get("inputs_embeds")
        self.prompt_tokens: int = input_ids.shape[1]
        self.prompt: int = self.prompt_tokens if embedded is None else embedded.shape[1]
        # as in `generate`: an ended sequence is padded only if one of the criteria looks for an end token
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in self._criteria)

    def check(self) -> None:
        """Raise ConfigError if states cannot be assigned to tokens: with an option in `_REFUSED`, or a self-draft.

        A self-draft is a call in which the model is its own assistant.
        """
        _check_options(lambda name: getattr(self.config, name, None))
        if self._kwargs.get("assistant_model") is self.model:
            problem = "the model drafts for itself, so that the readers' outputs would be wrong"
            raise ConfigError(f"bank.listen: {problem}. Use another assistant model.")

    def run(self, function: Method) -> Generated:
        """Call `function`, the original decoding method, with the arguments of this call, and return its result.

        Beam search is called with `return_dict_in_generate=True`, to get the beam indices. `Generated.output` has the
        form for which the caller asked.
        """
        config: GenerationConfig = copy.copy(self.config)
        config.return_dict_in_generate = bool(config.return_dict_in_generate) or self.beams
        output = function(self.model, self.prompts, **{**self._kwargs, "generation_config": config})
        if isinstance(output, Tensor):
            return Generated(output, output, None)
        beam_indices = getattr(output, "beam_indices", None)
        wants_dict = self.config.return_dict_in_generate
        return Generated(output if wants_dict else output.sequences, output.sequences, beam_indices)

    def ended(self, first: int, count: int) -> Bool[Tensor, "sequences {count}"]:
        """Return a mask on the CPU, True where the stopping criteria end a sequence. Only a row's first True counts.

        The columns are the `count` new tokens from number `first` (from 0), or fewer if fewer were written. If
        `generate` does not pad ended sequences, all sequences continue until the last one ends, and the mask is False.
        Not for beam search or assisted decoding.
        """
        results = self._criteria.results[first : first + count]
        if not self._pads or not results:
            return torch.zeros(len(self.prompts), len(results), dtype=torch.bool)
        return (results[0].unsqueeze(1) if len(results) == 1 else torch.stack(results, dim=1)).cpu()

    def tokens_read(self, new: Int[Tensor, "sequences tokens"], beam_indices: Tensor | None) -> Tensor:
        """Return how many new tokens of each sequence the model read, `[sequences]`: all but the last one.

        Args:
            new: New tokens, padded after the end of each sequence.
            beam_indices: For beam search, the row of each sequence at each step, as in `Generated`; else None.
        """
        if beam_indices is not None:
            return (beam_indices >= 0).sum(1) - 1
        count = torch.full_like(new[:, 0], new.shape[1])
        # assisted decoding has one sequence, without padding; without a step for each token, no criterion tells its end
        if self.assisted or new.shape[1] > len(self._criteria.results):
            return count - 1
        ended = self.ended(0, new.shape[1]).to(new.device)
        return torch.where(ended.any(1), ended.int().argmax(1) + 1, count) - 1

    def mask(self, stack: str) -> object:
        """Return the attention mask of the prompt that the decoder continues, unchecked; None if the call has none.

        It is the argument `decoder_attention_mask` if `stack` is "decoder", else `attention_mask`.
        """
        return self._kwargs.get("decoder_attention_mask" if stack == "decoder" else "attention_mask")


# A context that is entered around the decoding of a call of `generate`; it yields a function that gets the result.
OnGenerate = Callable[[GenerateCall], AbstractContextManager[Callable[[Generated], None]]]


class Interception(NamedTuple):
    """What `intercept_generate` calls when a model generates.

    Attributes:
        model: The model; calls on its parts count too.
        on_generate: Called with the `GenerateCall`. Returns a context manager that encloses the decoding; it yields a
            function that is then called with the result.
        is_waiting: Returns whether readers wait for the next generated text; if so, the options of `generate` are
            checked first.
        is_reading: Returns whether the next pass of the model is going to be read; if so, "token_healing" is refused.
    """

    model: nn.Module
    on_generate: OnGenerate
    is_waiting: Callable[[], bool]
    is_reading: Callable[[], bool]


@contextmanager
def intercept_generate(interception: Interception) -> Iterator[None]:
    """Inside the `with` block, enter `on_generate` around each `generate` call on the interception's model or a part.

    Only calls in the caller's context (`contextvars`) are intercepted; calls in other threads and tasks run as usual.
    While any such context is open, methods of the class `GenerationMixin` are replaced by functions that forward every
    call. The models themselves are not changed. If readers wait, a call with unsupported options raises ConfigError.
    """
    from transformers import GenerationMixin

    mixin: Any = GenerationMixin
    _in_context.set((*_in_context.get(), interception))
    with _lock:
        if not _open:
            names = (*_CHECKS, *DECODING_METHODS)
            # not every version of transformers has the methods that `_check_loop` checks; it must have the others
            required = (name for name in names if _CHECKS.get(name) is not _check_loop or hasattr(mixin, name))
            _original.update({name: getattr(mixin, name) for name in required})
            for name, function in _original.items():
                check = _CHECKS.get(name)
                setattr(mixin, name, _followed(name, function) if check is None else _checked(check, function))
        _open.append(interception)
    try:
        yield
    finally:
        _in_context.set(tuple(other for other in _in_context.get() if other is not interception))
        with _lock:
            _open.remove(interception)
            if not _open:
                for name, function in _original.items():
                    setattr(mixin, name, function)


# The interceptions of this context. A task that was started within one inherits a copy, which outlives the context:
# an interception therefore counts only while it is in `_open` too.
_in_context: ContextVar[tuple[Interception, ...]] = ContextVar("intercepted_generate", default=())
_open: list[Interception] = []  # of all threads
_original: dict[str, Method] = {}  # name -> original method; valid while they are replaced
_lock = Lock()  # threads open and close contexts: the first replaces the methods, and the last to close restores them


def _interceptions(model: object) -> list[Interception]:
    """Return the open interceptions in this context whose model is `model`, or contains it."""
    mine = [interception for interception in _in_context.get() if interception in _open]
    return [hook for hook in mine if any(part is model for part in hook.model.modules())]


def _check_generate(model: PreTrainedModel, *args: object, **kwargs: object) -> None:
    """Raise ConfigError if `generate` is called with an unsupported option while readers wait for a text.

    A keyword option takes precedence over `generation_config`, and that over the model's own. If `model.generate` was
    looked up before the interception, only the checks of the decoding methods run.
    """
    if any(hook.is_waiting() for hook in _interceptions(model)):
        bound = dict(inspect.signature(_original["generate"]).bind(model, *args, **kwargs).arguments)
        options: dict[str, Any] = {**bound, **bound.get("kwargs", {})}
        configs = options.get("generation_config"), getattr(model, "generation_config", None)

        def option(name: str) -> object:
            values = (options.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in values if value is not None), None)

        _check_options(option)


def _check_healing(model: PreTrainedModel, *_args: object, **_kwargs: object) -> None:
    """Raise ConfigError if readers wait for the next pass; `generate` calls this for the option "token_healing"."""
    if any(hook.is_reading() for hook in _interceptions(model)):
        _check_options({"token_healing": True}.get)


def _check_loop(model: PreTrainedModel, loop: object = None, *_args: object, **_kwargs: object) -> None:
    """Raise ConfigError if readers wait for a text and `loop` is given: the option "custom_generate".

    It is a decoding loop (a function, or the name of a repository) that may run without a cache, and would be read as a
    single pass. Calls by `from_pretrained` pass: they give the model's name by keyword.
    """
    if loop is not None and any(hook.is_waiting() for hook in _interceptions(model)):
        _check_options({"custom_generate": loop}.get)


# method -> what checks its arguments first. `generate` looks up the others when it runs, like the decoding methods.
_CHECKS: dict[str, Callable[..., None]] = {
    "generate": _check_generate,
    "heal_tokens": _check_healing,
    "_extract_generation_mode_kwargs": _check_loop,
    "load_custom_generate": _check_loop,
}


def _checked(check: Callable[..., None], function: Method) -> Method:
    """Wrap a method, `function`, so that `check` is called with its arguments first."""

    @functools.wraps(function)
    def method(model: PreTrainedModel, *args: object, **kwargs: object) -> object:
        check(model, *args, **kwargs)
        return function(model, *args, **kwargs)

    return method


def _check_options(option: Callable[[str], object]) -> None:
    """Raise ConfigError if an option of `generate` has a value listed in `_REFUSED`.

    `option` is a function that returns the value of an option by its name, or None.
    """
    for name, (is_refused, why) in _REFUSED.items():
        value = option(name)
        if value is not None and is_refused(value):
            problem = f"generate is called with {name}={value!r}, which {why}"
            raise ConfigError(f"bank.listen: {problem}; the readers' outputs would be wrong. Leave it out.")


def _followed(method: str, function: Method) -> Method:
    """Wrap a decoding method (`function`, called `method`) so that it runs inside the interceptions of its model.

    Each open interception encloses the decoding with the context that its `on_generate` returns, and gets the result.
    """

    @functools.wraps(function)
    def decode(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> object:  # noqa: ANN401
        hooks = _interceptions(model)
        if not hooks:
            return function(model, input_ids, **kwargs)
        call = GenerateCall(model, method, input_ids, kwargs)
        with ExitStack() as contexts:
            on_results = [contexts.enter_context(hook.on_generate(call)) for hook in hooks]
            result = call.run(function)
            for on_result in on_results:
                on_result(result)
        return result.output

    return decode
