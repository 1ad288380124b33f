"""The Python of the page on few examples runs as it is, and the command line takes the folder that it saves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.documented import ROOT, blocks

from lamina.cli import main


@pytest.mark.long
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lamina.train.plan.LEAST_STEPS", 20)
    names: dict[str, object] = {}
    printed = ""
    for block in blocks(ROOT / "docs" / "few-shot.md"):
        printed += block.run(names)
    assert printed.startswith("['good'] [[")
    assert "{'reader': " in printed
    assert "layer5_0" in printed
    assert printed.splitlines()[-1].startswith("[['")
    with pytest.raises(SystemExit) as ended:
        main(["predict", "out/mood", "--json", "A warm story."])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)
    assert names["classifier"].predict(names["texts"]).tolist() == names["labels"]  # pyright: ignore
