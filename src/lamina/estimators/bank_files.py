"""A fitted estimator as files: inside a pickle, and in a folder beside its bank."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lamina.bank import Reader, ReaderBank
from lamina.errors import StoreError, convert_errors, error_context
from lamina.fusion import FUSIONS
from lamina.fusion.base import FusionConfig
from lamina.heads import HEADS
from lamina.store import save_bank
from lamina.store.files import damaged, read_json, write_json
from lamina.store.manifest import MANIFEST, Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.estimators.base import LaminaEstimator

T = TypeVar("T")
FILE, FORMAT = "estimator.json", 1
_NOT_SAVED = ("processor", "random_state")  # objects; a seed is saved where it is a number


def files_of(bank: ReaderBank) -> dict[str, bytes]:
    """The files of a saved bank, which do not hold its model."""
    with TemporaryDirectory() as folder:
        bank.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def bank_of(files: Mapping[str, bytes], model: Any, processor: Any) -> ReaderBank:
    """The bank of such files on its model; a BaseMismatchError if it is another."""
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return ReaderBank.from_pretrained(folder, model, processor)


def write_estimator(estimator: LaminaEstimator, bank: ReaderBank, folder: Path) -> None:
    """Save a bank and, beside it, the parameters and fitted attributes that are not in it."""
    params = {name: _plain(value) for name, value in estimator.get_params(deep=False).items()}
    params |= {name: None for name in _NOT_SAVED if not isinstance(params[name], int)}
    if not isinstance(params["model"], str):
        params["model"] = None
    learnt = {name: _plain(value) for name, value in vars(estimator).items() if _is_learnt(name)}
    facts = {"format": FORMAT, "estimator": type(estimator).__name__, "params": params, "learnt": learnt}
    save_bank(bank, folder, files={FILE: lambda path: write_json(path, facts)})


def read_estimator(folder: Path, kind: type[T]) -> tuple[T, str | None]:
    """An estimator as it was saved, still without its bank, and the name of its model."""
    path = folder / FILE
    if not path.is_file():
        raise StoreError(f"load: {folder} has no {FILE}; give a folder that the `save` of an estimator wrote.")
    facts = read_json(path)
    if facts.get("format") != FORMAT:
        what = f"has format {facts.get('format')}; this version of lamina reads format {FORMAT}"
        raise StoreError(f"load: {path} {what}. Use the version that saved it, or a newer one.")
    if facts.get("estimator") != kind.__name__:
        raise StoreError(f"load: {folder} was saved by a {facts.get('estimator')}; it is no {kind.__name__}.")
    with error_context(f"in {path}"), convert_errors(lambda reason: damaged(path, f"cannot be understood ({reason})")):
        params, learnt = ({key: _value(cell) for key, cell in facts[part].items()} for part in ("params", "learnt"))
        estimator = kind(**params)
        vars(estimator).update(learnt)
        return estimator, params["model"] or Manifest.read(folder / MANIFEST).base.id


def _is_learnt(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_") and name not in ("bank_", "result_")


def _plain(value: Any) -> Any:
    """A value as JSON has it; what it has no form for is a mapping with one key that says which."""
    if isinstance(value, Reader):
        parts = {"fusion": FUSIONS.to_dict(value.fusion), "head": HEADS.to_dict(value.head)}
        return {"reader": {**parts, "stack": value.stack, "seed": value.seed}}
    if isinstance(value, FusionConfig):
        return {"fusion": FUSIONS.to_dict(value)}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, dict):
        return {"pairs": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value


def _value(plain: Any) -> Any:
    """What `_plain` described."""
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "reader" in plain:
        own = dict(plain["reader"])
        return Reader(FUSIONS.from_dict(own.pop("fusion")), HEADS.from_dict(own.pop("head")), **own)
    if "fusion" in plain:
        return FUSIONS.from_dict(plain["fusion"])
    if "array" in plain:
        return np.array(plain["array"], dtype=plain["dtype"])
    return {_value(key): _value(item) for key, item in plain["pairs"]}
