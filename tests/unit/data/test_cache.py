"""The files of the hidden-state cache: what comes back, who may write, and what a killed writer leaves."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lamina.data import cache, cache_files
from lamina.data.cache import Layout, StateWriter, hash_features, hash_processor, key_of, open_reader, open_writer
from lamina.errors import CacheError, ConfigError, UnknownNameError

LENGTHS = (3, 1, 5, 2, 4)
KEY, OTHER = "a" * 32, "ab" + "c" * 30
Usage = namedtuple("Usage", "total used free")


def layout(dtype: str = "float16") -> Layout:
    return Layout(LENGTHS, {"main": (1, 3), "encoder": (0,)}, {"main": 4, "encoder": 6}, dtype)


def states(rows: list[int], *, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, dict[int, Any]]:
    """What a model gave for these windows; the same numbers for a window whatever the batch, and junk as padding."""
    longest = max(LENGTHS[row] for row in rows)
    made: dict[str, dict[int, Any]] = {}
    for stack, layers, width in (("main", (1, 3), 4), ("encoder", (0,), 6)):
        made[stack] = {}
        for layer in layers:
            state = torch.full((len(rows), longest, width), 77.0)
            for at, row in enumerate(rows):
                generator = torch.Generator().manual_seed(100 * row + layer)
                state[at, : LENGTHS[row]] = scale * torch.randn(LENGTHS[row], width, generator=generator)
            made[stack][layer] = state.to(dtype)
    return made


def fill(folder: Path, key: str = KEY, dtype: str = "float32", **options: Any) -> cache.StateReader:
    writer = open_writer(folder, key, layout(dtype))
    assert writer is not None
    for rows in ([4, 1], [2], [0, 3]):
        writer.write(rows, states(rows, **options))
    reader = writer.finish({"model": "tiny", "texts": 5})
    assert reader is not None
    return reader


def check(reader: cache.StateReader, *, within: float = 0.0) -> None:
    for rows in ([0, 1, 2, 3, 4], [3, 0], [1]):
        for stack, layers in reader.batch(rows).items():
            for layer, state in layers.items():
                expected = states(rows)[stack][layer]
                for at, row in enumerate(rows):
                    expected[at, LENGTHS[row] :] = 0
                assert state.shape == expected.shape
                assert state.is_contiguous()
                assert (state - expected).abs().max() <= within * expected.abs().max()


# What comes back


def test_windows_written_in_any_order_come_back_in_any_order_padded_with_zeros(tmp_path: Path):
    fill(tmp_path)
    reader = open_reader(tmp_path, KEY, layout("float32"))
    assert reader is not None
    check(reader)


def test_half_precision_rounds_and_takes_half_the_room(tmp_path: Path):
    check(fill(tmp_path, dtype="float16"), within=2**-11)
    fill(tmp_path, OTHER)
    half, full = (cache_files.read_entry(tmp_path / key) for key in (KEY, OTHER))
    assert half is not None
    assert full is not None
    assert sum(half.facts["files"].values()) * 2 == sum(full.facts["files"].values()) == layout("float32").size_bytes


def test_padding_is_not_stored():
    assert layout().size_bytes == sum(LENGTHS) * (2 * 4 + 6) * 2


def test_states_come_back_in_the_dtype_they_had(tmp_path: Path):
    writer = open_writer(tmp_path, KEY, layout())
    assert writer is not None
    writer.write([0, 1, 2, 3, 4], states([0, 1, 2, 3, 4], dtype=torch.bfloat16))
    writer.finish({})
    reader = open_reader(tmp_path, KEY, layout())
    assert reader is not None
    state, expected = reader.batch([2])["main"][3], states([2], dtype=torch.bfloat16)["main"][3]
    assert state.dtype == torch.bfloat16
    assert torch.equal(state, expected)  # half precision has more digits than bfloat16


def test_a_batch_may_be_padded_further(tmp_path: Path):
    reader = fill(tmp_path)
    assert reader.batch([1], tokens=4)["main"][1].shape == (1, 4, 4)
    assert reader.batch([2], tokens=4)["main"][1].shape == (1, 5, 4)


def test_a_batch_does_not_change_when_the_next_is_read(tmp_path: Path):
    reader = fill(tmp_path)
    for dtype in (torch.float32, torch.float16):
        same = cache.StateReader(tmp_path / KEY, layout("float32"), dtype)
        first = same.batch([0, 3])["main"][1]
        before = first.clone()
        same.batch([4, 2])
        assert torch.equal(first, before)
    del reader


def test_the_widest_states_that_half_precision_holds(tmp_path: Path):
    fill(tmp_path, dtype="float16", scale=1e4)
    with pytest.raises(CacheError, match=r"beyond the range of float16.*cache_dtype='float32'"):
        fill(tmp_path, OTHER, dtype="float16", scale=1e6)
    fill(tmp_path, "b" * 32, dtype="float32", scale=1e6)


def test_padding_beyond_the_range_does_no_harm(tmp_path: Path):
    writer = open_writer(tmp_path, KEY, layout())
    assert writer is not None
    given = states([0, 1])
    given["main"][1][1, 1:] = float("nan")
    writer.write([0, 1], given)
    writer.abandon()


def test_states_with_other_tokens_than_the_windows(tmp_path: Path):
    writer = open_writer(tmp_path, KEY, layout())
    assert writer is not None
    given = states([0, 1])
    given["main"] = {layer: state[:, :2] for layer, state in given["main"].items()}
    with pytest.raises(CacheError, match=r"states are \(2, 2, 4\) for windows of \(2, 3, 4\)"):
        writer.write([0, 1], given)
    writer.abandon()


def test_unknown_dtype():
    with pytest.raises(UnknownNameError, match="unknown dtype 'float8'"):
        layout("float8")


# Keys


def test_everything_the_states_depend_on_changes_the_key():
    facts = {"fingerprints": {"main": "x"}, "layers": {"main": [1, 2]}}
    keys = {key_of(facts), key_of({**facts, "layers": {"main": [1]}}), key_of({**facts, "fingerprints": {"main": "y"}})}
    assert len(keys) == 3
    assert key_of(dict(reversed(facts.items()))) in keys


def test_another_format_has_other_keys(monkeypatch: pytest.MonkeyPatch):
    before = key_of({})
    monkeypatch.setattr(cache, "FORMAT", 2)
    assert key_of({}) != before


def test_texts_differ_by_tokens_masks_kinds_and_borders():
    plain = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [3], "attention_mask": [1]}]
    others = [
        [plain[1], plain[0]],
        [{"input_ids": [1], "attention_mask": [1]}, {"input_ids": [2, 3], "attention_mask": [1, 1]}],
        [{**plain[0], "attention_mask": [1, 0]}, plain[1]],
        [{**plain[0], "token_type_ids": [0, 0]}, plain[1]],
        plain[:1],
    ]
    assert len({hash_features(one) for one in [plain, *others]}) == 6
    bare = [[{"input_ids": [1, 2]}, {"input_ids": [3]}], [{"input_ids": [1]}, {"input_ids": [2, 3]}]]
    assert hash_features(bare[0]) != hash_features(bare[1])
    assert hash_features(plain) == hash_features([dict(reversed(one.items())) for one in plain])


def test_tokenizers_differ_by_class_and_vocabulary_not_by_the_last_call(byte_level: Any, metaspace: Any):
    before = hash_processor(byte_level)
    byte_level("the cat", truncation=True, max_length=1)
    assert hash_processor(byte_level) == before != hash_processor(metaspace)


def test_a_slow_tokenizer_has_a_hash_too():
    class Slow:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: at for at, word in enumerate(self.words)}

    assert hash_processor(Slow("a", "b")) == hash_processor(Slow("a", "b")) != hash_processor(Slow("b", "a"))


# Room


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 0, layout().size_bytes + 499))
    with pytest.raises(CacheError, match=r"420 bytes of states are needed.*919 bytes are free.*500 bytes") as caught:
        open_writer(folder, KEY, layout())
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (layout().size_bytes, layout().size_bytes + 499)
    assert not folder.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 0, layout().size_bytes + 500))
    fill(folder, dtype="float16")


def test_the_reserve_is_a_gibibyte_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**50, 0, cache_files.GIB + layout().size_bytes))
    fill(tmp_path, dtype="float16")


def test_room_is_taken_at_once(tmp_path: Path):
    writer = open_writer(tmp_path, KEY, Layout((1000,), {"main": (0,)}, {"main": 512}))
    assert writer is not None
    (file,) = tmp_path.glob(".*/main.bin")
    assert file.stat().st_blocks * 512 >= 1000 * 512 * 2
    writer.abandon()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fills_up_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CacheError, match=r"cannot be written \(No space left on device\)"):
        fill(tmp_path)
    monkeypatch.undo()
    check(fill(tmp_path))


def test_a_disk_that_is_full_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CacheError, match="No space left on device"):
        fill(tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    check(fill(tmp_path))


def test_without_fallocate_the_file_only_gets_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    check(fill(tmp_path))


# The folder


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file/cache cannot be written \(Not a directory\).*LAMINA_CACHE"):
        open_writer(tmp_path / "file" / "cache", KEY, layout())


def test_an_entry_that_cannot_be_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache_files.claim(tmp_path, OTHER)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", lambda self, *_, **options: None if options else refuse())
    with pytest.raises(CacheError, match=r"cannot be written \(Permission denied\)"):
        open_writer(tmp_path, KEY, layout())


def test_where_states_are_cached(monkeypatch: pytest.MonkeyPatch):
    for name in ("LAMINA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_files.cache_folder() == Path("~/.cache/lamina").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_files.cache_folder() == Path("/xdg/lamina")
    monkeypatch.setenv("LAMINA_CACHE", "/own")
    assert cache_files.cache_folder() == Path("/own")
    assert cache_files.cache_folder("~/asked") == Path("~/asked").expanduser()


def index(folder: Path, key: str = KEY) -> Path:
    return folder / key / cache_files.INDEX


def test_an_entry_of_another_version_is_not_used_but_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    fill(tmp_path)
    facts = json.loads(index(tmp_path).read_text())
    index(tmp_path).write_text(json.dumps({**facts, "format": 99}))
    assert open_reader(tmp_path, KEY, layout("float32")) is None
    assert "written in format 99; this version reads 1" in caplog.text
    check(fill(tmp_path))
    assert open_reader(tmp_path, KEY, layout("float32")) is not None


def test_entries_of_another_version_are_spoken_of_when_nothing_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    fill(tmp_path, OTHER)
    assert open_reader(tmp_path, KEY, layout("float32")) is None
    assert caplog.text == ""
    index(tmp_path, OTHER).write_text('{"format": 0}')
    assert open_reader(tmp_path, KEY, layout("float32")) is None
    assert f"1 entries in {tmp_path} were written by another version" in caplog.text


@pytest.mark.parametrize("damage", ["short", "gone", "no index", "no JSON", "list", "no files", "other layers"])
def test_a_damaged_entry_is_not_used_but_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str):
    fill(tmp_path)
    file, facts = tmp_path / KEY / "main.bin", json.loads(index(tmp_path).read_text())
    if damage == "short":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "gone":
        file.unlink()
    elif damage == "no index":
        index(tmp_path).unlink()
    elif damage == "no files":
        index(tmp_path).write_text(json.dumps({"format": 1}))
    elif damage == "other layers":
        index(tmp_path).write_text(json.dumps({**facts, "layers": {"main": [1, 2], "encoder": [0]}}))
    else:
        index(tmp_path).write_text({"no JSON": "{", "list": "[]"}[damage])
    assert open_reader(tmp_path, KEY, layout("float32")) is None
    assert "is not used" in caplog.text
    if damage != "other layers":  # whole by itself: only its key is wrong
        check(fill(tmp_path))


def test_an_entry_that_vanishes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(tmp_path)
    entry = cache_files.read_entry(tmp_path / KEY)
    shutil.rmtree(tmp_path / KEY)
    monkeypatch.setattr(cache, "read_entry", lambda _: entry)
    assert open_reader(tmp_path, KEY, layout("float32")) is None


def test_an_entry_is_published_only_when_no_window_is_missing(tmp_path: Path):
    writer = open_writer(tmp_path, KEY, layout())
    assert writer is not None
    writer.write([0, 1, 2, 3], states([0, 1, 2, 3]))
    assert not writer.complete
    assert writer.finish({}) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# Listing and clearing


def test_entries_are_listed_newest_first(tmp_path: Path):
    assert cache_files.entries(tmp_path / "none") == []
    for key, hours in ((KEY, 2), (OTHER, 0), ("b" * 32, 1)):
        fill(tmp_path, key)
        facts = json.loads(index(tmp_path, key).read_text())
        index(tmp_path, key).write_text(json.dumps({**facts, "made": time.time() - 3600 * hours}))
    (tmp_path / "notes").mkdir()
    old = cache_files.entries(tmp_path)[2]
    assert [entry.key for entry in cache_files.entries(tmp_path)] == [OTHER, "b" * 32, KEY]
    assert (old.facts["model"], old.facts["tokens"], old.problem) == ("tiny", sum(LENGTHS), None)
    assert old.age_s == pytest.approx(7200, abs=60)
    assert old.size_bytes == layout("float32").size_bytes + index(tmp_path).stat().st_size


def test_clearing_takes_what_is_asked_for_and_nothing_else(tmp_path: Path):
    assert cache_files.clear(tmp_path / "none", "all") == []
    for key in (KEY, OTHER, "d" * 32):
        fill(tmp_path, key)
    (tmp_path / "notes").mkdir()
    (tmp_path / ("e" * 32 + ".txt")).write_text("mine")
    with pytest.raises(ConfigError, match="'a' begins 2 keys"):
        cache_files.clear(tmp_path, "a")
    for which in ("f", ""):
        with pytest.raises(UnknownNameError, match=f"unknown entry '{which}'"):
            cache_files.clear(tmp_path, which)
    assert [entry.key for entry in cache_files.clear(tmp_path, "ab")] == [OTHER]
    assert {path.name for path in tmp_path.iterdir()} == {KEY, "d" * 32, "notes", "e" * 32 + ".txt", ".lock"}
    assert len(cache_files.clear(tmp_path, "all")) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "e" * 32 + ".txt", ".lock"}


def test_who_reads_is_not_disturbed_by_clearing(tmp_path: Path):
    reader = fill(tmp_path)
    cache_files.clear(tmp_path, "all")
    check(reader)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5e12, "4656.6 GiB")],
)
def test_sizes_for_people(size: float, text: str):
    assert cache_files.size_text(size) == text


# Several processes

fork = multiprocessing.get_context("fork")


def _start_and_hang(folder: Path, ready: Any) -> None:
    writer = open_writer(folder, KEY, layout("float32"))
    assert isinstance(writer, StateWriter)
    writer.write([0], states([0]))
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
    assert cache_files.unfinished(tmp_path) == []
    os.kill(hanging.pid, signal.SIGKILL)
    hanging.join()
    assert [path.name for path in cache_files.unfinished(tmp_path)] == [f".{KEY}.new"]
    assert cache_files.entries(tmp_path) == []
    assert open_reader(tmp_path, KEY, layout("float32")) is None
    fill(tmp_path, OTHER)
    assert {path.name for path in tmp_path.iterdir()} == {OTHER, ".lock"}
    check(fill(tmp_path))


def test_clearing_leaves_a_living_writer_alone_and_removes_a_dead_ones_rest(tmp_path: Path, hanging: Any):
    cache_files.clear(tmp_path, "all")
    assert (tmp_path / f".{KEY}.new").is_dir()
    os.kill(hanging.pid, signal.SIGKILL)
    hanging.join()
    (tmp_path / f".{OTHER}.old").mkdir()
    cache_files.clear(tmp_path, "all")
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def _fill_slowly(folder: Path, results: Any) -> None:
    writer = open_writer(folder, KEY, layout("float32"))
    if writer is None:
        results.put("found")
    else:
        for row in range(5):
            time.sleep(0.05)
            writer.write([row], states([row]))
        writer.finish({})
        results.put("wrote")
    reader = open_reader(folder, KEY, layout("float32"))
    assert reader is not None
    results.put(float(reader.batch([2])["main"][1].sum()))


def test_of_several_processes_one_writes_and_all_read_the_same(tmp_path: Path):
    results = fork.Queue()
    processes = [fork.Process(target=_fill_slowly, args=(tmp_path, results)) for _ in range(3)]
    for process in processes:
        process.start()
    got = [results.get(timeout=30) for _ in range(6)]
    for process in processes:
        process.join(timeout=30)
    assert sorted(one for one in got if isinstance(one, str)) == ["found", "found", "wrote"]
    assert {one for one in got if isinstance(one, float)} == {float(states([2])["main"][1].sum())}


def test_a_waiting_process_takes_over_when_the_writer_dies(tmp_path: Path, hanging: Any):
    results = fork.Queue()
    waiting = fork.Process(target=_fill_slowly, args=(tmp_path, results))
    waiting.start()
    time.sleep(0.3)
    assert results.empty()
    os.kill(hanging.pid, signal.SIGKILL)
    assert results.get(timeout=30) == "wrote"
    waiting.join(timeout=30)


def test_waiting_costs_nothing(tmp_path: Path, hanging: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "lamina")
    claimed: list[Any] = []
    waiting = threading.Thread(target=lambda: claimed.append(cache_files.claim(tmp_path, KEY)))
    waiting.start()
    time.sleep(0.2)
    os.kill(hanging.pid, signal.SIGKILL)
    waiting.join(timeout=30)
    assert caplog.text.count("waiting for it") == 1
    claimed[0].drop()


def test_a_process_does_not_wait_for_itself(tmp_path: Path):
    first = open_writer(tmp_path, KEY, layout())
    assert first is not None
    with pytest.raises(CacheError, match="written by this very process"):
        open_writer(tmp_path, KEY, layout())
    first.abandon()
    check(fill(tmp_path))


def test_files_hold_plain_numbers(tmp_path: Path):
    fill(tmp_path)
    assert {path.name for path in (tmp_path / KEY).iterdir()} == {"index.json", "main.bin", "encoder.bin"}
    raw = np.fromfile(tmp_path / KEY / "main.bin", "<f4").reshape(sum(LENGTHS), 2, 4)
    assert np.array_equal(raw[:3, 1], states([0])["main"][3][0].numpy())
