"""vLLM's OpenAI-compatible server: add a field `lamina` to its responses, and to the chunks of its streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import BaseModel, create_model

from lamina.errors import ConfigError, LaminaError
from lamina.vllm.layout import KEY, Layout

if TYPE_CHECKING:
    from lamina.vllm.answers import Answers
    from lamina.vllm.frontend_types import (
        ChatServing,
        CompletionServing,
        PoolingContext,
        PoolingRequest,
        PoolingServing,
        Request,
        Response,
        ResponsesServing,
        Result,
        Results,
        Serving,
        StatusResponse,
    )


class Choice(NamedTuple):
    """The latest state of one choice (one output sequence) of a response.

    Attributes:
        answers: Its answers. They change until the sequence ends.
        tokens: Number of output tokens in the results that the server has handled.
    """

    answers: Answers
    tokens: int


Latest = dict[int, Choice]  # index of a choice -> its latest state


def install_chat(serving: ChatServing, layout: Layout) -> None:
    """Change vLLM's chat endpoint `serving` in place, so that its responses, also streams, have the field `lamina`.

    Requests for which the readers of `layout` cannot run get status 422. If `serving` also answers batches of chats,
    their responses get the field too. If it answers `/v1/messages`, these responses say if a monitor ended the text.
    """
    _check_requests(serving, "create_chat_completion", layout)
    full, stream = serving.chat_completion_full_generator, serving.chat_completion_stream_generator

    async def full_with_answers(request: object, results: Results, *args: object, **kwargs: object) -> Response:
        latest: Latest = {}
        return _filled(await full(request, _remember(results, latest), *args, **kwargs), latest)

    def stream_with_answers(request: object, results: Results, *args: object, **kwargs: object) -> AsyncIterator[str]:
        latest: Latest = {}
        return _fill_chunks(stream(request, _remember(results, latest), *args, **kwargs), latest)

    serving.chat_completion_full_generator = full_with_answers
    serving.chat_completion_stream_generator = stream_with_answers
    if hasattr(serving, "chat_completion_full_generator_batch"):
        _install_batch(serving, layout)
    if hasattr(serving, "messages_full_converter"):
        _install_messages(serving)


def _install_messages(serving: ChatServing) -> None:
    """Let responses of `/v1/messages`, also streams, say that a monitor ended the text: by the stop reason "refusal".

    Anthropic's API has this reason if a classifier ends a text.
    """
    convert, stream = serving.messages_full_converter, serving.message_stream_converter

    def convert_with_reason(response: Response) -> BaseModel:
        message = convert(response)
        if response.choices[0].finish_reason != "content_filter":
            return message
        return _refusable(type(message)).model_construct(**{**dict(message), "stop_reason": "refusal"})

    async def stream_with_reason(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        flagged = False

        async def watched() -> AsyncIterator[str]:
            nonlocal flagged
            async for chunk in chunks:
                flagged |= '"finish_reason": "content_filter"' in chunk  # in a text, the quotes would be escaped
                yield chunk

        async for event in stream(watched()):
            ends = flagged and event.startswith("event: message_delta")
            yield event.replace('"stop_reason":null', '"stop_reason":"refusal"') if ends else event

    serving.messages_full_converter = convert_with_reason
    serving.message_stream_converter = stream_with_reason


@cache
def _refusable(message: type[BaseModel]) -> type[BaseModel]:
    """Return a subclass of vLLM's class of messages that allows the stop reason "refusal"."""
    return create_model("Refused", __base__=message, stop_reason=(str, "refusal"))


def _install_batch(serving: ChatServing, layout: Layout) -> None:
    """Add the field `lamina` to the responses of `/v1/chat/completions/batch`, where each conversation is a choice.

    Requests for which the readers of `layout` cannot run get status 422.
    """
    _check_requests(serving, "create_batch_chat_completion", layout)
    full = serving.chat_completion_full_generator_batch

    async def full_with_answers(
        request: object, results: Sequence[Results], *args: object, **kwargs: object
    ) -> Response:
        latest: list[Latest] = [{} for _ in results]
        response = await full(request, list(map(_remember, results, latest)), *args, **kwargs)
        return _filled(response, {index: choices[0] for index, choices in enumerate(latest) if choices})

    serving.chat_completion_full_generator_batch = full_with_answers


def install_completion(serving: CompletionServing, layout: Layout) -> None:
    """Change vLLM's endpoint for `/v1/completions` in place: its responses, also streams, get the field `lamina`.

    Requests for which the readers of `layout` cannot run get status 422.
    """
    _check_requests(serving, "create_completion", layout)
    respond, stream = serving.request_output_to_completion_response, serving.completion_stream_generator

    def respond_with_answers(results: Sequence[Result], *args: object, **kwargs: object) -> Response:
        outputs = [output for result in results for output in result.outputs]
        latest = {index: Choice(output.lamina, len(output.token_ids)) for index, output in enumerate(outputs)}
        return _filled(respond(results, *args, **kwargs), latest)

    def stream_with_answers(
        request: Request, inputs: object, results: Results, *args: object, **kwargs: object
    ) -> AsyncIterator[str]:
        latest: Latest = {}
        remembered = _remember(results, latest, choices=request.n or 1)
        return _fill_chunks(stream(request, inputs, remembered, *args, **kwargs), latest)

    serving.request_output_to_completion_response = respond_with_answers
    serving.completion_stream_generator = stream_with_answers


