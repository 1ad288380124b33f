"""What the page says of a training run: which method won and whether that may be said, its curves and its tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lamina.cells.run_cells import FAILURES
from lamina.errors import convert_errors
from lamina.recipes.report_file import read_report_file
from lamina.recipes.summary_table import plus_minus
from lamina.report.chart_files import averaged_importances, curve_rows, drawn_ends
from lamina.report.page_charts import LAYER, Drawing
from lamina.report.run_report import PAPER, chosen, grid, heads, read_importances, remarks
from lamina.report.sections import DataTable, Section
from lamina.store.files import damaged, read_json
from lamina.train.results import sort_key, summarise
from lamina.utils import pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from lamina.recipes.report_file import Curves, PivotTable

    Rows = Sequence[Mapping[str, Any]]

TABLE = "table.json"


def run_section(folder: Path, label: str) -> Section:
    """What the page says of a training run's folder.

    Raises:
        StoreError: If it holds no `report.json`, or a damaged one.
    """
    report, table = read_report_file(folder), _table(folder)
    drawings: dict[str, Drawing] = {}
    for number, curves in enumerate(report.figures, start=1):
        if curves.points:
            drawings[f"figure {number}"] = _curves(curves)
    for number, pivot in enumerate(report.tables, start=1):
        if pivot.cells:
            drawings[f"table {number}"] = _bars(pivot)
    drawings |= _importances(folder, table)
    tables = [_paper_table(pivot) for pivot in report.tables] + ([_runs_table(table)] if table else [])
    seeds = sorted({run["seed"] for row in table for run in row["runs"] if run.get("seed") is not None})
    return Section(label, "training run", _conclusions(table), drawings, tables, _settings(folder), seeds)


def _table(folder: Path) -> list[dict[str, Any]]:
    """A row per task, method and setting; none where a run wrote none."""
    if not (path := folder / TABLE).exists():
        return []
    with convert_errors(lambda reason: damaged(path, f"cannot be read ({reason})")):
        return json.loads(path.read_text(encoding="utf-8"))


def _settings(folder: Path) -> dict[str, Any]:
    """What a run's manifest says of its base and of what wrote it; and which of its separate runs failed."""
    facts = read_json(path) if (path := folder / "lamina.json").exists() else {}
    settings = {key: facts[key] for key in ("base", "info", "lamina") if facts.get(key)}
    if (path := folder / FAILURES).exists():
        with convert_errors(lambda reason: damaged(path, f"cannot be read ({reason})")):
            failures = json.loads(path.read_text(encoding="utf-8"))
            settings |= {f"failed: {failure['key']['run']}": failure["error"] for failure in failures}
    return settings


def _conclusions(table: Rows) -> list[str]:
    """A sentence per task: the best method, and whether its lead over the next may be claimed."""
    found = []
    for task in dict.fromkeys(row["task"] for row in table):
        ranked = sorted(
            (row for row in table if row["task"] == task), key=lambda row: sort_key(row["metric"], row["mean"])
        )
        best: dict[str, Mapping[str, Any]] = {}
        for row in ranked:
            best.setdefault(row["method"], row)
        found.append(_conclusion(task, list(best.values())))
    return found


def _conclusion(task: str, ranked: Rows) -> str:
    """What may be said of the two best, from the differences of their runs with one seed."""
    first = ranked[0]
    if len(ranked) == 1:
        runs = pluralize(len(first["runs"]), "run")
        return f"{task}: {_name(first)} reaches {first['metric']} {plus_minus(first)} over {runs}."
    second = ranked[1]
    scores = [{(run.get("seed"), run.get("repeat")): run["score"] for run in row["runs"]} for row in (first, second)]
    pairs = [(score, scores[1][key]) for key, score in scores[0].items() if key in scores[1]]
    names = f"{_name(first)} and {_name(second)}"
    measured = f"{first['metric']} {plus_minus(first)} against {plus_minus(second)} over {_runs(first, second)}"
    if len(pairs) < 2:
        return f"{task}: whether {names} differ cannot be said from fewer than two seeds that both have: {measured}."
    found = summarise([score - other for score, other in pairs])
    low, high = (found.mean + sign * (found.interval or 0.0) for sign in (-1, 1))
    apart = f"95 % interval of the difference {low:+.3f} to {high:+.3f}"
    if low <= 0 <= high or sort_key(first["metric"], found.mean) > 0:  # other seeds may say otherwise
        return f"{task}: which of {names} is better cannot be said: {measured}; {apart}."
    return f"{task}: use {_name(first)} rather than {_name(second)}: {measured}; {apart}."


