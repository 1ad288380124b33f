"""What clients send: requests as text-embeddings-inference, OpenAI's moderation and KServe v2 shape them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lamina.serve.generation.prompts import GenerationRequest

OneOrTwo = Annotated[list[str], Field(min_length=1, max_length=2)]  # a text, or a pair
Name = Annotated[str, StringConstraints(max_length=200)]


class Request(BaseModel):
    """A body; keys that mean nothing here are errors, since a setting that is passed over would be a wrong answer."""

    model_config = ConfigDict(extra="forbid", strict=True)


class FileInput(Request):
    """The bytes of one file in Base64, as an image or as sound."""

    image: str | None = None
    audio: str | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.image is None) == (self.audio is None):
            raise ValueError('one of "image" and "audio" is needed')
        return self

    def sent(self) -> tuple[str, str]:
        """What it is, and its Base64."""
        return ("audio", self.audio) if self.audio is not None else ("image", self.image or "")


Files = Annotated[list[FileInput], Field(min_length=1)]


class PredictRequest(Request):
    """One text, a pair of texts, or a list of texts `[["a"], ["b"]]` or of pairs `[["a", "b"], ...]`; or files."""

    inputs: str | OneOrTwo | Annotated[list[OneOrTwo], Field(min_length=1)] | FileInput | Files = Field(
        examples=[[["The pasta was not bad at all."], ["Maria flew to Lisbon."]]]
    )
    raw_scores: bool = Field(False, description="Logits in place of probabilities.")
    truncate: bool = Field(False, description="Read the start of a text that is too long, instead of an error.")
    tasks: list[Name] | Name | None = Field(None, description="Only these readers; one name: its answer alone.")


class ExplainRequest(Request):
    """One text, pair or file."""

    inputs: str | OneOrTwo | FileInput = Field(examples=["Maria flew to Lisbon."])
    truncate: bool = Field(False, description="Read the start of a text that is too long, instead of an error.")
    tasks: list[Name] | None = Field(None, description="Only these readers.")


class EmbedRequest(Request):
    """One text or a list of texts."""

    inputs: str | Annotated[list[str], Field(min_length=1)] = Field(examples=["A text."])
    layer: int = Field(-1, description="0 is the embeddings; negative ones count from the top.")
    normalize: bool = True
    truncate: bool = False


class ReadersRequest(Request):
    """Readers to add or to replace."""

    folder: Name = Field(description="Of a saved bank, under --readers-root.", examples=["sentiment-v2"])
    readers: Annotated[list[Name], Field(min_length=1)] | None = Field(None, description="Only these of its readers.")


class ReadersChanged(BaseModel):
    """What is served after a change."""

    bank_version: int
    readers: dict[str, int] = Field(description="Reader -> version.")


class ModerationRequest(BaseModel):
    """As OpenAI's; the model's name is for the client's own use."""

    model_config = ConfigDict(extra="ignore", strict=True)

    input: str | Annotated[list[str], Field(min_length=1)] = Field(examples=["A text."])
    model: Name | None = None
    truncate: bool = Field(False, description="Read the start of a text that is too long, instead of an error.")


class InferTensor(BaseModel):
    """A tensor of KServe's v2 protocol."""

    model_config = ConfigDict(extra="ignore")

    name: Name
    shape: list[int] = Field(max_length=2)
    datatype: Literal["BYTES"]
    data: list[Any]


class InferParameters(BaseModel):
    """Of KServe's v2 protocol, where each server has its own."""

    model_config = ConfigDict(extra="ignore", strict=True)

    truncate: bool = Field(False, description="Read the start of a text that is too long, instead of an error.")


class InferRequest(BaseModel):
    """KServe's v2 protocol: one tensor of texts `[rows]` or of pairs `[rows, 2]`."""

    model_config = ConfigDict(extra="ignore")

    id: Name | None = None
    parameters: InferParameters = Field({}, validate_default=True)
    inputs: list[InferTensor] = Field(
        min_length=1,
        max_length=1,
        examples=[[{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["A text."]}]],
    )


class Problem(BaseModel):
    """What is wrong with a request."""

    error: str
    error_type: str


Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Stops = Annotated[list[Stop], Field(max_length=4)]
Temperature = Annotated[float, Field(ge=0, le=100, description="0: the likeliest token, always.")]
TopP = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64, description="Of what is drawn; by default another each time.")]
Tokens = Annotated[int, Field(ge=1)]
Tasks = Annotated[list[Name], Field(min_length=1, description="Only these readers.")]
OnFlag = Annotated[
    bool | list[Name], Field(description="Whether a flag ends the text; or the monitors whose flags do.")
]
_COLDEST = 0.01  # a temperature below it is 0: scores that are divided by less are not finite


