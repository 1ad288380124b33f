"""The README: its ten lines on a model that Lamina did not load, and its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.documented import ROOT, blocks
from transformers import AutoModel, AutoTokenizer

from lamina.demo.corpus import write
from lamina.store.models import source_of


def test_its_ten_lines_take_a_plain_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "out" / "demo" / "corpus", rows=60)
    line = 'model, tokenizer = lamina.load("minilm")\n'
    plain = "model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)\n"
    code = next(blocks(ROOT / "README.md")).code
    assert line in code
    names: dict[str, object] = {
        "AutoModel": AutoModel,
        "AutoTokenizer": AutoTokenizer,
        "minilm": source_of("minilm", None),
    }
    exec(compile(code.replace(line, plain).replace("epochs=3", "epochs=1"), "README.md", "exec"), names)
    assert (tmp_path / "out" / "mood" / "lamina.json").is_file()


def test_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert wanted == {"demo", "test"}
    assert all(f"\n{target}:" in makefile for target in wanted)
