"""Sizes, import direction and public names: the rules of the house that a tool can check, one test a rule."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lamina"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = (
    ("errors",),
    ("registry", "utils"),
    ("layers",),
    ("fusion",),
    ("heads",),
    ("monitors",),
    ("bank",),
    ("editing",),
    ("store",),
    ("data",),
    ("tasks",),
    ("train",),
    ("prediction",),
    ("cells",),
    ("recipes",),
    ("studies",),
    ("report",),
    ("estimators", "serve", "vllm", "demo"),
    ("cli",),
)
RANK = {name: rank for rank, tier in enumerate(ROOMS) for name in tier}
TOP_LEVEL = {"__init__", "__main__", "errors", "registry", "utils"}
PUBLIC = RANK["report"]  # `import lamina` itself: only what comes after report may go through the public names

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> list[Function]:
    return [node for node in nodes_of(path) if isinstance(node, Function)]


def body_of(function: Function) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def count_statements(function: Function) -> int:
    return sum(1 + statements_below(stmt) for stmt in body_of(function))


def statements_below(node: ast.AST) -> int:
    """Count the statements inside one, without a look at its expressions, which have none."""
    parts = (ast.stmt, ast.excepthandler, ast.match_case)
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, parts)]
    return sum(isinstance(child, ast.stmt) + statements_below(child) for child in inner)


def count_lines(function: Function) -> int:
    body = body_of(function)
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


# Sizes


def test_modules_have_at_most_600_lines():
    counted = [*MODULES, *sorted((ROOT / "benchmarks").rglob("*.py"))]
    assert {name_of(path): lines_of(path) for path in counted if lines_of(path) > 600} == {}


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


# Shapes


def test_every_module_that_gives_shapes_has_them_checked(pytestconfig: pytest.Config):
    (option,) = (one for one in pytestconfig.getini("addopts") if one.startswith("--jaxtyping-packages="))
    packages = tuple(option.partition("=")[2].split(","))
    shaped = re.compile(r"\b(Float|Int|Bool|Num|Shaped)\[Tensor")
    with_shapes = [module_of(path) for path in MODULES if shaped.search(path.read_text(encoding="utf-8"))]
    assert [name for name in with_shapes if not f"{name}.".startswith(tuple(f"{one}." for one in packages))] == []
    assert len(with_shapes) > 20


# Import direction


def room_of(path: Path) -> str:
    """The room a file belongs to: `layers` for layers/hooks.py, `utils` for utils.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(node: ast.AST, package: str) -> list[str]:
    """The modules of lamina that one statement imports, in full."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        level = "." * node.level
        base = importlib.util.resolve_name(level + (node.module or ""), package) if level else node.module or ""
        inner = [f"{base}.{alias.name}" for alias in node.names]
        modules = inner if base == "lamina" else [base]
    else:
        return []
    return [module for module in modules if module.split(".")[0] == "lamina"]


def imported_rooms(node: ast.AST, package: str) -> list[str]:
    """The rooms that one statement imports from; `""` stands for the public names themselves."""
    targets = [module.split(".")[1] if "." in module else "" for module in imported_modules(node, package)]
    return [target if target in RANK else "" for target in targets]


def is_version(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["__version__"]


def wrong_imports(nodes: Iterable[ast.AST], *, room: str, package: str) -> list[str]:
    """What a file of `room` imports against the order, as `line: name`."""
    wrong = []
    for node in nodes:
        for target in imported_rooms(node, package):
            allowed = target == room or RANK.get(target, PUBLIC) < RANK[room] or is_version(node)
            if not allowed:
                wrong.append(f"{getattr(node, 'lineno', 0)}: {target or 'lamina'}")
    return wrong


def test_there_is_no_stray_module_at_the_top_level():
    assert {path.stem for path in PACKAGE.glob("*.py")} <= TOP_LEVEL
    assert {room_of(path) for path in MODULES} - TOP_LEVEL <= RANK.keys()


def test_modules_in_several_rooms_have_one_name_only_where_they_mirror_each_other():
    """`base` has the base classes of a room; a kind of task has one module for its data and one for its head."""
    places: dict[str, set[str]] = {}
    for path in MODULES:
        places.setdefault(path.stem, set()).add(path.relative_to(PACKAGE).parent.as_posix())
    shared = {name for name, rooms in places.items() if len(rooms) > 1 and rooms != {"heads", "tasks"}}
    assert shared == {"__init__", "base"}


def test_imports_go_up_the_list_only():
    wrong = {}
    for path in MODULES:
        if room_of(path) in RANK:
            package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
            wrong[name_of(path)] = wrong_imports(nodes_of(path), room=room_of(path), package=package)
    assert {name: imports for name, imports in wrong.items() if imports} == {}


# Where functions import modules of lamina to keep the start short, or because those modules need an extra.
LATE = (
    *("lamina.cli.", "lamina.vllm.plugin."),  # each command, and each process of vLLM, loads what it needs
    "lamina.train.training_run.",  # accelerate takes a second, and passes without training do not need it
    "lamina.report.html_page.",  # a page about a training run does not need the extra of studies
)
# Its tables have entries of higher rooms ("module:Name"), imported when a user names one in a lower room.
TABLES = {"lamina.registry"}


def package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def imports_between_files() -> dict[str, set[str]]:
    """Module -> modules that it imports at some time: at its top, inside functions, or for type checkers only."""
    known = {module_of(path): path for path in MODULES}
    graph: dict[str, set[str]] = {module: set() for module in known}
    for module, path in known.items():
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for target in imported_modules(node, package_of(module, path)):
                files = {f"{target}.{name}" for name in names} & known.keys() or {target} & known.keys()
                graph[module] |= files - {module}
    return graph


def late_imports(nodes: list[ast.AST], package: str) -> list[str]:
    """The modules of lamina that functions import, as `line: name`."""
    inside = [(node.lineno, node.end_lineno or 0) for node in nodes if isinstance(node, Function)]
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    late = [node for node in imports if any(first <= node.lineno <= last for first, last in inside)]
    return [f"{node.lineno}: {name}" for node in late for name in imported_modules(node, package)]


def test_no_files_import_each_other_in_a_circle():
    try:
        list(TopologicalSorter(imports_between_files()).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_functions_import_modules_only_where_start_up_time_counts():
    late = {}
    for path in MODULES:
        module = module_of(path)
        if not f"{module}.".startswith(LATE):
            late[module] = late_imports(nodes_of(path), package_of(module, path))
    assert {module: imports for module, imports in late.items() if imports} == {}


def named_above(nodes: Iterable[ast.AST], room: str) -> list[str]:
    """The modules of higher rooms that a file of `room` names as a text, as `line: name`."""
    named = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    modules = [(node, re.fullmatch(r"lamina\.(\w+)(\.\w+)*(:\w+)?", node.value)) for node in named]
    return [f"{node.lineno}: {node.value}" for node, text in modules if text and RANK.get(text[1], 0) > RANK[room]]


def test_no_module_names_a_module_of_a_higher_room_as_a_text():
    """A text like "lamina.store" would be imported later, and would hide a circle from the tests above.

    A room that needs code of a higher one asks `lamina.registry.provider` for it; `lamina/__init__.py` fills that in.
    """
    named = {}
    for path in MODULES:
        if room_of(path) in RANK and module_of(path) not in TABLES:
            named[name_of(path)] = named_above(nodes_of(path), room_of(path))
    assert {name: modules for name, modules in named.items() if modules} == {}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ('def f():\n    return import_module("lamina.store")', ["2: lamina.store"]),
        ('ROW = {"a": "lamina.tasks.task:Task"}', ["1: lamina.tasks.task:Task"]),
        ('op = "lamina.fusion"; name = "lamina.fitting"', []),
    ],
)
def test_modules_of_higher_rooms_are_found_in_texts(source: str, named: list[str]):
    assert named_above(ast.walk(ast.parse(source)), "bank") == named


@pytest.mark.parametrize(
    ("source", "late"),
    [
        ("def f():\n    from lamina.store import save", ["2: lamina.store"]),
        ("class A:\n    async def f(self):\n        if self:\n            import lamina.store", ["4: lamina.store"]),
        ("from lamina.store import save\ndef f():\n    import torch", []),
    ],
)
def test_late_imports_are_found(source: str, late: list[str]):
    assert late_imports(list(ast.walk(ast.parse(source))), "lamina.bank") == late


@pytest.mark.parametrize(
    ("room", "source", "wrong"),
    [
        ("layers", "from lamina.bank import ReaderBank", ["1: bank"]),
        ("layers", "from ..fusion import AdaLayers", ["1: fusion"]),
        ("layers", "def f():\n    import lamina.store", ["2: store"]),
        ("layers", "if TYPE_CHECKING:\n    from lamina import cli", ["2: cli"]),
        ("fusion", "from lamina.heads import registry", ["1: heads"]),
        ("bank", "from lamina.store import save", ["1: store"]),
        ("data", "import lamina", ["1: lamina"]),
        ("bank", "from lamina.bank.stack_pass import StackPass", []),
        ("heads", "from lamina import bank", ["1: bank"]),
        ("bank", "def save():\n    from lamina.store import save", ["2: store"]),
        ("bank", "from lamina.fusion import AdaLayers\nfrom ..layers import tap\nimport torch", []),
        ("layers", "from .tap import tap\nfrom lamina.errors import LaminaError\nfrom lamina import __version__", []),
        ("cli", "from lamina import fit\nimport lamina.serve", []),
    ],
)
def test_the_order_is_checked_right(room: str, source: str, wrong: list[str]):
    assert wrong_imports(ast.walk(ast.parse(source)), room=room, package=f"lamina.{room}") == wrong


def test_importing_the_package_or_the_command_line_loads_no_torch():
    code = "import sys, lamina, lamina.cli; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_nothing_outside_tasks_asks_for_a_kind_by_its_name():
    """Recipes and files name kinds; code that acts on a kind belongs to it."""
    from lamina.tasks import KINDS

    asked = []
    for path in MODULES:
        if room_of(path) in ("tasks", "heads"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Compare):
                texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                asked += [f"{name_of(path)}:{node.lineno}" for text in texts if text in KINDS.names()]
    assert asked == []


# Public names and registries


def public_names() -> list[str]:
    lamina = importlib.import_module("lamina")
    return [name for name in getattr(lamina, "__all__", []) if name != "__version__"]


def documented_names() -> list[str]:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    return re.findall(r"^(?:::: |      heading: )lamina\.(\w+)$", text, flags=re.MULTILINE)


def test_public_names_are_the_documented_ones_and_at_most_45():
    assert sorted(public_names()) == sorted(documented_names())
    assert len(public_names()) <= 45


def test_the_stability_page_says_how_stable_each_public_name_is():
    text = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:lamina\.)?(\w+)", text))
    assert [name for name in public_names() if name not in named] == []


@pytest.mark.parametrize("room", ["monitors", "studies"])
def test_the_names_of_public_rooms_are_documented(room: str):
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(rf"^(?:::: |      heading: )lamina\.{room}\.(\w+)$", text, flags=re.MULTILINE))
    assert (
        set(importlib.import_module(f"lamina.{room}").__all__) - {"AGGREGATIONS", "Aggregation", "Monitor"}
        == documented
    )


def test_public_names_load_and_have_docstrings():
    lamina = importlib.import_module("lamina")
    assert [name for name in public_names() if not (getattr(lamina, name).__doc__ or "").strip()] == []


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module("lamina").no_such_name


def test_registry_rows_import():
    """Every `"lamina.part.module:Name"` written in the source."""
    texts = (node.value for path in MODULES for node in nodes_of(path) if isinstance(node, ast.Constant))
    rows = {text for text in texts if isinstance(text, str) and re.fullmatch(r"lamina(\.\w+)+:\w+", text)}
    assert len(rows) > 10
    for row in sorted(rows):
        module, _, name = row.partition(":")
        assert getattr(importlib.import_module(module), name).__name__ == name


# English


def test_no_sentence_begins_with_a_phrase_that_hides_its_noun():
    fronted = re.compile(r"(?:^\s*|: |\. |\"\"\"|# )(?:Of|What is|That of|As of)\s", re.MULTILINE)
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    files = [file for folder in folders for ending in ("*.py", "*.md") for file in (ROOT / folder).rglob(ending)]
    found = [name_of(file) for file in (*files, *ROOT.glob("*.md")) if fronted.search(file.read_text(encoding="utf-8"))]
    assert found == []
