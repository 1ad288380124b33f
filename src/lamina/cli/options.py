"""Options that several commands share, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lamina.errors import ConfigError
from lamina.utils import is_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank

_SAVED = "Folder or hub id of a saved bank, or of a whole model that lamina fine-tuned or saved."
_BASE = "Folder or hub id of a bank's base; by default the one that the bank names."
_DEVICE = 'Where to run: "cpu", "cuda", ...; "auto" takes a GPU if there is one.'
_DATA = "Folder with a folder per preset; by default presets come from the hub."
_RAY = "Run cells as tasks of Ray: on this machine (local), on the cluster that runs here (auto), or at HOST:PORT."

SavedArgument = Annotated[str, Argument(metavar="BANK|MODEL", help=_SAVED)]
ModelArgument = Annotated[str, Argument(metavar="MODEL", help='Folder or hub id of a model, or "minilm".')]
DataOption = Annotated[Path | None, Option(help=_DATA)]
TextOption = Annotated[str | None, Option(help="Column of the text in a file; by default the usual one.")]
PairOption = Annotated[str | None, Option(help="Column of the second text in a file.")]
ModelOption = Annotated[str | None, Option(help=_BASE)]
DeviceOption = Annotated[str, Option(help=_DEVICE)]
BatchSizeOption = Annotated[int, Option(min=1, help="Texts per pass.")]
RayOption = Annotated[str | None, Option(metavar="local|auto|ADDRESS", help=_RAY)]
JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def open_saved(saved: str, *, base: str | None, device: str, writes: bool = False) -> ReaderBank | PreTrainedModel:
    """Load a bank, on the base that it names or another, or a whole model; and put it where it runs.

    With `writes` a base that was saved with a head that writes text has it.
    """
    import torch

    from lamina.store import load, load_bank
    from lamina.store.edited import read_record
    from lamina.store.manifest import MANIFEST
    from lamina.store.models import writing_class

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(f"device: '{device}' cannot be used; torch has none such. Use 'cpu' or 'auto'.") from None
    architecture = "" if is_file(Path(saved) / MANIFEST) else read_record(saved)[0]  # every saved model names it
    if not architecture:
        model, processor = (None, None) if base is None else load(base, writing_class(base) if writes else None)
        return load_bank(saved, model, processor, writes=writes).to(device)
    if base is not None:
        raise ConfigError(f"model: '{base}' was given as a base; {saved} is a whole model, which has none.")
    return load(saved, architecture)[0].to(device)  # pyright: ignore[reportArgumentType]
