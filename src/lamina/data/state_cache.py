"""The hidden-state cache, in memory or on disk: whether it can be used, how it is filled, and how states are read.

The states of a stack are one array `[tokens, layers, width]` with the tokens of all rows, without padding, the longest
row first. All layers of a row are next to each other, so that one read returns them. On disk, an entry has one file per
stack.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol, Self, final, runtime_checkable

import numpy as np
import psutil
import torch
from rich.filesize import decimal
from torch import Tensor

from lamina.bank.stack_pass import real_tokens
from lamina.data.disk_cache import FORMAT, cache_folder, check_room, claim, disk_errors, entries, publish, read_entry
from lamina.errors import CacheError
from lamina.layers.base_facts import StackSettings
from lamina.layers.fingerprints import fingerprint_of
from lamina.layers.hooks import token_mask
from lamina.layers.types import tokenizer_of
from lamina.utils import least_of_all, local_world_size, progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank
    from lamina.data.disk_cache import Facts
    from lamina.layers.types import Processor

logger = logging.getLogger(__name__)

_TRIAL = 4  # number of batches that are timed before all rows are written
_SHARE = 0.25  # share of the free memory that states may take

# parts of a joint processor beside its tokenizer
_PARTS = ("image_processor", "video_processor", "feature_extractor")


class CacheableInputs(Protocol):
    """Encoded examples whose hidden states can be cached: what the cache needs of `lamina.tasks.base.Inputs`."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens (or audio samples) of each row; 1 for images."""
        ...

    @property
    def uncacheable(self) -> str | None:
        """Why a model's states for these rows cannot be cached, as text; None if they can be."""
        ...

    @property
    def digest(self) -> str:
        """A hash of the inputs. Cached states are stored under it, except those of `FramedInputs`."""
        ...

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the model's arguments for the rows with these indices."""
        ...


@runtime_checkable
class FramedInputs(Protocol):
    """Encoded audio clips, whose states have one token per frame; states of padding frames are not cached.

    The protocol has methods only, since `isinstance` would compute properties.
    """

    def frames(self, model: PreTrainedModel) -> list[int] | None:
        """Return the number of frames of each clip in a model's states; None if it is not known for this model."""
        ...

    def content_digest(self) -> str:
        """Return a hash of the content of all clips, which are read for it."""
        ...


