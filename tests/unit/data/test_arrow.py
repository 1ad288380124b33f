"""Columns that go to a file when they are large, read back as if they were in memory."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tests.support.image_rows import image_column, image_split
from tests.support.pictures import encoded as encoded_image
from tests.support.pictures import picture
from tests.support.portions import one_in

from lamina.data import arrow
from lamina.data.arrow import Column, Ragged, chunks, columns_of, dataset_of
from lamina.data.encode import blocks, encode
from lamina.data.read import read_table
from lamina.errors import DataError
from lamina.layers.types import padding_of
from lamina.tasks.image_classification import LazyImage
from lamina.tasks.split import Split

TEXTS = [f"the moon number {row} over Paris " * (1 + row % 5) for row in range(2500)]
WORDS = [((0, 3), (4, 8))] * 2500


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go; columns of more than 20 kB do."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(arrow, "SPILL_BYTES", 20_000)
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def large_split() -> Split:
    return Split.of(TEXTS, [(row, 1) for row in range(2500)], WORDS)


def test_a_large_split_is_on_disk_and_reads_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    split = large_split()
    (file,) = files(folder)
    assert file.stat().st_size > 100_000
    monkeypatch.setattr(arrow, "SPILL_BYTES", 1 << 40)
    assert split == large_split()
    assert split.key == large_split().key
    assert files(folder) == [file]


@pytest.mark.parametrize("cut", one_in(2, [encode, blocks]))
def test_a_large_encoding_gives_the_same_batches(folder: Path, monkeypatch: pytest.MonkeyPatch, minilm: Any, cut: Any):
    spilt = cut(TEXTS, minilm, max_length=16)
    assert len(files(folder)) == 1
    monkeypatch.setattr(arrow, "SPILL_BYTES", 1 << 40)
    whole = cut(TEXTS, minilm, max_length=16)
    assert len(files(folder)) == 1
    assert (spilt.digest, spilt.token_ranges, spilt.offsets) == (whole.digest, whole.token_ranges, whole.offsets)
    rows = [0, len(whole) - 1, 1234, 999, 1000]
    for some in (spilt, copy.deepcopy(spilt), pickle.loads(pickle.dumps(spilt))):
        batch, expected = (one.batch(rows, padding_of(minilm)) for one in (some, whole))
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in batch)


def test_the_file_is_there_as_long_as_something_reads_it(folder: Path):
    """A copy, a part of the rows or a column of them keep it; then it goes."""
    users = [
        lambda split: split,
        copy.copy,
        copy.deepcopy,
        lambda split: split.select_rows(range(5, 2000)),
        lambda split: split.select_rows([3, 2, 1]).select_rows([0]),
        lambda split: split.texts,
        lambda split: copy.deepcopy(split.select_rows(range(10))).labels,
    ]
    for user in users:
        kept = user(large_split())
        assert len(files(folder)) == 1
        again = pickle.loads(pickle.dumps(kept))
        assert again == kept
        again = None
        assert len(files(folder)) == 1
        kept = None
        assert files(folder) == list(folder.iterdir()) == []


def test_the_texts_of_a_large_file_go_to_disk(folder: Path):
    path = folder / "a.csv"
    path.write_text("text,label\n" + "".join(f'"{text}\n",{row}\n' for row, text in enumerate(TEXTS)))
    table = read_table(path)
    assert len(files(folder)) == 2
    assert table.column("text") == [f"{text}\n" for text in TEXTS]
    assert (len(table), table.column("label")[-1], table.rows[-1]) == (2500, "2499", 5000)
    with pytest.raises(DataError, match="no column 'row'; its columns are: text, label"):
        table.column("row")
    del table
    assert files(folder) == [path]


def test_many_images_in_memory_go_to_disk_too(folder: Path):
    images = image_column([LazyImage(f"{row}", data=encoded_image(picture(row))) for row in range(200)])
    split = image_split(images, range(200))
    del images
    assert len(files(folder)) == 1
    assert split.select_rows([150]).texts[0].open().tobytes() == picture(150).tobytes()
    assert pickle.loads(pickle.dumps(split)).texts[7].data == encoded_image(picture(7))
    del split
    assert files(folder) == []


def test_a_process_that_ends_takes_its_files_along(folder: Path):
    code = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1];"
        "from lamina.data import arrow; arrow.SPILL_BYTES = 1000;"  # as a split does, without an import of torch
        "import pyarrow; rows = arrow.join_tables([pyarrow.table({'text': ['some text'] * 5000})]);"
        "import os; assert len(os.listdir(sys.argv[1])) == 1"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    assert files(folder) == []


def test_a_forked_process_leaves_the_file_alone(folder: Path):
    split = large_split()
    child = os.fork()
    if child == 0:
        del split
        os._exit(0)
    os.waitpid(child, 0)
    assert len(files(folder)) == 1
    assert split.texts[-1] == TEXTS[-1]


def test_a_file_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str, mode: str):
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(pa, "OSFile", refuse)
    with pytest.raises(DataError, match=r"data: .*rows\.arrow cannot be written \(No space left on device\); TMPDIR"):
        large_split()
    gc.collect()  # Python 3.13 keeps the frames of the error, and so the file in them, longer than 3.11
    assert files(folder) == list(folder.iterdir()) == []


def test_an_error_in_a_table_is_not_called_one_of_the_disk(folder: Path):
    def tables():
        yield pa.table({"text": TEXTS})
        raise TypeError("a text is a number")

    with pytest.raises(TypeError, match="a text is a number"):
        dataset_of(tables())
    assert files(folder) == []


def test_chunks():
    assert list(chunks(iter(range(5)), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunks([], 2)) == [[]]


def test_a_digest_tells_where_rows_end():
    def digest(*rows: list[int]) -> bytes:
        return Ragged(pa.chunked_array([list(rows)])).digest()

    assert digest([1, 2], [3]) != digest([1], [2, 3])
    assert digest([1, 2], [3]) == digest([1, 2], [3])


def test_large_rows_are_read_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    column, read = columns_of(dataset_of([pa.table({"a": [b"x" * 100] * 50})]))["a"], list[int]()
    monkeypatch.setattr(arrow, "SPILL_BYTES", 1000)
    monkeypatch.setattr(Column, "read_rows", lambda self, rows: read.append(len(rows)) or ("x",) * len(rows))
    assert len(list(column)) == 50
    assert max(read) <= 10


def test_a_column_is_a_sequence():
    rows = dataset_of([pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})])
    column = Column(rows, ["a", "b"])
    assert list(column) == [(1, "x"), (2, "y"), (3, "z")] == column
    assert (column[-1], column[1:], column[::2], column[5:]) == (
        (3, "z"),
        ((2, "y"), (3, "z")),
        ((1, "x"), (3, "z")),
        (),
    )
    assert Column(rows, ["a"], lambda number: 2 * number) == (2, 4, 6)
    assert Column(rows, ["a"]) != [1, 2]
    assert Column(rows, ["a"]).read_rows([2, 0]) == (3, 1)
    assert (2, "y") in column
    with pytest.raises(IndexError):
        column[3]
