"""Which column of a file readers read that learnt from different columns."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.support.training import names, reader, tiny_bank, yes_no

from lamina import ReaderBank, predict_file
from lamina.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


def bank() -> ReaderBank:
    return tiny_bank({"mood": reader(yes_no()), "who": reader(names())})


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("learnt", "columns", "used"),
    [
        (("title", "body"), ("id", "body", "text"), "body"),  # the file has one of their columns
        (("title", "body"), ("id", "text"), "text"),  # or neither: the usual name decides
        (("title", "body"), ("note",), "note"),  # or one column
        (("title", "title"), ("title", "text"), "title"),
    ],
)
def test_readers_that_learnt_from_other_columns_read_the_one_that_is_there(
    tmp_path: Path, learnt: tuple[str, str], columns: tuple[str, ...], used: str, caplog: pytest.LogCaptureFixture
):
    made, source = bank(), tmp_path / "in.jsonl"
    source.write_text(json.dumps({name: f"a {name}" for name in columns}) + "\n")
    for name, column in zip(made, learnt, strict=True):
        made[name].info["columns"] = {"text": column, "label": name}
    predict_file(made, source, tmp_path / "out.jsonl")
    assert texts(tmp_path / "out.jsonl") == [f"a {used}"]
    said = f"all readers read column '{used}' of in.jsonl, though they learnt from columns title and body. Set text"
    assert [said in message for message in caplog.messages] == [True] * (learnt[0] != learnt[1])


def test_a_column_of_words_with_tags_is_no_text(tmp_path: Path):
    made, source = bank(), tmp_path / "in.jsonl"
    source.write_text('{"tokens": ["anna"], "ticket": "anna was in paris", "text": "a title"}\n')
    made["mood"].info["columns"] = {"text": "ticket", "label": "mood"}
    made["who"].info["columns"] = {"text": "tokens", "label": "tags"}
    predict_file(made, source, tmp_path / "out.jsonl")
    assert texts(tmp_path / "out.jsonl") == ["anna was in paris"]
    with pytest.raises(DataError, match=r"row 1 has .* in column 'tokens'"):
        predict_file(made, source, tmp_path / "out.jsonl", readers="who")
