from __future__ import annotations

import cProfile
import csv
import io
import json
import pstats
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.portions import one_in

from lamina.data import parquet
from lamina.data.parquet import parquet_rows
from lamina.data.read import Table, read_chunks, read_lines, read_pair, read_table
from lamina.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def put(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_tsv_takes_quotes_as_text(tmp_path: Path):
    table = read_table(put(tmp_path, "a.tsv", '\ufeffsentence\tlabel\n"Go!" said he\t1\nit\'s "\t0\n\n'))
    assert table.columns == {"sentence": ['"Go!" said he', "it's \""], "label": ["1", "0"]}
    assert list(table.rows) == [2, 3]
    assert len(table) == 2


def test_tsv_splits_at_line_feeds_alone(tmp_path: Path):
    table = read_table(put(tmp_path, "a.tsv", "sentence\tlabel\r\none\u2028two\x0bthree\x85\t1\r\n"))
    assert table.columns["sentence"] == ["one\u2028two\x0bthree\x85"]
    assert table.columns["label"] == ["1"]


def test_tsv_without_header(tmp_path: Path):
    table = read_table(put(tmp_path, "a.tsv", "gj04\t1\tA cat.\ngj04\t0\tcat A.\n"), header=["source", "label", "text"])
    assert table.column("text") == ["A cat.", "cat A."]
    assert list(table.rows) == [1, 2]


def test_csv_reads_quotes_and_counts_lines(tmp_path: Path):
    table = read_table(put(tmp_path, "a.csv", 'text,label\n"two\nlines, ""so""",x\nplain,y\n'))
    assert table.columns == {"text": ['two\nlines, "so"', "plain"], "label": ["x", "y"]}
    assert list(table.rows) == [2, 4]


def test_csv_reads_long_cells_and_leaves_the_limit(tmp_path: Path):
    before = csv.field_size_limit()
    table = read_table(put(tmp_path, "a.csv", f"text,label\n{'a' * 200_000},x\n"))
    assert len(table.columns["text"][0]) == 200_000
    assert csv.field_size_limit() == before


def test_csv_with_an_open_quote(tmp_path: Path):
    with pytest.raises(DataError, match=r"a\.csv row 3 is not CSV") as info:
        read_table(put(tmp_path, "a.csv", 'text,label\nfine,x\n"open,y\n'))
    assert info.value.row == 3


@pytest.mark.parametrize("line", [b"\xff", b"x" * 50])
def test_csv_with_an_open_quote_before_a_line_that_cannot_be_read(
    tmp_path: Path, line: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lamina.data.read.MAX_BYTES", 40)
    path = put(tmp_path, "a.csv", b'text,label\n"open,y\n' + line + b"\nfine,x\n")
    with pytest.raises(DataError, match=r"row 2 is not CSV \(a quote is open, and row 3 is too long or not UTF-8\)"):
        read_table(path)


def test_csv_with_an_open_quote_where_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Failing(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            if line := super().readline(size):
                return line
            raise OSError(5, "Input/output error")

    content = b'text,label\nfine,x\n"open,y\n'
    path = put(tmp_path, "a.csv", content)
    monkeypatch.setattr(type(path), "open", lambda *_, **__: Failing(content))
    with pytest.raises(DataError, match=r"a\.csv cannot be read \(Input/output error\)"):
        list(read_chunks(path, on_bad_row=lambda _: None))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.txt"])
def test_lines_that_end_in_carriage_returns_alone(tmp_path: Path, name: str):
    with pytest.raises(DataError, match=r"has carriage returns and no line feed\. Convert them"):
        read_table(put(tmp_path, name, "one\rtwo\r"), other="lines")
    assert list(read_lines(put(tmp_path, name, "one\r"))) == [(1, "one\r")]


def test_csv_with_a_carriage_return_outside_quotes(tmp_path: Path):
    with pytest.raises(DataError, match=r"row 2 has a carriage return outside quotes; cells with line ends are quoted"):
        read_table(put(tmp_path, "a.csv", "text,label\ntwo\rlines,x\n"))
    assert read_table(put(tmp_path, "b.csv", 'text,label\n"two\rlines",x\n')).columns["text"] == ["two\rlines"]


def test_jsonl_keeps_types_and_skips_blank_lines(tmp_path: Path):
    rows = [{"tokens": ["a", "b"], "tags": [0, 1]}, {"tokens": [], "tags": []}]
    table = read_table(put(tmp_path, "a.jsonl", "\n\n".join(map(json.dumps, rows))))
    assert table.columns == {"tokens": [["a", "b"], []], "tags": [[0, 1], []]}
    assert list(table.rows) == [1, 3]


@pytest.mark.parametrize(("line", "came"), [("{'text': 1}", "is not JSON"), ("[1, 2]", "is not an object")])
def test_jsonl_with_a_bad_line(tmp_path: Path, line: str, came: str):
    with pytest.raises(DataError, match=rf"row 2 {came}") as info:
        read_table(put(tmp_path, "a.jsonl", '{"text": "x"}\n' + line))
    assert (info.value.row, info.value.path) == (2, str(tmp_path / "a.jsonl"))


def test_a_row_without_a_value(tmp_path: Path):
    table = read_table(put(tmp_path, "a.jsonl", '{"text": "x", "label": 1}\n{"text": "y"}\n'))
    assert table.column("text") == ["x", "y"]
    with pytest.raises(DataError, match="row 2 has no value in column 'label'") as info:
        table.column("label")
    assert info.value.column == "label"


def test_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", "y"], "label": [0.5, 1.0]}), path)
    table = read_table(path)
    assert table.columns == {"text": ["x", "y"], "label": [0.5, 1.0]}
    assert list(table.rows) == [1, 2]


def test_parquet_cut_off(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x"] * 100}), path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="is not a Parquet file"):
        read_table(path)


CONLL = "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\n\nPeter NNP I-NP I-PER\n"


def test_conll_columns(tmp_path: Path):
    table = read_table(put(tmp_path, "eng.train", CONLL), other="conll")
    assert table.numbered
    assert table.column(0) == [["EU", "rejects"], ["Peter"]]
    assert table.column(-1) == table.column("3") == [["I-ORG", "O"], ["I-PER"]]
    assert list(table.rows) == [3, 7]
    with pytest.raises(DataError, match="no column '4'; its columns are: 0, 1, 2, 3"):
        table.column(4)
    with pytest.raises(DataError, match="no column '-5'"):
        table.column(-5)


def test_conll_documents_end_sentences(tmp_path: Path):
    table = read_table(put(tmp_path, "a.conll", "a\tO\n-DOCSTART-\tO\nb c\tB-X\n"))
    assert table.column(0) == [["a"], ["b c"]]


def test_missing_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"none\.tsv is not there"):
        read_table(tmp_path / "none.tsv")


def test_a_missing_file_or_column_suggests_the_closest_name(tmp_path: Path):
    file = put(tmp_path, "reviews.tsv", "sentence\tlabel\nx\t1\n")
    (tmp_path / "review.tsv").mkdir()  # a folder is no suggestion
    with pytest.raises(DataError, match=rf"reviews\.tv is not there; a file is needed\. Did you mean '{file}'\?$"):
        read_table(tmp_path / "reviews.tv")
    other = put(tmp_path, "other.tsv", "ticket\tteam\nx\t1\n")
    for name, advice in (("sentence", "texts with `text`"), ("label", "labels with `label`")):  # the usual names
        with pytest.raises(DataError, match=rf"are: ticket, team\. Name the column of the {advice}\. Row 1 is"):
            read_table(other).column(name)
    with pytest.raises(DataError, match=r"its columns are: sentence, label\. Did you mean 'label'\?$"):
        read_table(file).column("lable")


def test_unknown_ending(tmp_path: Path):
    with pytest.raises(DataError, match=r"ends in '\.xlsx'; the endings known are \.tsv, \.csv, \.jsonl"):
        read_table(put(tmp_path, "a.xlsx", "x"))


def test_missing_column(tmp_path: Path):
    with pytest.raises(DataError, match="no column 'text'; its columns are: sentence, label") as info:
        read_table(put(tmp_path, "a.tsv", "sentence\tlabel\nx\t1\n")).column("text")
    assert info.value.column == "text"


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", "text;label\nx;1\n"), ("a.csv", "text\tlabel\nx\t1\n"), ("a.tsv", "text,label\nx,1\n")]
)
def test_columns_that_another_sign_divides(tmp_path: Path, name: str, text: str):
    with pytest.raises(
        DataError, match=r"has the one column 'text.*may divide columns.*read_csv\('a\..sv', sep='.*'\)"
    ):
        list(read_chunks(put(tmp_path, name, text)))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("text", ["\nlabel\nx\n", "  \n \n"])
def test_a_header_that_is_blank(tmp_path: Path, name: str, text: str):
    with pytest.raises(DataError, match="begins with a blank line; the first line names the columns"):
        list(read_chunks(put(tmp_path, name, text)))


def test_a_pipe_and_a_broken_link_are_no_ordinary_files(tmp_path: Path):
    (tmp_path / "link.csv").symlink_to(tmp_path / "link.csv")
    with pytest.raises(DataError, match=r"link.csv is not a regular file; a file is needed.$"):
        read_table(tmp_path / "link.csv")


def test_a_column_of_maps_in_parquet(tmp_path: Path):
    maps = pa.array([[("k", 1)], None, [("k", 2), ("l", 3)]], pa.map_(pa.string(), pa.int32()))
    pq.write_table(pa.table({"text": ["a", "b", "c"], "more": maps}), tmp_path / "a.parquet")
    assert list(read_table(tmp_path / "a.parquet").column("text")) == ["a", "b", "c"]


def test_column_named_twice(tmp_path: Path):
    with pytest.raises(DataError, match="two columns 'label'"):
        read_table(put(tmp_path, "a.tsv", "label\tlabel\nx\t1\n"))


@pytest.mark.parametrize(
    ("name", "text", "row", "problem"),
    [
        ("a.tsv", "sentence\tlabel\nx\t1\ny\n", 3, "has 1 columns; the file has 2"),
        ("a.tsv", "sentence\tlabel\nx\t1\n\ny\t0\n", 3, "is blank. Remove it"),
        ("a.csv", "text,label\nx,1\n\ny,1\n", 3, "is blank. Remove it"),
        ("a.csv", "text,label\nx,1,2\n", 2, "has 3 columns; the file has 2"),
        ("a.conll", "a NN O\nb O\n", 2, "has 2 columns; the file has 3"),
    ],
)
def test_row_of_wrong_width(tmp_path: Path, name: str, text: str, row: int, problem: str):
    with pytest.raises(DataError, match=f"row {row} {problem}") as info:
        read_table(put(tmp_path, name, text))
    assert info.value.row == row


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", ""),
        ("a.tsv", "sentence\tlabel\n"),
        ("a.csv", "\n"),
        ("a.jsonl", "\n\n"),
        ("a.conll", "-DOCSTART- O\n"),
    ],
)
def test_empty_file(tmp_path: Path, name: str, text: str):
    with pytest.raises(DataError, match=r"is empty; a task needs at least one row"):
        read_table(put(tmp_path, name, text))


