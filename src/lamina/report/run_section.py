"""Make the page's section about a training run: verdicts about the best method, charts and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lamina.cells.run_cells import FAILURES
from lamina.errors import convert_errors
from lamina.recipes.monitor_keys import rates_text
from lamina.recipes.report_file import read_report_file
from lamina.recipes.summary_table import plus_minus, word_of
from lamina.report.charts import DOT, INTERVAL_SEEDS, Drawing, Mark, drawn_ends, single_runs
from lamina.report.curves import curves_drawing, runs_remark, times
from lamina.report.importance_charts import importance_drawings
from lamina.report.run_report import PAPER, chosen, grid, heads, read_importances, remarks
from lamina.report.sections import DataTable, Section
from lamina.store.files import damaged, read_json
from lamina.train.results import sort_key, summarise
from lamina.utils import no_pipe, parse_json, pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lamina.recipes.report_file import PivotTable, TableRow
    from lamina.recipes.summary_table import SummaryRow
    from lamina.utils import JSON

TABLE = "table.json"


def run_section(folder: Path, label: str) -> Section:
    """Return the section of the page about the training run in a folder; `label` is its name on the page.

    Raises StoreError if the folder has no `report.json`, or one of its files is damaged. Figures without points and
    tables without cells get no chart.
    """
    report, table = read_report_file(folder), _table(folder)
    drawings: dict[str, Drawing] = {}
    for number, curves in enumerate(report.figures, start=1):
        if curves.points:
            drawings[f"figure {number}"] = curves_drawing(curves, word_of(table))
    for number, pivot in enumerate(report.tables, start=1):
        if pivot.cells:
            drawings[f"table {number}"] = _bars(pivot, word_of(table))
    drawings |= importance_drawings(*read_importances(folder))
    tables = [_paper_table(pivot) for pivot in report.tables] + ([_runs_table(table)] if table else [])
    seeds = sorted({run["seed"] for row in table for run in row["runs"] if run.get("seed") is not None})
    settings, tasks = _settings(folder), list(dict.fromkeys(row["task"] for row in table))
    base = settings.get("base")
    model = str(base.get("id") or "") if isinstance(base, Mapping) else ""
    conclusions = [*_conclusions(table), *map(rates_text, report.monitors)]
    tables += [_monitors_table(report.monitors)] if report.monitors else []
    return Section(label, "training run", conclusions, drawings, tables, settings, seeds, model=model, tasks=tasks)


def _table(folder: Path) -> list[SummaryRow]:
    """Return the rows of a run's `table.json`; [] if there is none. Raises StoreError if the file is damaged."""
    if not (path := folder / TABLE).exists():
        return []
    with convert_errors(lambda reason: damaged(path, f"cannot be read ({reason})")):
        return parse_json(no_pipe(path).read_text(encoding="utf-8"))


def _settings(folder: Path) -> dict[str, JSON]:
    """Return the settings that the page shows for the training run in `folder`.

    They are "base", "info" and "lamina" (the version), from the manifest of the bank if there is one. For each part of
    the training that failed, "failed: NAME" has the error. Raises StoreError if a file is damaged.
    """
    facts = read_json(path) if (path := folder / "lamina.json").exists() else {}
    settings: dict[str, JSON] = {key: facts[key] for key in ("base", "info", "lamina") if facts.get(key)}
    if (path := folder / FAILURES).exists():
        with convert_errors(lambda reason: damaged(path, f"cannot be read ({reason})")):
            failures = parse_json(no_pipe(path).read_text(encoding="utf-8"))
            settings |= {f"failed: {failure['key']['run']}": failure["error"] for failure in failures}
    return settings


def _conclusions(table: Sequence[SummaryRow]) -> list[str]:
    """Return one sentence per task: the best method, and whether it is shown to be better than the second best.

    With one method, the sentence says what it reaches.
    """
    conclusions = []
    for task in dict.fromkeys(row["task"] for row in table):
        rows = [row for row in table if row["task"] == task]
        best: dict[str, SummaryRow] = {}  # method -> the row of its best setting
        for row in sorted(rows, key=lambda row: sort_key(row["metric"], row["mean"])):
            best.setdefault(row["method"], row)
        conclusions.append(_conclusion(task, list(best.values())))
    return conclusions


