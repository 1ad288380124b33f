"""Checks before a request reaches the application: its key and the size of its body. Bodies of error responses.

HEAD requests are answered here too, on every path that answers GET.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

from fastapi import HTTPException

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fastapi import Request
    from pydantic_core import ErrorDetails
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from lamina.serve.settings import Settings
    from lamina.utils import JSON

OPENAI = "/v1/"  # paths that begin so have errors in OpenAI's shape; all others in that of text-embeddings-inference
# Error type -> OpenAI's `type` and `code`. Other types are server errors.
_OPENAI_TYPES: dict[str, tuple[str, str | None]] = {
    "Validation": ("invalid_request_error", None),
    "TooLong": ("invalid_request_error", "context_length_exceeded"),
    "NotFound": ("invalid_request_error", None),
    "NotAllowed": ("invalid_request_error", None),
    "Timeout": ("invalid_request_error", None),
    "Unauthorized": ("invalid_request_error", "invalid_api_key"),
    "Forbidden": ("permission_error", None),
    "Overloaded": ("rate_limit_error", "rate_limit_exceeded"),
}
# Types of pydantic's errors where an object is needed; their messages name a class of this program
_OBJECT = {"model_type", "model_attributes_type", "dict_type"}
AnswerT = TypeVar("AnswerT")


def wrong_place(errors: Sequence[ErrorDetails], body: object) -> tuple[str, str]:
    """Return where a body is wrong, such as "messages.0.role", and why; "" if the body itself is wrong.

    If a value may have several forms, pydantic lists the errors of each form under the form's name, which is not a key
    of the body. Only the errors of the form that fits best are used: the one whose errors are nested deepest.

    Args:
        errors: pydantic's errors, at least one.
        body: The body in which pydantic found the errors.
    """
    first = _keys(errors[0], body)[:1]
    places = [(_keys(error, body), error) for error in errors]
    places = [(keys, error) for keys, error in places if keys[:1] == first]
    deepest = max((keys for keys, _ in places), key=len)
    told = dict.fromkeys(_message_of(error) for keys, error in places if keys == deepest)
    return ".".join(map(str, deepest)), ", or: ".join(told)


def _keys(error: ErrorDetails, body: object) -> list[str | int]:
    """Return the keys and indices that lead through a body to the place of an error, without names of forms."""
    keys: list[str | int] = []
    *_, last = location = error["loc"][1:] or ("",)
    for part in location:
        if isinstance(body, dict) and (part in body or (part is last and error["type"] == "missing" and part)):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int) and part < len(body):
            body = body[part]
        else:
            continue
        keys.append(part)
    return keys


def _message_of(error: ErrorDetails) -> str:
    """Return the message of one of pydantic's errors; one that names a class becomes "Input should be an object"."""
    return "Input should be an object" if error["type"] in _OBJECT else str(error["msg"])


def problem_body(path: str, error: str, error_type: str, param: str | None = None) -> dict[str, JSON]:
    """Return the body of an error response, in the shape for `path`: OpenAI's or that of text-embeddings-inference.

    `error` is the message, `error_type` the fixed name of this kind of error, and `param` the key of the request that
    is wrong, if a single one is.
    """
    if not path.startswith(OPENAI):
        return {"error": error, "error_type": "Validation" if error_type == "TooLong" else error_type}
    kind, code = _OPENAI_TYPES.get(error_type, ("server_error", None))
    return {"error": {"message": error, "type": kind, "param": param, "code": code}}


async def wait_while_connected(request: Request, answer: Awaitable[AnswerT], timeout_s: float | None = None) -> AnswerT:
    """Wait for `answer` and return its result; cancel `answer` if the client disconnects or the time is up.

    The body of the request must have been read, so that only a disconnect is left to receive. Raises HTTPException with
    status 499 if the client disconnects, 503 after `timeout_s` seconds (None: no limit), and any error that `answer`
    raises.
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
        # The cancelled task may receive from the connection until it is over. The other may still end with an error;
        # asyncio would log its traceback if nobody looked at it.
        await asyncio.gather(waiting, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
class HeadAsGet:
    """ASGI middleware that answers HEAD requests as GET requests, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application. A HEAD request becomes a GET, and its response loses the body."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_headers)


@final
class RootPath:
    """ASGI middleware for POST at `/`, the default address of clients of Hugging Face's servers.

    `target` returns the path that answers in place of `/`.
    """

    def __init__(self, app: ASGIApp, target: Callable[[], str]) -> None:
        self._app, self._target = app, target

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application; for a POST at `/`, replace the path by the one from `target`."""
        if scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) == "/":
            path = scope["path"].removesuffix("/") + self._target()
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


@final
class RequestGuard:
    """ASGI middleware that refuses a request whose key is missing or wrong, or body too large, late or compressed.

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

        A path under `/readers` needs the admin key, and is refused if none is set. GET of the page and of the health
        checks needs no key, nor does any OPTIONS request.
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
        sent = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(sent, b"Bearer " + key.encode()):  # takes the same time wherever the first difference is
            return None
        return Refusal(401, "the key is missing or wrong. Send Authorization: Bearer KEY.", "Unauthorized")

    async def _body(self, receive: Receive) -> bytes | Refusal:
        """Receive a request's body, and return it, or a refusal if it is too large.

        A body that is too large is not received to its end. If the client disconnects, the part so far is returned.
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
    """Return a refusal if a request's body is compressed, which is not supported; None otherwise."""
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
