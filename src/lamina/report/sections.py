"""The sections of the HTML page: their parts, examples of errors, and the section about a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, final

from lamina.cells.run_cells import FAILURES
from lamina.errors import convert_errors
from lamina.recipes.monitor_keys import rates_text
from lamina.recipes.paper_tables import plus_minus, subsample_count, word_of
from lamina.recipes.report_file import read_report_file
from lamina.report.charts import Drawing, Mark
from lamina.report.importance_charts import curves_drawing, importance_drawings, run_marks, runs_remark, times
from lamina.report.run_report import (
    PAPER,
    chosen,
    escaped,
    grid,
    heads,
    markdown_text,
    read_importances,
    read_table,
    remarks,
)
from lamina.store.files import damaged, read_json
from lamina.train.results import INTERVAL_SEEDS, independent, sort_key, summarise
from lamina.utils import no_pipe, parse_json, pluralize

if TYPE_CHECKING:
    from pathlib import Path

    from lamina.recipes.paper_tables import SummaryRow
    from lamina.recipes.report_file import PivotTable, TableRow
    from lamina.utils import JSON

Cell: TypeAlias = str | float | bool | None  # a cell of a table; None is empty
# A text in parts: (text, label, error) for a span with a wrong label, (text, "", "") for the text between such spans.
Spans: TypeAlias = list[tuple[str, str, str]]


@final
@dataclass(frozen=True)
class Example:
    """An example that a probe got wrong, as the page shows it.

    If labels are spans of the text, `text` is empty, and `true` and `predicted` each hold the whole text with their
    spans marked. Otherwise `text` holds the text, and `true` and `predicted` one label each.

    Attributes:
        where: Task, layer and row.
        sure: How confident the probe was; for a number, how large its error is.
    """

    where: str
    sure: str
    text: Spans
    true: Spans
    predicted: Spans


@final
@dataclass(frozen=True)
class Section:
    """A section of the page: one study or training run. `study_section` and `run_section` make it.

    Attributes:
        label: Name of the section, unique on the page.
        kind: "training run", or the name of the study.
        conclusions: Sentences, most important first. The first sentence about each task is shown as its verdict.
        drawings: Name -> chart. Charts of equal name from sections of the same kind stand side by side.
        tables: The tables in the order in which they are shown.
        settings: The settings that were used.
        seeds: All seeds of the study or training run.
        examples: Examples of wrong predictions, a few for each task and layer.
        errors: Number of wrong predictions, including those without an example.
        model: Name of the model; "" if it is not known.
        tasks: Names of the tasks; empty if there are none.
    """

    label: str
    kind: str
    conclusions: Sequence[str] = ()
    drawings: Mapping[str, Drawing] = field(default_factory=dict)
    tables: Sequence[DataTable] = ()
    settings: Mapping[str, JSON] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    examples: Sequence[Example] = ()
    errors: int = 0
    model: str = ""
    tasks: Sequence[str] = ()

    @property
    def verdicts(self) -> list[tuple[str, str]]:
        """The most important sentence about each task, as pairs (task, sentence).

        The task is "" for a sentence about no task.
        """
        verdicts: dict[str, str] = {}
        tasks = sorted(self.tasks, key=len, reverse=True)  # a name may begin with another one: "a: b" with "a"
        for sentence in self.conclusions:
            task = next((name for name in tasks if sentence.startswith(f"{name}: ")), "")
            verdicts.setdefault(task, sentence.removeprefix(f"{task}: ") if task else sentence)
        return list(verdicts.items())

    @property
    def details(self) -> list[str]:
        """The conclusions that are not among `verdicts`."""
        shown = {f"{task}: {sentence}" if task else sentence for task, sentence in self.verdicts}
        return [sentence for sentence in self.conclusions if sentence not in shown]


@final
@dataclass(frozen=True)
class DataTable:
    """A table of the page.

    Attributes:
        title: Title of the table.
        columns: Names of the columns.
        rows: The cells, row by row; None is an empty cell.
        note: A remark below the table.
    """

    title: str
    columns: list[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def compact(self) -> dict[str, object]:
        """Return "title", "note" and "columns" (the name and `_packed` cells of each) as JSON for the page's script."""
        cells = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        columns = [{"name": name, **_packed(list(column))} for name, column in zip(self.columns, cells, strict=True)]
        return {"title": self.title, "note": self.note, "columns": columns}

    def markdown(self) -> str:
        """Return the table as Markdown, with its title as a heading and its note below."""
        head, *body = (f"| {' | '.join(map(markdown_text, line))} |" for line in self._lines())
        ruled = "|" + "".join("---:|" if self._is_numeric(at) else "---|" for at in range(len(self.columns)))
        note = ["", markdown_text(self.note)] if self.note else []
        return "\n".join([f"## {markdown_text(self.title)}", "", head, ruled, *body, *note, ""])

    def latex(self) -> str:
        """Return the table as LaTeX for booktabs and longtable, with title and note as the caption."""
        head, *body = (" & ".join(map(escaped, line)) + r" \\" for line in self._lines())
        aligned = "".join("r" if self._is_numeric(at) else "l" for at in range(len(self.columns)))
        caption = rf"\caption{{{escaped(' '.join(filter(None, (f'{self.title}.', self.note))))}}} \\"
        begin = [rf"\begin{{longtable}}{{{aligned}}}", caption, r"\toprule", head, r"\midrule", r"\endhead"]
        return "\n".join([*begin, *body, r"\bottomrule", r"\end{longtable}", ""])

    def _lines(self) -> Iterable[list[str]]:
        return [self.columns, *([_cell_text(cell) for cell in row] for row in self.rows)]

    def _is_numeric(self, at: int) -> bool:
        return all(isinstance(row[at], int | float | None) for row in self.rows)


