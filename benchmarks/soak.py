"""A server under load for a long time: wrong or lost answers, and growth of memory.

    python benchmarks/soak.py [--json] [--part live] [--part replicas] [--requests 100000] [--clients 32] [--passes 1]

The bank is three readers on a tiny BERT with random weights, since the server is tested, not the model. Clients send
requests in a closed loop; one in twenty disconnects before its answer comes. Two of the readers are equal except for
their names, and are replaced together, so that an answer from a half-finished change would be noticed.

live: `lamina serve`, whose readers are replaced (POST /readers) and reloaded (SIGHUP) all the time.

replicas: `lamina serve --ray local --replicas 2`; every ten seconds one replica is killed, if both have started.
Requests that a dying replica holds are answered with status 500. The client then sends them again; `asked again` counts
this.

`wrong`: answers that differ by more than 1e-4 from those of both the old and the new readers. `lost`: requests without
an answer. `MB at` has the memory of the server's processes after a tenth of the requests and after all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from common import report
from transformers import BertConfig, BertModel

from lamina import PooledLayers, Reader, ReaderBank, SequenceClassification, predict
from lamina.store import load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

KEY, HANG_UP, TEXTS, KILL_S = "soak", 0.05, 64, 10.0
WORDS = [
    "the",
    "pasta",
    "at",
    "this",
    "place",
    "was",
    "not",
    "bad",
    "but",
    "cold",
    "and",
    "nobody",
    "said",
    "a",
    "word",
]


def main() -> None:
    """Serve, send requests, disturb the server, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--part", action="append", choices=["live", "replicas"], help="default: both")
    parser.add_argument("--requests", type=int, default=100_000, help="in all (default %(default)s)")
    parser.add_argument("--clients", type=int, default=32, help="that ask at the same time (default %(default)s)")
    parser.add_argument("--passes", type=int, default=1, help="that a server runs at once (default %(default)s)")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        right = make(folder)
        for part in args.part or ["live", "replicas"]:
            rows.append(soak(part, folder, right, args))
    report(rows, as_json=args.json)
    if any(row["wrong"] or row["lost"] for row in rows):
        raise SystemExit(1)


