"""Tables and curves from the rows of a run: the best of what was searched, in the right direction."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.portions import one_in

from lamina.errors import ConfigError, StoreError, UnknownNameError
from lamina.recipes.expand import expand_recipe
from lamina.recipes.paper_tables import check_one_metric, notes, pivot, summaries
from lamina.recipes.report_file import (
    REPORT,
    Cell,
    Curves,
    PivotTable,
    Point,
    Report,
    read_report_file,
    write_report_file,
)
from lamina.recipes.schema import Recipe, load_recipe, parse_recipe
from lamina.report.importance_charts import curves_drawing
from lamina.report.run_report import remarks
from lamina.train.results import summarise


def summary(task: str, method: str, settings: dict[str, Any], scores: list[float], **more: Any) -> dict[str, Any]:
    """A row of a run's table, as `lamina.recipes.paper_tables.summaries` makes it."""
    metric = more.pop("metric", "accuracy")
    names = [f"{task}-{method}-{json.dumps(settings)}-{seed}" for seed in range(len(scores))]
    runs = [
        {"reader": name, "score": score, **{k: v[n] for k, v in more.items()}}
        for n, (name, score) in enumerate(zip(names, scores, strict=True))
    ]
    found = summarise(scores)
    row = {"task": task, "method": method, "settings": settings, "metric": metric, "parameters": 1000 + len(method)}
    return {**row, "mean": found.mean, "spread": found.spread, "interval": found.interval, "runs": runs}


def made(table: Any = None, figure: Any = None, **fields: Any) -> Recipe:
    """Two tasks; nothing is inserted, or layers in some places, at some rates."""
    grid = {"insert.position": ["attention", "ffn"], "insert.layers": ["1-2", "1-4"], "learning_rate": [0.1, 0.2]}
    given: dict[str, Any] = {
        "model": "minilm",
        "tasks": {"sst2": {"preset": "sst2"}, "mrpc": {"preset": "mrpc"}},
        "methods": {
            "plain": {"grid": {"learning_rate": [0.1, 0.2]}},
            "new": {"edits": [{"insert": {"init": "unit"}}], "grid": grid},
        },
    }
    given |= {"table": table} if table else {}
    given |= {"figure": figure} if figure else {}
    return parse_recipe({**given, **fields})


def rows(task: str = "sst2", shift: float = 0.0) -> list[dict[str, Any]]:
    found = [
        summary(task, "plain", {"learning_rate": rate}, [rate + shift, rate + 0.02 + shift], f1=[rate, 0.5])
        for rate in (0.1, 0.2)
    ]
    for number, (position, layers) in enumerate((p, k) for p in ("attention", "ffn") for k in ("1-2", "1-4")):
        for rate, score in ((0.1, 0.5 + number / 10), (0.2, 0.45 + number / 10)):
            settings = {"insert.position": position, "insert.layers": layers, "learning_rate": rate}
            found.append(summary(task, "new", settings, [score + shift, score + 0.02 + shift], f1=[rate, rate]))
    return found


def test_tasks_of_different_metrics_do_not_share_a_cell():
    merged = made({"rows": "method", "columns": {"task": {"sst2": "GLUE", "mrpc": "GLUE"}}})
    check_one_metric(merged, {"sst2": "accuracy", "mrpc": "accuracy"})
    with pytest.raises(ConfigError, match="'plain, GLUE' mixes tasks whose metrics are accuracy and f1"):
        check_one_metric(merged, {"sst2": "accuracy", "mrpc": "f1"})
    shown = {"rows": "method", "columns": {"task": {"sst2": "GLUE", "mrpc": "GLUE"}}, "metrics": ["accuracy"]}
    check_one_metric(made(shown), {"sst2": "accuracy", "mrpc": "f1"})
    curve = {"x": "learning_rate", "series": {"task": {"sst2": "GLUE", "mrpc": "GLUE"}}}
    with pytest.raises(ConfigError, match="mixes tasks whose metrics are accuracy and f1"):
        check_one_metric(made(figure=curve), {"sst2": "accuracy", "mrpc": "f1"})


