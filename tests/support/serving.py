"""A server in a thread of the process that runs the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from lamina.bank import ReaderBank
from lamina.serve import Settings, create_app


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
