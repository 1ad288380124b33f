"""Generation on a running server: what clients get before the end, disconnects, overload and shutdown."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
import uvicorn
from tests.support.writing import CHAT, PROMPT, Gate, events, writing_bank

from lamina.serve import Settings, create_app
from lamina.serve.server import Server

JSON = {"content-type": "application/json"}
LONG = {"inputs": PROMPT, "parameters": {"max_new_tokens": 28}}


class LiveServer:
    """A running server, and a client for it."""

    def __init__(self, server: Server, app: Any, gate: Gate) -> None:
        self.server, self.generator, self.gate = server, app.state.generator, gate

    def connect(self) -> HTTPConnection:
        port = self.server.servers[0].sockets[0].getsockname()[1]
        return HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        with closing(self.connect()) as connection:
            response = self.begin(connection, path, body)
            return response.status, response.read()

    def begin(self, connection: HTTPConnection, path: str, body: Any) -> HTTPResponse:
        connection.request("POST", path, json.dumps(body), JSON)
        return connection.getresponse()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 15
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert condition()


@contextmanager
def serving(**settings: Any) -> Iterator[LiveServer]:
    bank = writing_bank()
    given = Settings.of(**settings)
    app = create_app(bank, given)
    more: Any = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": int(given.shutdown_timeout)}
    server = Server(uvicorn.Config(app, port=0, **more))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    live = LiveServer(server, app, Gate(bank))
    live.until(lambda: server.started)
    try:
        yield live
    finally:
        live.gate.pause = 0
        live.gate.go.set()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def live() -> Iterator[LiveServer]:
    with serving(max_concurrent_generations=2) as live:
        yield live


def first_event(response: HTTPResponse) -> Any:
    (event,) = events(response.readline() + response.readline())
    return event


def test_tokens_are_sent_before_the_text_is_complete_and_predictions_do_not_wait(live: LiveServer):
    live.gate.holds_at = 4
    with closing(live.connect()) as connection:
        response = live.begin(connection, "/generate", {**LONG, "stream": True})
        assert [first_event(response)["index"] for _ in range(2)] == [1, 2]
        assert live.generator.running == 1
        assert live.ask("/predict", {"inputs": PROMPT, "tasks": ["mood"]})[0] == 200
        live.gate.go.set()
        rest = events(response.read())
    assert rest[-1]["details"]["generated_tokens"] == 28
    live.until(lambda: live.generator.running == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_ends_its_text(live: LiveServer, stream: bool):
    live.gate.pause = 0.05
    connection = live.connect()
    connection.request(
        "POST", "/generate", json.dumps({**LONG, "stream": stream}), {"content-type": "application/json"}
    )
    live.until(lambda: live.gate.passes >= 3)
    connection.close()
    live.until(lambda: live.generator.running == 0)
    assert live.gate.passes < 12


def test_a_client_that_disconnects_while_it_reads_ends_its_text(live: LiveServer):
    live.gate.pause = 0.05
    connection = live.connect()
    response = live.begin(connection, "/v1/chat/completions", {"messages": CHAT, "stream": True})
    assert first_event(response)["choices"][0]["delta"]["role"] == "assistant"
    response.close()
    connection.close()
    live.until(lambda: live.generator.running == 0)
    assert live.gate.passes < 12


def test_too_many_texts_at_a_time_are_refused(live: LiveServer):
    live.gate.holds_at = 2
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(live.ask, "/generate", LONG) for _ in range(2)]
        live.until(lambda: live.generator.running == 2)
        status, body = live.ask("/generate", LONG)
        assert (status, json.loads(body)["error_type"]) == (429, "Overloaded")
        assert "2 texts are being generated; at most 2 may be at a time" in json.loads(body)["error"]
        live.gate.go.set()
        answers = [future.result() for future in waiting]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0] == answers[1]
    assert live.ask("/generate", LONG)[0] == 200


def test_simultaneous_texts_and_predictions_equal_those_alone():
    bodies = [
        ("/generate", {"inputs": text, "parameters": {"max_new_tokens": 20, "temperature": 1.3, "seed": seed}})
        for seed, text in enumerate(("the film", "anna went to paris"))
    ]
    bodies += [("/predict", {"inputs": [[text], ["a very good film"]]}) for text in ("bad", "the film is slow .")] * 3
    with serving() as live:
        alone = [live.ask(*body) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            together = list(pool.map(lambda body: live.ask(*body), bodies))
    assert {status for status, _ in alone + together} == {200}
    for (path, _), (_, own), (_, found) in zip(bodies, alone, together, strict=True):
        if path == "/generate":
            assert found == own
        for one, other in zip(json.loads(own), json.loads(found), strict=True) if path == "/predict" else ():
            for task in one:
                expected = {said["label"]: said["score"] for said in one[task]}
                assert {said["label"]: said["score"] for said in other[task]} == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
def test_a_text_may_take_longer_than_the_time_for_one_token():
    with serving(request_timeout=0.6) as live:
        live.gate.pause = 0.03
        assert live.ask("/generate", LONG)[0] == 200  # 28 passes of 0.03 s and more
        live.gate.pause, live.gate.holds_at = 0, live.gate.passes + 3
        status, body = live.ask("/generate", LONG)
        assert (status, json.loads(body)["error"]) == (503, "no token within 0.6 s")
        live.gate.holds_at = live.gate.passes + 4
        told = events(live.ask("/generate", {**LONG, "stream": True})[1])
        assert told[-1] == {"error": "no token within 0.6 s", "error_type": "Unhealthy"}
        live.gate.go.set()
        live.until(lambda: live.generator.running == 0)


@pytest.mark.long
def test_a_failure_is_an_error_and_no_text_is_logged(live: LiveServer, caplog: pytest.LogCaptureFixture):
    live.gate.breaks_at = 1
    status, body = live.ask("/generate", {**LONG, "stream": True})
    assert (status, json.loads(body)["error_type"]) == (424, "Backend")
    assert (
        "serve: the model could not generate the text (RuntimeError); see the log of the server."
        in json.loads(body)["error"]
    )
    live.gate.breaks_at = live.gate.passes + 4
    status, body = live.ask("/v1/chat/completions", {"messages": CHAT, "stream": True})
    *told, last = events(body)
    assert (status, last["error"]["type"]) == (200, "server_error")
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in told)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "serve: a text could not be generated"
    ] * 2
    assert "film" not in caplog.text
    live.gate.breaks_at = 10**9
    assert live.ask("/generate", LONG)[0] == 200


def test_a_server_that_shuts_down_lets_a_text_finish():
    with serving(shutdown_timeout=10) as live, closing(live.connect()) as connection:
        live.gate.pause = 0.02
        response = live.begin(connection, "/generate", {**LONG, "stream": True})
        first_event(response)
        live.server.should_exit = True
        told = events(response.read())
    assert told[-1]["details"]["finish_reason"] == "length"


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/generate", LONG, marks=pytest.mark.full),
        ("/v1/chat/completions", {"messages": CHAT}),
    ],
)
def test_a_text_cut_off_at_shutdown_ends_with_an_error(path: str, body: Any):
    with serving(shutdown_timeout=3) as live, closing(live.connect()) as connection:
        live.gate.pause = 0.15
        response = live.begin(connection, path, {**body, "stream": True})
        first_event(response)
        live.server.should_exit = True
        last = events(response.read())[-1]
    said = last["error"]["message"] if path != "/generate" else last["error"]
    assert said == "serve: the server was shut down before this text was complete."


def test_metrics_count_tokens_and_their_times(live: LiveServer):
    assert live.ask("/generate", LONG)[0] == 200
    with closing(live.connect()) as connection:
        connection.request("GET", "/metrics")
        figures = connection.getresponse().read().decode()
    values = dict(line.rsplit(" ", 1) for line in figures.splitlines() if not line.startswith("#"))
    assert values["lamina_written_tokens_total"] == "28.0"
    assert values["lamina_first_token_seconds_count"] == values["lamina_next_token_seconds_count"] == "1.0"
    assert float(values["lamina_first_token_seconds_sum"]) > 0
    assert values["lamina_running_generations"] == "0.0"
