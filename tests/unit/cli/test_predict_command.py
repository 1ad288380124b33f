from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tests.support.file_banks import PNG, seeing
from tests.support.stored import TEXTS, save_base

from lamina import prediction
from lamina.cli import shared_options
from lamina.cli.predict_command import _short, summary
from lamina.store import load

ODD = ["", "   ", "🙂 مرحبا", "film " * 20_000]


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_texts_as_arguments(lamina, bank_folder: Path):
    ran = lamina("predict", bank_folder, *TEXTS, "--json")
    assert (ran.code, ran.err) == (0, "")
    answers = lines(ran.out)
    assert [answer["text"] for answer in answers] == TEXTS
    assert {answer["readers"]["mood"]["label"] for answer in answers} <= {"bad", "good"}
    assert all(isinstance(answer["readers"]["who"], list) for answer in answers)


def test_a_text_that_is_the_name_of_a_file_is_told_of(lamina, bank_folder: Path, tmp_path: Path, caplog):
    (tmp_path / "new.csv").write_text("text\nthe film is good\n")
    ran = lamina("predict", bank_folder, tmp_path / "new.csv", "--json")
    assert (ran.code, len(lines(ran.out))) == (0, 1)
    assert "new.csv' was read as a text, but a file has this name. Its rows: --file" in caplog.text
    caplog.clear()
    lamina("predict", bank_folder, tmp_path / "none.csv", "--json")
    assert "was read as a text" not in caplog.text


def test_arguments_file_and_standard_input_agree(lamina, bank_folder: Path, tmp_path: Path):
    expected = lamina("predict", bank_folder, *TEXTS, "--json").out
    (tmp_path / "x.txt").write_text("\n".join(TEXTS))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))
    assert lamina("predict", bank_folder, "--json", stdin="\n".join(TEXTS).encode()).out == expected
    assert lamina("predict", bank_folder, "--file", tmp_path / "x.txt", "--json").out == expected
    assert lamina("predict", bank_folder, "--file", tmp_path / "x.jsonl", "--json").out == expected
    assert lamina("predict", bank_folder, "--text", "text", "--file", tmp_path / "x.jsonl", "--json").out == expected


@pytest.mark.long
def test_odd_texts_give_a_result(lamina, bank_folder: Path):
    ran = lamina("predict", bank_folder, *ODD, "--json")
    assert (ran.code, len(lines(ran.out))) == (0, len(ODD))


def test_pairs(lamina, bank_folder: Path, tmp_path: Path):
    (tmp_path / "x.tsv").write_text("a\tb\nthe film\tis good\n")
    ran = lamina(
        "predict", bank_folder, "--file", tmp_path / "x.tsv", "--text", "a", "--pair", "b", "--json",
        "--readers", "mood",
    )  # fmt: skip
    assert [(answer["text"], list(answer["readers"])) for answer in lines(ran.out)] == [
        (["the film", "is good"], ["mood"])
    ]


def test_the_table(lamina, bank_folder: Path):
    ran = lamina("predict", bank_folder, "the film is good .", "--readers", "mood")
    assert ran.code == 0
    assert "the film is good ." in ran.out
    assert "mood" in ran.out
    assert "who" not in ran.out
    assert "good (0." in ran.out or "bad (0." in ran.out


def test_a_base_by_name(lamina, bank_folder: Path, base: Path, tmp_path: Path):
    same = lamina("predict", bank_folder, "bad", "--model", base, "--json", "--device", "cpu")
    assert same.out == lamina("predict", bank_folder, "bad", "--json").out
    other = lamina("predict", bank_folder, "bad", "--model", save_base(tmp_path / "other", seed=9))
    assert (other.code, other.out) == (2, "")
    assert "error: load: these readers were trained on another base: fingerprint was" in other.err


