"""Lamina: read, edit and study the layers of a pretrained transformer.

The public names, listed in the stub beside this file, load when first used: importing the package is quick and needs no
torch.
"""

import ast
from importlib import import_module
from pathlib import Path

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_WHERE = {
    name.name: node.module or "" for node in _STUB.body if isinstance(node, ast.ImportFrom) for name in node.names
}

__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'lamina' has no attribute '{name}'; it has {', '.join(__all__)}")
    if _WHERE[name] == __name__:  # a room of its own, as `lamina.studies`
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
