"""Choose what computes a bank's answers: PyTorch, or an exported graph in ONNX Runtime."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

from lamina.errors import ConfigError, LaminaError, StoreError
from lamina.store.manifest import MANIFEST
from lamina.store.onnx import MARK, export_onnx
from lamina.store.onnx_engine import OnnxEngine
from lamina.utils import is_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.layers.types import Batch

logger = logging.getLogger(__name__)

Backend: TypeAlias = Literal["auto", "torch", "onnx", "int8"]
BACKENDS = get_args(Backend)
EXPORTED = {"onnx": "onnx", "int8": "onnx-int8"}  # backend -> folder of its export, inside the bank's folder

# Bank -> backend -> its engine. A bank that is changed gets another engine.
_engines: WeakKeyDictionary[ReaderBank, dict[str, OnnxEngine]] = WeakKeyDictionary()
# Bank -> when the export was written that "auto" has refused, so that it is not tried again in every call.
_refused: WeakKeyDictionary[ReaderBank, float] = WeakKeyDictionary()
_opening = Lock()  # an export is opened, or written, by one thread at a time


@dataclass(frozen=True)
class ChosenEngine:
    """An `AnswerEngine`: the ONNX Runtime session that `engine_of` chose for a job.

    Attributes:
        engine: The ONNX Runtime session.
        strict: Whether it is an error if the engine cannot answer a batch. False: PyTorch answers that batch.
        op: The public operation, for messages.
    """

    engine: OnnxEngine
    strict: bool
    op: str = "predict"

    def run(self, bank: ReaderBank, batch: Batch, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return reader name -> logits of a batch for the readers `names`; None if the session cannot answer the batch.

        Raises:
            ConfigError: If the session cannot answer the batch and `strict` is set, or the weights of a frozen model
                have changed since the bank was made.
        """
        answered = self.engine.run(bank, batch, names)
        if answered is None and self.strict:
            reason = self.engine.obstacle(bank, batch, names)
            raise ConfigError(f"{self.op}: ONNX Runtime cannot answer: {reason}. Use backend='torch' or 'auto'.")
        return answered


def engine_of(
    bank: ReaderBank, backend: Backend, names: Sequence[str] | None = None, op: str = "predict"
) -> ChosenEngine | None:
    """Return the engine that computes a bank's answers for a backend; None if PyTorch computes them.

    On a CPU with onnxruntime installed, "auto" chooses ONNX Runtime if the folder from which the bank was loaded has an
    export of it, or one is open already. If the export does not fit, for example because its answers to a check batch
    differ from PyTorch's, the reason is logged, PyTorch answers, and this export is not tried again. "onnx" writes a
    missing or unfit export into the bank's folder; without a writable folder it is only kept in memory.

    Args:
        bank: The bank.
        backend: "auto", "torch", "onnx" or "int8".
        names: Names of the readers that must answer. None: all.
        op: The public operation, for messages.

    Raises:
        ConfigError: If the backend is "onnx" or "int8" and the bank is not on the CPU or its frozen model has changed;
            or it is "int8" and the bank's folder has no int8 export.
        StoreError: If the backend is "int8" and the export does not fit the bank; or it is "onnx" and the answers of a
            new export differ from PyTorch's.
        UnsupportedModelError: If the backend is "onnx" and the bank cannot be exported.
        MissingExtraError: If the backend is "onnx" or "int8" and its packages are not installed.
    """
    if backend == "torch" or (backend == "auto" and bank.folder is None and bank not in _engines):
        return None  # the usual cases, and quick
    if backend == "auto" and not _is_worth_trying(bank):
        return None
    try:
        with _opening:
            engine = _engine(bank, backend, list(bank if names is None else names), op)
    except LaminaError as error:
        if backend != "auto":
            raise
        _refused[bank] = _written(bank)
        logger.warning("%s: PyTorch answers, since ONNX Runtime cannot: %s", op, error)
        return None
    return ChosenEngine(engine, backend != "auto", op)


@contextmanager
def engine_in_use(bank: ReaderBank, backend: Backend, engine: OnnxEngine) -> Iterator[None]:
    """Inside the `with` block, use `engine` for this bank and backend; afterwards, restore the bank's engines."""
    before = dict(_engines.get(bank, {}))
    _engines[bank] = {**before, backend: engine}
    try:
        yield
    finally:
        _engines[bank] = before


def _is_worth_trying(bank: ReaderBank) -> bool:
    """Return whether "auto" should try ONNX Runtime.

    That is so if it is installed, the bank is on the CPU, and an export is open, or lies in the bank's folder. An
    export that did not fit before is not tried again.
    """
    is_open, written = "onnx" in _engines.get(bank, {}), _written(bank)
    if not (is_open or written) or _refused.get(bank) == written or bank.device.type != "cpu":
        return False
    return find_spec("onnxruntime") is not None  # last, since it takes longer than the rest


def _written(bank: ReaderBank) -> float:
    folder = export_folder(bank, "onnx")
    return (folder / MARK).stat().st_mtime if folder is not None and is_file(folder / MARK) else 0.0


def export_folder(bank: ReaderBank, backend: str) -> Path | None:
    """Return the subfolder of a bank's folder for a backend's export, which may not exist.

    None if the bank was not loaded from a folder, or that folder has no bank any more.
    """
    if bank.folder is None or not is_file(bank.folder / MANIFEST):
        return None
    return bank.folder / EXPORTED[backend]


def _engine(bank: ReaderBank, backend: Backend, names: Sequence[str], op: str) -> OnnxEngine:
    """Return the engine that answers for the readers `names`: an open one, or else the one in the bank's folder.

    For "onnx" an export is written if there is none, or it does not fit; "auto" and "int8" write none. The engine
    stays open for later calls. Raises the errors of `engine_of`, and for "auto" StoreError if no export fits.
    """
    name, engines = "onnx" if backend == "auto" else backend, _engines.get(bank, {})
    if name in engines and engines[name].answers_for(bank, names):
        return engines[name]
    if bank.device.type != "cpu":
        raise ConfigError(f"{op}: backend is '{backend}', and the bank is on {bank.device}; it is for CPUs.")
    folder, engine = export_folder(bank, name), None
    if folder is not None and is_file(folder / MARK):
        try:
            engine = OnnxEngine.open(bank, folder, names=names, quantised=name == "int8")
        except StoreError as error:
            if backend != "onnx":
                raise
            logger.warning("%s: the bank is exported again: %s", op, error)
    elif backend == "int8":
        hint = "Load the bank from its folder, after `lamina export BANK --int8 --validation FILE`"
        raise ConfigError(f"{op}: backend is 'int8', and the bank has no int8 export in its folder. {hint}.")
    elif backend == "auto":
        hint = "Use backend='onnx' to write another"
        raise StoreError(f"{op}: the bank's export lacks readers that must answer. {hint}.")
    engine = engine or _exported(bank, folder, op)
    _engines.setdefault(bank, {})[name] = engine
    return engine


def _exported(bank: ReaderBank, folder: Path | None, op: str) -> OnnxEngine:
    """Return an engine from a new export of all readers of a bank; errors as in `engine_of`.

    The export is written into `folder`. If `folder` is None or cannot be written, the export is only kept in memory.
    """
    if folder is not None:
        try:
            export_onnx(bank, folder)
            return OnnxEngine.open(bank, folder)
        except StoreError as error:  # if it is not the folder's fault, the second export raises it again
            logger.info("%s: the export is kept in memory: %s", op, error)
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        export_onnx(bank, temporary)
        return OnnxEngine.open(bank, Path(temporary))