class Parameters(Request):
    """How the text is drawn; what is left open is as in the model's own generation config."""

    max_new_tokens: Tokens | None = Field(None, description="By default as many as there is room for.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    do_sample: bool | None = Field(
        None,
        description="Implied by temperature, top_p and top_k, also where it is false, as there.",
    )
    seed: Seed | None = None
    stop: Stops = Field([], description="The text ends with the first of these strings.")
    details: bool = Field(True, description="Whether a whole answer says more than the text.")


class GenerateRequest(Request):
    """A prompt, in the shape of text-generation-inference."""

    inputs: str = Field(examples=["Once upon a time"])
    parameters: Parameters = Field({}, validate_default=True, examples=[{"max_new_tokens": 20}])
    stream: bool = Field(False, description="Server-sent events, one for each token.")
    tasks: Tasks | None = None
    stop_on_flag: OnFlag = False

    def asked(self) -> GenerationRequest:
        """What is to be written."""
        own = self.parameters
        sampling = _sampling(own.temperature, own.top_p, own.top_k, own.do_sample)
        more = {"tasks": self.tasks, "stop_on_flag": self.stop_on_flag, "stream": self.stream}
        return GenerationRequest(self.inputs, sampling, own.max_new_tokens, own.seed, own.stop, **more)


class TextPart(Request):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Request):
    """What one side of a chat said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: Name | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}


class StreamOptions(BaseModel):
    """More about a stream."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


def _only(*values: Any) -> Any:
    """A field that is taken at these values alone, at which it changes nothing."""
    return Field(None, json_schema_extra={"enum": [None, *values]})


_Ignored = Annotated[Any, Field(description="Changes nothing.")]


class ChatRequest(Request):
    """A chat, in the shape of OpenAI's chat completions."""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        examples=[[{"role": "user", "content": "Tell me a story."}]]
    )
    model: Name | None = Field(None, description="For the client's own use.")
    max_completion_tokens: Tokens | None = Field(None, description="By default as many as there is room for.")
    max_tokens: Tokens | None = Field(None, description="The same, as it was called before.")
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = Field(None, description="The text ends before the first of these strings.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    tasks: Tasks | None = None
    stop_on_flag: OnFlag = False

    n: Any = _only(1)
    tools: Any = _only([])
    tool_choice: Any = _only("none", "auto")
    functions: Any = _only([])
    function_call: Any = _only("none", "auto")
    logprobs: Any = _only(False)
    top_logprobs: Any = _only(0)
    response_format: Any = _only({"type": "text"})
    logit_bias: Any = _only({})
    frequency_penalty: Any = _only(0)
    presence_penalty: Any = _only(0)
    modalities: Any = _only(["text"])

    user: _Ignored = None
    metadata: _Ignored = None
    store: _Ignored = None
    service_tier: _Ignored = None
    parallel_tool_calls: _Ignored = None
    safety_identifier: _Ignored = None
    prompt_cache_key: _Ignored = None

    @field_validator("*", mode="before")
    @classmethod
    def _neutral(cls, value: Any, info: ValidationInfo) -> Any:
        extra = cls.model_fields[str(info.field_name)].json_schema_extra
        if isinstance(extra, dict) and value not in extra["enum"]:
            raise PydanticCustomError("unsupported", "this is not supported here. Leave it out.")
        return value

    def asked(self) -> GenerationRequest:
        """What is to be written."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sampling = _sampling(self.temperature, self.top_p)
        more = {"tasks": self.tasks, "stop_on_flag": self.stop_on_flag, "stream": bool(self.stream)}
        return GenerationRequest([one.plain() for one in self.messages], sampling, most, self.seed, stops, **more)

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends by counting tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def _sampling(
    temperature: float | None, top_p: float | None, top_k: int | None = None, do_sample: bool | None = None
) -> dict[str, Any]:
    """The options of `generate`."""
    if temperature is not None and temperature < _COLDEST:
        return {"do_sample": False}
    values = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    given = {name: value for name, value in values.items() if value is not None}
    if given or do_sample:
        return {"do_sample": True, **given}
    return {} if do_sample is None else {"do_sample": False}
