"""Texts that a bank's model writes for requests, each in a thread of its own, with what the readers say of them."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, final

from lamina.data.batches import tokenizer_of
from lamina.errors import LaminaError
from lamina.serve.generation.detokenizer import Detokenizer
from lamina.serve.generation.prompts import GenerationRequest, check_generates, encode_prompt, token_budget
from lamina.serve.generation.seeded_sampling import SeededSampling
from lamina.serve.generation.stream import GenerationEnd, StopConditions, TokenEvent, TokenStreamer, end_token_ids
from lamina.serve.generation.token_scores import TokenScores
from lamina.serve.scheduler import ClosedError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.serve.scheduler import Scheduler

logger = logging.getLogger(__name__)

Put = Callable[[TokenEvent | GenerationEnd | LaminaError], None]


@final
class TextGenerator:
    """Has the bank's model write texts for any number of requests, a few at once.

    Each text has a thread and passes of its own, apart from the scheduler's: a step reads one token and is short, so
    that nobody who asks for a prediction waits for a text to end. Texts share no pass, since padding changes the last
    bits of what is computed, and so, now and then, a token.

    Args:
        scheduler: Whose bank writes; its settings are the limits.
        tell: Called with the seconds to the first token, those of each further one, and how many tokens there were.
    """

    def __init__(self, scheduler: Scheduler, tell: Callable[[float, float, int], None] | None = None) -> None:
        self._engine, self._tell = scheduler, tell
        self._lock, self._running, self._ends_at = Lock(), set[Generation](), math.inf

    @property
    def running(self) -> int:
        """Texts that are being written."""
        return len(self._running)

    def begin(self, asked: GenerationRequest, put: Put) -> Generation:
        """Begin a text; its tokens and its end, or what went wrong, are put from another thread.

        Raises:
            ConfigError: If the bank's model does not write.
            OverloadedError, ClosedError: If the request is not accepted.
        """
        bank, most = self._engine.bank, self._engine.settings.max_concurrent_generations
        check_generates(bank)
        with self._lock:
            if self._ends_at < math.inf or not self._engine.is_open:
                raise ClosedError("serve: the server is about to end; ask again later.")
            if len(self._running) >= most:
                raise OverloadedError(f"serve: {len(self._running)} texts are being written; {most} may. Ask later.")
            writing = Generation(self._engine, asked, put, self._done)
            self._running.add(writing)
            try:
                writing.start()
            except RuntimeError as error:  # "can't start new thread"
                self._running.discard(writing)
                raise OverloadedError("serve: there is no thread left for another text. Ask later.") from error
        return writing

    def _done(self, writing: Generation, teller: TokenStreamer | None) -> None:
        with self._lock:
            self._running.discard(writing)
        if self._tell is not None and teller is not None and teller.count:
            each = (teller.last - teller.first) / max(1, teller.count - 1)
            self._tell(teller.first - writing.since, each, teller.count)

    def end(self, within: float) -> None:
        """The server is about to end: begin no more texts, and end those that are not done in so many seconds."""
        with self._lock:
            self._ends_at = min(self._ends_at, time.monotonic() + within)
            for writing in self._running:
                writing.ends_at = self._ends_at

    def close(self) -> None:
        """End what is being written."""
        self.end(0)
        for writing in [*self._running]:
            writing.join(self._engine.settings.shutdown_timeout)


@final
class Generation:
    """One text that is being written."""

    def __init__(
        self,
        scheduler: Scheduler,
        asked: GenerationRequest,
        put: Put,
        done: Callable[[Generation, TokenStreamer | None], None],
    ) -> None:
        self._engine, self._bank, self._asked, self._put, self._done = scheduler, scheduler.bank, asked, put, done
        self._left, self.ends_at, self.since = Event(), math.inf, time.perf_counter()
        self._teller: TokenStreamer | None = None
        self._thread = Thread(target=self._run, name="lamina-writing", daemon=True)
        self.start, self.join = self._thread.start, self._thread.join

    def leave(self) -> None:
        """Nobody waits for the rest."""
        self._left.set()

    def _is_over(self) -> bool:
        """Asked between two steps."""
        self._engine.turns.give_way()
        return self._left.is_set() or time.monotonic() >= self.ends_at

    def _run(self) -> None:
        end = self._end()
        self._done(self, self._teller)  # first, so that who has the end finds it counted
        self._put(end)

    def _end(self) -> GenerationEnd | LaminaError:
        try:
            with self._engine.reading:
                prompt = encode_prompt(self._bank, self._asked.prompt)
            with self._engine.turns.shared():
                return self._write(prompt)
        except LaminaError as error:
            return error
        except Exception as error:
            logger.error("serve: a text could not be written", exc_info=error)
            return LaminaError(f"serve: the model could not write ({type(error).__name__}); the log says more.")

    def _write(self, prompt: Mapping[str, Any]) -> GenerationEnd:
        asked, bank = self._asked, self._bank
        said = TokenScores(bank, asked.tasks, each=asked.stream, stop=asked.stop_on_flag)
        width, total = prompt["input_ids"].shape[1], self._engine.settings.max_total_tokens
        bounds = StopConditions(token_budget(bank, width, asked.max_new_tokens, total), end_token_ids(bank), asked.stop)
        before = [] if bank.model.config.is_encoder_decoder else prompt["input_ids"][0].tolist()
        pieces, seed = Detokenizer(tokenizer_of(bank.processor), before), self._seed()
        with ExitStack() as contexts:
            watch = contexts.enter_context(bank.watch(said.monitors)) if said.monitors else None
            heard = contexts.enter_context(bank.listen(said.late, over="both")) if said.late else None
            drawing = [] if seed is None else [contexts.enter_context(SeededSampling(seed))]
            teller = self._teller = TokenStreamer(said, watch, pieces, bounds, self._put, self._is_over)
            criteria = [*(own.drawn for own in drawing), teller]
            model: Any = bank.model
            model.generate(**prompt, **self._options(bounds), logits_processor=drawing, stopping_criteria=criteria)
        if not teller.reason:
            raise ClosedError("serve: the server ended before this text did.")
        teller.finish()
        flagged = {} if watch is None else {name: watch.flagged_at[name] for name in said.saved}
        places = {name: 1 + at for name, rows in flagged.items() for at in rows if at is not None}
        answers = {} if heard is None else said.answers(heard)
        return GenerationEnd(teller.reason, pieces.text, teller.count, width, seed, places, answers)

    def _seed(self) -> int | None:
        """What is drawn depends on; None if nothing is."""
        if not self._asked.sampling.get("do_sample", self._bank.model.generation_config.do_sample):
            return None
        return secrets.randbits(53) if self._asked.seed is None else self._asked.seed

    def _options(self, bounds: StopConditions) -> dict[str, Any]:
        """Of `generate`: one text, of which each token is final once it is chosen."""
        options = {"max_new_tokens": bounds.most, "num_beams": 1, "num_return_sequences": 1, **self._asked.sampling}
        if self._bank.model.generation_config.pad_token_id is None and bounds.ends:
            options["pad_token_id"] = bounds.ends[0]  # nothing is padded, but a warning would tell of it
        return options
