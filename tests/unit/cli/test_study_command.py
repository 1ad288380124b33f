from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lamina.cli.study_command import SHOWN, _show
from lamina.registry import STUDIES
from lamina.studies import Study
from lamina.studies.study import Pivot

Lamina = Callable[..., Any]
RECIPE = """\
model: {base}
tasks:
  film: {{files: {{train: film.tsv, validation: film.tsv}}}}
  tiny: {{files: {{train: film.tsv, validation: tiny.tsv}}}}
studies:
  variability: {{batch_size: 4}}
  removal: {{seeds: [0], epochs: 1}}
"""
ROWS = "the film is good\tyes\nthe film is bad\tno\n"


@pytest.fixture
def recipe(base: Path, tmp_path: Path) -> Path:
    (tmp_path / "film.tsv").write_text("sentence\tlabel\n" + ROWS * 3)
    (tmp_path / "tiny.tsv").write_text("sentence\tlabel\n" + ROWS)
    (tmp_path / "films.yaml").write_text(RECIPE.format(base=base))
    return tmp_path / "films.yaml"


def test_a_study_is_printed_and_saved(lamina: Lamina, recipe: Path):
    ran = lamina("study", "variability", recipe, "--data", recipe.parent, "-o", recipe.parent / "out", "--no-progress")
    assert (ran.code, ran.err) == (0, "")
    assert "Study: variability" in ran.out
    out = recipe.parent / "out"
    assert ran.out.splitlines()[-1] == f"saved in {out}; lamina report {out} -o page.html shows it"
    assert len(Study.load(recipe.parent / "out").table) == 2 * 4


def test_the_help_names_every_study(lamina: Lamina):
    shown = " ".join(lamina("study", "--help").out.replace("│", " ").split())
    assert f"{', '.join(STUDIES.names()[:-1])} or {STUDIES.names()[-1]}." in shown


def test_an_output_that_is_a_file_is_refused_before_anything_runs(lamina: Lamina, recipe: Path):
    ran = lamina("study", "variability", recipe, "--data", recipe.parent, "-o", recipe.parent / "film.tsv")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: study: {recipe.parent / 'film.tsv'} is a file, not a folder. Give another folder.\n"


def test_without_an_output_it_goes_to_a_folder_of_the_recipe_and_study(lamina, recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    ran = lamina("study", "variability", recipe, "--data", recipe.parent, "--json", "--no-progress")
    assert json.loads(ran.out)["output"] == "out/films/variability"
    assert Study.load("out/films/variability").name == "variability"


def test_a_dry_run_says_what_would_run(lamina: Lamina, recipe: Path):
    ran = lamina("study", "removal", recipe, "--data", recipe.parent, "--dry-run", "--json")
    plan = json.loads(ran.out)
    assert plan["tasks"]["film"] == {"train": 6, "validation": 6}
    assert (plan["options"]["epochs"], plan["options"]["runs"]) == (1, [1])
    shown = lamina("study", "removal", recipe, "--data", recipe.parent, "--dry-run")
    assert shown.code == 0
    assert "epochs" in shown.out
    assert not (recipe.parent / "out").exists()


def test_a_dry_run_of_a_model_that_does_not_exist(lamina: Lamina, recipe: Path, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(f"model: {tmp_path / 'nothing'}\ntexts: [a film]\nstudies: {{similarity: {{}}}}\n")
    ran = lamina("study", "similarity", other, "--dry-run")
    assert (ran.code, ran.out) == (2, "")
    assert "nothing" in ran.err


def test_a_cell_that_fails_is_told_and_the_command_ends_with_1(lamina: Lamina, recipe: Path):
    arguments = ("study", "removal", recipe, "--data", recipe.parent, "-o", recipe.parent / "out", "--no-progress")
    ran = lamina(*arguments)  # two rows of "tiny" are too few for CKA
    assert ran.code == 1
    (line,) = [line for line in ran.err.splitlines() if line.startswith("failed: ")]
    assert "'task': 'tiny'" in line
    assert "film: least is lost without block" in ran.out
    again = lamina(*arguments, "--resume", "--json")
    assert again.code == 1
    assert len(json.loads(again.out)["failures"]) == 1
    assert "n" in json.loads(again.out)["table"][0]


def test_an_unknown_study_is_one_sentence(lamina: Lamina, recipe: Path):
    ran = lamina("study", "removals", recipe)
    assert ran.code == 2
    assert "unknown name 'removals'" in ran.err
    assert "Did you mean 'removal'?" in ran.err


def test_rows_that_are_not_shown_are_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for more, said in ((0, ""), (1, "and 1 more row, in "), (2, "and 2 more rows, in ")):
        table = pd.DataFrame({"score": range(SHOWN + more)})
        _show(Study("probe", table), tmp_path, as_json=False)
        out = capsys.readouterr().out
        assert (f"{said}{tmp_path / 'table.csv'}\n" in out) is bool(said)
        assert (" more row" in out) is bool(said)


def test_the_summary_of_a_study_is_printed_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    rows = [
        {"layer": layer, "probe": probe, "seed": seed, "score": layer + seed / 2}
        for layer in range(SHOWN + 3)
        for probe in ("linear", "mlp")
        for seed in (0, 1)
    ]
    _show(Study("probe", pd.DataFrame(rows), pivot=Pivot(("layer",), ("probe",))), tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert out.count("22.2500") == 2
    assert "seed " not in out
    assert f"means over seeds; all {4 * (SHOWN + 3)} rows are in {tmp_path / 'table.csv'}\n" in out


def test_the_scores_of_baselines_stand_under_the_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    shared = {"task": "mood", "metric": "accuracy", "measure": "score"}
    rows = [{**shared, "layer": layer, "probe": "linear", "score": 0.9} for layer in (0, 1)]
    rows += [
        {**shared, "layer": None, "probe": name, "score": score} for name, score in (("tfidf", 0.75), ("majority", 0.5))
    ]
    rows += [{**rows[-1], "measure": "accuracy", "score": 0.1}]
    pivot = Pivot(("task", "metric", "layer"), ("probe",), where={"measure": "score"})
    _show(Study("probe", pd.DataFrame(rows), pivot=pivot), tmp_path, as_json=False)
    assert "mood, accuracy without the model: tfidf 0.7500, majority 0.5000\n" in capsys.readouterr().out
    rows += [{**rows[2], "score": float("nan")}, {**rows[3], "task": None, "score": 0.25}]
    _show(Study("probe", pd.DataFrame(rows), pivot=pivot), tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert "mood, accuracy without the model: tfidf nan, majority 0.5000\n" in out
    assert "nan, accuracy without the model: majority 0.2500\n" in out
