"""Hidden states on disk: every window's real tokens, written once and read as often as needed.

One file per stack, an array `[tokens, layers, width]` without padding, so that all layers of a window lie side by side
and come with one read. Where a window begins follows from the lengths of those before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch

from lamina.data.batches import tokenizer_of
from lamina.data.cache_files import FORMAT, claim, entries, not_writable, read_entry, room
from lamina.errors import CacheError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from lamina.data.cache_files import Claim

    States = Mapping[str, Mapping[int, Tensor]]

DTYPES = {"float16": torch.float16, "float32": torch.float32}

logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Layout:
    """What an entry holds, and where.

    Attributes:
        lengths: Tokens of each window.
        layers: Stack -> layers, ascending.
        widths: Stack -> width.
        dtype: "float16" or "float32", of the files.

    Raises:
        UnknownNameError: If the dtype is another one.
    """

    lengths: tuple[int, ...]
    layers: Mapping[str, tuple[int, ...]]
    widths: Mapping[str, int]
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownNameError(op="cache", got=self.dtype, known=DTYPES, what="dtype")

    @cached_property
    def offsets(self) -> np.ndarray:
        """The first token of each window in the files, and the count of all tokens: one entry more than windows."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return int(self.offsets[-1])

    def token_bytes(self, stack: str) -> int:
        """Bytes of one token in the file of a stack."""
        return len(self.layers[stack]) * self.widths[stack] * DTYPES[self.dtype].itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return self.tokens * sum(self.token_bytes(stack) for stack in self.layers)

    def longest(self, rows: Sequence[int]) -> int:
        """Tokens that a batch of these windows has."""
        return max(self.lengths[row] for row in rows)

    def facts(self) -> dict[str, Any]:
        """What the index of an entry says about it."""
        return {
            "windows": len(self.lengths),
            "tokens": self.tokens,
            "layers": {stack: list(layers) for stack, layers in self.layers.items()},
            "widths": dict(self.widths),
            "dtype": self.dtype,
        }


