"""Load the model of an estimator once: clones, folds and threads that name the same model share one instance."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from lamina.errors import ConfigError
from lamina.store import load
from lamina.store.models import load_processor
from lamina.utils import is_dir

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor

# A hub id, a folder or "minilm"; or a loaded model.
ModelLike: TypeAlias = "str | Path | PreTrainedModel"
# What scikit-learn calls a random state: a seed, a generator, or None for the global generator.
RandomState: TypeAlias = "int | np.integer | np.random.RandomState | None"
_CACHED_MODELS = 2  # a search runs all folds with one model before it moves on to the next
_loading = Lock()  # threads that need the same model at the same time wait for a single load


def model_of(model: ModelLike, processor: Processor | None, op: str) -> tuple[PreTrainedModel, Processor]:
    """Return the model and its processor. A model that is given by name is loaded once and then cached.

    Args:
        model: Hub id or folder; or a loaded model, which is returned itself.
        processor: Tokenizer to use. None: the tokenizer that was saved with the model.
        op: Name of the calling method, which begins the error messages.

    Raises:
        ConfigError: If `model` is neither a name nor a model, or if there is no processor.
        ModelNotFoundError: If no model has this name.
    """
    if isinstance(model, str | Path):
        with _loading:
            loaded, saved_processor = _load(str(model), _file_times(Path(model)))
        return loaded, _checked(saved_processor if processor is None else processor, op)
    if not hasattr(model, "config"):
        came = f"model is {type(model).__name__}"
        raise ConfigError(f"{op}: {came}; it must be a hub id, a folder, 'minilm', or a model of transformers.")
    if processor is None and (name := getattr(model, "name_or_path", "")):
        processor = load_processor(name, model)
    return model, _checked(processor, op)


def _checked(processor: Processor | None, op: str) -> Processor:
    """Return `processor`; raise ConfigError if it is None."""
    if processor is None:
        raise ConfigError(f"{op}: there is no tokenizer with the model; one is needed. Give it as `processor`.")
    return processor


@lru_cache(maxsize=_CACHED_MODELS)
def _load(name: str, file_times: tuple[tuple[str, int], ...]) -> tuple[PreTrainedModel, Processor | None]:
    """Load the model `name` and its processor; or return them from the cache, if the files' times are unchanged."""
    del file_times  # only part of the cache key, so that a folder whose files changed is loaded again
    return load(name)


def _file_times(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return the sorted names and modification times (in nanoseconds) of a folder's files; () if it is no folder."""
    files = folder.glob("*") if is_dir(folder) else ()
    return tuple(sorted((path.name, path.stat().st_mtime_ns) for path in files if path.is_file()))
