from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from tests.support.stored import tiny_bank

from lamina.serve import Settings, create_app
from lamina.serve.middleware import RequestGuard


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
