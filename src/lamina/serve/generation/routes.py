"""The routes that generate text: whole in one response, or token by token as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, final

from fastapi import HTTPException, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from lamina.errors import LaminaError
from lamina.serve.generation.stream import GenerationEnd, TokenEvent
from lamina.serve.middleware import path_of
from lamina.serve.problems import problem_body, wait_while_connected
from lamina.serve.scheduler import ClosedError
from lamina.serve.schemas import ChatRequest, GenerateRequest, OpenAIProblem
from lamina.serve.telemetry import note_failure
from lamina.utils import JSON, JSONObject

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Message, Receive, Scope, Send

    from lamina.serve.generation.generator import TextGenerator
    from lamina.serve.generation.prompts import GenerationRequest
    from lamina.serve.scheduler import Scheduler

logger = logging.getLogger(__name__)
Item: TypeAlias = TokenEvent | GenerationEnd
Event: TypeAlias = Mapping[str, object] | str  # the data of a server-sent event: JSON, or text that is sent as it is
_FINISH = {"eos_token": "stop", "stop_sequence": "stop", "length": "length", "flag": "content_filter"}  # OpenAI's words


class Items:
    """A queue for the tokens and the end of one text, from the thread that generates them to the event loop.

    Making it begins the text of `request`. `next` waits at most `timeout_s` seconds for a token. Raises ConfigError,
    OverloadedError or ClosedError in the cases of `TextGenerator.begin`.
    """

    def __init__(self, generator: TextGenerator, request: GenerationRequest, timeout_s: float) -> None:
        self._queue, self.timeout_s = asyncio.Queue[Item | LaminaError](), timeout_s
        loop = asyncio.get_running_loop()

        def put(item: Item | LaminaError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so that nobody waits any more
                loop.call_soon_threadsafe(self._queue.put_nowait, item)

        self._generation = generator.begin(request, put)

    async def next(self) -> Item:
        """Wait for the next token or the end of the text, and return it.

        Raises:
            HTTPException: With status 503 if nothing comes within `timeout_s` seconds.
            LaminaError: If the generation of the text has failed.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            raise HTTPException(503, f"no token within {self.timeout_s:g} s") from None
        if isinstance(item, LaminaError):
            raise item
        return item

    async def all(self) -> tuple[list[TokenEvent], GenerationEnd]:
        """Wait for the whole text, and return its tokens and its end; raises the errors of `next`."""
        tokens: list[TokenEvent] = []
        while isinstance(item := await self.next(), TokenEvent):
            tokens.append(item)
        return tokens, item

    def leave(self) -> None:
        """End the text early because its client has left; do nothing if it has ended already."""
        self._generation.leave()


class Events(StreamingResponse):
    """A streaming response of server-sent events. It ends the text if the client leaves.

    `first` is the first token (or the end), already taken from `items`; its events come before those of all later
    items. `shape` converts a token or the end to the data of events. Errors have the shape for `path`, the path of the
    request. Clients that read nothing for `items.timeout_s` seconds are disconnected, and this is logged.
    """

    media_type = "text/event-stream"

    def __init__(self, items: Items, first: Item, shape: Callable[[Item], Iterator[Event]], path: str) -> None:
        self._items = items
        # The header asks proxies, such as nginx, to pass events on at once.
        super().__init__(self._events(first, shape, path), headers={"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the text ends or the client leaves."""
        timeout_s = self._items.timeout_s

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await send(message)
            except TimeoutError:
                logger.warning("serve: a client read nothing of its stream for %g s, so it was closed", timeout_s)
                raise

        try:
            with contextlib.suppress(TimeoutError, ClientDisconnect):  # nobody reads the stream any more
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._items.leave()

    async def _events(self, item: Item, shape: Callable[[Item], Iterator[Event]], path: str) -> AsyncIterator[bytes]:
        """Yield the events of `item` and of all later items, as bytes; `shape` converts them to data.

        An error becomes the last event, in the shape for `path`, and marks the request's span as failed.
        """
        try:
            while True:
                for event in shape(item):
                    yield _encoded(event)
                if isinstance(item, GenerationEnd):
                    return
                item = await self._items.next()
        except (LaminaError, HTTPException) as error:
            text = str(error.detail) if isinstance(error, HTTPException) else str(error)
            kind = "Backend" if not isinstance(error, ClosedError | HTTPException) else "Unhealthy"
            note_failure()
            yield _encoded(problem_body(path, text, kind))


def _encoded(event: Event) -> bytes:
    # only ASCII: some clients (httpx) also end a line at U+0085 and U+2028
    text = event if isinstance(event, str) else json.dumps(event)
    return f"data: {text}\n\n".encode()


def generate_events(before: str = "") -> Callable[[Item], Iterator[Event]]:
    """Return a function that converts the tokens and the end of one text to events of text-generation-inference.

    The event of the last token also has the whole text and how it ended, so it is sent after the end. In the events of
    other tokens, both are null.

    Args:
        before: Text to put in front of the whole text: the prompt, or "".
    """
    last: list[TokenEvent] = []

    def shape(item: Item) -> Iterator[Event]:
        if isinstance(item, TokenEvent) and item.last:
            last.append(item)
            return
        token, ending = (item, None) if isinstance(item, TokenEvent) else (last[0], item)
        end = {"generated_text": ending and before + ending.text, "details": ending and ending.details()}
        yield {"index": token.index, "token": token.token(), **token.report(), **end}

    return shape


def generate_body(tokens: list[TokenEvent], ending: GenerationEnd, *, details: bool, before: str = "") -> JSONObject:
    """Return the response of text-generation-inference for a whole text.

    `before` is put in front of the text: the prompt, or "". With `details`, the response says how the text ended and
    has the scores at each token.
    """
    body: dict[str, JSON] = {"generated_text": before + ending.text}
    if details:
        body["details"] = {**ending.details(), "prefill": [], "tokens": _reports(tokens)}
    return body


def _reports(tokens: Sequence[TokenEvent]) -> list[JSON]:
    return [{**token.token(), **token.report()} for token in tokens]


class ChatShape:
    """Converts one generated text to OpenAI's chat completions, with the readers' scores beside the choices.

    `model` is the model's name in the response if the request names none.
    """

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._model, self._has_usage = request.model or model, request.has_usage
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._stop = StopStrings(request.generation().stop)

    def _head(self, kind: str) -> dict[str, JSON]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, delta: dict[str, str], extra: JSONObject, reason: str | None = None) -> JSONObject:
        """Return one chunk of a streamed chat completion.

        `delta` is what the chunk adds to the message ({}: nothing), and `extra` has further keys of the chunk. `reason`
        is OpenAI's word for why the text ended. None: the text goes on.
        """
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage, **extra}

    def events(self, item: Item) -> Iterator[Event]:
        """Yield the chunks for a token or the end. The first token adds a chunk with the role, the end adds "[DONE]".

        Text that may begin a stop string is held back for a later chunk. If the client asked for usage, a chunk before
        "[DONE]" has the token counts.
        """
        if isinstance(item, TokenEvent):
            if item.index == 1:
                yield self._chunk({"role": "assistant", "content": ""}, {})
            text = self._stop.add(item.text)
            yield self._chunk({"content": text}, {"token": item.token(), **item.report()})
            return
        if rest := self._stop.rest():
            yield self._chunk({"content": rest}, {})
        yield self._chunk({}, {"details": item.details()}, _FINISH[item.finish_reason])
        if self._has_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(item)}
        yield "[DONE]"

    def body(self, tokens: list[TokenEvent], ending: GenerationEnd) -> JSONObject:
        """Return the response for a whole text, cut off before the first stop string; `tokens` hold the scores."""
        text = self._stop.add(ending.text) + self._stop.rest()
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _FINISH[ending.finish_reason]}
        extra = {"usage": _usage(ending), "tokens": _reports(tokens), "details": ending.details()}
        return {**self._head("chat.completion"), "choices": [choice], **extra}


