"""Bodies of error responses, in the shape that clients of each path expect, and clients that have left."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from fastapi import HTTPException

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from fastapi import Request
    from pydantic_core import ErrorDetails

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
    """Return the first wrong place in a body, such as "messages.0.role" ("": the body itself), and what is wrong.

    If a value may have several forms, pydantic lists the errors of each form under the form's name, which is not a key
    of the body. Only the errors of the form that fits best are used: the one whose errors are nested deepest. Their
    messages are joined by ", or: ".

    Args:
        errors: pydantic's errors as FastAPI returns them, at least one; "body", which begins each place, is left out.
        body: The body in which pydantic found the errors.
    """
    first = _keys(errors[0], body)[:1]
    places = [(_keys(error, body), error) for error in errors]
    places = [(keys, error) for keys, error in places if keys[:1] == first]
    deepest = max((keys for keys, _ in places), key=len)
    told = dict.fromkeys(
        "Input should be an object" if error["type"] in _OBJECT else str(error["msg"])
        for keys, error in places
        if keys == deepest
    )
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


def problem_body(path: str, error: str, error_type: str, param: str | None = None) -> dict[str, JSON]:
    """Return the body of an error response, in the shape for `path`: OpenAI's or that of text-embeddings-inference.

    `error` is the message, and `error_type` the fixed name of this kind of error. OpenAI's paths get OpenAI's type
    and code in its place (type "server_error" if it has none); elsewhere, "TooLong" becomes "Validation". `param` is
    the wrong key of the request, for OpenAI (None: not known).
    """
    if not path.startswith(OPENAI):
        return {"error": error, "error_type": "Validation" if error_type == "TooLong" else error_type}
    kind, code = _OPENAI_TYPES.get(error_type, ("server_error", None))
    return {"error": {"message": error, "type": kind, "param": param, "code": code}}


async def wait_while_connected(
    request: Request, answer: Awaitable[AnswerT] | Future[AnswerT], timeout_s: float | None = None
) -> AnswerT:
    """Wait for `answer` and return its result; cancel `answer` if the client disconnects or the time is up.

    The body of the request must have been read, so that only a disconnect is left to receive. Raises HTTPException with
    status 499 if the client disconnects, 503 after `timeout_s` seconds (None: no limit), and any error that `answer`
    raises.
    """
    waiting = asyncio.wrap_future(answer) if isinstance(answer, Future) else asyncio.ensure_future(answer)

    async def until_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnect = asyncio.ensure_future(until_disconnect())
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