def test_a_file_into_another(lamina, bank_folder: Path, tmp_path: Path):
    rows = [*({"text": text} for text in TEXTS), {"text": 3}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("predict", bank_folder, "--file", tmp_path / "x.jsonl", "-o", tmp_path / "out.jsonl")
    ran = lamina(*asked)
    assert (ran.code, ran.out) == (2, "")
    assert f"row {len(rows)} has int in column 'text'" in ran.err
    assert not (tmp_path / "out.jsonl").exists()
    ran = lamina(*asked, "--skip-bad", "--json")
    assert json.loads(ran.out) == {"output": str(tmp_path / "out.jsonl"), "rows": len(TEXTS), "skipped": 1}
    written = lines((tmp_path / "out.jsonl").read_text())
    said = lines(lamina("predict", bank_folder, *TEXTS, "--json").out)
    assert [(row["text"], row["readers"]["mood"]["label"]) for row in written] == [
        (row["text"], row["readers"]["mood"]["label"]) for row in said
    ]
    ran = lamina(*asked[:-1], tmp_path / "out.csv", "--skip-bad", "--no-resume", "--readers", "mood", "--text", "text")
    assert ran.out == f"{len(TEXTS)} rows in {tmp_path / 'out.csv'}, 1 skipped\n"


def test_a_whole_model(lamina, model_folder: Path, tmp_path: Path):
    ran = lamina("predict", model_folder, *TEXTS, "--json")
    assert (ran.code, ran.err) == (0, "")
    answers = [answer["readers"] for answer in lines(ran.out)]
    model, tokenizer = load(model_folder, "sequence_classification")
    assert answers == prediction.predict(model, TEXTS, processor=tokenizer)
    assert "sequence_classification" in lamina("predict", model_folder, *TEXTS).out
    (tmp_path / "x.txt").write_text("\n".join(TEXTS))
    ran = lamina("predict", model_folder, "--file", tmp_path / "x.txt", "-o", tmp_path / "out.jsonl")
    assert ran.out == f"{len(TEXTS)} rows in {tmp_path / 'out.jsonl'}, 0 skipped\n"
    assert [row["readers"] for row in lines((tmp_path / "out.jsonl").read_text())] == answers


def test_what_has_a_manifest_is_a_bank(lamina, bank_folder: Path, model_folder: Path, tmp_path: Path):
    shutil.copytree(bank_folder, tmp_path / "bank")
    shutil.copy(model_folder / "lamina_edits.json", tmp_path / "bank")
    assert lamina("predict", tmp_path / "bank", "bad", "--readers", "mood").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--readers", "mood"), "readers are ['mood'] for a whole model"),
        (("--model", "minilm"), "is a whole model, which needs no base"),
    ],
)
def test_what_a_whole_model_does_not_have(lamina, model_folder: Path, arguments: tuple[str, ...], message: str):
    ran = lamina("predict", model_folder, "bad", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err


def test_no_texts_at_all(lamina, bank_folder: Path):
    ran = lamina("predict", bank_folder, stdin=b"")
    assert (ran.code, ran.out) == (2, "")
    assert "standard input is empty" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x", "--file", "y.txt"), "texts and --file were both given"),
        (("x", "--text", "y"), "--text was given without --file, which it belongs to"),
        (("x", "--output", "y.csv"), "--output was given without --file"),
        (("x", "--skip-bad"), "--skip-bad was given without --output"),
        (("x", "--readers", "moods"), "unknown reader 'moods'; known: mood, who. Did you mean 'mood'?"),
        (("x", "--readers", " ,"), "--readers is ' ,', which names nothing. Give names, such as a,b"),
        (("x", "--device", "warp"), "device: 'warp' cannot be used"),
        (("x", "--device", "hpu"), "device: 'hpu' cannot be used"),
        (("--file", "none.txt"), "none.txt is not there"),
        (("--file", "."), ". is a folder; a file is needed"),
    ],
)
def test_input_that_cannot_be_used(lamina, bank_folder: Path, arguments: tuple[str, ...], message: str):
    ran = lamina("predict", bank_folder, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: ")
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_a_folder_that_is_no_bank(lamina, tmp_path: Path):
    ran = lamina("predict", tmp_path, "x")
    assert (ran.code, ran.out) == (2, "")
    assert "has no lamina.json" in ran.err


@pytest.mark.parametrize("model", ["minilm", None])
def test_a_model_without_readers(lamina, base: Path, model: str | None):
    ran = lamina("predict", model or base, "x")
    assert (ran.code, ran.out) == (2, "")
    assert "has no lamina.json; it is a model, and readers are trained on it first" in ran.err


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"label": "good", "score": 0.934, "probabilities": {}}, "good (0.93)"),
        ({"value": 2.51249}, "2.512"),
        ({"labels": ["a", "b"], "probabilities": {}}, "a, b"),
        ({"labels": [], "probabilities": {}}, "-"),
        ([{"text": "Anna", "label": "PER", "score": 0.5, "start": 0, "end": 4}], "Anna PER (0.50)"),
        ([], "-"),
        ({"text": "a summary"}, "a summary"),
        ([{"start": 0, "end": 6, "candidates": [{"token": "cat", "score": 0.5}]}], "cat (0.50)"),
    ],
)
def test_answers_in_a_few_words(answer: Any, shown: str):
    assert summary(answer) == shown


def test_long_texts_and_pairs_are_shown_short():
    assert _short("a\n b") == "a b"
    assert _short(("a", "b")) == "a | b"
    assert _short("x" * 61) == "x" * 57 + "..."


@pytest.mark.parametrize("option", [("--workers", "4"), ("--no-resume",), ("--skip-bad",)])
def test_options_of_an_output_need_one(lamina, option: tuple[str, ...]):
    ran = lamina("predict", "bank", "a text", *option)
    assert (ran.code, ran.err) == (2, f"error: predict: {option[0]} was given without --output, which it belongs to.\n")


def test_images_of_a_file_are_beside_it(lamina, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bank = seeing()
    monkeypatch.setattr(shared_options, "open_on", lambda *_, **__: bank)
    (tmp_path / "x.csv").write_text("image\na.png\n")
    (tmp_path / "a.png").write_bytes(PNG)
    from_table = lamina("predict", "a bank", "--file", tmp_path / "x.csv", "--json")
    parquet.write_table(pyarrow.table({"image": [{"bytes": PNG, "path": "a.png"}]}), tmp_path / "x.parquet")
    assert json.loads(from_table.out)["text"] == "a.png"
    assert lamina("predict", "a bank", "--file", tmp_path / "x.parquet", "--json").out == from_table.out
    assert "a.png" in lamina("predict", "a bank", "--file", tmp_path / "x.parquet").out