def _name(row: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    return f"{row['method']} ({settings})" if settings else str(row["method"])


def _runs(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    one, two = (len(row["runs"]) for row in (first, second))
    return f"{pluralize(one, 'run')} each" if one == two else f"{one} and {pluralize(two, 'run')}"


def _curves(curves: Curves) -> Drawing:
    """A figure of the recipe."""
    kept = ("facet", "series", "x", "mean", "runs")
    names = {"series": "colour", "mean": "value", "runs": "seeds"}
    rows = []
    for row in curve_rows(curves):
        ends = ("low", "high") if row["interval"] is not None else ()
        drawn = {key: row[key] for key in (*kept, *ends) if row[key] != ""}
        rows.append(_renamed(drawn, **names) | ({"across": True} if row["across"] else {}))
    metrics = list(dict.fromkeys(point.metric for point in curves.points))
    metric = metrics[0] if len(metrics) == 1 else "score"
    note = (
        "A dashed line is a method that has no value along the bottom." if any("across" in row for row in rows) else ""
    )
    said = " ".join([note, *(f"{text.rstrip('.')}." for text in (curves.source, *curves.notes) if text)]).strip()
    titles = {"x": curves.x_title, "value": f"{metric} ({curves.part}){_times(curves.scale)}", "colour": "method"}
    return Drawing(
        "line", rows, curves.title, titles, said, _remark(curves.points), log_x=curves.log_x, apart=len(metrics) > 1
    )


def _bars(table: PivotTable) -> Drawing:
    """The measured cells of a table, a panel per column."""
    rows, metrics = [], {cell.metric for cell in table.cells}
    for cell in table.cells:
        ends = {}
        if cell.interval is not None:
            drawn = drawn_ends(cell.mean, cell.interval, [cell.metric], table.scale)
            ends = dict(zip(("low", "high"), drawn, strict=True))
        name = cell.column if cell.metric in cell.column else f"{cell.column} ({cell.metric})"
        rows.append({"facet": name, "x": cell.row, "value": cell.mean, "seeds": cell.runs, **ends})
    titles = {"x": "method", "value": f"score ({table.part}){_times(table.scale)}"}
    return Drawing("bar", rows, table.title, titles, "", _remark(table.cells), apart=len(metrics) > 1)


def _times(scale: float) -> str:
    return "" if scale == 1 else f" x {scale:g}"


def _remark(cells: Sequence[Any]) -> str:
    counts = sorted({cell.runs for cell in cells})
    if counts[-1:] == [1]:
        return "One run each, so no interval is drawn"
    span = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    return f"Mean of {span} runs with its 95 % t interval"


def _importances(folder: Path, table: Rows) -> dict[str, Drawing]:
    """What readers that mix layers used, at the epoch that was kept and over training."""
    final, over, x = averaged_importances(read_importances(folder)[0], table)
    if not final:
        return {}
    means = any("low" in row for row in final)
    remark = "Mean of all seeds with its 95 % t interval" if means else "One run each, so no interval is drawn"
    titles = {"x": LAYER, "value": "share of the layer", "colour": "layer"}
    bars = [_renamed(row, reader="facet", layer="x", importance="value") for row in final]
    lines = [_renamed(row, reader="facet", layer="colour", importance="value", **{x: "x"}) for row in over]
    see = "Shares of a reader sum to 1; equal bars say that the reader found no layer better than the others."
    moved = "Lines that still move at the end say that training was short."
    over_x = {**titles, "x": x}
    return {
        "importance": Drawing("bar", bars, "Importance of layers", titles, see, remark),
        "training": Drawing("line", lines, f"Importance of layers by {x}", over_x, moved, remark),
    }


def _renamed(row: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(key, key): cell for key, cell in row.items()}


def _paper_table(table: PivotTable) -> DataTable:
    columns = [f"{name} ({PAPER})" if paper else name for name, paper in heads(table)]
    note = " ".join([*remarks(table), *(f"{line}." for line in chosen(table))])
    return DataTable(table.title, ["method", *columns], grid(table), note)


def _runs_table(table: Rows) -> DataTable:
    """Every run, with its settings and all of its scores."""
    rows = [
        {"task": row["task"], "method": row["method"], **row["settings"], **run} for row in table for run in row["runs"]
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return DataTable("Every run", columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)