def _usage(ending: GenerationEnd) -> dict[str, int]:
    prompt, generated = ending.input_length, ending.generated_tokens
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def add_generation(app: FastAPI, scheduler: Scheduler, generator: TextGenerator, name: str) -> None:
    """Add the routes that generate text: `/generate`, `/generate_stream` and `/v1/chat/completions`.

    `name` is the bank's name, which only the responses of the last route have.
    """
    timeout_s = scheduler.settings.request_timeout
    event_stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}

    @app.post("/generate", responses={200: event_stream})
    async def generate(body: GenerateRequest, request: Request) -> object:
        """Return a text that continues a prompt, with the readers' scores at each token.

        The scores at a token rate the text up to and including that token. The last token's scores are null, because
        the model does not read it. With `stream`, there is an event per token; the last one also has the whole text,
        and how it ended. Without, `details=false` leaves out the scores and how the text ended.
        """
        items, options = Items(generator, body.generation(), timeout_s), body.parameters
        before = body.inputs if options.return_full_text else ""
        whole = partial(generate_body, details=options.details, before=before)
        return await _response(body, request, items, generate_events(before), whole)

    @app.post("/generate_stream", responses={200: event_stream})
    async def generate_stream(body: GenerateRequest, request: Request) -> object:
        """Do what `/generate` does with `stream`."""
        return await generate(body.model_copy(update={"stream": True}), request)

    openai = {status: {"model": OpenAIProblem} for status in app.router.responses if status != 200}

    @app.post("/v1/chat/completions", responses={**openai, 200: event_stream})
    async def chat(body: ChatRequest, request: Request) -> object:
        """Return or stream the reply to a chat in the shape of OpenAI's endpoint, with the scores for each token."""
        items, shape = Items(generator, body.generation(), timeout_s), ChatShape(body, name)
        return await _response(body, request, items, shape.events, shape.body)


async def _response(
    body: GenerateRequest | ChatRequest,
    request: Request,
    items: Items,
    shape: Callable[[Item], Iterator[Event]],
    whole: Callable[[list[TokenEvent], GenerationEnd], JSONObject],
) -> Events | JSONObject:
    """Wait for a text, and return the response: its events if `body` asks for a stream, else that of the whole text.

    Args:
        body: The body of `request`.
        request: The request. If its client leaves, the text ends early.
        items: The tokens and the end of the text, which has begun.
        shape: Converts an item to the data of events; see `Events`.
        whole: Converts all tokens and the end to the response for the whole text.

    Raises:
        HTTPException: With status 499 if the client leaves, or 503 if no token comes in time; in a stream, before the
            first token. A later error of a stream is sent as an event.
        LaminaError: If the generation of the text fails; in a stream, before the first token.
    """
    try:
        if body.stream:
            return Events(items, await wait_while_connected(request, items.next()), shape, path_of(request.scope))
        return whole(*await wait_while_connected(request, items.all()))
    except BaseException:
        items.leave()
        raise


@final
class StopStrings:
    """Cuts a stream of text before its first stop string.

    `stopped` is whether a stop string has occurred.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Append a piece of text; return the text that can be shown now, which ends before the first stop string.

        Text that may begin a stop string is held back. After a stop string, "" is returned.
        """
        if self.stopped:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        shown = min(places) if places else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = "" if places else text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return the text that was held back; "" after a stop string. Call it at the end, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends; 0 if there is none."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
