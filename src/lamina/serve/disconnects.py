"""Waiting for an answer, as long as the client does."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from fastapi import Request


async def wait_while_connected(request: Request, answer: Awaitable[Any], seconds: float | None = None) -> Any:
    """Wait for an answer until it comes, the client hangs up (499) or time is up (503); then it is cancelled."""
    waiting = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        done, _ = await asyncio.wait({waiting, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if waiting in done:
            return waiting.result()
        if gone in done:
            raise HTTPException(499, "the client hung up")
        raise HTTPException(503, f"no answer within {seconds:g} s")
    finally:
        gone.cancel()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
