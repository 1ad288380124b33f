"""Convert fitted estimators to files, for pickles and for folders, and read them back."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar, cast

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

    from sklearn.base import BaseEstimator
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.utils import JSON

T = TypeVar("T")
FILE, FORMAT = "estimator.json", 1
_NOT_SAVED = ("processor", "random_state")  # objects without a JSON form; a `random_state` that is an integer is saved


def files_of(bank: ReaderBank) -> dict[str, bytes]:
    """Return the files of a saved bank (without the model) as relative path -> content."""
    with TemporaryDirectory() as folder:
        bank.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def bank_of(files: Mapping[str, bytes], model: PreTrainedModel, processor: Processor) -> ReaderBank:
    """Return a bank on `model` from its files, as `files_of` returned them.

    Raises:
        BaseMismatchError: If `model` is not the model that the bank was trained on.
    """
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return ReaderBank.from_pretrained(folder, model, processor)


def write_estimator(estimator: BaseEstimator, bank: ReaderBank, folder: Path) -> None:
    """Save `bank` in `folder`, and the parameters and fitted attributes of its estimator in `estimator.json` there."""
    params = {name: _to_json(value) for name, value in estimator.get_params(deep=False).items()}
    params |= {name: None for name in _NOT_SAVED if not isinstance(params[name], int)}
    if not isinstance(params["model"], str):
        params["model"] = None
    learnt = {name: _to_json(value) for name, value in vars(estimator).items() if _is_learnt(name)}
    facts = {"format": FORMAT, "estimator": type(estimator).__name__, "params": params, "learnt": learnt}
    save_bank(bank, folder, files={FILE: lambda path: write_json(path, facts)})


def read_estimator(folder: Path, kind: type[T]) -> tuple[T, str | None]:
    """Read the `estimator.json` of a folder that `write_estimator` wrote.

    Returns:
        The estimator, without its bank, and the name of its model (None if the model has no name).

    Raises:
        StoreError: If the file is missing or damaged, has another format, or is from another class than `kind`.
    """
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
        params, learnt = ({key: _from_json(cell) for key, cell in facts[part].items()} for part in ("params", "learnt"))
        estimator = kind(**params)
        vars(estimator).update(learnt)
        return estimator, cast("str | None", params["model"]) or Manifest.read(folder / MANIFEST).base.id


def _is_learnt(name: str) -> bool:
    """Return whether an attribute was set by `fit` and is saved as JSON; such names end with an underscore."""
    return name.endswith("_") and not name.startswith("_") and name not in ("bank_", "result_")


def _to_json(value: object) -> JSON:
    """Return a parameter or attribute as JSON.

    Readers, fusions, arrays and dictionaries become objects whose first key names their type, so that `_from_json` can
    restore them.
    """
    if isinstance(value, Reader):
        parts = {"fusion": FUSIONS.to_dict(value.fusion), "head": HEADS.to_dict(value.head)}
        return {"reader": {**parts, "stack": value.stack, "seed": value.seed}}
    if isinstance(value, FusionConfig):
        return {"fusion": FUSIONS.to_dict(value)}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, dict):
        return {"pairs": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    plain = value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value
    return cast("JSON", plain)


def _from_json(value: JSON) -> object:
    """Return the parameter or attribute for which `_to_json` returned `value`."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "reader" in value:
        reader = dict(value["reader"])
        return Reader(FUSIONS.from_dict(reader.pop("fusion")), HEADS.from_dict(reader.pop("head")), **reader)
    if "fusion" in value:
        return FUSIONS.from_dict(value["fusion"])
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    return {_from_json(key): _from_json(item) for key, item in value["pairs"]}
