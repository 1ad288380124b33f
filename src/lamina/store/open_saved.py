"""Open a saved bank or a saved model by its name, without knowing which one it is."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lamina.bank import ReaderBank
from lamina.errors import ConfigError
from lamina.store.bank_folder import load_bank
from lamina.store.load_model import load
from lamina.store.manifest import MANIFEST, RECORD
from lamina.store.models import source_of, writing_class
from lamina.store.replay import read_record
from lamina.utils import is_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CACHED = 2  # models and banks that stay in memory


def open_saved(saved: str, *, base: str | None = None, writes: bool = False) -> ReaderBank | PreTrainedModel:
    """Load a saved bank or a saved whole model, in eval mode.

    Args:
        saved: Folder or hub id of the bank or model. In a folder with both, the bank is loaded.
        base: Folder or hub id of the bank's base model. None: the model that the bank names.
        writes: Whether to load a bank's base model with its language model head, if it was saved with one, so that it
            can generate text.

    Raises:
        ModelNotFoundError: If the base or the model cannot be found.
        StoreError: If the folder or repository does not exist, Lamina saved nothing there, or files are damaged.
        UnknownNameError: If a file has an unknown key, or a fusion or head is not registered.
        BaseMismatchError: If the bank's readers were not trained on `base`.
        UnsupportedModelError: If transformers does not know the family of the model or base.
        ConfigError: If `base` is given for a whole model.
    """
    # `lamina.save` records the class of every whole model. Banks have no such record.
    architecture = "" if is_file(Path(saved) / MANIFEST) else read_record(saved)[0]
    if not architecture:
        model, processor = (None, None) if base is None else load(base, writing_class(base) if writes else None)
        return load_bank(source_of(saved, None), model, processor, writes=writes)
    if base is not None:
        raise ConfigError(f"model: '{base}' was given as a base; {saved} is a whole model, which needs no base.")
    return load(saved, architecture)[0]


def open_cached(saved: str | Path) -> ReaderBank | PreTrainedModel:
    """Load a saved bank or model, or return the object that an earlier call with the same argument loaded.

    The object is moved to the GPU if there is one. The last two objects are cached. If the folder's manifest, record
    of edits or a file of weights was written again since the earlier call, the files are loaded again. `saved` and the
    errors are those of `open_saved`.
    """
    folder = Path(saved)
    weights = [path for depth in ("*", "*/*", "*/*/*") for path in sorted(folder.glob(f"{depth}.safetensors"))]
    written: list[int] = []
    for path in (folder / MANIFEST, folder / RECORD, *weights):
        with suppress(OSError):  # it may have gone meanwhile
            written.append(path.stat().st_mtime_ns)
    return _open_cached(str(saved), tuple(written))


@lru_cache(maxsize=_CACHED)
def _open_cached(saved: str, _written: tuple[int, ...]) -> ReaderBank | PreTrainedModel:
    """Load for `open_cached`. The cache's key includes `_written`, the files' times: changed files are read again."""
    loaded = open_saved(saved)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return loaded.to(device)  # pyright: ignore[reportArgumentType, reportUnknownMemberType, reportUnknownVariableType]
