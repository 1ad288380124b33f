"""A damaged cache of hidden states: computed again or one sentence, never other states."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import add_adapter, enable_adapters
from tests.support.cached import Rows, opened
from tests.support.training import reader, tiny_bank, tiny_model

from lamina.data.disk_cache import INDEX, clear, entries
from lamina.errors import CacheError

ROWS = Rows([[2, 5, 7, 3], [2, 6, 3], [2, 8, 9, 10, 3]])
FORGED: dict[str, Any] = {
    "states_dtype": "int8", "files": [], "layers": {"main": [-1]}, "rows": -3, "widths": {"main": 1 << 60},
    "format": "4", "checksums": None, "made": "now", "model": {"a": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def bank() -> Any:
    return tiny_bank({"a": reader()})


@pytest.fixture(scope="module")
def filled(bank: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    assert opened(bank, folder, ROWS) is not None
    return folder


@pytest.fixture
def entry(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "cache")
    return next(path for path in (tmp_path / "cache").iterdir() if path.name != ".locks")


def states_of(bank: Any, folder: Path) -> dict[int, torch.Tensor]:
    return opened(bank, folder, ROWS).batch([0, 1, 2])["main"]


def flip(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("times", [15, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [INDEX, "main.bin"])
def test_any_flipped_bit_is_noticed(name: str, times: int, bank: Any, entry: Path, caplog: pytest.LogCaptureFixture):
    expected, rng = states_of(bank, entry.parent), random.Random(0)
    for _ in range(times):
        caplog.clear()
        flip(entry / name, rng.randrange((entry / name).stat().st_size), rng.randrange(8))
        if name == INDEX:
            assert all(found.problem for found in entries(entry.parent))
        states = states_of(bank, entry.parent)
        assert "is not used" in caplog.text
        assert all(torch.equal(states[layer], expected[layer]) for layer in expected)
        caplog.clear()
        states_of(bank, entry.parent)
        assert caplog.text == ""


@pytest.mark.parametrize("name", FORGED)
def test_a_changed_index_is_noticed(name: str, bank: Any, entry: Path):
    expected = states_of(bank, entry.parent)
    facts = json.loads((entry / INDEX).read_text())
    (entry / INDEX).write_text(json.dumps({**facts, name: FORGED[name]}))
    assert [found.problem is None for found in entries(entry.parent)] == [False]
    states = states_of(bank, entry.parent)
    assert all(torch.equal(states[layer], expected[layer]) for layer in expected)


def index_folder(entry: Path) -> None:
    (entry / INDEX).unlink()
    (entry / INDEX).mkdir()
    (entry / INDEX / "something").touch()


def file_folder(entry: Path) -> None:
    (entry / "main.bin").unlink()
    (entry / "main.bin").mkdir()


def entry_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("no folder")


def dangling(entry: Path) -> None:
    (entry / "main.bin").unlink()
    (entry / "main.bin").symlink_to(entry / "nowhere")


def long_index(entry: Path) -> None:
    (entry / INDEX).write_text('{"format": ' + "9" * 10_000 + "}")


@pytest.mark.parametrize("damage", [index_folder, file_folder, entry_file, dangling, long_index])
def test_what_is_in_the_way_is_replaced(damage: Callable[[Path], None], bank: Any, entry: Path):
    expected = states_of(bank, entry.parent)
    damage(entry)
    entries(entry.parent)
    states = states_of(bank, entry.parent)
    assert all(torch.equal(states[layer], expected[layer]) for layer in expected)
    assert [found.problem for found in entries(entry.parent)] == [None]
    damage(entry)
    clear(entry.parent, "all")


def test_what_is_in_the_way_of_all_entries_is_one_sentence(bank: Any, entry: Path):
    shutil.rmtree(entry.parent / ".locks")
    (entry.parent / ".locks").write_text("")
    shutil.rmtree(entry)
    with pytest.raises(CacheError, match=r"cannot be written \(.+\)\. Choose another folder"):
        opened(bank, entry.parent, ROWS)


def test_adapters_have_entries_of_their_own(tmp_path: Path):
    """Nor does one with them off get the states of one with them on."""
    model: Any = tiny_model()
    add_adapter(model)
    with_adapter = states_of(tiny_bank({"a": reader()}, model), tmp_path)
    enable_adapters(model, False)
    without = states_of(tiny_bank({"a": reader()}, model), tmp_path)
    assert not torch.equal(with_adapter[1], without[1])
    plain = states_of(tiny_bank({"a": reader()}, tiny_model()), tmp_path)
    assert torch.equal(plain[1], without[1])
    assert len(entries(tmp_path)) == 2