def test_not_utf8(tmp_path: Path):
    with pytest.raises(DataError, match=r"a\.tsv is not UTF-8 at byte 18 \(row 2\)") as info:
        read_table(put(tmp_path, "a.tsv", b"sentence\tlabel\nna\xefve\t1\n".replace(b"na", b"gar")))
    assert info.value.row == 2


def test_plain_text_has_a_row_per_line_that_is_not_blank(tmp_path: Path):
    table = read_table(put(tmp_path, "wiki.train.raw", "\ufeff \n = A = \r\n\n one\u2028two \n"), other="lines")
    assert table.column("text") == [" = A = ", " one\u2028two "]
    assert list(table.rows) == [2, 4]
    with pytest.raises(DataError, match=r"ends in '\.txt'; the endings known"):
        read_table(put(tmp_path, "a.txt", "x"))


# Columns of objects


def test_a_value_in_a_column_of_objects(tmp_path: Path):
    rows = [{"translation": {"en": "yes", "ro": "da"}, "a.b": 1}, {"translation": {"en": "no"}, "a.b": 2}]
    table = read_table(put(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert table.column("translation.en") == ["yes", "no"]
    assert table.column("a.b") == [1, 2]
    with pytest.raises(DataError, match=r"row 2 has no value in column 'translation\.ro'"):
        table.column("translation.ro")
    with pytest.raises(DataError, match=r"no column 'text\.en'; its columns are: translation, a\.b"):
        table.column("text.en")


@pytest.mark.parametrize("missing", [[None, {"en": "no"}], [{"ro": "da"}, {"en": "no"}], [None, {"en": "no"}, None]])
def test_a_missing_object_is_a_missing_value(tmp_path: Path, missing: list[Any]):
    table = read_table(put(tmp_path, "a.jsonl", "\n".join(json.dumps({"translation": cell}) for cell in missing)))
    assert table.cells("translation.en")[:2] == [None, "no"]
    with pytest.raises(DataError, match=r"row 1 has no value in column 'translation\.en'"):
        table.column("translation.en")


def test_a_column_of_texts_holds_no_objects(tmp_path: Path):
    table = read_table(put(tmp_path, "a.csv", "translation,label\nyes,da\n"))
    with pytest.raises(DataError, match=r"no column 'translation\.en'; its columns are: translation, label"):
        table.column("translation.en")


def test_objects_in_parquet(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"translation": [{"en": "yes", "ro": "da"}]}), path)
    assert read_table(path).column("translation.ro") == ["da"]