@final
@dataclass(frozen=True)
class StateMasks:
    """Stands in for audio inputs whose states are cached: its batches hold only the masks of these states.

    Attributes:
        lengths: Number of tokens of each row.
    """

    lengths: Sequence[int]
    digest = ""
    uncacheable = None

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """Return {"attention_mask": mask `[batch, tokens]` of the rows' states}, the same in every `epoch`."""
        del epoch
        lengths = torch.tensor([self.lengths[row] for row in rows])
        return {"attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long()}


@final
@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """The settings of the cache for a run.

    Attributes:
        mode: "off": do not use the cache. "on": use it on disk, or raise an error. "auto": in memory if the states, as
            float32, take at most a quarter of the free memory; else on disk, if they fit there and that saves time.
        dtype: Type of the numbers in the files. In memory they are float32.
        folder: The cache folder; None: `cache_folder()`.
        precision: Type in which the model computes, as in `FitOptions`.
        batch_size: Rows per pass of the model while the cache is filled.
        passes: Number of times that the rows will be read. "auto" uses the cache only for two or more.
        progress: Show a progress bar while the cache is filled.
    """

    mode: Literal["off", "auto", "on"] = "auto"
    dtype: Literal["float16", "float32"] = "float16"
    folder: str | Path | None = None
    precision: str = "float32"
    batch_size: int = 64
    passes: int = 2
    progress: bool = False


def open_states(
    bank: ReaderBank,
    inputs: CacheableInputs,
    names: Sequence[str],
    *,
    settings: CacheSettings,
    fingerprints: dict[str, str] | None = None,
) -> CachedStates | None:
    """Return the cached hidden states of encoded examples; compute and store them if they are not cached yet.

    In mode "auto", states that fit in memory are computed even if they are on disk. In a run of several processes,
    either each holds all states in memory, or one writes them to the disk. All of them use the cache or none does.

    Args:
        bank: The bank with the readers.
        inputs: The encoded examples.
        names: Names of the readers that will use the states.
        settings: How to use the cache.
        fingerprints: Name of a stack -> fingerprint of its weights, where it is known already. For a cache on disk,
            those that are missing are computed and added to this dict.

    Returns:
        The states. None if the model must run for every batch: in mode "off"; in "auto" also if the cache cannot be
        used or saves no time, which is logged.

    Raises:
        CacheError: In mode "on", if the states cannot be cached or written.
        ConfigError: If the model must run, and has changed since the bank was made.
        UnknownNameError: If there is no reader of a name.
        DataError: If an example cannot be read.
    """
    if settings.mode == "off":
        return None
    auto = settings.mode == "auto"
    if reason := obstacle(bank, names, inputs):
        if not auto:
            raise CacheError(f"cache: {reason}; cached states cannot be used. Use cache='auto' or 'off'.")
        return _log_unused(reason)
    if auto and settings.passes < 2:
        return _log_unused("these texts are read only once")
    filler = _Filler(bank, inputs, names, settings)
    if auto and least_of_all(filler.fits_in_memory(), bank.device):
        return filler.hold()
    entry, states = _Entry(filler, {} if fingerprints is None else fingerprints), None
    try:
        if (states := entry.open()) is None and (reason := entry.fill()) is None and (states := entry.open()) is None:
            raise CacheError(f"cache: {entry.path} is gone; it was removed as soon as it was written.")
    except CacheError as error:
        if not auto:
            raise
        logger.warning(reason := str(error))
    if not least_of_all(states is not None, bank.device):
        return _log_unused(reason or "some processes lack the states")
    logger.info("cache: %s of states in %s", decimal(filler.layout.size), entry.path)
    return states


def obstacle(bank: ReaderBank, names: Sequence[str], inputs: CacheableInputs | None = None) -> str | None:
    """Return why the readers in `names` cannot use cached hidden states, as a phrase for a message; None if they can.

    Without `inputs`, the encoded examples, only the readers are checked. UnknownNameError if there is no such reader.
    """
    if bank.train_base:
        return "the model is trained too, so its states change"
    for name in names:
        if bank[name].config.fusion.reads_inside:
            return f"reader '{name}' needs more of the model's pass than its states"
        if bank[name].stack == "decoder":
            return f"reader '{name}' reads the decoder, whose padding does not follow from the lengths of the texts"
    if isinstance(inputs, FramedInputs) and inputs.frames(bank.model) is None:
        return "the inputs are audio, and it is not known which frames of this model are padding"
    return None if inputs is None else inputs.uncacheable


def hash_processor(processor: Processor) -> str:
    """Return a hash of a processor's class and contents, on which the model's inputs depend.

    All parts of a joint processor count: its tokenizer, and its image processor, video processor or feature extractor.
    A tokenizer's settings of truncation and padding are left out: calls of the tokenizer change them.
    """
    tokenizer = tokenizer_of(processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: object
    if not hasattr(tokenizer, "get_vocab"):  # an image processor or a feature extractor
        content = str(tokenizer)
    elif backend is None:
        # loading adds settings that no parameter of its class names, such as paths
        names = signature(type(tokenizer)).parameters.keys() - getattr(tokenizer, "vocab_files_names", {}).keys()
        settings = {k: str(v) for k, v in getattr(tokenizer, "init_kwargs", {}).items() if k in names}
        content = [sorted(tokenizer.get_vocab().items()), settings]
    else:
        content = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
    parts = [] if tokenizer is processor else [getattr(processor, name, None) for name in _PARTS]
    return _hash([type(tokenizer).__name__, content, *(str(part) for part in parts if part is not None)])


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@final
@dataclass(frozen=True)
class Layout:
    """Where the states of each row and layer lie, in arrays in memory or in the files of a cache entry.

    Rows are in the order of the property `order` (the longest first), without padding.

    Attributes:
        lengths: Number of tokens of each row.
        layers: Stack name -> its layers in the files, ascending.
        widths: Stack name -> size of a hidden state.
        dtype: Type of the numbers, "float16" or "float32".
    """

    lengths: Sequence[int]
    layers: Mapping[str, Sequence[int]]
    widths: Mapping[str, int]
    dtype: str = "float16"

    @cached_property
    def order(self) -> list[int]:
        """Row indices in the order of the files: the longest row first."""
        return sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row])

    @cached_property
    def starts(self) -> np.ndarray:
        """The position of each row's first token in the files; a last entry is the number of all tokens."""
        starts = np.empty(len(self.order) + 1, dtype=np.int64)
        starts[[*self.order, -1]] = np.cumsum([0, *(self.lengths[row] for row in self.order)])
        return starts

    def shape(self, stack: str) -> tuple[int, int, int]:
        """Return the shape `[tokens, layers, width]` of a stack's array."""
        return int(self.starts[-1]), len(self.layers[stack]), self.widths[stack]

    @property
    def size(self) -> int:
        """Size of all arrays in bytes."""
        return sum(math.prod(self.shape(stack)) for stack in self.layers) * np.dtype(self.dtype).itemsize

    def pack(self, rows: Sequence[int], states: Sequence[Tensor], stack: str) -> np.ndarray:
        """Convert hidden states to the array that the file of a stack stores.

        Raises CacheError if states and rows have different numbers of tokens, or a state is not finite in `dtype`.

        Args:
            rows: Indices of the rows, in the order of the file.
            states: The states of each layer, `[batch, tokens, width]`, padded on the right.
            stack: Name of the stack.

        Returns:
            An array `[tokens, layers, width]` of all tokens of these rows, without padding.
        """
        lengths = torch.tensor([self.lengths[row] for row in rows], device=states[0].device)
        shape = (len(rows), int(lengths.max()), self.widths[stack])
        if tuple(states[0].shape) != shape:
            problem = f"the model's states are {tuple(states[0].shape)} for rows of {shape}"
            raise CacheError(f"cache: {problem}; only models with one state for every token can be cached.")
        mask = torch.arange(shape[1], device=lengths.device) < lengths[:, None]
        packed = torch.stack([state.detach()[mask] for state in states], dim=1).to("cpu", getattr(torch, self.dtype))
        if not packed.isfinite().all():
            problem = f"some states are beyond the range of {self.dtype}, or NaN"
            raise CacheError(f"cache: {problem}. Use cache_dtype='float32', or go without a cache.", dtype=self.dtype)
        return packed.numpy()


