"""The process that speaks HTTP, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import uvicorn

if TYPE_CHECKING:
    import socket

_FOR_WRITING = 0.9  # of the time that uvicorn gives to what runs; the rest is for saying that a text was cut off


@final
class Server(uvicorn.Server):
    """uvicorn's, which tells the application that it ends before it waits for what runs.

    uvicorn itself tells it afterwards, so that a text that is still being written would be cut off without a word.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, and wait for those that were taken."""
        app: Any = self.config.app
        app.state.writer.end(_FOR_WRITING * (self.config.timeout_graceful_shutdown or 0))
        await super().shutdown(sockets)