def report(recipe: Recipe, table: list[dict[str, Any]], history: Any = ()) -> Report:
    order = [run["reader"] for row in table for run in row["runs"]]
    best_first = sorted(table, key=lambda row: -row["mean"])
    return pivot(recipe, best_first, list(history), order)


def test_a_cell_is_the_best_of_what_is_neither_row_nor_column():
    (table,) = report(
        made({"rows": ["method", "insert.position"], "scale": 100}), [*rows(), *rows("mrpc", -0.1)]
    ).tables
    assert (table.rows, table.columns) == (["plain", "new, attention", "new, ffn"], ["sst2", "mrpc"])
    cells = {(cell.row, cell.column): cell for cell in table.cells}
    assert len(cells) == 6
    best = cells["new, ffn", "sst2"]
    expected = summarise([80.0, 82.0])
    assert (best.mean, best.spread, best.interval, best.runs) == pytest.approx(
        (expected.mean, expected.spread, expected.interval, 2)
    )
    assert best.settings == {"insert.layers": "1-4", "learning_rate": 0.1}
    assert cells["plain", "sst2"].settings == {"learning_rate": 0.2}
    assert cells["new, attention", "mrpc"].mean == pytest.approx(51.0)


def test_of_perplexity_the_lowest_is_best():
    recipe = parse_recipe(
        {
            "model": "minilm",
            "tasks": {"text": {"preset": "wikitext2"}},
            "methods": {"a": {"grid": {"learning_rate": [0.1, 0.2]}}},
        }
    )
    table = [summary("text", "a", {"learning_rate": r}, [s], metric="perplexity") for r, s in ((0.1, 9.0), (0.2, 4.0))]
    (cell,) = report(recipe, table).tables[0].cells
    assert (cell.mean, cell.interval, cell.settings) == (4.0, None, {"learning_rate": 0.2})


def test_several_metrics_are_columns_and_the_task_s_own_still_picks():
    own = {"metrics": ["accuracy", "f1", "parameters"], "rows": "method"}
    recipe = made(own, tasks={"mrpc": {"preset": "mrpc"}})
    (table,) = report(recipe, rows("mrpc")).tables
    assert table.columns == ["mrpc, accuracy", "mrpc, f1", "mrpc, parameters"]
    cells = {(cell.row, cell.column): cell for cell in table.cells}
    assert cells["plain", "mrpc, f1"].mean == pytest.approx(0.35)
    assert cells["new", "mrpc, f1"].mean == pytest.approx(0.1)  # of the rate that wins by accuracy
    assert (cells["new", "mrpc, parameters"].mean, cells["new", "mrpc, parameters"].interval) == (1003.0, None)


def test_test_scores_are_shown_but_never_pick():
    task = {"files": {"train": "a.tsv", "validation": "b.tsv", "test": "c.tsv"}}
    recipe = made(
        {"rows": "method", "metrics": ["accuracy", "mcc"]},
        tasks={"film": task},
        evaluate="test",
        methods={"a": {"grid": {"learning_rate": [0.1, 0.2]}}},
    )
    table = [
        summary("film", "a", {"learning_rate": 0.1}, [0.9], test=[0.5], test_mcc=[0.3], mcc=[0.0]),
        summary("film", "a", {"learning_rate": 0.2}, [0.8], test=[0.7], test_mcc=[0.6], mcc=[0.0]),
    ]
    (shown,) = report(recipe, table).tables
    assert shown.part == "test"
    assert [(cell.metric, cell.mean) for cell in shown.cells] == [("accuracy", 0.5), ("mcc", 0.3)]


def test_a_cell_without_runs_is_left_empty():
    (table,) = report(made({"rows": ["method", "insert.position"]}), rows()).tables
    assert table.columns == ["sst2", "mrpc"]
    assert {cell.column for cell in table.cells} == {"sst2"}


