"""What every room may use: range checks, atomic writes, derived seeds, the processes of a run, progress bars."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any, TypeAlias

from lamina.errors import ConfigError, StoreError, convert_errors

# What a JSON file can hold, and one row of a table: column -> value.
JSON: TypeAlias = bool | int | float | str | Sequence[Any] | Mapping[str, Any] | None
Row: TypeAlias = Mapping[str, JSON]


def check_range(
    op: str, name: str, value: float | None, low: float, high: float = math.inf, *, open_high: bool = False
) -> None:
    """Raise ConfigError unless low <= value <= high (or < high); None passes."""
    if value is None or (low <= value < high if open_high else low <= value <= high):
        return
    top = f" and {'below' if open_high else 'at most'} {high}" if high < math.inf else " and finite" * open_high
    raise ConfigError(f"{op}: {name} is {value}; it must be at least {low}{top}.")


MAX_BYTES = 1 << 26  # of a file of settings, and of a line of a file of examples
_DEPTH = 100  # of lists and mappings within each other


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file; a ValueError if there are more than `most`."""
    with path.open("rb") as file:
        if len(data := file.read(most + 1)) > most:
            raise ValueError(f"it has more than {most:,} bytes")
    return data


def parse_json(text: str) -> Any:
    """What a JSON text says; a ValueError if it is none, or is nested more than 100 deep."""
    with suppress(RecursionError):
        value = json.loads(text)
        level = [value] if text.count("[") + text.count("{") > _DEPTH else []
        for _ in range(_DEPTH + 1):
            nested = (
                part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)
            )
            level = [child for children in nested for child in children]
        if not level:
            return value
    raise ValueError(f"it is nested more than {_DEPTH} deep")


def pluralize(count: int, what: str) -> str:
    """How many, and of what: "1 run", "1,200 runs"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def is_dir(path: str | Path) -> bool:
    """Whether there is such a folder; False where pathlib raises an OSError up to Python 3.13, for too long a name."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; see `is_dir`."""
    return os.path.isfile(path)  # noqa: PTH113


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside a file; what is written there takes the file's place once it is whole.

    The folder is made if it is not there.

    Raises:
        StoreError: If it cannot be written.
    """
    hint = "Check the rights and the space there."
    with convert_errors(lambda reason: StoreError(f"save: {path} cannot be written ({reason}). {hint}")):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}{get_ident()}")
        try:
            yield beside
            fsync(beside)
            beside.replace(path)
        finally:
            with suppress(OSError):
                beside.unlink()


def fsync(path: Path) -> None:
    """Have a file on the disk, where it outlasts a loss of power."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of `atomic_write` that dead processes left beside `path`; the caller holds its lock."""
    for beside in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if beside.stem == f".{path.name}" and beside.suffix[1:].isdecimal():
            beside.unlink()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file that is replaced whole or not at all."""
    with atomic_write(path) as beside:
        beside.write_text(text, encoding="utf-8")


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same in every process."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int) -> None:
    """`torch.manual_seed`, but where there is only a CPU without the traceback that it formats (0.4 ms)."""
    import torch

    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def rank() -> int:
    """The number of this process among those of the run, from 0."""
    group = _group()
    return group.get_rank() if group else 0


def world_size() -> int:
    """How many processes share the run."""
    group = _group()
    return group.get_world_size() if group else 1


def barrier() -> None:
    """Wait until every process of the run is here."""
    if world_size() > 1:
        _group().barrier()


def _group() -> Any:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def progress_bar(batches: Iterable[Any], *, show: bool, **options: Any) -> Any:
    """The batches, with `tqdm`'s bar on standard error (and its `options`, such as `desc`) if `show`."""
    if not show:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, **options)
