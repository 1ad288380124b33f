"""The HTTP server process: how long it waits for the headers of a request, and how it shuts down."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast, final

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

if TYPE_CHECKING:
    import asyncio
    import socket

    from fastapi import FastAPI

    from lamina.serve.settings import Settings

_FOR_ANSWERING = 0.9  # share of uvicorn's shutdown time for running requests; the rest is for sending errors


_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 68\r\n\r\n"
    b'{"error":"the headers did not come in time.","error_type":"Timeout"}'
)


def server_of(app: FastAPI, settings: Settings, *, host: str = "127.0.0.1", port: int = 0) -> Server:
    """Return a uvicorn server for an application from `create_app`; its method `run` starts it. Port 0: any free port.

    The time limits in `settings` for headers and for the shutdown apply to it.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=cast("Any", partial(TimedProtocol, settings.header_timeout)),  # called like the class itself
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=cast("int", settings.shutdown_timeout),  # uvicorn passes it on to `asyncio.wait_for`
    )
    return Server(config)


_Protocol: Any = AutoHTTPProtocol  # uvicorn annotates the name with a type that lacks its attributes


class _StaysHTTP:
    """A wrapper of a connection's httptools parser that parses a request for another protocol as HTTP too.

    Java's client asks for h2c in every request. httptools takes the body of such a request for the other protocol's
    data, so the headers are parsed again without "upgrade", and then the body.
    """

    def __init__(self, protocol: TimedProtocol) -> None:
        self._protocol, self._parser = protocol, protocol.parser

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._parser, name)

    def asks(self) -> bool:
        """Return whether the request asks for another protocol, and not for a tunnel (CONNECT)."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse data; raise HttpParserUpgrade at the end of a request that asks for a tunnel (CONNECT)."""
        from httptools import HttpParserUpgrade, HttpRequestParser

        while data:
            try:
                self._parser.feed_data(data)
                break
            except HttpParserUpgrade as error:
                if not self.asks():
                    raise
                data = data[error.args[0] :]
                head = b"%b %b HTTP/%b\r\n" % (self.get_method(), self._protocol.url, self.get_http_version().encode())
                lines = [b"%b: %b\r\n" % pair for pair in self._protocol.headers if pair[0].lower() != b"upgrade"]
                self._parser = HttpRequestParser(self._protocol)  # the old one takes no more after "connection: close"
                with suppress(AttributeError):  # httptools before 0.6.3; uvicorn sets this too
                    self.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parser.feed_data(b"".join([head, *lines, b"\r\n"]))


class TimedProtocol(_Protocol):
    """uvicorn's protocol for one connection. It closes the connection if the headers of a request do not come in time.

    If a client hangs up after it has sent several requests at once, none of them is answered any further.

    Args:
        header_timeout_s: Seconds from the first byte of a request, or from the beginning of the connection, to the end
            of its headers.
        options: Arguments of uvicorn's protocol.
    """

    def __init__(self, header_timeout_s: float, **options: object) -> None:
        super().__init__(**options)
        if hasattr(self, "parser"):  # uvicorn uses httptools if it is installed, else h11
            self.parser = _StaysHTTP(self)
        self._header_timeout_s = header_timeout_s
        self._timer: asyncio.TimerHandle | None = None  # the timer, while headers are incomplete
        self._has_begun = False  # whether a part of the headers has come
        self._answered: Any = None  # the request that is being answered; `cycle` is the latest that has come

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timer for the headers of the first request. uvicorn calls this for each new connection."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Pass data on to uvicorn. From the first data of a request, the timer runs until its headers are complete."""
        if not self._is_under_way():
            self._has_begun = True
            self._start_timer()
        super().data_received(data)
        if self._is_under_way():
            self._has_begun = False
            self._stop_timer()

    def on_headers_complete(self) -> None:
        """Begin a request at the end of its headers, unless they have to be parsed again; see `_StaysHTTP`."""
        if not self.parser.asks():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request's body, unless its headers have to be parsed again; see `_StaysHTTP`."""
        if not self.parser.asks():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and tell the application that the client has gone.

        uvicorn itself tells this for the latest request only, even if it is answering an earlier one.
        """
        self._stop_timer()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:  # noqa: ANN401
        """Record that the request `cycle` is being answered; uvicorn calls this when it begins to answer a request."""
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _is_under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Close the connection because headers are late; if some of them have come, send an error (408) first."""
        if self._has_begun and not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
        self.transport.close()


@final
class Server(uvicorn.Server):
    """A uvicorn server that ends requests properly at shutdown, with an error in place of a broken connection.

    uvicorn runs the application's shutdown only after all running requests have ended or timed out. That is too late to
    end them, so this class tells the text generator and the scheduler first.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, and wait until all that have begun are answered. uvicorn closes `sockets`.

        After 90 % of the shutdown time, unanswered requests get an error.
        """
        app = cast("FastAPI", self.config.app)
        within_s = _FOR_ANSWERING * (self.config.timeout_graceful_shutdown or 0)
        app.state.generator.end(within_s)
        app.state.scheduler.end(within_s)
        await super().shutdown(sockets)
