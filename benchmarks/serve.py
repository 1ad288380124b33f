"""The speed of a served bank of 8 readers on MiniLM: texts per second relative to the bank in bulk, and response times.

    python benchmarks/serve.py [--json] [--repeats 3] [--seconds 10] [--clients 64] [--backend onnx] [--passes 1 2]

`lamina serve` runs in its own process with torch's default number of threads. Each client sends one text of 1 to 64
words and waits for the answer before it sends the next (a closed loop). In each round the bank first answers the same
texts in bulk in this process, then over HTTP, so that the two never run at the same time. `ratio` is the median of the
rounds' ratios of texts per second, `from` and `to` are its range. Budget: at least 0.85.

The second table has response times for texts that come at random moments, at a fraction (`load`) of the rate that the
closed loop reached: the 99th percentile over the median time of a pass over one text of 64 words. Budget at load 0.5:
at most 3. `passes` is the number of passes that the server may run at the same time (`--max-concurrent-passes`); bulk
always runs one pass at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import bank_of, report

from lamina.demo.corpus import write
from lamina.prediction.predict import Predictor
from lamina.store import load, save_bank
from lamina.train.options import PassOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lamina.bank import ReaderBank

READERS, MAX_WORDS, TEXTS = 8, 64, 2048
PASSES, LOADS = (1, 2), (0.25, 0.5)
BUDGET, WAIT = 0.85, 3.0


def main() -> None:
    """Serve, send requests, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=3, help="counted rounds (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each loop")
    parser.add_argument("--clients", type=int, default=64, help="that ask at the same time (default %(default)s)")
    parser.add_argument("--passes", type=int, nargs="+", default=PASSES, help="passes at a time (default 1 and 2)")
    parser.add_argument("--backend", default="torch", help="of the server; bulk always runs in PyTorch")
    args = parser.parse_args()
    rates: list[dict[str, float]] = []
    waits: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bank = served_bank()
        save_bank(bank, Path(folder) / "bank")
        texts = texts_of(Path(folder))
        bulk = Predictor(bank, PassOptions(batch_size=args.clients))
        bulk(texts[: args.clients])
        own = pass_seconds(bank)
        for passes in args.passes:
            with serving(Path(folder) / "bank", passes, args.backend) as address:
                asyncio.run(closed(address, texts, args.clients, 2.0))  # to warm up
                rounds: list[tuple[float, float]] = []
                for _ in range(args.repeats):
                    alone = rate_of(bulk, texts, args.seconds)
                    rounds.append((alone, asyncio.run(closed(address, texts, args.clients, args.seconds))))
                rates.append(rate_row(passes, rounds))
                for load in LOADS:
                    rate = load * rates[-1]["served texts/s"]
                    cuts = statistics.quantiles(asyncio.run(open_loop(address, texts, rate, 3 * args.seconds)), n=100)
                    waits.append(
                        {
                            "passes": passes,
                            "load": load,
                            "texts/s": rate,
                            "p50 ms": 1000 * cuts[49],
                            "p99 ms": 1000 * cuts[98],
                            "pass ms": 1000 * own,
                            "p99 / pass": cuts[98] / own,
                            "budget": WAIT if load == 0.5 else "",
                        }
                    )
    report(rates, as_json=args.json)
    report(waits, as_json=args.json)


def rate_row(passes: int, rounds: list[tuple[float, float]]) -> dict[str, float]:
    """Return the table row of rounds (texts per second in bulk, and served)."""
    ratios = [served / alone for alone, served in rounds]
    return {
        "passes": passes,
        "bulk texts/s": statistics.median(alone for alone, _ in rounds),
        "served texts/s": statistics.median(served for _, served in rounds),
        "ratio": statistics.median(ratios),
        "from": min(ratios),
        "to": max(ratios),
        "budget": BUDGET,
    }


def served_bank() -> ReaderBank:
    """Return a bank with the default readers of whole texts on MiniLM."""
    model, tokenizer = load("minilm")
    return bank_of(model, READERS, "pooled_layers", tokenizer)


def texts_of(folder: Path) -> list[str]:
    """Return texts of 1 to 64 words from the demo's sentences."""
    corpus = write(folder / "corpus", rows=1000)["train"].read_text(encoding="utf-8").splitlines()
    words, rng = [word for line in corpus for word in json.loads(line)["text"].split()], random.Random(0)
    starts = [(rng.randrange(len(words) - MAX_WORDS), rng.randint(1, MAX_WORDS)) for _ in range(TEXTS)]
    return [" ".join(words[start : start + count]) for start, count in starts]


@contextmanager
def serving(bank: Path, passes: int, backend: str) -> Iterator[tuple[str, int]]:
    """Yield host and port of a server in its own process."""
    command = [sys.executable, "-c", "from lamina.cli import main; main()", "serve", str(bank), "--port", "0"]
    command += ["--max-concurrent-passes", str(passes), "--backend", backend]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.findall(r"http://([^:]+):(\d+)", next(iter(process.stdout or ()), ""))
        if not found:
            raise SystemExit("the server did not start")
        yield found[0][0], int(found[0][1])
    finally:
        process.terminate()
        process.wait(60)


def rate_of(bulk: Predictor, texts: list[str], seconds: float) -> float:
    """Return texts per second in bulk."""
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        part = [texts[(done + at) % len(texts)] for at in range(512)]
        done += len(bulk(part))
    return done / (time.perf_counter() - start)


def pass_seconds(bank: ReaderBank, repeats: int = 30) -> float:
    """Return the median seconds to tokenise, run and answer one text of 64 words in this process."""
    predictor = Predictor(bank, PassOptions(batch_size=64))
    taken: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        predictor(["word " * MAX_WORDS])
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


async def closed(address: tuple[str, int], texts: list[str], clients: int, seconds: float) -> float:
    """Return texts per second of `clients` clients, each of which waits for its answer."""
    until, done = time.perf_counter() + seconds, 0

    async def client(number: int) -> None:
        nonlocal done
        rng = random.Random(number)
        connection = await asyncio.open_connection(*address)
        while time.perf_counter() < until:
            await ask(connection, rng.choice(texts))
            done += 1
        connection[1].close()

    start = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    return done / (time.perf_counter() - start)


async def open_loop(address: tuple[str, int], texts: list[str], rate: float, seconds: float) -> list[float]:
    """Return response times for texts sent at a given rate, whether or not earlier texts were answered."""
    rng, times = random.Random(0), list[float]()
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def one(text: str) -> None:
        start = time.perf_counter()
        while free and free[-1][0].at_eof():  # the server closes those that were not used for some seconds
            free.pop()[1].close()
        connection = free.pop() if free else await asyncio.open_connection(*address)
        await ask(connection, text)
        times.append(time.perf_counter() - start)
        free.append(connection)

    asking: list[asyncio.Task[None]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        asking.append(asyncio.create_task(one(rng.choice(texts))))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*asking)
    for _, writer in free:
        writer.close()
    return times


async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], text: str) -> None:
    """Send one request, and read its answer."""
    reader, writer = connection
    body = json.dumps({"inputs": text}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    answer = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = re.findall(r"content-length: (\d+)", answer)
    if not answer.startswith("HTTP/1.1 200") or not lengths:
        raise SystemExit(answer)
    await reader.readexactly(int(lengths[0]))


if __name__ == "__main__":
    main()