def key_of(facts: Mapping[str, Any]) -> str:
    """The name of an entry: a hash of everything that its states depend on, and of the format."""
    text = json.dumps({**facts, "format": FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def hash_features(features: Sequence[Mapping[str, Sequence[int]]]) -> str:
    """A hash of what the model reads: every window's tokens, masks and kinds."""
    digest = hashlib.sha256()
    for feature in features:
        for name, row in sorted(feature.items()):
            digest.update(f"{name} {len(row)}\n".encode())
            digest.update(np.asarray(row, dtype="<i8").tobytes())
    return digest.hexdigest()


def hash_processor(processor: Any) -> str:
    """A hash of a tokenizer's class and of all it knows; settings of truncation and padding do not count."""
    tokenizer = tokenizer_of(processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        known: Any = sorted(tokenizer.get_vocab().items())
    else:
        known = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps([type(tokenizer).__name__, known], sort_keys=True).encode()).hexdigest()


@final
class StateWriter:
    """Writes one entry, windows in any order.

    Args:
        layout: What it will hold; room for all of it is taken at once.
        claim: The right to write it.
    """

    def __init__(self, layout: Layout, claim: Claim) -> None:
        self.layout, self._claim = layout, claim
        self._seen = np.zeros(len(layout.lengths), dtype=bool)
        self._dtype: torch.dtype | None = None
        self._files: dict[str, int] = {}
        try:
            for stack in layout.layers:
                path = claim.path / _file(stack)
                self._files[stack] = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
                _reserve(self._files[stack], layout.tokens * layout.token_bytes(stack))
        except OSError as error:
            self.abandon()
            raise not_writable(claim.path.parent, error) from error

    def write(self, rows: Sequence[int], states: States) -> None:
        """Store some windows.

        Args:
            rows: Their numbers.
            states: Stack -> layer -> `[batch, tokens, width]`, padded on the right.

        Raises:
            CacheError: If the states have not as many tokens as the windows, or are too large for the dtype, or cannot
                be written; nothing of the entry remains then.
        """
        try:
            self._write(rows, states)
        except BaseException:
            self.abandon()
            raise
        self._seen[list(rows)] = True

    def _write(self, rows: Sequence[int], states: States) -> None:
        for stack, layers in self.layout.layers.items():
            block = self._block(rows, [states[stack][layer] for layer in layers], stack)
            size = self.layout.token_bytes(stack)
            for at, row in enumerate(rows):
                kept = block[at, : self.layout.lengths[row]]
                data = memoryview(cast("Any", kept)).cast("B")  # numpy's stubs hide that arrays are buffers
                self._put(self._files[stack], data, int(self.layout.offsets[row]) * size)

    def _block(self, rows: Sequence[int], states: Sequence[Tensor], stack: str) -> np.ndarray:
        """`[batch, tokens, layers, width]` as it is stored."""
        longest = self.layout.longest(rows)
        shape = (len(rows), longest, self.layout.widths[stack])
        if tuple(states[0].shape) != shape:
            raise CacheError(
                f"cache: the model's states are {tuple(states[0].shape)} for windows of {shape}; only models that keep "
                "every token can be cached. Go without a cache."
            )
        self._dtype = states[0].dtype
        block = torch.stack([state.detach() for state in states], dim=2).to("cpu", DTYPES[self.layout.dtype])
        for at, row in enumerate(rows):
            block[at, self.layout.lengths[row] :] = 0
        if not block.isfinite().all():
            raise CacheError(
                f"cache: some states are beyond the range of {self.layout.dtype}, or not numbers; they would not come "
                "back as they were. Use cache_dtype='float32', or go without a cache."
            )
        return block.numpy()

    def _put(self, file: int, data: memoryview, at: int) -> None:
        try:
            while len(data):
                done = os.pwrite(file, data, at)
                data, at = data[done:], at + done
        except OSError as error:
            raise not_writable(self._claim.path.parent, error) from error

    def reader(self) -> StateReader:
        """Reads what was written so far."""
        return StateReader(self._claim.path, self.layout, self._dtype or torch.float32)

    def forget(self) -> None:
        """Ask the system to read from the disk what it still holds in memory, so that reading can be timed."""
        for file in self._files.values():
            os.fdatasync(file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def complete(self) -> bool:
        """Whether every window was stored."""
        return bool(self._seen.all())

    def finish(self, facts: Mapping[str, Any]) -> StateReader | None:
        """Publish the entry if every window was stored, else drop it.

        Args:
            facts: What its index says besides the layout.

        Returns:
            Its reader, or None if windows are missing.

        Raises:
            CacheError: If it cannot be written.
        """
        if not self.complete:
            self.abandon()
            return None
        self._close()
        try:
            dtype = str(self._dtype or torch.float32).removeprefix("torch.")
            entry = self._claim.publish({**facts, **self.layout.facts(), "states_dtype": dtype})
        except OSError as error:
            self._claim.drop()
            raise error if isinstance(error, CacheError) else not_writable(self._claim.path.parent, error) from error
        return StateReader(entry.path, self.layout, getattr(torch, dtype))

    def abandon(self) -> None:
        """Drop the entry."""
        self._close()
        self._claim.drop()

    def _close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files = {}


@final
class StateReader:
    """Reads windows, in any order and from any number of processes at once.

    Args:
        folder: Where the files are.
        layout: What they hold.
        dtype: Of the states that are handed out.
    """

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        kind = np.dtype(layout.dtype)
        self._files = {
            stack: np.memmap(folder / _file(stack), kind, "r", shape=(layout.tokens, len(layers), layout.widths[stack]))
            for stack, layers in layout.layers.items()
        }
        self._stage = np.empty(0, kind)

    def batch(
        self, rows: Sequence[int], *, tokens: int = 0, device: torch.device | str = "cpu"
    ) -> dict[str, dict[int, Tensor]]:
        """Read some windows.

        Args:
            rows: Their numbers.
            tokens: The batch has at least so many; 0: as many as its longest window.
            device: Where the states are wanted.

        Returns:
            Stack -> layer -> states `[batch, tokens, width]`, padded with zeros on the right.
        """
        tokens = max(tokens, self.layout.longest(rows))
        return {
            stack: {
                layer: padded[:, :, at].to(self.dtype, copy=True) for at, layer in enumerate(self.layout.layers[stack])
            }
            for stack in self._files
            for padded in (torch.from_numpy(self._padded(rows, tokens, stack)).to(device),)
        }

    def _padded(self, rows: Sequence[int], tokens: int, stack: str) -> np.ndarray:
        """`[batch, tokens, layers, width]` as it is stored, in memory that the next call uses again."""
        file = self._files[stack]
        shape = (len(rows), tokens, *file.shape[1:])
        size = int(np.prod(shape))
        if self._stage.size < size:
            self._stage = np.empty(size, file.dtype)  # kept: fresh memory costs more than the copy into it
        stage = self._stage[:size].reshape(shape)
        for at, row in enumerate(rows):
            start, length = self.layout.offsets[row], self.layout.lengths[row]
            stage[at, :length] = file[start : start + length]
            stage[at, length:] = 0
        return stage


def open_reader(folder: Path, key: str, layout: Layout) -> StateReader | None:
    """The reader of a whole entry, or None if there is none that can be used; says so where there is another.

    Args:
        folder: The cache.
        key: The entry.
        layout: What it must hold.
    """
    entry = read_entry(folder / key)
    if entry is None:
        if other := sum(one.foreign for one in entries(folder)):
            logger.warning(
                "cache: %d entries in %s were written by another version and are not used; "
                "'lamina cache' lists them, 'lamina cache --clear all' removes all",
                other,
                folder,
            )
        return None
    if entry.problem is None and any(entry.facts.get(name) != value for name, value in layout.facts().items()):
        entry = type(entry)(entry.path, entry.facts, entry.size_bytes, "it does not hold what its key says")
    if entry.problem is not None:
        logger.warning("cache: %s is not used: %s; the states are computed again", entry.path, entry.problem)
        return None
    try:
        return StateReader(entry.path, layout, getattr(torch, entry.facts["states_dtype"]))
    except OSError:  # cleared in this moment
        return None


def open_writer(folder: Path, key: str, layout: Layout) -> StateWriter | None:
    """Begin an entry; waits for another process that writes the same one.

    Returns:
        None if the entry exists by now.

    Raises:
        CacheError: If it does not fit, or the folder cannot be written.
    """
    room(folder, layout.size_bytes)
    claimed = claim(folder, key)
    return None if claimed is None else StateWriter(layout, claimed)


def _file(stack: str) -> str:
    return f"{stack}.bin"


def _reserve(file: int, size_bytes: int) -> None:
    """Take all the room now, so that a full disk is found before anything is computed."""
    if size_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
    else:
        os.ftruncate(file, size_bytes)
