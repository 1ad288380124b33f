"""The model under estimators: one that has a name is loaded once, and shared by clones, folds and threads."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from lamina.errors import ConfigError
from lamina.store import load
from lamina.store.models import load_processor
from lamina.utils import is_dir

_KEPT = 2  # models; a search goes through all folds with one before it takes the next
_loading = Lock()


def model_of(model: Any, processor: Any, op: str) -> tuple[Any, Any]:
    """A model and its processor: those given, or the ones that a name stands for."""
    if isinstance(model, str | Path):
        with _loading:  # threads that ask at once wait for one load
            loaded, own = _load(str(model), _stamp(Path(model)))
        return loaded, _checked(own if processor is None else processor, op)
    if not hasattr(model, "config"):
        came = f"model is {type(model).__name__}"
        raise ConfigError(f"{op}: {came}; it must be a hub id, a folder, 'minilm', or a model of transformers.")
    if processor is None and getattr(model, "name_or_path", ""):
        processor = load_processor(model.name_or_path, model)
    return model, _checked(processor, op)


def _checked(processor: Any, op: str) -> Any:
    if processor is None:
        raise ConfigError(f"{op}: there is no tokenizer with the model; one is needed. Give it as `processor`.")
    return processor


@lru_cache(maxsize=_KEPT)
def _load(name: str, stamp: tuple[tuple[str, int], ...]) -> tuple[Any, Any]:
    del stamp  # only there so that a folder that was written anew is read anew
    return load(name)


def _stamp(folder: Path) -> tuple[tuple[str, int], ...]:
    """When the files of a folder were written; empty for what is none."""
    files = folder.glob("*") if is_dir(folder) else ()
    return tuple(sorted((path.name, path.stat().st_mtime_ns) for path in files if path.is_file()))
