"""How a study is shown on the page: its verdicts, charts, tables, settings and examples of errors."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lamina.errors import DataError
from lamina.report.chart_files import INTERVAL_SEEDS, drawn_ends
from lamina.report.page_charts import DOT, LAYER, Drawing, Mark
from lamina.report.sections import Cell, DataTable, Example, Section, Spans
from lamina.train.results import half_interval
from lamina.utils import JSON, Row, pluralize

if TYPE_CHECKING:
    from lamina.studies.study import Figure, Study

Frame: TypeAlias = Any  # a DataFrame of pandas, whose type stubs are narrower than what its methods accept
COUNTS = {"rows": "row", "tokens": "token", "texts": "text", "n": "row"}  # column or setting -> what it counts
MOST_SCATTERED = 4000  # points of a scatter plot; of more rows a sample is drawn
MOST_EXAMPLES = 40  # errors that are shown; the table has all of them
EXAMPLE = ("task", "layer", "row", "metric", "score", "text", "true", "predicted")  # columns of a table of errors
BASELINES = {
    "majority": "always answering the most frequent label",
    "length": "logistic regression on text length",
    "bag_of_words": "bag of words + logistic regression",
    "tfidf": "TF-IDF + logistic regression",
}
_SIGNIFICANT = 0.05  # p value below which a difference is called one


def study_section(study: Study, label: str) -> Section:
    """Return the section of a study.

    Args:
        study: The study.
        label: Its name on the page.

    Raises:
        UnknownNameError: If a figure is drawn from a column that the table does not have.
        DataError: If a figure's values are not numbers.
    """
    drawings = {name: drawing for name in study.figures if (drawing := drawing_of(study, name)).rows}
    axes = {
        column
        for figure in study.figures.values()
        for column in (figure.x, figure.y, figure.colour, figure.facet, *figure.where)
        if column is not None
    }
    wrong = _wrong_answers(study)
    tasks = [str(task) for task in study.table["task"].dropna().unique()] if "task" in study.table else []
    return Section(
        label,
        study.name,
        [*_probe_verdicts(study), *study.conclusions],
        drawings,
        tables_of(study.table, study.name.replace("_", " ").capitalize(), axes),
        study.settings,
        _seeds(study),
        _examples(wrong),
        len(wrong),
        _model_name(study),
        tasks,
    )


def _model_name(study: Study) -> str:
    """Return the name of the only model that the settings of a study name; "" if they name none or several."""
    models = study.settings.get("models") or {}
    names = {str(facts["name"]) for facts in models.values() if isinstance(facts, Mapping) and facts.get("name")}
    return names.pop() if len(names) == 1 else ""


def _probe_verdicts(study: Study) -> Iterator[str]:
    """Yield a sentence per task of a probing study: whether the layers know more than the text itself gives away.

    The sentence compares the probes with the best baseline, from the rows of measure "ahead". There is none where the
    study has no such rows.
    """
    table: Frame = study.table
    if study.name != "probe" or not {"task", "measure", "layer", "metric", "low", "p"} <= set(table.columns):
        return
    for task, rows in table.groupby("task", sort=False):
        scores = rows[rows["measure"] == "score"]
        baselines, probes = scores[scores["seed"].isna()], scores[scores["seed"].notna()]
        ahead = rows[rows["measure"] == "ahead"]
        if baselines.empty or probes.empty or ahead.empty:
            continue
        strongest = baselines.loc[baselines["score"].idxmax()]
        means = probes.groupby(["layer", "probe"], sort=False)["score"].mean()
        layer, probe = means.idxmax()
        name = BASELINES.get(strongest["probe"], str(strongest["probe"]))
        metric = str(strongest["metric"]).replace("_", " ")
        against = f"{metric} {means.max():.3f} ({probe} probe of layer {layer:g}) against {strongest['score']:.3f}"
        better = ahead[(ahead["score"] > 0) & (ahead["low"] > 0) & (ahead["p"] <= _SIGNIFICANT)]
        if probes["seed"].nunique() < 2:
            yield f"{task}: one seed cannot show whether a layer is better than {name}: {against}."
        elif better.empty:
            yield f"{task}: no better than {name}, as far as this study can tell: {against}."
        else:
            layers = sorted({int(layer) for layer in better["layer"]})
            which = f"layer {layers[0]} is" if len(layers) == 1 else f"layers {', '.join(map(str, layers))} are"
            yield f"{task}: {which} better than {name}: {against}."


def _seeds(study: Study) -> list[int]:
    """Return the seeds of a study, from its table or else from its settings."""
    if "seed" in study.table:
        return sorted({int(seed) for seed in study.table["seed"].dropna()})
    seed = study.settings.get("seed")
    return [seed] if isinstance(seed, int) else []


def _wrong_answers(study: Study) -> Frame:
    """Return the rows of a study's table that are wrong answers; an empty table if it lists none."""
    return study.table.dropna(subset=["text"]) if set(EXAMPLE) <= set(study.table.columns) else study.table.head(0)


