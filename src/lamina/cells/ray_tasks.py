"""Run cells as Ray tasks; a cell whose worker process died is tried again."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from lamina.errors import ConfigError, first_line
from lamina.prediction.ray_workers import RETRIES, connected, import_ray

C = TypeVar("C")
R = TypeVar("R")


def as_ray_tasks(
    run: Callable[[C, str], R], died: Callable[[C, str], R], todo: Mapping[int, C], address: str, op: str
) -> Iterator[tuple[int, R]]:
    """Yield (cell number, `run(cell, op)`) as cells end; `died(cell, reason)` for a cell whose worker kept dying.

    If the cluster has GPUs, each cell gets one to itself.

    Raises:
        ConfigError: If no cluster answers at the address, or a cell cannot be pickled.
        MissingExtraError: If Ray is not installed.
    """
    ray = import_ray(op)
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
            except ray.exceptions.RayError as error:
                outcome = died(todo[number], f"{type(error).__name__}: its worker died {RETRIES + 1} times")
            yield number, outcome
