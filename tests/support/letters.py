"""The kind of task that the docs write in one file, as a third party would, and how it is registered."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tests.support.documented import ROOT, blocks

from lamina.heads import HEADS
from lamina.tasks import KINDS, kind_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FILE = next(block.code for block in blocks(ROOT / "docs" / "extending.md") if block.file == "letter_kind.py")


def register_letters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the file, register its kind and its head until the test ends, and return the kind."""
    (folder / "letter_kind.py").write_text(FILE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "letter_kind", raising=False)
    for registry, target in ((KINDS, "letter_kind:LetterKind"), (HEADS, "letter_kind:Letters")):
        monkeypatch.setattr(registry, "_rows", dict(zip(registry.names(), registry._rows.values(), strict=True)))
        registry.add("letters", target)
    kind_of.cache_clear()
    return kind_of("letters")