def _examples(wrong: Frame) -> list[Example]:
    """Return at most `MOST_EXAMPLES` wrong answers, in the order of the table `wrong`.

    Every task and layer contributes equally many, the first ones of each. If there are more tasks and layers than
    examples, those that contribute are evenly spaced.
    """
    rank = wrong.groupby(["task", "layer"], sort=False).cumcount().to_numpy() if len(wrong) else np.zeros(0, int)
    places, groups = np.argsort(rank, kind="stable"), int((rank == 0).sum())
    if groups > MOST_EXAMPLES:
        places = places[np.linspace(0, groups - 1, MOST_EXAMPLES).astype(int)]
    shown = wrong.iloc[np.sort(places[:MOST_EXAMPLES])]
    return [_example(row) for row in shown.to_dict("records")]


def _example(row: Row) -> Example:
    """Return a row of a table of errors as an example with its spans marked."""
    true, predicted, text = (_parsed(row[key]) for key in ("true", "predicted", "text"))
    text = " | ".join(map(str, text)) if isinstance(text, list) else str(text)
    where = f"{row['task']} · layer {row['layer']} · row {row['row']}"
    sure = f"{row['metric']} {row['score']:.3f}"
    sides = [side if isinstance(side, list) else [side] for side in (true, predicted)]
    if any(isinstance(span, dict) for side in sides for span in side):
        spans = ([span for span in side if isinstance(span, dict)] for side in sides)
        return Example(where, sure, [], *(marked_parts(text, side) for side in spans))
    labels = ([(", ".join(map(str, side)), "", "")] for side in sides)
    return Example(where, sure, [(text, "", "")], *labels)


def _parsed(cell: Any) -> JSON:
    """Return the value of a table's cell: lists come back from Parquet as arrays or as JSON texts."""
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if isinstance(cell, str) and cell[:1] == "[":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cell


def marked_parts(text: str, spans: Sequence[Mapping[str, Any]]) -> Spans:
    """Cut a text at its spans and return the parts as (text, label, error).

    Args:
        text: The text.
        spans: Each has "start" and "end" (characters) and may have "label" and "error" ("wrong" if it is missing). Of
            spans that overlap only the first is marked; empty spans are left out.

    Returns:
        The parts in order; label and error are "" for the text between spans.
    """
    parts: Spans = []
    end = 0
    for span in sorted(spans, key=lambda span: span["start"]):
        if end <= span["start"] < span["end"]:
            parts += [(text[end : span["start"]], "", "")] if span["start"] > end else []
            inside = text[span["start"] : span["end"]]
            parts.append((inside, str(span.get("label") or ""), str(span.get("error") or "wrong")))
            end = span["end"]
    return [*parts, *([(text[end:], "", "")] if end < len(text) else [])]