def test_names_rename_join_and_leave_out():
    tasks = {"task": {"sst2": "both", "mrpc": "both"}}
    (table,) = report(
        made({"rows": {"method": {"plain": None, "new": "inserted"}}, "columns": tasks}), [*rows(), *rows("mrpc", -0.1)]
    ).tables
    assert (table.rows, table.columns) == (["inserted"], ["both"])
    (cell,) = table.cells
    assert (cell.runs, cell.settings) == (4, {})  # the runs of both tasks' best
    assert cell.mean == pytest.approx((0.80 + 0.82 + 0.70 + 0.72) / 4)


@pytest.mark.parametrize(("key", "side", "note"), [("table", "columns", "of plain, both"), ("figure", "x", "by task")])
def test_a_cell_or_point_without_a_finite_mean_is_named(key: str, side: str, note: str):
    recipe = made(**{key: {side: {"task": {"sst2": "both", "mrpc": "both"}}}})
    with pytest.raises(ConfigError, match="not finite") as raised:
        report(recipe, [summary("sst2", "plain", {}, [math.nan]), summary("mrpc", "plain", {}, [0.5])])
    assert raised.value.__notes__ == [f"accuracy {note}"]


def test_a_curve_has_numbers_intervals_and_a_line_across():
    figure = {"x": {"count": "insert.layers"}, "facet": "task", "scale": 100, "title": "Inserted"}
    (curves,) = report(made(None, figure), [*rows(), *rows("mrpc", -0.1)]).figures
    points = {(point.facet, point.series, point.x): point for point in curves.points}
    assert set(points) == {(task, *at) for task in ("sst2", "mrpc") for at in (("plain", None), ("new", 2), ("new", 4))}
    best = points["sst2", "new", 4]
    expected = summarise([80.0, 82.0])
    assert (best.mean, best.interval) == pytest.approx((expected.mean, expected.interval))
    assert best.settings == {"insert.position": "ffn", "learning_rate": 0.1}
    assert points["mrpc", "plain", None].mean == pytest.approx(11.0)
    assert (curves.title, curves.x_title, curves.part) == ("Inserted", "blocks of insert.layers", "validation")


def test_an_x_by_name_is_a_number_and_other_names_lie_across():
    figure = {"x": {"method": {"a": 1, "b": 2}}, "series": {"method": {"a": "one", "b": "one"}}}
    recipe = parse_recipe(
        {
            "model": "minilm",
            "tasks": {"cola": {"preset": "cola"}},
            "methods": {"a": {}, "b": {}, "c": {}},
            "figure": figure,
        }
    )
    table = [summary("cola", name, {}, [score], metric="mcc") for name, score in (("a", 0.1), ("b", 0.2), ("c", 0.3))]
    (curves,) = report(recipe, table).figures
    assert [(point.series, point.x, point.mean) for point in curves.points] == [
        ("one", 1, 0.1),
        ("one", 2, 0.2),
        ("c", None, 0.3),
    ]


def test_a_series_may_be_the_model_or_whether_it_is_trained():
    readers = {"a": {"fusion": "mean"}, "b": {"fusion": "last_layer"}}
    figure = {"x": "method", "series": {"train_base": {"True": "fine-tuning"}}, "facet": "model"}
    given = {"model": "minilm", "train_base": True, "separately": True, "figure": figure}
    recipe = parse_recipe({**given, "tasks": {"cola": {"preset": "cola", "readers": readers}}})
    table = [summary("cola", name, {}, [0.5], metric="mcc") for name in readers]
    (curves,) = report(recipe, table).figures
    found = [(point.facet, point.series, point.x, point.settings) for point in curves.points]
    assert found == [("minilm", "fine-tuning", "a", {}), ("minilm", "fine-tuning", "b", {})]


def test_a_curve_over_epochs_is_that_of_the_best_setting():
    recipe = made(None, {"x": "epoch", "metric": "accuracy"}, tasks={"sst2": {"preset": "sst2"}})
    table = rows()
    history = [
        {"reader": run["reader"], "epoch": epoch, "accuracy": run["score"] * epoch, "f1": 0.0}
        for row in table
        for run in row["runs"]
        for epoch in (1, 2)
    ]
    (curves,) = report(recipe, table, history).figures
    found = [(point.series, point.x, round(point.mean, 6), point.runs) for point in curves.points]
    assert found == [("plain", 1, 0.21, 2), ("plain", 2, 0.42, 2), ("new", 1, 0.81, 2), ("new", 2, 1.62, 2)]


