"""Texts as nobody should write them, and examples as everybody hands them over."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.files import jsonl, put, tsv
from tests.support.stored import TEXTS, tiny_bank
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lamina import evaluate, fit, predict, predict_file
from lamina.bank import ReaderBank
from lamina.data.read import read_chunks, read_table
from lamina.errors import ConfigError, DataError
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

KIND = "sequence_classification"
ODD = [
    "",
    " ",
    "\t\n",
    "\0",
    "a\0b",
    "\ud800",
    "a \udfff b",
    "\ufeffgood",
    "\u2028",
    "good " * 5000,
    "x" * 200_000,
    "\U0010ffff",
]


@pytest.fixture(scope="module")
def bank() -> Any:
    return tiny_bank()


@pytest.fixture(scope="module")
def bare() -> PreTrainedTokenizerFast:
    """A tokenizer without special tokens, which reads "" as no token."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 1, "good": 9, "bad": 10}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", model_max_length=32)


def read_by(bank: Any, processor: PreTrainedTokenizerFast) -> ReaderBank:
    """A bank with the readers of `bank` and another tokenizer."""
    other: Any = ReaderBank(bank.model, processor)
    other.update(bank)
    return other


FORMS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda texts: (text for text in texts),
    "iterator": iter,
    "map": lambda texts: map(str, texts),
    "array": np.array,
    "array of objects": lambda texts: np.array(texts, dtype=object),
    "series": pd.Series,
    "series of other rows": lambda texts: pd.Series(texts, index=[7, 7, 9]),
    "index": pd.Index,
    "keys": lambda texts: dict.fromkeys(texts).keys().__iter__(),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_iterable_of_texts_is_taken(bank: Any, form: str):
    assert predict(bank, FORMS[form](TEXTS), readers=["mood"]) == predict(bank, TEXTS, readers=["mood"])


def test_pairs_in_any_form(bank: Any):
    pairs = [("good", "bad"), ("a", "b")]
    right = predict(bank, pairs, readers=["mood"])
    for form in (np.array(pairs), [list(pair) for pair in pairs], zip(*zip(*pairs, strict=True), strict=True)):
        assert predict(bank, form, readers=["mood"]) == right


