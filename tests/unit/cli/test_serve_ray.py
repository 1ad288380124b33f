from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.serving import START, ask
from tests.unit.cli.conftest import Ran

import lamina as library


@contextmanager
def on_ray(bank: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, "serve", str(bank), "--port", str(port), "--ray", "local", *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while line := process.stdout.readline():
            lines.append(line)
            if found := re.search(r"http://\S+(?= \()", line):
                yield found[0], process
                return
        raise AssertionError("".join(lines))
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


def replicas_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [one for one in psutil.Process(process.pid).children(recursive=True) if is_replica(one)]


def is_replica(process: psutil.Process) -> bool:
    try:
        return "ServeReplica" in " ".join(process.cmdline())
    except psutil.Error:  # it is gone
        return False


@pytest.mark.long  # a cluster takes long to start; see `make test-long`
def test_a_replica_answers_and_comes_back_when_it_dies(bank_folder: Path):
    (said,) = library.predict(library.ReaderBank.from_pretrained(bank_folder), ["the film is good ."])
    body = {"inputs": "the film is good .", "tasks": ["mood"]}
    with on_ray(bank_folder, "--replica-cpus", "0.5", "--api-key", "sesame") as (address, process):
        key = {"authorization": "Bearer sesame"}

        def scores() -> dict[str, float]:
            return {one["label"]: one["score"] for one in ask(address, "/predict", body, **key)["mood"]}

        assert scores() == pytest.approx(said["mood"]["probabilities"], abs=1e-5)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(address, "/predict", body)
        (first,) = replicas_of(process)
        first.kill()
        deadline = time.monotonic() + 90
        while True:
            try:
                again = scores()
                break
            except urllib.error.URLError:  # until the new replica is there
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert {one.pid for one in replicas_of(process)} & {first.pid} == set()
        assert again == pytest.approx(said["mood"]["probabilities"], abs=1e-5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--ray", "local", "--admin-key", "x"), "--ray goes with neither --admin-key nor --readers-root"),
        (("--replicas", "2"), "options of replicas were given, but not --ray"),
        (("--ray", "local", "--port", "0"), "port is 0; with --ray"),
        (("--ray", "nowhere:1"), "no cluster of Ray answers at 'nowhere:1'"),
        (("--ray", "local", "--replicas", "3", "--max-replicas", "2"), "max_replicas is 2; it must be at least 3"),
    ],
)
def test_what_cannot_be_is_refused(
    lamina: Callable[..., Ran], bank_folder: Path, options: tuple[str, ...], problem: str
):
    ran = lamina("serve", bank_folder, *options)
    assert (ran.code, problem in ran.err) == (2, True), ran.err
