"""Checks before a request reaches the application: its key, the size of its body and the depth of its JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lamina.serve.settings import Settings

OPEN = ("/", "/health", "/v2/health/live", "/v2/health/ready")  # need no key: the page, which asks for it, and probes
ADMIN = "/readers"  # this path and those below change what is served, and have a key of their own
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
]
# A whole JSON string, or one bracket. Possessive quantifiers (++, *+) keep the time linear in the size of the body.
_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)


class Refusal(NamedTuple):
    """Why a request is refused: HTTP status, message, and the error type for the client's code."""

    status: int
    error: str
    error_type: str


@final
class RequestGuard:
    """ASGI middleware that refuses requests by their key, size or depth, and passes the others on whole.

    It also adds headers to every response that forbid caching the response and sniffing its type.

    Args:
        app: The application to which requests are passed on.
        settings: Keys and limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, or pass it on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        # OPTIONS is the browser's own question before a request of another origin; it carries no key.
        if _path(scope) not in OPEN and scope["method"] != "OPTIONS" and (refusal := self._key_problem(scope)):
            await _refuse(send_with_headers, refusal)
            return
        timeout_s = self._settings.request_timeout
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._body(receive)
        except TimeoutError:
            body = Refusal(408, f"the body did not come within {timeout_s:g} s.", "Timeout")
        if isinstance(body, Refusal):
            await _refuse(send_with_headers, body)
            return
        is_replayed = False

        async def replay() -> Message:
            nonlocal is_replayed
            if is_replayed:
                return await receive()  # what comes after the body: the client's disconnect
            is_replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send_with_headers)

    def _key_problem(self, scope: Scope) -> Refusal | None:
        """Return why the key of a request is refused; None if the key is right, or none is needed."""
        key, path = self._settings.api_key, _path(scope)
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            key = self._settings.admin_key
            if key is None:
                error = "the readers cannot be changed: the server was started without --admin-key."
                return Refusal(403, error, "Forbidden")
        if key is None:
            return None
        sent = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(sent, b"Bearer " + key.encode()):  # takes the same time wherever the first difference is
            return None
        return Refusal(401, "the key is missing or wrong. Send Authorization: Bearer KEY.", "Unauthorized")

    async def _body(self, receive: Receive) -> bytes | Refusal:
        """Receive a request's body and return it; if it is too large or nested too deeply, return the refusal.

        A body that is too large is not received to its end. If the client disconnects, the part that came is returned.
        """
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self._settings.payload_limit:
                limit = self._settings.payload_limit
                return Refusal(413, f"the body is larger than {limit} bytes, the most that is accepted.", "Validation")
        body = b"".join(parts)
        if depth_of(body) > self._settings.max_depth:
            limit = self._settings.max_depth
            return Refusal(422, f"the body is nested too deeply; at most {limit} levels are accepted.", "Validation")
        return body


def _path(scope: Scope) -> str:
    """Return the path of a request within the application, which may be mounted under another path."""
    root = scope.get("root_path", "").rstrip("/")
    return scope["path"].removeprefix(root) if scope["path"].startswith(f"{root}/") else scope["path"]


def depth_of(body: bytes) -> int:
    """Return how deeply lists and objects are nested in JSON; parsing could exceed the recursion limit."""
    depth = deepest = 0
    for part in _PARTS.finditer(body):
        if part[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif part[0] in (b"]", b"}"):
            depth -= 1
    return deepest


async def _refuse(send: Send, refusal: Refusal) -> None:
    """Send a refusal as a response with a JSON body."""
    body = json.dumps({"error": refusal.error, "error_type": refusal.error_type}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
