from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lamina.serve import Settings
from lamina.serve.guard import Guard, depth_of


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
def test_depth(body: bytes, depth: int):
    assert depth_of(body) == depth


def test_a_body_that_does_not_come_is_not_waited_for():
    sent: list[Any] = []

    async def application(*_: Any) -> None:
        raise AssertionError("it was handed on")

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": "/predict", "method": "POST", "headers": []}
    asyncio.run(Guard(application, Settings.of(request_timeout=0.1))(scope, receive, send))
    assert sent[0]["status"] == 408
    assert json.loads(sent[1]["body"])["error"] == "the body did not come within 0.1 s."
