"""The process that speaks HTTP, and how it shuts down."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

import uvicorn

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

_FOR_GENERATING = 0.9  # of uvicorn's time for running requests; the rest is for sending the event that ends a text


@final
class Server(uvicorn.Server):
    """A uvicorn server that ends generated texts with an event, not with a broken connection, when it shuts down.

    uvicorn runs the application's shutdown only after all running requests have ended or timed out, which is too late
    to end the texts. Therefore this class first tells the text generator.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, give generated texts 90 % of the shutdown time, and wait for running requests."""
        app = cast("FastAPI", self.config.app)
        app.state.generator.end(_FOR_GENERATING * (self.config.timeout_graceful_shutdown or 0))
        await super().shutdown(sockets)
