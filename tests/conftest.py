"""What every test runs under: no network, one thread, a fixed seed, an empty hub cache.

The environment is set before anything imports torch or transformers, which read it once.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

WHOLE_RUNS = (
    "contract/test_cached_training",
    "contract/test_generation",
    "contract/test_monitors",
    "contract/test_processes",
    "contract/test_ray",
    "contract/test_sweeps",
    "contract/test_toy_kind",
    "contract/test_training",
    "contract/test_tuning",
    "end_to_end",
    "golden",
    "hostile",
    "unit/cli",
    "unit/estimators",
    "unit/prediction",
    "unit/recipes",
    "unit/serve/test_application",
    "unit/serve/test_generate",
    "unit/serve/test_reload",
    "unit/studies/test_advise",
    "unit/studies/test_errors",
    "unit/studies/test_probe.py",
    "unit/studies/test_removal",
    "unit/train",
)
# Files that share what is dear to make or to import: work -> beginnings of their paths.
TOGETHER = {
    "shipped recipes": tuple(
        f"tests/unit/recipes/test_{name}.py"
        for name in ("discussed_methods", "insertion_recipes", "paper_tasks", "reinit_recipes", "shipped_recipes")
    ),
    "graphs": ("tests/unit/prediction/test_backends", "tests/unit/prediction/test_int8", "tests/unit/store/test_onnx"),
}
_CACHE = tempfile.mkdtemp(prefix="lamina-tests-")
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HOME=_CACHE,
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    RAY_worker_niceness="0",  # else workers wait for whatever else this machine does
)
for _name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "LAMINA_CACHE"):
    os.environ.pop(_name, None)


def _show_shape_types() -> None:
    """Let the shape checker see the names that lamina imports for type checkers only.

    jaxtyping drops an annotation whose names it cannot find at run time, so without this
    no shape would ever be checked. ruff's TC004 finds a name that is used at run time.
    """
    import jaxtyping
    import torch

    for name in ("Float", "Int", "Bool", "Num", "Shaped"):
        setattr(builtins, name, getattr(jaxtyping, name))
    builtins.Tensor = torch.Tensor  # type: ignore[attr-defined]


def _seed_what_is_there() -> None:
    """Leave out devices that this machine lacks: until one is used torch keeps a stack trace of every seeding."""
    import torch

    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


_show_shape_types()
_seed_what_is_there()
os.fsync = lambda file: None  # milliseconds each, thousands of times; no test cuts the power off


class NetworkBlockedError(RuntimeError):
    """A test tried to reach something other than this machine."""


_connect, _connect_ex = socket.socket.connect, socket.socket.connect_ex


def _is_local(sock: socket.socket, address: Any) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = str(address[0])
    return host in ("localhost", "::1") or host.startswith("127.")


def _refuse_remote(sock: socket.socket, address: Any) -> None:
    if not _is_local(sock, address):
        raise NetworkBlockedError(f"connect: {address} is not this machine; tests run offline. Use local data.")


def _guarded_connect(self: socket.socket, address: Any) -> None:
    _refuse_remote(self, address)
    _connect(self, address)


def _guarded_connect_ex(self: socket.socket, address: Any) -> int:
    _refuse_remote(self, address)
    return _connect_ex(self, address)


def pytest_configure(config: pytest.Config) -> None:
    """Close the network, unless the run asked for the tests that need it (`-m network`)."""
    if config.getoption("markexpr", "") == "network":
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
            os.environ.pop(name, None)
        return
    socket.socket.connect = _guarded_connect  # type: ignore[method-assign]
    socket.socket.connect_ex = _guarded_connect_ex  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    """Open the network again and drop the cache this run used."""
    socket.socket.connect, socket.socket.connect_ex = _connect, _connect_ex  # type: ignore[method-assign]
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip by marker what this run cannot do: reach the hub, use a CUDA device. Leave out what is long or full."""
    _without_constants_of_the_code()
    if config.getoption("markexpr", ""):
        return
    for item in items:
        if item.get_closest_marker("network"):
            item.add_marker(pytest.mark.skip(reason="needs the hub: run with -m network"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    kept = [item for item in items if not (item.get_closest_marker("full") or item.get_closest_marker("long"))]
    chosen = {id(item) for item in kept}  # the others are thousands; each skipped one would be reported
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def _without_constants_of_the_code() -> None:
    """Have Hypothesis draw what it would draw whatever else is imported, and not parse all of Lamina for constants."""
    if "hypothesis" in sys.modules:
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported, and come seldom: else it takes one second in twenty."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under xdist, give one process all files that share what is dear to make, and spread the pages of the docs.

    Pages share nothing, and as one file they would keep one process busy when the other has ended.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByWork(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            if path == "tests/end_to_end/test_docs.py":
                return nodeid
            return next((work for work, paths in TOGETHER.items() if path.startswith(paths)), path)

    return ByWork(config, log)


@pytest.fixture(autouse=True, scope="module")
def _shape_checks(request: pytest.FixtureRequest) -> None:
    """Check shapes where the parts are tested; in whole runs the checks would take two thirds of the time."""
    import jaxtyping

    runs = request.path.relative_to(request.config.rootpath / "tests").as_posix().startswith(WHOLE_RUNS)
    jaxtyping.config.update("jaxtyping_disable", runs)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a moment instead of a second for the lock of another run."""
    from lamina.store import files

    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.05)


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    """Remove the handlers that a command adds to Lamina's logger, so that later tests do not print its warnings."""
    logger = logging.getLogger("lamina")
    before = list(logger.handlers)
    yield
    logger.handlers[:] = before
