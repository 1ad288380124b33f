"""What is refused before a body is parsed: no key, too many bytes, too deep."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lamina.serve.settings import Settings

OPEN = ("/", "/health", "/v2/health/live", "/v2/health/ready")  # the page, which asks for the key, and for probes
ADMIN = "/readers"  # what is here and below changes what is served, and has a key of its own
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
]


_PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)  # texts whole, and brackets


@final
class RequestGuard:
    """An ASGI layer around the application. It reads the body, and hands it on whole or not at all."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if _path(scope) not in OPEN and scope["method"] != "OPTIONS" and (refused := self._key_problem(scope)):
            await _refuse(with_headers, *refused)
            return
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                body, problem = await self._body(receive)
        except TimeoutError:
            body, problem = b"", (408, f"the body did not come within {seconds:g} s.", "Timeout")
        if problem is not None:
            await _refuse(with_headers, *problem)
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()  # which tells of a client that hangs up
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, with_headers)

    def _key_problem(self, scope: Scope) -> tuple[int, str, str] | None:
        """What is wrong with the key that was sent, if one is asked for."""
        key, path = self._settings.api_key, _path(scope)
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            key = self._settings.admin_key
            if key is None:
                return 403, "the readers cannot be changed: the server was started without --admin-key.", "Forbidden"
        if key is None:
            return None
        sent = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(sent, b"Bearer " + key.encode()):
            return None
        return 401, "the key is missing or wrong. Send Authorization: Bearer KEY.", "Unauthorized"

    async def _body(self, receive: Receive) -> tuple[bytes, tuple[int, str, str] | None]:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self._settings.payload_limit:
                most = f"{self._settings.payload_limit} bytes are taken"
                return b"", (413, f"the body is larger; {most}.", "Validation")
        body = b"".join(parts)
        if depth_of(body) > self._settings.max_depth:
            return b"", (422, f"the body is too deep; {self._settings.max_depth} levels are taken.", "Validation")
        return body, None


def _path(scope: Scope) -> str:
    """What was asked for within the application, which may be mounted below another path."""
    root = scope.get("root_path", "").rstrip("/")
    return scope["path"].removeprefix(root) if scope["path"].startswith(f"{root}/") else scope["path"]


def depth_of(body: bytes) -> int:
    """How deep lists and objects of JSON stand in one another, without parsing it."""
    depth = deepest = 0
    for part in _PARTS.finditer(body):
        if part[0] in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif part[0] in (b"]", b"}"):
            depth -= 1
    return deepest


async def _refuse(send: Any, status: int, error: str, error_type: str) -> None:
    body = json.dumps({"error": error, "error_type": error_type}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
