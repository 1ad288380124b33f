"""Cells as tasks of Ray, on this machine or a cluster; a task whose worker died is tried again."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from lamina.errors import ConfigError, MissingExtraError, first_line

LOCAL, AUTO = "local", "auto"  # addresses: a cluster of this machine alone, the one that runs here
RETRIES = 3  # of a cell whose worker died
_STORE_BYTES = 1 << 27  # of shared memory, for a cluster that is started here; tables of cells are small
_ANSWER_S = 10.0  # within which an address must answer; Ray itself waits for many minutes
C = TypeVar("C")
R = TypeVar("R")


def as_ray_tasks(
    run: Callable[[C, str], R], died: Callable[[C, str], R], todo: Mapping[int, C], address: str, op: str
) -> Iterator[tuple[int, R]]:
    """What `run` gives for each cell and `op`, as they end; or `died`, if its worker died each time that it was tried.

    Where the cluster has GPUs, each cell gets one to itself.

    Raises:
        ConfigError: If no cluster answers at the address, or a cell cannot be pickled.
        MissingExtraError: If Ray is not installed.
    """
    try:
        import ray as ray_module
        from ray.exceptions import RayError
    except ImportError as error:
        raise MissingExtraError.of(error, op=op, extra="ray") from error

    ray: Any = ray_module
    with connected(ray, address, op):
        options = {"max_retries": RETRIES, "num_gpus": int(ray.cluster_resources().get("GPU", 0) > 0)}
        task = ray.remote(**options)(run)
        try:
            numbers = {task.remote(cell, op): number for number, cell in todo.items()}
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            hint = "Give its work as functools.partial of a function of a module, over plain data."
            raise ConfigError(f"{op}: a cell cannot be sent to a worker ({first_line(error)}). {hint}") from error
        while numbers:
            (ended, *_), _ = ray.wait(list(numbers), num_returns=1)
            number = numbers.pop(ended)
            try:
                outcome = ray.get(ended)
            except RayError as error:
                outcome = died(todo[number], f"{type(error).__name__}: its worker died {RETRIES + 1} times")
            yield number, outcome


@contextmanager
def connected(ray: Any, address: str, op: str) -> Iterator[None]:
    """Use the cluster that this process is connected to already, or connect for as long as the cells run."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else a cluster that is started here reports to Ray's makers
    _check_address(address, op)
    options: dict[str, Any] = {"address": address, "logging_level": "ERROR", "log_to_driver": False}
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
    """Raise ConfigError unless something answers there."""
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
