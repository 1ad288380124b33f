"""The folder of the hidden-state cache: what is listed, who may write, and what a killed writer leaves."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections import namedtuple
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from lamina.data import disk_cache
from lamina.data.disk_cache import check_room, claim, clear, disk_errors, entries, publish, read_entry, unfinished
from lamina.errors import CacheError, ConfigError, UnknownNameError

KEY, OTHER = "a" * 32, "ab" + "c" * 30
Usage = namedtuple("Usage", "total used free")


def fill(folder: Path, key: str = KEY) -> None:
    with claim(folder, key) as private:
        assert private is not None
        (private / "main.bin").write_bytes(b"states")
        publish(private, {"model": "tiny", "rows": 5})


def index(folder: Path, key: str = KEY) -> Path:
    return folder / key / disk_cache.INDEX


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".locks"}


def test_where_states_are_cached(monkeypatch: pytest.MonkeyPatch):
    for name in ("LAMINA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert disk_cache.cache_folder() == Path("~/.cache/lamina").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert disk_cache.cache_folder() == Path("/xdg/lamina")
    monkeypatch.setenv("LAMINA_CACHE", "/own")
    assert disk_cache.cache_folder() == Path("/own")
    assert disk_cache.cache_folder("~/asked") == Path("~/asked").expanduser()


# Room


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 0, 919))
    check_room(tmp_path / "cache" / "deeper", 419)
    with pytest.raises(CacheError, match=r"420 bytes of states are needed.*919 bytes are free.*500 bytes") as caught:
        check_room(tmp_path / "cache" / "deeper", 420)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (420, 919)


def test_the_reserve_is_a_gibibyte_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**50, 0, disk_cache.GIB + 420))
    check_room(tmp_path, 420)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CacheError, match=r"cache: .*cache cannot be written \(.+\).*LAMINA_CACHE"),
        disk_errors(tmp_path / "file" / "cache"),
        claim(tmp_path / "file" / "cache", KEY),
    ):
        pass


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CacheError, match="No space left on device"), disk_errors(tmp_path):
        fill(tmp_path)
    monkeypatch.undo()
    assert contents(tmp_path) == set()
    fill(tmp_path)


# Entries


def test_a_whole_entry_is_not_written_again(tmp_path: Path):
    fill(tmp_path)
    with claim(tmp_path, KEY) as private:
        assert private is None
    entry = read_entry(tmp_path / KEY)
    assert entry is not None
    assert (entry.key, entry.problem, entry.facts["format"]) == (KEY, None, disk_cache.FORMAT)
    assert entry.facts["files"] == {"main.bin": 6}
    assert contents(tmp_path) == {KEY}


def test_what_is_not_published_is_gone(tmp_path: Path):
    with claim(tmp_path, KEY) as private:
        assert private is not None
        (private / "main.bin").write_bytes(b"st")
        assert entries(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), claim(tmp_path, KEY):
        raise KeyboardInterrupt
    assert contents(tmp_path) == set()


@pytest.mark.parametrize(
    "damage", ["short", "gone", "no index", "no JSON", "list", "no files", "format", "other", "deep"]
)
def test_a_damaged_entry_has_a_problem_and_is_replaced(tmp_path: Path, damage: str):
    fill(tmp_path)
    file, facts = tmp_path / KEY / "main.bin", json.loads(index(tmp_path).read_text())
    if damage == "short":
        os.truncate(file, 5)
    elif damage in ("gone", "no index"):
        (file if damage == "gone" else index(tmp_path)).unlink()
    else:
        texts = {"no JSON": "{", "list": "[]", "no files": f'{{"format": {disk_cache.FORMAT}}}', "deep": "[" * 99999}
        texts["other"] = json.dumps({**facts, "rows": 6})
        index(tmp_path).write_text(texts.get(damage, json.dumps({**facts, "format": 99})))
    entry = read_entry(tmp_path / KEY)
    assert entry is not None
    assert entry.problem is not None
    assert (entry.facts.get("format", disk_cache.FORMAT) != disk_cache.FORMAT) is (damage == "format")
    fill(tmp_path)
    entry = read_entry(tmp_path / KEY)
    assert entry is not None
    assert entry.problem is None


def test_entries_are_listed_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert entries(tmp_path / "none") == []
    now = time.time()
    for key, hours in ((KEY, 2), (OTHER, 0), ("b" * 32, 1)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now - 3600 * hours)
        fill(tmp_path, key)
    monkeypatch.undo()
    (tmp_path / "notes").mkdir()
    assert [entry.key for entry in entries(tmp_path)] == [OTHER, "b" * 32, KEY]
    old = entries(tmp_path)[2]
    assert (old.facts["model"], old.facts["rows"], old.problem) == ("tiny", 5, None)
    assert old.age_s == pytest.approx(7200, abs=60)
    assert old.size_bytes == 6 + index(tmp_path).stat().st_size


@pytest.mark.parametrize("listing", [1, 2])
def test_an_entry_that_another_process_removes_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: int
):
    fill(tmp_path)
    fill(tmp_path, OTHER)
    real, listings = Path.iterdir, list[Path]()

    def iterdir(path: Path):
        listings.append(path)
        if listings.count(tmp_path / KEY) == listing:
            shutil.rmtree(tmp_path / KEY, ignore_errors=True)
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [entry.key for entry in entries(tmp_path)] == [OTHER]
    assert not (tmp_path / KEY).exists()


def test_clearing_takes_what_is_asked_for_and_nothing_else(tmp_path: Path):
    assert clear(tmp_path / "none", "all") == []
    for key in (KEY, OTHER, "d" * 32):
        fill(tmp_path, key)
    (tmp_path / "notes").mkdir()
    (tmp_path / ("e" * 32 + ".txt")).write_text("mine")
    with pytest.raises(ConfigError, match="'a' is the start of 2 keys"):
        clear(tmp_path, "a")
    for which in ("f", ""):
        with pytest.raises(UnknownNameError, match=f"unknown entry '{which}'"):
            clear(tmp_path, which)
    assert [entry.key for entry in clear(tmp_path, "ab")] == [OTHER]
    assert contents(tmp_path) == {KEY, "d" * 32, "notes", "e" * 32 + ".txt"}
    assert len(clear(tmp_path, "all")) == 2
    assert contents(tmp_path) == {"notes", "e" * 32 + ".txt"}


# Several processes

fork = multiprocessing.get_context("fork")


def _start_and_hang(folder: Path, ready: Any) -> None:
    with claim(folder, KEY) as private:
        assert private is not None
        (private / "main.bin").write_bytes(b"st")
        ready.set()
        time.sleep(60)


@pytest.fixture
def hanging(tmp_path: Path):
    """A process in the middle of writing."""
    ready = fork.Event()
    process = fork.Process(target=_start_and_hang, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    yield process
    process.kill()
    process.join()


def test_a_killed_writer_leaves_nothing_that_is_used_and_the_next_one_cleans_up(tmp_path: Path, hanging: Any):
    assert unfinished(tmp_path) == []
    os.kill(hanging.pid, signal.SIGKILL)
    hanging.join()
    assert [path.name for path in unfinished(tmp_path)] == [f".{KEY}.new"]
    assert entries(tmp_path) == []
    assert read_entry(tmp_path / KEY) is None
    fill(tmp_path, OTHER)
    assert contents(tmp_path) == {OTHER}
    fill(tmp_path)
    assert contents(tmp_path) == {OTHER, KEY}


def test_clearing_leaves_a_living_writer_alone_and_removes_a_dead_ones_rest(tmp_path: Path, hanging: Any):
    clear(tmp_path, "all")
    assert contents(tmp_path) == {f".{KEY}.new"}
    os.kill(hanging.pid, signal.SIGKILL)
    hanging.join()
    clear(tmp_path, "all")
    assert contents(tmp_path) == set()


def _fill_slowly(folder: Path, results: Any) -> None:
    with claim(folder, KEY) as private:
        if private is not None:
            (private / "main.bin").write_bytes(b"sta")
            time.sleep(0.3)
            (private / "main.bin").write_bytes(b"states")
            publish(private, {})
        results.put("found" if private is None else "wrote")
    results.put((folder / KEY / "main.bin").read_bytes())


@pytest.mark.parametrize(("queue", "start"), [(fork.Queue, fork.Process), (Queue, Thread)])
def test_of_several_processes_or_threads_one_writes_and_all_read_the_same(tmp_path: Path, queue: Any, start: Any):
    results = queue()
    writers = [start(target=_fill_slowly, args=(tmp_path, results)) for _ in range(3)]
    for writer in writers:
        writer.start()
    got = [results.get(timeout=30) for _ in range(6)]
    for writer in writers:
        writer.join(timeout=30)
    assert sorted(one for one in got if isinstance(one, str)) == ["found", "found", "wrote"]
    assert [one for one in got if isinstance(one, bytes)] == [b"states"] * 3


def test_clearing_leaves_a_writing_thread_alone(tmp_path: Path):
    with claim(tmp_path, KEY) as private, claim(tmp_path, OTHER):
        thread = Thread(target=clear, args=(tmp_path, "all"))
        thread.start()
        thread.join(timeout=30)
        assert private is not None
        assert private.exists()
        assert unfinished(tmp_path) == []


def test_a_waiting_process_takes_over_when_the_writer_dies(tmp_path: Path, hanging: Any):
    results = fork.Queue()
    waiting = fork.Process(target=_fill_slowly, args=(tmp_path, results))
    waiting.start()
    time.sleep(0.3)
    assert results.empty()
    os.kill(hanging.pid, signal.SIGKILL)
    assert results.get(timeout=30) == "wrote"
    waiting.join(timeout=30)


def test_waiting_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "lamina")
    results = fork.Queue()
    first = fork.Process(target=_fill_slowly, args=(tmp_path, results))
    first.start()
    while not list(tmp_path.glob(".*.new/main.bin")):
        time.sleep(0.01)
    with claim(tmp_path, KEY) as private:
        assert private is None
    first.join(timeout=30)
    assert caplog.text.count("waiting for it") == 1


def test_a_thread_does_not_wait_for_itself(tmp_path: Path):
    with (
        claim(tmp_path, KEY),
        pytest.raises(CacheError, match=r"this thread is writing .* already"),
        claim(tmp_path, KEY),
    ):
        pass
    fill(tmp_path)
