from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.causal import causal_model, causal_tokenizer
from tests.support.serving import START, ask
from tests.unit.cli.conftest import Ran

import lamina as library
from lamina.cli import serve_command
from lamina.fusion.mean import Mean
from lamina.monitors import LastScore
from lamina.serve import Settings


@contextmanager
def serving(bank: Path, *options: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-c", START, "serve", str(bank), "--port", "0", *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.communicate(timeout=30)[1]
        yield found[0], process
    finally:
        process.kill()
        process.communicate()


KEY, ADMIN = {"authorization": "Bearer sesame"}, {"authorization": "Bearer marigold"}


@pytest.mark.long
def test_a_bank_is_served_from_the_first_request_to_the_last(bank_folder: Path):
    """One server for all: starting one takes longer than all its answers."""
    page = ("--title", "Moods", "--example", "[draft] a film", "--example", '["a film", "the film"]')
    root = ("--admin-key", "marigold", "--readers-root", str(bank_folder.parent))
    with serving(bank_folder, "--max-client-batch-size", "3", *page, *root, LAMINA_API_KEY="sesame") as server:
        address, process = server
        assert_it_answers_with_the_key_alone(address, bank_folder)
        assert_clients_may_hang_up(address)
        assert_readers_are_changed(address, process, bank_folder)
        answered: list[Any] = []
        body = {"inputs": "secret " * 25}
        asking = [
            threading.Thread(target=lambda: answered.append(ask(address, "/predict", body, **KEY))) for _ in range(8)
        ]
        for thread in asking:
            thread.start()
        deadline = time.monotonic() + 10
        while not answered and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for thread in asking:
            thread.join(30)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert len(answered) == 8  # what was accepted is answered at the end
    assert err.splitlines() == ["serve: reloaded mood 3, who 2"]  # neither warnings of other packages nor a bar
    assert not [word for word in ("secret", "sesame", "marigold") if word in out + err]


def assert_it_answers_with_the_key_alone(address: str, bank_folder: Path) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(address, "/info")
    found = ask(address, "/predict", {"inputs": [["the film is good ."], ["bad"]], "tasks": "mood"}, **KEY)
    said = library.predict(library.ReaderBank.from_pretrained(bank_folder), ["the film is good .", "bad"])
    scores = [{one["label"]: one["score"] for one in row} for row in found]
    assert scores == [pytest.approx(one["mood"]["probabilities"], abs=1e-5) for one in said]
    info = ask(address, "/info", **KEY)
    assert info["max_client_batch_size"] == 3
    assert (info["title"], info["examples"]) == ("Moods", ["[draft] a film", ["a film", "the film"]])


def assert_clients_may_hang_up(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({"inputs": "secret"}).encode()
    for size in (len(body), len(body) + 100):  # a whole request, and half of one
        for _ in range(5):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n")
                raw.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size + body)
    assert set(ask(address, "/predict", {"inputs": "secret"}, **KEY)) == {"mood", "who"}
    with pytest.raises(urllib.error.HTTPError, match="413"):
        ask(address, "/predict", {"inputs": "secret " * 99}, **KEY)
    assert ask(address, "/health") == {"status": "ready", "ready": True}


def assert_readers_are_changed(address: str, process: subprocess.Popen[str], bank_folder: Path) -> None:
    """With the second key; and a signal has the folder read again."""
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(address, "/readers", **KEY)
    found = ask(address, "/readers", {"folder": bank_folder.name, "readers": ["mood"]}, **ADMIN)
    assert found == {"bank_version": 2, "readers": {"mood": 2, "who": 1}}
    process.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + 20
    while ask(address, "/info", **KEY)["bank_version"] == 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ask(address, "/readers", **ADMIN) == {"bank_version": 3, "readers": {"mood": 3, "who": 2}}
    assert set(ask(address, "/predict", {"inputs": "bad"}, **KEY)) == {"mood", "who"}


def test_a_bank_on_a_model_that_writes_is_served_with_its_head(tmp_path: Path):
    causal_model().save_pretrained(tmp_path / "base")
    causal_tokenizer().save_pretrained(tmp_path / "base")
    bank = library.ReaderBank(*library.load(tmp_path / "base", "GPT2LMHeadModel"))
    bank.add("odd", library.Reader(Mean(), library.TokenClassification(("fine", "odd"), encoder_layers=0)))
    bank.save_pretrained(tmp_path / "bank")
    asked = {"inputs": "the film", "parameters": {"max_new_tokens": 20}, "stream": True}
    served = serve_command._application(str(tmp_path / "bank"), None, "cpu", Settings.of(max_total_tokens=25))
    with TestClient(served) as client:
        response = client.post("/generate", json=asked)
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.strip()]
    assert [event["index"] for event in events] == [*range(1, 21)]
    assert events[-1]["details"]["finish_reason"] == "length"
    steps = bank.stream(
        bank.model, "the film", monitors=[library.Monitor("odd", "odd", LastScore())], max_new_tokens=20, pad_token_id=0
    )
    expected = [(int(step.tokens[0]), float(step.scores["odd"][0])) for step in steps]
    assert [event["token"]["id"] for event in events] == [token for token, _ in expected]
    scores = [event["scores"]["odd"]["odd"] for event in events[:-1]]
    assert scores == pytest.approx([score for _, score in expected[:-1]], abs=1e-5)


