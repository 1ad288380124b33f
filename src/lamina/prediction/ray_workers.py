"""Connect to Ray, and let its workers process items in order. If a worker dies, its items are processed again."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

from lamina.errors import ConfigError, LaminaError, MissingExtraError, first_line

LOCAL, AUTO = "local", "auto"  # addresses: a new cluster on this machine, the one that runs here
RETRIES = 3  # how often Ray restarts a worker that died
_STORE_BYTES = 1 << 27  # shared memory of a new cluster; results are small
_ANSWER_S = 10.0  # seconds until an address must answer; Ray itself waits for many minutes
C = TypeVar("C")
R = TypeVar("R")


def in_order(work: Callable[[C], R], address: str, workers: int | None, op: str, items: Iterable[C]) -> Iterator[R]:
    """Yield `work(item)` for each item, in order, computed by Ray workers that each hold a copy of `work`.

    Each worker has two items at a time, so that neither the workers nor this process wait. If `work` has a method
    `begin`, each worker calls it before its first item.

    Args:
        work: A function or object that can be pickled.
        address: "local" (start a cluster on this machine), "auto" (the one that runs here) or HOST:PORT.
        workers: Number of workers. None: one per GPU of the cluster or, without GPUs, one per core.
        op: The operation, with which error messages begin.
        items: Items that can be pickled. An error in this iterator is raised after the answers of the items before it.

    Raises:
        ConfigError: If no cluster answers at the address, or it has no room for so many workers.
        LaminaError: If a worker died several times, or `work` raised an error that cannot be pickled.
        MissingExtraError: If Ray is not installed.
        Exception: The error that `work` raised, after the answers of the items before it. The item is not tried again.
    """
    ray = import_ray(op)
    with connected(ray, address, op):
        have = ray.cluster_resources()
        gpus, cores = int(have.get("GPU", 0)), int(have.get("CPU", 0))
        count = workers or max(1, gpus or cores)
        if count > max(gpus or cores, 1):
            raise ConfigError(f"{op}: {count} workers were asked for; the cluster has {cores} cores and {gpus} GPUs.")
        options = {"num_cpus": 1, "num_gpus": int(gpus > 0), "max_restarts": RETRIES, "max_task_retries": RETRIES}
        worker, held = ray.remote(**options)(_Worker), ray.put(work)
        actors = [worker.remote(held) for _ in range(count)]
        pending: deque[tuple[int, C, object]] = deque()
        source, ended = enumerate(items), None
        while ended is None or pending:
            while ended is None and len(pending) < 2 * count:
                try:
                    number, item = next(source)
                    pending.append((number % count, item, actors[number % count].run.remote(item)))
                except Exception as error:  # StopIteration too
                    ended = error
            if pending:
                place, item, answer = pending.popleft()
                try:
                    result = _result(ray, answer, op)
                except ray.exceptions.RayError:
                    # The next item may have ended the worker before this answer was sent. A new worker gets it alone.
                    actors[place] = worker.remote(held)
                    result = _alone(ray, actors[place], item, op)
                yield result
        if not isinstance(ended, StopIteration):
            raise ended


def _result(ray: ModuleType, answer: object, op: str) -> Any:
    """Wait for an answer of a worker and return it.

    Raises the error that the work raised, or LaminaError, which begins with `op`, if that error cannot be pickled; and
    Ray's error if the worker died.
    """
    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RayError):  # stands for an error that cannot be pickled
            raise LaminaError(f"{op}: the work failed ({first_line(error.cause)}).") from error
        raise error.cause from error


def _alone(ray: ModuleType, actor: Any, item: object, op: str) -> Any:
    """Send one item to the worker `actor`, and return the result.

    Raises LaminaError, which begins with `op`, if the worker dies, and the errors of `_result`.
    """
    try:
        return _result(ray, actor.run.remote(item), op)
    except ray.exceptions.RayError as error:
        kept = "Earlier answers are kept; run again to continue"
        raise LaminaError(f"{op}: a worker of Ray died ({first_line(error)}). {kept}.") from error


class _Worker:
    """A Ray actor that holds its own copy of `work`, calls `work.begin()` if there is such a method, and runs items."""

    def __init__(self, work: Callable[[object], object]) -> None:
        self._work, self._begin = work, getattr(work, "begin", None)

    def run(self, item: object) -> object:
        if self._begin is not None:  # not in `__init__`: Ray would report its errors as the death of the worker
            self._begin()
            self._begin = None
        return self._work(item)


def import_ray(op: str) -> ModuleType:
    """Import Ray and return the module; raise MissingExtraError, which names `op`, if it is not installed."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError.of(error, op=op, extra="ray") from error
    return ray


@contextmanager
def connected(ray: ModuleType, address: str, op: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address` inside the `with` block, and disconnect at its end.

    If this process is already connected, that connection is used and stays. "local" starts a cluster on this machine,
    whose usage reports are off unless RAY_USAGE_STATS_ENABLED is set. Raises ConfigError, whose message begins with
    `op`, if `address` is malformed or no cluster answers.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else a cluster that is started here reports to Ray's makers
    _check_address(address, op)
    options: dict[str, object] = {"address": address, "logging_level": "ERROR", "log_to_driver": False}
    if address == LOCAL:
        options |= {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise _no_cluster(address, first_line(error), op) from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str, op: str) -> None:
    """Raise ConfigError, which begins with `op`, if an address is malformed or no server answers at HOST:PORT."""
    if address in (LOCAL, AUTO):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"{op}: ray is '{address}'; it must be '{LOCAL}', '{AUTO}' or an address as HOST:PORT.")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, first_line(error), op) from error


def _no_cluster(address: str, reason: str, op: str) -> ConfigError:
    hint = f"Start one with `ray start --head`, or use '{LOCAL}'."
    return ConfigError(f"{op}: no cluster of Ray answers at '{address}' ({reason}). {hint}")
