"""Helpers that the whole package shares."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
import torch

from lamina.errors import ConfigError, StoreError
from lamina.utils import atomic_write, check_type, pluralize, remove_leftovers, seed_torch, write_text

FOREIGN = type("Task", (), {"__module__": "laminar"})()  # a class of another package with a name of Lamina's


@pytest.mark.parametrize(
    ("value", "kind", "rule"),
    [
        (True, "int", "a whole number"),
        (1.5, "int | None", "a whole number or None"),
        (torch.tensor([1]), "float", "a number"),
        ("no", "bool", "True or False"),
        (3, "Sequence[str] | None", "a list or None"),
        ("ab", "Sequence[str | Path] | None", "a list or None"),
        (torch.tensor(3), "Sequence[int]", "a list"),
        ({"a"}, "Sequence[str]", "a list"),
        (b"12", "Selector", "a layer number, a list of them, or a text such as 'top:4'"),
        (True, "Selector", "a layer number"),
        (3, "torch.Generator | None", "a torch.Generator or None"),
        ({"a": 1}, "Collection[str] | str", "a list or a set or a text"),
        (3, "Literal['all'] | Sequence[str]", "a name or a list"),
        ("ab", "Iterable[Text] | None", "a list or a set or None"),
        (3, "Study | str | Path | None", "a Study or a text or a path or None"),
        ("a", "ReaderBank", "a ReaderBank"),
        (FOREIGN, "Task", "a Task"),
        (3, "AnyMonitor", "a Monitor or a Cascade"),
    ],
)
def test_options_of_other_types_are_refused(value: object, kind: str, rule: str):
    with pytest.raises(ConfigError, match=f"here: size is .*; it must be {rule}"):
        check_type("here", "size", value, kind)


@pytest.mark.parametrize("kind", ["str | Path", "str | PathLike[str]", "Path | None"])
def test_an_empty_path_is_called_empty(kind: str):
    with pytest.raises(ConfigError, match=r"^here: size is empty; it must be a .*path"):
        check_type("here", "size", "", kind)


def test_numbers_of_numpy_and_torch_become_pythons():
    given = (np.int64(2), np.float32(0.5), 3, 0.25, torch.tensor(2))
    values = [check_type("here", "size", value, "float") for value in given]
    assert [type(value) for value in values] == [int, float, int, float, int]
    assert check_type("here", "size", {"a": 1}, "Mapping[str, int] | int") == {"a": 1}
    assert check_type("here", "size", 2, "Literal | int") == 2  # left to the function


@pytest.mark.parametrize(
    ("value", "kind", "rule"),
    [
        ([1, "2"], "Selector", r"size\[1\] is '2'; it must be a whole number"),
        (np.array([1.0]), "Selector", r"size\[0\] is 1\.0; it must be a whole number"),
        ((0, True), "Literal['all'] | Sequence[int]", r"size\[1\] is True; it must be a whole number"),
        ((FOREIGN,), "Sequence[Task]", r"size\[0\] is a laminar\.Task; it must be a Task"),
        (["a", None], "Sequence[str | Path] | None", r"size\[1\] is None; it must be a text or a path"),
    ],
)
def test_items_of_another_type_are_refused(value: object, kind: str, rule: str):
    with pytest.raises(ConfigError, match=f"^here: {rule}"):
        check_type("here", "size", value, kind)


def test_arrays_and_sets_become_lists_of_pythons_values():
    for value in (np.array([2, 1]), torch.tensor([2, 1]), [np.int64(2), 1], (torch.tensor(2), True + 0)):
        assert [*map(type, check_type("here", "size", value, "Selector"))] == [int, int]
    assert check_type("here", "size", {"b", "a", "c"}, "Collection[str] | None") == ["a", "b", "c"]
    assert check_type("here", "size", iter("ba"), "Collection[str]") == ["b", "a"]
    assert check_type("here", "size", (value for value in (np.float32(0.5), 1)), "Sequence[float]") == [0.5, 1]


def test_seeding_gives_the_numbers_of_torch():
    torch.manual_seed(2**62 + 7)
    expected = torch.rand(5), torch.randint(1 << 40, (5,)), torch.nn.functional.dropout(torch.ones(50))
    seed_torch(2**62 + 7)
    drawn = torch.rand(5), torch.randint(1 << 40, (5,)), torch.nn.functional.dropout(torch.ones(50))
    assert all(torch.equal(a, b) for a, b in zip(drawn, expected, strict=True))


def test_one_is_no_plural():
    assert [pluralize(count, "run") for count in (0, 1, 2, 1200)] == ["0 runs", "1 run", "2 runs", "1,200 runs"]


def test_a_pipe_is_not_replaced(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match=r"pipe cannot be written .*it is not a regular file"):
        write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


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