def drawing_of(study: Study, name: str) -> Drawing:
    """Return the chart of a study's figure.

    Rows that have no place in the chart are left out and counted in the remark. Rows that differ only in their seed are
    averaged; from three seeds on the chart has their interval, below it shows every seed.

    Raises:
        UnknownNameError: If the figure is drawn from a column that the table does not have.
        DataError: If its values are not numbers.
    """
    figure, rows = study.figures[name], study.rows(name)
    parts = {"x": figure.x, "y": figure.y, "colour": figure.colour, "facet": figure.facet}
    parts |= {"label": figure.label, "x_label": figure.x_label}
    columns = {part: column for part, column in parts.items() if column is not None}
    drawn, omissions = _drawable(rows, figure, columns, name)
    if figure.kind == "scatter":
        points, remarks = _scattered(drawn, figure, columns)
    else:
        points, remarks = _averaged(drawn, figure, columns)
    if figure.kind == "line" and any("x" not in row for row in points):
        points = _across(points)
        remarks.append(f"a dashed line has no {figure.x}")
    remark = "; ".join([*remarks, *_counts(drawn, study.settings), *omissions])
    titles = {part: _axis_title(column) for part, column in columns.items()}
    titles |= {"value": figure.value_title or _value_title(rows, figure)}
    titles |= {"x": figure.x_title} if figure.x_title else {}
    note = _with_equal_share(figure.note, study, rows)
    return Drawing(figure.kind, points, figure.title or name, titles, note, remark[:1].upper() + remark[1:])


def _with_equal_share(note: str, study: Study, rows: Frame) -> str:
    """Return the note of a figure; for importances of layers with the share that every layer has if all are equal."""
    layers = rows["layer"].nunique() if study.name == "importance" and "layer" in rows else 0
    return f"{note} With equal shares every layer would have 1/{layers} = {1 / layers:.3f}.".strip() if layers else note


def _drawable(rows: Frame, figure: Figure, columns: dict[str, str], name: str) -> tuple[Frame, list[str]]:
    """Return the rows that can be drawn, and remarks that count all others.

    A row needs a finite value and a place; in a line chart a row without x is a line across. `columns` maps the parts
    of the chart to columns; `name` is the figure's name, for errors.
    """
    try:
        values = rows[figure.value].astype("float64")
    except (TypeError, ValueError):
        problem = f"column '{figure.value}' of figure '{name}' holds values that are not numbers"
        raise DataError(f"report: {problem}; a figure draws numbers.", column=figure.value) from None
    finite = values.abs().lt(math.inf)
    kept, remarks = rows.loc[finite], _omitted(~finite, "value", "that {are} not finite")
    for part in ("x", "y", "colour", "facet"):
        if part in columns:
            column = kept[columns[part]]
            placed = column.notna() | (part == "x" and figure.kind == "line")
            if part == "x" and figure.kind in ("line", "scatter"):
                placed &= ~column.isin([math.inf, -math.inf])
            remarks += _omitted(~placed, "row", f"without a {'finite ' * (part == 'x')}{columns[part]}")
            kept = kept.loc[placed]
    return kept, remarks


def _omitted(missing: Frame, noun: str, reason: str) -> list[str]:
    """Return a remark that counts the true entries of `missing`, such as "2 rows without a task are left out"."""
    count, are = int(missing.sum()), "is" if missing.sum() == 1 else "are"
    return [f"{pluralize(count, noun)} {reason.format(are=are)} {are} left out"] if count else []


def with_interval(rows: Frame, keys: Sequence[str], value: str) -> Frame:
    """Return the mean of a column over seeds for all rows that share the keys, with its 95 % t interval.

    Args:
        rows: A table that may have a column "seed".
        keys: The columns to group by.
        value: The column to average; rows of one seed are averaged first.

    Returns:
        A table with the keys, "value", "low", "high" (both NaN for a single seed) and "seeds".
    """
    by = list(dict.fromkeys(keys))
    grouped = _per_seed(rows, by, value).groupby(by, dropna=False, sort=False, observed=True)[value]
    means = grouped.agg(value="mean", spread="std", seeds="size").reset_index()
    half = half_interval(means["seeds"], means["spread"])
    return means.assign(low=means["value"] - half, high=means["value"] + half).drop(columns="spread")


def _per_seed(rows: Frame, keys: Sequence[str], value: str) -> Frame:
    """Return the mean of column `value` for every combination of the keys and the seed."""
    seeded = [*keys, "seed"] if "seed" in rows and "seed" not in keys else list(keys)
    numbers = rows.assign(**{value: rows[value].astype("float64")})
    return numbers.groupby(seeded, dropna=False, sort=False, observed=True)[value].mean().reset_index()


