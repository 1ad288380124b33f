"""`lamina train`: the table, sweeps and dry runs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.portions import one_in
from tests.unit.cli.conftest import Ran
from transformers import AutoModelForSequenceClassification

from lamina import utils
from lamina.cli.train_command import SHOWN

Lamina = Callable[..., Ran]
ROWS = [f"the film is {('bad', 'good')[row % 2]} .\t{('no', 'yes')[row % 2]}\n" for row in range(12)]


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    for part in ("train", "validation"):
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(ROWS))
    path = tmp_path / "films.yaml"
    path.write_text(f"""
model: {base}
fit: {{epochs: 1, batch_size: 8, learning_rate: 0.05}}
tasks:
  film:
    files: {{train: train.tsv, validation: validation.tsv}}
    readers:
      Ada: {{fusion: {{name: ada_layers, dim: 8, dropout: 0.0}}, head: &linear {{pooling: mean}}}}
      last: {{fusion: last_layer, head: *linear}}
""")
    return path


def run(lamina: Lamina, recipe: Path, *more: object) -> Ran:
    output = recipe.parent / "out"
    return lamina("train", recipe, "--data", recipe.parent, "--output", output, "--no-progress", *more)


def table_rows(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


@pytest.mark.long
def test_importances_are_drawn_at_the_end(lamina: Lamina, recipe: Path, monkeypatch: pytest.MonkeyPatch):
    out = recipe.parent / "out"
    ran = run(lamina, recipe)
    drawn = [out / "importance.png", out / "importance-over-training.png"]
    files = f"{out}, report.md, report.tex, {drawn[0].name}, {drawn[1].name}"
    assert ran.out.endswith(f"saved in {files}; lamina report {out} -o page.html shows it\n")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    shutil.rmtree(out)
    monkeypatch.setitem(sys.modules, "altair", None)
    ran = run(lamina, recipe)
    assert ran.code == 0
    assert "no figure was drawn; report: needs the package 'altair'" in ran.err
    assert not drawn[0].exists()
    shutil.rmtree(out)
    recipe.write_text("\n".join(line for line in recipe.read_text().splitlines() if "Ada:" not in line))
    recipe.write_text(recipe.read_text().replace("*linear", "{pooling: mean}"))
    assert "importance.png" not in run(lamina, recipe).out


def test_the_table(lamina: Lamina, recipe: Path):
    ran = run(lamina, recipe)
    assert (ran.code, ran.err) == (0, "")
    rows = table_rows(ran.out)
    assert [row[:3] for row in rows] == [["film", "Ada", "accuracy"], ["film", "last", "accuracy"]]
    assert all(name in ran.out for name in ("f1", "mcc"))
    assert [row[-2] for row in rows] == ["789", "66"]
    assert "2 steps in " in ran.out
    assert "more rows" not in ran.out
    assert "±" not in ran.out
    assert (recipe.parent / "out" / "table.parquet").is_file()


def test_json(lamina: Lamina, recipe: Path):
    found = json.loads(run(lamina, recipe, "--json").out)
    assert found.keys() == {"table", "seconds", "steps", "output", "failures"}
    assert [row["method"] for row in found["table"]] == ["Ada", "last"]
    assert (found["steps"], found["output"]) == (2, str(recipe.parent / "out"))


@pytest.mark.full
def test_a_sweep_shows_its_best_rows(lamina: Lamina, recipe: Path):
    alphas = ",".join(map(str, range(1, SHOWN + 5)))
    ran = run(lamina, recipe, "--sweep", f"alpha={alphas}", "--sweep", "fusion.entropy=0.1")
    assert ran.code == 0
    rows = table_rows(ran.out)
    assert len(rows) == SHOWN
    assert f"and {24 + 1 - SHOWN} more rows, in {recipe.parent / 'out' / 'table.md'}" in ran.out
    whole = json.loads((recipe.parent / "out" / "table.json").read_text())
    assert len(whole) == 25
    assert [row["mean"] for row in whole] == sorted((row["mean"] for row in whole), reverse=True)
    assert {row["settings"].get("fusion.entropy") for row in whole} == {0.1, None}
    assert len((recipe.parent / "out" / "table.md").read_text().splitlines()) == 2 + 25


@pytest.mark.long
def test_intervals_over_a_sweep_of_seeds(lamina: Lamina, recipe: Path):
    ran = run(lamina, recipe, "--sweep", "seed=0,1,2")
    assert ran.out.startswith("Best validation scores; ± is half a 95 % interval")
    rows = table_rows(ran.out)
    assert [row[-3] for row in rows] == ["3", "3"]
    assert all(" ± " in row[3] for row in rows)


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ("fusion.beta=1", "sweep: unknown key 'fusion.beta'"),
        ("alpha", "'alpha' names no values"),
        ("alpha=-1", "alpha is -1; it must be positive"),
        ("cutoff=0.4", "would remove every layer"),
    ],
)
def test_a_sweep_that_cannot_be(lamina: Lamina, recipe: Path, sweep: str, says: str):
    ran = run(lamina, recipe, "--sweep", sweep)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert not (recipe.parent / "out").exists()


@pytest.mark.long
def test_texts_that_lost_their_end_are_told_once_per_task(lamina: Lamina, recipe: Path):
    long = "the film is good " * 20
    (recipe.parent / "train.tsv").write_text(f"sentence\tlabel\n{long}\tyes\nbad\tno\n")
    ran = run(lamina, recipe)
    assert ran.out.count("film: 1 training texts were longer than the model reads, and were cut\n") == 1


def test_only_the_first_of_several_processes_prints(lamina: Lamina, recipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.recipes.run_recipe.run_recipe", lambda *args, **kwargs: None)
    monkeypatch.setattr(utils, "rank", lambda: 1)
    ran = run(lamina, recipe)
    assert (ran.code, ran.out) == (0, "")


# Dry runs


def test_a_dry_run_trains_nothing(lamina: Lamina, recipe: Path):
    ran = run(lamina, recipe, "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert not (recipe.parent / "out").exists()
    rows = table_rows(ran.out)
    assert [row[:9] for row in rows[:2]] == [
        ["film", method, "", "1", "1", "2", size, "0", size] for method, size in (("Ada", "789"), ("last", "66"))
    ]
    assert rows[2] == ["film", "12", "12", "9", "1", "2", "2", "2"]
    assert "At most 2 steps" in ran.out
    assert "frozen" in ran.out
    assert "in the model that readers share" in ran.out
    assert "a cache of the states would take" in ran.out


def test_whole_numbers_that_become_classes_are_said(lamina: Lamina, recipe: Path, caplog: pytest.LogCaptureFixture):
    for part in ("train", "validation"):
        rows = "".join(f"the film is good\t{row % 9}\n" for row in range(18))
        (recipe.parent / f"{part}.tsv").write_text(f"sentence\tlabel\n{rows}")
    run(lamina, recipe, "--dry-run")
    assert ["'label' has 9 different whole numbers" in message for message in caplog.messages] == [True]


def test_a_dry_run_of_a_sweep(lamina: Lamina, recipe: Path):
    ran = run(lamina, recipe, "--dry-run", "--json", "--sweep", "alpha=1,8", "--sweep", "seed=0,1,2")
    rows = json.loads(ran.out)["runs"]
    assert [(row["settings"], row["count"]) for row in rows] == [
        ({"fusion.alpha": 1}, 3),
        ({"fusion.alpha": 8}, 3),
        ({}, 3),
    ]


@pytest.mark.long
def test_a_dry_run_says_what_it_assumed(lamina: Lamina, recipe: Path):
    text = recipe.read_text().replace(next(line for line in recipe.read_text().splitlines() if "model:" in line), "")
    architecture: dict[str, Any] = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4}
    recipe.write_text(f"model: nobody/none\narchitecture: {json.dumps(architecture)}\n{text}")
    ran = run(lamina, recipe, "--dry-run")
    assert ran.code == 0
    assert "(the config of nobody/none is that of the recipe, since the hub cannot be reached)" in ran.out


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 50)


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def no_package(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "says"),
    one_in(
        3,
        [
            (no_weights, "no model"),
            (damaged_weights, "header too large"),
            (no_tokenizer, "processor"),
            (damaged_tokenizer, "the tokenizer in"),
            (no_package, "requires AQLM"),
        ],
    ),
)
def test_a_dry_run_refuses_the_model_that_the_run_would_refuse(
    lamina: Lamina, recipe: Path, base: Path, damage: Callable[[Path], None], says: str
):
    folder = shutil.copytree(base, recipe.parent / "model")
    damage(folder)
    recipe.write_text(recipe.read_text().replace(str(base), str(folder)))
    for more in ((), ("--dry-run",)):
        ran = run(lamina, recipe, *more)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert says in ran.err


@pytest.mark.parametrize(
    ("fit", "says"),
    one_in(
        3,
        [
            ("precision: float16", "there is no GPU"),
            ("max_length: 1", "the special tokens alone are 2"),
            ("max_length: 4000", "model and tokenizer take 1 to 32"),
            ('cache: "on", cache_dir: FILE', "cannot be read (Not a directory)"),
            ('cache: "on"}\ntrain_base: true\nmethods: {', "the model is trained too"),
            ("layer_rates: {99: 0.1}}\ntrain_base: true\nmethods: {", "layer 99 does not exist"),
        ],
    ),
)
def test_a_dry_run_refuses_the_options_that_the_run_would_refuse(lamina: Lamina, recipe: Path, fit: str, says: str):
    fit = fit.replace("FILE", str(recipe.parent / "train.tsv"))
    recipe.write_text(recipe.read_text().replace("learning_rate: 0.05", fit))
    for more in ((), ("--dry-run",)):
        ran = run(lamina, recipe, *more)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert says in ran.err
        assert not (recipe.parent / "out").exists()


def test_a_dry_run_refuses_the_output_that_the_run_would_refuse(lamina: Lamina, recipe: Path):
    (recipe.parent / "out").write_text("a file")
    assert run(lamina, recipe, "--dry-run") == run(lamina, recipe)
    (recipe.parent / "out").unlink()
    (recipe.parent / "out").mkdir()
    (recipe.parent / "out" / "README.md").write_text("of another program")
    ran = run(lamina, recipe, "--dry-run")
    assert ran == run(lamina, recipe, "--overwrite")
    assert (ran.code, "it was made by something else" in ran.err) == (2, True)


# Dry runs of recipes that fine-tune the model itself


@pytest.fixture
def tuned(recipe: Path) -> Path:
    text = recipe.read_text().partition("    readers:")[0]
    recipe.write_text(f"""{text}
