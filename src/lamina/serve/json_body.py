"""JSON bodies of requests: each is parsed once, with checks that Python's own parser does not make."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from lamina.utils import RepeatedKeyError, TooDeepError, parse_json

# One half of a pair of surrogates, as an escape or as three bytes; whole pairs and other escapes match without a group.
_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.|(\xed[\xa0-\xbf][\x80-\xbf])",
    re.DOTALL,
)
_ANY_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


class JSONRequest(Request):
    """A request whose body is parsed by `parse_body` in place of FastAPI's parser."""

    async def json(self) -> Any:  # noqa: ANN401
        """Parse the body and return its value; raise HTTPException or JSONDecodeError in the cases of `parse_body`."""
        return parse_body(await self.body(), self.app.state.max_depth)


class JSONRoute(APIRoute):
    """A route of FastAPI that gets its requests as objects of `request_class`.

    The application's `state.max_depth` says how deep bodies may nest.
    """

    request_class: ClassVar[type[Request]] = JSONRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's function that answers a request, called with a `request_class` object."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await answer(self.request_class(request.scope, request.receive))

        return handle


def parse_body(body: bytes, max_depth: int) -> Any:  # noqa: ANN401
    """Return the value of a JSON body. Lone surrogates, which no response can repeat, become "�".

    Raises:
        HTTPException: With status 422 if the body is not in UTF-8, is nested more than `max_depth` levels deep, has a
            number of thousands of digits, or an object with a key twice.
        JSONDecodeError: If the body is not JSON, or is empty.
    """
    encoding, no_utf8 = json.detect_encoding(body), "the body cannot be read; JSON in UTF-8 is needed"
    if not encoding.startswith("utf-8"):
        raise HTTPException(422, no_utf8)
    try:
        return parse_json(without_lone_surrogates(body).decode(encoding), max_depth)
    except TooDeepError:
        raise HTTPException(422, f"the body is nested too deeply; at most {max_depth} levels are accepted.") from None
    except RepeatedKeyError as error:
        raise HTTPException(422, f"the body is not clear: {error}.") from None
    except UnicodeDecodeError:
        raise HTTPException(422, no_utf8) from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        raise HTTPException(422, "the body cannot be read: a number has too many digits.") from None


def without_lone_surrogates(body: bytes) -> bytes:
    r"""Return a JSON body with "\ufffd" in place of each lone half of a surrogate pair; its size stays the same."""

    def replaced(part: re.Match[bytes]) -> bytes:
        if part[1]:
            return rb"\ufffd"
        return "\ufffd".encode() if part[2] else part[0]

    may_have = b"\\u" in body or b"\xed" in body  # much faster than the search
    return _SURROGATES.sub(replaced, body) if may_have and _ANY_SURROGATE.search(body) else body
