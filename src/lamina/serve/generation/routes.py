"""Texts that are written, over HTTP: whole, or token by token as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from lamina.errors import LaminaError
from lamina.serve.disconnects import wait_while_connected
from lamina.serve.generation.detokenizer import StopStrings
from lamina.serve.generation.stream import GenerationEnd, TokenEvent
from lamina.serve.scheduler import ClosedError
from lamina.serve.schemas import ChatRequest, GenerateRequest

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Message, Receive, Scope, Send

    from lamina.serve.generation.generator import TextGenerator
    from lamina.serve.generation.prompts import GenerationRequest
    from lamina.serve.scheduler import Scheduler

logger = logging.getLogger(__name__)

Item = TokenEvent | GenerationEnd
_FINISH = {"eos_token": "stop", "stop_sequence": "stop", "length": "length", "flag": "content_filter"}  # as OpenAI's


class Items:
    """A text's tokens and its end, as they come from the thread that writes it."""

    def __init__(self, writer: TextGenerator, asked: GenerationRequest, seconds: float) -> None:
        self._queue, self.seconds = asyncio.Queue[Item | LaminaError](), seconds
        loop = asyncio.get_running_loop()

        def put(item: Item | LaminaError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has all that waits
                loop.call_soon_threadsafe(self._queue.put_nowait, item)

        self._writing = writer.begin(asked, put)

    async def next(self) -> Item:
        """The next; HTTPException if none comes for too long."""
        try:
            async with asyncio.timeout(self.seconds):
                item = await self._queue.get()
        except TimeoutError:
            raise HTTPException(503, f"no token within {self.seconds:g} s") from None
        if isinstance(item, LaminaError):
            raise item
        return item

    async def all(self) -> tuple[list[TokenEvent], GenerationEnd]:
        """The whole text."""
        tokens: list[TokenEvent] = []
        while isinstance(item := await self.next(), TokenEvent):
            tokens.append(item)
        return tokens, item

    def leave(self) -> None:
        """Nobody waits for the rest."""
        self._writing.leave()


class Events(StreamingResponse):
    """Server-sent events, of a text that ends when its client leaves, or reads nothing for so many seconds."""

    media_type = "text/event-stream"

    def __init__(
        self, items: Items, first: Item, shape: Callable[[Item], Iterator[Any]], *, nested: bool, seconds: float
    ) -> None:
        self._items, self._seconds = items, seconds
        super().__init__(self._events(first, shape, nested=nested), headers={"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._seconds):
                    await send(message)
            except TimeoutError:
                logger.warning("serve: a client read nothing of its stream for %g s, which was ended", self._seconds)
                raise

        try:
            with contextlib.suppress(TimeoutError, ClientDisconnect):  # the client is gone, or as good as that
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._items.leave()

    async def _events(
        self, item: Item, shape: Callable[[Item], Iterator[Any]], *, nested: bool
    ) -> AsyncIterator[bytes]:
        """One for each thing to tell; what goes wrong on the way is told as the last one."""
        try:
            while True:
                for told in shape(item):
                    yield _event(told)
                if isinstance(item, GenerationEnd):
                    return
                item = await self._items.next()
        except (LaminaError, HTTPException) as error:
            text = str(error.detail) if isinstance(error, HTTPException) else str(error)
            kind = "Backend" if not isinstance(error, ClosedError | HTTPException) else "Unhealthy"
            yield _event({"error": {"message": text, "type": kind}} if nested else {"error": text, "error_type": kind})


def _event(told: Any) -> bytes:
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


def said_of(token: TokenEvent) -> dict[str, Any]:
    """What the readers and monitors say at a token."""
    return {"scores": token.scores, "monitors": token.monitors, "flagged": list(token.flagged)}


def details_of(ending: GenerationEnd) -> dict[str, Any]:
    """How a text ended."""
    return {
        "finish_reason": ending.reason,
        "generated_tokens": ending.tokens,
        "input_length": ending.prompt_tokens,
        "seed": ending.seed,
        "flagged_at": dict(ending.flagged_at),
        "answers": dict(ending.answers),
    }


def _token(token: TokenEvent) -> dict[str, Any]:
    special = token.sign is not None
    return {"id": token.id, "text": token.sign if special else token.text, "special": special}


def generate_events() -> Callable[[Item], Iterator[Any]]:
    """As text-generation-inference streams: the last token's event has the whole text, and says how it ended."""
    last: list[TokenEvent] = []

    def shape(item: Item) -> Iterator[Any]:
        if isinstance(item, TokenEvent) and item.last:
            last.append(item)
            return
        token, ending = (item, None) if isinstance(item, TokenEvent) else (last[0], item)
        end = {"generated_text": ending and ending.text, "details": ending and details_of(ending)}
        yield {"index": token.index, "token": _token(token), **said_of(token), **end}

    return shape


def generate_body(tokens: list[TokenEvent], ending: GenerationEnd, *, details: bool) -> dict[str, Any]:
    """As it answers whole."""
    each = [{**_token(token), **said_of(token)} for token in tokens]
    more = {"details": {**details_of(ending), "prefill": [], "tokens": each}} if details else {}
    return {"generated_text": ending.text, **more}


class ChatShape:
    """As OpenAI's chat completions answer; what the readers say stands beside the choices."""

    def __init__(self, asked: ChatRequest, model: str) -> None:
        self._model, self._usage = asked.model or model, asked.has_usage
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._stop = StopStrings(asked.asked().stop)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, delta: dict[str, str], reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage, **more}

    def events(self, item: Item) -> Iterator[Any]:
        """The chunks of one item."""
        if isinstance(item, TokenEvent):
            if item.index == 1:
                yield self._chunk({"role": "assistant", "content": ""})
            text = self._stop.add(item.text)
            yield self._chunk({"content": text}, token=_token(item), **said_of(item))
            return
        if rest := self._stop.rest():
            yield self._chunk({"content": rest})
        yield self._chunk({}, _FINISH[item.reason], details=details_of(item))
        if self._usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(item)}
        yield "[DONE]"

    def body(self, tokens: list[TokenEvent], ending: GenerationEnd) -> dict[str, Any]:
        """The whole answer."""
        text = self._stop.add(ending.text) + self._stop.rest()
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[ending.reason]}
        each = [{**_token(token), **said_of(token)} for token in tokens]
        more = {"usage": _usage(ending), "tokens": each, "details": details_of(ending)}
        return {**self._head("chat.completion"), "choices": [choice], **more}