# Files whose lines belong together


def test_a_pair_of_files_keeps_every_line(tmp_path: Path):
    files = put(tmp_path, "a.en", "\ufeffyes\r\n\n no \n"), put(tmp_path, "a.ro", "da\none\u2028two\nnu")
    table = read_pair(files, ("text", "target"))
    assert table.columns == {"text": ["yes", "", " no "], "target": ["da", "one\u2028two", "nu"]}
    assert list(table.rows) == [1, 2, 3]
    assert table.path == f"{files[0]} and {files[1]}"


def test_a_pair_of_files_has_as_many_lines(tmp_path: Path):
    files = put(tmp_path, "a.en", "yes\nno\n\n"), put(tmp_path, "a.ro", "da\nnu\n")
    with pytest.raises(DataError, match=r"a\.en has 3 lines, .*a\.ro has 2; line n of one belongs to line n"):
        read_pair(files, ("text", "target"))


def test_a_pair_is_two_files_with_lines(tmp_path: Path):
    one, none = put(tmp_path, "a.en", "yes\n"), put(tmp_path, "a.ro", "")
    with pytest.raises(DataError, match=r"read: 3 files were given as a pair; a pair has a source and a target"):
        read_pair([one, one, one], ("text", "target"))
    with pytest.raises(DataError, match=r"a\.hu is not there"):
        read_pair([one, tmp_path / "a.hu"], ("text", "target"))
    with pytest.raises(DataError, match="is empty; a task needs at least one row"):
        read_pair([none, none], ("text", "target"))


