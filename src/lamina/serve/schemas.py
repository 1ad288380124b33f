"""The bodies of requests, in the shapes of text-embeddings-inference, text-generation-inference, OpenAI and KServe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lamina.serve.generation.prompts import GenerationRequest, Sampling

if TYPE_CHECKING:
    from lamina.serve.workers import Side, Truncate

_ENUM = "enum"  # key of a field's JSON schema with the values that `_only` accepts
ItemT = TypeVar("ItemT")
# Only the first wrong item of a list is reported, because errors for a million items would take very long.
ListOf: TypeAlias = Annotated[list[ItemT], Field(fail_fast=True)]
OneOrTwo = Annotated[ListOf[str], Field(min_length=1, max_length=2)]  # a text, or a pair
Name = Annotated[str, StringConstraints(max_length=200)]
_Ignored = Annotated[object, Field(description="Accepted and ignored.")]
_TRUNCATE = "Cut a text that is too long, instead of refusing it."


def _only(*values: JsonValue) -> Any:  # noqa: ANN401
    """Return the field of an unsupported option. `RequestBody` accepts only null and `values`; both change nothing."""
    return Field(None, json_schema_extra={_ENUM: [None, *values]})


class Body(BaseModel):
    """Base class of all objects in requests. A key that is null counts as not sent, as in all these protocols.

    Values must have the right type; none is converted. Unknown keys are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: object) -> object:
        """Remove keys of an object that are null, and all unknown keys but the first; return anything else unchanged.

        The first unknown key is enough for an error, if unknown keys are errors.
        """
        if not isinstance(body, dict):
            return body
        unknown = islice((key for key, value in body.items() if key not in cls.model_fields and value is not None), 1)
        keys = [*cls.model_fields, *unknown]
        return {key: body[key] for key in keys if body.get(key) is not None}


class RequestBody(Body):
    """Base class of request bodies. Unknown keys are errors, because an ignored option would give a wrong answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_supported(cls, value: object, info: ValidationInfo) -> object:
        """Return the value of a field unchanged; raise ValueError if it asks for something that is not supported."""
        extra = cls.model_fields[str(info.field_name)].json_schema_extra
        known = cast("Sequence[object]", extra[_ENUM]) if isinstance(extra, dict) and _ENUM in extra else None
        # in Python, True == 1 and False == 0
        if known is None or any(one == value and isinstance(one, bool) == isinstance(value, bool) for one in known):
            return value
        raise PydanticCustomError("unsupported", "this is not supported here. Leave it out.")


class Truncation(Body):
    """Base class of request bodies: whether texts that are too long are cut, and on which side; see `cuts`."""

    truncate: bool = Field(False, description=_TRUNCATE)
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="Side on which texts are cut. Refused if the readers that are asked cut on the other side."
    )

    @property
    def cuts(self) -> Truncate:
        """False: texts are not cut, even if a direction is set. "left" or "right": they may be cut on this side only.

        True: no direction is set, and they may be cut on any side.
        """
        return self.truncate and (cast("Side", (self.truncation_direction or "").lower()) or True)


class FileInput(RequestBody):
    """One file in Base64: an image or an audio clip. One of the two keys must be set, not both."""

    image: str | None = None
    audio: str | None = None

    @model_validator(mode="after")
    def _check_one_medium(self) -> Self:
        if (self.image is None) == (self.audio is None):
            raise ValueError('one of "image" and "audio" is needed')
        return self

    def content(self) -> tuple[str, str]:
        """Return the medium, "image" or "audio", and the file's content in Base64."""
        return ("audio", self.audio) if self.audio is not None else ("image", self.image or "")


# A text, a file, or a list of these; a pair [a, b] or a single text [a] in a list is a list itself.
Inputs: TypeAlias = str | FileInput | Annotated[ListOf[str | OneOrTwo | FileInput], Field(min_length=1)]


class PipelineParameters(RequestBody):
    """Options of `/predict` as clients of Hugging Face's inference endpoints send them, in `parameters`.

    `top_k` is the number of labels, and `function_to_apply` turns logits into scores. Options that are not supported
    may only have values that change nothing.
    """

    top_k: Annotated[int, Field(ge=1)] | None = Field(None, description="Return this many labels; by default all.")
    function_to_apply: Literal["none", "softmax", "sigmoid"] | None = Field(
        None, description='"none": logits, as raw_scores. A function must be that of the task.'
    )
    truncation: bool = Field(False, description=_TRUNCATE)
    return_all_scores: object = _only(True)
    aggregation_strategy: object = _only("simple")
    ignore_labels: object = _only([], ["O"])
    stride: object = _only()


