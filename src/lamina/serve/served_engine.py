"""The engine that answers requests in place of PyTorch; it is renewed when the readers of a server change."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import TYPE_CHECKING, final

from lamina.bank import ReaderBank
from lamina.editing.record import location_of, set_location
from lamina.errors import LaminaError, StoreError, convert_errors
from lamina.prediction.backends import Backend, engine_of, export_folder
from lamina.store.onnx import MARK
from lamina.store.onnx_engine import OnnxEngine
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lamina.layers.types import Batch

logger = logging.getLogger(__name__)

_EXPORT = """
import sys
from lamina.bank import ReaderBank
from lamina.store.onnx import export_onnx
export_onnx(ReaderBank.from_pretrained(sys.argv[1]), sys.argv[2])
"""


@final
class ServedEngine:
    """Answers batches of a server with ONNX Runtime, if the backend allows it: an `AnswerEngine` for `BankRunner`.

    PyTorch answers a batch that the exported graph cannot answer. After a change of the readers, another process
    exports the new bank; until then, PyTorch answers for it. With the backend "onnx", a missing export is first written
    into the bank's folder. Raises LaminaError if the backend is "onnx" or "int8" and cannot answer for the bank.

    Args:
        backend: "auto", "torch", "onnx" or "int8"; see `engine_of`.
        bank: The bank that is served first.
    """

    def __init__(self, backend: Backend, bank: ReaderBank) -> None:
        chosen = engine_of(bank, backend)
        self._backend, self._engine = backend, None if chosen is None else chosen.engine
        self._told: set[str] = set()  # obstacles that were logged
        self._lock = Lock()  # for the fields below
        self._wanted: ReaderBank | None = None  # the bank that will be exported next
        self._thread: Thread | None = None  # exports, as long as a bank is wanted
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The backend that answers now: "torch", "onnx" or "int8"."""
        return "torch" if self._engine is None else "onnx" if self._engine.facts.int8 is None else "int8"

    def run(self, bank: ReaderBank, batch: Batch, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return reader name -> logits of a tokenised batch for the readers `names`; None if PyTorch must answer it.

        Each reason why the exported graph cannot answer is logged once. Raises ConfigError if the frozen model changed.
        """
        engine = self._engine
        if engine is None:
            return None
        answered = engine.run(bank, batch, names)
        if answered is None and (reason := str(engine.obstacle(bank, batch, names))) not in self._told:
            self._told.add(reason)
            logger.warning("serve: PyTorch answers some requests: %s", reason)
        return answered

    def follow(self, bank: ReaderBank) -> None:
        """Start making an engine for a new bank in the background, if ONNX Runtime answers but has no graph for it.

        For the backend "int8" nothing is made, and a warning is logged: PyTorch answers. Raises ConfigError if the
        frozen model has changed.
        """
        engine = self._engine
        if engine is None or engine.answers_for(bank, bank):
            return
        if self._backend == "int8":
            logger.warning("serve: PyTorch answers for readers that the int8 export does not have")
            return
        with self._lock:
            self._wanted = bank
            if self._thread is None and not self._closed:
                self._thread = Thread(target=self._catch_up, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End an export that is running, and begin no other."""
        with self._lock:
            self._closed, self._wanted = True, None
            if self._process is not None:
                self._process.kill()

    def _catch_up(self) -> None:
        """Export the requested bank and use its engine, until no bank is requested.

        An error is logged, and PyTorch answers for that bank.
        """
        while True:
            with self._lock:
                bank, self._wanted = self._wanted, None
                if bank is None or self._closed:
                    self._thread = None
                    return
            try:
                with convert_errors(lambda reason: StoreError(f"serve: the export failed ({reason}).")):
                    engine = self._opened(bank)
            except LaminaError as error:
                if not self._closed:
                    logger.warning("serve: PyTorch answers for new readers: %s", error, exc_info=error.__cause__)
                continue
            self._engine = engine
            self._told.clear()
            logger.info("serve: ONNX Runtime answers for %s", ", ".join(engine.names))

    def _opened(self, bank: ReaderBank) -> OnnxEngine:
        """Return an engine for a bank: from the export in its folder, if this fits; otherwise from a new one.

        Another process exports, because an export in this one would slow down requests, and change global settings of
        torch while it runs. Raises LaminaError if saving or exporting the bank fails, or the server is shutting down;
        OSError if the temporary folder or the process cannot be made.
        """
        folder = export_folder(bank, "onnx")
        if folder is not None and is_file(folder / MARK):
            try:
                return OnnxEngine.open(bank, folder)
            except StoreError as error:
                logger.info("serve: the bank is exported again: %s", error)
        with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            saved, exported = Path(temporary, "bank"), Path(temporary, "onnx")
            _save_with_base(bank, saved)
            with self._lock:
                if self._closed:
                    raise StoreError("serve: the server is shutting down.")
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _EXPORT, str(saved), str(exported)],
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},  # the other cores answer requests
                )
            told = self._process.communicate()[1].strip()
            if self._process.returncode:
                raise StoreError(f"serve: the export failed ({told.rpartition(chr(10))[2]}).")
            return OnnxEngine.open(bank, exported)


def _save_with_base(bank: ReaderBank, folder: Path) -> None:
    """Save a bank with its base model, so that another process can load both. Nothing in `bank` changes."""
    location, whole = location_of(bank.model), ReaderBank(bank.model, bank.processor, saves_base=True)
    whole.update(bank)
    try:
        whole.save_pretrained(folder)
    finally:
        set_location(bank.model, location)
