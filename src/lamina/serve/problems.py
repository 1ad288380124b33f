"""Build the bodies of error responses, in the shape that the clients of each path expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def problem_body(path: str, error: str, error_type: str, param: str | None = None) -> dict[str, JSON]:
    """Return the body of an error response.

    Args:
        path: The path of the request, within the application.
        error: The error as text.
        error_type: A fixed name for this kind of error.
        param: The key of the request that is wrong. None: no single key is.
    """
    if not path.startswith(OPENAI):
        return {"error": error, "error_type": "Validation" if error_type == "TooLong" else error_type}
    kind, code = _OPENAI_TYPES.get(error_type, ("server_error", None))
    return {"error": {"message": error, "type": kind, "param": param, "code": code}}
