"""Clients that hang up, or send so slowly that they would hold a connection for ever."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from fastapi import FastAPI, HTTPException, Request
from tests.support.portions import one_in
from tests.support.stored import tiny_bank
from tests.support.writing import Gate, writing_bank

from lamina.serve import Settings, create_app
from lamina.serve.problems import wait_while_connected
from lamina.serve.server import Server, server_of


@contextmanager
def running(server: Server) -> Iterator[int]:
    """Run a server within the `with` block, and yield its port."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    settings = Settings.of(header_timeout=0.5)
    with running(server_of(create_app(tiny_bank(), settings), settings)) as port:
        yield port


def received(connection: socket.socket) -> bytes:
    """Return all that comes until the server closes the connection."""
    connection.settimeout(20)
    parts: list[bytes] = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_a_client_that_sends_its_headers_too_slowly_is_told_so(port: int):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        found = received(connection)
    head, body = found.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert f"content-length: {len(body)}".encode() in head


def test_a_client_that_sends_nothing_is_disconnected(port: int):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        assert received(connection) == b""


@pytest.mark.long
def test_the_headers_of_a_second_request_have_the_same_time(port: int):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.3)
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        found = received(connection)
    assert (found.count(b"HTTP/1.1 200"), found.count(b"HTTP/1.1 408")) == (1, 1)


def http_2(*headers: str, method: str = "POST", path: str = "/predict") -> bytes:
    """Return the head of a request as Java's client sends it, which asks for HTTP/2."""
    asks = ["Host: x", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *asks, *headers, "", ""]).encode()


BODY = b'{"inputs": "the film", "tasks": "mood"}'
POST = http_2("Content-Type: application/json", f"Content-Length: {len(BODY)}") + BODY
CHUNK = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
CHUNKED = http_2("Content-Type: application/json", "Transfer-Encoding: chunked") + CHUNK
GET = http_2(method="GET", path="/health")
LAST = GET.replace(b": Upgrade", b": close, Upgrade")


@pytest.mark.parametrize(
    "parts",
    [
        (POST,),
        (CHUNKED,),
        (GET,),
        (POST, CHUNKED, GET, POST),
        tuple(POST.partition(b"grade: h2c")),
        tuple(POST.partition(BODY)),
        (POST[:-5], POST[-5:] + CHUNKED[:-9], CHUNKED[-9:]),
        (POST + POST + GET + CHUNKED,),
    ],
)
def test_a_client_that_would_rather_speak_http_2_is_answered(port: int, parts: Sequence[bytes]):
    requests = b"".join(parts).count(b"HTTP/1.1")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)
        connection.sendall(LAST)
        found = received(connection)
    assert (found.count(b"HTTP/1.1"), found.count(b"HTTP/1.1 200")) == (requests + 1, requests + 1)


def test_a_late_body_with_the_word_upgrade_is_not_taken_for_headers():
    settings, body = Settings.of(api_key="k"), b'{"inputs": "x",\nupgrade: 1}'
    server = server_of(create_app(tiny_bank(), settings), settings)
    with running(server) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")
        connection.sendall(body)
        time.sleep(0.02)
        connection.sendall(LAST)
        assert b"HTTP/1.1 200" in received(connection)


@pytest.mark.parametrize("seconds", [0.5, 1.9, 30])
def test_requests_have_the_whole_shutdown_time(seconds: float):
    assert server_of(FastAPI(), Settings.of(shutdown_timeout=seconds)).config.timeout_graceful_shutdown == seconds


@pytest.mark.long
def test_a_request_whose_headers_came_in_time_may_take_longer(port: int):
    body = b'{"inputs": "the film", "tasks": "mood"}'
    with socket.create_connection(("127.0.0.1", port)) as connection:
        headers = ["Host: x", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        connection.sendall("\r\n".join(["POST /predict HTTP/1.1", *headers, "", ""]).encode())
        time.sleep(0.8)
        connection.sendall(body)
        assert received(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.long
@pytest.mark.parametrize("requests", one_in(3, [1, 2, 5]))
def test_a_client_that_sends_several_requests_and_hangs_up_ends_its_text(
    requests: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    app = create_app(bank := writing_bank())
    (gate := Gate(bank)).pause = 0.05
    server = server_of(app, Settings.of())
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    body = b'{"inputs": "the film is good", "stream": true}'
    head = ["POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    with running(server) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(("\r\n".join([*head, "", ""]).encode() + body) * requests)
        assert b"200" in connection.recv(100)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        connection.close()
        end = time.monotonic() + 10
        while app.state.generator.running and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(0.2)
        assert gate.passes < 12
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("leaves", [False, True])
def test_an_answer_that_fails_after_nobody_waits_for_it_is_not_logged(leaves: bool, caplog: pytest.LogCaptureFixture):
    """A 503 meets a hang-up: what ends the answer is an error of its own, at the moment in which it is cancelled."""

    class Client:
        async def receive(self) -> Any:
            await asyncio.sleep(0.01 if leaves else 3600)
            return {"type": "http.disconnect"}

    async def answer() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise HTTPException(503, "no token within 1 s") from None

    async def ask() -> int:
        with pytest.raises(HTTPException) as raised:
            await wait_while_connected(cast("Request", Client()), answer(), 0.05)
        return raised.value.status_code

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        assert asyncio.run(ask()) == (499 if leaves else 503)
    assert not caplog.records
