"""OpenTelemetry: record a span for each request and each batch, with reader names and times, never with a text."""

from __future__ import annotations

import time
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lamina.serve.batch_timing import BatchTiming

READERS = "lamina.readers"


@cache  # it is asked for each request and batch, and searches the disk
def is_available() -> bool:
    """Return whether the package `opentelemetry-api` is installed (`lamina[otel]`)."""
    return find_spec("opentelemetry") is not None and find_spec("opentelemetry.trace") is not None


@cache
def _version() -> str:
    """Return the version of Lamina. It is read from the disk."""
    return version("lamina")


@final
class RequestSpans:
    """ASGI middleware that records a span for each request, within the client's trace if it sends one.

    A span has the method, the route, the status and the names of the readers that answer. Texts, files and error
    messages, which may repeat a text, are not recorded. If the process has no tracer provider, nothing is recorded.

    Args:
        app: The application to which requests are passed on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application inside a span."""
        from opentelemetry import propagate, trace

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        tracer = trace.get_tracer("lamina", _version())
        with tracer.start_as_current_span(
            scope["method"],
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            record_exception=False,  # the message of an error may repeat a text
            set_status_on_exception=False,
        ) as span:
            span.set_attribute("http.request.method", scope["method"])

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_noting_status)
            except BaseException:
                span.set_status(trace.StatusCode.ERROR)
                raise
            finally:
                route = getattr(scope.get("route"), "path", "other")  # the path itself may hold what a client typed
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)


def note_readers(names: Iterable[str]) -> None:
    """Add names of readers to the current request's span; do nothing without OpenTelemetry."""
    if is_available():
        from opentelemetry import trace

        trace.get_current_span().set_attribute(READERS, list(names))


def record_batch(readers: Collection[str], timing: BatchTiming) -> None:
    """Record a span for a batch that readers have just answered; do nothing without OpenTelemetry."""
    if not is_available():
        return
    from opentelemetry import trace

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
