"""Generate texts with the bank's model for several requests at a time, each in its own thread."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast, final
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from lamina.bank.detokenizer import Detokenizer
from lamina.errors import ConfigError, LaminaError, NotFiniteError
from lamina.layers.types import tokenizer_of
from lamina.monitors import Monitor
from lamina.serve.generation.prompts import GenerationRequest, encode_prompt, generates_text, token_budget
from lamina.serve.generation.stream import GenerationEnd, StopConditions, TokenEvent, TokenStreamer, end_token_ids
from lamina.serve.generation.token_scores import TokenScores
from lamina.serve.scheduler import ClosedError, OverloadedError
from lamina.serve.telemetry import counting, note_readers
from lamina.serve.workers import TOKENIZER_LOCK

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.layers.types import WritingModel
    from lamina.monitors import DriftWatcher
    from lamina.serve.scheduler import Scheduler


@final
class SeededSampling(LogitsProcessor):
    """Makes `generate` sample the tokens of one text with a random generator of its own.

    `generate` samples from torch's global generator, which all threads share, and accepts no other generator. So this
    class intercepts `torch.multinomial` in the thread that generates the text. The tokens are the same as after
    `torch.manual_seed(seed)` in a process that generates this text alone.

    Interception slows down every function of torch, so it is on only while a token is sampled. The instance is a logits
    processor, which `generate` calls right before sampling: the call turns interception on. A stopping criterion, which
    `generate` calls right after sampling, must call `end`. Use the instance inside its `with` block.
    """

    def __init__(self, seed: int) -> None:
        self._mode, self._is_open = _SeededMultinomial(seed), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Turn the interception of sampling on, because a token is sampled next; return the scores unchanged."""
        self._mode.__enter__()
        self._is_open = True
        return scores

    def end(self) -> None:
        """Turn interception off if it is on: after sampling, or after an error of `generate`."""
        if self._is_open:
            self._is_open = False
            self._mode.__exit__(None, None, None)


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
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call `func`, a function of torch, with its arguments; `torch.multinomial` gets the seeded generator too."""
        kwargs = kwargs or {}
        if func is torch.multinomial:
            if self._generator is None:
                self._generator = torch.Generator(args[0].device).manual_seed(self._seed)
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


logger = logging.getLogger(__name__)
Put: TypeAlias = Callable[[TokenEvent | GenerationEnd | LaminaError], None]


@final
class TextGenerator:
    """Generates texts for several requests at a time, up to a limit.

    Each text has its own thread and passes, beside the scheduler's. Texts do not share passes: padding changes the last
    bits of results, and with them sometimes a token.

    Args:
        scheduler: The scheduler of the bank whose model generates; its settings are the limits.
        on_text: Called at the end of each text with the seconds to its first token, the mean seconds per further token,
            and the number of tokens that had an event; not called if none had. Its errors are logged.

    Attributes:
        drift: Tests whether the texts are still like those that the monitors were calibrated on.
    """

    def __init__(self, scheduler: Scheduler, on_text: Callable[[float, float, int], None] | None = None) -> None:
        self._scheduler, self._on_text = scheduler, on_text
        self.drift = DriftTests()
        # Held while texts are added, removed or given their end time, so that `end` misses no text that just begins.
        self._lock = Lock()
        self._running: set[Generation] = set()
        self._ends_at = math.inf  # when all texts must end, in seconds of `time.monotonic`

    @property
    def running(self) -> int:
        """Number of texts that are being generated."""
        return len(self._running)

    def begin(self, request: GenerationRequest, put: Put) -> Generation:
        """Start generating a text in a new thread, and return the `Generation` that controls it.

        `put` is called in that thread with an event for each token, and finally with the end of the text or an error.
        If the prompt or the readers do not fit, `put` gets that error too. Raises ConfigError if the bank's model does
        not generate text; OverloadedError if `max_concurrent_generations` texts are already being generated, or no
        thread can be started; ClosedError if the server is shutting down.
        """
        bank, limit = self._scheduler.bank, self._scheduler.settings.max_concurrent_generations
        if not generates_text(bank):
            came = f"the model of this bank, a {type(bank.model).__name__}, does not generate text"
            raise ConfigError(f"serve: {came}. Use /predict.")
        with self._lock:
            if self._ends_at < math.inf or not self._scheduler.is_open:
                raise ClosedError("serve: the server is shutting down. Try again later.")
            if (running := len(self._running)) >= limit:
                raise OverloadedError(
                    f"serve: {running} texts are being generated; at most {limit} may be at a time. Try again later."
                )
            # other names are refused later, and may be a text that a client sent in the wrong place
            note_readers(bank if request.tasks is None else [name for name in request.tasks if name in bank])
            generation = Generation(self._scheduler, request, put, self._on_done, self.drift)
            self._running.add(generation)
            try:
                generation.start()
            except RuntimeError as error:  # "can't start new thread"
                self._running.discard(generation)
                raise OverloadedError("serve: no thread can be started for another text. Try again later.") from error
        return generation

    def _on_done(self, generation: Generation, streamer: TokenStreamer | None) -> None:
        """Count a text as ended. If a token had an event, report the times to `on_text`.

        `streamer` is None if the text failed before its first step.
        """
        with self._lock:
            self._running.discard(generation)
        if self._on_text is not None and streamer is not None and streamer.emitted:
            per_token_s = (streamer.last - streamer.first) / max(1, streamer.emitted - 1)
            with counting("a text"):
                self._on_text(streamer.first - generation.since, per_token_s, streamer.emitted)

    def end(self, within_s: float) -> None:
        """Accept no more texts; those not complete after `within_s` seconds fail with ClosedError. Return at once.

        A second call can only make that time earlier.
        """
        with self._lock:
            self._ends_at = min(self._ends_at, time.monotonic() + within_s)
            for generation in self._running:
                generation.ends_at = self._ends_at

    def close(self) -> None:
        """End all texts now, with ClosedError, and wait for their threads, each at most `shutdown_timeout` seconds."""
        self.end(0)
        for generation in [*self._running]:
            generation.join(self._scheduler.settings.shutdown_timeout)


@final
class Generation:
    """The generation of one text in its own thread; `TextGenerator.begin` makes it.

    Args:
        scheduler: The scheduler of the bank whose model generates.
        request: What to generate.
        put: Called with the events, the end or an error.
        on_done: Called right before the end or the error, with this object and the streamer of its tokens.
        drift: Drift tests that receive the text, unless a flag may cut it short.

    Attributes:
        ends_at: When the text must end, in seconds of `time.monotonic`.
        since: When the request came, in seconds of `time.perf_counter`.
        start: Starts the thread.
        join: Waits for the thread, for at most the given seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        request: GenerationRequest,
        put: Put,
        on_done: Callable[[Generation, TokenStreamer | None], None],
        drift: DriftTests,
    ) -> None:
        self._drift = drift
        self._scheduler, self._bank, self._request = scheduler, scheduler.bank, request
        self._put, self._on_done = put, on_done
        self._has_left, self.ends_at, self.since = Event(), math.inf, time.perf_counter()
        self._streamer: TokenStreamer | None = None
        self._thread = Thread(target=self._run, name="lamina-generation", daemon=True)
        self.start, self.join = self._thread.start, self._thread.join

    def leave(self) -> None:
        """End the text after its current step, with ClosedError."""
        self._has_left.set()

    def _is_over(self) -> bool:
        """Return whether the text must end now: its client has left, or its time is up.

        A thread that waits to change the model may do so during this call, which then waits for it.
        """
        self._scheduler.pass_lock.give_way()
        return self._has_left.is_set() or time.monotonic() >= self.ends_at

    def _run(self) -> None:
        """Generate the text, call `on_done`, and pass its end or error to `put`."""
        end = self._generate_or_fail()
        self._on_done(self, self._streamer)  # before the end: a client that has it finds the text counted in /metrics
        self._put(end)

    def _generate_or_fail(self) -> GenerationEnd | LaminaError:
        """Generate the text, and return its end or an error to report. Details of unexpected errors are only logged."""
        try:
            with TOKENIZER_LOCK:
                prompt = encode_prompt(self._bank, self._request.prompt, self._scheduler.settings.max_total_tokens)
            with self._scheduler.pass_lock.shared():
                return self._generate(prompt)
        except LaminaError as error:
            return _named(error) if isinstance(error, NotFiniteError) and error.row is not None else error
        except Exception as error:
            logger.error("serve: a text could not be generated", exc_info=error)
            return LaminaError(
                f"serve: the model could not generate the text ({type(error).__name__}); see the log of the server."
            )

    def _generate(self, prompt: Mapping[str, Tensor]) -> GenerationEnd:
        """Generate the text that continues a prompt, pass its tokens to `put` as events, and return its end.

        Raises ClosedError if the text is cut off because the server shuts down or the client has left; and LaminaError
        if the prompt is too long, or if readers or monitors of the request cannot take part.
        """
        request, bank = self._request, self._bank
        scores = TokenScores(bank, request.tasks, each=request.stream, stop=request.stop_on_flag)
        prompt_tokens, total = prompt["input_ids"].shape[1], self._scheduler.settings.max_total_tokens
        max_tokens = token_budget(bank, prompt_tokens, request.max_new_tokens, total)
        conditions = StopConditions(max_tokens, end_token_ids(bank), request.stop)
        # The text of a decoder-only model continues the prompt; that of a model with an encoder begins anew.
        before = [] if bank.model.config.is_encoder_decoder else prompt["input_ids"][0].tolist()
        detokenizer, seed = Detokenizer(tokenizer_of(bank.processor), before), self._seed()
        tests = {} if request.stop_on_flag else self._drift.of(bank)
        drift = {name: test for name, test in tests.items() if name in scores.saved}
        with ExitStack() as contexts:
            watch = contexts.enter_context(bank.watch(scores.monitors, drift=drift)) if scores.monitors else None
            outputs = contexts.enter_context(bank.listen(scores.late, over="both")) if scores.late else None
            sampling = None if seed is None else contexts.enter_context(SeededSampling(seed))
            end_sampling = sampling and sampling.end
            streamer = TokenStreamer(scores, watch, detokenizer, conditions, self._put, self._is_over, end_sampling)
            self._streamer = streamer
            model = cast("WritingModel", bank.model)
            model.generate(
                **prompt,
                **self._options(conditions),
                logits_processor=LogitsProcessorList([] if sampling is None else [sampling]),
                stopping_criteria=StoppingCriteriaList([streamer]),
            )
        if not streamer.reason:
            raise ClosedError("serve: the server was shut down before this text was complete.")
        streamer.finish()
        flagged = {} if watch is None else {name: watch.flagged_at[name] for name in scores.saved}
        # There is one sequence, or none if no token was read. Steps count from 0, tokens in responses from 1.
        flagged_at = {name: 1 + step for name, steps in flagged.items() for step in steps if step is not None}
        answers = {} if outputs is None else scores.answers(outputs)
        return GenerationEnd(
            streamer.reason,
            detokenizer.text,
            streamer.count,
            prompt_tokens,
            seed,
            flagged_at,
            answers,
            {name: alarm.sentence() for name, test in drift.items() if (alarm := test.alarm) is not None},
        )

    def _seed(self) -> int | None:
        """Return the seed of sampling: the request's, or a random one; None for greedy decoding."""
        if not self._request.sampling.get("do_sample", self._bank.model.generation_config.do_sample):
            return None
        return secrets.randbits(53) if self._request.seed is None else self._request.seed  # JavaScript reads 53 bits

    def _options(self, conditions: StopConditions) -> dict[str, object]:
        """Return the options for `generate`: the request's for sampling, and the number of tokens in `conditions`.

        There is one sequence and one beam, so that each chosen token is final.
        """
        options: dict[str, object] = {"num_beams": 1, "num_return_sequences": 1, **self._request.sampling}
        options["max_new_tokens"] = conditions.max_tokens
        if self._bank.model.generation_config.pad_token_id is None and conditions.end_ids:
            options["pad_token_id"] = conditions.end_ids[0]  # without one transformers warns, though nothing is padded
        return options


