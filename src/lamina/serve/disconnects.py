"""Wait for an answer only as long as the client stays connected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from fastapi import HTTPException

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from fastapi import Request

AnswerT = TypeVar("AnswerT")


async def wait_while_connected(request: Request, answer: Awaitable[AnswerT], timeout_s: float | None = None) -> AnswerT:
    """Wait for `answer` and return its result; cancel `answer` if the client disconnects or the time is up.

    Args:
        request: The request of the client. Its body must have been read, so that only a disconnect is left to receive.
        answer: A future or coroutine.
        timeout_s: Maximum seconds to wait. None: no limit.

    Raises:
        HTTPException: With status 499 if the client disconnects, 503 if the time is up.
        Exception: An error that `answer` raises.
    """
    waiting = asyncio.ensure_future(answer)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        done, _ = await asyncio.wait({waiting, disconnect}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            return waiting.result()
        if disconnect in done:
            raise HTTPException(499, "the client disconnected")
        raise HTTPException(503, f"no answer within {timeout_s:g} s")
    finally:
        disconnect.cancel()
        waiting.cancel()
        # Until the one is over, it may still receive from the connection; the other may end with an error all the same,
        # which asyncio would log with its traceback if nobody looked at it.
        await asyncio.gather(waiting, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    """Return once the client of `request` has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
