"""Spans of OpenTelemetry: one per request and batch, with readers and times, and no text anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.stored import tiny_bank
from tests.support.writing import Gate, writing_bank

from lamina.serve import create_app

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk (pip install lamina[otel])")
SECRET = "swordfish"
TEXT = f"the film is good {SECRET} ."


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Any]]]:
    """Return a function that waits for a number of spans and returns them."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)  # the server's packages ask for it too

    def finished(count: int) -> list[Any]:
        end = time.monotonic() + 10
        while len(exporter.get_finished_spans()) < count and time.monotonic() < end:
            time.sleep(0.02)  # the span of a batch ends in the scheduler's thread
        return [*exporter.get_finished_spans()]

    yield finished
    provider.shutdown()


def test_requests_and_batches_have_spans_with_readers_and_times(spans: Callable[[int], list[Any]]):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with TestClient(create_app(tiny_bank().eval())) as client:
        assert client.post("/predict", json={"inputs": TEXT}, headers={"traceparent": parent}).status_code == 200
        found = {span.name: span for span in spans(2)}
    request, batch = found["POST /predict"], found["lamina batch"]
    assert f"{request.context.trace_id:032x}" == parent.split("-")[1]
    assert request.attributes["lamina.readers"] == batch.attributes["lamina.readers"] == ("mood", "who")
    assert request.attributes["http.response.status_code"] == 200
    assert (batch.attributes["lamina.requests"], batch.attributes["lamina.texts"]) == (1, 1)
    assert batch.attributes["lamina.inference_s"] > 0
    assert batch.end_time - batch.start_time > 0
    assert SECRET not in "".join(span.to_json() for span in found.values())


def test_errors_and_unknown_paths_name_no_text(spans: Callable[[int], list[Any]]):
    with TestClient(create_app(tiny_bank().eval())) as client:
        client.post("/predict", json={"inputs": TEXT, "tasks": [SECRET]})
        client.get(f"/{SECRET}?text={SECRET}")
        client.request(SECRET, "/")
        found = spans(3)
    assert [span.attributes["http.response.status_code"] for span in found] == [422, 404, 405]
    assert [span.name for span in found[1:]] == ["GET other", "_OTHER /"]
    assert SECRET not in "".join(span.to_json() for span in found)


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_in_place_of_a_reader_of_a_generated_text_is_not_recorded(
    spans: Callable[[int], list[Any]], stream: bool
):
    with TestClient(create_app(writing_bank(None, ["odd"], ()))) as client:
        body = {"inputs": TEXT, "tasks": ["odd", SECRET], "stream": stream}
        assert client.post("/generate", json=body).status_code == 422
        (span,) = spans(1)
    assert span.attributes["lamina.readers"] == ("odd",)
    assert SECRET not in span.to_json()


def test_a_generated_text_has_the_names_of_its_readers(spans: Callable[[int], list[Any]]):
    with TestClient(create_app(writing_bank(None, ["odd"], ()))) as client:
        body = {"inputs": TEXT, "parameters": {"max_new_tokens": 3}, "stream": True}
        assert client.post("/generate", json=body).status_code == 200
        (span,) = spans(1)
    assert span.name == "POST /generate"
    assert span.attributes["lamina.readers"] == ("odd",)
    assert SECRET not in span.to_json()


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_that_breaks_off_is_an_error_without_a_word_of_it(spans: Callable[[int], list[Any]], stream: bool):
    bank = writing_bank(None, ["odd"], ())
    gate = Gate(bank)
    gate.error, gate.breaks_at = RuntimeError(TEXT), 3
    with TestClient(create_app(bank)) as client:
        body = {"inputs": TEXT, "parameters": {"max_new_tokens": 5}, "stream": stream}
        answer = client.post("/generate", json=body)
        (span,) = spans(1)
    assert answer.status_code == (200 if stream else 424)
    assert "RuntimeError" in answer.text
    assert span.attributes["http.response.status_code"] == answer.status_code
    assert span.status.status_code.name == "ERROR"
    assert SECRET not in answer.text + span.to_json()
