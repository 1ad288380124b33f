"""Times of requests and batches: spans of OpenTelemetry and metrics of Prometheus, never with a text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from types import ModuleType

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lamina.serve.workers import AnyWorker

logger = logging.getLogger(__name__)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKENS = tuple(2**power for power in range(4, 17))


@dataclass(frozen=True)
class BatchTiming:
    """How long each step of a batch took, and its size. All times are in seconds.

    Attributes:
        queue: For each request, the time from its arrival to the start of the pass, less the time of tokenising.
        read: Time of tokenising.
        run: Time of the passes of the model, and of turning their outputs into answers.
        requests: Number of requests.
        texts: Number of texts of all requests.
        tokens: Number of tokens of all texts, without padding.
    """

    queue: Sequence[float]
    read: float
    run: float
    requests: int
    texts: int
    tokens: int


READERS = "lamina.readers"
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"}


@cache
def _trace() -> ModuleType | None:
    """Return the module `opentelemetry.trace`; None if `opentelemetry-api` is not installed (`lamina[otel]`)."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    return trace


@cache
def _version() -> str:
    return version("lamina")


@contextmanager
def _request_span(scope: Scope) -> Iterator[Callable[[int], None]]:
    """Record a span of the `with` block, within the client's trace if it sends one; do nothing without OpenTelemetry.

    The block answers the request of `scope`, and gets a function to call with the response's status. The span has the
    method, the route and the status. Texts, files and error messages, which may repeat a text, are not recorded. If the
    process has no tracer provider, nothing is.
    """
    if (trace := _trace()) is None:
        yield lambda _status: None
        return
    from opentelemetry import propagate

    method = scope["method"] if scope["method"] in _METHODS else "_OTHER"  # a client may send any word
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    with trace.get_tracer("lamina", _version()).start_as_current_span(
        method,
        context=propagate.extract(headers),
        kind=trace.SpanKind.SERVER,
        record_exception=False,  # the message of an error may repeat a text
        set_status_on_exception=False,
    ) as span:
        span.set_attribute("http.request.method", method)

        def note_status(status: int) -> None:
            span.set_attribute("http.response.status_code", status)
            if status >= 500 or status == 424:  # 424: the model could not answer
                span.set_status(trace.StatusCode.ERROR)

        try:
            yield note_status
        except BaseException:
            span.set_status(trace.StatusCode.ERROR)
            raise
        finally:
            route = _route(scope)
            span.update_name(f"{method} {route}")
            span.set_attribute("http.route", route)


def _route(scope: Scope) -> str:
    """Return the route that answers a request, or "other": the path itself may hold whatever a client typed."""
    return getattr(scope.get("route"), "path", "other")


def note_readers(names: Iterable[str]) -> None:
    """Set the names of the readers in the current request's span; do nothing without OpenTelemetry."""
    if (trace := _trace()) is not None:
        trace.get_current_span().set_attribute(READERS, list(names))


def note_failure() -> None:
    """Mark the current request's span as failed; do nothing without OpenTelemetry."""
    if (trace := _trace()) is not None:
        trace.get_current_span().set_status(trace.StatusCode.ERROR)


def record_batch(readers: Collection[str], timing: BatchTiming) -> None:
    """Record a span for a batch that the readers `readers` have just answered; do nothing without OpenTelemetry."""
    if (trace := _trace()) is None:
        return
    end = time.time_ns()
    start = end - round((timing.read + timing.run) * 1e9)
    facts = {
        READERS: list(readers),
        "lamina.requests": timing.requests,
        "lamina.texts": timing.texts,
        "lamina.tokens": timing.tokens,
        "lamina.queue_s": max(timing.queue, default=0.0),
        "lamina.tokenise_s": timing.read,
        "lamina.inference_s": timing.run,
    }
    tracer = trace.get_tracer("lamina", _version())
    tracer.start_span("lamina batch", start_time=start, attributes=facts).end(end)