def _averaged(rows: Frame, figure: Figure, columns: dict[str, str]) -> tuple[list[Mark], list[str]]:
    """Return the means over seeds as marks, and remarks on what they average.

    Points of three seeds or more have an interval. If no point has as many, each seed is a dot of its own (not in heat
    maps, which have no room for it).
    """
    keys, value = list(dict.fromkeys(columns.values())), figure.value
    means = with_interval(rows, keys, value)
    most = int(means["seeds"].max()) if len(means) else 0
    metrics = _metrics(rows) if value == "score" else set()
    ends = [drawn_ends(mean, high - mean, metrics) for mean, high in zip(means["value"], means["high"], strict=True)]
    drawn = means["seeds"] >= INTERVAL_SEEDS
    means = means.assign(low=[low for low, _ in ends], high=[high for _, high in ends])
    means[["low", "high"]] = means[["low", "high"]].where(drawn)
    found = means[["value", "low", "high", "seeds"]].assign(**{part: means[name] for part, name in columns.items()})
    if found["x"].dtype.kind in "iuf":
        found = found.sort_values("x", kind="stable")
    marks = _records(found)
    has_dots = figure.kind != "heat" and 1 < most < INTERVAL_SEEDS
    if has_dots:
        several = means.loc[means["seeds"] > 1, keys]
        seeds = _per_seed(rows.merge(several, on=keys), keys, value)
        dots = seeds[[value]].rename(columns={value: "value"})
        marks += [{**row, "mark": DOT} for row in _records(dots.assign(**{p: seeds[c] for p, c in columns.items()}))]
    remarks = [_interval_remark(sorted({int(count) for count in found["seeds"]}), "seed" in rows, has_dots=has_dots)]
    return marks, remarks + _also_averaged(rows, [*keys, *(["seed"] if "seed" in rows else [])], value)


def _interval_remark(counts: list[int], has_seeds: bool, *, has_dots: bool) -> str:
    """Return what a point of a chart is, from the different numbers of seeds of its points."""
    if not has_seeds:
        return "one measurement per point, so no interval is drawn"
    if counts == [1]:
        return "one seed, so no interval is drawn"
    if counts and counts[-1] < INTERVAL_SEEDS:
        return f"mean of {_span(counts)} seeds" + (", each a dot; too few for an interval" if has_dots else "")
    return f"mean of {_span(counts)} seeds with its 95 % t interval"


def _metrics(rows: Frame) -> set[str]:
    """Return the metrics of the scores in some rows: their measures, or where the measure is "score" the metrics."""
    measures = set(rows["measure"]) if "measure" in rows else set()
    return set(rows["metric"]) if measures == {"score"} and "metric" in rows else measures


def _across(points: list[Mark]) -> list[Mark]:
    """Return the points of lines, where each point without x becomes two: one at each end of the x axis."""
    along = list(dict.fromkeys(row["x"] for row in points if "x" in row))
    ends = list(dict.fromkeys([*along[:1], *along[-1:]]))
    pairs = [[row] if "x" in row else [{**row, "x": end, "across": True} for end in ends] for row in points]
    return [row for pair in pairs for row in pair]


def _also_averaged(rows: Frame, keys: list[str], value: str) -> list[str]:
    """Return a remark on the columns over which rows with the same keys were averaged; [] if there are no such rows."""
    groups = rows.groupby(keys, dropna=False, sort=False, observed=True)
    if not len(rows) or groups.size().max() == 1:
        return []
    others = [name for name in rows.columns if name not in (*keys, value, *COUNTS)]
    over = [name for name in others if groups[name].nunique(dropna=False).max() > 1]
    return [f"averaged over {', '.join(over)}" if over else "averaged over rows that are alike"]