@pytest.mark.parametrize(
    "given",
    ["a", b"a", None, 3, 1.5, {"a": 1}, {"a"}, np.array("a"), np.float32(3), object(), str, pd.DataFrame({"a": ["b"]})],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_list(bank: Any, given: Any):
    with pytest.raises(ConfigError, match=r"predict: got one .*; a list of texts, pairs of .* or clips is needed"):
        predict(bank, given)


@pytest.mark.parametrize(
    "given",
    [["a", 1], ["a", None], [None], [b"a"], ["a", ("b", "c")], [("a", "b"), "c"], [("a",)], [[]], [{}], [float("nan")]],
    ids=repr,
)
def test_lists_of_other_things(bank: Any, given: Any):
    with pytest.raises(ConfigError, match=r"predict: entry \d is \w+; all must be texts, or all pairs of texts"):
        predict(bank, given, readers=["mood"])


def test_nothing_gives_nothing(bank: Any):
    for nothing in ([], (), iter([]), np.array([]), pd.Series([], dtype=str)):
        assert predict(bank, nothing) == []


@pytest.mark.parametrize("special", [True, False])
def test_odd_texts_in_predict(bank: Any, bare: Any, special: bool):
    bank = bank if special else read_by(bank, bare)
    together = predict(bank, ODD, readers=["mood"])
    for text, answer in zip(ODD, together, strict=True):
        (alone,) = predict(bank, [text], readers=["mood"])
        assert answer["mood"]["score"] == pytest.approx(alone["mood"]["score"], abs=1e-5)


def test_odd_texts_in_a_file(bank: Any, tmp_path: Path):
    path = jsonl(tmp_path / "odd.jsonl", [{"text": text} for text in ODD])
    for ending in ("jsonl", "csv", "parquet"):
        result = predict_file(bank, path, tmp_path / f"out.{ending}", progress=False, readers=["mood"])
        assert (result.rows, result.skipped) == (len(ODD), 0)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [row["text"] for row in rows if row["row"] in (1, 5)] == ["", "a\0b"]


@pytest.mark.parametrize(("special", "cache"), [(True, "on"), (False, "off")])
def test_odd_texts_in_training(bare: Any, tmp_path: Path, special: bool, cache: str):
    rows = [{"sentence": text, "label": label} for text, label in zip(ODD, ["bad", "good"] * 6, strict=True)]
    task = Task.from_dataset(KIND, {"train": rows, "validation": rows})
    bank = tiny_bank() if special else read_by(tiny_bank(), bare)
    bank.remove("who")
    fit(bank, {"mood": task}, epochs=1, batch_size=4, progress=False, cache=cache, cache_dir=tmp_path)
    assert all(torch.isfinite(parameter).all() for parameter in bank.parameters())
    assert 0 <= evaluate(bank, {"mood": task})["mood"]["accuracy"] <= 1


# Files


def test_a_label_with_half_a_character():
    rows = [{"sentence": "a", "label": label} for label in ("\ud800", "x", "\ud800")]
    assert Task.from_dataset(KIND, {"train": rows}).labels == ("x", "\ufffd")


@pytest.mark.parametrize("digits", ["9" * 500_000 + "x", "9" * 500_000])  # quadratic work would take minutes
def test_a_label_of_many_digits(tmp_path: Path, digits: str):
    path = tsv(tmp_path / "some.tsv", [f"a\t{digits}", "b\t1", "c\t2"])
    assert len(Task.from_files(KIND, train=path).labels) == 3


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_header_of_many_columns(tmp_path: Path, ending: str):
    mark, count = {"csv": ",", "tsv": "\t"}[ending], 200_000
    names = [f"c{n}" for n in range(count)]
    text = mark.join(names) + "\n" + mark.join(["x"] * count) + "\n"
    (table,) = read_chunks(put(tmp_path / f"some.{ending}", text), columns=["c7", "c199999"])
    assert (table.columns, list(table.rows)) == ({"c7": ["x"], "c199999": ["x"]}, [2])
    twice = put(tmp_path / f"some.{ending}", mark.join([*names, "c5"]) + "\n")
    with pytest.raises(DataError, match=r"has two columns 'c5'\. Rename one of them, or leave it out\."):
        next(read_chunks(twice))


def test_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.data.read.MAX_BYTES", 100)
    for ending, long in (
        ("txt", "x" * 250),
        ("jsonl", '{"text": "' + "x" * 250 + '"}'),
        ("csv", '"' + "x\n" * 150 + '"'),
    ):
        rows = ["text"] * (ending == "csv") + ['{"text": "a"}' if ending == "jsonl" else "a", long]
        path = put(tmp_path / f"some.{ending}", "\n".join([*rows, rows[-2]]) + "\n")
        problems: list[DataError] = []
        read = [text for table in read_chunks(path, on_bad_row=problems.append) for text in table.columns["text"]]
        assert read[0] == "a"
        assert read[-1] in ("a", '"')
        assert "100" in str(problems[0])
        assert problems[0].row == len(rows)
    at_the_end = put(tmp_path / "end.txt", "a\n" + "x" * 350)
    with pytest.raises(DataError, match=r"end\.txt row 2 has more than 100 bytes; it is too long to be an example"):
        list(read_chunks(at_the_end))


@pytest.mark.parametrize("data", [b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", "é".encode("latin-1")])
def test_bytes_that_are_no_text(tmp_path: Path, data: bytes):
    for ending, row in (("txt", data), ("csv", data), ("tsv", data), ("jsonl", b'{"text": "' + data + b'"}')):
        path = tmp_path / f"some.{ending}"
        path.write_bytes((b"" if ending in ("txt", "jsonl") else b"text\n") + row + b"\n")
        with pytest.raises(DataError, match=rf"some\.{ending} is not UTF-8 at byte \d+ \(row \d\)"):
            list(read_chunks(path))


def test_bytes_that_are_no_text_in_parquet(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    broken = pa.array([b"good", b"b\xffd"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken, "label": ["a", "b"]}), path := tmp_path / "some.parquet")
    with pytest.raises(DataError, match=r"some\.parquet row 2 is not UTF-8 at byte 1 of a text"):
        read_table(path)
    problems: list[DataError] = []
    (table,) = read_chunks(path, columns=["text"], on_bad_row=problems.append)
    assert (table.columns["text"], [problem.row for problem in problems]) == (["good"], [2])


def test_nested_beyond_reason(tmp_path: Path):
    assert sys.getrecursionlimit() < 100_000
    path = put(
        tmp_path / "some.jsonl", '{"text": "a"}\n' + "[" * 100_000 + '\n{"text": ' + "[" * 300 + "]" * 300 + "}\n"
    )
    problems: list[DataError] = []
    (table,) = read_chunks(path, on_bad_row=problems.append)
    assert list(table.rows) == [1]
    assert ["nested more than 100 deep" in str(problem) for problem in problems] == [True, True]