class PredictRequest(Truncation, RequestBody):
    """Body of `/predict`: a text, a list of texts `["a", "b", "c"]` or of pairs `[["a", "b"]]`, or files.

    Two texts `["a", "b"]` are a pair if the readers were trained on pairs. `tasks` names the readers that answer (None:
    all); if it is one name, not in a list, that answer comes alone. `raw_scores` asks for logits.
    """

    inputs: Inputs = Field(examples=[[["The pasta was not bad at all."], ["Maria flew to Lisbon."]]])
    raw_scores: bool = Field(False, description="Return logits in place of probabilities.")
    tasks: ListOf[Name] | Name | None = Field(
        None,
        description="Names of the readers that answer; by default all. A single name, not in a list: its answer alone.",
    )
    parameters: PipelineParameters = Field({}, validate_default=True)

    @model_validator(mode="after")
    def _join_options(self) -> Self:
        self.truncate = self.truncate or self.parameters.truncation
        return self


class ExplainRequest(Truncation, RequestBody):
    """Body of `/explain`: a text, a pair of texts or a file, and the readers (`tasks`; None: all)."""

    inputs: str | OneOrTwo | FileInput = Field(examples=["Maria flew to Lisbon."])
    tasks: ListOf[Name] | None = Field(None, description="Names of the readers to explain; by default all.")


class EmbedRequest(Truncation, RequestBody):
    """Body of `/embed`: a text or a list of texts. Unsupported options may only have values that change nothing.

    The vectors are means over the tokens of `layer`; with `normalize` they have length 1.
    """

    inputs: str | Annotated[ListOf[str], Field(min_length=1)] = Field(examples=["A text."])
    layer: int = Field(-1, description="Index of the layer. 0: the embeddings; negative: from the top.")
    normalize: bool = Field(True, description="Scale vectors to length 1.")
    prompt_name: object = _only()
    dimensions: object = _only()
    encoding_format: object = _only("float")


class ReadersRequest(RequestBody):
    """Body of `POST /readers`: the folder of a saved bank, and which of its readers to add (None: all).

    Served readers of the same names are replaced.
    """

    folder: Name = Field(description="Folder of a saved bank, under --readers-root.", examples=["sentiment-v2"])
    readers: Annotated[ListOf[Name], Field(min_length=1)] | None = Field(
        None, description="Names of the readers to add; by default all of that bank."
    )


class ReadersChanged(BaseModel):
    """Response of `/readers`: the readers that are served after the change, and the versions of bank and readers."""

    bank_version: int = Field(description="1 at the start, and 1 more after each change.")
    readers: dict[str, int] = Field(description="Name of a reader -> its version.")
    removed_monitors: Sequence[str] = Field(
        default=(),
        description="Names of the cascades that the last change removed, because it replaced one of their two readers. "
        "Calibrate them again. Left out if there are none.",
    )


class TextPart(RequestBody):
    """A part of a chat message, or of the input of a moderation; only parts of text are supported."""

    type: Literal["text"]
    text: str


class ModerationRequest(Truncation):
    """Body of `/v1/moderations`, in OpenAI's shape: a text, a list of texts, or the parts of one text.

    Unknown keys are ignored.
    """

    input: str | Annotated[ListOf[str], Field(min_length=1)] | Annotated[ListOf[TextPart], Field(min_length=1)] = Field(
        examples=["A text."]
    )
    model: Name | None = Field(None, description="Repeated in the response. None: the name of the served bank.")

    def texts(self) -> list[str]:
        """Return the texts to judge. If `input` is the parts of one text, they are joined by line breaks."""
        if isinstance(self.input, str):
            return [self.input]
        parts = [part.text for part in self.input if isinstance(part, TextPart)]
        return ["\n".join(parts)] if parts else [text for text in self.input if isinstance(text, str)]


class InferTensor(Body):
    """A tensor of texts in KServe's v2 protocol; its data may be flat or nested by row."""

    name: Name
    shape: ListOf[int] = Field(max_length=2)
    datatype: Literal["BYTES"]
    data: list[object]


class InferParameters(Truncation):
    """Options of a request in KServe's v2 protocol: whether texts are cut, and tensors returned as binary data."""

    binary_data_output: bool = Field(False, description="Return tensors as binary data after the JSON.")


