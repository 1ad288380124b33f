"""Eight answers about each text, from one bank or from the usual alternatives: texts per second.

    python benchmarks/serve_rivals.py [--json] [--repeats 3] [--seconds 6] [--clients 32] [--only NAME ...]

lamina      `lamina serve`: 8 PooledLayers readers on MiniLM, one request per text, all tasks in one pass.
ray         The same bank with `lamina serve --ray local`, one replica.
ray2        The same with two replicas.
litserve    The same bank with LitServe (`pip install litserve`; left out if it is not installed), which batches the
            requests of five milliseconds, up to 64 texts.
pipelines   8 servers, each a process with a transformers pipeline for one task (MiniLM with a head of its own) behind
            FastAPI: each request runs in a thread as soon as it comes. A client asks all eight and waits for them.

All servers are started before the timing begins, with OMP_NUM_THREADS threads each. They are measured in turn, by
clients in a closed loop with texts of 1 to 64 words. `ratio` is the median over the rounds of the texts per second
relative to those of `lamina` in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common import report
from serve import READERS, served_bank, texts_of

from lamina.store import load, save, save_bank

if TYPE_CHECKING:
    from collections.abc import Iterator

START = "from lamina.cli import main; main()"
LITSERVE = """
import sys
import litserve
from lamina.store import load_bank
from lamina.train.options import PassOptions
from lamina.prediction.predict import Predictor

class Api(litserve.LitAPI):
    def setup(self, device):
        self.answers = Predictor(load_bank(sys.argv[1]), PassOptions(batch_size=64))

    def decode_request(self, request):
        return request["inputs"]

    def predict(self, texts):
        return self.answers(texts)

    def encode_response(self, output):
        return output

if __name__ == "__main__":
    api = Api(max_batch_size=64, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu").run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
"""
PIPELINE = """
import sys
import uvicorn
from fastapi import Body, FastAPI
from transformers import pipeline

app, answer = FastAPI(), pipeline("text-classification", sys.argv[1], top_k=None)

@app.get("/health")
def health():
    return "ok"

@app.post("/predict")
def predict(inputs: str = Body(embed=True)):
    return answer(inputs, truncation=True)

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
"""


def main() -> None:
    """Start all servers, measure them in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each loop")
    parser.add_argument("--clients", type=int, default=32, help="that ask at the same time (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=["ray", "ray2", "litserve", "pipelines"], help="beside lamina")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        save_bank(served_bank(), folder / "bank")
        texts = texts_of(folder)
        servers = {rival: stack.enter_context(started) for rival, started in rivals(folder, args.only)}
        rates: dict[str, list[float]] = {rival: [] for rival in servers}
        for _ in range(args.repeats + 1):  # the first warms up
            for rival, ports in servers.items():
                rates[rival].append(asyncio.run(closed(ports, texts, args.clients, args.seconds)))
    rows: list[dict[str, object]] = []
    for rival, (_, *found) in rates.items():
        ratios = [own / base for own, base in zip(found, rates["lamina"][1:], strict=True)]
        row = {"server": rival, "texts/s": statistics.median(found), "ratio": statistics.median(ratios)}
        rows.append({**row, "from": min(ratios), "to": max(ratios)})
    report(rows, as_json=args.json)


def rivals(folder: Path, only: list[str] | None) -> Iterator[tuple[str, AbstractContextManager[list[int]]]]:
    """Yield name -> context that starts a rival's servers and yields their ports."""
    bank = str(folder / "bank")
    lamina = [sys.executable, "-c", START, "serve", bank, "--max-concurrent-passes", "1", "--port"]
    yield "lamina", running([lamina])
    for rival in only or ("ray", "ray2", "litserve", "pipelines"):
        if rival.startswith("ray"):
            more = ["--ray", "local", "--replicas", "2" if rival == "ray2" else "1"]
            yield rival, running([[*lamina[:-1], *more, "--port"]])
        elif rival == "pipelines":
            yield rival, running([[*script(folder, "pipeline", PIPELINE), whole_model(folder)]] * READERS)
        elif importlib.util.find_spec("litserve") is not None:
            yield rival, running([[*script(folder, "lit", LITSERVE), bank]])


def script(folder: Path, name: str, text: str) -> list[str]:
    """Write a script, and return the command that runs it."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return [sys.executable, str(path)]


def whole_model(folder: Path) -> str:
    """Save MiniLM with a random head of two classes to a folder and return it; its weights do not affect its speed."""
    model, tokenizer = load("minilm", "sequence_classification", ["no", "yes"])
    save(model, folder / "whole", tokenizer)
    return str(folder / "whole")


@contextmanager
def running(commands: list[list[str]]) -> Iterator[list[int]]:
    """Start servers, wait until they answer, and yield their ports; each command gets its port as the last argument."""
    with ExitStack() as stack:
        ports: list[int] = []
        for command in commands:
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(free.getsockname()[1])
            process = subprocess.Popen([*command, str(ports[-1])], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        for port in ports:
            wait_for(port)
        yield ports


def wait_for(port: int) -> None:
    """Wait until the server at a port answers."""
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"nothing answers at {port}")


async def closed(ports: list[int], texts: list[str], clients: int, seconds: float) -> float:
    """Return texts per second of `clients` clients, each of which waits for the answers of all servers."""
    until, done = time.perf_counter() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        connections = [await asyncio.open_connection("127.0.0.1", port) for port in ports]
        while time.perf_counter() < until:
            body = json.dumps({"inputs": rng.choice(texts)}).encode()
            await asyncio.gather(*(ask(connection, body) for connection in connections))
            done += 1
        for _, writer in connections:
            writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return done / (time.perf_counter() - start)


async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], body: bytes) -> None:
    """Send one request, and read its answer."""
    reader, writer = connection
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
    if " 200 " not in answer.splitlines()[0] or length is None:
        raise SystemExit(answer)
    await reader.readexactly(int(length[1]))


if __name__ == "__main__":
    main()
