"""Calls of `generate`: intercept them without changing the model, and map hidden states to returned sequences."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Generate = Callable[..., Any]  # `GenerationMixin.generate`, or a function in its place

# option of `generate` -> (whether a value of it is refused, why its states could not be assigned to the text)
_REFUSED: dict[str, tuple[Callable[[object], bool], str]] = {
    "custom_generate": (bool, "decodes by a loop of its own, which is not known"),
    "guidance_scale": (lambda scale: scale != 1, "runs the model on a second prompt between the steps"),
    "token_healing": (bool, "writes a text before the one that it returns"),
    "assistant_early_exit": (bool, "drafts with the lower layers of the model itself"),
    "cache_implementation": (lambda name: name == "paged", "puts several texts into one row"),
}


class Generated(NamedTuple):
    """The result of one call of `generate`."""

    output: Any  # the return value that the caller expects
    sequences: Tensor  # [sequences, tokens], as `generate` returns them
    beam_indices: Tensor | None  # [sequences, steps], see `GenerateCall`; None without beam search


@final
class GenerateCall:
    """The arguments of one call of `generate`, and the mapping from its forward passes to the returned sequences.

    Each decoding step reads the token that the step before chose. The states of a sequence are therefore those of its
    prompt and of all its new tokens except the last, which no step reads. Row i of a pass belongs to row i of the
    result, except in beam search: there `beam_indices` says for each step in which row the winning sequence was at that
    time, and is -1 once the sequence had ended.

    Args:
        model: The model whose `generate` is called.
        function: The original `generate` function.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Attributes:
        model: The model.
        kwargs: All arguments of the call by name.
        beams: Whether the call decodes by beam search.
        assisted: Whether the call uses speculative decoding: some passes then read draft tokens that may be rejected.
        prompt_in_pieces: Whether the first pass may read less, or more, than the prompt.
    """

    def __init__(
        self, model: PreTrainedModel, function: Generate, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        bound = dict(inspect.signature(function).bind(model, *args, **kwargs).arguments)
        more: dict[str, Any] = bound.pop("kwargs", {})
        self.model: PreTrainedModel = bound.pop("self")
        self.kwargs = {**bound, **more}
        self.beams = (self.option("num_beams") or 1) > 1
        self.assisted = self.kwargs.get("assistant_model") is not None or any(
            self.option(name) for name in ("prompt_lookup_num_tokens", "use_mtp", "speculation_type")
        )
        self.prompt_in_pieces = self.assisted or self.option("prefill_chunk_size") is not None

    def option(self, name: str) -> Any:
        """Return the value of a generation option; None if it is not set.

        It is looked up in the call, then in the generation config of the call, then in the model's generation config.
        """
        configs = (self.kwargs.get("generation_config"), getattr(self.model, "generation_config", None))
        values = (self.kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    def check(self) -> None:
        """Raise ConfigError if the call decodes in a way whose states cannot be assigned to the returned text."""
        for name, (is_refused, why) in _REFUSED.items():
            value = self.option(name)
            if value is not None and is_refused(value):
                problem = f"generate is called with {name}={value!r}, which {why}"
                raise ConfigError(f"bank.listen: {problem}; the readers' outputs would be wrong. Leave it out.")
        if self.kwargs.get("assistant_model") is self.model:
            problem = "the model drafts for itself, so that the readers' outputs would be wrong"
            raise ConfigError(f"bank.listen: {problem}. Use another assistant model.")

    def run(self, function: Generate) -> Generated:
        """Call the original `generate`, and return its result in the form that the caller asked for.

        Beam search is called with `return_dict_in_generate=True`, because only that result has the beam indices.
        """
        kwargs, wants_dict = self.kwargs, bool(self.option("return_dict_in_generate"))
        if self.beams and not wants_dict:
            if kwargs.get("generation_config") is None:
                kwargs = {**kwargs, "return_dict_in_generate": True}
            else:
                config = copy.deepcopy(kwargs["generation_config"])
                config.return_dict_in_generate = True
                kwargs = {**kwargs, "generation_config": config}
        output = function(self.model, **kwargs)
        if isinstance(output, Tensor):
            return Generated(output, output, None)
        beam_indices = getattr(output, "beam_indices", None)
        return Generated(output if wants_dict else output.sequences, output.sequences, beam_indices)

    def prompt_ids(self) -> Tensor | None:
        """Return the ids `[batch, tokens]` that the decoder starts from; None if it starts from just a start token."""
        input_ids, inputs = self.kwargs.get("input_ids"), self.kwargs.get("inputs")
        if self.model.config.is_encoder_decoder:
            ids = self.kwargs.get("decoder_input_ids")
            return input_ids if ids is None and self.model.main_input_name != "input_ids" else ids
        return input_ids if input_ids is not None else inputs

    def prompt_width(self, sequences: Tensor | None = None) -> tuple[int, int]:
        """Return two lengths of the prompt in tokens: as the decoder reads it, and as the sequences contain it.

        They differ for prompts of embeddings, which the sequences do not contain. Without the returned `sequences` the
        lengths are lower bounds, because an encoder-decoder may put a start token before the ids that it was called
        with.
        """
        ids, embedded = self.prompt_ids(), self.kwargs.get("inputs_embeds")
        width = 1 if ids is None else ids.shape[1]
        if ids is not None and sequences is not None and not torch.equal(sequences[0, :width].cpu(), ids[0].cpu()):
            width += 1
        if embedded is None or self.model.config.is_encoder_decoder:
            return width, width
        return embedded.shape[1], 0 if ids is None else width

    def tokens_read(self, new: Tensor, beam_indices: Tensor | None) -> Tensor:
        """Return `[sequences]`: how many new tokens of each sequence the model read, which is all except its last.

        `new` are the new tokens `[sequences, tokens]`, padded after the end of each sequence; `beam_indices` is as in
        `Generated`.
        """
        if beam_indices is not None:
            return (beam_indices >= 0).sum(1) - 1
        count = new.shape[1]
        length = torch.full_like(new[:, 0], count)
        ends, pad = self.option("eos_token_id"), self.option("pad_token_id")
        if ends is None:
            return length - 1
        ended = torch.isin(new, torch.as_tensor(ends, device=new.device))
        if pad is not None:
            # a sequence stopped by another criterion has no end token: it ends where the padding begins
            written = (new != pad).flip(1)
            length = torch.where(written.any(1), count - written.int().argmax(1), 1)
        return torch.where(ended.any(1), ended.int().argmax(1) + 1, length) - 1

    def mask(self, stack: str, rows: int) -> Tensor | None:
        """Return the mask `[rows, tokens]` of the decoder's prompt; None if the call has none.

        `stack` is the name of the stack. Each prompt is repeated for its beams or samples, up to `rows` rows.
        """
        mask = self.kwargs.get("decoder_attention_mask" if stack == "decoder" else "attention_mask")
        return mask.repeat_interleave(rows // len(mask), 0) if isinstance(mask, Tensor) and mask.ndim == 2 else None


# A context that is entered around a call of `generate`; it yields a function that gets the result of the call.
OnGenerate = Callable[[GenerateCall], AbstractContextManager[Callable[[Generated], None]]]


class _Interception(NamedTuple):
    """An open `intercept_generate` context."""

    model: nn.Module
    on_generate: OnGenerate


@contextmanager
def intercept_generate(model: nn.Module, on_generate: OnGenerate) -> Iterator[None]:
    """Pass the calls of `generate` on a model, or on a part of it, through `on_generate`, inside the `with` block.

    Only calls in the caller's context (`contextvars`) are intercepted; calls in other threads and tasks are not
    affected. While any of these contexts is open, `GenerationMixin.generate` is replaced by a function that forwards
    every call. The models themselves are not changed.
    """
    from transformers import GenerationMixin

    mixin: Any = GenerationMixin
    interception = _Interception(model, on_generate)
    _in_context.set((*_in_context.get(), interception))
    with _lock:
        if not _open:
            _original.append(mixin.generate)
            mixin.generate = _intercepted(mixin.generate)
        _open.append(interception)
    try:
        yield
    finally:
        _in_context.set(tuple(other for other in _in_context.get() if other is not interception))
        with _lock:
            _open.remove(interception)
            if not _open:
                mixin.generate = _original.pop()


# The interceptions of this context. A task that was started within one inherits a copy, which outlives the context:
# an interception therefore counts only while it is in `_open` too.
_in_context: ContextVar[tuple[_Interception, ...]] = ContextVar("intercepted_generate", default=())
_open: list[_Interception] = []  # of all threads
_original: list[Generate] = []  # the one original `generate`, while it is replaced
_lock = Lock()  # threads open and close contexts: the first must replace `generate` once, and the last restore it


def _intercepted(function: Generate) -> Generate:
    """Return a function that replaces the original `generate`.

    It calls the original inside the `on_generate` contexts that are open for the model in the caller's context, or
    directly if there are none.
    """

    @functools.wraps(function)
    def generate(model: PreTrainedModel, *args: object, **kwargs: object) -> object:
        mine = [interception for interception in _in_context.get() if interception in _open]
        hooks = [hook.on_generate for hook in mine if any(part is model for part in hook.model.modules())]
        if not hooks:
            return function(model, *args, **kwargs)
        call = GenerateCall(model, function, args, kwargs)
        with ExitStack() as contexts:
            on_results = [contexts.enter_context(hook(call)) for hook in hooks]
            result = call.run(function)
            for on_result in on_results:
                on_result(result)
        return result.output

    return generate
