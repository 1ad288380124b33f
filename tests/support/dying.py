"""Work for workers of Ray that imports nothing, so that they start at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def dies(mark: Path, always: bool, item: int) -> int:
    """Return the item; item 3 ends the process, the first time or always."""
    if item == 3 and (always or not mark.exists()):
        mark.touch()
        os._exit(1)
    return item