@final
class CachedStates:
    """Hidden states of encoded examples, in memory or in memory-mapped files that several processes may read at once.

    Args:
        arrays: Name of each stack -> its states, an array `[tokens, layers, width]` with the tokens of all examples.
        layout: Where the states of each example and layer lie in the arrays.
        dtype: Dtype of the returned states: the one in which the model computed them. They are stored in
            `layout.dtype`.
        device: Device on which states are returned.

    Attributes:
        folder: The folder of the files; None if the states are in memory.
    """

    def __init__(
        self, arrays: Mapping[str, np.ndarray], layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.dtype, self.device = layout, dtype, device
        self.folder: Path | None = None
        self._arrays, self._starts = arrays, layout.starts
        self._buffer = np.empty(0, layout.dtype)  # reused, because to allocate memory takes longer than to fill it

    @classmethod
    def open(cls, folder: Path, layout: Layout, dtype: torch.dtype, device: torch.device | str = "cpu") -> Self:
        """Return the states stored in the files of a folder; `layout`, `dtype` and `device` are those of the class.

        Raises OSError if a file is missing or cannot be read.
        """
        arrays = {
            stack: np.memmap(folder / f"{stack}.bin", layout.dtype, "r").reshape(-1, *layout.shape(stack)[1:])
            for stack in layout.layers
        }
        states = cls(arrays, layout, dtype, device)
        states.folder = folder
        return states

    def select(self, rows: Sequence[int]) -> CachedStates:
        """Return the states of the rows with these indices, in this order. They are not copied.

        The result's `layout` has the lengths of these rows, but not their places in the arrays.
        """
        layout = replace(self.layout, lengths=[self.layout.lengths[row] for row in rows])
        chosen = CachedStates(self._arrays, layout, self.dtype, self.device)
        chosen.folder, chosen._starts = self.folder, self._starts[list(rows)]
        return chosen

    def batch(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        """Return the states of the rows with these indices: stack -> layer -> `[batch, tokens, width]`.

        Rows are padded with zeros on the right, to the length of the longest. The tensors are copies, on the
        object's device and in its dtype.
        """
        lengths = [int(self.layout.lengths[row]) for row in rows]
        states = {}
        for stack, array in self._arrays.items():
            shape = (len(rows), max(lengths), *array.shape[1:])
            size = int(np.prod(shape))
            if self._buffer.size < size:
                self._buffer = np.empty(size, array.dtype)
            padded = self._buffer[:size].reshape(shape)
            for states_of_row, row, length in zip(padded, rows, lengths, strict=True):
                start = self._starts[row]
                states_of_row[:length] = array[start : start + length]
                states_of_row[length:] = 0
            moved = torch.from_numpy(padded).to(self.device)
            layers = enumerate(self.layout.layers[stack])
            states[stack] = {layer: moved[:, :, at].to(self.dtype, copy=True) for at, layer in layers}
        return states


@final
class _Filler:
    """Runs a bank's model over encoded examples, and returns their states.

    See `open_states` for the arguments. `layout` is the layout of the states on disk.
    """

    def __init__(
        self, bank: ReaderBank, inputs: CacheableInputs, names: Sequence[str], settings: CacheSettings
    ) -> None:
        self.bank, self.inputs, self.settings = bank, inputs, settings
        needed: dict[str, set[int]] = {}
        for reader in map(bank.__getitem__, names):
            needed.setdefault(reader.stack, set()).update(reader.layers)
        layers = {stack: sorted(own) for stack, own in needed.items()}
        widths = {stack: bank.stacks[stack].width for stack in layers}
        frames = inputs.frames(bank.model) if isinstance(inputs, FramedInputs) else None
        lengths = inputs.lengths if frames is None else frames
        self.layout = Layout([int(length) for length in lengths], layers, widths, settings.dtype)

    def fits_in_memory(self) -> bool:
        """Return whether float32 copies of the states, one per process, take at most a quarter of the free memory.

        The processes of this machine count, and their copies together.
        """
        needed = local_world_size() * replace(self.layout, dtype="float32").size
        return needed <= _SHARE * psutil.virtual_memory().available

    def hold(self) -> CachedStates | None:
        """Run the model over all rows, and return their states in memory.

        None if `compute` or `Layout.pack` raises CacheError; the reason is then logged.
        """
        layout = replace(self.layout, dtype="float32")
        arrays = {stack: np.empty(layout.shape(stack), np.float32) for stack in layout.layers}
        at, dtype = 0, torch.float32
        try:
            for rows in self.bar("computing states"):
                states = self.compute(rows)
                count = sum(layout.lengths[row] for row in rows)
                for stack, layers in layout.layers.items():
                    dtype = states[stack][layers[0]].dtype
                    packed = layout.pack(rows, [states[stack][layer] for layer in layers], stack)
                    arrays[stack][at : at + count] = packed
                at += count
        except CacheError as error:
            return _log_unused(str(error))
        logger.info("cache: %s of states in memory", decimal(layout.size))
        return CachedStates(arrays, layout, dtype, self.bank.device)

    @cached_property
    def batches(self) -> list[list[int]]:
        """The rows of each pass, the longest first; of one length each if padding would change the states."""
        order, size = self.layout.order, self.settings.batch_size
        parts = [order]
        if getattr(self.inputs, "equal_lengths", False):
            parts = [list(rows) for _, rows in groupby(order, key=self.layout.lengths.__getitem__)]
        return [rows[at : at + size] for rows in parts for at in range(0, len(rows), size)]

    def bar(self, what: str) -> Iterable[list[int]]:
        return progress_bar(self.batches, show=self.settings.progress, desc=what, unit="batch")

    def compute(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        """Run the model over rows, and wait for the device.

        Returns stack -> layer -> states `[batch, tokens, width]`. For audio, frames that are padding in all rows are
        cut off; raises CacheError if the model does not read the expected frames.
        """
        device, precision = self.bank.device, self.settings.precision
        batch = {key: value.to(device) for key, value in self.inputs.batch(rows).items()}
        with torch.autocast(device.type, getattr(torch, precision), enabled=precision != "float32"):
            states = self.bank.record_states(self.layout.layers, batch)
        if isinstance(self.inputs, FramedInputs):
            states = {stack: self._without_padding(rows, stack, batch, own) for stack, own in states.items()}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # so that the caller can measure the time
        return states

    def _without_padding(
        self, rows: Sequence[int], stack: str, batch: Mapping[str, Tensor], states: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Return a stack's states by layer, `[batch, tokens, width]`, without frames that are padding in all `rows`.

        `batch` has the arguments of the model's call. Raises CacheError unless the model reads the expected frames.
        """
        mask = token_mask(self.bank.stacks[stack], batch)
        real = real_tokens(mask, next(iter(states.values())), self.bank.model)
        lengths = torch.tensor([self.layout.lengths[row] for row in rows], device=real.device)
        expected = torch.arange(real.shape[1], device=real.device) < lengths[:, None]
        if not torch.equal(real, expected):
            problem = f"the model reads {real.sum(1).tolist()} frames of clips that should have {lengths.tolist()}"
            raise CacheError(f"cache: {problem}; such states cannot be cached.")
        return {layer: state[:, : int(lengths.max())] for layer, state in states.items()}


@final
class _Entry:
    """The entry of the disk cache for encoded examples, which may not exist yet.

    `filler` computes the states; `fingerprints` are as in `open_states`, and missing ones are added. `facts` is all on
    which the states depend; its hash is the entry's key. `path` is the entry's folder.
    """

    def __init__(self, filler: _Filler, fingerprints: dict[str, str]) -> None:
        self.filler, self.bank, self.settings, self.layout = filler, filler.bank, filler.settings, filler.layout
        bank, layout, layers = self.bank, self.layout, self.layout.layers
        for name in layers.keys() - fingerprints.keys():
            fingerprints[name] = fingerprint_of(bank.stacks[name])
        inputs = filler.inputs
        self.facts: Facts = {
            "format": FORMAT,
            "fingerprints": {name: fingerprints[name] for name in layers},
            "settings": {name: StackSettings.of(bank.model, bank.stacks[name]).digest for name in layers},
            "processor": hash_processor(bank.processor),
            "inputs": inputs.content_digest() if isinstance(inputs, FramedInputs) else inputs.digest,
            "precision": self.settings.precision,
            "rows": len(layout.lengths),
            "tokens": int(layout.starts[-1]),
            "layers": {stack: list(numbers) for stack, numbers in layers.items()},  # compared with JSON: no tuples
            "widths": dict(layout.widths),
            "dtype": layout.dtype,
        }
        self.path = cache_folder(self.settings.folder) / _hash(self.facts)[:32]

    def open(self) -> CachedStates | None:
        """Return the states on disk; None if there are none, or they cannot be used.

        A warning is logged if the states cannot be used; or if there are none, but another version of Lamina wrote
        entries into the folder. Raises CacheError if the folder cannot be read.
        """
        entry = read_entry(self.path, self.facts)
        if entry is None:
            if other := sum(entry.facts.get("format", FORMAT) != FORMAT for entry in entries(self.path.parent)):
                what = "cache: %d entries in %s were written by another version; 'lamina cache --clear all' removes all"
                logger.warning(what, other, self.path.parent)
        elif entry.problem is not None:
            logger.warning("cache: %s is not used: %s; the states are computed again", self.path, entry.problem)
        else:
            dtype = getattr(torch, entry.facts["states_dtype"])
            with suppress(OSError):  # another process may have removed the entry a moment ago
                return CachedStates.open(self.path, self.layout, dtype, self.bank.device)
        return None

    def fill(self) -> str | None:
        """Run the model over all rows, and write their states to the disk.

        If another process is writing the entry, wait for it; if it succeeds, compute nothing. Raises CacheError if the
        states do not fit on the disk, cannot be written or cannot be stored (see `Layout.pack`).

        Returns:
            None if the states are on the disk now. In mode "auto", a phrase for a message if reading them would take
            longer than computing them; nothing is kept then.
        """
        folder = self.path.parent
        check_room(folder, self.layout.size)
        with disk_errors(folder), claim(folder, self.path.name, self.facts) as private:
            if private is not None:
                if (dtype := self._write(private)) is None:
                    return "reading takes longer than computing here"
                states = {"states_dtype": str(dtype).removeprefix("torch."), "model": self.bank.model.name_or_path}
                publish(private, {**self.facts, **states})
        return None

    def _write(self, folder: Path) -> torch.dtype | None:
        """Run the model over all rows, write the states to files in a folder, and return their dtype.

        In mode "auto", the time to read up to four batches is compared with the time to compute them; a single batch is
        not timed. If reading is not faster, writing stops and the result is None. Raises CacheError as
        `_Filler.compute` and `Layout.pack` do.
        """
        # the first batch is not timed, because the first pass of a model takes longer
        trial = self.filler.batches[1 : _TRIAL + 1] if self.settings.mode == "auto" else []
        computing, dtype = 0.0, torch.float32
        for number, rows in enumerate(self.filler.bar("writing states")):
            start = time.perf_counter()
            states = self.filler.compute(rows)
            computing += time.perf_counter() - start if number else 0.0
            for stack, layers in self.layout.layers.items():
                dtype = states[stack][layers[0]].dtype
                packed = self.layout.pack(rows, [states[stack][layer] for layer in layers], stack)
                with (folder / f"{stack}.bin").open("ab") as file:
                    file.write(packed.data)
            if trial and number == len(trial):
                _drop_page_cache(folder)
                reader, start = CachedStates.open(folder, self.layout, dtype, self.bank.device), time.perf_counter()
                for trial_rows in trial:
                    reader.batch(trial_rows)
                reading = time.perf_counter() - start
                logger.info("cache: %d batches: %.3f s to compute, %.3f s to read", number, computing, reading)
                if reading >= computing:
                    return None
        return dtype


def _drop_page_cache(folder: Path) -> None:
    """Flush a folder's files to disk and drop them from the system's page cache, so that reading can be timed.

    On systems that do not allow this, nothing happens.
    """
    for path in folder.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _log_unused(reason: str) -> None:
    """Log that the cache is not used; `reason` is a phrase that says why. Returns None, for callers to return."""
    logger.info("cache: not used, the model is run for every batch: %s", reason)
