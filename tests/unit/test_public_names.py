"""The public names load, and are those that type checkers are told of."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest


def told(module: str) -> dict[str, str]:
    """Name -> module, as the stub beside a package has it."""
    stub = Path(importlib.import_module(module).__file__ or "").with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # else checkers hide the name
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_type_checkers_are_told_what_is_loaded():
    lamina = importlib.import_module("lamina")
    assert sorted(lamina.__all__) == sorted(told("lamina")) == dir(lamina)
    for name, module in told("lamina").items():
        assert getattr(lamina, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["Mean", "Routing", "calibrate", "export_reader"])
def test_names_that_moved_work_for_one_release_with_a_warning(name: str):
    lamina = importlib.import_module("lamina")
    with pytest.warns(DeprecationWarning, match=rf"lamina\.{name} is now lamina\.[\w.]+\.{name}; .* goes in 0\.2\.0"):
        value = getattr(lamina, name)
    assert value.__name__ == name
    assert name not in lamina.__all__


def test_every_fusion_is_a_name_of_its_room():
    fusion = importlib.import_module("lamina.fusion")
    names = [fusion.FUSIONS.target(row).rpartition(":")[2] for row in fusion.FUSIONS.names()]
    assert [getattr(fusion, name).__name__ for name in names] == names
    with pytest.raises(AttributeError, match="NoSuchFusion"):
        _ = fusion.NoSuchFusion