# Pictures in Parquet


def test_objects_of_bytes_are_pictures(tmp_path: Path):

    path = tmp_path / "a.parquet"
    cells = [{"bytes": b"x", "path": None}, {"bytes": b"y", "path": None}]
    pq.write_table(pa.table({"image": cells, "label": [1, 0]}), path)
    rows = parquet_rows(path)
    assert (rows["image"][:], rows["label"][:]) == (cells, [1, 0])
    with pytest.raises(DataError, match=r"b\.parquet is not there"):
        parquet_rows(tmp_path / "b.parquet")
    pq.write_table(pa.table({"image": cells}).slice(0, 0), path)
    with pytest.raises(DataError, match=r"a\.parquet is empty; a task needs at least one row"):
        parquet_rows(path)
    pq.write_table(pa.table([[1], [2]], ["a", "a"]), path)
    with pytest.raises(DataError, match=r"a\.parquet has two columns 'a'\. Rename one of them"):
        parquet_rows(path)


# In chunks

RECORDS = [{"text": f"text {number}", "label": number} for number in range(7)]
PLAIN = ["text,label", *(f"text {number},{number}" for number in range(7))]


def written(folder: Path, ending: str) -> Path:
    path = folder / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=2)
    elif ending == "txt":
        path.write_text("\n".join(record["text"] for record in RECORDS))
    elif ending == "jsonl":
        path.write_text("\n".join(map(json.dumps, RECORDS)))
    else:
        path.write_text("\n".join(PLAIN).replace(",", "," if ending == "csv" else "\t") + "\n\n")
    return path


