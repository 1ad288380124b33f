"""What the page says of a training run: which method is better, and when that cannot be said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import StoreError
from lamina.recipes.report_file import REPORT, Cell, Curves, PivotTable, Point, Report, write_report_file
from lamina.report.sections import run_section
from lamina.train.results import summarise


def row(method: str, scores: list[float], task: str = "film", **settings: Any) -> dict[str, Any]:
    """A row of `table.json`."""
    found = summarise(scores)
    runs = [{"reader": f"{method}-{seed}", "seed": seed, "score": score} for seed, score in enumerate(scores)]
    figures = {"mean": found.mean, "spread": found.spread, "interval": found.interval}
    return {"task": task, "method": method, "metric": "accuracy", "settings": settings, "runs": runs, **figures}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    points = [
        Point(facet, "one", x, metric, 0.5, 0.1, 0.2, 3, {})
        for facet, metric in (("film", "accuracy"), ("words", "span_f1"))
        for x in (0, 1, None)
    ]
    cells = [Cell("one", "film", "accuracy", 0.5, 0.1, 0.2, 3, {"fusion.layer": 1})]
    table = PivotTable("Best", "validation", ["one"], ["film"], cells)
    folder.mkdir()
    write_report_file(folder / REPORT, Report([table], [Curves("All layers", "validation", "layer", points)]))
    (folder / "table.json").write_text(json.dumps(rows))
    return folder


def test_a_lead_that_all_seeds_share_is_a_decision(tmp_path: Path):
    folder = written(tmp_path / "run", row("b", [0.60, 0.71, 0.80]), row("a", [0.70, 0.80, 0.90], dim=3))
    (said,) = run_section(folder, "run").conclusions
    assert said == (
        "film: use a (dim=3) rather than b: accuracy 0.800 ± 0.248 against 0.703 ± 0.249 over 3 runs each; "
        "95 % interval of the difference +0.082 to +0.111."
    )


def with_test_scores(method: str, scores: list[float], tests: list[float], **settings: Any) -> dict[str, Any]:
    """A row of `table.json` with scores on the test split."""
    found, test = row(method, scores, **settings), summarise(tests)
    for run, score in zip(found["runs"], tests, strict=True):
        run["test"] = score
    return {**found, "test": {"mean": test.mean, "spread": test.spread, "interval": test.interval}}


def test_test_scores_decide_because_validation_scores_chose_the_setting(tmp_path: Path):
    chosen = with_test_scores("a", [0.70, 0.80, 0.90], [0.5, 0.6, 0.7], dim=3)
    rows = [
        chosen,
        with_test_scores("a", [0.6, 0.7, 0.8], [0.6, 0.7, 0.8], dim=2),
        with_test_scores("b", [0.5, 0.6, 0.7], [0.5, 0.6, 0.7]),
    ]
    (said,) = run_section(written(tmp_path / "run", *rows), "run").conclusions
    assert said == (
        "film: a (dim=3) is no better than b, as far as these runs can tell: accuracy 0.600 ± 0.248 against "
        "0.600 ± 0.248 on the test split over 3 runs each; 95 % interval of the difference +0.000 to +0.000."
    )
    untested = [{**row("a", [0.70, 0.80, 0.90]), "settings": {"dim": 3}}, row("a", [0.6] * 3), row("b", [0.6] * 3)]
    (said,) = run_section(written(tmp_path / "untested", *untested), "run").conclusions
    assert said.startswith("film: a (dim=3) is no better than b")
    assert said.endswith("The scored rows also chose the best setting of each, so more settings look better.")


def test_a_lead_that_may_be_chance_is_none(tmp_path: Path):
    folder = written(tmp_path / "run", row("a", [0.7, 0.8, 0.9]), row("b", [0.9, 0.6, 0.8]))
    (said,) = run_section(folder, "run").conclusions
    assert said.startswith("film: a is no better than b, as far as these runs can tell: accuracy 0.800 ± 0.248 against")
    folder = written(tmp_path / "pair", row("a", [0.7, 0.8]), row("b", [0.6, 0.7]))
    (said,) = run_section(folder, "run").conclusions
    assert said.startswith("film: fewer than 3 shared seeds cannot show whether a is better than b: accuracy 0.750")
    folder = written(tmp_path / "single", row("a", [0.7]), row("b", [0.6]))
    (said,) = run_section(folder, "run").conclusions
    told = "film: fewer than 3 shared seeds cannot show whether a is better than b: accuracy 0.700 against"
    assert said.startswith(told)


def on_subsamples(method: str, scores: list[float], subsamples: int) -> dict[str, Any]:
    """A row of `table.json` with several seeds per subsample."""
    sampled = row(method, scores)
    for number, run in enumerate(sampled["runs"]):
        run["repeat"] = number % subsamples
    return sampled


def test_seeds_of_one_subsample_count_once(tmp_path: Path):
    leads = [0.10, 0.00, 0.02, 0.12, 0.02, 0.04]  # large on the first of three subsamples
    rows = [on_subsamples("a", [0.5 + lead for lead in leads], 3), on_subsamples("b", [0.5] * 6, 3)]
    (said,) = run_section(written(tmp_path / "run", *rows), "run").conclusions
    low, high = (f"{end:+.3f}" for end in interval_ends([0.11, 0.01, 0.03]))
    assert said.startswith("film: a is no better than b, as far as these runs can tell: accuracy 0.550 ±")
    assert said.endswith(f"over 6 runs on 3 subsamples each; 95 % interval of the difference {low} to {high}.")
    rows = [on_subsamples("a", [0.6] * 6, 2), on_subsamples("b", [0.5] * 6, 2)]
    (said,) = run_section(written(tmp_path / "two", *rows), "run").conclusions
    assert said.startswith("film: fewer than 3 shared subsamples cannot show whether a is better than b:")
    (said,) = run_section(written(tmp_path / "one", rows[0]), "run").conclusions
    assert said.endswith("over 6 runs on 2 subsamples.")


def interval_ends(values: list[float]) -> tuple[float, float]:
    found = summarise(values)
    assert found.interval is not None
    return found.mean - found.interval, found.mean + found.interval


def test_a_lead_with_other_seeds_is_none(tmp_path: Path):
    rows = row("a", [0.5, 0.5, 0.5, 0.99, 0.99, 0.99]), row("b", [0.7, 0.7, 0.7])
    (said,) = run_section(written(tmp_path / "run", *rows), "run").conclusions
    assert said.startswith("film: a is no better than b, as far as these runs can tell: accuracy 0.745")
    assert "over 6 and 3 runs; " in said


def test_of_one_method_the_best_setting_is_named(tmp_path: Path):
    rows = row("a", [0.5, 0.6], dim=1), row("a", [0.7, 0.8], dim=2), row("a", [0.1], task="words")
    found = run_section(written(tmp_path / "run", *rows), "run")
    assert found.conclusions[0] == "film: a (dim=2) reaches accuracy 0.750 ± 0.635 over 2 runs."
    (said,) = run_section(written(tmp_path / "one", row("a", [0.7])), "run").conclusions
    assert said.endswith(" over 1 run.")
    assert len(found.conclusions) == 2
    assert list(found.seeds) == [0, 1]


def test_charts_and_tables_of_a_run(tmp_path: Path):
    found = run_section(written(tmp_path / "run", row("a", [0.7, 0.8])), "run")
    curves, bars = found.drawings["figure 1"], found.drawings["table 1"]
    assert (curves.apart, curves.titles["value"]) == (True, "score (validation)")
    assert [point["x"] for point in curves.rows if point.get("across")] == [0, 1, 0, 1]
    assert (curves.rows[0]["low"], curves.rows[0]["high"]) == (0.3, 0.7)
    assert bars.rows == [{"facet": "film (accuracy)", "x": "one", "value": 0.5, "seeds": 3, "low": 0.3, "high": 0.7}]
    assert bars.remark == "Mean of 3 runs, with its 95 % confidence interval"
    assert [table.title for table in found.tables] == ["Best", "Every run"]
    assert found.tables[0].rows == [["one", "0.500 ± 0.200"]]


def test_every_run_of_a_recipe_of_readers_names_its_reader(tmp_path: Path):
    found = run_section(written(tmp_path / "run", row("a", [0.7, 0.8]) | {"trains": "reader"}), "run")
    table = found.tables[1]
    assert table.columns[:3] == ["task", "reader", "run"]
    assert [cells[:3] for cells in table.rows] == [["film", "a", "a-0"], ["film", "a", "a-1"]]


def test_bars_end_where_the_metric_does_and_the_table_keeps_its_number(tmp_path: Path):
    folder = written(tmp_path / "run")
    cells = [Cell("one", "film", "accuracy", 90.0, 10.0, 20.0, 3, {})]
    table = PivotTable("Best", "validation", ["one"], ["film"], cells, 1, 100.0)
    write_report_file(folder / REPORT, Report([table], []))
    found = run_section(folder, "run")
    (bar,) = found.drawings["table 1"].rows
    assert (bar["low"], bar["high"]) == (70.0, 100.0)
    assert found.tables[0].rows == [["one", "90.0 ± 20.0"]]


@pytest.mark.parametrize("text", ["[{", "[1]", "{}", "3", '[{"task": "film"}]'])
def test_damage(tmp_path: Path, text: str):
    folder = written(tmp_path / "run")
    (folder / "table.json").write_text(text)
    with pytest.raises(StoreError, match=r"table\.json cannot be read"):
        run_section(folder, "run")


def test_damaged_runs_in_a_row(tmp_path: Path):
    folder = written(tmp_path / "run", row("a", [0.7]) | {"runs": [{"seed": 1}]})
    with pytest.raises(StoreError, match=r"table\.json cannot be read"):
        run_section(folder, "run")


def test_runs_that_failed_are_among_the_settings(tmp_path: Path):
    folder = written(tmp_path / "run", row("a", [0.7]))
    failure = {"key": {"run": "film-b-0"}, "error": "fit: the loss is nan", "traceback": "Traceback"}
    (folder / "failures.json").write_text(json.dumps([failure]))
    assert run_section(folder, "run").settings == {"failed: film-b-0": "fit: the loss is nan"}
    (folder / "failures.json").write_text("[{}]")
    with pytest.raises(StoreError, match=r"failures\.json cannot be read"):
        run_section(folder, "run")