def _named(error: NotFiniteError) -> NotFiniteError:
    """Return the error of a score that is NaN for a response: with the task and label, or the saved monitor, by name.

    The monitors that `TokenScores` makes have names that only it knows.
    """
    name, _, label = error.name.partition("\0")
    what = f"label '{label}' of task '{name}'" if label else f"monitor '{name}'"
    rule = "a score is a finite number. Load the model in float32 or bfloat16, or train the reader again"
    return NotFiniteError(f"serve: {what} gives NaN for the generated text; {rule}.", name=name, row=error.row)


@final
class DriftTests:
    """For each served bank, tests whether replies are still like those that its monitors were calibrated on."""

    def __init__(self) -> None:
        self._lock = Lock()  # several texts begin at the same time
        # texts of the old bank may begin and end while a new one is already served
        self._watchers: WeakKeyDictionary[ReaderBank, dict[str, DriftWatcher]] = WeakKeyDictionary()

    def of(self, bank: ReaderBank) -> Mapping[str, DriftWatcher]:
        """Return monitor name -> drift test of a bank; made at the first call, later calls return the same tests.

        Cascades, and monitors without a `sketch` (a summary of their calibration texts), have none.
        """
        with self._lock:
            if bank not in self._watchers:
                self._watchers[bank] = {
                    name: monitor.watch_drift()
                    for name, monitor in bank.monitors.items()
                    if isinstance(monitor, Monitor) and monitor.sketch is not None
                }
            return self._watchers[bank]

    def evidence(self, bank: ReaderBank) -> dict[str, float]:
        """Return monitor name -> evidence of drift, for the monitors of a bank that have a drift test; see `of`.

        1 or more is an alarm; see `DriftWatcher.evidence`.
        """
        return {name: watcher.evidence for name, watcher in self.of(bank).items()}
