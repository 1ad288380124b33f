"""Options that several commands share, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from lamina.bank import ReaderBank

BankArgument = Annotated[str, typer.Argument(metavar="BANK", help="Folder or hub id of a saved bank.")]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help='Folder or hub id of a model, or "minilm".')]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="Folder or hub id of the base; by default the one the bank names.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", help='Where to run: "cpu", "cuda", ...; "auto" takes a GPU if there is one.')
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Texts per pass.")]


def open_bank(folder: str, *, model: str | None = None, device: str = "auto") -> ReaderBank:
    """Load a bank, on the base that it names or another, and put it where it runs."""
    import torch

    from lamina.store import load, load_bank

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(f"device: '{device}' cannot be used; torch has none such. Use 'cpu' or 'auto'.") from None
    base, processor = (None, None) if model is None else load(model)
    return load_bank(folder, base, processor).to(device)


def chosen(bank: ReaderBank, names: str | None) -> list[str] | None:
    """The readers named in "a,b"; None stays None, which is all."""
    if names is None:
        return None
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        bank[name]  # an unknown name is an error that lists the known ones
    if not wanted:
        raise ConfigError(f"readers: '{names}' names none; the bank has {', '.join(bank)}. Name one, or leave it out.")
    return wanted
