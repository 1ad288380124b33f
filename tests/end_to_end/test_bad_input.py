"""Every kind of bad input ends `lamina train` with one sentence, exit code 2, and nothing half written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lamina.cli import main

READER = "readers: {all: {fusion: {name: ada_layers, dim: 8}}}"
ROWS = "sentence\tlabel\nit is good\tyes\nit is bad\tno\n"


def recipe(folder: Path, body: str, *, model: str = "minilm") -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"model: {model}\nfit: {{epochs: 1, progress: false}}\ntasks:\n  mood:\n{body}", encoding="utf-8")
    return path


def task(train: str, *, label: str = "label", reader: str = READER, extra: str = "") -> str:
    return f"    files: {{train: {train}, validation: dev.tsv}}\n    label: {label}\n    {reader}\n{extra}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.tsv").write_text(ROWS)
    (folder / "dev.tsv").write_text(ROWS.replace("it", "this"))
    (folder / "empty.tsv").write_text("")
    (folder / "narrow.tsv").write_text(ROWS + "no label here\n")
    (folder / "latin.tsv").write_bytes("sentence\tlabel\nd\xe9j\xe0 vu\tyes\n".encode("latin-1"))
    (folder / "other.tsv").write_text("sentence\tlabel\nit is odd\tmaybe\nit is even\tmaybe\n")
    return folder


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


CASES = {
    "missing file": (task("none.tsv"), "none.tsv"),
    "missing column": (task("train.tsv", label="mood"), "sentence, label"),
    "label not in the set": (task("other.tsv"), "'yes'"),
    "empty file": (task("empty.tsv"), "empty"),
    "row of the wrong width": (task("narrow.tsv"), "row 4"),
    "not UTF-8": (task("latin.tsv"), "UTF-8"),
    "misspelt task key": (task("train.tsv", extra="    lable: x\n"), "Did you mean 'label'?"),
    "misspelt fusion": (task("train.tsv", reader="readers: {all: {fusion: ada_layer}}"), "Did you mean 'ada_layers'?"),
    "misspelt fusion key": (
        task("train.tsv", reader="readers: {all: {fusion: {name: ada_layers, dims: 8}}}"),
        "Did you mean 'dim'?",
    ),
    "misspelt head key": (
        task("train.tsv", reader="readers: {all: {fusion: mean, head: {poling: mean}}}"),
        "Did you mean 'pooling'?",
    ),
    "layer out of range": (
        task("train.tsv", reader="readers: {all: {fusion: {name: single_layer, layer: 7}}}"),
        "the model has 7 layers",
    ),
    "no such selector": (task("train.tsv", reader="readers: {all: {fusion: {name: mean, layers: upper}}}"), "upper"),
    "heads that do not divide": (
        task("train.tsv", reader="readers: {all: {fusion: {name: ada_layers, dim: 10}}}"),
        "1, 2, 5, 10",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_recipe_or_data_is_one_sentence(case: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    body, says = CASES[case]
    output = tmp_path / "out"
    code = run("train", str(recipe(tmp_path, body)), "--data", str(data), "--output", str(output))
    error = capsys.readouterr().err
    assert code == 2
    assert says in error
    lines = [line for line in re.split(r"[\r\n]", error) if line and not line.startswith("Loading weights")]
    assert [line[:7] for line in lines] == ["error: "]
    assert not output.exists()


def test_misspelt_fit_option(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = recipe(tmp_path, task("train.tsv"))
    path.write_text(path.read_text().replace("epochs: 1", "epoch: 1"))
    assert run("train", str(path), "--data", str(data), "--output", str(tmp_path / "out")) == 2
    assert "Did you mean 'epochs'?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_model_that_cannot_be_found(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = recipe(tmp_path, task("train.tsv"), model="nobody/no-such-model")
    assert run("train", str(path), "--data", str(data), "--output", str(tmp_path / "out")) == 2
    assert "nobody/no-such-model" in capsys.readouterr().err


def test_recipe_that_is_missing_or_no_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("train", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml cannot be read" in capsys.readouterr().err
    (tmp_path / "broken.yaml").write_text("model: [")
    assert run("train", str(tmp_path / "broken.yaml")) == 2
    assert "is not YAML" in capsys.readouterr().err


@pytest.mark.long
def test_good_recipe_trains_and_predicts_on_any_text(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The cases above fail for their own reason: the same recipe without a fault runs to its end."""
    output = tmp_path / "out"
    assert run("train", str(recipe(tmp_path, task("train.tsv"))), "--data", str(data), "--output", str(output)) == 0
    assert (output / "table.md").read_text().count("\n") == 3
    capsys.readouterr()
    odd = [
        "",
        "   ",
        "x " * 5_000,
        "\U0001f600\U0001f3f3\ufe0f\u200d\U0001f308",
        "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    ]
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in odd))
    assert run("predict", str(output), "--file", str(lines), "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["readers"]["mood-all-0"]["label"] in ("yes", "no") for answer in answers] == [True] * len(odd)


@pytest.mark.long
def test_damaged_reader_and_missing_manifest(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "out"
    run("train", str(recipe(tmp_path, task("train.tsv"))), "--data", str(data), "--output", str(output))
    weights = output / "readers" / "mood-all-0" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    capsys.readouterr()
    assert run("predict", str(output), "a text") == 2
    assert "model.safetensors" in capsys.readouterr().err
    (output / "lamina.json").unlink()
    assert run("predict", str(output), "a text") == 2
    assert "lamina.json" in capsys.readouterr().err