class InferOutputParameters(RequestBody):
    """Options of a requested output in KServe's v2 protocol: whether it is returned as binary data."""

    binary_data: bool | None = Field(None, description="Return this tensor as binary data after the JSON.")


class InferOutput(Body):
    """A requested output tensor in KServe's v2 protocol."""

    name: Name
    parameters: InferOutputParameters = Field({}, validate_default=True)


class InferRequest(Body):
    """A request in KServe's v2 protocol: a tensor of texts `[rows]` or pairs `[rows, 2]`.

    Unknown keys are ignored, but are errors in the `parameters` of an output.
    """

    id: Name | None = None
    parameters: InferParameters = Field({}, validate_default=True)
    inputs: ListOf[InferTensor] = Field(
        min_length=1,
        max_length=1,
        examples=[[{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["A text."]}]],
    )
    outputs: ListOf[InferOutput] = Field([], description="The tasks that answer, in this order; by default all.")

    def is_binary(self, task: str) -> bool:
        """Return whether a task's tensor is sent as binary data: as the requested output says, or else the request."""
        wishes = {output.name: output.parameters.binary_data for output in self.outputs}
        wish = wishes.get(task)
        return self.parameters.binary_data_output if wish is None else wish


class Problem(BaseModel):
    """The body of an error response: `error` in words, and a fixed name (`error_type`) for its kind."""

    error: str = Field(description="The error in words.")
    error_type: str = Field(description="A fixed name for this kind of error.")


class OpenAIError(BaseModel):
    """Why a request failed, in OpenAI's shape; `param` is the key of the request that is wrong."""

    message: str = Field(description="The error in words.")
    type: str = Field(description="A fixed name for this kind of error.")
    param: str | None = Field(description="The key of the request that is wrong.")
    code: str | None = Field(description="A fixed name for the error itself, where OpenAI has one.")


class OpenAIProblem(BaseModel):
    """The body of an error response under `/v1`."""

    error: OpenAIError


Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Stops = Annotated[ListOf[Stop], Field(max_length=4)]
Temperature = Annotated[float, Field(ge=0, le=100, description="0: always the most probable token.")]
TopP = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64, description="Seed of sampling; by default a new one for each text.")]
Tokens = Annotated[int, Field(ge=1)]
Tasks = Annotated[ListOf[Name], Field(min_length=1, description="Names of the readers that take part; by default all.")]
OnFlag = Annotated[
    bool | ListOf[Name],
    Field(description="End the text when a monitor raises a flag: any monitor (true), or one of these names."),
]
_COLDEST = 0.01  # a lower temperature counts as 0: logits divided by it could become infinite


class Parameters(RequestBody):
    """Options of `/generate`. The defaults of sampling options come from the model's generation config.

    Options that are not supported may only have values that change nothing.
    """

    max_new_tokens: Tokens | None = Field(
        None, description="Maximum number of tokens; by default all there is room for."
    )
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    do_sample: bool | None = Field(
        None,
        description="Sample instead of taking the most probable token. Implied by temperature, top_p and top_k.",
    )
    seed: Seed | None = None
    stop: Stops = Field([], description="Strings that end the text; the first that occurs is its end.")
    details: bool = Field(True, description="Without stream: return details beside the text.")
    return_full_text: bool = Field(False, description="Put the prompt before the generated text.")

    adapter_id: object = _only()
    best_of: object = _only(1)
    decoder_input_details: object = _only(False)
    frequency_penalty: object = _only(0)
    grammar: object = _only()
    repetition_penalty: object = _only(1)
    top_n_tokens: object = _only(0)
    truncate: object = _only()
    typical_p: object = _only(1)
    watermark: object = _only(False)


class GenerateRequest(RequestBody):
    """Body of `/generate`, in the shape of text-generation-inference: a prompt and options.

    With `stream`, tokens are sent one by one. `stop_on_flag` names the monitors whose flag ends the text (true: all).
    """

    inputs: str = Field(examples=["Once upon a time"])
    parameters: Parameters = Field({}, validate_default=True, examples=[{"max_new_tokens": 20}])
    stream: bool = Field(False, description="Return server-sent events, one per token.")
    tasks: Tasks | None = None
    stop_on_flag: OnFlag = False

    def generation(self) -> GenerationRequest:
        """Return this body as a `GenerationRequest`."""
        options = self.parameters
        return GenerationRequest(
            self.inputs,
            _sampling(options.temperature, options.top_p, options.top_k, options.do_sample),
            options.max_new_tokens,
            options.seed,
            options.stop,
            tasks=self.tasks,
            stop_on_flag=self.stop_on_flag,
            stream=self.stream,
        )


