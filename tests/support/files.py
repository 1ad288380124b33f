"""Small files of rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def tsv(path: Path, rows: list[str], header: str = "sentence\tlabel") -> Path:
    return put(path, "\n".join([header, *rows]) + "\n")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    return put(path, "".join(json.dumps(row) + "\n" for row in rows))