def _scattered(rows: Frame, figure: Figure, columns: dict[str, str]) -> tuple[list[Mark], list[str]]:
    """Return a point per row, at most `MOST_SCATTERED` of them drawn at random with a fixed seed, and remarks.

    A point without a label is labelled with all columns that are not drawn otherwise.
    """
    shown = rows if len(rows) <= MOST_SCATTERED else rows.sample(MOST_SCATTERED, random_state=0)
    points = shown[[]].assign(value=shown[figure.value], **{part: shown[name] for part, name in columns.items()})
    used = {figure.value, *columns.values(), *figure.where}
    unused = [name for name in rows.columns if name not in used and rows[name].nunique() > 1]
    if "label" not in columns and unused:
        texts = shown[unused].astype(str).to_dict("records")
        points["label"] = [", ".join(f"{name} {cell}" for name, cell in row.items()) for row in texts]
    remarks = [f"a point is one row of the table ({len(rows):,} in all)"]
    sampled = [f"{len(shown):,} drawn at random are shown"] if len(shown) < len(rows) else []
    return _records(points), remarks + sampled


def _records(rows: Frame) -> list[Mark]:
    """Return the rows of a table as dicts that JSON can hold, without missing cells."""
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    return [{str(key): plain(cell) for key, cell in row.items() if cell is not None} for row in records]


def plain(cell: Any) -> Cell:
    """Return a cell as JSON can hold it: numbers with at most 6 significant digits, truth values, texts or None."""
    cell = cell.tolist() if hasattr(cell, "tolist") else cell
    if isinstance(cell, float):
        return float(f"{cell:.6g}") if math.isfinite(cell) else str(cell)
    return cell if isinstance(cell, bool | int | str | None) else str(cell)


def _counts(rows: Frame, settings: Mapping[str, Any]) -> list[str]:
    """Return a remark on how many rows, tokens or texts a number is of, if the table or the settings say so."""
    for name, noun in COUNTS.items():
        counts = sorted({int(count) for count in rows[name].dropna()}) if name in rows else []
        if counts:
            return [f"n = {_span(counts)} {noun}{'s' * (counts != [1])}"]
    for name, noun in COUNTS.items():
        if isinstance(settings.get(name), int):
            return [f"n = {pluralize(settings[name], noun)}"]
    return []


def _span(counts: list[int]) -> str:
    """Return sorted counts as "3" or "1 to 3"."""
    return " to ".join(f"{count:,}" for count in dict.fromkeys([*counts[:1], *counts[-1:]]))


def _axis_title(column: str) -> str:
    """Return the title of the axis of a column."""
    return LAYER if column == "layer" else column.replace("_", " ")


def _value_title(rows: Frame, figure: Figure) -> str:
    """Return the title of the value axis: the metric of a score, another measure with its metric, or the column."""
    if figure.value != "score" or "measure" not in rows or rows["measure"].nunique() != 1:
        return figure.value.replace("_", " ")
    measure = str(rows["measure"].iloc[0])
    metrics = list(rows["metric"].dropna().unique()) if "metric" in rows else []
    if len(metrics) == 1 and metrics[0] != measure:
        measure = str(metrics[0]) if measure == "score" else f"{measure} ({metrics[0]})"
    return measure.replace("_", " ")


def tables_of(frame: Frame, title: str, axes: Collection[str] = ()) -> list[DataTable]:
    """Return a study's table, preceded by the means over seeds if there are several.

    Args:
        frame: The table.
        title: Its title.
        axes: Columns that figures use as axes. Other columns of floats are measurements and are left out of the means.
    """
    whole = _data_table(frame, title)
    if "seed" not in frame or "score" not in frame or frame["seed"].nunique() < 2:
        return [whole]
    names = [str(name) for name in frame.columns if name not in ("seed", "score")]
    keys = [name for name in names if name in axes or frame[name].dtype.kind != "f"]
    if not keys:
        return [whole]
    means = with_interval(frame, keys, "score").rename(columns={"value": "mean"})
    note = "low and high are the ends of the 95 % t interval over seeds; they are empty where there is one seed."
    return [_data_table(means[[*keys, "mean", "low", "high", "seeds"]], f"{title}: means over seeds", note), whole]


def _data_table(frame: Frame, title: str, note: str = "") -> DataTable:
    """Return a pandas table as a table of the page."""
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return DataTable(title, list(map(str, frame.columns)), [[plain(cell) for cell in row] for row in rows], note)
