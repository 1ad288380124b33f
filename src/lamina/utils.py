"""What every room may use: range checks, atomic writes, derived seeds, the processes of a run, progress bars."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def check_range(op: str, name: str, value: float, low: float, high: float, *, open_high: bool = False) -> None:
    """Raise ConfigError unless low <= value <= high (or < high)."""
    if not (low <= value < high if open_high else low <= value <= high):
        bound = f"{low} <= {name} {'<' if open_high else '<='} {high}"
        raise ConfigError(f"{op}: {name} is {value}; it must be {bound}. Change it.")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text under a temporary name, then move it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same in every process."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def first_line(error: Exception) -> str:
    """What an error of another library says, as far as a message can quote it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def rank() -> int:
    """The number of this process among those of the run, from 0."""
    return _group().get_rank() if _distributed() else 0


def world_size() -> int:
    """How many processes share the run."""
    return _group().get_world_size() if _distributed() else 1


def barrier() -> None:
    """Wait until every process of the run is here."""
    if world_size() > 1:
        _group().barrier()


def _group() -> Any:
    from torch import distributed

    return distributed


def _distributed() -> bool:
    return _group().is_available() and _group().is_initialized()


def progress_bar(batches: Iterable[Any], *, show: bool, **options: Any) -> Any:
    """The batches, with a progress bar on standard error where one is wanted.

    Args:
        batches: What is iterated over.
        show: Whether there is a bar.
        **options: For `tqdm`, such as `desc` and `unit`.
    """
    if not show:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, **options)
