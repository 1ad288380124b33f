"""Random numbers of a text's own: what it draws depends on its seed, and on no other text."""

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
    """Has `generate` draw tokens by a generator of their own.

    torch's own one is shared by all threads, so that texts that are written at once would change each other, and
    `generate` takes none. What is drawn is what `torch.manual_seed` with this seed gives a text that is written alone.

    It is a processor, which runs right before a token is drawn, and has a criterion, `drawn`, which runs after. Only in
    between are torch's functions looked at, which takes time at each. It is a context around the call of `generate`.
    """

    def __init__(self, seed: int) -> None:
        self._mode, self._is_open = _OwnGenerator(seed), False
        self.drawn = _Drawn(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Draw the next token."""
        self._mode.__enter__()
        self._is_open = True
        return scores

    def end(self) -> None:
        """It is drawn, or was not."""
        if self._is_open:
            self._is_open = False
            self._mode.__exit__(None, None, None)


class _Drawn(StopOnEvent):
    def __init__(self, drawing: SeededSampling) -> None:
        super().__init__(Event())
        self._drawing = drawing

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Any:
        self._drawing.end()
        return super().__call__(input_ids, scores, **options)


class _OwnGenerator(TorchFunctionMode):
    """Of this thread alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._generator = seed, None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func is torch.multinomial:
            if self._generator is None:
                self._generator = torch.Generator(args[0].device).manual_seed(self._seed)
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)
