from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lamina.cli.cache_command import age
from lamina.data import disk_cache

KEY, OTHER = "a" * 32, "b" * 32


def fill(folder: Path, key: str) -> None:
    with disk_cache.claim(folder, key) as private:
        assert private is not None
        (private / "main.bin").write_bytes(bytes(160))
        facts = {"rows": 2, "tokens": 5, "layers": {"main": [1, 2, 3, 6]}, "dtype": "float16", "precision": "float32"}
        disk_cache.publish(private, {"model": "org/tiny", **facts})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAMINA_CACHE", str(tmp_path))
    fill(tmp_path, KEY)
    fill(tmp_path, OTHER)
    (tmp_path / OTHER / disk_cache.INDEX).write_text('{"format": 7}')
    return tmp_path


def test_it_lists_what_is_there(lamina, folder: Path):
    ran = lamina("cache")
    assert ran.code == 0
    assert f"{folder}: 2 entries" in ran.out
    row = next(line for line in ran.out.splitlines() if KEY in line)
    assert all(cell in row for cell in ("org/tiny", " 2 ", "main 1-3, 6", "float16", "bytes", " s "))
    assert f"written in format 7; this version reads {disk_cache.FORMAT}" in ran.out


def test_it_lists_as_json(lamina, folder: Path):
    facts = json.loads(lamina("cache", "--json").out)
    assert facts["folder"] == str(folder)
    entry = next(one for one in facts["entries"] if one["key"] == KEY)
    assert {name: entry[name] for name in ("model", "rows", "tokens", "layers", "dtype", "problem")} == {
        "model": "org/tiny",
        "rows": 2,
        "tokens": 5,
        "layers": {"main": [1, 2, 3, 6]},
        "dtype": "float16",
        "problem": None,
    }
    assert entry["size_bytes"] > 5 * 4 * 4 * 2
    assert 0 <= entry["age_s"] < 60
    assert facts["unfinished"] == []


def test_it_removes_one(lamina, folder: Path):
    ran = lamina("cache", "--clear", "aaa")
    assert (ran.code, ran.out.startswith(f"{folder}: removed 1 entry, ")) == (0, True)
    assert [entry.key for entry in disk_cache.entries(folder)] == [OTHER]


def test_it_removes_all(lamina, folder: Path):
    removed = json.loads(lamina("cache", "--clear", "all", "--json").out)["removed"]
    assert {entry["key"] for entry in removed} == {KEY, OTHER}
    assert lamina("cache").out == f"{folder}: no entries\n"


def test_what_a_killed_run_left_is_said_and_removed(lamina, folder: Path):
    (folder / f".{KEY}.new").mkdir()
    assert "1 unfinished files were left by killed runs" in lamina("cache").out
    assert json.loads(lamina("cache", "--json").out)["unfinished"] == [f".{KEY}.new"]
    lamina("cache", "--clear", OTHER)
    assert not (folder / f".{KEY}.new").exists()
    assert (folder / KEY).exists()


def test_an_unknown_key_is_an_error(lamina, folder: Path):
    ran = lamina("cache", "--clear", "zzz")
    assert (ran.code, ran.out) == (2, "")
    assert "cache: unknown entry 'zzz'" in ran.err


def test_another_folder(lamina, folder: Path, tmp_path: Path):
    assert lamina("cache", "--cache-dir", tmp_path / "none").out == f"{tmp_path / 'none'}: no entries\n"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0.4, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (200_000, "2 d")]
)
def test_age(seconds: float | None, text: str):
    assert age(seconds) == text


def test_a_cache_without_locks_is_listed(lamina, folder: Path):
    """As on a read-only disk: no lock can be taken, so nothing can be said of unfinished entries."""
    (folder / f".{KEY}.new").mkdir()
    shutil.rmtree(folder / ".locks")
    (folder / ".locks").write_text("")
    facts = json.loads(lamina("cache", "--json").out)
    assert (len(facts["entries"]), facts["unfinished"]) == (2, [])
    ran = lamina("cache", "--clear", OTHER)
    assert ran.code == 2
    assert "cannot be written" in ran.err
