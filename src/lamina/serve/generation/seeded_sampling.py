"""Sample each text with its own seed, so that texts generated at the same time do not influence one another."""

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

    `generate` samples from torch's global generator, which all threads share, and accepts no other generator. So this
    class intercepts `torch.multinomial` in the thread that generates the text. The tokens are the same as after
    `torch.manual_seed(seed)` in a process that generates this text alone.

    Interception slows down every function of torch. So it is on only while `generate` samples a token. The instance is
    a logits processor: `generate` calls it right before sampling, and the call turns interception on. `after_sampling`
    is a stopping criterion: `generate` calls it right after sampling, and it turns interception off. Pass both to
    `generate`, inside a `with` block of the instance.

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
        """Turn interception on, because a token is sampled next; return the scores unchanged."""
        self._mode.__enter__()
        self._is_open = True
        return scores

    def end(self) -> None:
        """Turn interception off if it is on: after sampling, or after an error of `generate`."""
        if self._is_open:
            self._is_open = False
            self._mode.__exit__(None, None, None)


class _AfterSampling(StopOnEvent):
    """A stopping criterion that turns a `SeededSampling`'s interception off after each token. It never ends a text."""

    def __init__(self, sampling: SeededSampling) -> None:
        super().__init__(Event())  # an event that is never set
        self._sampling = sampling

    def __call__(self, input_ids: Tensor, scores: object, **options: object) -> Any:  # noqa: ANN401
        """Turn interception off; return False for each row of `input_ids`."""
        self._sampling.end()
        return super().__call__(input_ids, scores, **options)


class _SeededMultinomial(TorchFunctionMode):
    """A context manager: inside it, `torch.multinomial` in this thread draws from a generator with the given seed.

    Torch's global generators are neither used nor changed.
    """

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
    ) -> Any:  # noqa: ANN401
        """Call `func`, a function of torch; if it is `torch.multinomial`, pass it the seeded generator."""
        kwargs = kwargs or {}
        if func is torch.multinomial:
            if self._generator is None:
                self._generator = torch.Generator(args[0].device).manual_seed(self._seed)
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)
