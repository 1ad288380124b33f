"""What whole runs write survives a death at any change of the file system, and the next run goes on from there."""

from __future__ import annotations

import gc
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import finetuned, training
from tests.support.cached import cached_bank, cached_rows, opened
from tests.support.deaths import Contents, contents, deaths, dies, is_interrupted, is_killed
from tests.support.film_recipes import ADA, methods, recipe
from tests.support.stored import save_base, tiny_bank, tiny_model

from lamina import predict_file
from lamina.cli.edit_command import edit
from lamina.data.disk_cache import clear, entries
from lamina.editing.keep import truncate_
from lamina.editing.record import edits
from lamina.errors import StoreError
from lamina.prediction.bulk import Partial
from lamina.prediction.predict import Predictor
from lamina.recipes.run_recipe import run_recipe
from lamina.report import importance
from lamina.store import bank_folder, load, load_bank, load_model, save, save_bank
from lamina.store.files import claimed, read_steady, settle
from lamina.train.learner import Learner

full = pytest.mark.full
TABLES = {"table.json", "table.md", "table.parquet", "importances.parquet", "report.json"}


def written(folder: Path) -> Contents:
    """What a run leaves for its reader: neither checkpoints nor what is hidden."""
    hidden = ("checkpoint", ".", "separate")
    parts = {name: name.split("/") for name in contents(folder)}
    return {
        name: content
        for name, content in contents(folder).items()
        if not any(part.startswith(hidden) for part in parts[name])
    }


def hidden(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob(".*") if path.name != ".locks"]


class Fit:
    """A bank, its history and its tables."""

    def __init__(self, folder: Path):
        self.task = training.yes_no(train=6, validation=3)

    def run(self, folder: Path, *, seed: int = 0, resume: bool = False) -> None:
        bank = training.tiny_bank({"one": training.reader(self.task, seed=seed)})
        training.train(bank, {"one": self.task}, output=folder, batch_size=3, save_steps=1, resume=resume)

    def old(self, folder: Path) -> None:
        self.run(folder, seed=1)
        shutil.rmtree(folder / "checkpoints")

    def go_on(self, folder: Path) -> None:
        self.run(folder, resume=True)

    def sets(self, contents: Contents) -> list[Contents]:
        return [contents]

    def open(self, folder: Path) -> None:
        load_bank(folder, training.tiny_model())


class Finetune(Fit):
    """A whole model, its history and its table."""

    def __init__(self, folder: Path):
        self.task = training.yes_no(train=6, validation=3)

    def run(self, folder: Path, *, seed: int = 0, resume: bool = False) -> None:
        options = {"epochs": 1, "batch_size": 3, "learning_rate": 0.01, "seed": seed, "progress": False}
        processor = training.tiny_tokenizer()
        finetuned.finetune(
            finetuned.bert(), self.task, processor=processor, output=folder, save_steps=1, resume=resume, **options
        )

    def open(self, folder: Path) -> None:
        load(folder, "sequence_classification")


class Methods:
    """Fine-tuned models, one kept for the task, and the tables of a recipe; its runs one after the other."""

    def __init__(self, folder: Path):
        self.data = folder / "data"
        save_base(self.data / "base")
        rows = [f"the film is {('bad', 'good')[row % 2]} .\t{('no', 'yes')[row % 2]}\n" for row in range(6)]
        for part in ("train", "validation", "test"):
            (self.data / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))

    def run(self, folder: Path, *, seed: int = 0, resume: bool = False) -> None:
        fit = {"epochs": 1, "batch_size": 3, "learning_rate": 0.01, "progress": False, "save_steps": 1}
        films = methods(self.data, {"plain": {}, "again": {"fit": {"keep": "last"}}}, fit=fit, seeds=[seed])
        run_recipe(films, data=self.data, output=folder, resume=resume)

    def old(self, folder: Path) -> None:
        self.run(folder, seed=1)

    def go_on(self, folder: Path) -> None:
        self.run(folder, resume=True)

    def sets(self, contents: Contents) -> list[Contents]:
        return [
            {name: content for name, content in contents.items() if (name in TABLES) == tables}
            for tables in (False, True)
        ]

    def open(self, folder: Path) -> None:
        settle(folder)
        if (folder / "models").is_dir():
            load(folder / "models" / "film", "sequence_classification")