def _conclusion(task: str, ranked: Sequence[SummaryRow]) -> str:
    """Return a sentence that compares the two best methods of a task, or says what its only method reaches.

    Methods are compared by the 95 % interval of the score difference between runs with equal seeds; with fewer than two
    such pairs, the sentence says that they show nothing. `ranked` holds the row of each method's best setting, best
    method first.
    """
    first = ranked[0]
    if len(ranked) == 1:
        runs = pluralize(len(first["runs"]), "run")
        return f"{task}: {_method_name(first)} reaches {first['metric']} {plus_minus(first)} over {runs}."
    second = ranked[1]
    scores = [{(run.get("seed"), run.get("repeat")): run["score"] for run in row["runs"]} for row in (first, second)]
    pairs = [(score, scores[1][key]) for key, score in scores[0].items() if key in scores[1]]
    better, other = _method_name(first), _method_name(second)
    measured = f"{first['metric']} {plus_minus(first)} against {plus_minus(second)} over {_run_counts(first, second)}"
    if len(pairs) < 2:
        return f"{task}: fewer than two shared seeds cannot show whether {better} is better than {other}: {measured}."
    difference = summarise([score - compared for score, compared in pairs])
    low, high = (difference.mean + sign * (difference.interval or 0.0) for sign in (-1, 1))
    interval = f"95 % interval of the difference {low:+.3f} to {high:+.3f}"
    # The methods are ranked by means over all seeds. Over the shared seeds alone, the second may be the better one.
    if low <= 0 <= high or sort_key(first["metric"], difference.mean) > 0:
        return f"{task}: {better} is no better than {other}, as far as these runs can tell: {measured}; {interval}."
    return f"{task}: use {better} rather than {other}: {measured}; {interval}."


def _method_name(row: SummaryRow) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    return f"{row['method']} ({settings})" if settings else str(row["method"])


def _run_counts(first: SummaryRow, second: SummaryRow) -> str:
    counts = [len(row["runs"]) for row in (first, second)]
    return (
        f"{pluralize(counts[0], 'run')} each"
        if counts[0] == counts[1]
        else f"{counts[0]} and {pluralize(counts[1], 'run')}"
    )


def _bars(table: PivotTable, word: str) -> Drawing:
    """Return the measured cells of a recipe's table as a bar chart for the page, with one panel per column.

    `word` names what the rows stand for, such as "reader".
    """
    rows: list[Mark] = []
    metrics = list(dict.fromkeys(cell.metric for cell in table.cells))
    for cell in table.cells:
        ends: dict[str, float] = {}
        if cell.interval is not None and cell.runs >= INTERVAL_SEEDS:
            drawn = drawn_ends(cell.mean, cell.interval, [cell.metric], table.scale)
            ends = dict(zip(("low", "high"), drawn, strict=True))
        name = cell.column if cell.metric in cell.column else f"{cell.column} ({cell.metric})"
        mark: Mark = {"facet": name, "x": cell.row, "value": cell.mean, "seeds": cell.runs, **ends}
        dots = single_runs(cell.mean, cell.spread, cell.runs)
        rows += [mark, *({**mark, "value": value, "mark": DOT} for value in dots)]
    metric = metrics[0] if len(metrics) == 1 else "score"
    titles = {"x": word, "value": f"{metric} ({table.part}){times(table.scale)}"}
    return Drawing("bar", rows, table.title, titles, "", runs_remark(table.cells), apart=len(metrics) > 1)


def _paper_table(table: PivotTable) -> DataTable:
    columns = [f"{name} ({PAPER})" if paper else name for name, paper in heads(table)]
    note = " ".join([*remarks(table), *(f"{line}." for line in chosen(table))])
    return DataTable(table.title, ["method", *columns], grid(table), note)


def _runs_table(table: Sequence[SummaryRow]) -> DataTable:
    rows = [
        {"task": row["task"], word_of(table): row["method"], **row["settings"], "run": run["reader"]}
        | {key: value for key, value in run.items() if key != "reader"}
        for row in table
        for run in row["runs"]
    ]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return DataTable("Every run", columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _monitors_table(rows: Sequence[TableRow]) -> DataTable:
    columns = ["monitor", "reader", "flag", "threshold", "target", "per"]
    columns += ["false_positive_rate", "recall", "alarms_per_thousand", "tokens_to_flag", "negatives", "positives"]
    return DataTable("Monitors", columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: object) -> str | float | None:
    return value if isinstance(value, str | int | float | None) else str(value)
