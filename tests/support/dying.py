"""Work for workers of Ray that imports no torch, so that they start at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lamina.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def dies(mark: Path, always: bool, item: int) -> int:
    """Return the item; item 3 ends the process, the first time or always."""
    if item == 3 and (always or not mark.exists()):
        mark.touch()
        os._exit(1)
    return item


class Odd:
    """Work that notes each item, and raises an error for some."""

    def __init__(self, folder: Path, wrong: tuple[int, ...], *, begins: bool = True) -> None:
        self.folder, self.wrong, self.begins = folder, wrong, begins

    def begin(self) -> None:
        if not self.begins:
            raise OSError("no GPU")

    def __call__(self, item: int) -> int:
        with (self.folder / str(item)).open("a") as file:
            file.write("x")
        if item in self.wrong:
            raise DataError(f"item {item}", row=item) if item % 2 else ValueError(f"item {item}")
        return item
