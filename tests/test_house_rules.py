"""Sizes, import direction and public names: the rules of the house that a tool can check."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lamina"
MODULES = sorted(PACKAGE.rglob("*.py"))
TIERS = (
    ("errors",),
    ("registry", "utils"),
    ("layers",),
    ("fusion",),
    ("heads",),
    ("bank",),
    ("editing",),
    ("store",),
    ("data",),
    ("tasks",),
    ("train",),
    ("recipes",),
    ("studies",),
    ("report",),
    ("serve", "demo"),
    ("cli",),
)
RANK = {name: rank for rank, tier in enumerate(TIERS) for name in tier}
PUBLIC = RANK["report"]  # `import lamina` itself: only what comes after report may go through the public names
LATE = ("bank", "store")  # the one import that points up, inside the bank's save methods

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def body_of(function: Function) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def count_statements(function: Function) -> int:
    return sum(isinstance(node, ast.stmt) for stmt in body_of(function) for node in ast.walk(stmt))


def count_lines(function: Function) -> int:
    body = body_of(function)
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


# Sizes


@pytest.mark.parametrize("path", [*MODULES, *sorted((ROOT / "benchmarks").rglob("*.py"))], ids=name_of)
def test_module_has_at_most_400_lines(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_no_function_has_more_than_40_statements():
    counts = {f"{name_of(path)}:{f.lineno} {f.name}": count_statements(f) for path in MODULES for f in functions(path)}
    assert {where: count for where, count in counts.items() if count > 40} == {}


def test_nine_functions_in_ten_have_at_most_30_lines():
    lines = [count_lines(function) for path in MODULES for function in functions(path)]
    assert sum(count <= 30 for count in lines) >= 0.9 * len(lines)


def test_sizes_are_counted_right():
    source = 'def f(x):\n    """Doc."""\n    if x:\n        y = 1\n    else:\n        y = 2\n    return y\n'
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert (count_statements(function), count_lines(function)) == (4, 5)


# Import direction


def part_of(path: Path) -> str:
    """The part of the package a file belongs to: `bank` for bank.py, `layers` for layers/tap.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(node: ast.AST, package: str) -> list[str]:
    """The parts of lamina that one statement imports; `""` stands for the public names themselves."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = (
            importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
        )
        modules = [f"{base}.{alias.name}" for alias in node.names] if base == "lamina" else [base or ""]
    else:
        return []
    parts = [module.split(".") for module in modules if module.split(".")[0] == "lamina"]
    targets = [names[1] if len(names) > 1 else "" for names in parts]
    return [target if target in RANK else "" for target in targets]


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def wrong_imports(tree: ast.Module, *, part: str, package: str) -> list[str]:
    """What a file of `part` imports against the order, as `line: name`."""
    late = {id(inner) for node in ast.walk(tree) if is_function(node) for inner in ast.walk(node)}
    late |= {id(inner) for node in ast.walk(tree) if guards_types(node) for inner in ast.walk(node)}
    wrong = []
    for node in ast.walk(tree):
        for target in imported_parts(node, package):
            allowed = target == part or RANK.get(target, PUBLIC) < RANK[part] or is_version(node)
            allowed = allowed or ((part, target) == LATE and id(node) in late)
            if not allowed:
                wrong.append(f"{getattr(node, 'lineno', 0)}: {target or 'lamina'}")
    return wrong


def guards_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_version(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["__version__"]


def test_every_part_has_its_place_in_the_order():
    parts = {part_of(path) for path in MODULES} - {"__init__", "__main__"}
    assert parts - RANK.keys() == set()


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(path) in RANK], ids=name_of)
def test_imports_go_up_the_list_only(path: Path):
    package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    assert wrong_imports(tree_of(path), part=part_of(path), package=package) == []


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("layers", "from lamina.bank import ReaderBank", ["1: bank"]),
        ("layers", "from ..fusion import AdaLayers", ["1: fusion"]),
        ("layers", "def f():\n    import lamina.store", ["2: store"]),
        ("layers", "if TYPE_CHECKING:\n    from lamina import cli", ["2: cli"]),
        ("fusion", "from lamina.heads import registry", ["1: heads"]),
        ("bank", "from lamina.store import save", ["1: store"]),
        ("data", "import lamina", ["1: lamina"]),
        ("bank", "from lamina.bank.streaming import Pass", []),
        ("heads", "from lamina import bank", ["1: bank"]),
        ("bank", "def save():\n    from lamina.store import save", []),
        ("bank", "from lamina.fusion import AdaLayers\nfrom ..layers import tap\nimport torch", []),
        ("layers", "from .tap import tap\nfrom lamina.errors import LaminaError\nfrom lamina import __version__", []),
        ("cli", "from lamina import fit\nimport lamina.serve", []),
    ],
)
def test_the_order_is_checked_right(part: str, source: str, wrong: list[str]):
    package = f"lamina.{part}"
    assert wrong_imports(ast.parse(source), part=part, package=package) == wrong


@pytest.mark.parametrize("module", [name for name in ("lamina", "lamina.cli") if importlib.util.find_spec(name)])
def test_import_loads_no_torch(module: str):
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'datasets'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# Public names and registries


def public_names() -> list[str]:
    lamina = importlib.import_module("lamina")
    return [name for name in getattr(lamina, "__all__", []) if name != "__version__"]


def documented_names() -> list[str]:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return re.findall(r"^::: lamina\.(\w+)$", text, flags=re.MULTILINE)


def test_public_names_are_the_documented_ones():
    assert sorted(public_names()) == sorted(documented_names())


def test_there_are_at_most_40_public_names():
    assert len(public_names()) <= 40


@pytest.mark.parametrize("name", public_names())
def test_public_name_loads_and_is_documented(name: str):
    value = getattr(importlib.import_module("lamina"), name)
    assert (value.__doc__ or "").strip()


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module("lamina").no_such_name


def registry_rows() -> list[str]:
    """Every `"lamina.part.module:Name"` written in the source: the rows of the registries."""
    texts = (node.value for path in MODULES for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant))
    return sorted({text for text in texts if isinstance(text, str) and re.fullmatch(r"lamina(\.\w+)+:\w+", text)})


@pytest.mark.parametrize("row", registry_rows())
def test_registry_row_imports(row: str):
    module, _, name = row.partition(":")
    assert getattr(importlib.import_module(module), name).__name__ == name
