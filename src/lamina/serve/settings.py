"""The settings of a server: its limits, its keys, and what its page shows."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from lamina.errors import ConfigError
from lamina.prediction.backends import Backend

_Text = Annotated[str, StringConstraints(min_length=1)]
_ORIGIN = re.compile(r"\*|null|file://|[a-z][-+.a-z0-9]*://(?:(?![/?#*A-Z])[!-~])+")
_NO_ORIGIN = "no_origin"


def _checked_origin(origin: str) -> str:
    if not _ORIGIN.fullmatch(origin):
        rule = "an origin is a scheme and a host in lower case, such as https://example.org, or *"
        raise PydanticCustomError(_NO_ORIGIN, f"{rule}; it has no path and no pattern")
    return origin


_Origin = Annotated[str, AfterValidator(_checked_origin)]
Example: TypeAlias = _Text | tuple[_Text, _Text]  # a text, or a pair of texts


class Settings(BaseModel):
    """Limits, keys and page texts of a server, for `create_app`; build it with `Settings.of`.

    Limits that text-embeddings-inference has too have the same names as there. Unless another status is named, more
    texts, tokens or bytes than allowed get status 413.

    Attributes:
        backend: What computes the readers' answers; see `lamina.predict`.
        max_batch_tokens: Tokens per pass, padding included; a single longer text still has a pass. Above 2,048 on a
            CPU, or 16,384 on a GPU, it has no effect.
        max_concurrent_passes: Passes at a time; None: see `scheduler.default_passes`.
        max_concurrent_requests: Requests accepted and not answered; a further request gets status 429.
        max_concurrent_generations: Texts generated at a time; a further request gets status 429.
        max_total_tokens: Tokens of a prompt and its generated text together; with an encoder, of each of them. If a
            request sets more new tokens than fit, it gets status 422.
        max_client_batch_size: Texts per request.
        max_request_tokens: Tokens of a request's texts, without those that are cut off.
        payload_limit: Bytes of a request's body.
        max_depth: Levels of nested lists and objects in a body; a deeper one gets status 422.
        request_timeout: Seconds in which a request's body must come, and then its answer, or each token of a generated
            text; else the request ends with an error.
        header_timeout: Seconds in which the headers of a request must come.
        shutdown_timeout: Seconds in which accepted requests are answered at the end.
        api_key: Key that requests must send as "Authorization: Bearer KEY"; None: no key.
        admin_key: The same for /readers, which is off without it.
        cors_allow_origin: Origins whose web pages may send requests; "*": all; (): none.
        title: The page's title; None: the names of the bank and its model.
        examples: The page's example texts; None: three that fit the bank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Backend = "auto"
    max_batch_tokens: int = Field(16384, ge=1)
    max_concurrent_passes: int | None = Field(None, ge=1)
    max_concurrent_requests: int = Field(512, ge=1)
    max_concurrent_generations: int = Field(4, ge=1)
    max_total_tokens: int = Field(4096, ge=2)
    max_client_batch_size: int = Field(32, ge=1)
    max_request_tokens: int = Field(65536, ge=1)
    payload_limit: int = Field(2_000_000, ge=1)
    max_depth: int = Field(8, ge=2, le=100)
    request_timeout: float = Field(60.0, gt=0)
    header_timeout: float = Field(10.0, gt=0)
    shutdown_timeout: float = Field(30.0, gt=0)
    api_key: str | None = Field(None, min_length=1, repr=False)
    admin_key: str | None = Field(None, min_length=1, repr=False)
    cors_allow_origin: tuple[_Origin, ...] = ()
    title: str | None = Field(None, min_length=1)
    examples: tuple[Example, ...] | None = None

    @classmethod
    def of(cls, **values: object) -> Settings:
        """Return settings with `values` in place of defaults; raise ConfigError if one is unknown or not allowed."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"] if isinstance(part, str) or first["type"] != _NO_ORIGIN)
            raise ConfigError(f"serve: {name} is {first['input']!r}; {first['msg'].lower()}.") from None