def read_texts(path: Path, **options: Any) -> list[Sequence[str]]:
    return [table.column("text") for table in read_chunks(path, **options)]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "txt"])
def test_chunks_hold_what_the_whole_file_holds(tmp_path: Path, ending: str):
    path = written(tmp_path, ending)
    whole = read_table(path, other="lines")
    chunks = list(read_chunks(path, rows=3))
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]
    assert [row for chunk in chunks for row in chunk.rows] == list(whole.rows)
    for name, cells in whole.columns.items():
        assert [cell for chunk in chunks for cell in chunk.columns[name]] == cells


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "txt"])
def test_reading_goes_on_behind_the_rows_that_are_done(tmp_path: Path, ending: str):
    path = written(tmp_path, ending)
    assert read_texts(path, columns=["text"], rows=2, start=3) == [["text 3", "text 4"], ["text 5", "text 6"]]
    assert read_texts(path, start=7) == []


def test_blank_lines_of_plain_text_are_rows_so_that_each_line_has_an_answer(tmp_path: Path):
    assert read_texts(put(tmp_path, "a.txt", "a\n\nb\n")) == [["a", "", "b"]]


def test_only_the_columns_asked_for_are_handed_out(tmp_path: Path):
    rows = [{"translation": {"en": "yes", "ro": "da"}, "label": 1}]
    for path in (put(tmp_path, "a.jsonl", json.dumps(rows[0])), tmp_path / "a.parquet"):
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        (table,) = read_chunks(path, columns=["translation.ro"])
        assert table.columns == {"translation.ro": ["da"]}
        assert table.column("translation.ro") == ["da"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet", "txt"])
@pytest.mark.parametrize("column", ["sentence", "sentence.en", "text.en"])
def test_a_column_that_a_file_lacks_is_no_matter_of_a_row(tmp_path: Path, ending: str, column: str):
    with pytest.raises(DataError, match=rf"no column '{column}'; its columns are: text") as info:
        list(read_chunks(written(tmp_path, ending), columns=[column], on_bad_row=lambda _: None))
    assert info.value.column == column


BAD = {
    "jsonl": (b'{"text": "a"}\n{"text": \n[1]\n{"text": "\xff"}\n{"label": 1}\n\n{"text": "b"}\n', [2, 3, 4, 5]),
    "csv": (b'text,label\na,1\n"open,1\nb\n\xff,1\n\nc,"x"y\nb,1\n', [3, 4, 5, 6, 7]),
    "tsv": (b"text\tlabel\na\t1\nb\n\xff\t1\n\nb\t1\n", [3, 4, 5]),
    "txt": (b"a\n\xff\nb\n", [2]),
    "conll": (b"a O\n\nx\ny O\n\nz O\n\xff\n\nb O\n", [3, 7]),
}


@pytest.mark.parametrize("ending", BAD)
def test_rows_that_cannot_be_read_are_named_and_the_rest_goes_on(tmp_path: Path, ending: str):
    path = put(tmp_path, f"a.{ending}", BAD[ending][0])
    column = "0" if ending == "conll" else "text"
    problems: list[DataError] = []
    tables = list(read_chunks(path, columns=[column], rows=1, on_bad_row=problems.append))
    assert [table.column(column) for table in tables] == ([[["a"]], [["b"]]] if ending == "conll" else [["a"], ["b"]])
    assert [problem.row for problem in problems] == BAD[ending][1]
    assert all(problem.path == str(path) and f"row {problem.row}" in str(problem) for problem in problems)


@pytest.mark.parametrize("ending", BAD)
def test_without_leave_to_skip_the_first_bad_row_ends_it_behind_those_before(tmp_path: Path, ending: str):
    path = put(tmp_path, f"a.{ending}", BAD[ending][0])
    column = "0" if ending == "conll" else "text"
    tables: list[Table] = []
    with pytest.raises(DataError, match=rf"row {BAD[ending][1][0]}\b") as info:
        tables.extend(read_chunks(path, columns=[column]))
    assert info.value.row == BAD[ending][1][0]
    chunks = read_chunks(path, columns=[column])
    assert list(next(chunks).rows) == [2 if ending in ("csv", "tsv") else 1]


def test_bad_rows_among_those_that_are_done_are_not_named_again(tmp_path: Path):
    path = put(tmp_path, "a.jsonl", '{"text": "a"}\nbad\n{"text": "b"}\nbad\n{"text": "c"}\n')
    problems: list[DataError] = []
    assert read_texts(path, start=2, on_bad_row=problems.append) == [["c"]]
    assert [problem.row for problem in problems] == [4]


def test_a_null_in_parquet_is_a_row_without_a_value(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"], "translation": [{"en": "x"}, {"en": "y"}, None]}), path)
    problems: list[DataError] = []
    assert read_texts(path, columns=["text"], on_bad_row=problems.append) == [["a", "b"]]
    (table,) = read_chunks(path, columns=["translation.en"], on_bad_row=problems.append)
    assert table.columns == {"translation.en": ["x", "y"]}
    assert [(problem.row, problem.column) for problem in problems] == [(2, "text"), (3, "translation.en")]


def test_files_without_rows_damaged_files_and_no_files_have_no_chunks(tmp_path: Path):
    for name, text in (("a.jsonl", ""), ("a.csv", "text\n"), ("a.txt", "")):
        with pytest.raises(DataError, match="is empty; a task needs at least one row"):
            list(read_chunks(put(tmp_path, name, text)))
    with pytest.raises(DataError, match="is not a Parquet file"):
        list(read_chunks(put(tmp_path, "a.parquet", "PAR1")))
    with pytest.raises(DataError, match=r"none\.csv is not there"):
        list(read_chunks(tmp_path / "none.csv"))
    with pytest.raises(DataError, match=r"ends in '\.xlsx'"):
        list(read_chunks(put(tmp_path, "a.xlsx", "x")))
    with pytest.raises(DataError, match="not UTF-8 at byte 0"):
        list(read_chunks(put(tmp_path, "b.csv", b"\xff,label\nx,1\n"), on_bad_row=lambda _: None))
    with pytest.raises(ConfigError, match="read: rows is 0"):
        list(read_chunks(tmp_path / "a.csv", rows=0))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "txt"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, ending: str):
    peaks = []
    for count in (300, 2_000):
        text = "word " * 20
        lines = {"csv": f"{text},1", "jsonl": json.dumps({"text": text}), "txt": text}
        path = put(tmp_path, f"{count}.{ending}", "text,label\n" + f"{lines[ending]}\n" * count)
        if ending == "jsonl":
            path.write_text(path.read_text().split("\n", 1)[1])
        tracemalloc.start()
        assert sum(len(table) for table in read_chunks(path, rows=100)) == count + (ending == "txt")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("nested", one_in(2, [False, True]))
def test_a_parquet_file_of_some_kilobytes_that_expands_without_limit(
    nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parquet, "MOST_BYTES", 20_000_000)
    path, text = tmp_path / "a.parquet", "x" * 100_000  # 200 MB of cells, each of which is a number in the file
    cell = [text, text] if nested else text
    pq.write_table(pa.table({"text": [cell] * 2000, "label": ["a"] * 2000}), path)
    assert path.stat().st_size < 100_000
    error = r"its cells take more than 20,000,000; the cells of a file may take 20,000,000 bytes, or 100 times its size"
    with pytest.raises(DataError, match=error):
        read_table(path)
    with pytest.raises(DataError, match=error):
        parquet_rows(path)
    with pytest.raises(DataError, match=error):
        next(read_chunks(path))
    assert len(next(read_chunks(path, columns=["label"], rows=2000))) == 2000


def test_a_parquet_file_with_very_many_equal_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parquet, "MOST_BYTES", 20_000_000)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": np.zeros(2_600_000, np.int8)}), path)
    with pytest.raises(DataError, match=r"more than 20,000,000"):
        read_table(path)