def test_with_seeds_and_subsamples_the_interval_is_over_the_subsamples():
    task = {"preset": "cola", "subsample": {"rows": 8, "repeats": 3}, "readers": {"a": {"fusion": "mean"}}}
    specs = expand_recipe(parse_recipe({"model": "m", "seeds": [0, 1], "tasks": {"cola": task}}), {})
    shared = {"task": "cola", "metric": "mcc", "best_epoch": 1, "parameters": 7}
    scored = zip(specs.values(), [0.1, 0.5, 0.9, 0.3, 0.5, 0.7], strict=True)
    ran = [{"reader": spec.name, **spec.settings, **shared, "score": score} for spec, score in scored]
    (row,) = table = summaries(ran, specs, {"cola": ["mcc"]})
    expected = summarise([0.2, 0.5, 0.8])
    assert (row["mean"], row["spread"], row["interval"]) == pytest.approx(
        (expected.mean, expected.spread, expected.interval)
    )
    assert len(row["runs"]) == 6
    first = "the runs of a subsample, one per seed, are averaged first"
    assert notes(table) == [f"The mean, spread and ± of cola are over subsamples: {first}."]
    one_seed = dict(list(specs.items())[:3])
    (row,) = table = summaries(ran[:3], one_seed, {"cola": ["mcc"]})
    assert (row["interval"], notes(table)) == (summarise([0.1, 0.5, 0.9]).interval, [])


def test_cells_and_points_average_the_seeds_of_each_subsample():
    scores, repeats = [0.1, 0.5, 0.9, 0.3, 0.5, 0.7], [0, 1, 2, 0, 1, 2]
    table = [
        summary("sst2", "plain", {"learning_rate": 0.1}, scores, repeat=repeats),
        summary("mrpc", "plain", {"learning_rate": 0.1}, [0.4, 0.6]),  # two seeds with all rows
    ]
    history = [{"reader": run["reader"], "epoch": 1, "accuracy": run["score"]} for row in table for run in row["runs"]]
    both = {"task": {"sst2": "both", "mrpc": "both"}}
    shown = [{"rows": "method", "metrics": ["accuracy", "parameters"]}, {"columns": both, "metrics": ["accuracy"]}]
    curves = [{"x": "learning_rate", "series": "task"}, {"x": "epoch", "metric": "accuracy", "series": both}]
    found = report(made(shown, curves), table, history)
    sampled, pooled = summarise([0.2, 0.5, 0.8]), summarise([0.2, 0.5, 0.8, 0.4, 0.6])
    cells = {(cell.column, cell.metric): cell for cell in found.tables[0].cells}
    (together,) = found.tables[1].cells
    (over_epochs,) = found.figures[1].points
    point = found.figures[0].points[0]
    for one, expected, runs in ((cells["sst2, accuracy", "accuracy"], sampled, 6), (point, sampled, 6)):
        assert (one.mean, one.interval) == pytest.approx((expected.mean, expected.interval))
        assert (one.runs, one.values) == (runs, 3)
    for one in (together, over_epochs):
        assert (one.mean, one.spread, one.interval) == pytest.approx((pooled.mean, pooled.spread, pooled.interval))
        assert (one.runs, one.values) == (8, 5)
    assert [(cell.runs, cell.values) for cell in cells.values()] == [(6, 3), (1, 1), (2, 2), (1, 1)]
    told = "over 2 runs or 3 subsamples (the runs of each are averaged first)."
    assert remarks(found.tables[0])[0] == f"Validation scores; ± is half a 95 % interval {told}"
    remark = "Mean of 2 runs; each dot is a run, and fewer than 3 give no interval; mean of 3 subsamples, with its 95 %"
    assert curves_drawing(found.figures[0]).remark == f"{remark} confidence interval"


# report.json

