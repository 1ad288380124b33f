"""Open what was saved by its name: a bank, or a whole model."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lamina.errors import ConfigError
from lamina.store.bank_folder import load_bank
from lamina.store.load_model import load
from lamina.store.manifest import MANIFEST, RECORD
from lamina.store.models import source_of, writing_class
from lamina.store.replay import read_record
from lamina.utils import is_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank

_KEPT = 2  # opened by their names alone


def open_saved(saved: str, *, base: str | None = None, writes: bool = False) -> ReaderBank | PreTrainedModel:
    """Load a bank, on the base that it names or another, or a whole model.

    With `writes` a base that was saved with a head that writes text has it.

    Raises:
        ModelNotFoundError, StoreError: If there is none, or it is damaged.
        ConfigError: If a base is given for a whole model.
    """
    architecture = "" if is_file(Path(saved) / MANIFEST) else read_record(saved)[0]  # every saved model names it
    if not architecture:
        model, processor = (None, None) if base is None else load(base, writing_class(base) if writes else None)
        return load_bank(source_of(saved, None), model, processor, writes=writes)
    if base is not None:
        raise ConfigError(f"model: '{base}' was given as a base; {saved} is a whole model, which has none.")
    return load(saved, architecture)[0]


def opened(saved: str | Path) -> ReaderBank | PreTrainedModel:
    """The same, on a GPU if there is one, and kept for the next call, until the folder is written anew."""
    folder = Path(saved)
    written = [(folder / name).stat().st_mtime_ns for name in (MANIFEST, RECORD) if is_file(folder / name)]
    return _opened(str(saved), tuple(written))


@lru_cache(maxsize=_KEPT)
def _opened(saved: str, _written: tuple[int, ...]) -> ReaderBank | PreTrainedModel:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return cast("Any", open_saved(saved)).to(device)
