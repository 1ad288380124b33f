from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.support.portions import one_in
from tests.support.stored import tiny_bank

from lamina.serve import Settings, create_app
from lamina.serve.middleware import RequestGuard, depth_of, without_lone_surrogates


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"", 0),
        (b'"[[["', 0),
        (b'{"a": [1, [2]], "b": []}', 3),
        (rb'{"a": "\"[[[[\\"}', 1),
        (b'["', 1),
        (b"]]]]", 0),
        (json.dumps({"inputs": [["[" * 9]]}).encode(), 3),
        (b'"' + b"\\" * 100_001, 0),
        (b"[" * 1000, 1000),
    ],
)
def test_depth_of_nested_json(body: bytes, depth: int):
    assert depth_of(body) == depth


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'"a \ud800 b"', "a � b"),
        (rb'"\uDC00\ud83d\ude00\uD83D"', "�😀�"),
        (rb'"\\ud800 \\\ud800"', "\\ud800 \\�"),
        ('"é \udfff 한"'.encode("utf-8", "surrogatepass"), "é � 한"),
        (rb'"\ud83d\n\ude00"', "�\n�"),
        (b'"plain \xed\x9f\xbf"', "plain \ud7ff"),
    ],
)
def test_half_of_a_pair_of_surrogates_is_replaced(body: bytes, text: str):
    clean = without_lone_surrogates(body)
    assert (json.loads(clean), len(clean)) == (text, len(body))


DEEP = b'{"inputs": ' + b"[" * 9 + b"]" * 9 + b"}"


@pytest.mark.parametrize("size", one_in(2, [b"2", b"9" * 5000, b"-1", b"x"]))
def test_the_size_of_json_before_binary_data_counts_for_tensors_only(size: bytes):
    headers = {b"inference-header-content-length": size, b"content-type": b"application/json"}
    with TestClient(create_app(tiny_bank())) as client:
        answered = client.post("/predict", content=b'{"inputs": "a"}', headers=headers)
        deep = client.post("/predict", content=DEEP, headers=headers)
        tensor = client.post("/v2/models/mood/infer", content=b'{"inputs": []}', headers=headers)
    assert answered.status_code == 200
    assert (deep.status_code, "nested too deeply" in deep.text) == (422, True)
    assert tensor.status_code == 422


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/predict", b'{"inputs": "a", "inputs": "b"}'),
        ("/predict", b'{"inputs": "a", "parameters": {"x": 1, "x": 1}}'),
        ("/v1/moderations", b'{"input": "a", "input": "b"}'),
        ("/v2/models/mood/infer", b'{"inputs": [], "inputs": []}'),
    ],
)
def test_a_key_that_comes_twice_is_refused(path: str, body: bytes):
    with TestClient(create_app(tiny_bank())) as client:
        response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, "comes twice" in response.text) == (422, True)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_a_body_in_another_encoding_is_refused(encoding: str):
    with TestClient(create_app(tiny_bank())) as client:
        response = client.post("/v1/moderations", content='{"input": "a"}'.encode(encoding))
    assert (response.status_code, "JSON in UTF-8 is needed" in response.json()["error"]["message"]) == (422, True)


@pytest.mark.parametrize("keys", [{}, {"api_key": "ask"}, {"api_key": "ask", "admin_key": "sesame"}])
def test_a_mounted_application_needs_the_same_keys(keys: dict[str, str]):
    app = FastAPI()
    app.mount("/lamina", create_app(tiny_bank(), Settings.of(**keys)))
    asking = {"authorization": "Bearer ask"}
    with TestClient(app) as client:
        removed = client.delete("/lamina/readers/who", headers=asking)
        assert removed.status_code == (401 if "admin_key" in keys else 403)
        assert client.get("/lamina/health").status_code == 200
        asked = {"inputs": "the film", "tasks": "who"}
        assert client.post("/lamina/predict", json=asked).status_code == (401 if keys else 200)
        assert client.post("/lamina/predict", json=asked, headers=asking).status_code == 200


def test_a_body_that_does_not_arrive_times_out():
    sent: list[Any] = []

    async def application(*_: Any) -> None:
        raise AssertionError("it was handed on")

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": "/predict", "method": "POST", "headers": []}
    asyncio.run(RequestGuard(application, Settings.of(request_timeout=0.1))(scope, receive, send))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"] == "the body did not come within 0.1 s."
