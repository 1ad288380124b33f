"""The body of a request: its JSON, its examples (texts, pairs of texts or files), and which readers can read them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, final

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from lamina.errors import ConfigError, LaminaError, check_known
from lamina.tasks import kind_of
from lamina.utils import RepeatedKeyError, TooDeepError, parse_json

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lamina.bank import ReaderBank
    from lamina.serve.settings import Settings
    from lamina.tasks.lazy_file import LazyFile

TEXT = "text"
_MAX_DECODED = 1 << 26  # pixels or audio samples of all files of a request together, once they are decoded


class TooLargeError(LaminaError):
    """Raised when the files of a request would be too large once they are decoded."""


@final
@dataclass(frozen=True)
class Upload:
    """An image or audio file that a client sent. It stays in memory and is never written to disk.

    Attributes:
        medium: "image" or "audio".
        data: The file's bytes, still encoded as the client sent them (PNG, WAV, ...).
        size: Number of pixels or audio samples after decoding; 0 as long as the file's header has not been read.
    """

    medium: str
    data: bytes
    size: int = 0

    @classmethod
    def of(cls, medium: str, encoded: str) -> Upload:
        """Return the upload of a file in Base64 (`encoded`) with this medium; raise ConfigError if it is not Base64."""
        try:
            return cls(medium, base64.b64decode(encoded, validate=True))
        except (binascii.Error, ValueError):
            raise ConfigError(f"serve: {medium} is not Base64. Send the bytes of a file, encoded as Base64.") from None


# What a reader answers about: a text, a pair of texts, or a file.
Example: TypeAlias = str | tuple[str, str] | Upload


def medium_of(bank: ReaderBank, task: str) -> str:
    """Return what the reader called `task` reads: "text", "image" or "audio"."""
    file = _file_class(bank, task)
    return TEXT if file is None else file.column


def plain(examples: Sequence[Example]) -> list[str | tuple[str, str] | bytes]:
    """Return examples in the form that `lamina.predict` accepts: files as bytes, texts and pairs unchanged.

    Call it only after `readers_of` has checked the examples: for readers of files, `lamina.predict` would open a text
    as a path.
    """
    return [example.data if isinstance(example, Upload) else example for example in examples]


def readers_of(bank: ReaderBank, tasks: Sequence[str] | None, examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the names of the readers that answer about `examples`, in the order of the bank.

    All examples are of one kind (text, image or audio). If `tasks` is None, all readers of this kind answer. Raises
    UnknownNameError if a name in `tasks` is not a reader of the bank, and ConfigError if `examples` or `tasks` is
    empty, a named reader does not read such examples, or no reader does.
    """
    if not examples:
        raise ConfigError("serve: no text came; at least one is needed.")
    check_known("serve", tasks or (), bank, "task")
    medium = examples[0].medium if isinstance(examples[0], Upload) else TEXT
    names = tuple(name for name in bank if tasks is None or name in tasks)
    if not names:
        raise ConfigError(f"serve: tasks is empty. Name at least one of {', '.join(bank)}.")
    fitting = tuple(name for name in names if medium_of(bank, name) == medium)
    if not fitting or (tasks is not None and len(fitting) < len(names)):
        other = next(name for name in names if name not in fitting)
        raise ConfigError(f"serve: got {medium} for '{other}', which reads {medium_of(bank, other)}.")
    return fitting


def sized(bank: ReaderBank, names: Sequence[str], examples: Sequence[Example]) -> Sequence[Example]:
    """Return the examples with `Upload.size` filled in from the files' headers; texts are returned unchanged.

    `names` are the readers that will answer, as `readers_of` returned them. Only headers are read, so a small file that
    would decode to gigabytes is refused before it is decoded. Raises DataError if a file is not an image or an audio
    file of a known format, and TooLargeError if all files together have more than 2**26 pixels or audio samples.
    """
    file = _file_class(bank, names[0])
    if file is None:
        return examples
    uploads = [example for example in examples if isinstance(example, Upload)]
    sizes = [file.of(f"file {row}", upload.data).decoded_size() for row, upload in enumerate(uploads)]
    if sum(sizes) > _MAX_DECODED:
        came = f"the files have {sum(sizes):,} {file.units} in all"
        raise TooLargeError(f"serve: {came}; {_MAX_DECODED:,} are allowed. Send smaller files.")
    return [replace(upload, size=size) for upload, size in zip(uploads, sizes, strict=True)]


def _file_class(bank: ReaderBank, task: str) -> type[LazyFile] | None:
    return kind_of(bank[task].config.head.kind).file


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
        """Return the value of the body, which FastAPI asks for once; raises the errors of `parse_body`."""
        return parse_body(await self.body(), self.app.state.max_depth)


class JSONRoute(APIRoute):
    """A route of FastAPI that gets its requests as objects of `request_class`."""

    request_class: ClassVar[type[Request]] = JSONRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request; FastAPI calls this once per route."""
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await answer(self.request_class(request.scope, request.receive))

        return handle


def use_json_routes(app: FastAPI, settings: Settings) -> None:
    """Make each route that is added to `app` after this a `JSONRoute`; `settings` limit how deep bodies nest."""
    app.state.max_depth = settings.max_depth
    app.router.route_class = JSONRoute


def parse_body(body: bytes, max_depth: int) -> Any:  # noqa: ANN401
    """Return the value of a JSON body. Lone surrogates, which no response can repeat, become "�".

    Raises:
        HTTPException: With status 422 if the body is not in UTF-8, is nested more than `max_depth` levels deep, or has
            an object with a key twice.
        ValueError: If the body is not JSON.
    """
    encoding = json.detect_encoding(body)
    if not encoding.startswith("utf-8"):
        raise HTTPException(422, "the body cannot be read; JSON in UTF-8 is needed")
    try:
        return parse_json(without_lone_surrogates(body).decode(encoding), max_depth)
    except TooDeepError:
        raise HTTPException(422, f"the body is nested too deeply; at most {max_depth} levels are accepted.") from None
    except RepeatedKeyError as error:
        raise HTTPException(422, f"the body is not clear: {error}.") from None


def without_lone_surrogates(body: bytes) -> bytes:
    r"""Return a JSON body with "\ufffd" in place of each lone half of a surrogate pair; its size stays the same."""

    def replaced(part: re.Match[bytes]) -> bytes:
        if part[1]:
            return rb"\ufffd"
        return "\ufffd".encode() if part[2] else part[0]

    may_have = b"\\u" in body or b"\xed" in body  # much faster than the search
    return _SURROGATES.sub(replaced, body) if may_have and _ANY_SURROGATE.search(body) else body
