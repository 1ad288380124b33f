"""A disk that is full at any write: one error of ours that names the place, and what was there before stays whole."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.support.deaths import forked
from tests.support.portions import one_in
from tests.support.stored import tiny_bank, tiny_model, tiny_tokenizer
from transformers.utils import logging

import lamina
from lamina.cli import main
from lamina.data.read import read_table
from lamina.errors import LaminaError
from lamina.prediction import predict_file
from lamina.store import load, load_bank, save, save_bank
from lamina.tasks.task import Task
from lamina.train import fit
from lamina.train.checkpoint import Checkpoints
from lamina.train.results import write_parquet
from lamina.utils import write_text

Contents = dict[str, bytes]
ROWS = "sentence\tlabel\n" + "the film is bad .\tbad\nthe film is good .\tgood\n" * 4


def contents(folder: Path) -> Contents:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def with_little_room(action: Callable[[], object], size: int) -> str:
    """What an action raises in a process that can write no file larger than so many bytes; "" if nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "1 "  # no error of ours
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails with "File too large"
            sys.dont_write_bytecode = True  # Python would leave a part of it
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            action()
            said = "0 "
        except LaminaError as error:
            said = f"2 {error}"
        except BaseException:
            said = f"1 {traceback.format_exc()}"
        finally:
            os.write(writing, said.encode()[:60_000])
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        code, _, said = pipe.read().partition(" ")
    os.waitpid(child, 0)
    assert code != "1", said
    return said


def task(folder: Path) -> Task:
    return Task.from_files("sequence_classification", train=folder / "train.tsv", validation=folder / "train.tsv")


def changed_bank() -> lamina.ReaderBank:
    bank = tiny_bank()
    with torch.no_grad():
        next(bank.parameters()).add_(1.0)
    return bank


def edit(folder: Path) -> None:
    lamina.insert_(model := tiny_model(), "ffn")
    save(model, folder, tiny_tokenizer())


def checkpoint(folder: Path) -> None:
    kept = Checkpoints(folder, "fit", {"seed": 0})
    for step in (1, 2, 3):
        kept.save(step, {"weights": torch.zeros(300)}, {"history": ["x"] * 100})


def train(folder: Path, **options: object) -> None:
    mood = task(folder.parent)
    fit(tiny_bank(), {"mood": mood}, epochs=1, batch_size=8, output=folder, progress=False, **options)


def tables(folder: Path) -> None:
    write_parquet([{"x": "y" * 400}] * 3, folder / "table.parquet")
    write_text(folder / "table.md", "x" * 2000)


def predicted(folder: Path, ending: str) -> None:
    predict_file(tiny_bank(), folder.parent / "texts.txt", folder / f"answers{ending}", progress=False)


# How each thing is written, and how it is opened again to see that it is whole
ACTIONS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "bank": (lambda folder: save_bank(changed_bank(), folder), lambda folder: load_bank(folder, tiny_model())),
    "edited model": (edit, load),
    "checkpoint": (checkpoint, lambda folder: Checkpoints(folder, "fit", {"seed": 0}).begin(resume=True)),
    "training": (train, lambda folder: load_bank(folder, tiny_model())),
    "training with a cache": (
        lambda folder: train(folder, cache="on", cache_dir=folder / "cache"),
        lambda folder: load_bank(folder, tiny_model()),
    ),
    "tables": (tables, lambda folder: read_table(folder / "table.parquet")),
    "answers .jsonl": (lambda folder: predicted(folder, ".jsonl"), lambda folder: read_table(folder / "answers.jsonl")),
    "answers .csv": (lambda folder: predicted(folder, ".csv"), lambda folder: read_table(folder / "answers.csv")),
    "answers .parquet": (
        lambda folder: predicted(folder, ".parquet"),
        lambda folder: read_table(folder / "answers.parquet"),
    ),
}
SIZES = (0, 1, 100, 700, 1500, 4000, 12_000, 50_000)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.tsv").write_text(ROWS)
    (tmp_path / "texts.txt").write_text("the film\nbad\n" * 20)
    return tmp_path / "out"


def check(name: str, sizes: tuple[int, ...], place: Path) -> None:
    action, opened = ACTIONS[name]
    refused = 0
    for size in sizes:
        shutil.rmtree(place, ignore_errors=True)
        said = with_little_room(lambda: action(place), size)
        refused += bool(said)
        if said:
            assert str(place) in said, said
            assert "\n" not in said
        if name == "edited model" and said:
            assert not contents(place)
        for path in contents(place):  # whole, or not under its own name
            if path in ("lamina.json", "config.json", "answers.csv", "answers.jsonl", "answers.parquet"):
                opened(place)
    assert refused


@pytest.mark.parametrize("name", one_in(2, ACTIONS))
def test_a_full_disk_is_one_sentence(name: str, place: Path):
    number = list(ACTIONS).index(name)
    check(name, (SIZES[number % 3], SIZES[3 + number % 3]), place)


@pytest.mark.full
@pytest.mark.parametrize("name", ACTIONS)
def test_every_full_disk_is_one_sentence(name: str, place: Path):
    check(name, SIZES, place)


def test_what_was_there_before_stays(place: Path):
    save_bank(tiny_bank(), place)
    before = contents(place)
    assert "cannot be written (File too large); nothing in it was changed" in with_little_room(
        lambda: save_bank(changed_bank(), place), 600
    )
    assert {name: before.get(name) for name in contents(place)} == before


def in_full_command(*arguments: str) -> None:
    logging.disable_progress_bar()  # as the command does before it loads transformers
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # Python would leave a part of it
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    main(list(arguments))


def test_the_command_ends_with_one_sentence(tmp_path: Path):
    save(tiny_model(), tmp_path / "base", tiny_tokenizer())
    arguments = ("edit", str(tmp_path / "base"), "--freeze", "1", "-o", str(tmp_path / "out"))
    ended = forked(lambda: in_full_command(*arguments))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert ended.err.startswith(f"error: save: {tmp_path / 'out'} cannot be written (")
