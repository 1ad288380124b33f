"""Events of a text while it is generated: its tokens with the readers' scores, and its end."""

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
    from lamina.bank.detokenizer import Detokenizer
    from lamina.bank.watching import Watch
    from lamina.serve.generation.token_scores import TokenScores
    from lamina.utils import JSON


@dataclass(frozen=True)
class TokenEvent:
    """A generated token, with the scores that readers and monitors give to the text up to it.

    Attributes:
        index: Number of the token, from 1.
        id: Its id.
        text: What it adds to the text; "" for a special token, or while a character needs further tokens.
        special_text: A special token as text, such as "</s>"; None for an ordinary token.
        scores: Task -> label -> probability, see `TokenScores.at`; a probability that is not finite is None. A special
            token repeats those of the token before; its probabilities are None if no token was scored before. None as a
            whole at the last token, which the model does not read, and if nothing gives scores at each token.
        monitors: Saved monitor -> score of the text so far. A score is None if it is not finite, or if the second
            monitor of a cascade has not run. None as a whole if `scores` is None.
        flagged: Names of the monitors that have flagged the text at this token or before.
        last: Whether it is the last.
    """

    index: int
    id: int
    text: str
    special_text: str | None
    scores: Mapping[str, Mapping[str, float | None]] | None
    monitors: Mapping[str, float | None] | None
    flagged: Sequence[str]
    last: bool = False

    def token(self) -> dict[str, JSON]:
        """Return the token as a part of a response: "id", "text" (`special_text`, if set), and "special"."""
        text = self.text if self.special_text is None else self.special_text
        return {"id": self.id, "text": text, "special": self.special_text is not None}

    def report(self) -> dict[str, JSON]:
        """Return "scores", "monitors" and "flagged", as a part of a response."""
        return {"scores": self.scores, "monitors": self.monitors, "flagged": self.flagged}


@dataclass(frozen=True)
class GenerationEnd:
    """How a generated text ended.

    Attributes:
        finish_reason: Why the text ended: "eos_token", "stop_sequence", "flag" or "length".
        text: The whole generated text, without prompt and special tokens; it includes a stop string.
        generated_tokens: Number of generated tokens.
        input_length: Number of tokens of the prompt.
        seed: Seed of sampling; None: tokens were not sampled.
        flagged_at: Monitor -> index (from 1) of the token at which it flagged the text, for those that did.
        answers: Task -> answer, for the readers that answer only once, at the end.
        drift: Monitor -> a warning sentence, for monitors whose replies have drifted away from their calibration texts.
    """

    finish_reason: str
    text: str
    generated_tokens: int
    input_length: int
    seed: int | None
    flagged_at: Mapping[str, int]
    answers: Mapping[str, JSON]
    drift: Mapping[str, str]

    def details(self) -> dict[str, JSON]:
        """Return all attributes but the text, as a part of a response."""
        return {name: value for name, value in vars(self).items() if name != "text"}


@dataclass(frozen=True)
class StopConditions:
    """What ends a text: a number of tokens (`max_tokens`), a token (`end_ids`), or a string in the text (`stops`)."""

    max_tokens: int
    end_ids: Sequence[int]
    stops: Sequence[str]


