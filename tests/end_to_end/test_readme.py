"""The Python of the README, in a folder where the demo left its corpus, and of the page on generation runs as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.stored import tiny_tokenizer
from transformers import AutoModel, AutoTokenizer

from lamina.demo.corpus import write
from lamina.store.models import source_of

ROOT = Path(__file__).parents[2]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "out" / "demo" / "corpus", rows=100)
    code = blocks(ROOT / "README.md")
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert len(code) == 4
    assert "'mood': {'label':" in printed
    assert "tensor(" in printed
    assert (tmp_path / "out" / "mood" / "lamina.json").is_file()
    assert (tmp_path / "out" / "edited" / "config.json").is_file()
    assert (tmp_path / "out" / "tuned" / "lamina_edits.json").is_file()


def test_the_page_on_generation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "flag"))
    names: dict[str, object] = {"tokenizer": tiny_tokenizer()}
    for block in blocks(ROOT / "docs" / "generation.md"):
        exec(compile(block, "generation.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([1, 3])\n" in printed
    assert "'flag': Monitor(reader='flag', flag=('odd',), aggregate=RollingMax(window=4), threshold=0." in printed
    assert printed.endswith("torch.Size([1, 3, 32]) torch.Size([1, 3, 32])\n")


def test_its_ten_lines_take_a_plain_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "out" / "demo" / "corpus", rows=60)
    line = 'model, tokenizer = lamina.load("minilm")\n'
    plain = "model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)\n"
    code = blocks(ROOT / "README.md")[0]
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