def make(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Save a model and two banks; return text -> for each bank, task -> score of "yes"."""
    torch.manual_seed(0)
    tokenizer = load("minilm")[1]
    shape: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    model = load(folder / "base")[0]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 40))) for _ in range(TEXTS)]
    right: dict[str, list[dict[str, float]]] = {text: [] for text in texts}
    for seed in (0, 1):
        bank = bank_of(model, tokenizer, seed)
        bank.save_pretrained(folder / "banks" / f"v{seed}")
        for text, said in zip(texts, predict(bank, texts), strict=True):
            right[text].append({task: answer["probabilities"]["yes"] for task, answer in said.items()})
    return right


def bank_of(model: PreTrainedModel, tokenizer: Any, seed: int) -> ReaderBank:
    """Return a bank with three readers, of which "a" and "b" are equal."""
    bank = ReaderBank(model, tokenizer)
    for task in ("a", "b", "c"):
        own = 2 * seed + (task == "c")
        reader = bank.add(task, Reader(PooledLayers(dim=16), SequenceClassification(("no", "yes")), seed=own))
        with torch.no_grad():  # far from one half
            for number, parameter in enumerate(reader.parameters()):
                parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(97 * own + number))
    return bank.eval()


def soak(part: str, folder: Path, right: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run one part of the test, and return its table row."""
    more = ["--max-concurrent-passes", str(args.passes)]
    more += {
        "live": ["--admin-key", KEY, "--readers-root", str(folder / "banks")],
        "replicas": ["--ray", "local", "--replicas", "2", "--replica-cpus", "0.5"],
    }[part]
    with serving(folder / "banks" / "v0", more) as (address, process):
        run = Run(address, process, right, args.requests)
        start = time.perf_counter()
        asyncio.run(run.all(args.clients, disturb=run.replace_readers if part == "live" else run.kill_replicas))
        seconds = time.perf_counter() - start
    return {
        "part": part,
        "requests": run.begun,
        "hung up": run.seen["hung up"],
        "answered": run.seen["answered"],
        "asked again": run.seen["again"],
        "wrong": run.seen["wrong"],
        "lost": run.begun - run.seen["hung up"] - run.seen["answered"],
        "changes" if part == "live" else "kills": run.seen["disturbed"],
        "requests/s": run.begun / seconds,
        "MB at 10 %": run.memory[0],
        "MB at the end": run.memory[-1],
    }


@contextmanager
def serving(bank: Path, more: list[str]) -> Iterator[tuple[tuple[str, int], subprocess.Popen[str]]]:
    """Yield address and process of a server."""
    command = [sys.executable, "-c", "from lamina.cli import main; main()", "serve", str(bank), "--port", "8765", *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout or ():
            if found := re.search(r"http://([^:]+):(\d+) \(", line):
                yield (found[1], int(found[2])), process
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)


@dataclass
class Run:
    """The clients, and a coroutine that disturbs the server meanwhile."""

    address: tuple[str, int]
    process: subprocess.Popen[str]
    right: dict[str, Any]
    requests: int
    begun: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)

    async def all(self, clients: int, disturb: Any) -> None:
        """Send all requests, with `clients` clients at a time."""
        disturbing = asyncio.create_task(disturb())
        await asyncio.gather(*(self.client(random.Random(number)) for number in range(clients)))
        disturbing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await disturbing
        self.note_memory()

    async def client(self, rng: random.Random) -> None:
        """Run one client until all requests were sent."""
        texts = list(self.right)
        while self.begun < self.requests:
            self.begun += 1
            if self.begun == self.requests // 10:
                self.note_memory()
            text = rng.choice(texts)
            if rng.random() < HANG_UP:
                await self.hang_up(text)
                self.seen["hung up"] += 1
                continue
            for _ in range(20):
                status, answer = await self.ask("POST", "/predict", {"inputs": text})
                if status == 200:
                    self.seen["answered"] += 1
                    self.seen["wrong"] += not self.is_right(text, answer)
                    break
                self.seen["again"] += 1
                await asyncio.sleep(0.2)

    def is_right(self, text: str, answer: dict[str, list[dict[str, Any]]]) -> bool:
        """Return whether an answer equals that of one bank alone, the old or the new."""
        said = {task: {one["label"]: one["score"] for one in found}["yes"] for task, found in answer.items()}
        return any(
            said.keys() == own.keys() and all(abs(said[task] - own[task]) < 1e-4 for task in own)
            for own in self.right[text]
        )

    async def ask(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Send a request on its own connection; return status and answer (status 0: the connection broke)."""
        try:
            reader, writer = await asyncio.open_connection(*self.address)
            writer.write(self.request(method, path, body))
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
            content = await (reader.readexactly(int(length[1])) if length else reader.read())
            writer.close()
            return int(head.split()[1]), json.loads(content) if content.startswith((b"{", b"[")) else None
        except (OSError, asyncio.IncompleteReadError):
            return 0, None

    async def hang_up(self, text: str) -> None:
        """Send a request and disconnect without waiting for the answer."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(*self.address)
            writer.write(self.request("POST", "/predict", {"inputs": text}))
            await writer.drain()
            writer.close()

    def request(self, method: str, path: str, body: Any) -> bytes:
        """Return a request as bytes."""
        data = json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Authorization: Bearer {KEY}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}", "", ""]
        return "\r\n".join(lines).encode() + data

    async def replace_readers(self) -> None:
        """Replace the served readers again and again: all of them, or by a reload."""
        for turn in range(1 << 30):
            await asyncio.sleep(0.25)
            if turn % 10 == 9:
                self.process.send_signal(signal.SIGHUP)
            else:
                status, _ = await self.ask("POST", "/readers", {"folder": f"v{1 - turn % 2}"})
                if status != 200:
                    raise SystemExit(f"a change was answered with {status}")
            self.seen["disturbed"] += 1

    async def kill_replicas(self) -> None:
        """Kill a random replica every `KILL_S` seconds."""
        rng = random.Random(0)
        while True:
            await asyncio.sleep(KILL_S)
            found = [one for one in self.below() if is_replica(one)]
            if len(found) == 2:
                rng.choice(found).kill()
                self.seen["disturbed"] += 1

    def below(self) -> list[psutil.Process]:
        """Return the server's process and its children."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def note_memory(self) -> None:
        """Record the memory in use by the server."""
        sizes: list[int] = []
        for one in self.below():
            with contextlib.suppress(psutil.Error):
                sizes.append(one.memory_info().rss)
        self.memory.append(sum(sizes) / 1e6)


def is_replica(process: psutil.Process) -> bool:
    """Return whether a process is a running replica; one that is still starting is spared, or none would ever run."""
    try:
        title = " ".join(process.cmdline()).strip()
        return "ServeReplica" in title and not title.endswith("__init__")
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
