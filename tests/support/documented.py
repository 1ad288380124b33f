"""Runs the Python of a page of the docs as it stands, and holds what it prints against what the page says."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^( *)```python([^\n]*)\n(.*?)^\1```\n(?:\n\1```text[^\n]*\n(.*?)^\1```\n)?", re.DOTALL | re.MULTILINE
)
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # "..." stands for anything


@dataclass(frozen=True)
class Block:
    """A block of Python, and the block of text that follows it: what it prints."""

    page: Path
    line: int
    code: str
    printed: str | None
    file: str | None = None  # that it is to be saved as, rather than run

    def run(self, names: dict[str, Any]) -> str:
        """Run it among some names, or save it in this folder; returns what it printed."""
        if self.file is not None:
            Path(self.file).write_text(self.code, encoding="utf-8")
            return ""
        out = io.StringIO()
        where = f"{self.page.relative_to(ROOT)}:{self.line}"
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (self.line - 1) + self.code, where, "exec"), names)
        return out.getvalue()

    def difference(self, printed: str) -> str:
        """How what was printed differs from the page; nothing if it does not."""
        if self.printed is None:
            return ""
        checker, wanted = doctest.OutputChecker(), doctest.Example(self.code, self.printed)
        if checker.check_output(self.printed, printed, _LIKE):
            return ""
        return f"{self.page.name}:{self.line}\n{checker.output_difference(wanted, printed, _LIKE)}"


def pages() -> list[Path]:
    """The pages with Python on them."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "```python" in page.read_text(encoding="utf-8")]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        indent, more, code, printed = found.groups()
        title = re.search('title="(.*?)"', more)
        line = text.count("\n", 0, found.start()) + 2
        plain = re.compile(f"^{indent}", re.MULTILINE)
        said = None if printed is None else plain.sub("", printed)
        yield Block(page, line, plain.sub("", code), said, title and title[1])
