from __future__ import annotations

import json

import pytest

from lamina.cli.output import print_json, print_table, text


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]):
    print_json({"a": [float("nan"), (1, float("inf"))], 2: "ü"}, indent=None)
    out = capsys.readouterr().out
    assert "ü" in out
    assert json.loads(out) == {"a": [None, [1, None]], "2": "ü"}


def test_a_table_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]):
    print_table("[title]", ("[a]", "n"), [("[red]x[/red]", 12345), ("[PAD]", 6)])
    out = capsys.readouterr().out
    assert all(part in out for part in ("[title]", "[a]", "[red]x[/red]", "12,345", "[PAD]"))


def test_a_title_wider_than_its_table_stays_on_a_line(capsys: pytest.CaptureFixture[str]):
    print_table("A title of many words", ("a",), [("b",)])
    assert capsys.readouterr().out.splitlines()[0] == "A title of many words"


@pytest.mark.parametrize(
    ("cell", "shown"), [(None, ""), (0.98766, "0.9877"), (1234, "1,234"), (True, "True"), ("x", "x")]
)
def test_cells(cell: object, shown: str):
    assert text(cell) == shown
