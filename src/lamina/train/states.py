"""A group of texts and the hidden-state cache: when it can be used, filling it, and reading batches from it."""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import distributed

from lamina.data.batches import collate, length_batches
from lamina.data.cache import Layout, hash_features, hash_processor, key_of, open_reader, open_writer
from lamina.data.cache_files import cache_folder, size_text
from lamina.errors import CacheError, UnknownNameError
from lamina.utils import world_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.cache import StateReader, StateWriter
    from lamina.data.windows import Encoded

logger = logging.getLogger(__name__)

MODES = ("off", "auto", "on")
_TRIAL = 4  # batches that are timed before a whole set of texts is written
_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
_NOT_THE_STATES = {"_name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id"}


@final
@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """How a run uses the cache.

    Args:
        mode: "off", "on" (an error where it cannot be used), or "auto" (used where reading takes less time than
            computing, and the states fit).
        dtype: "float16" or "float32", of the files.
        folder: Where; None: `cache_folder()`.
        precision: What the model computes in, as in `FitOptions`.
        batch_size: Windows per pass while filling.
        passes: How often the texts will be read; "auto" fills for two or more.
        progress: Show a progress bar while filling.
    """

    mode: Literal["off", "auto", "on"] = "auto"
    dtype: Literal["float16", "float32"] = "float16"
    folder: str | Path | None = None
    precision: str = "float32"
    batch_size: int = 64
    passes: int = 2
    progress: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UnknownNameError(op="cache", got=self.mode, known=MODES, what="mode")


