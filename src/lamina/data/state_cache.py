"""The hidden-state cache: whether it can be used, how it is filled, and how states are read from it.

An entry has a file per stack, an array `[tokens, layers, width]` of every row's real tokens, the longest row first. All
layers of a row come with one read, and where a row begins follows from the lengths.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from rich.filesize import decimal
from torch import distributed

from lamina.data.batches import tokenizer_of
from lamina.data.disk_cache import FORMAT, cache_folder, check_room, claim, disk_errors, entries, publish, read_entry
from lamina.errors import CacheError
from lamina.layers.fingerprints import fingerprint_of
from lamina.utils import progress_bar, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from lamina.bank import ReaderBank

logger = logging.getLogger(__name__)

_TRIAL = 4  # batches that are timed before all rows are written
_NOT_THE_STATES = {"_name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id"}


@final
@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The settings with which a run uses the cache."""

    mode: Literal["off", "auto", "on"] = "auto"  # "on": or an error; "auto": where it saves time and the states fit
    dtype: Literal["float16", "float32"] = "float16"  # of the files
    folder: str | Path | None = None  # None: `cache_folder()`
    precision: str = "float32"  # what the model computes in, as in `FitOptions`
    batch_size: int = 64  # rows per pass while filling
    passes: int = 2  # how often the rows will be read; "auto" fills for two or more
    progress: bool = False  # show a progress bar while filling


def open_states(
    bank: ReaderBank,
    inputs: Any,
    names: Sequence[str],
    *,
    settings: CacheSettings,
    fingerprints: Mapping[str, str] | None = None,
) -> CachedStates | None:
    """Return the cached hidden states of some inputs, after computing and writing them if they are not cached yet.

    Of several processes of a run, one writes, and either all of them use the cache or none.

    Args:
        bank: The bank with the readers.
        inputs: The encoded examples, a `lamina.tasks.base.Inputs`.
        names: The readers that will read the states.
        settings: How to use the cache.
        fingerprints: Hashes of the weights of stacks that are already known; None: all are computed.

    Returns:
        The states, or None if the model must run for every batch: in mode "off", or in mode "auto" for a reason that
        is logged.

    Raises:
        CacheError: In mode "on", if the states cannot be cached or written.
    """
    if settings.mode == "off":
        return None
    auto = settings.mode == "auto"
    if reason := obstacle(bank, names, inputs):
        if not auto:
            raise CacheError(f"cache: {reason}; cached states cannot be used. Use cache='auto' or 'off'.")
        return _without(reason)
    entry, states = _Entry(bank, inputs, names, settings, fingerprints or {}), None
    try:
        if (states := entry.open()) is None and (reason := entry.fill()) is None and (states := entry.open()) is None:
            raise CacheError(f"cache: {entry.path} is gone; it was removed as soon as it was written.")
    except CacheError as error:
        if not auto:
            raise
        logger.warning(reason := str(error))
    if not _everywhere(states is not None, bank.device):
        return _without(reason or "the states are not there in every process")
    logger.info("cache: %s of states in %s", decimal(sum(entry.layout.sizes.values())), entry.path)
    return states


def obstacle(bank: ReaderBank, names: Sequence[str], inputs: Any = None) -> str | None:
    """Return why the readers cannot use cached states of the inputs; None if they can."""
    if bank.train_base:
        return "the model is trained too, so its states change"
    for name in names:
        if bank[name].config.fusion.needs_block_inputs:
            return f"reader '{name}' needs more of the model's pass than its states"
        if bank[name].stack == "decoder":
            return f"reader '{name}' reads the decoder, whose padding the texts do not tell"
    return None if inputs is None else inputs.uncacheable