def install_responses(serving: ResponsesServing, layout: Layout) -> None:
    """Change vLLM's endpoint for `/v1/responses` in place, so that a response says that a monitor ended its text.

    Its status is then "incomplete", for the reason "content_filter", and the field `lamina` has the answers. Other
    responses and streams stay as they are. Requests for which the readers of `layout` cannot run get status 422.
    """
    _check_requests(serving, "create_responses", layout)
    full = serving.responses_full_generator

    async def full_with_reason(
        request: object, params: object, results: object, context: object, *args: object, **kwargs: object
    ) -> StatusResponse:
        from openai.types.responses.response import IncompleteDetails

        response = await full(request, params, results, context, *args, **kwargs)
        last = getattr(context, "last_output", None)
        answers: Answers | None = getattr(last, KEY, None)
        if answers is not None and answers.ended_by is not None and hasattr(response, "incomplete_details"):
            response.status, response.incomplete_details = "incomplete", IncompleteDetails(reason="content_filter")
            response.lamina = answers.to_dict()
        return response

    serving.responses_full_generator = full_with_reason


def install_pooling(serving: PoolingServing, layout: Layout) -> None:
    """Change vLLM's pooling endpoints in place, so that each text of a response has the answers in the field `lamina`.

    They are `/pooling`, `/v1/embeddings` and `/classify`. Responses that hold bytes instead of JSON are left as they
    are. A request may choose readers in `vllm_xargs`; it gets status 422 if `layout` has no reader of that name.
    """
    init, build = serving._init_ctx, serving._build_response

    async def check_and_init(
        processor: object, request: PoolingRequest, *args: object, **kwargs: object
    ) -> PoolingContext:
        chosen = (request.model_extra or {}).get("vllm_xargs")
        try:
            layout.asked(chosen)
        except LaminaError as error:
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        context = await init(processor, request, *args, **kwargs)
        if chosen:
            context.pooling_params.extra_kwargs = {**(context.pooling_params.extra_kwargs or {}), **chosen}
        return context

    def build_with_answers(context: PoolingContext) -> object:
        response = build(context)
        if not isinstance(response, JSONResponse):
            return response
        body = json.loads(bytes(response.body))
        if isinstance(texts := body.get("data"), list) and len(texts) == len(context.final_res_batch):
            for text, result in zip(texts, context.final_res_batch, strict=True):
                text[KEY] = result.lamina.to_dict()
        return JSONResponse(body)

    serving._init_ctx, serving._build_response = check_and_init, build_with_answers


def _check_requests(serving: Serving, method: str, layout: Layout) -> None:
    """Make a method that serves requests answer with status 422 if the readers cannot run for a request.

    `method` is the name of a method of `serving`, which is replaced. Refused are requests that name an unknown reader,
    name readers in a wrong form, or use beam search.
    """
    create: Callable[..., Awaitable[object]] = getattr(serving, method)

    async def check_and_create(request: object, *args: object, **kwargs: object) -> object:
        try:
            layout.asked(getattr(request, "vllm_xargs", None))  # not every route declares both fields
            if getattr(request, "use_beam_search", False):
                raise ConfigError("vllm: the request uses beam search, with which readers do not run. Leave it out.")
        except LaminaError as error:
            status = HTTPStatus.UNPROCESSABLE_ENTITY
            return serving.create_error_response(str(error), err_type="UnprocessableEntityError", status_code=status)
        return await create(request, *args, **kwargs)

    setattr(serving, method, check_and_create)


async def _remember(results: Results, latest: Latest, choices: int = 1) -> Results:
    """Yield the results of an engine unchanged, and store the state of each choice in `latest`.

    Each result has the tokens since the one before. With several prompts, results are pairs (prompt index, result), and
    choice c of prompt p has the key p * `choices` + c.
    """
    async for item in results:
        prompt, result = item if isinstance(item, tuple) else (0, item)
        for output in result.outputs:
            index = prompt * choices + output.index
            before = latest[index].tokens if index in latest else 0
            latest[index] = Choice(output.lamina, before + len(output.token_ids))
        yield item


def _filled(response: Response, latest: Latest) -> Response:
    """Return a response, with the readers' answers added to each choice, and those of its first choice to itself.

    A response without choices, such as an error, is left alone.
    """
    choices = getattr(response, "choices", ())
    for choice in choices:
        choice.lamina = latest[choice.index].answers.to_dict()
    if choices:
        response.lamina = choices[0].lamina
    return response


async def _fill_chunks(chunks: AsyncIterator[str], latest: Latest) -> AsyncIterator[str]:
    """Yield the chunks of a stream. Each gets the scores of the tokens read since the previous chunk of its choice.

    `latest` has the state of each choice. The score of a chunk's last token comes with the next chunk, because the
    engine reads a token one step after it has chosen it. The chunk that ends a choice has the answers over the whole
    text too. Chunks without JSON, such as "[DONE]", stay as they are.
    """
    sent: dict[int, int] = {}  # index of a choice -> number of tokens whose scores were sent
    async for chunk in chunks:
        if not chunk.startswith("data: {"):
            yield chunk
            continue
        data = json.loads(chunk.removeprefix("data: "))
        for choice in data.get("choices", ()):
            if (state := latest.get(choice["index"])) is None:
                continue
            first, last = sent.get(choice["index"], 0), state.answers.before(state.tokens)
            if choice.get("finish_reason"):
                choice[KEY] = state.answers.to_dict(first)
            else:
                choice[KEY], sent[choice["index"]] = state.answers.part_to_dict(first, last), last
        yield f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