@final
class TokenStreamer(StopOnEvent):
    """Emits an event for each generated token, and decides when the text ends.

    It is a stopping criterion of `generate`.

    A token's scores are known only after the model's next step has read the token. So each call emits the event of the
    second newest token, and `finish` emits the last one. `generate` must have no other criterion that ends a text. This
    criterion ends all sequences at once, so that none is padded.

    Args:
        scores: The readers that take part, and their scores.
        watch: From `bank.watch` for the monitors of `scores`. None: nothing gives scores token by token.
        detokenizer: Decodes the text.
        conditions: What ends the text.
        emit: Called with each event.
        is_over: Called after each token. True ends the text, because the client has left or the server shuts down.
        after_sampling: Called after each token is sampled, before everything else. None: not called.

    Attributes:
        count: Number of tokens so far.
        emitted: Number of tokens whose events were emitted; at the end it is `count`, unless the text was cut off.
        reason: Why the text ended, as in `GenerationEnd`; "" while it continues, or if `is_over` ended it.
        first: When the event of the first token was emitted, in seconds of `time.perf_counter`; 0.0 before.
        last: When the event of the latest token was emitted; 0.0 before the first.
    """

    def __init__(
        self,
        scores: TokenScores,
        watch: Watch | None,
        detokenizer: Detokenizer,
        conditions: StopConditions,
        emit: Callable[[TokenEvent], None],
        is_over: Callable[[], bool],
        after_sampling: Callable[[], None] | None,
    ) -> None:
        super().__init__(Event())
        self._scores, self._watch, self._detokenizer, self._conditions = scores, watch, detokenizer, conditions
        self._emit_event, self._is_over, self._after_sampling = emit, is_over, after_sampling
        self._waiting: tuple[int, str] | None = None  # id and text of the newest token, which no step has read yet
        self.count, self.emitted, self.reason = 0, 0, ""
        self.first = self.last = 0.0

    def __call__(self, input_ids: Tensor, scores: object, **_options: object) -> Any:  # noqa: ANN401, ARG002
        """Emit the event of the second newest token in `input_ids`; return whether the text ends here, as a bool `[1]`.

        A text that `is_over` ends does not count in the drift tests of `watch`.
        """
        if self._after_sampling is not None:
            self._after_sampling()
        if not self.reason:  # on some devices `generate` runs one more step after the end
            self._emit(is_read=True)
            token = int(input_ids[0, -1])
            piece = self._detokenizer.add(token)
            self.count += 1
            self.reason = self._end_reason(token, piece)
            self._waiting = token, piece + (self._detokenizer.rest() if self.reason else "")
        is_cut_off = not self.reason and self._is_over()
        if is_cut_off and self._watch is not None:
            self._watch.discard()
        return torch.full((1,), bool(self.reason) or is_cut_off, device=input_ids.device)

    def _end_reason(self, token: int, piece: str) -> str:
        """Return why the text ends at its newest token, as in `GenerationEnd.finish_reason`; "" if it continues.

        The token was already counted, and its text `piece` added to the detokenizer.
        """
        text, conditions = self._detokenizer.text, self._conditions
        if token in conditions.end_ids:
            return "eos_token"
        # A stop string that was not there before ends within the piece, so the search begins that much earlier.
        if any(text.find(stop, max(0, len(text) - len(piece) - len(stop) + 1)) >= 0 for stop in conditions.stops):
            return "stop_sequence"
        stopping = self._scores.stopping
        flags = self._watch.is_flagged(stopping) if self._watch is not None and stopping else None
        if flags is not None and bool(flags[0]):
            return "flag"
        return "length" if self.count == conditions.max_tokens else ""

    def _emit(self, *, is_read: bool) -> None:
        """Emit the event of the newest token, which waits for its scores; do nothing if there is none.

        `is_read` says whether the model has read that token. The last token is not read: it has no scores, only the
        flags raised before.
        """
        if self._waiting is None:
            return
        (token, text), scores = self._waiting, self._scores
        steps = [] if self._watch is None else self._watch.steps
        step = steps[min(self.count, len(steps)) - 1] if steps else None  # `count` starts at 1, `steps` at 0
        scored = step if is_read else None
        self.last = time.perf_counter()
        self.first, self.emitted = self.first or self.last, self.count
        self._emit_event(
            TokenEvent(
                self.count,
                token,
                text,
                self._detokenizer.special_text(token),
                None if scored is None else scores.at(scored),
                None if scored is None else scores.so_far(scored),
                [] if step is None else scores.flagged(step),
                last=not is_read,
            )
        )

    def finish(self) -> None:
        """Emit the event of the last token, if any, without scores. Call it once `generate` has returned."""
        self._emit(is_read=False)


def end_token_ids(bank: ReaderBank) -> list[int]:
    """Return the ids of the tokens that end a text of the bank's model; [] if there are none."""
    ends = bank.model.generation_config.eos_token_id
    return [] if ends is None else [int(token) for token in torch.as_tensor(ends).flatten()]