def layers_of(bank: ReaderBank, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the layers of each stack that the readers need, in ascending order."""
    needed: dict[str, set[int]] = {}
    for name in names:
        needed.setdefault(bank[name].stack, set()).update(bank[name].layers)
    return {stack: tuple(sorted(layers)) for stack, layers in needed.items()}


def hash_processor(processor: Any) -> str:
    """Return a hash of a processor's class and contents, without a tokenizer's truncation and padding settings."""
    tokenizer = tokenizer_of(processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(tokenizer, "get_vocab"):  # of images or sound
        known: Any = str(tokenizer)
    elif backend is None:
        known = sorted(tokenizer.get_vocab().items())
    else:
        known = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    return _hash([type(tokenizer).__name__, known])


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@final
@dataclass(frozen=True)
class Layout:
    """The layout of an entry's files: the tokens of each row, and the layers and width of each stack."""

    lengths: Sequence[int]
    layers: Mapping[str, Sequence[int]]
    widths: Mapping[str, int]
    dtype: str = "float16"  # of the files; or "float32"

    @cached_property
    def order(self) -> list[int]:
        """The row numbers in the order of the files, the longest row first."""
        return sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row])

    @cached_property
    def starts(self) -> np.ndarray:
        """The position of each row's first token in the files; the last entry is the number of all tokens."""
        starts = np.empty(len(self.order) + 1, dtype=np.int64)
        starts[[*self.order, -1]] = np.cumsum([0, *(self.lengths[row] for row in self.order)])
        return starts

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each stack's file in bytes."""
        size = int(self.starts[-1]) * np.dtype(self.dtype).itemsize
        return {stack: size * len(layers) * self.widths[stack] for stack, layers in self.layers.items()}

    def pack(self, rows: Sequence[int], states: Sequence[Tensor], stack: str) -> np.ndarray:
        """Return the states of consecutive rows of `order`: `[batch, tokens, width]` per layer, as they are stored."""
        lengths = torch.tensor([self.lengths[row] for row in rows], device=states[0].device)
        shape = (len(rows), int(lengths.max()), self.widths[stack])
        if tuple(states[0].shape) != shape:
            what = f"the model's states are {tuple(states[0].shape)} for rows of {shape}"
            raise CacheError(f"cache: {what}; only models that keep every token can be cached.")
        real = torch.arange(shape[1], device=lengths.device) < lengths[:, None]
        packed = torch.stack([state.detach()[real] for state in states], dim=1).to("cpu", getattr(torch, self.dtype))
        if not packed.isfinite().all():
            what = f"some states are beyond the range of {self.dtype}, or not numbers"
            raise CacheError(f"cache: {what}. Use cache_dtype='float32', or go without a cache.")
        return packed.numpy()


