"""Helpers that the whole package shares."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

from lamina.errors import StoreError
from lamina.utils import atomic_write, pluralize, remove_leftovers, seed_torch


def test_seeding_gives_the_numbers_of_torch():
    torch.manual_seed(2**62 + 7)
    expected = torch.rand(5), torch.randint(1 << 40, (5,)), torch.nn.functional.dropout(torch.ones(50))
    seed_torch(2**62 + 7)
    drawn = torch.rand(5), torch.randint(1 << 40, (5,)), torch.nn.functional.dropout(torch.ones(50))
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_one_is_no_plural():
    assert [pluralize(count, "run") for count in (0, 1, 2, 1200)] == ["0 runs", "1 run", "2 runs", "1,200 runs"]


def test_two_threads_replace_a_file_each_whole(tmp_path: Path):
    path, meet, met = tmp_path / "a.txt", Barrier(2), []

    def write(text: str) -> None:
        with atomic_write(path) as beside:
            beside.write_text(text)
            meet.wait(10)
            met.append(beside)

    threads = [Thread(target=write, args=(text,)) for text in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(met)) == 2
    assert path.read_text() in ("one", "two")
    assert list(tmp_path.iterdir()) == [path]


def test_errors_of_other_kinds_pass_through_a_write(tmp_path: Path):
    for error, expected in ((OSError("full"), StoreError), (RuntimeError("other"), RuntimeError)):
        with pytest.raises(expected), atomic_write(tmp_path / "a.txt", OSError):
            raise error
    assert not list(tmp_path.iterdir())


def test_only_what_is_left_of_a_file_itself_is_swept(tmp_path: Path):
    for name in ("a.txt", ".a.txt.12", ".a.txt.b.12", ".a.txt.swp"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path / "a.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.txt.b.12", ".a.txt.swp", "a.txt"]
