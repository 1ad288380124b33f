"""Calls of `generate`: seen from outside while they run, and what they say of the text that was written."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, final

import torch
from torch import Tensor

from lamina.errors import ConfigError

_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {  # option -> whether a value of it is refused, and why
    "custom_generate": (bool, "decodes by a loop of its own, which is not known"),
    "guidance_scale": (lambda scale: scale != 1, "runs the model on a second prompt between the steps"),
    "token_healing": (bool, "writes a text before the one that it returns"),
    "assistant_early_exit": (bool, "drafts with the lower layers of the model itself"),
    "cache_implementation": (lambda name: name == "paged", "puts several texts into one row"),
}


@final
class GenerateCall:
    """One call of `generate`: its options, and after it which states belong to which sequence.

    A step of `generate` reads the token that the step before chose. So the states of a sequence are those of its prompt
    and of its tokens but the last, which no step reads. Rows of a pass are rows of the output, except in beam search:
    there `beam_indices` (asked for by `return_dict_in_generate`) says for each step in which row the sequence that won
    was at that time, and -1 once it had ended.
    """

    def __init__(self, model: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = dict(inspect.signature(function).bind(model, *args, **kwargs).arguments)
        more: dict[str, Any] = bound.pop("kwargs", {})
        self.model, self.kwargs = bound.pop("self"), {**bound, **more}
        self.beams = (self.option("num_beams") or 1) > 1
        self.assisted = self.kwargs.get("assistant_model") is not None or any(
            self.option(name) for name in ("prompt_lookup_num_tokens", "use_mtp", "speculation_type")
        )
        self.in_pieces = self.assisted or self.option("prefill_chunk_size") is not None  # the prompt is no pass alone

    def option(self, name: str) -> Any:
        """An option of generation: the call's own, else that of the config it was given, else the model's."""
        configs = (self.kwargs.get("generation_config"), getattr(self.model, "generation_config", None))
        values = (self.kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    def check(self) -> None:
        """Raise ConfigError if the states of the passes could not be told to be those of the text."""
        for name, (is_refused, why) in _REFUSED.items():
            value = self.option(name)
            if value is not None and is_refused(value):
                came = f"generate is called with {name}={value!r}, which {why}"
                raise ConfigError(f"bank.listen: {came}; what is heard would be wrong. Leave it out.")
        if self.kwargs.get("assistant_model") is self.model:
            raise ConfigError(
                "bank.listen: the model drafts for itself; what is heard would be wrong. Use another one."
            )

    def run(self, function: Callable[..., Any]) -> tuple[Any, Tensor, Tensor | None]:
        """What the user gets, the sequences, and the beams' rows, if there are beams."""
        kwargs, asked = self.kwargs, bool(self.option("return_dict_in_generate"))
        if self.beams and not asked:
            if kwargs.get("generation_config") is None:
                kwargs = {**kwargs, "return_dict_in_generate": True}
            else:
                config = copy.deepcopy(kwargs["generation_config"])
                config.return_dict_in_generate = True
                kwargs = {**kwargs, "generation_config": config}
        output = function(self.model, **kwargs)
        if isinstance(output, Tensor):
            return output, output, None
        return output if asked else output.sequences, output.sequences, getattr(output, "beam_indices", None)

    def given_prompt(self) -> Tensor | None:
        """The ids `[batch, tokens]` that the decoder was given to begin with; None: a start token alone."""
        own, inputs = self.kwargs.get("input_ids"), self.kwargs.get("inputs")
        if self.model.config.is_encoder_decoder:
            ids = self.kwargs.get("decoder_input_ids")
            return own if ids is None and self.model.main_input_name != "input_ids" else ids
        return own if own is not None else inputs

    def prompt_width(self, sequences: Tensor | None = None) -> tuple[int, int]:
        """How many tokens the prompt is, as the decoder reads it and as the sequences hold it.

        Before there are sequences it is a lower bound: encoder-decoders put a start token before ids that have none.
        """
        ids, embedded = self.given_prompt(), self.kwargs.get("inputs_embeds")
        width = 1 if ids is None else ids.shape[1]
        if ids is not None and sequences is not None and not torch.equal(sequences[0, :width].cpu(), ids[0].cpu()):
            width += 1
        if embedded is None or self.model.config.is_encoder_decoder:
            return width, width
        return embedded.shape[1], 0 if ids is None else width

    def tokens_read(self, new: Tensor, beam_indices: Tensor | None) -> Tensor:
        """How many of each sequence's new tokens `[sequences, tokens]` were read: all but the last that is its own."""
        if beam_indices is not None:
            return (beam_indices >= 0).sum(1) - 1
        count = new.shape[1]
        whole = torch.full_like(new[:, 0], count)
        ends, pad = self.option("eos_token_id"), self.option("pad_token_id")
        if ends is None:
            return whole - 1
        ended = torch.isin(new, torch.as_tensor(ends, device=new.device))
        if pad is not None:  # a criterion of another kind stopped the sequence, which was padded from there
            kept = (new != pad).flip(1)
            whole = torch.where(kept.any(1), count - kept.int().argmax(1), 1)
        return torch.where(ended.any(1), ended.int().argmax(1) + 1, whole) - 1

    def mask(self, stack: str, rows: int) -> Tensor | None:
        """The mask of the decoder's prompt that `generate` was given, for the rows of a pass; None if it was not."""
        mask = self.kwargs.get("decoder_attention_mask" if stack == "decoder" else "attention_mask")
        return mask.repeat_interleave(rows // len(mask), 0) if isinstance(mask, Tensor) and mask.ndim == 2 else None


Follow = Callable[[GenerateCall], AbstractContextManager[Callable[[Tensor, Tensor | None], None]]]


@contextmanager
def following(model: torch.nn.Module, follow: Follow) -> Iterator[None]:
    """Have this context's calls of `generate` on a model, or on a part of it, go through `follow`.

    While any of these contexts is open, `GenerationMixin.generate` is a function that passes every call on; the models
    themselves are left as they are. `follow` is a context around the call, and what it yields takes the sequences and,
    if there are beams, their rows. Calls in other threads and tasks only pass through.
    """
    from transformers import GenerationMixin

    mixin: Any = GenerationMixin
    opened = (model, follow)
    _following.set((*_following.get(), opened))
    with _lock:
        if not _open:
            _original.append(mixin.generate)
            mixin.generate = _followed(mixin.generate)
        _open.append(opened)
    try:
        yield
    finally:
        _following.set(tuple(other for other in _following.get() if other is not opened))
        with _lock:
            _open.remove(opened)
            if not _open:
                mixin.generate = _original.pop()


_following: ContextVar[tuple[tuple[torch.nn.Module, Follow], ...]] = ContextVar("following", default=())
_lock, _open, _original = Lock(), list[tuple[torch.nn.Module, Follow]](), list[Callable[..., Any]]()


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        mine = [opened for opened in _following.get() if opened in _open]
        follows = [follow for whole, follow in mine if any(part is model for part in whole.modules())]
        if not follows:
            return function(model, *args, **kwargs)
        call = GenerateCall(model, function, args, kwargs)
        with ExitStack() as contexts:
            hears = [contexts.enter_context(follow(call)) for follow in follows]
            output, sequences, rows = call.run(function)
            for hear in hears:
                hear(sequences, rows)
        return output

    return generate