class Readers(Methods):
    """A recipe whose readers are in one bank, beside its tables."""

    def run(self, folder: Path, *, seed: int = 0, resume: bool = False) -> None:
        rate = (1 + seed) / 100
        fit = {"epochs": 1, "batch_size": 3, "learning_rate": rate, "progress": False, "save_steps": 1}
        films = recipe(self.data, {"Ada": ADA}, fit=fit)
        run_recipe(films, data=self.data, output=folder, resume=resume)

    def old(self, folder: Path) -> None:
        self.run(folder, seed=1)
        shutil.rmtree(folder / "checkpoints")

    def sets(self, contents: Contents) -> list[Contents]:
        return [contents]

    def open(self, folder: Path) -> None:
        load_bank(folder)


class Edit:
    """`lamina edit --overwrite` over a model."""

    def __init__(self, folder: Path):
        self.base = str(save_base(folder / "base"))

    def run(self, folder: Path, *, keep: int = 1) -> None:
        edit(self.base, folder, truncate=keep, overwrite=True)

    def old(self, folder: Path) -> None:
        self.run(folder, keep=2)

    def go_on(self, folder: Path) -> None:
        self.run(folder)

    def sets(self, contents: Contents) -> list[Contents]:
        return [contents]

    def open(self, folder: Path) -> None:
        load(folder)


KINDS: list[tuple[Callable[[Path], Any], int]] = [
    (Fit, 101),
    (Finetune, 131),
    (Methods, 311),
    (Readers, 161),
    (Edit, 83),
]
WHOLE = [pytest.param(kind, kill, 1, marks=full) for kind, _ in KINDS for kill in (is_killed, is_interrupted)]


@pytest.mark.parametrize(("kind", "kill", "step"), [*((kind, is_killed, step) for kind, step in KINDS), *WHOLE])
def test_a_run_over_an_old_one(kind: Any, kill: Any, step: int, tmp_path: Path):
    writer, folder, before = kind(tmp_path), tmp_path / "x", tmp_path / "before"
    writer.old(before)
    (before / "notes.txt").write_text("mine")
    shutil.copytree(before, folder)
    writer.run(folder)
    old, new = written(before), written(folder)
    assert old.keys() == new.keys()
    assert all(a != b for a, b in zip(writer.sets(old), writer.sets(new), strict=True))
    for at in deaths(folder, before, writer.run, kill, step):
        writer.open(folder)
        for now, one, other in zip(*map(writer.sets, (written(folder), old, new)), strict=True):
            assert now in (one, other), at
        writer.go_on(folder)
        assert written(folder) == new, at
        assert hidden(folder) == [], at


@pytest.mark.parametrize(("kind", "kill", "step"), WHOLE)
def test_a_first_run(kind: Any, kill: Any, step: int, tmp_path: Path):
    writer, folder = kind(tmp_path), tmp_path / "x"
    writer.run(folder)
    new = written(folder)
    for at in deaths(folder, None, writer.run, kill, step):
        settle(folder)
        settle(folder / "models" / "film")
        for now, other in zip(*map(writer.sets, (written(folder), new)), strict=True):
            assert now in ({}, other), at
        writer.go_on(folder)
        assert written(folder) == new, at
        assert hidden(folder) == [], at


# Bulk prediction

TEXTS = [f"anna was in paris {'and oslo ' * (row % 5)}" for row in range(7)]


