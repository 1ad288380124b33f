"""What clients send: requests as text-embeddings-inference, OpenAI's moderation and KServe v2 shape them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

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