def test_repeated_texts_of_a_parquet_file_are_read_in_their_types(tmp_path: Path):
    path = tmp_path / "a.parquet"
    columns = {
        "text": ["a", "b", "a", None],
        "bytes": [b"a", b"a", None, b"b"],
        "image": [{"bytes": b"y", "path": None}] * 4,
        "words": [["q", "r"], [], None, ["q"]],
        "pairs": [[{"k": "v"}], [], None, [{"k": "v"}] * 2],
        "number": [1, 2, None, 3],
    }
    pq.write_table(pa.table(columns), path)
    assert dict(read_table(path).columns) == columns


def test_the_time_to_read_a_file_is_linear_in_its_columns(tmp_path: Path):
    def calls(columns: int) -> int:
        names = ",".join(f"c{number}" for number in range(columns))
        path = put(tmp_path, "a.csv", f"{names}\n" + ",".join("1" * columns) + "\n")
        profile = cProfile.Profile()
        profile.runcall(read_table, path)
        return pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]

    calls(1)
    assert calls(160) < 5 * calls(40)


def test_a_column_or_key_that_comes_twice_is_an_error(tmp_path: Path):
    table = pa.table([pa.array(["a"]), pa.array(["x"]), pa.array(["y"])], names=["sentence", "label", "label"])
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"sentence": "a", "label": "x", "label": "y"}\n')
    for name, said in (
        ("a.parquet", "has two columns 'label'"),
        ("a.jsonl", "row 1 is not clear: the key 'label' comes twice"),
    ):
        with pytest.raises(DataError, match=said):
            read_table(tmp_path / name)