def _packed(cells: Sequence[Cell]) -> dict[str, Sequence[Cell]]:
    """Return the cells of a column in the form that the page's script reads.

    A column with a string and repeated values becomes {"levels": its distinct values, "codes": for each cell, the index
    of its value}. All other columns become {"cells": the cells}.
    """
    if any(isinstance(cell, str) for cell in cells):
        levels = list(dict.fromkeys(cells))
        if len(levels) < len(cells):
            numbers = {level: number for number, level in enumerate(levels)}
            return {"levels": levels, "codes": [numbers[cell] for cell in cells]}
    return {"cells": list(cells)}


def _cell_text(cell: Cell) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else " ".join(str(cell).split())


def run_section(folder: Path, label: str) -> Section:
    """Return the section of the page about the training run in a folder; `label` is its name on the page.

    Raises StoreError if the folder has no `report.json`, or one of its files is damaged. Figures without points and
    tables without cells get no chart.
    """
    report, table = read_report_file(folder), read_table(folder)
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
    """Return one sentence per task: the best method, and whether it is shown to be better than the second best."""
    conclusions = []
    for task in dict.fromkeys(row["task"] for row in table):
        rows = [row for row in table if row["task"] == task]
        best: dict[str, SummaryRow] = {}  # method -> the row of its best setting
        for row in sorted(rows, key=lambda row: sort_key(row["metric"], row["mean"])):
            best.setdefault(row["method"], row)
        ranked = list(best.values())
        sentence = _conclusion(task, ranked)
        if len(rows) > len(ranked) > 1 and not _on_test(ranked[:2]):
            sentence += " The scored rows also chose the best setting of each, so more settings look better."
        conclusions.append(sentence)
    return conclusions


def _on_test(rows: Sequence[SummaryRow]) -> bool:
    """Return whether all runs of these methods were scored on the test split too."""
    return all("test" in row and all("test" in run for run in row["runs"]) for row in rows)


def _conclusion(task: str, ranked: Sequence[SummaryRow]) -> str:
    """Return a sentence that compares the two best methods of a task, or says what its only method reaches.

    Methods are compared by the 95 % interval of the score difference between runs with equal seeds. With several seeds
    and several subsamples, the differences of a subsample are averaged first. With fewer than three differences, the
    sentence says that they show nothing. The scores are those of the test split if there are any, because validation
    scores chose settings and epochs. `ranked` holds the row of each method's best setting, best method first.
    """
    first = ranked[0]
    if len(ranked) == 1:
        return f"{task}: {_method_name(first)} reaches {first['metric']} {plus_minus(first)} over {_run_count(first)}."
    second = ranked[1]
    key, part = ("test", " on the test split") if _on_test(ranked[:2]) else ("score", "")
    scores = [{(run.get("seed"), run.get("repeat")): run[key] for run in row["runs"]} for row in (first, second)]
    shared = [key for key in scores[0] if key in scores[1]]
    differences = independent([scores[0][key] - scores[1][key] for key in shared], [repeat for _, repeat in shared])
    better, other = _method_name(first), _method_name(second)
    means = [row.get("test", row) if part else row for row in (first, second)]
    measured = f"{first['metric']} {plus_minus(means[0])} against {plus_minus(means[1])}{part}"
    measured += f" over {_run_counts(first, second)}"
    if len(differences) < INTERVAL_SEEDS:
        what = "seeds" if len(differences) == len(shared) else "subsamples"
        few = f"fewer than {INTERVAL_SEEDS} shared {what} cannot show whether"
        return f"{task}: {few} {better} is better than {other}: {measured}."
    difference = summarise(differences)
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
    counts = [_run_count(row) for row in (first, second)]
    if counts[0] == counts[1]:
        return f"{counts[0]} each"
    return f"{counts[0] if subsample_count(first) else len(first['runs'])} and {counts[1]}"


def _run_count(row: SummaryRow) -> str:
    """Return the number of a row's runs as text; and of its subsamples, if the row's interval is over them."""
    runs, subsamples = pluralize(len(row["runs"]), "run"), subsample_count(row)
    return f"{runs} on {pluralize(subsamples, 'subsample')}" if subsamples else runs


def _bars(table: PivotTable, word: str) -> Drawing:
    """Return the measured cells of a recipe's table as a bar chart for the page, with one panel per column.

    `word` names what the rows stand for, such as "reader".
    """
    rows: list[Mark] = []
    metrics = list(dict.fromkeys(cell.metric for cell in table.cells))
    for cell in table.cells:
        name = cell.column if cell.metric in cell.column else f"{cell.column} ({cell.metric})"
        rows += run_marks({"facet": name, "x": cell.row}, cell, table.scale)
    metric = metrics[0] if len(metrics) == 1 else "score"
    titles = {"x": word, "value": f"{metric} ({table.part}){times(table.scale)}"}
    return Drawing("bar", rows, table.title, titles, "", runs_remark(rows), apart=len(metrics) > 1)


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
    return _table_of("Every run", rows, list(dict.fromkeys(key for row in rows for key in row)))


def _monitors_table(rows: Sequence[TableRow]) -> DataTable:
    columns = ["monitor", "reader", "flag", "threshold", "target", "per"]
    columns += ["false_positive_rate", "recall", "alarms_per_thousand", "tokens_to_flag", "negatives", "positives"]
    return _table_of("Monitors", rows, columns)


def _table_of(title: str, rows: Sequence[TableRow], columns: list[str]) -> DataTable:
    return DataTable(title, columns, [[_cell(row.get(column)) for column in columns] for row in rows])


def _cell(value: object) -> str | float | None:
    return value if isinstance(value, str | int | float | None) else str(value)
