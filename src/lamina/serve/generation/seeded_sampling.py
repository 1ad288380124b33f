"""Sampling with a seed for each text, so that texts generated at the same time do not change one another."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor

from lamina.bank.watching import StopOnEvent

if TYPE_CHECKING:
    from torch import Tensor


@final
class SeededSampling(LogitsProcessor):
    """Makes `generate` sample the tokens of one text with a random generator of its own.

    `generate` samples from torch's global generator, which all threads share, and accepts no other one. So this class
    intercepts `torch.multinomial` in the thread of the text. The tokens are those that `generate` samples alone after
    `torch.manual_seed(seed)`.

    Intercepting torch's functions slows each of them down. Therefore it is on only between two points: an instance is
    a logits processor, which `generate` calls right before it samples, and `after_sampling` is a stopping criterion,
    which it calls right after. Pass both to `generate`, within a `with` block of the instance.

    Args:
        seed: Seed of the text's generator.

    Attributes:
        after_sampling: The stopping criterion; it never ends a text.
    """

    def __init__(self, seed: int) -> None:
        self._mode, self._is_open = _SeededMultinomial(seed), False
        self.after_sampling = _AfterSampling(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Begin to intercept torch's functions, since the next token is sampled now; return the scores unchanged."""
        self._mode.__enter__()
        self._is_open = True
        return scores

    def end(self) -> None:
        """Stop intercepting torch's functions, if that was begun: a token was sampled, or `generate` has failed."""
        if self._is_open:
            self._is_open = False
            self._mode.__exit__(None, None, None)


class _AfterSampling(StopOnEvent):
    """The stopping criterion that tells a `SeededSampling` that the token has been sampled; it never ends a text."""

    def __init__(self, sampling: SeededSampling) -> None:
        super().__init__(Event())  # an event that is never set
        self._sampling = sampling

    def __call__(self, input_ids: Tensor, scores: object, **options: object) -> Any:
        """Stop intercepting torch's functions, since the token is sampled; return False for each row of `input_ids`."""
        self._sampling.end()
        return super().__call__(input_ids, scores, **options)


class _SeededMultinomial(TorchFunctionMode):
    """While it is entered, `torch.multinomial` in this thread draws from a generator with the given seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generator: torch.Generator | None = None  # made on the device of the first draw

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        """Call `func`, a function of torch, with its arguments, and with the generator if it is `torch.multinomial`."""
        kwargs = kwargs or {}
        if func is torch.multinomial:
            if self._generator is None:
                self._generator = torch.Generator(args[0].device).manual_seed(self._seed)
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)