def test_tsv_with_cells_quoted_as_in_csv(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    table = read_table(put(tmp_path, "a.tsv", 'text\tlabel\nx\t"5"" pipe"\n"a ""b"""\t0\n'))
    assert table.columns["label"] == ['"5"" pipe"', "0"]
    assert "cells are in quotes with doubled quotes inside, as in CSV, in 2 rows (the first is row 2)" in caplog.text
    caplog.clear()
    read_table(put(tmp_path, "100%_a.tsv", 'text\tlabel\nx\t"5"" pipe"\n'))
    assert "100%_a.tsv: cells are in quotes with doubled quotes inside, as in CSV, in 1 row (the first" in caplog.text
    assert "pandas.read_csv('100%_a.tsv'" in caplog.text
    caplog.clear()
    read_table(put(tmp_path, "b.tsv", 'text\tlabel\n"x"\t""\n"a "b" c"\t""b"" c\n'))
    assert not caplog.text


def test_tsv_with_a_quoted_tab(tmp_path: Path):
    with pytest.raises(DataError, match=r"row 2 has 3 columns; the file has 2\. In TSV files quotes do not join cells"):
        read_table(put(tmp_path, "a.tsv", 'text\tlabel\n"a\tb"\t0\n'))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_file_without_a_header(tmp_path: Path, name: str):
    table = read_table(put(tmp_path, name, "good\tpos\nbad\tneg\n".replace("\t", "," if name == "a.csv" else "\t")))
    with pytest.raises(DataError, match=r"has no column 'label'.* Row 1 is read as the header; if it is data"):
        table.column("label")
    with pytest.raises(DataError, match=r"has no column '1'; .*: good, pos\. Columns of such a file are named"):
        table.column(1)