def _usage(ending: GenerationEnd) -> dict[str, int]:
    read, written = ending.prompt_tokens, ending.tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def add_generation(app: FastAPI, scheduler: Scheduler, writer: TextGenerator, name: str) -> None:
    """Add the paths that have a text written."""
    seconds = scheduler.settings.request_timeout
    streams: Any = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}

    @app.post("/generate", responses=streams)
    async def generate(asked: GenerateRequest, request: Request) -> Any:
        """A text that goes on from a prompt, with what the readers say of each token.

        A token's scores are those of the text up to and including it. The last token was read by no step of the model,
        so its scores are null. With `stream`, an event for each token, of which the last tells how the text ended.
        """
        items = Items(writer, asked.asked(), seconds)
        if asked.stream:
            return await _streamed(items, request, generate_events(), nested=False)
        return generate_body(*await _whole(items, request), details=asked.parameters.details)

    @app.post("/v1/chat/completions", responses=streams)
    async def chat(asked: ChatRequest, request: Request) -> Any:
        """The reply to a chat, in the shape of OpenAI's endpoint, with what the readers say of each token."""
        items, shape = Items(writer, asked.asked(), seconds), ChatShape(asked, name)
        if asked.stream:
            return await _streamed(items, request, shape.events, nested=True)
        return shape.body(*await _whole(items, request))


async def _whole(items: Items, request: Request) -> tuple[list[TokenEvent], GenerationEnd]:
    try:
        return await wait_while_connected(request, items.all())
    finally:
        items.leave()


async def _streamed(items: Items, request: Request, shape: Callable[[Item], Iterator[Any]], *, nested: bool) -> Events:
    """A stream; what is wrong before its first token has a status of its own."""
    try:
        first = await wait_while_connected(request, items.next())
    except BaseException:
        items.leave()
        raise
    return Events(items, first, shape, nested=nested, seconds=items.seconds)
