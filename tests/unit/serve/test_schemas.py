"""The bodies of requests: a large wrong one is refused without an error for each of its parts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lamina.serve.schemas import (
    Body,
    ChatRequest,
    EmbedRequest,
    ExplainRequest,
    GenerateRequest,
    InferRequest,
    ModerationRequest,
    PredictRequest,
    ReadersRequest,
)

MANY = 1000
CHAT = [{"role": "user", "content": "a"}]
TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
WRONG: list[tuple[type[Body], dict[str, Any]]] = [
    (PredictRequest, {"inputs": [3] * MANY}),
    (PredictRequest, {"inputs": [[3] * MANY]}),
    (PredictRequest, {"inputs": "a", "tasks": [3] * MANY}),
    (ExplainRequest, {"inputs": [3] * MANY}),
    (EmbedRequest, {"inputs": [3] * MANY}),
    (ModerationRequest, {"input": [{}] * MANY}),
    (ReadersRequest, {"folder": "a", "readers": [3] * MANY}),
    (GenerateRequest, {"inputs": "a", "tasks": [3] * MANY}),
    (GenerateRequest, {"inputs": "a", "parameters": {"stop": [3] * MANY}}),
    (GenerateRequest, {"inputs": "a", "stop_on_flag": [3] * MANY}),
    (ChatRequest, {"messages": [{}] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatRequest, {"messages": CHAT, "stop": [3] * MANY}),
    (InferRequest, {"inputs": [{}] * MANY}),
    (InferRequest, {"inputs": [TENSOR], "outputs": [{}] * MANY}),
    (InferRequest, {"inputs": [{**TENSOR, "shape": ["a"] * MANY}]}),
    (PredictRequest, {"inputs": "a", **{f"key {number}": 1 for number in range(MANY)}}),
    (ChatRequest, {"messages": [{**CHAT[0], **{f"key {number}": 1 for number in range(MANY)}}]}),
]


@pytest.mark.parametrize(("model", "body"), WRONG)
def test_a_wrong_body_has_few_errors_however_large_it_is(model: type[Body], body: dict[str, Any]):
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() <= 8


def test_the_first_unknown_key_is_named():
    with pytest.raises(ValidationError, match="trunc\n  Extra inputs are not permitted") as raised:
        PredictRequest.model_validate({"nothing": None, "trunc": True, "inputs": "a", "task": "b"})
    assert raised.value.error_count() == 1
