"""The waiting times of served texts in a simulation: the server's own queue, with passes of a given cost.

    python benchmarks/waiting.py [--json] [--requests 3000]

Nothing is measured, so the result is the same on every machine. A pass takes a fixed time and a time for each token,
padding included, as measured for MiniLM with eight readers and one thread: 8 ms and 0.22 ms in PyTorch, 3 ms and 0.20
ms in ONNX Runtime. Texts of 1 to 64 words come at random moments at half of the rate that full batches reach, times the
number of passes that run at once. In the rows with `long`, every fiftieth request has 32 texts instead of one, and half
as many requests come. `overhead` is the fixed cost in tokens by which the queue groups texts. `p50` and `p99` are
percentiles of the time from a request to its answer over the time of a pass over one text of 64 words; `long p99` is
that of the long requests. `piece` is the number of tokens after which a long request lets others have a turn. Aim for
p99: at most 4.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import TYPE_CHECKING, Any

from common import report

from lamina.data.batches import Budget, length_batches
from lamina.serve.queue import Job, JobQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

COSTS = {"torch": (0.008, 0.00022), "onnx": (0.003, 0.0002)}  # seconds of a pass, and of each of its tokens
OVERHEADS = {"torch": (64, 32), "onnx": (64, 12)}  # the former value for all, and the present one
WORKER: Any = object()
SLICE, LONG_TEXTS, EVERY = 2048, 32, 50


def text(rng: random.Random) -> str:
    """Return a text of 1 to 64 words, which the queue takes for 1.25 tokens each."""
    return "abcd " * rng.randint(1, 64)


def pass_seconds(jobs: Sequence[Job[Any]], cost: tuple[float, float], overhead: int, max_tokens: int) -> list[float]:
    """Return the time of each pass over the texts of a batch."""
    lengths = [length for job in jobs for length in job.lengths]
    passes = length_batches(lengths, 4096, budget=Budget(max_tokens, overhead))
    return [cost[0] + cost[1] * len(rows) * max(lengths[row] for row in rows) for rows in passes]


def full_rate(cost: tuple[float, float], overhead: int) -> float:
    """Return the texts per second of full batches, of 64 texts that wait at a time."""
    rng, taken = random.Random(1), list[float]()
    for _ in range(20):
        jobs = [Job([text(rng)], WORKER, truncate=True) for _ in range(64)]
        taken.append(sum(pass_seconds(jobs, cost, overhead, SLICE)))
    return 64 / statistics.fmean(taken)


def waited(
    rate: float, cost: tuple[float, float], overhead: int, passes: int, requests: int, *, piece: int, long: bool
) -> tuple[list[float], list[float]]:
    """Return the seconds until the answer of every request with one text, and of every long request."""
    rng, now = random.Random(0), 0.0
    arrivals: list[Job[Any]] = []
    for number in range(requests):
        now += rng.expovariate(rate)
        texts = [text(rng) for _ in range(LONG_TEXTS if long and number % EVERY == 0 else 1)]
        arrivals.append(Job(texts, WORKER, truncate=True, since=now))
    waiting, free = JobQueue(), [0.0] * passes
    paused: list[tuple[Job[Any], list[float]]] = []  # a long request, and the times of its passes that are left
    times: tuple[list[float], list[float]] = ([], [])
    is_new_next = False
    while arrivals or len(waiting) or paused:
        start = min(free)
        if not len(waiting) and not paused:
            start = max(start, arrivals[0].since)
        while arrivals and arrivals[0].since <= start:
            waiting.add(arrivals.pop(0))
        if paused and not (is_new_next and len(waiting)):
            job, rest = paused.pop(0)
            batch, is_new_next = [job], True
        else:
            batch, is_new_next = waiting.take(Budget(SLICE, overhead), piece), False
            rest = pass_seconds(batch, cost, overhead, piece if len(batch) == 1 else SLICE)
        taken = rest.pop(0) if len(batch) == 1 else sum(rest)
        end = start + taken
        free[free.index(min(free))] = end
        if len(batch) == 1 and rest:
            paused.append((batch[0], rest))
            continue
        for job in batch:
            times[len(job.texts) > 1].append(end - job.since)
    return times


def row(engine: str, overhead: int, passes: int, requests: int, *, piece: int = 256, long: bool) -> dict[str, Any]:
    """Return the table row of one simulation."""
    cost = COSTS[engine]
    rate = 0.5 * passes * full_rate(cost, OVERHEADS[engine][0]) * (0.5 if long else 1)
    short_times, long_times = waited(rate, cost, overhead, passes, requests, piece=piece, long=long)
    one = cost[0] + cost[1] * 66
    cuts = statistics.quantiles(short_times, n=100)
    return {
        "engine": engine,
        "passes": passes,
        "overhead": overhead,
        "long": "yes" if long else "",
        "piece": piece,
        "texts/s": rate,
        "p50": cuts[49] / one,
        "p99": cuts[98] / one,
        "long p99": statistics.quantiles(long_times, n=100)[98] / one if long else "",
    }


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--requests", type=int, default=3000, help="requests of each simulation (default %(default)s)")
    parser.add_argument("--repeats", type=int, help="ignored, because every run gives the same")
    args = parser.parse_args()
    rows = [
        row(engine, overhead, passes, args.requests, long=False)
        for engine in COSTS
        for passes in (1, 2)
        for overhead in OVERHEADS[engine]
    ]
    rows += [
        row(engine, OVERHEADS[engine][1], 1, args.requests, piece=piece, long=True)
        for engine in COSTS
        for piece in (SLICE, 512, 256)
    ]
    report(rows, as_json=args.json)


if __name__ == "__main__":
    main()