@final
class CachedStates:
    """Hidden states on disk, which any number of processes may read at once, in any order of rows."""

    def __init__(self, folder: Path, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.folder, self.layout, self.dtype, self.device = folder, layout, dtype, device
        self._files = {
            stack: np.memmap(folder / f"{stack}.bin", layout.dtype, "r").reshape(-1, len(layers), layout.widths[stack])
            for stack, layers in layout.layers.items()
        }
        self._buffer = np.empty(0, layout.dtype)  # used again: fresh memory costs more than the copy into it

    def batch(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        """Return the states of rows, stack -> layer -> `[batch, tokens, width]`, padded with zeros on the right."""
        lengths = [int(self.layout.lengths[row]) for row in rows]
        states = {}
        for stack, file in self._files.items():
            shape = (len(rows), max(lengths), *file.shape[1:])
            size = int(np.prod(shape))
            if self._buffer.size < size:
                self._buffer = np.empty(size, file.dtype)
            padded = self._buffer[:size].reshape(shape)
            for states_of_row, row, length in zip(padded, rows, lengths, strict=True):
                start = self.layout.starts[row]
                states_of_row[:length] = file[start : start + length]
                states_of_row[length:] = 0
            moved = torch.from_numpy(padded).to(self.device)
            layers = enumerate(self.layout.layers[stack])
            states[stack] = {layer: moved[:, :, at].to(self.dtype, copy=True) for at, layer in layers}
        return states


@final
class _Entry:
    """The cache entry of some inputs. Its key is a hash of everything that the states depend on."""

    def __init__(
        self, bank: ReaderBank, inputs: Any, names: Sequence[str], settings: CacheSettings, marks: Mapping[str, str]
    ) -> None:
        self.bank, self.inputs, self.settings = bank, inputs, settings
        layers = layers_of(bank, names)
        widths = {stack: bank.stacks[stack].width for stack in layers}
        self.layout = layout = Layout([int(length) for length in inputs.lengths], layers, widths, settings.dtype)
        config = {key: value for key, value in bank.model.config.to_dict().items() if key not in _NOT_THE_STATES}
        self.facts = {
            "format": FORMAT,
            "fingerprints": {name: marks.get(name) or fingerprint_of(bank.stacks[name]) for name in layers},
            "config": json.dumps(config, sort_keys=True, default=str),
            "processor": hash_processor(bank.processor),
            "inputs": inputs.digest,
            "precision": settings.precision,
            "rows": len(layout.lengths),
            "tokens": int(layout.starts[-1]),
            "layers": {stack: list(numbers) for stack, numbers in layers.items()},  # as JSON gives them back
            "widths": widths,
            "dtype": settings.dtype,
        }
        self.path = cache_folder(settings.folder) / _hash(self.facts)[:32]

    def open(self) -> CachedStates | None:
        """Return the states; None if there are none, or they cannot be used, which is logged as a warning."""
        entry = read_entry(self.path, self.facts)
        if entry is None:
            if other := sum(entry.foreign for entry in entries(self.path.parent)):
                what = "cache: %d entries in %s were written by another version; 'lamina cache --clear all' removes all"
                logger.warning(what, other, self.path.parent)
        elif entry.problem is not None:
            logger.warning("cache: %s is not used: %s; the states are computed again", self.path, entry.problem)
        else:
            dtype = getattr(torch, entry.facts["states_dtype"])
            with suppress(OSError):  # cleared in this moment
                return CachedStates(self.path, self.layout, dtype, self.bank.device)
        return None

    def fill(self) -> str | None:
        """Run the model over all rows and store their states.

        Returns:
            None, or in mode "auto" the reason why nothing was stored.
        """
        if self.settings.mode == "auto" and self.settings.passes < 2:
            return "these texts are read only once"
        folder = self.path.parent
        check_room(folder, sum(self.layout.sizes.values()))
        with disk_errors(folder), claim(folder, self.path.name, self.facts) as private:
            if private is not None:
                if (dtype := self._write(private)) is None:
                    return "reading takes longer than computing here"
                states = {"states_dtype": str(dtype).removeprefix("torch."), "model": self.bank.model.name_or_path}
                publish(private, {**self.facts, **states})
        return None

    def _write(self, folder: Path) -> torch.dtype | None:
        """Write all rows to a folder and return the dtype of the states; None if reading would not be faster."""
        order, size = self.layout.order, self.settings.batch_size
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        trial = batches[1 : _TRIAL + 1] if self.settings.mode == "auto" else []  # the first one also warms up
        computing, dtype = 0.0, torch.float32
        bar = progress_bar(batches, show=self.settings.progress, desc="writing states", unit="batch")
        for number, rows in enumerate(bar):
            start = time.perf_counter()
            states = self._compute(rows)
            computing += time.perf_counter() - start if number else 0.0
            for stack, layers in self.layout.layers.items():
                dtype = states[stack][layers[0]].dtype
                packed = self.layout.pack(rows, [states[stack][layer] for layer in layers], stack)
                with (folder / f"{stack}.bin").open("ab") as file:
                    file.write(packed.data)
            if trial and number == len(trial):
                _forget(folder)
                reader, start = CachedStates(folder, self.layout, dtype, self.bank.device), time.perf_counter()
                for tried in trial:
                    reader.batch(tried)
                reading = time.perf_counter() - start
                logger.info("cache: %d batches: %.3f s to compute, %.3f s to read", number, computing, reading)
                if reading >= computing:
                    return None
        return dtype

    def _compute(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        device, precision = self.bank.device, self.settings.precision
        batch = {key: value.to(device) for key, value in self.inputs.batch(rows).items()}
        with torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32"):
            states = self.bank.record_states(self.layout.layers, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return states


def _forget(folder: Path) -> None:
    """Drop a folder's files from the system's page cache, if it allows that, so that reading from disk can be timed."""
    for path in folder.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _without(reason: str) -> None:
    """Log why the cache is not used, and return None."""
    logger.info("cache: not used, the model is run for every batch: %s", reason)


def _everywhere(ready: bool, device: torch.device) -> bool:
    """Return whether the states are ready in every process of the run."""
    if world_size() == 1:
        return ready
    answer = torch.tensor(int(ready), device=device)
    distributed.all_reduce(answer, distributed.ReduceOp.MIN)
    return bool(answer)
