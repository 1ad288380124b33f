"""What is told of a text while it is written: its tokens, what the readers say at each, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.bank.watching import StopOnEvent

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.bank.watching import Watch
    from lamina.serve.generation.detokenizer import Detokenizer
    from lamina.serve.generation.token_scores import TokenScores


@dataclass(frozen=True)
class TokenEvent:
    """A token of a text, and what is said of it; the last one is read by no step, so that it has no scores."""

    index: int  # from 1
    id: int
    text: str  # what it adds to the text
    sign: str | None  # how a special token is written; None: it is text
    scores: Mapping[str, Mapping[str, float | None]] | None  # task -> label -> probability
    monitors: Mapping[str, float | None] | None  # monitor -> score of the text so far
    flagged: Sequence[str]  # monitors that have flagged the text by now
    last: bool = False


@dataclass(frozen=True)
class GenerationEnd:
    """The end of a text."""

    reason: str  # "eos_token", "stop_sequence", "flag" or "length"
    text: str
    tokens: int
    prompt_tokens: int
    seed: int | None  # None: no token was drawn
    flagged_at: Mapping[str, int]  # monitor -> index of the token at which it flagged the text
    answers: Mapping[str, Any]  # of the readers that answer at the end


@dataclass(frozen=True)
class StopConditions:
    """What ends a text."""

    most: int  # tokens
    ends: Sequence[int]  # ids of end tokens
    stops: Sequence[str]  # strings


@final
class TokenStreamer(StopOnEvent):
    """Tells of each token once the next step has read it, and ends the text.

    It is all that ends one, a `StopOnEvent` that ends every sequence at once; so nothing is ever padded.

    Args:
        said: What the readers say.
        watch: Where their scores come from; None: there are none.
        pieces: The text.
        bounds: What ends it.
        put: Is handed the tokens.
        is_over: Whether the text is to end, whatever was written.
    """

    def __init__(
        self,
        said: TokenScores,
        watch: Watch | None,
        pieces: Detokenizer,
        bounds: StopConditions,
        put: Callable[[TokenEvent], None],
        is_over: Callable[[], bool],
    ) -> None:
        super().__init__(Event())
        self._said, self._watch, self._pieces, self._bounds = said, watch, pieces, bounds
        self._put, self._is_over = put, is_over
        self._waiting: tuple[int, str] | None = None  # the token that no step has read yet
        self.count, self.reason = 0, ""
        self.first = self.last = 0.0  # when these tokens were told of

    def __call__(self, input_ids: Tensor, scores: Any, **_options: Any) -> Any:  # noqa: ARG002
        """Whether the text is to end."""
        if not self.reason:  # some devices go on for a step
            self._tell(scored=True)
            token = int(input_ids[0, -1])
            piece = self._pieces.add(token)
            self.count += 1
            self.reason = self._reason(token, piece)
            self._waiting = token, piece + (self._pieces.rest() if self.reason else "")
        return torch.full((1,), bool(self.reason) or self._is_over(), device=input_ids.device)

    def _reason(self, token: int, piece: str) -> str:
        """Why the text ends with a token; "" if it goes on."""
        text, bounds = self._pieces.text, self._bounds
        flags = None if self._watch is None or not self._said.stopping else self._watch.is_flagged(self._said.stopping)
        if token in bounds.ends:
            return "eos_token"
        if any(text.find(stop, max(0, len(text) - len(piece) - len(stop) + 1)) >= 0 for stop in bounds.stops):
            return "stop_sequence"
        if flags is not None and bool(flags[0]):
            return "flag"
        return "length" if self.count == bounds.most else ""

    def _tell(self, *, scored: bool) -> None:
        if self._waiting is None:
            return
        (token, text), said = self._waiting, self._said
        steps = [] if self._watch is None else self._watch.steps
        step = steps[min(self.count, len(steps)) - 1] if steps else None
        of = step if scored else None
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self._put(
            TokenEvent(
                self.count,
                token,
                text,
                self._pieces.sign(token),
                None if of is None else said.of(of),
                None if of is None else said.so_far(of),
                [] if step is None else said.flagged(step),
                last=not scored,
            )
        )

    def finish(self) -> None:
        """Tell of the last token."""
        self._tell(scored=False)


def end_token_ids(bank: ReaderBank) -> list[int]:
    """Ids of the tokens with which the model ends a text."""
    ends = bank.model.generation_config.eos_token_id
    return [] if ends is None else [int(token) for token in torch.as_tensor(ends).flatten()]
