"""What every room may use: range checks, errors of others, atomic writes, derived seeds, processes, progress bars."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lamina.errors import ConfigError, LaminaError, StoreError


def check_range(
    op: str, name: str, value: float | None, low: float, high: float = math.inf, *, open_high: bool = False
) -> None:
    """Raise ConfigError unless low <= value <= high (or < high); None passes."""
    if value is None or (low <= value < high if open_high else low <= value <= high):
        return
    top = f" and {'below' if open_high else 'at most'} {high}" if high < math.inf else " and finite" * open_high
    raise ConfigError(f"{op}: {name} is {value}; it must be at least {low}{top}.")


@contextmanager
def foreign_errors(to_error: Callable[[str], LaminaError], kind: type[Exception] = Exception) -> Generator[None]:
    """Raise what `to_error` makes of the reason in place of any error of that kind by a library or the system.

    Reading, writing and loading go through here; by default it takes all, which come in too many kinds to list.
    """
    try:
        yield
    except LaminaError:
        raise
    except kind as error:
        raise to_error(first_line(error)) from error


def is_dir(path: str | Path) -> bool:
    """Whether there is such a folder; False where pathlib raises an OSError up to Python 3.13, for too long a name."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; see `is_dir`."""
    return os.path.isfile(path)  # noqa: PTH113


def first_line(error: Exception) -> str:
    """What an error of another library says, as far as a message can quote it: one line, without its full stop."""
    lines = [line.strip() for line in str(getattr(error, "strerror", None) or error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    if not said or isinstance(error, LookupError):
        said = f"{type(error).__name__} {said}"
    return said[:300].strip().rstrip(".")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside a file; what is written there takes the file's place once it is whole.

    The folder is made if it is not there.

    Raises:
        StoreError: If it cannot be written.
    """
    hint = "Check the rights and the space there."
    with foreign_errors(lambda reason: StoreError(f"save: {path} cannot be written ({reason}). {hint}")):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            yield beside
            beside.replace(path)
        finally:
            with suppress(OSError):
                beside.unlink()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file that is replaced whole or not at all."""
    with replacing(path) as beside:
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


@contextmanager
def bars_of_others(*, show: bool) -> Iterator[None]:
    """Keep transformers, datasets and the hub from showing bars of their own here, unless `show`."""
    import datasets
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging

    shown = {
        (logging.disable_progress_bar, logging.enable_progress_bar): logging.is_progress_bar_enabled(),
        (datasets.disable_progress_bars, datasets.enable_progress_bars): datasets.is_progress_bar_enabled(),
        (disable_progress_bars, enable_progress_bars): not are_progress_bars_disabled(),
    }
    changed = [switch for switch, is_shown in shown.items() if is_shown and not show]
    try:
        for disable, _ in changed:
            disable()
        yield
    finally:
        for _, enable in changed:
            enable()


def progress_bar(batches: Iterable[Any], *, show: bool, **options: Any) -> Any:
    """The batches, with `tqdm`'s bar on standard error (and its `options`, such as `desc`) if `show`."""
    if not show:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, **options)
