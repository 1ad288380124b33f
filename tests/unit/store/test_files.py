from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import SafetensorError

from lamina.errors import StoreError
from lamina.store.files import (
    claimed,
    read_json,
    read_steady,
    read_tensors,
    settle,
    staged,
    write_json,
    write_tensors,
)

NAMES = ("mark.json", "parts/one", "page.md")


def save(folder: Path, text: str, part: str = "one", error: BaseException | None = None) -> None:
    with staged(folder, NAMES, ["parts/stale"]) as stage:
        (stage / "parts").mkdir()
        if error is not None:
            raise error
        (stage / "parts" / part).write_text(text)
        for name in ("mark.json", "page.md"):
            (stage / name).write_text(text)


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


class TestStaged:
    def test_writes_every_entry_and_leaves_nothing_else(self, tmp_path: Path):
        save(tmp_path / "deep" / "bank", "new")
        assert files(tmp_path) == {
            "deep/bank/mark.json": "new",
            "deep/bank/parts/one": "new",
            "deep/bank/page.md": "new",
        }

    def test_replaces_entries_and_keeps_other_files(self, tmp_path: Path):
        save(tmp_path, "old", part="stale")
        (tmp_path / "log.txt").write_text("mine")
        save(tmp_path, "new")
        assert files(tmp_path) == {"mark.json": "new", "parts/one": "new", "page.md": "new", "log.txt": "mine"}

    @pytest.mark.parametrize(
        ("error", "raised"), [(RuntimeError("x"), StoreError), (KeyboardInterrupt("x"), KeyboardInterrupt)]
    )
    def test_a_failure_inside_changes_nothing(self, tmp_path: Path, error: BaseException, raised: type[BaseException]):
        save(tmp_path / "bank", "old")
        for name in ("bank", "other"):
            with pytest.raises(raised, match="x"):
                save(tmp_path / name, "new", error=error)
        assert set(files(tmp_path).values()) == {"old"}
        assert not (tmp_path / "other").exists()

    def test_an_error_that_is_not_of_the_disk_is_not_told_as_one(self, tmp_path: Path):
        save(tmp_path, "old")
        for error in (ValueError("no such shape"), RuntimeError("no such shape")):
            with pytest.raises(StoreError, match=r"was not written \(no such shape\); nothing in it was changed\.$"):
                save(tmp_path, "new", error=error)
        for error in (SafetensorError("I/O error: full"), PermissionError(13, "full")):
            with pytest.raises(
                StoreError, match=r"cannot be written \(.*full\); .*changed\. Check the rights and the sp"
            ):
                save(tmp_path, "new", error=error)

    def test_a_failure_while_swapping_puts_the_old_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        save(tmp_path, "old")
        move = os.renames

        def full(one: Path, to: Path) -> None:
            if "/.lamina-swap/new/" in str(one) and one.name == "one":
                raise OSError(28, "No space left on device")
            move(one, to)

        monkeypatch.setattr(os, "renames", full)
        with pytest.raises(
            StoreError, match=r"cannot be written \(No space left on device\); nothing in it was changed"
        ):
            save(tmp_path, "new")
        assert files(tmp_path) == {"mark.json": "old", "parts/one": "old", "page.md": "old"}

    def test_the_mark_comes_last(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        save(tmp_path, "old")
        moves, move = list[str](), os.renames
        monkeypatch.setattr(os, "renames", lambda one, to: (moves.append(one.name), move(one, to)))
        save(tmp_path, "new")
        assert moves == ["mark.json", "one", "page.md", "page.md", "one", "mark.json"]

    def test_what_is_neither_replaced_nor_listed_stays(self, tmp_path: Path):
        save(tmp_path, "old", part="mine")
        save(tmp_path, "old", part="stale")
        save(tmp_path, "new")
        assert files(tmp_path) == {"mark.json": "new", "parts/one": "new", "parts/mine": "old", "page.md": "new"}

    def test_a_folder_in_place_of_a_file_is_refused(self, tmp_path: Path):
        save(tmp_path, "old")
        (tmp_path / "page.md").unlink()
        (tmp_path / "page.md").mkdir()
        with pytest.raises(StoreError, match=r"cannot be written \(Is a directory\); nothing"):
            save(tmp_path, "new")

    def test_a_name_that_no_folder_can_have_is_refused(self, tmp_path: Path):
        with pytest.raises(StoreError, match=r"was not written \((mkdir: )?embedded null"):
            save(tmp_path / "a\0b" / "c", "new")

    @pytest.mark.usefixtures("impatient")
    def test_a_second_run_is_refused_and_the_first_may_go_on(self, tmp_path: Path):
        with claimed(tmp_path / "bank"):
            with (
                ThreadPoolExecutor() as other,
                pytest.raises(StoreError, match=r"bank is being written by another run"),
            ):
                other.submit(save, tmp_path / "bank", "other").result()
            save(tmp_path / "bank", "new")
            settle(tmp_path / "bank")
        assert set(files(tmp_path).values()) == {"new"}
        save(tmp_path / "bank", "newer")
        assert files(tmp_path).keys() == {"bank/mark.json", "bank/parts/one", "bank/page.md"}

    @pytest.mark.usefixtures("impatient")
    def test_saving_to_a_claimed_folder_does_not_release_it(self, tmp_path: Path):
        with claimed(tmp_path), ThreadPoolExecutor() as other:
            save(tmp_path, "new")
            with pytest.raises(StoreError, match="is being written by another run"):
                other.submit(save, tmp_path, "other").result()
        assert set(files(tmp_path).values()) == {"new"}

    @pytest.mark.usefixtures("impatient")
    def test_a_folder_is_read_while_another_run_writes(self, tmp_path: Path):
        save(tmp_path, "old")
        with ThreadPoolExecutor() as other, staged(tmp_path, NAMES) as stage:
            other.submit(settle, tmp_path).result()
            (tmp_path / ".lamina-swap" / "plan.json").write_text("[[], []]")
            with pytest.raises(StoreError, match="is being written by another run"):
                other.submit(settle, tmp_path).result()
            (tmp_path / ".lamina-swap" / "plan.json").unlink()
            (stage / "page.md").write_text("new")
        assert files(tmp_path) == {"page.md": "new"}

    def test_what_was_read_while_files_were_away_is_read_again(self, tmp_path: Path):
        save(tmp_path, "old")
        seen: list[bool] = []

        def read() -> bool:
            if not seen:  # a run that puts new files in place dies, and the next one undoes what it began
                (tmp_path / ".lamina-swap" / "old").mkdir(parents=True)
                (tmp_path / ".lamina-swap" / "plan.json").write_text('[["mark.json"], []]')
                (tmp_path / "mark.json").rename(tmp_path / ".lamina-swap" / "old" / "mark.json")
            seen.append((tmp_path / "mark.json").exists())
            settle(tmp_path)
            return seen[-1]

        assert read_steady(tmp_path, "mark.json", read)
        assert seen == [False, True]

    @pytest.mark.parametrize("plan", ["", "{}", "[[1], []]"])
    def test_a_damaged_plan_is_named(self, plan: str, tmp_path: Path):
        (tmp_path / ".lamina-swap").mkdir()
        (tmp_path / ".lamina-swap" / "plan.json").write_text(plan)
        with pytest.raises(StoreError, match=r"plan.json is not a plan \("):
            settle(tmp_path)

    @pytest.mark.parametrize("name", ["../mine", "/etc/hostname", "link/mine", "..", "a/.."])
    def test_a_plan_reaches_no_other_folder(self, name: str, tmp_path: Path):
        (tmp_path / "mine").write_text("mine")
        work = tmp_path / "bank" / ".lamina-swap"
        work.mkdir(parents=True)
        (tmp_path / "bank" / "link").symlink_to(tmp_path)
        (work / "plan.json").write_text(json.dumps([[], [name]]))
        with pytest.raises(StoreError, match=r"plan.json leads out of the folder"):
            settle(tmp_path / "bank")
        assert (tmp_path / "mine").read_text() == "mine"

    def test_a_list_of_old_files_reaches_no_other_folder(self, tmp_path: Path):
        (tmp_path / "mine").write_text("mine")
        save(tmp_path / "bank", "old")
        (tmp_path / "bank" / "link").symlink_to(tmp_path)
        listed = ["../mine", str(tmp_path / "mine"), "link/mine"]
        with staged(tmp_path / "bank", ["mark.json"], listed) as stage:
            (stage / "mark.json").write_text("{}")
        assert (tmp_path / "mine").read_text() == "mine"

    def test_nothing_is_written_through_a_link_out_of_the_folder(self, tmp_path: Path):
        save(tmp_path / "bank", "old")
        (tmp_path / "bank" / "parts" / "one").unlink()
        (tmp_path / "bank" / "parts").rmdir()
        (tmp_path / "bank" / "parts").symlink_to(tmp_path)
        before = files(tmp_path)
        with pytest.raises(StoreError, match=r"parts/one is outside of .*bank, by a link"):
            save(tmp_path / "bank", "new")
        assert files(tmp_path) == before

    def test_a_file_in_the_way_is_refused(self, tmp_path: Path):
        (tmp_path / "bank").write_text("")
        with pytest.raises(StoreError, match="is a file, not a folder"):
            save(tmp_path / "bank", "new")

    def test_a_folder_made_by_something_else_is_not_overwritten(self, tmp_path: Path):
        (tmp_path / "page.md").write_text("mine")
        with pytest.raises(StoreError, match=r"holds page.md but no mark.json"):
            save(tmp_path, "new")
        assert files(tmp_path) == {"page.md": "mine"}

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be written"):
            save(tmp_path / "file" / "bank", "new")


class TestJson:
    def test_round_trip(self, tmp_path: Path):
        fields = {"a": [1, 2.5, None], "ü": {"b": True}}
        write_json(tmp_path / "x.json", fields)
        assert read_json(tmp_path / "x.json") == fields

    def test_values_that_json_does_not_have_are_refused(self, tmp_path: Path):
        with pytest.raises(StoreError, match=r"x.json cannot be written \(Object of type Tensor"):
            write_json(tmp_path / "x.json", {"a": torch.zeros(1)})

    @pytest.mark.parametrize("content", [b'{"a": 1', b"", b"\xff\xfe{}", b"\x00\x01"])
    def test_damage(self, tmp_path: Path, content: bytes):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(StoreError, match=r"x.json is not JSON .*; the file is damaged"):
            read_json(tmp_path / "x.json")

    def test_a_key_that_comes_twice(self, tmp_path: Path):
        (tmp_path / "x.json").write_text('{"a": {"b": 1, "b": 2}}')
        with pytest.raises(StoreError, match=r"x\.json is not clear: the key 'b' comes twice"):
            read_json(tmp_path / "x.json")

    def test_something_else_than_an_object(self, tmp_path: Path):
        (tmp_path / "x.json").write_text("[1]")
        with pytest.raises(StoreError, match="holds no JSON object"):
            read_json(tmp_path / "x.json")

    def test_missing_or_a_folder(self, tmp_path: Path):
        with pytest.raises(StoreError, match=r"x.json is not there; the folder is incomplete"):
            read_json(tmp_path / "x.json")
        with pytest.raises(StoreError, match=rf"{tmp_path.name} is no file\."):
            read_json(tmp_path)


class TestTensors:
    EXPECTED: ClassVar = {"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(2), "n": torch.tensor(3)}

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write_tensors(tmp_path / "w.safetensors", self.EXPECTED)
        return tmp_path / "w.safetensors"

    def test_round_trip(self, path: Path):
        found = read_tensors(path, self.EXPECTED)
        assert found.keys() == self.EXPECTED.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in self.EXPECTED.items())

    def test_shared_and_transposed_tensors_are_written(self, tmp_path: Path):
        whole = torch.randn(4, 3)
        expected = {"a": whole, "b": whole.T, "c": whole[1:]}
        write_tensors(tmp_path / "x", expected)
        found = read_tensors(tmp_path / "x", expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    @pytest.mark.parametrize("kept", [0, 5, 8, 60, -1])
    def test_cut_off(self, path: Path, kept: int):
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(StoreError, match=r"w.safetensors is not safetensors .*; the file is damaged or cut off"):
            read_tensors(path, self.EXPECTED)

    def test_damaged_header(self, path: Path):
        content = bytearray(path.read_bytes())
        content[8:12] = b"\xff\xff\xff\xff"
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"w.safetensors is not safetensors"):
            read_tensors(path, self.EXPECTED)

    def test_missing_file(self, tmp_path: Path):
        with pytest.raises(StoreError, match=r"none.safetensors is not there"):
            read_tensors(tmp_path / "none.safetensors", self.EXPECTED)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"new": torch.zeros(1)}, "no tensor 'new'"),
            ({"w": torch.zeros(3, 2)}, r"'w' is \(2, 3\) instead of \(3, 2\)"),
            ({"n": torch.tensor(3.0)}, "'n' is torch.int64 instead of torch.float32"),
            ({"x": torch.zeros(1), "y": torch.zeros(1)}, r"no tensor 'x' \(and 1 more\)"),
        ],
    )
    def test_tensors_that_do_not_fit(self, path: Path, change: dict[str, torch.Tensor], message: str):
        with pytest.raises(StoreError, match=message):
            read_tensors(path, self.EXPECTED | change)

    def test_a_tensor_too_many(self, path: Path):
        with pytest.raises(StoreError, match="an unexpected tensor 'b'"):
            read_tensors(path, {name: tensor for name, tensor in self.EXPECTED.items() if name != "b"})


def test_json_is_readable_by_people(tmp_path: Path):
    write_json(tmp_path / "x.json", {"name": "Zoë"})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text == '{\n  "name": "Zoë"\n}\n'
    assert json.loads(text) == {"name": "Zoë"}


def test_all_files_have_the_usual_permissions(tmp_path: Path):
    with staged(tmp_path, ["mark.json", "weights"]) as stage:
        write_json(stage / "mark.json", {})
        (stage / "weights").touch(mode=0o600)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.is_file()}
    assert modes == {0o666 & ~umask()}


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask
