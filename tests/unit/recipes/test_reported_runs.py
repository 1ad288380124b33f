"""What a run saves for its tables and figures: the same together, one by one, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.stored import save_base

from lamina.recipes.report_file import Curves, PivotTable, read_report_file, write_report_file
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import Recipe, parse_recipe

LAST = {"fusion": "last_layer", "head": {"pooling": "mean"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reported")
    save_base(folder / "base")
    rows = [
        f"the film is {'very ' * (row % 3)}{('bad', 'good')[row % 2]} .\t{('no', 'yes')[row % 2]}\n"
        for row in range(16)
    ]
    (folder / "all.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    return folder


def recipe(folder: Path, **fields: Any) -> Recipe:
    single = {"fusion": {"name": "single_layer", "dim": 4}, "head": {"pooling": "mean"}, "grid": {"layer": [0, 2]}}
    task = {"files": dict.fromkeys(("train", "validation"), "all.tsv"), "readers": {"last": LAST, "one": single}}
    figures = [{"x": "fusion.layer"}, {"x": "epoch", "series": "fusion.layer"}]
    fit = {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "progress": False}
    given = {"model": str(folder / "base"), "tasks": {"film": task}, "fit": fit, "seeds": [0, 1], "figure": figures}
    return parse_recipe({**given, **fields})


def shape(figure: Curves) -> list[tuple[Any, ...]]:
    return [(point.series, point.x, point.runs) for point in figure.points]


@pytest.mark.parametrize("separately", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_folder_holds_the_report(folder: Path, tmp_path: Path, separately: bool):
    run = run_recipe(recipe(folder, separately=separately), data=folder, output=tmp_path)
    found = read_report_file(tmp_path)
    assert found == run.report
    (table,), (layers, epochs) = found.tables, found.figures
    assert isinstance(table, PivotTable)
    assert [(cell.row, cell.runs) for cell in table.cells] == [("last", 2), ("one", 2)]
    assert shape(layers) == [("last", None, 2), ("one", 0, 2), ("one", 2, 2)]
    assert shape(epochs) == [(name, epoch, 2) for name in ("", "0", "2") for epoch in (1, 2)]
    last = [row["accuracy"] for row in run.history if row["reader"].startswith("film-last") and row["epoch"] == 2]
    assert epochs.points[1].mean == pytest.approx(sum(last) / 2)
    summary = {row["method"]: row for row in reversed(run.table)}
    assert {cell.row: (cell.mean, cell.interval) for cell in table.cells} == {
        name: (row["mean"], row["interval"]) for name, row in summary.items()
    }


@pytest.mark.full
def test_runs_that_ended_keep_their_epochs(folder: Path, tmp_path: Path):
    made = recipe(folder, separately=True)
    whole = run_recipe(made, data=folder, output=tmp_path)
    assert whole.report.figures[1].points
    assert run_recipe(made, data=folder, output=tmp_path, resume=True).report == whole.report


@pytest.mark.long
def test_a_run_over_another_remembers_what_was_drawn(folder: Path, tmp_path: Path):
    made = recipe(folder)
    run_recipe(made, data=folder, output=tmp_path, epochs=1)
    before = read_report_file(tmp_path)
    write_report_file(
        tmp_path / "report.json", type(before)(before.tables, before.figures, ["report.md", "figure-1.png"])
    )
    run_recipe(made, data=folder, output=tmp_path, epochs=1)
    assert read_report_file(tmp_path).files == ["report.md", "figure-1.png"]
    (tmp_path / "report.json").write_text("{")
    run_recipe(made, data=folder, output=tmp_path, epochs=1)
    assert json.loads((tmp_path / "report.json").read_text())["files"] == []
