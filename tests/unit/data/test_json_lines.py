"""Files that are one JSON array, as annotation tools export them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.support.files import put

from lamina.data.read import read_chunks, read_table
from lamina.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_read_as_its_objects(tmp_path: Path, indent: int | None):
    rows = [{"text": "a", "spans": [[0, 1]]}, {"text": "b\nc", "spans": []}]
    path = put(tmp_path / "a.json", "\n" + json.dumps(rows, indent=indent) + "\n")
    table = read_table(path)
    assert (table.columns, list(table.rows)) == ({"text": ["a", "b\nc"], "spans": [[[0, 1]], []]}, [1, 2])
    assert [chunk.columns["text"] for chunk in read_chunks(path, rows=1, start=1)] == [["b\nc"]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1},\n', r"begins with '\[', but cannot be read as a JSON array \(.*Write one object per line.*jq -c"),
        ('[\n{"a": 1, "a": 2}\n]', "as a JSON array .*'a'"),
        ('[{"a": 1}, 2]', "row 2 of the array is not an object"),
        ('["a"]\n["b"]', "row 1 is not an object; every line is one object"),
        ("[]", "is empty"),
    ],
)
def test_arrays_that_are_no_rows(tmp_path: Path, text: str, problem: str):
    with pytest.raises(DataError, match=problem):
        read_table(put(tmp_path / "a.json", text))


@pytest.mark.parametrize("start", ["[INFO] loaded", "[oops", '["a", "b"]'])
def test_a_bad_first_line_in_square_brackets_is_one_bad_row(tmp_path: Path, start: str):
    path = put(tmp_path / "a.jsonl", f'{start}\n\n{{"a": 1}}\n{{"a": 2}}\n')
    bad: list[DataError] = []
    assert [chunk.columns for chunk in read_chunks(path, on_bad_row=bad.append)] == [{"a": [1, 2]}]
    assert [error.row for error in bad] == [1]
    with pytest.raises(DataError, match="row 1 is not "):
        read_table(path)


def test_the_reason_why_an_array_cannot_be_read(tmp_path: Path):
    (tmp_path / "a.json").write_bytes(b'[{"a": 1},\n{"a": "\xff"}]')
    with pytest.raises(DataError, match=r"is not UTF-8 at byte 18 \(row 2\)"):
        read_table(tmp_path / "a.json")
    with pytest.raises(DataError, match="the key 'a' comes twice") as caught:
        read_table(put(tmp_path / "b.json", '[{"a": 1,\n"a": 2}]'))
    assert "jq" not in str(caught.value)
