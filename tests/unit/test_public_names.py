"""What type checkers are told about the lazily loaded names is what is loaded."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path


def told(module: str) -> dict[str, str]:
    """Name -> module, as the imports under TYPE_CHECKING have it."""
    tree = ast.parse(Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8"))
    guarded = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    return {
        alias.asname or alias.name: (node.module or "").removeprefix("lamina.")
        for node in guarded
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_are_told_what_is_loaded():
    loaded = importlib.import_module("lamina")
    assert told("lamina") == loaded._WHERE
    assert sorted(loaded.__all__) == sorted(loaded._WHERE)