@final
class States:
    """The cached states of one group's windows.

    Args:
        bank: The readers and their model.
        encoded: The windows.
        layers: Stack -> layers that are needed; see `layers_of`.
        fingerprints: Stack -> hash of its weights.
        settings: Where and how.

    Attributes:
        key: Names the entry: another model, tokenizer, text, choice of layers, dtype or precision has another.
        layout: What the entry holds.
    """

    def __init__(
        self,
        bank: ReaderBank,
        encoded: Encoded,
        layers: Mapping[str, Sequence[int]],
        *,
        fingerprints: Mapping[str, str],
        settings: CacheSettings,
    ) -> None:
        self._bank, self._encoded, self._settings = bank, encoded, settings
        self._folder = cache_folder(settings.folder)
        self.layout = Layout(
            lengths=tuple(encoded.lengths),
            layers={stack: tuple(sorted(set(some))) for stack, some in layers.items()},
            widths={stack: bank.stacks[stack].width for stack in layers},
            dtype=settings.dtype,
        )
        self._facts = {
            "fingerprints": {stack: fingerprints[stack] for stack in layers},
            "config": _config(bank),
            "processor": hash_processor(bank.processor),
            "texts_hash": hash_features(encoded.features),
            "precision": settings.precision,
        }
        self.key = key_of({**self._facts, **self.layout.facts()})
        self._writer: StateWriter | None = None
        self._reader: StateReader | None = open_reader(self._folder, self.key, self.layout)

    @staticmethod
    def obstacle(bank: ReaderBank, names: Sequence[str], encoded: Encoded | None = None) -> str | None:
        """Why these readers cannot read cached states of these windows; None if they can."""
        if bank.train_base:
            return "the model is trained too, so its states change"
        for name in names:
            reader = bank[name]
            if reader.config.fusion.needs_block_inputs:
                return f"reader '{name}' needs more of the model's pass than its states"
            if reader.config.head.kind == "masked_lm":
                return f"reader '{name}' has its texts masked anew in each epoch"
            if reader.stack == "decoder":
                return f"reader '{name}' reads the decoder, whose padding the texts do not tell"
        for feature in encoded.features[:1] if encoded else ():
            if "attention_mask" not in feature or not feature.keys() <= _INPUTS:
                return f"the inputs are {', '.join(feature)}; only texts with an attention mask are cached"
        return None

    @property
    def ready(self) -> bool:
        """Whether batches can be read."""
        return self._reader is not None

    def batch(self, rows: Sequence[int], *, tokens: int = 0) -> dict[str, dict[int, Tensor]]:
        """Stack -> layer -> states `[batch, tokens, width]` of these windows, as `collate` pads them.

        Args:
            rows: Numbers of the windows.
            tokens: Pad to so many tokens at least, for a part of a larger batch.

        Raises:
            CacheError: If the states are not there yet.
        """
        if self._reader is None:
            raise CacheError("cache: the states of these texts are not written yet; all must be. Fill it.")
        return self._reader.batch(rows, tokens=tokens, device=self._bank.device)

    def begin(self) -> bool:
        """Take room for the states; waits for another process that writes the same ones.

        Returns:
            Whether there is anything to write: False if they are ready by now.

        Raises:
            CacheError: If they do not fit, or the folder cannot be written.
        """
        self._writer = open_writer(self._folder, self.key, self.layout)
        if self._writer is None:
            self._reader = open_reader(self._folder, self.key, self.layout)
        return self._writer is not None

    def record(self, rows: Sequence[int], states: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Store the states of some windows, padded on the right; `begin` comes first, `finish` or `abandon` last.

        Raises:
            CacheError: If the states cannot be stored as they are; nothing of the entry remains then.
        """
        if self._writer is None:
            raise CacheError("cache: nothing is being written; states are recorded between begin and finish. Begin.")
        try:
            self._writer.write(rows, states)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> bool:
        """Publish what was recorded, if no window is missing.

        Returns:
            Whether batches can be read now.

        Raises:
            CacheError: If the files cannot be written to their end.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            texts = self._encoded.text[-1] + 1 if self._encoded.text else 0
            self._reader = writer.finish({**self._facts, "model": self._bank.model.name_or_path, "texts": texts})
        return self.ready

    def abandon(self) -> None:
        """Drop what was recorded."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abandon()

    def fill(self, *, if_faster: bool = False) -> bool:
        """Run the model over all windows and store their states, unless they are there.

        Args:
            if_faster: Stop after a few batches if reading them from the disk took longer than computing them.

        Returns:
            Whether batches can be read now.

        Raises:
            CacheError: If the states cannot be stored.
        """
        if self.ready or not self.begin():
            return self.ready
        try:
            if self._run(if_faster=if_faster):
                return self.finish()
        finally:
            self.abandon()
        return False

    def _run(self, *, if_faster: bool) -> bool:
        """Record every window; False if reading is not worth it."""
        batches = length_batches(self._encoded.lengths, self._settings.batch_size)
        tried: list[list[int]] = []
        computing = 0.0
        for number, rows in enumerate(_bar(batches, self._settings.progress)):
            start = time.perf_counter()
            states = self._compute(rows)
            self._await_device()
            if number:  # the first one also warms up
                computing += time.perf_counter() - start
                tried.append(rows)
            self.record(rows, states)
            if if_faster and number == min(_TRIAL, len(batches) - 1) and not self._beats(computing, tried):
                return False
        return True

    def _compute(self, rows: Sequence[int]) -> dict[str, dict[int, Tensor]]:
        inputs = collate([self._encoded.features[row] for row in rows], self._bank.processor)
        inputs = {key: value.to(self._bank.device) for key, value in inputs.items()}
        with torch.no_grad(), _autocast(self._bank.device, self._settings.precision):
            return self._bank.record_states(self.layout.layers, inputs)

    def _await_device(self) -> None:
        if self._bank.device.type == "cuda":
            torch.cuda.synchronize(self._bank.device)

    def _beats(self, computing: float, tried: Sequence[Sequence[int]]) -> bool:
        """Whether reading some batches from the disk takes less time than computing them took."""
        if self._writer is None or not tried:
            return True
        self._writer.forget()
        reader = self._writer.reader()
        start = time.perf_counter()
        for rows in tried:
            reader.batch(rows, device=self._bank.device)
            self._await_device()
        reading = time.perf_counter() - start
        logger.info("cache: %d batches took %.3f s to compute and %.3f s to read", len(tried), computing, reading)
        return reading < computing


def layers_of(bank: ReaderBank, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Stack -> the layers that these readers need, ascending."""
    found: dict[str, set[int]] = {}
    for name in names:
        found.setdefault(bank[name].stack, set()).update(bank[name].layers)
    return {stack: tuple(sorted(layers)) for stack, layers in found.items()}


def open_states(
    bank: ReaderBank,
    encoded: Encoded,
    names: Sequence[str],
    *,
    fingerprints: Mapping[str, str],
    settings: CacheSettings,
) -> States | None:
    """The cached states of a group of texts, filled if they are not there yet.

    Args:
        bank: The readers and their model.
        encoded: The windows.
        names: The readers that will read them.
        fingerprints: Stack -> hash of its weights.
        settings: Where and how.

    Returns:
        States that are ready, or None where the model is to be run each time; in mode "auto" the reason is logged.

    Raises:
        CacheError: In mode "on", if the states cannot be cached.
    """
    if settings.mode == "off":
        return None
    auto = settings.mode == "auto"
    if reason := States.obstacle(bank, names, encoded):
        if not auto:
            raise CacheError(f"cache: {reason}; cached states cannot be used. Train with cache='auto' or 'off'.")
        return _without(reason)
    states = States(bank, encoded, layers_of(bank, names), fingerprints=fingerprints, settings=settings)
    if auto and not states.ready and settings.passes < 2:
        return _without("these texts are read only once")
    filled, problem = False, "reading takes longer than computing here"
    try:
        filled = states.fill(if_faster=auto)
    except CacheError as error:
        if not auto:
            raise
        problem = str(error)
        logger.warning(problem)
    if not _everywhere(filled, bank.device):
        return _without(problem)
    logger.info("cache: %s of states in %s", size_text(states.layout.size_bytes), states.key)
    return states


def _without(reason: str) -> None:
    logger.info("cache: not used, the model is run for every batch: %s", reason)


def _everywhere(ready: bool, device: torch.device) -> bool:
    """Whether the states are ready in every process of the run; all of them must take the same way."""
    if world_size() == 1:
        return ready
    answer = torch.tensor(int(ready), device=device)
    distributed.all_reduce(answer, distributed.ReduceOp.MIN)
    return bool(answer)


def _config(bank: ReaderBank) -> str:
    """What the model's config says, less what does not change its states."""
    facts = {key: value for key, value in bank.model.config.to_dict().items() if key not in _NOT_THE_STATES}
    return json.dumps(facts, sort_keys=True, default=str)


def _autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def _bar(batches: list[list[int]], progress: bool) -> Any:
    if not progress:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, desc="writing states", unit="batch")
