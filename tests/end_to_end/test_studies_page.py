"""The Python of the page on studies runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lamina.studies import Study

PAGE = Path(__file__).parents[2] / "docs" / "studies.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert len(blocks) == 12
    assert names["cka"].shape == (7, 7)
    assert set(names["study"].table["layer"]) == {0, 1, 2}
    assert set(names["words"].table["place"]) == {1, 2, 3}
    assert set(names["tokens"].table["reader"]) == {"mood"}
    assert set(names["probed"].table["layer"].dropna()) == {0, 3, 6}
    assert set(names["worst"]["layer"]) <= {0, 6}
    assert set(names["drops"]["task"]) == {"mood", "language model"}
    assert set(names["curve"].table["reinitialised"]) == set(names["inserted"].table["inserted"]) == {0, 2}
    assert names["advice"].settings["proposals"]["mood"]["keep"] >= 1
    assert names["table"]["score"].tolist() == [1, 4, 9]
    assert Study.load(tmp_path / "out" / "similarity").name == "similarity"