def test_a_port_in_use_is_refused_before_anything_is_loaded(lamina: Callable[..., Ran]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = lamina("serve", "nowhere", "--port", port)
    assert ran.code == 2
    assert re.search(rf"serve: cannot listen on 127\.0\.0\.1:{port} \(Address already in use\)", ran.err)


def test_a_socket_that_cannot_be_bound_is_closed(lamina: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    opened: list[socket.socket] = []

    class Recorded(socket.socket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(socket, "socket", Recorded)
        assert lamina("serve", "nowhere", "--port", taken.getsockname()[1]).code == 2
    assert [each.fileno() for each in opened] == [-1]


def test_a_root_of_readers_that_is_no_folder_is_refused(lamina: Callable[..., Ran], bank_folder: Path):
    ran = lamina("serve", bank_folder, "--port", 0, "--readers-root", bank_folder / "nowhere")
    assert ran.code == 2
    assert "nowhere, which is no folder" in ran.err


def test_a_root_of_readers_without_a_key_is_refused(lamina: Callable[..., Ran], bank_folder: Path):
    ran = lamina("serve", bank_folder, "--port", 0, "--readers-root", bank_folder)
    assert ran.code == 2
    assert "--readers-root was given, but not --admin-key" in ran.err


def test_a_whole_model_is_refused(lamina: Callable[..., Ran], model_folder: Path):
    ran = lamina("serve", model_folder, "--port", 0)
    assert ran.code == 2
    assert "is a whole model; only banks are served" in ran.err


def test_a_missing_extra_is_named(lamina: Callable[..., Ran], bank_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = lamina("serve", bank_folder)
    assert ran.code == 2
    assert "pip install 'lamina[serve]'" in ran.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "a" * 100), "serve: cannot listen on aaaa"),
        (
            ("--cors-allow-origin", "https://a.example/"),
            "cors_allow_origin is 'https://a.example/'; an origin is a scheme",
        ),
        (("--cors-allow-origin", "a.example"), "cors_allow_origin is 'a.example'; an origin is a scheme and a host"),
        (("--cors-allow-origin", "https://*.a.example"), "cors_allow_origin is 'https://*.a.example'"),
        (("--no-page", "--title", "T"), "--title and --example are for the page, and --no-page was given"),
    ],
)
def test_options_that_would_have_no_effect(lamina, bank_folder: Path, options: tuple[str, ...], message: str):
    ran = lamina("serve", bank_folder, "--port", 0, *options)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert "Traceback" not in ran.err
