"""A server in a thread of the process that runs the test."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from tests.support.stored import tiny_bank

from lamina.bank import Reader, ReaderBank
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.serve import Settings, create_app

START = "import sys; from lamina.cli import main; main(sys.argv[1:])"  # in a process of its own


@contextmanager
def served(bank: ReaderBank, **settings: Any) -> Iterator[str]:
    """Serve a bank within the `with` block, and yield the address."""
    app = create_app(bank, Settings.of(**settings), name="tiny")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def moderating() -> ReaderBank:
    """Return a bank with two readers that a moderation calls flags."""
    bank = tiny_bank()
    bank.add("toxic", Reader(Mean(), SequenceClassification(("no", "yes"))))
    topics = SequenceClassification(("war", "sex"), problem_type="multi_label")
    bank.add("topics", Reader(Mean(), topics))
    return bank.eval()


def ask(address: str, path: str, body: Any = None, **headers: str) -> Any:
    """Send a request, a POST if it has a body, and return the JSON of the response."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)
