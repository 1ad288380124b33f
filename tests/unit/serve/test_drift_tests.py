"""A server tests whether its texts drift away from those that its monitors were calibrated on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi.testclient import TestClient
from tests.support.causal import causal_model, causal_tokenizer

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import DriftSketch, LastScore, Monitor, ReplyFacts
from lamina.serve import create_app

BODY: dict[str, Any] = {"inputs": "the film is good", "parameters": {"max_new_tokens": 6, "details": True}}


def served_bank() -> ReaderBank:
    bank = ReaderBank(causal_model(), causal_tokenizer())
    bank.add("odd", Reader(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)))
    monitor = Monitor("odd", "odd", LastScore(), threshold=0.999)
    sketch = DriftSketch.of([ReplyFacts(0.001 * row, 50 + row) for row in range(300)])
    bank.keep_monitor(replace(monitor, sketch=sketch))
    bank.keep_monitor(replace(monitor, name="plain"))
    return bank.eval()


def test_drift_is_in_the_responses_and_in_the_metrics():
    with TestClient(create_app(served_bank())) as client:
        first = client.post("/generate", json=BODY).json()["details"]
        assert first["drift"] == {}
        assert 'lamina_monitor_drift{monitor="odd"}' in client.get("/metrics").text
        for _ in range(5):  # texts that a flag may cut short are not tested
            client.post("/generate", json={**BODY, "stop_on_flag": True})
        assert client.app.state.generator.drift.of(client.app.state.scheduler.bank)["odd"].replies == 1  # pyright: ignore
        for _ in range(25):
            found = client.post("/generate", json=BODY).json()["details"]["drift"]
        assert list(found) == ["odd"]
        assert found["odd"].startswith("After ")
        assert "differ from those of the calibration" in found["odd"]
        lines = client.get("/metrics").text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith('lamina_monitor_drift{monitor="odd"}')]
        assert float(value) >= 1
        assert client.get("/info").json()["monitors"]["odd"]["threshold"] == 0.999
