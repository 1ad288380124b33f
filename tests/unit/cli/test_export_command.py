from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.stored import save_base, tiny_bank

from lamina.store import load, onnx, save_bank
from lamina.store.plain_reader import PlainReader


@pytest.fixture
def bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved bank; graphs are not traced here."""

    def run(plan: Any, path: Path, batch: Any) -> dict[str, Any]:
        return {name: value.numpy() for name, (value, _) in plan.expected(batch).items()}

    monkeypatch.setattr(onnx, "_write", lambda plan, path, opset: path.write_bytes(b"graph"))
    monkeypatch.setattr(onnx, "_run", run)
    save_base(tmp_path / "base")
    save_bank(tiny_bank(load(tmp_path / "base")[0]), tmp_path / "bank")
    return tmp_path / "bank"


def test_a_bank_with_its_tokenizer(lamina, bank: Path, tmp_path: Path):
    ran = lamina("export", str(bank), str(tmp_path / "out"), "--reader", "mood", "--json")
    facts = json.loads(ran.out)
    assert facts == {"folder": str(tmp_path / "out"), **json.loads((tmp_path / "out" / "onnx.json").read_text())}
    assert list(facts["outputs"]) == ["mood"]
    assert "tokenizer.json" in facts["files"]
    refused = lamina("export", bank, "-o", tmp_path / "out")
    assert f"error: export: {tmp_path / 'out'} is not empty. Give another folder, or --overwrite" in refused.err
    ran = lamina("export", bank, "-o", tmp_path / "out", "--overwrite")
    assert "export: 100%" in ran.err
    table = ran.out
    assert "token classification" in table
    assert "O, B-PER, B-LOC" in table


def test_a_plain_model(lamina, bank: Path, tmp_path: Path):
    ran = lamina("export", str(tmp_path / "base"), str(tmp_path / "out"), "--json")
    assert list(json.loads(ran.out)["outputs"]) == ["last_hidden_state"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_reader_as_plain_pytorch(lamina, bank: Path, tmp_path: Path):
    ran = lamina("export", str(bank), str(tmp_path / "out"), "--format", "torch", "--reader", "mood")
    assert ran.out == f"{tmp_path / 'out'}: reader 'mood' of layers 1, 2, 3\n"
    assert PlainReader.load(tmp_path / "out").labels == ["bad", "good"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("bank", "--format", "torch"), "no readers were named; --format torch writes one reader of a bank"),
        (
            ("bank", "--format", "torch", "--reader", "mood", "--main"),
            "--main was given; --format torch writes one reader",
        ),
        (("bank", "--reader", "mod"), "unknown reader 'mod'; known: mood, who. Did you mean 'mood'?"),
        (("base", "--reader", "mood"), "is a whole model, which has no readers"),
        (("base", "--reader", "mood", "--format", "torch"), "is a whole model, which has no readers"),
        (("bank", "-o", "there"), "two output folders were given"),
        (("bank", "--max-loss", "0.5"), "--validation, --label and --max-loss are for --int8, which was not given"),
        (("none",), "no bank"),
    ],
)
def test_what_cannot_be_is_told(lamina, bank: Path, tmp_path: Path, arguments: tuple[str, ...], told: str):
    ran = lamina("export", str(tmp_path / arguments[0]), str(tmp_path / "out"), *arguments[1:])
    assert ran.code == 2
    assert told in ran.err
    assert not (tmp_path / "out").exists()


def test_the_output_may_be_named_as_in_other_commands(lamina, bank: Path, tmp_path: Path):
    assert "export: no output folder was given" in lamina("export", bank).err
    ran = lamina("export", bank, "--output", tmp_path / "out", "--readers", "mood,who", "--no-progress", "--json")
    assert (list(json.loads(ran.out)["outputs"]), ran.err) == (["mood", "who"], "")