class RefusalPart(RequestBody):
    """A part of a chat message in which the assistant declined to answer."""

    type: Literal["refusal"]
    refusal: str


class Message(RequestBody):
    """A message of a chat, in OpenAI's shape, with a content or a refusal. An earlier reply may be sent as it came."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[ListOf[TextPart | RefusalPart], Field(min_length=1)] | None = None
    refusal: str | None = Field(None, description="What an assistant said in place of a content.")
    name: Name | None = None
    tool_calls: object = _only([])
    function_call: object = _only()
    audio: object = _only()
    annotations: _Ignored = None
    reasoning: _Ignored = None
    reasoning_content: _Ignored = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.refusal is None:
            raise PydanticCustomError("missing", "a message needs a content")
        return self

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates need it: "role", "content", and "name" if set.

        The content is one text: the parts, joined without a separator, or the refusal if there is no content.
        """
        content = self.content if self.content is not None else self.refusal or ""
        if not isinstance(content, str):
            content = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
        return {"role": self.role, "content": content, **({} if self.name is None else {"name": self.name})}


class StreamOptions(Body):
    """Options of a streamed chat completion, in OpenAI's shape: whether it ends with the numbers of tokens."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that has the numbers of tokens.")


class ChatRequest(RequestBody):
    """Body of `/v1/chat/completions`, in OpenAI's shape: the messages of a chat and options.

    Options that are not supported may only have values that change nothing.
    """

    messages: Annotated[ListOf[Message], Field(min_length=1)] = Field(
        examples=[[{"role": "user", "content": "Tell me a story."}]]
    )
    model: Name | None = Field(None, description="Repeated in the response. None: the name of the served bank.")
    max_completion_tokens: Tokens | None = Field(
        None, description="Maximum number of tokens; by default all there is room for."
    )
    max_tokens: Tokens | None = Field(None, description="Older name of max_completion_tokens.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = Field(
        None, description="Strings that end the text, which stops before the first that occurs."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tasks: Tasks | None = None
    stop_on_flag: OnFlag = False

    n: object = _only(1)
    tools: object = _only([])
    tool_choice: object = _only("none", "auto")
    functions: object = _only([])
    function_call: object = _only("none", "auto")
    logprobs: object = _only(False)
    top_logprobs: object = _only(0)
    response_format: object = _only({"type": "text"})
    logit_bias: object = _only({})
    frequency_penalty: object = _only(0)
    presence_penalty: object = _only(0)
    modalities: object = _only(["text"])
    reasoning_effort: object = _only("none")
    verbosity: object = _only("medium")
    prediction: object = _only()
    web_search_options: object = _only()
    audio: object = _only()

    user: _Ignored = None
    metadata: _Ignored = None
    store: _Ignored = None
    service_tier: _Ignored = None
    parallel_tool_calls: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None
    prompt_cache_retention: _Ignored = None

    def generation(self) -> GenerationRequest:
        """Return this body as a `GenerationRequest`; `max_completion_tokens` wins over `max_tokens`."""
        return GenerationRequest(
            [message.plain() for message in self.messages],
            _sampling(self.temperature, self.top_p),
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            self.seed,
            [self.stop] if isinstance(self.stop, str) else self.stop or [],
            tasks=self.tasks,
            stop_on_flag=self.stop_on_flag,
            stream=bool(self.stream),
        )

    @property
    def has_usage(self) -> bool:
        """Whether the client asked for a last chunk of the stream that has the token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _sampling(
    temperature: float | None, top_p: float | None, top_k: int | None = None, do_sample: bool | None = None
) -> Sampling:
    """Return the sampling options of a request for transformers' `generate`. An argument is None if it was not sent.

    A `temperature` below 0.01 means greedy decoding, whatever else is set. Otherwise any of the first three options
    turns sampling on, as in text-generation-inference, even if `do_sample` is False. If none of them is set,
    `do_sample` decides; if it is None too, the result is {}, and the model's own config decides.
    """
    if temperature is not None and temperature < _COLDEST:
        return {"do_sample": False}
    sampling: Sampling = {}
    if temperature is not None:
        sampling["temperature"] = temperature
    if top_p is not None:
        sampling["top_p"] = top_p
    if top_k is not None:
        sampling["top_k"] = top_k
    if sampling or do_sample:
        return {"do_sample": True, **sampling}
    return {} if do_sample is None else {"do_sample": False}
