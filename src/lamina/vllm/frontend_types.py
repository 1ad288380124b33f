"""The attributes of vLLM's frontend and server that readers use. vLLM is not installed where types are checked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from lamina.vllm.engine_types import Configured, Method, Route

if TYPE_CHECKING:
    from pydantic import BaseModel

    from lamina.utils import JSON
    from lamina.vllm.answers import Answers


class Completion(Protocol):
    """A `CompletionOutput`: one sequence of a request, so far; `lamina` has the readers' answers."""

    index: int
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: int | str | None
    lamina: Answers


class Output(Protocol):
    """What the user gets for a request: a `RequestOutput`, or a pooling model's output; `lamina` has the answers."""

    outputs: Sequence[Completion] | object
    lamina: Answers


class RequestState(Protocol):
    """What a frontend keeps of a request until it ends; `lamina` has the readers' answers.

    Its two methods make the outputs that the user gets.
    """

    prompt_len: int
    lamina: Answers
    _new_completion_output: Callable[..., Completion]
    make_request_output: Callable[..., Output | None]


class Params(Protocol):
    """The parameters of a request: `SamplingParams` to generate text, or `PoolingParams`.

    `skip_reading_prefix_cache` says whether all tokens of the prompt are computed again; only `PoolingParams` have
    `extra_kwargs`, the request's own arguments.
    """

    skip_reading_prefix_cache: bool | None
    extra_kwargs: dict[str, object] | None


class NewRequest(Protocol):
    """A request that a frontend sends to the engine."""

    request_id: str
    sampling_params: Params | None
    pooling_params: Params | None


class InputProcessor(Protocol):
    """The part of a frontend that checks requests before they go to the engine."""

    process_inputs: Method


class OutputProcessor(Protocol):
    """The part of a frontend that makes the outputs of requests from what the engine returns."""

    request_states: Mapping[str, RequestState]
    add_request: Method
    process_outputs: Method


class Frontend(Configured, Protocol):
    """The frontend of an engine, an `LLMEngine` or `AsyncLLM`. It has an input and an output processor."""

    input_processor: InputProcessor
    output_processor: OutputProcessor


class OutputClass(Protocol):
    """A class of outputs whose method `from_base` converts a pooling output to it."""

    from_base: Callable[[Output], Output]


class Result(Protocol):
    """What a request to generate text has given so far: a `RequestOutput`."""

    outputs: Sequence[Completion]


# The results of an engine: `RequestOutput`s, or pairs of prompt index and `RequestOutput`.
Results: TypeAlias = "AsyncIterator[Result | tuple[int, Result]]"


class Request(Protocol):
    """A request to generate text; `n` is its number of output sequences."""

    n: int | None


class ResponseChoice(Protocol):
    """A choice (one output sequence) of a response, and why its text ended; `lamina` has the readers' answers."""

    index: int
    finish_reason: str | None
    lamina: dict[str, JSON]


class Response(Protocol):
    """A response of a server, to which the attribute `lamina` is added. `/v1/responses` has no choices."""

    choices: Sequence[ResponseChoice]
    lamina: dict[str, JSON]


class Serving(Route, Protocol):
    """Serves a route of models that generate text; `create_error_response` makes an error response."""

    create_error_response: Method


class ChatServing(Serving, Protocol):
    """Serves `/v1/chat/completions` (`OpenAIServingChat`); its methods make whole and streamed responses.

    The method for a batch is only in `OpenAIServingChatBatch`, which serves `/v1/chat/completions/batch`. Both
    converters are only in `AnthropicServingMessages`, which converts the responses for `/v1/messages`.
    """

    chat_completion_full_generator: Callable[..., Awaitable[Response]]
    chat_completion_stream_generator: Callable[..., AsyncIterator[str]]
    chat_completion_full_generator_batch: Callable[..., Awaitable[Response]]
    messages_full_converter: Callable[[Response], BaseModel]
    message_stream_converter: Callable[[AsyncIterator[str]], AsyncIterator[str]]


class CompletionServing(Serving, Protocol):
    """Serves `/v1/completions` (`OpenAIServingCompletion`); its methods make whole and streamed responses."""

    request_output_to_completion_response: Callable[..., Response]
    completion_stream_generator: Callable[..., AsyncIterator[str]]


class StatusResponse(Response, Protocol):
    """A response of `/v1/responses`, with its status and the details of an early end."""

    status: str
    incomplete_details: object


class ResponsesServing(Serving, Protocol):
    """Serves `/v1/responses` (`OpenAIServingResponses`); its method makes whole responses."""

    responses_full_generator: Callable[..., Awaitable[StatusResponse]]


class PoolingContext(Protocol):
    """What a server keeps for a request to a pooling model: its parameters and, at the end, its results."""

    pooling_params: Params
    final_res_batch: Sequence[Output]


class PoolingRequest(Protocol):
    """A request to a pooling model; `model_extra` has the fields that its class does not declare."""

    model_extra: Mapping[str, Mapping[str, object] | None] | None


class PoolingServing(Route, Protocol):
    """The object of vLLM that serves a route of pooling models, a `PoolingBaseServing`."""

    _init_ctx: Callable[..., Awaitable[PoolingContext]]
    _build_response: Callable[[PoolingContext], object]
