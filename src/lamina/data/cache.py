"""The hidden-state cache: when it can be used, filling it, and opening what it holds."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, final

import torch
from rich.filesize import decimal
from torch import distributed

from lamina.data.batches import tokenizer_of
from lamina.data.cache_files import FORMAT, cache_folder, check_room, claim, disk_errors, entries, publish, read_entry
from lamina.data.cached_states import DTYPES, CachedStates, Layout
from lamina.errors import CacheError, UnknownNameError
from lamina.layers.fingerprints import fingerprint_of
from lamina.utils import progress_bar, world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import BufferedWriter
    from pathlib import Path

    from torch import Tensor

    from lamina.bank import ReaderBank

    class CachedInputs(Protocol):
        """What the cache asks of the rows that a model reads; see `lamina.tasks.base.Inputs`."""

        @property
        def lengths(self) -> Sequence[int]: ...  # noqa: D102
        @property
        def uncacheable(self) -> str | None: ...  # noqa: D102
        @property
        def digest(self) -> str: ...  # noqa: D102
        def batch(self, rows: Sequence[int]) -> Mapping[str, Tensor]: ...  # noqa: D102


logger = logging.getLogger(__name__)

MODES = ("off", "auto", "on")
_TRIAL = 4  # batches that are timed before all rows are written
_NOT_THE_STATES = {"_name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id"}


@final
@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """How a run uses the cache.

    Attributes:
        mode: "off", "on" (an error where it cannot be used), or "auto" (used where reading takes less time than
            computing, and the states fit).
        dtype: "float16" or "float32", of the files.
        folder: Where; None: `cache_folder()`.
        precision: What the model computes in, as in `FitOptions`.
        batch_size: Rows per pass while filling.
        passes: How often the rows will be read; "auto" fills for two or more.
        progress: Show a progress bar while filling.

    Raises:
        UnknownNameError: If the mode or the dtype is another one.
    """

    mode: Literal["off", "auto", "on"] = "auto"
    dtype: Literal["float16", "float32"] = "float16"
    folder: str | Path | None = None
    precision: str = "float32"
    batch_size: int = 64
    passes: int = 2
    progress: bool = False

    def __post_init__(self) -> None:
        for what, known in (("mode", MODES), ("dtype", DTYPES)):
            if getattr(self, what) not in known:
                raise UnknownNameError(op="cache", got=getattr(self, what), known=known, what=what)


def open_states(
    bank: ReaderBank,
    inputs: CachedInputs,
    names: Sequence[str],
    *,
    settings: CacheSettings,
    fingerprints: Mapping[str, str] | None = None,
) -> CachedStates | None:
    """The cached states of some inputs, written if they are not there yet.

    Args:
        bank: The readers and their model.
        inputs: The rows that the model reads.
        names: The readers that will read their states.
        settings: Where and how.
        fingerprints: Stack -> hash of its weights, where several inputs are opened in turn; None: computed.

    Returns:
        The states, or None where the model is to be run each time; in mode "auto" the reason is logged. Of several
        processes of a run one writes, and all take the same way.

    Raises:
        CacheError: In mode "on", if the states cannot be cached.
    """
    if settings.mode == "off":
        return None
    auto = settings.mode == "auto"
    if reason := obstacle(bank, names, inputs):
        if not auto:
            raise CacheError(f"cache: {reason}; cached states cannot be used. Use cache='auto' or 'off'.")
        return _without(reason)
    entry = _Entry(bank, inputs, names, settings, fingerprints or {})
    states, problem = entry.open(), None
    if states is None and auto and settings.passes < 2:
        problem = "these texts are read only once"
    elif states is None:
        try:
            problem = entry.fill()
            states = entry.open()
            if states is None and problem is None:
                raise CacheError(f"cache: {entry.path} is gone; it was removed as soon as it was written.")
        except CacheError as error:
            if not auto:
                raise
            problem = str(error)
            logger.warning(problem)
    if not _everywhere(states is not None, bank.device):
        return _without(problem or "the states are not there in every process")
    logger.info("cache: %s of states in %s", decimal(sum(entry.layout.sizes.values())), entry.path)
    return states


def obstacle(bank: ReaderBank, names: Sequence[str], inputs: CachedInputs | None = None) -> str | None:
    """Why these readers cannot read cached states of these inputs; None if they can."""
    if bank.train_base:
        return "the model is trained too, so its states change"
    for name in names:
        if _needs_block_inputs(bank[name].config.fusion):
            return f"reader '{name}' needs more of the model's pass than its states"
        if bank[name].stack == "decoder":
            return f"reader '{name}' reads the decoder, whose padding the texts do not tell"
    return None if inputs is None else inputs.uncacheable


def layers_of(bank: ReaderBank, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Stack -> the layers that these readers need, ascending."""
    found: dict[str, set[int]] = {}
    for name in names:
        found.setdefault(bank[name].stack, set()).update(bank[name].layers)
    return {stack: tuple(sorted(layers)) for stack, layers in found.items()}


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
class _Entry:
    """The entry of some inputs. Its key is a hash of everything that the states depend on."""

    def __init__(
        self,
        bank: ReaderBank,
        inputs: CachedInputs,
        names: Sequence[str],
        settings: CacheSettings,
        fingerprints: Mapping[str, str],
    ) -> None:
        self.bank, self.inputs, self.settings = bank, inputs, settings
        layers = layers_of(bank, names)
        widths = {stack: bank.stacks[stack].width for stack in layers}
        lengths = [int(length) for length in inputs.lengths]
        self.layout = Layout(lengths, layers, widths, settings.dtype)
        config = {key: value for key, value in bank.model.config.to_dict().items() if key not in _NOT_THE_STATES}
        self.facts = {
            "format": FORMAT,
            "fingerprints": {name: fingerprints.get(name) or fingerprint_of(bank.stacks[name]) for name in layers},
            "config": json.dumps(config, sort_keys=True, default=str),
            "processor": hash_processor(bank.processor),
            "inputs": inputs.digest,
            "precision": settings.precision,
            **self.layout.facts(),
        }
        key = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:32]
        self.path = cache_folder(settings.folder) / key

    def open(self) -> CachedStates | None:
        """The states, or None if there are none that can be used; says so where there are others."""
        entry = read_entry(self.path, self.facts)
        if entry is None:
            if other := sum(entry.foreign for entry in entries(self.path.parent)):
                logger.warning(
                    "cache: %d entries in %s were written by another version and are not used; "
                    "'lamina cache' lists them, 'lamina cache --clear all' removes all",
                    other,
                    self.path.parent,
                )
            return None
        if entry.problem is not None:
            logger.warning("cache: %s is not used: %s; the states are computed again", self.path, entry.problem)
            return None
        try:
            return CachedStates(self.path, self.layout, getattr(torch, entry.facts["states_dtype"]), self.bank.device)
        except OSError:  # cleared in this moment
            return None

    def fill(self) -> str | None:
        """Run the model over all rows and store their states, unless they are there by now.

        Returns:
            In mode "auto" why it was given up; else None.

        Raises:
            CacheError: If the states do not fit on the disk or in the dtype, or cannot be written.
        """
        folder, sizes = self.path.parent, self.layout.sizes
        check_room(folder, sum(sizes.values()))
        with disk_errors(folder), claim(folder, self.path.name, self.facts) as private:
            if private is None:
                return None
            with ExitStack() as opened:
                files = {name: opened.enter_context((private / f"{name}.bin").open("wb")) for name in sizes}
                for name, file in files.items():
                    file.truncate(sizes[name])
                dtype = self._write(private, files)
            if dtype is None:
                return "reading takes longer than computing here"
            dtype = str(dtype).removeprefix("torch.")
            publish(private, {**self.facts, "states_dtype": dtype, "model": self.bank.model.name_or_path})
        return None

    def _write(self, folder: Path, files: Mapping[str, BufferedWriter]) -> torch.dtype | None:
        """Write every row; returns the dtype of the states, or None if reading is not worth it."""
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
                files[stack].write(cast("Any", packed))  # numpy's stubs hide that arrays are buffers
            if trial and number == len(trial):
                _forget(files)
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
        mixed = precision != "float32"
        with torch.no_grad(), torch.autocast(device.type, getattr(torch, precision)) if mixed else nullcontext():
            states = _record(self.bank, self.layout.layers, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return states


def _forget(files: Mapping[str, BufferedWriter]) -> None:
    """Have the next read come from the disk where the system can be asked for that, so that it can be timed."""
    for file in files.values():
        file.flush()
        if hasattr(os, "posix_fadvise"):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _without(reason: str) -> None:
    logger.info("cache: not used, the model is run for every batch: %s", reason)


def _everywhere(ready: bool, device: torch.device) -> bool:
    """Whether the states are ready in every process of the run; all of them must take the same way."""
    if world_size() == 1:
        return ready
    answer = torch.tensor(int(ready), device=device)
    distributed.all_reduce(answer, distributed.ReduceOp.MIN)
    return bool(answer)


def _record(bank: Any, layers: Mapping[str, Sequence[int]], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    if hasattr(bank, "record_states"):
        return bank.record_states(layers, batch)
    return bank(**batch, readers=[], keep=layers).states


def _needs_block_inputs(fusion: Any) -> bool:
    return fusion.needs_block_inputs if hasattr(fusion, "needs_block_inputs") else fusion.follows
