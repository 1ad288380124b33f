"""A process that dies at its n-th change of the file system leaves the old whole or the new whole, for every n."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import training
from tests.support.deaths import contents, deaths, dies, is_interrupted, is_killed, shown
from tests.support.stored import tiny_bank, tiny_model

from lamina.editing.keep import truncate_
from lamina.errors import LaminaError, StoreError
from lamina.recipes.report_file import REPORT, Curves, Point, Report, read_report_file, write_report_file
from lamina.report import write_report
from lamina.store import load, load_bank, save, save_bank
from lamina.store.files import claimed, settle, staged
from lamina.train.checkpoint import Checkpoints

NAMES = ("mark.json", "parts/one", "page.md")


def write(folder: Path, text: str, *others: str) -> None:
    with staged(folder, NAMES, ["parts/stale"]) as stage:
        (stage / "parts").mkdir()
        for name in (*NAMES, *others):
            (stage / name).write_text(text)


class Toy:
    """Small files, for the whole matrix in little time."""

    mark = NAMES[0]

    def old(self, folder: Path) -> None:
        write(folder, "old", "parts/stale")

    def new(self, folder: Path) -> None:
        write(folder, "new", "parts/more")

    open = staticmethod(settle)


class Bank:
    mark = "lamina.json"

    def __init__(self):
        self.model, self.banks = tiny_model(), (tiny_bank(), tiny_bank())
        self.banks[1].remove("who")

    def old(self, folder: Path) -> None:
        save_bank(self.banks[0], folder)

    def new(self, folder: Path) -> None:
        save_bank(self.banks[1], folder)

    def open(self, folder: Path) -> None:
        load_bank(folder, self.model)


class Model:
    mark = "lamina_edits.json"
    open = staticmethod(load)

    def __init__(self):
        self.models = (tiny_model(), tiny_model(1))
        truncate_(self.models[1], 1)

    def old(self, folder: Path) -> None:
        save(self.models[0], folder)

    def new(self, folder: Path) -> None:
        save(self.models[1], folder)


class Reported:
    """The report of a run in another format, which takes the place of the figures that were drawn before."""

    mark = REPORT

    def old(self, folder: Path) -> None:
        folder.mkdir()
        points = [Point("", "a", x, "f1", 0.1 * x, 0.0, None, 1, {}) for x in (1, 2)]
        write_report_file(folder / REPORT, Report([], [Curves("f", "validation", "k", points)]))
        write_report(folder, ["png"])

    def new(self, folder: Path) -> None:
        write_report(folder, ["svg"])

    def open(self, folder: Path) -> None:
        settle(folder)
        read_report_file(folder)


full = pytest.mark.full
SAMPLED = [
    (Toy, dies, 1),
    (Bank, dies, 11),
    (Model, dies, 7),
    (Toy, is_killed, 9),
    (Toy, is_interrupted, 2),
    (Reported, dies, 11),
]
WHOLE = [
    pytest.param(kind, kill, 1, marks=full) for kind in (Toy, Bank, Model) for kill in (is_killed, dies, is_interrupted)
]
REPORTS = [pytest.param(Reported, kill, 1, marks=full) for kill in (dies, is_interrupted)]


@pytest.mark.parametrize(("kind", "kill", "step"), [*SAMPLED, *WHOLE, *REPORTS])
def test_a_save_over_an_old_one(kind: type[Any], kill: Any, step: int, tmp_path: Path):
    saved, folder, seen = kind(), tmp_path / "x", set[bool]()
    saved.old(tmp_path / "before")
    (tmp_path / "before" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "before", folder)
    saved.new(folder)
    old, new = contents(tmp_path / "before"), contents(folder)
    for at in deaths(folder, tmp_path / "before", saved.new, kill, step):
        if (folder / saved.mark).exists():
            assert shown(folder) in (old, new), at
        saved.open(folder)
        assert shown(folder) in (old, new), at
        assert not (folder / ".lamina-swap" / "plan.json").exists()
        seen.add(shown(folder) == new)
        if kind is Toy or at % 3 == 0:
            saved.new(folder)
            assert contents(folder) == new, at
    assert seen == {False, True}


@pytest.mark.parametrize(("kind", "kill", "step"), [(Toy, dies, 1), (Bank, dies, 17), *WHOLE])
def test_a_first_save(kind: type[Any], kill: Any, step: int, tmp_path: Path):
    saved, folder = kind(), tmp_path / "x"
    saved.new(folder)
    new = contents(folder)
    for at in deaths(folder, None, saved.new, kill, step):
        try:
            saved.open(folder)
        except LaminaError:
            assert shown(folder) == {}, at
        assert shown(folder) in ({}, new), at
        saved.new(folder)
        assert contents(folder) == new, at


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=full)])
def test_whoever_puts_it_right_may_die_too(step: int, tmp_path: Path):
    write(tmp_path / "before", "old", "parts/stale")
    old, folder, died = contents(tmp_path / "before"), tmp_path / "x", tmp_path / "died"
    write(died, "new", "parts/more")
    new = contents(died)
    for at in deaths(died, tmp_path / "before", Toy().new):
        if not (died / ".lamina-swap" / "plan.json").exists():
            continue
        for again in count(1 + at % step, step):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(died, folder)
            ended = not dies(lambda: settle(folder), again)
            settle(folder)
            assert shown(folder) in (old, new), (at, again)
            if ended:
                break


def test_an_interrupted_save_puts_the_old_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, "old")
    old, calls, renames = contents(tmp_path), [], os.renames

    def interrupted(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 5:
            raise KeyboardInterrupt
        renames(source, target)

    monkeypatch.setattr(os, "renames", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, "new")
    assert contents(tmp_path) == old


def test_a_checkpoint(tmp_path: Path):
    folder, tensors = tmp_path / "x", {"w": torch.ones(2)}

    def steps(place: Path, *numbers: int) -> None:
        for number in numbers:
            Checkpoints(place, "fit", {"seed": 0}).save(number, tensors, {"step": number})

    steps(tmp_path / "before", 1, 2)
    for at in deaths(folder, tmp_path / "before", lambda place: steps(place, 3, 4)):
        state = Checkpoints(folder, "fit", {"seed": 0}).begin(resume=True)
        assert state is not None, at
        assert state[1]["step"] >= 2, at
        assert not [path for path in folder.iterdir() if path.name.startswith(".")], at
        for again in count(1 + at % 4, 4):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            ended = not dies(lambda copy=copy: Checkpoints(copy, "fit").begin(resume=False), again)
            Checkpoints(copy, "fit", {"seed": 0}).begin(resume=True)
            if ended:
                assert list(copy.iterdir()) == []
                break


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_of_another_program_stay(resume: bool, tmp_path: Path):
    for name in ("checkpoint-500", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "optimizer.pt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=r"fit: .* holds checkpoint-500, which was made by something else"):
        Checkpoints(tmp_path, "fit").begin(resume=resume)
    shutil.rmtree(tmp_path / "checkpoint-500")
    Checkpoints(tmp_path, "fit").begin(resume=resume)
    assert contents(tmp_path).items() < before.items()


@pytest.mark.usefixtures("impatient")
def test_a_second_run_on_one_output_is_refused(tmp_path: Path):
    task, train = training.yes_no(), training.train
    bank = training.tiny_bank({"one": training.reader(task)})
    with ThreadPoolExecutor() as other:
        with claimed(tmp_path / "out"), pytest.raises(StoreError, match=r"out is being written by another run"):
            other.submit(train, bank, {"one": task}, output=tmp_path / "out", epochs=1).result()
        assert not (tmp_path / "out").exists()
    train(bank, {"one": task}, output=tmp_path / "out", epochs=1)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_readers_that_are_gone_take_no_file_of_others_along(tmp_path: Path):
    saved = Bank()
    saved.old(tmp_path)
    (tmp_path / "readers" / "who" / "mine.txt").write_text("mine")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("mine")
    saved.new(tmp_path)
    assert {name for name in contents(tmp_path) if "who" in name or "base" in name} == {
        "readers/who/mine.txt",
        "base/config.json",
    }
