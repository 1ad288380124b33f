"""A server tests whether its texts drift away from those that its monitors were calibrated on."""

from __future__ import annotations

from dataclasses import replace
from queue import Queue
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.causal import causal_model, causal_tokenizer

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import DriftSketch, LastScore, Monitor, ReplyFacts
from lamina.serve import Scheduler, Settings, create_app
from lamina.serve.generation.generator import DriftTests, Generation, TextGenerator
from lamina.serve.generation.prompts import GenerationRequest
from lamina.serve.generation.stream import TokenEvent
from lamina.serve.telemetry import ServerMetrics

BODY: dict[str, Any] = {"inputs": "the film is good", "parameters": {"max_new_tokens": 6, "details": True}}


def served_bank() -> ReaderBank:
    bank = ReaderBank(causal_model(), causal_tokenizer())
    bank.add("odd", Reader(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)))
    monitor = Monitor("odd", "odd", LastScore(), threshold=0.999)
    sketch = DriftSketch.of([ReplyFacts(0.001 * row, 50 + row) for row in range(300)])
    bank.keep_monitor(replace(monitor, sketch=sketch))
    bank.keep_monitor(replace(monitor, name="plain"))
    return bank.eval()


@pytest.mark.long
def test_drift_is_in_the_responses_and_in_the_metrics():
    with TestClient(create_app(served_bank())) as client:
        first = client.post("/generate", json=BODY).json()["details"]
        assert first["drift"] == {}
        assert 'lamina_monitor_drift{monitor="odd"}' in client.get("/metrics").text
        for _ in range(2):  # texts that a flag may cut short are not tested
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


@pytest.mark.parametrize("leaves", [True, False])
def test_a_text_whose_client_has_left_is_not_tested(leaves: bool):
    bank, begun = served_bank(), Queue[Generation]()
    scheduler = Scheduler(bank, Settings.of(shutdown_timeout=5))
    generator = TextGenerator(scheduler)

    def put(event: Any) -> None:
        if isinstance(event, TokenEvent) and event.index == 2 and leaves:
            begun.get(timeout=10).leave()

    generation = generator.begin(GenerationRequest("the film is good", max_new_tokens=6), put)
    begun.put(generation)
    generation.join(10)
    scheduler.close()
    assert generator.drift.of(bank)["odd"].replies == (0 if leaves else 1)


def test_texts_of_a_replaced_bank_leave_the_evidence_about_the_new_one():
    old, new, tests = served_bank(), served_bank(), DriftTests()
    test = tests.of(old)["odd"]
    assert tests.of(new)["odd"] is not test
    assert tests.of(old)["odd"] is test


def test_metrics_have_the_monitors_of_the_bank_of_now():
    evidence = {"old": 0.5}
    metrics = ServerMetrics(lambda: 0, lambda: 0, lambda: evidence)
    assert b'lamina_monitor_drift{monitor="old"} 0.5' in metrics.text("")[0]
    evidence = {"new": 0.25}
    assert b'lamina_monitor_drift{monitor="new"} 0.25' in (text := metrics.text("")[0])
    assert b'monitor="old"' not in text
    with TestClient(create_app(served_bank())) as client:  # before the first text
        assert 'lamina_monitor_drift{monitor="odd"}' in client.get("/metrics").text
