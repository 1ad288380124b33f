"""The endpoint plugin: a route that says which readers a server runs, and no route without a bank."""

from __future__ import annotations

import asyncio
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from tiny import FAMILIES

from lamina import AdaLayers, Monitor, PooledLayers, Reader, ReaderBank, SequenceClassification, TokenClassification
from lamina.vllm import plugin
from lamina.vllm.endpoint import ReadersEndpoint

LABELS = ("no", "yes")


def served(settings: dict[str, Any] | None) -> FastAPI:
    """Return a server with the plugin, as vLLM calls it; `settings` are the server's `additional_config`."""
    app = FastAPI()
    app.state.args = SimpleNamespace(additional_config=settings)
    endpoint = ReadersEndpoint()
    endpoint.attach_router(app)
    model = SimpleNamespace(runner_type="generate")
    client: Any = SimpleNamespace(vllm_config=SimpleNamespace(additional_config=settings, model_config=model))
    asyncio.run(endpoint.init_state(client, app.state, app.state.args))
    return app


def test_the_route_says_which_readers_and_monitors_there_are(tmp_path: Path):
    bank = ReaderBank(FAMILIES["llama"].build())
    bank.add("harm", Reader(AdaLayers(dim=8), SequenceClassification(LABELS, pooling="query")))
    bank.add("tags", Reader(AdaLayers(dim=8), TokenClassification(LABELS, encoder_layers=0)))
    bank.add("topic", Reader(PooledLayers(dim=8), SequenceClassification(LABELS, pooling="first")))
    bank.keep_monitor(Monitor("harm", flag="yes", threshold=0.75, name="watchdog"))
    bank.save_pretrained(tmp_path)
    settings = {"lamina": {"bank": str(tmp_path), "on_flag": "report"}}
    said = TestClient(served(settings)).get("/v1/lamina").json()
    common = {"labels": ["no", "yes"], "problem_type": "classification"}
    assert said == {
        "readers": {
            "harm": {**common, "answers": ["prompt", "output", "both", "tokens"]},
            "tags": {**common, "answers": ["tokens"]},
            "topic": {**common, "answers": ["prompt"]},
        },
        "monitors": {"watchdog": {"readers": ["harm"], "threshold": 0.75}},
        "on_flag": "report",
    }


def test_a_server_without_a_bank_is_left_as_it_is():
    for settings in (None, {}, {"other": 1}, {"lamina": None}):
        app = served(settings)
        assert {route.path for route in app.routes} == {route.path for route in FastAPI().routes}  # pyright: ignore[reportAttributeAccessIssue]
        assert not hasattr(app.state, "lamina")


def test_vllm_finds_both_plugins_by_one_name():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    expected = {"vllm.general_plugins": plugin.register, "vllm.endpoint_plugins": ReadersEndpoint}
    for group, target in expected.items():
        (name, value) = next(iter(project["entry-points"][group].items()))
        assert name == ReadersEndpoint.name
        assert EntryPoint(name, value, group).load() is target
