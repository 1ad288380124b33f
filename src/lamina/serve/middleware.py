"""Checks before a request reaches the application: its key and the size of its body; and other names of its routes."""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING, NamedTuple, final

from lamina.serve.problems import problem_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lamina.serve.settings import Settings

OPEN = ("/", "/health", "/v2/health/live", "/v2/health/ready")  # paths without a key: the page and health checks
ADMIN = "/readers"  # this path and those below change what is served, and have a key of their own
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
]


class Refusal(NamedTuple):
    """Why a request is refused: the HTTP status, a message, and an error type for the client's code."""

    status: int
    error: str
    error_type: str


@final
class Aliases:
    """ASGI middleware that answers HEAD as GET, without the body, and POST at `/` as POST at another path.

    `/` is the default address of clients of Hugging Face's servers; `root` returns the path that answers in its place.
    """

    def __init__(self, app: ASGIApp, root: Callable[[], str]) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, with the method and the path under which it is answered."""

        async def send_headers(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, send_headers)
            return
        if scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) == "/":
            path = scope["path"].removesuffix("/") + self._root()
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


@final
class RequestGuard:
    """ASGI middleware that refuses a request with a missing or wrong key, or a too large, late or compressed body.

    The status of a refusal is 401, 403 (a path under `/readers`, and no admin key is set), 413, 408 or 415. Other
    requests are passed on once the whole body has come. Every response gets headers that forbid caching it and guessing
    its type.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is refused, or pass it on to the application once its body is there."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS]
            await send(message)

        if refusal := self._key_problem(scope) or _encoding_problem(scope):
            await _refuse(send_with_headers, path_of(scope), refusal)
            return
        timeout_s = self._settings.request_timeout
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._body(receive)
        except TimeoutError:
            body = Refusal(408, f"the body did not come within {timeout_s:g} s.", "Timeout")
        if isinstance(body, Refusal):
            await _refuse(send_with_headers, path_of(scope), body)
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
        """Return a refusal if a request's key is missing or wrong; None otherwise.

        A path under `/readers` needs the admin key, and is refused if none is set. Other paths need the API key, if one
        is set. GET of the page and of the health checks needs no key, nor does any OPTIONS request.
        """
        key, path, method = self._settings.api_key, path_of(scope), scope["method"]
        # OPTIONS is the browser's own question before a request of another origin; it carries no key.
        if method == "OPTIONS" or (path in OPEN and method == "GET"):
            return None
        if path == ADMIN or path.startswith(f"{ADMIN}/"):
            key = self._settings.admin_key
            if key is None:
                error = "the readers cannot be changed: the server was started without --admin-key."
                return Refusal(403, error, "Forbidden")
        if key is None:
            return None
        scheme, _, sent = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # takes the same time wherever the first difference is
        if hmac.compare_digest(sent, key.encode()) and scheme.lower() == b"bearer":
            return None
        return Refusal(401, "the key is missing or wrong. Send Authorization: Bearer KEY.", "Unauthorized")

    async def _body(self, receive: Receive) -> bytes | Refusal:
        """Receive a request's body, and return it, or a refusal if it is too large.

        A body that is too large is not received to its end. If the client disconnects, the part so far is returned,
        b"" if nothing has come.
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
        return b"".join(parts)


def _encoding_problem(scope: Scope) -> Refusal | None:
    """Return a refusal if a request's body is compressed; None otherwise."""
    encoding = dict(scope["headers"]).get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.strip().lower() in ("", "identity"):
        return None
    return Refusal(415, f"the body has Content-Encoding {encoding}; send it uncompressed.", "Validation")


def path_of(scope: Scope) -> str:
    """Return a request's path within the application, without the path under which the application may be mounted."""
    root = scope.get("root_path", "").rstrip("/")
    return scope["path"].removeprefix(root) if scope["path"].startswith(f"{root}/") else scope["path"]


async def _refuse(send: Send, path: str, refusal: Refusal) -> None:
    """Send a refusal as a JSON response, in the shape that clients of `path` expect."""
    body = json.dumps(problem_body(path, refusal.error, refusal.error_type)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