methods:
  plain: {{}}
  inserted:
    edits: [{{insert: {{}}}}]
    grid: {{learning_rate: [0.1, 0.2], insert.init: [unit, xavier, he], insert.layers: ["1", "1-3"]}}
seeds: [0, 1]
""")
    return recipe


def test_a_dry_run_of_methods_is_one_line_each(lamina: Lamina, tuned: Path):
    ran = run(lamina, tuned, "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert not (tuned.parent / "out").exists()
    model = yaml.safe_load(tuned.read_text())["model"]
    whole = AutoModelForSequenceClassification.from_pretrained(model).num_parameters()
    rows = [row for row in table_rows(ran.out) if row[0]]
    assert rows[0][:9] == ["film", "plain", "", "2", "1", "2", f"{whole:,}", "0", f"{whole:,}"]
    assert (rows[1][:2], rows[1][3:6], rows[1][7]) == (["film", "inserted"], ["24", "1", "2"], "768 to 2.3 k")
    shown, task = table_rows(ran.out), ["film", "12", "12", "9", "1", "26", "2", "52"]
    settings = "".join(row[2] for row in shown[1 : shown.index(task)])
    assert re.sub(r"\s", "", settings) == "2xlearning_rate,3xinsert.init,2xinsert.layers"
    assert "At most 52 steps" in ran.out
    assert "the optimizer's moments take up to" in ran.out
    assert "cache" not in ran.out
    assert "readers share" not in ran.out


def test_a_dry_run_of_methods_as_json(lamina: Lamina, tuned: Path):
    found = json.loads(run(lamina, tuned, "--dry-run", "--json").out)
    assert [row["count"] for row in found["runs"]] == [2] * 13
    assert found["runs"][1]["settings"] == {"learning_rate": 0.1, "insert.init": "unit", "insert.layers": "1"}
    assert found["flops"].keys() == {"base", "runs", "total"}


def test_a_dry_run_shows_how_much_is_written(lamina: Lamina, tmp_path: Path):
    model = {"model_type": "t5", "num_layers": 1, "decoder_start_token_id": 0}
    tasks = {"a": {"preset": "wmt16_en_ro"}}
    fields = {"model": "nobody/none", "architecture": model, "tasks": tasks, "methods": {"m": {}}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({**fields, "fit": {"max_target_length": 7}}))
    ran = lamina("train", path, "--dry-run")
    assert ran.code == 0
    assert "35 + 7" in ran.out


# Progress


@pytest.mark.parametrize(
    ("says", "flags", "shown"),
    one_in(
        2,
        [
            ("", (), True),
            ("progress: false, ", (), False),
            ("progress: false, ", ("--progress",), True),
            ("", ("--json", "--no-progress"), False),
        ],
    ),
)
def test_progress_is_as_the_command_or_the_recipe_says(
    lamina: Lamina, recipe: Path, says: str, flags: tuple[str, ...], shown: bool
):
    recipe.write_text(recipe.read_text().replace("fit: {", f"fit: {{{says}"))
    ran = lamina("train", recipe, "--data", recipe.parent, "-o", recipe.parent / "out", *flags)
    assert ran.code == 0
    assert ("%|" in ran.err) == shown


def test_json_alone_is_on_standard_output(lamina: Lamina, recipe: Path):
    ran = lamina("train", recipe, "--data", recipe.parent, "-o", recipe.parent / "out", "--json")
    assert json.loads(ran.out)["steps"] == 2
