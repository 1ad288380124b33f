from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina.cli.predict_command import from_file, from_stdin
from lamina.errors import ConfigError, DataError


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: terminal))


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\r\ntwo", ["one", "", "two"]),
        (b"\n", [""]),
        ("\ufeffä\u2028b 🙂\n".encode(), ["ä\u2028b 🙂"]),
    ],
)
def test_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes, texts: list[str]):
    stdin(monkeypatch, data)
    assert from_stdin() == texts
    (tmp_path / "x.txt").write_bytes(data)
    assert from_file(tmp_path / "x.txt") == texts


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    stdin(monkeypatch, b"", terminal=True)
    with pytest.raises(ConfigError, match=r"there is no text\. Give texts as arguments, with --file or on"):
        from_stdin()


def test_nothing_came(monkeypatch: pytest.MonkeyPatch):
    stdin(monkeypatch, b"")
    with pytest.raises(DataError, match=r"standard input is empty\. Give one text per line"):
        from_stdin()


def test_lines_that_end_in_carriage_returns_alone(monkeypatch: pytest.MonkeyPatch):
    stdin(monkeypatch, b"one\rtwo\r")
    with pytest.raises(DataError, match="standard input has carriage returns and no line feed"):
        from_stdin()
    stdin(monkeypatch, b"one\ntwo\rthree")
    assert from_stdin() == ["one", "two\rthree"]


def test_not_utf8(monkeypatch: pytest.MonkeyPatch):
    stdin(monkeypatch, b"good\nb\xe4d\n")
    with pytest.raises(DataError, match=r"standard input is not UTF-8 at byte 6 \(row 2\)") as caught:
        from_stdin()
    assert caught.value.row == 2


@pytest.mark.parametrize("names", ["text,other", "sentence,other", "anything"])
def test_usual_columns(tmp_path: Path, names: str):
    path = tmp_path / "x.csv"
    path.write_text(f"{names}\n" + ",".join(["a b"] * len(names.split(","))) + "\n")
    assert from_file(path) == ["a b"]


def test_named_columns_and_pairs(tmp_path: Path):
    path = tmp_path / "x.tsv"
    path.write_text("q\ta\none\ttwo\n")
    assert from_file(path, text="a") == ["two"]
    assert from_file(path, text="q", pair="a") == [("one", "two")]
    with pytest.raises(DataError, match="no column 'sentence' or 'text' or 'image' or 'audio'; its columns are: q, a"):
        from_file(path)
    with pytest.raises(DataError, match="no column 'b'; its columns are: q, a"):
        from_file(path, text="q", pair="b")


def test_cells_that_are_no_text(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": 3}) + "\n")
    with pytest.raises(DataError, match="row 2 has int in column 'text'; a text is needed"):
        from_file(path)


def test_a_text_file_has_no_columns(tmp_path: Path):
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(DataError, match=r"x\.txt has no column 'a'; its columns are: text"):
        from_file(tmp_path / "x.txt", text="a")


def test_missing_files(tmp_path: Path):
    with pytest.raises(DataError, match=r"none\.txt is not there"):
        from_file(tmp_path / "none.txt")
    with pytest.raises(DataError, match=r"none\.csv is not there"):
        from_file(tmp_path / "none.csv")
