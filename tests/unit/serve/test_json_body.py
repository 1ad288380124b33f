"""JSON bodies: what is refused, what is replaced, and that size alone holds nobody up."""

from __future__ import annotations

import json

import pytest
from fastapi import HTTPException
from fastapi.testclient import TestClient
from tests.support.portions import one_in
from tests.support.stored import tiny_bank

from lamina.serve import create_app
from lamina.serve.json_body import parse_body, without_lone_surrogates

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b'"[[["', 0),
        (b'{"a": [1, [2]], "b": []}', 3),
        (rb'{"a": "\"[[[[\\"}', 1),
        (json.dumps({"inputs": [["[" * 9]]}).encode(), 3),
        (b"[" * 1000 + b"]" * 1000, 1000),
        (b"[" * 100_000, 100_000),
        (b'[{"a": 1}' + b',{"a": {}}' * 90_000 + b"]", 3),
    ],
)
def test_deeper_json_is_refused(body: bytes, depth: int):
    if depth < 100:
        assert parse_body(body, depth) == json.loads(body)
    with pytest.raises(HTTPException) as raised:
        parse_body(body, min(depth, 100) - 1)
    assert "nested too deeply" in raised.value.detail


def test_a_number_of_thousands_of_digits_is_named():
    """Python refuses such integers, and the response once said that the body is not UTF-8."""
    with pytest.raises(HTTPException, match="a number has too many digits"):
        parse_body(b'{"seed": ' + b"9" * 5000 + b"}", 8)
    with pytest.raises(json.JSONDecodeError):
        parse_body(b'{"seed": 9', 8)
    with pytest.raises(HTTPException) as told:
        parse_body(b'{"inputs": "\xff"}', 8)
    assert (told.value.status_code, "JSON in UTF-8 is needed" in told.value.detail) == (422, True)


def test_the_last_of_many_keys_comes_twice():
    """Each key was once compared with all others: for minutes, while nobody else was answered."""
    body = json.dumps({f"key {number}": number for number in range(200_000)}).encode()
    with pytest.raises(HTTPException) as raised:
        parse_body(body[:-1] + b', "' + b"x" * 500 + b'": 1, "' + b"x" * 500 + b'": 2}', 8)
    assert raised.value.detail == f"the body is not clear: the key '{'x' * 100}...' comes twice."


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
    headers = {"inference-header-content-length": size.decode(), **JSON}
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
        response = client.post(path, content=body, headers=JSON)
    assert (response.status_code, "comes twice" in response.text) == (422, True)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_a_body_in_another_encoding_is_refused(encoding: str):
    with TestClient(create_app(tiny_bank())) as client:
        response = client.post("/v1/moderations", content='{"input": "a"}'.encode(encoding), headers=JSON)
    assert (response.status_code, "JSON in UTF-8 is needed" in response.json()["error"]["message"]) == (422, True)