class Bulk:
    def __init__(self, folder: Path, ending: str):
        (folder / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
        self.bank, self.source, self.name = tiny_bank(), folder / "in.txt", f"out.{ending}"

    def run(self, folder: Path, **options: Any) -> None:
        predict_file(self.bank, self.source, folder / self.name, chunk_rows=3, progress=False, **options)


BULK = [("jsonl", dies, 9), ("csv", is_interrupted, 13), ("parquet", is_killed, 23)]
BULK += [
    pytest.param(name, kill, 1, marks=full)
    for name in ("jsonl", "csv", "parquet")
    for kill in (dies, is_killed, is_interrupted)
]


@pytest.mark.parametrize(("ending", "kill", "step"), BULK)
def test_predictions(ending: str, kill: Any, step: int, tmp_path: Path):
    bulk, folder, before = Bulk(tmp_path, ending), tmp_path / "x", tmp_path / "before"
    before.mkdir()
    bulk.run(tmp_path)
    new = {bulk.name: (tmp_path / bulk.name).read_bytes()}
    (before / bulk.name).write_text("old")
    for at in deaths(folder, before, bulk.run, kill, step):
        assert written(folder) in ({bulk.name: b"old"}, new), at
        bulk.run(folder)
        assert contents(folder) == new, at


@pytest.mark.parametrize("step", [25, pytest.param(1, marks=full)])
@pytest.mark.parametrize("resume", [pytest.param(True, marks=full), False])
def test_predictions_that_die_again(resume: bool, step: int, tmp_path: Path):
    bulk, folder, died = Bulk(tmp_path, "jsonl"), tmp_path / "x", tmp_path / "died"
    (tmp_path / "before").mkdir()
    bulk.run(tmp_path)
    new = {bulk.name: (tmp_path / bulk.name).read_bytes()}
    for at in deaths(died, tmp_path / "before", bulk.run, step=step):
        for again in count(1 + at % step, step):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(died, folder)
            ended = not dies(lambda: bulk.run(folder, resume=resume), again)
            bulk.run(folder)
            assert contents(folder) == new, (at, again)
            if ended:
                break


# The cache


def states(folder: Path) -> dict[int, torch.Tensor]:
    cached = opened(cached_bank(), folder, cached_rows())
    assert cached is not None
    return cached.batch([0, 3])["main"]


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize(
    ("kill", "step"), [(dies, 17), *(pytest.param(kill, 1, marks=full) for kill in (is_killed, is_interrupted))]
)
def test_an_entry_of_the_cache(kill: Any, step: int, damaged: bool, tmp_path: Path):
    folder, before = tmp_path / "x", tmp_path / "before"
    before.mkdir()
    expected = states(before if damaged else tmp_path / "whole")
    if damaged:
        os.truncate(next(before.glob("*/main.bin")), 5)
    for at in deaths(folder, before, states, kill, step):
        (whole,) = entries(folder) or [None]
        assert whole is None or whole.problem is None or damaged, at
        for layer, state in states(folder).items():
            np.testing.assert_array_equal(state, expected[layer], err_msg=str(at))
        assert len(entries(folder)) == 1, at
        assert [path.name for path in folder.iterdir() if path.name != ".locks"] == [entries(folder)[0].key], at


@pytest.mark.parametrize("kill", [dies, is_interrupted, pytest.param(is_killed, marks=full)])
def test_clearing_the_cache(kill: Any, tmp_path: Path):
    folder, before = tmp_path / "x", tmp_path / "before"
    states(before)
    for at in deaths(folder, before, lambda place: clear(place, "all"), kill, least=2):
        assert all(entry.problem is None for entry in entries(folder)), at
        clear(folder, "all")
        assert [path.name for path in folder.iterdir()] == [".locks"], at


# Figures


@pytest.mark.long
@pytest.mark.parametrize("kill", [dies, pytest.param(is_interrupted, marks=full)])
def test_a_figure(kill: Any, tmp_path: Path):
    folder, before = tmp_path / "x", tmp_path / "before"
    rows = [{"reader": "one", "layer": layer, "importance": 0.5} for layer in range(2)]
    importance(rows[:1], before / "figure.svg")
    importance(rows, tmp_path / "new" / "figure.svg")
    old, new = _without_ids(contents(before)), _without_ids(contents(tmp_path / "new"))
    for at in deaths(folder, before, lambda place: importance(rows, place / "figure.svg"), kill, least=1):
        assert _without_ids(written(folder)) in (old, new), at
        importance(rows, folder / "figure.svg")
        assert _without_ids(written(folder)) == new, at


def _without_ids(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return pictures without the numbers of their clip paths, which count on within a process."""
    return {name: re.sub(rb"clip\d+", b"clip", content) for name, content in files.items()}


# Readers, neighbours, and rooms that are too small


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Runs a function in another thread, which holds no lock that this one holds."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda *call, **given: pool.submit(*call, **given).result()


@pytest.mark.parametrize("times", [1, 20])
def test_a_bank_that_is_replaced_while_it_is_read(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, banks, left = tiny_model(), (tiny_bank(), tiny_bank()), list(range(times))
    for parameter in banks[1].parameters():
        parameter.data.zero_()
    save_bank(banks[0], tmp_path)
    plain = bank_folder.read_tensors

    def replaced(*given: Any) -> Any:
        tensors = plain(*given)
        if left:
            save_bank(banks[left.pop() % 2 ^ 1], tmp_path)
        return tensors

    monkeypatch.setattr(bank_folder, "read_tensors", replaced)
    if times > 1:
        with pytest.raises(StoreError, match=r"is replaced again and again by another run"):
            load_bank(tmp_path, model)
    else:
        assert not any(parameter.any() for parameter in load_bank(tmp_path, model).parameters())


def test_a_model_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cut, plain, left = tiny_model(), load_model.read_record, [1]
    save(tiny_model(1), tmp_path)
    truncate_(cut, 1)

    def replaced(*given: Any) -> Any:
        record = plain(*given)
        if left:
            left.pop()
            save(cut, tmp_path)
        return record

    monkeypatch.setattr(load_model, "read_record", replaced)
    model, _ = load(tmp_path)
    assert ([edit.kind for edit in edits(model)], model.config.num_hidden_layers) == (["truncate"], 1)


def test_a_replacement_that_is_undone_while_the_folder_is_read(tmp_path: Path):
    bank, seen = Fit(tmp_path), list[str]()
    bank.old(tmp_path / "x")

    def read() -> None:
        if not seen:  # what replaces the bank dies after its plan is there, and another run puts the old one back
            assert is_killed(lambda: save_bank(training.tiny_bank({}), tmp_path / "x"), 25)
            assert (tmp_path / "x" / ".lamina-swap" / "plan.json").exists()
            settle(tmp_path / "x")
        seen.append("read")

    read_steady(tmp_path / "x", "lamina.json", read)
    assert seen == ["read", "read"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [Methods, Readers, Edit])
def test_a_second_run_on_one_output_is_refused(kind: Any, elsewhere: Any, tmp_path: Path):
    writer, folder = kind(tmp_path), tmp_path / "x"
    with claimed(folder), pytest.raises(StoreError, match=r"x is being written by another run"):
        elsewhere(writer.run, folder)
    assert not folder.exists()


@pytest.mark.usefixtures("impatient")
def test_a_second_prediction_into_one_file_is_refused(elsewhere: Any, tmp_path: Path):
    bulk = Bulk(tmp_path, "csv")
    with Partial.open(tmp_path / bulk.name, {}, resume=False):
        with pytest.raises(StoreError, match=r"predict: .*out.csv is being written by another run"):
            elsewhere(bulk.run, tmp_path)
        with pytest.raises(StoreError, match=r"predict: .*out.csv is being written by another run"):
            elsewhere(bulk.run, tmp_path, resume=False)
        assert (tmp_path / ".out.csv.partial").is_file()  # of the first, whose it is
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt"}  # no row was whole


def test_predictions_that_were_cut_off_are_not_gone_on_with(tmp_path: Path):
    bulk = Bulk(tmp_path, "jsonl")
    assert dies(lambda: bulk.run(tmp_path), 20)
    os.truncate(tmp_path / ".out.jsonl.partial", 3)
    with pytest.raises(StoreError, match=r"has 3 bytes of the \d+ that were written; it was cut off"):
        bulk.run(tmp_path)
    bulk.run(tmp_path, resume=False)
    assert len((tmp_path / bulk.name).read_text().splitlines()) == len(TEXTS)


@pytest.mark.parametrize("kind", [Fit, Methods])
def test_an_output_without_room_is_refused_before_training(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer, folder = kind(tmp_path), tmp_path / "x"
    writer.run(folder)
    before, usage = contents(folder), shutil.disk_usage(tmp_path)
    needed = max(path.stat().st_size for path in folder.rglob("*.safetensors"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=needed // 2))
    monkeypatch.setattr(Learner, "step", None)
    with pytest.raises(StoreError, match=r"x.* needs about .* for what will be written, and .* are free"):
        writer.run(folder, seed=1)
    assert contents(folder) == before


def test_a_run_needs_no_room_for_checkpoints_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer, usage = Fit(tmp_path), shutil.disk_usage(tmp_path)
    writer.run(tmp_path / "x")
    sizes = [path.stat().st_size for path in (tmp_path / "x").rglob("checkpoint-*/*")]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=sum(sizes)))
    writer.run(tmp_path / "x", seed=1)
    with pytest.raises(StoreError, match=r"needs about"):
        writer.run(tmp_path / "y")


@pytest.mark.parametrize(("kind", "name"), [(Fit, "history.json"), (Finetune, "table.parquet"), (Methods, "table.md")])
def test_tables_of_something_else_are_not_overwritten(
    kind: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_text("mine")
    monkeypatch.setattr(Learner, "step", None)
    with pytest.raises(StoreError, match=rf"x holds {name} but no .*; it was made by something else"):
        kind(tmp_path).run(tmp_path / "x")
    assert contents(tmp_path / "x") == {name: b"mine"}


def test_what_others_put_beside_checkpoints_and_entries_stays(tmp_path: Path):
    notes = tmp_path / "x" / "separate" / "film-plain-0.checkpoints" / "notes.txt"
    entry = tmp_path / "cache" / ("0123456789abcdef" * 2)
    for path in (notes, entry / "photo.bin", entry.with_name("f" * 32) / "index.json"):
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    (entry.with_name("f" * 32) / "photo.jpg").write_text("mine")
    before = contents(tmp_path / "cache")
    Methods(tmp_path).run(tmp_path / "x")
    assert clear(tmp_path / "cache", "all") == []
    assert (notes.read_text(), contents(tmp_path / "cache")) == ("mine", before)


# Memory


class Answer(dict[str, Any]):
    """An answer that can be counted."""

    __hash__ = object.__hash__


@pytest.mark.long
def test_bulk_prediction_holds_one_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alive, most = weakref.WeakSet[Answer](), dict[int, int]()
    plain = Predictor.predict

    def counted(self: Predictor, prepared: Any, **how: Any) -> list[dict[str, Any]]:
        gc.collect()
        answers = [{name: Answer(said) for name, said in row.items()} for row in plain(self, prepared, **how)]
        alive.update(said for row in answers for said in row.values())
        most[size] = max(most.get(size, 0), len(alive))
        return answers

    monkeypatch.setattr(Predictor, "predict", counted)
    bank, given = training.tiny_bank({"mood": training.reader(training.yes_no())}), {"chunk_rows": 5, "batch_size": 5}
    for size in (10, 20):
        (tmp_path / "in.txt").write_text("anna was in paris\n" * size)
        predict_file(bank, tmp_path / "in.txt", tmp_path / f"{size}.jsonl", progress=False, **given)
    assert most[20] == most[10] <= 10
