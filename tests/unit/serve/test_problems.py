"""Where a request is wrong, and why, in the words of the client's own body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.writing import CHAT, writing_bank

from lamina.serve import create_app


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(writing_bank())) as client:
        yield client


def told(client: TestClient, path: str, body: Any) -> tuple[str | None, str]:
    response = client.post(path, json=body)
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    return (error["param"], error["message"]) if path.startswith("/v1/") else (None, error)


def said(content: Any) -> dict[str, Any]:
    return {"messages": [*CHAT, {"role": "user", "content": content}]}


TEXT = {"type": "text", "text": "the film"}
CHATS: list[tuple[Any, str, str]] = [
    (said([TEXT, {"type": "image_url", "image_url": {"url": "a"}}]), "messages.1.content.1.type", "should be 'text'"),
    (said([{**TEXT, "cache_control": {}}]), "messages.1.content.0.cache_control", "Extra inputs are not permitted"),
    (said([{"type": "text"}]), "messages.1.content.0.text", "Field required"),
    (said(["the film"]), "messages.1.content.0", "should be an object"),
    (said(3), "messages.1.content", "a valid string, or: Input should be a valid list"),
    (said([]), "messages.1.content", "List should have at least 1 item"),
    ({"messages": CHAT, "stop": ""}, "stop", "at least 1 character"),
    ({"messages": CHAT, "stop": ["a", 3]}, "stop.1", "a valid string"),
    ({"messages": CHAT, "stop_on_flag": 3}, "stop_on_flag", "a valid boolean, or: Input should be a valid list"),
    ({"messages": [CHAT[0], "hello"]}, "messages.1", "should be an object"),
    ({}, "messages", "Field required"),
    ({"messages": CHAT, "min_p": 0.1, "stop": 3}, "stop", "a valid string"),
]


@pytest.mark.parametrize(("body", "param", "message"), CHATS)
def test_the_key_of_a_wrong_chat_is_one_that_was_sent(client: TestClient, body: Any, param: str, message: str):
    found, text = told(client, "/v1/chat/completions", body)
    assert found == param
    assert text.startswith(f"{param}: ")
    assert message in text


def test_other_bodies_with_several_forms_are_told_apart(client: TestClient):
    assert told(client, "/v1/moderations", {"input": ["a", 3]})[0] == "input.1"
    assert told(client, "/v1/moderations", {"input": [{"type": "image_url"}]})[0] == "input.0.type"
    assert told(client, "/v1/moderations", {"input": []})[0] == "input"
    assert told(client, "/embed", {"inputs": 3})[1] == (
        "inputs: Input should be a valid string, or: Input should be a valid list"
    )
    assert told(client, "/generate", {"inputs": "a", "tasks": "odd"})[1] == "tasks: Input should be a valid list"
    assert "the body: a JSON object is needed" in told(client, "/v1/chat/completions", [CHAT])[1]


@pytest.mark.parametrize(
    ("data", "came"),
    [
        (["a", 3], "cell 1 of the data is not a text (int)"),
        ([["a"], [None]], "cell 1 of the data is not a text (NoneType)"),
    ],
)
def test_a_cell_of_a_tensor_that_is_no_text_is_named(client: TestClient, data: list[Any], came: str):
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": data}
    assert came in told(client, "/v2/models/mood/infer", {"inputs": [tensor]})[1]