@contextmanager
def counting(what: str) -> Iterator[None]:
    """Log an error that the `with` block raises, and go on. The block counts `what`; answers must not depend on it."""
    try:
        yield
    except Exception as error:
        logger.error("serve: %s could not be counted", what, exc_info=error)


@final
class ServerMetrics:
    """The counters and histograms of one application.

    Args:
        unanswered: Function that returns the number of requests that are accepted and not answered.
        running: Function that returns the number of texts that are being generated.
        drift: Function that returns monitor name -> evidence that its replies have drifted; 1 or more is an alarm.

    Attributes:
        requests: Counter of requests, by path and status.
        seconds: Histogram of the times of requests, by path.
    """

    def __init__(
        self, unanswered: Callable[[], int], running: Callable[[], int], drift: Callable[[], Mapping[str, float]]
    ) -> None:
        self._registry = own = CollectorRegistry()
        times, sizes = partial(Histogram, registry=own, buckets=_SECONDS), partial(Histogram, registry=own)
        self.requests = Counter("lamina_requests", "Requests, by path and status", ["path", "status"], registry=own)
        self.seconds = times("lamina_request_seconds", "Time of a request", ["path"])
        self._queue = times("lamina_queue_seconds", "Time before tokenising")
        self._read = times("lamina_tokenise_seconds", "Tokenising, by batch")
        self._run = times("lamina_inference_seconds", "Passes, by batch")
        self._tokens = sizes("lamina_batch_tokens", "Tokens of a batch", buckets=_TOKENS)
        self._batch = sizes("lamina_batch_requests", "Requests of a batch", buckets=_TOKENS[:8])
        self._answers = Counter("lamina_answers", "Texts answered, by task", ["task"], registry=own)
        Gauge("lamina_unanswered_requests", "Requests accepted and not answered", registry=own).set_function(unanswered)
        self._first = times("lamina_first_token_seconds", "Time to the first token of a text")
        self._next = times("lamina_next_token_seconds", "Mean time per further token of a text")
        self._written = Counter("lamina_written_tokens", "Generated tokens", registry=own)
        Gauge("lamina_running_generations", "Texts being generated", registry=own).set_function(running)
        drifts = "Evidence that replies have drifted; alarm from 1 on"
        self._drift, self._drift_now = Gauge("lamina_monitor_drift", drifts, ["monitor"], registry=own), drift

    def count_batch(self, worker: AnyWorker, timing: BatchTiming) -> None:
        """Record the times and size of a batch that `worker` has answered, and count its texts for each task.

        With OpenTelemetry, the batch gets a span too.
        """
        for seconds in timing.queue:
            self._queue.observe(seconds)
        self._read.observe(timing.read)
        self._run.observe(timing.run)
        self._tokens.observe(timing.tokens)
        self._batch.observe(timing.requests)
        for task in worker.tasks:
            self._answers.labels(task).inc(timing.texts)
        record_batch(worker.tasks, timing)

    def count_generation(self, first_s: float, next_s: float, tokens: int) -> None:
        """Record a text: seconds to its first token, mean seconds per further token (if any), number of tokens."""
        self._first.observe(first_s)
        if tokens > 1:
            self._next.observe(next_s)
        self._written.inc(tokens)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in a format that the client accepts, and the Content-Type of this format.

        `accept` is the client's header Accept; "" is the text format of Prometheus.
        """
        self._drift.clear()  # another bank may have other monitors
        for monitor, evidence in self._drift_now().items():
            self._drift.labels(monitor).set(evidence)
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


@final
class RequestRecorder:
    """ASGI middleware that counts and times requests by path and status, and records a span for each.

    Refused requests count too. A path without a route counts as "other", and a request without a response has the
    status "none".
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application; count and time it, even if it fails."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), "none"
        with _request_span(scope) as note_status:

            async def send_noting_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                    note_status(message["status"])
                await send(message)

            try:
                await self._app(scope, receive, send_noting_status)
            finally:
                path = _route(scope)  # a label for every unknown path that clients try would fill the memory
                self._metrics.requests.labels(path, status).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - start)
