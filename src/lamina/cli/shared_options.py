"""Options that several commands share, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank

_SAVED = "Folder or hub id of a saved bank, or of a whole model that lamina fine-tuned or saved."
_BASE = "Folder or hub id of a bank's base; by default the one that the bank names."
_DEVICE = 'Where to run: "cpu", "cuda", ...; "auto" takes a GPU if there is one.'
_DATA = "Folder of the recipe's files, with a folder per preset; by default files are here, presets come from the hub."
_TEXT = 'Column of the text in a file; by default the only one, or one with a usual name, as "sentence" or "text".'
_RAY = "Run cells as tasks of Ray: on this machine (local), on the cluster that runs here (auto), or at HOST:PORT."

SavedArgument = Annotated[str, Argument(metavar="BANK|MODEL", help=_SAVED)]
ModelArgument = Annotated[str, Argument(metavar="MODEL", help='Folder or hub id of a model, or "minilm".')]
DataOption = Annotated[Path | None, Option(help=_DATA)]
TextOption = Annotated[str | None, Option(help=_TEXT)]
PairOption = Annotated[str | None, Option(help="Column of the second text in a file.")]
ModelOption = Annotated[str | None, Option(help=_BASE)]
DeviceOption = Annotated[str, Option(help=_DEVICE)]
BatchSizeOption = Annotated[int, Option(min=1, help="Texts per pass.")]
RayOption = Annotated[str | None, Option(metavar="local|auto|ADDRESS", help=_RAY)]
JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]


def open_on(saved: str, *, base: str | None, device: str, writes: bool = False) -> ReaderBank | PreTrainedModel:
    """Load a bank or a whole model, see `store.open_saved`, and put it where it runs."""
    import torch

    from lamina.store.open_saved import open_saved

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(f"device: '{device}' cannot be used; torch has none such. Use 'cpu' or 'auto'.") from None
    return open_saved(saved, base=base, writes=writes).to(device)  # pyright: ignore[reportArgumentType]
