from __future__ import annotations

import io
import json
import sys

import pytest

from lamina.cli.shared_options import Stream, print_json, print_table, text


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    print_json({"a": [float("nan"), (1, float("inf"))], 2: "ü"}, indent=None)
    out = capsys.readouterr().out
    assert "ü" in out
    assert json.loads(out) == {"a": [None, [1, None]], "2": "ü"}


def test_a_table_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]):
    print_table("[title]", ("[a]", "n"), [("[red]x[/red]", 12345), ("[PAD]", 6)])
    out = capsys.readouterr().out
    assert all(part in out for part in ("[title]", "[a]", "[red]x[/red]", "12,345", "[PAD]"))


def test_a_name_that_does_not_fit_is_broken_between_its_words(capsys: pytest.CaptureFixture[str]):
    names = [f"acceptability_of_the_sentences_of_part_{part}" for part in "abcde"]
    print_table("", names, [["yes"] * 5])
    shown = capsys.readouterr().out
    assert shown.count("acceptability_of_the_ ") == 5
    assert max(map(len, shown.splitlines())) <= 160
    print_table("", names[:2], [["yes"] * 2])
    assert names[0] in capsys.readouterr().out


def test_a_title_wider_than_its_table_stays_on_a_line(capsys: pytest.CaptureFixture[str]):
    print_table("A title of many words", ("a",), [("b",)])
    assert capsys.readouterr().out.splitlines()[0] == "A title of many words"


@pytest.mark.parametrize(
    ("cell", "shown"), [(None, ""), (0.98766, "0.9877"), (1234, "1,234"), (True, "True"), ("x", "x")]
)
def test_cells(cell: object, shown: str):
    assert text(cell) == shown


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "+-"), ("utf-8", "±"), ("latin-1", "±")])
def test_plus_minus_is_readable_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Stream(io.TextIOWrapper(file, encoding), needed=True))
    sys.stdout.write("± is half\n")
    print_table("", ("score", "n"), [("0.5 ± 0.1", 3), ("0.25 ± 0.1", 4)])
    sys.stdout.flush()
    first, *table = file.getvalue().decode(encoding).splitlines()
    assert first == f"{shown} is half"
    assert f"0.5 {shown} 0.1" in "".join(table)
    assert len({len(line) for line in table}) == 1