REPORTED = Report(
    [
        PivotTable(
            "t", "test", ["a"], ["b"], [Cell("a", "b", "f1", 1.0, 0.0, None, 1, {"x": [1]})], published={"a": {"b": 1}}
        )
    ],
    [
        Curves(
            "f",
            "validation",
            "k",
            [Point("", "a", None, "f1", 1.0, 0.1, 0.2, 3, {}), Point("", "a", "low", "f1", 1.0, 0.1, 0.2, 3, {})],
        )
    ],
    ["report.md", "figure-1.png"],
)


def test_a_report_comes_back_as_it_was_saved(tmp_path: Path):
    write_report_file(tmp_path / REPORT, REPORTED)
    assert read_report_file(tmp_path) == REPORTED


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (None, None, r"holds no report\.json; lamina train writes one beside its tables\. Give the output folder"),
        ('"format": 1', '"format": 2', r"report\.json is in format 2; this version of lamina reads format 1"),
        ('"mean": 1.0', '"mean": NaN', r"report\.json does not hold a report \(.*Copy or save it again"),
        ('"report.md"', '"../lamina.json"', r"report\.json does not hold a report"),
        ('"title": "t"', '"titel": "t"', r"report\.json does not hold a report"),
        ("{", "", r"report\.json is not JSON"),
    ],
)
def test_a_report_that_cannot_be_used(old: str | None, new: str | None, match: str, tmp_path: Path):
    if old is not None and new is not None:
        write_report_file(tmp_path / REPORT, REPORTED)
        (tmp_path / REPORT).write_text((tmp_path / REPORT).read_text().replace(old, new, 1))
    with pytest.raises(StoreError, match=match):
        read_report_file(tmp_path)


def test_a_metric_that_the_data_s_task_lacks_is_refused_before_training(tmp_path: Path):
    from lamina.recipes.load_tasks import load_tasks

    (tmp_path / "a.tsv").write_text("sentence\tlabel\na\tno\nb\tyes\n")
    files = {"train": "a.tsv", "validation": "a.tsv"}
    recipe = made({"metrics": ["pearson"]}, tasks={"film": {"files": files}}, methods={"a": {}})
    with pytest.raises(UnknownNameError, match=r"recipe, task film: unknown metric 'pearson'; known: accuracy"):
        load_tasks(recipe, tmp_path)


# The recipes that come along

ROOT = Path(__file__).parents[3] / "recipes"


NAMES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml") if path.parent.name != "studies")
BY_NAME = {"", "language", "text of the language in pre-training"}  # titles of axes without numbers


@pytest.mark.parametrize("name", one_in(6, NAMES))
def test_a_recipe_s_runs_fill_its_tables_and_figures(name: str):
    recipe = load_recipe(ROOT / name)
    specs = expand_recipe(recipe, {})
    metrics = {name: task.metrics for name, task in recipe.tasks.items()}
    table, history = [], []
    for rank, (name, spec) in enumerate(specs.items()):
        first, *others = [recipe.tasks[spec.task].metric or metrics[spec.task][0], *metrics[spec.task]]
        scores = {
            "score": rank / 1e4,
            "test": 0.5,
            **{key: 0.25 for metric in others for key in (metric, f"test_{metric}")},
        }
        row = {"task": spec.task, "reader": name, **spec.settings, "metric": first, "parameters": 1, "best_epoch": 1}
        table.append({**row, **scores, first: scores["score"]})
        history.append({"reader": name, "epoch": 1, **dict.fromkeys(metrics[spec.task], 0.5)})
    found = pivot(recipe, summaries(table, specs, metrics), history, list(specs))
    for shown in found.tables:
        assert {(cell.row, cell.column) for cell in shown.cells} <= {(r, c) for r in shown.rows for c in shown.columns}
        assert {cell.row for cell in shown.cells} == set(shown.rows)
    for figure in found.figures:
        assert any(point.x is not None for point in figure.points)
        assert {type(point.x) for point in figure.points} <= {int, type(None)} or figure.x_title in BY_NAME
        assert len({(point.facet, point.series, point.x) for point in figure.points}) == len(figure.points)
