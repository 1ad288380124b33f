"""Make the page's section about a study: its verdicts, charts, tables, settings and examples of errors."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

import numpy as np

from lamina.errors import ConfigError, DataError, check_known
from lamina.report.charts import DOT, INTERVAL_SEEDS, LAYER, Drawing, Mark, count_range, drawn_ends, interval_remark
from lamina.report.sections import Cell, DataTable, Example, Section, Spans
from lamina.train.results import half_interval, tied
from lamina.utils import JSON, Row, pluralize

if TYPE_CHECKING:
    from lamina.studies.study import Figure, Frame, Study

COUNTS = {"rows": "row", "tokens": "token", "texts": "text", "n": "row"}  # column or setting -> the things it counts
MOST_SCATTERED = 4000  # largest number of points in a scatter plot; from a larger table, a random sample is drawn
MOST_EXAMPLES = 40  # largest number of wrong predictions that are shown; the table has all of them
EXAMPLE = ("task", "layer", "row", "metric", "score", "text", "true", "predicted")  # columns of a table of errors
BASELINES = {
    "majority": "the most frequent class",
    "length": "logistic regression on text length",
    "bag_of_words": "bag of words + logistic regression",
    "tfidf": "TF-IDF + logistic regression",
}
NUMBER_BASELINES = {name: words.replace("logistic", "ridge") for name, words in BASELINES.items()}
NUMBER_BASELINES["majority"] = "the mean of the training labels"
_OF_NUMBERS = ("pearson", "spearman", "mae")  # metrics of tasks whose labels are numbers
_SIGNIFICANT = 0.05  # largest p value of a difference that counts as significant


class Span(TypedDict):
    """A labelled span of a text in a study's table of errors: the characters `[start:end]`.

    Attributes:
        label: Its label; absent where spans have none.
        error: The kind of error. If this key is absent, it is "wrong".
    """

    start: int
    end: int
    label: NotRequired[str]
    error: NotRequired[str]


def study_section(study: Study, label: str) -> Section:
    """Return the section of the page about a study; `label` is its name on the page.

    Figures without a row that can be drawn are left out. Raises UnknownNameError, ConfigError or DataError as
    `drawing_of` does.
    """
    drawings = {name: drawing for name in study.figures if (drawing := drawing_of(study, name)).rows}
    axes = {
        column
        for figure in study.figures.values()
        for column in (figure.x, figure.y, figure.colour, figure.facet, *figure.where)
        if column is not None
    }
    table: Frame = study.table
    wrong = table.dropna(subset=["text"]) if set(EXAMPLE) <= set(table.columns) else table.head(0)
    tasks = [str(task) for task in table["task"].dropna().unique()] if "task" in table else []
    return Section(
        label,
        study.name,
        [*_probe_verdicts(study), *study.conclusions],
        drawings,
        tables_of(table, study.name.replace("_", " ").capitalize(), axes),
        study.settings,
        _seeds(study),
        _examples(wrong),
        len(wrong),
        _model_name(study),
        tasks,
    )


def _model_name(study: Study) -> str:
    models = study.settings.get("models") or {}
    names = {str(facts["name"]) for facts in models.values() if isinstance(facts, Mapping) and facts.get("name")}
    return names.pop() if len(names) == 1 else ""


def _probe_verdicts(study: Study) -> Iterator[str]:
    """Yield one sentence per task of a probing study, which says whether probes beat the best baseline.

    The measure "ahead" is the score of a probe minus the score of the best baseline. The sentence calls a layer better
    only if this difference is significant, and never with fewer than three seeds. Other studies, and tasks without a
    score of a baseline and a probe, yield no sentence; a score that is NaN does not count.
    """
    table: Frame = study.table
    if study.name != "probe" or not {"task", "measure", "layer", "metric", "low", "p"} <= set(table.columns):
        return
    sites = table["site"].astype(object).fillna("output") if "site" in table else "output"
    for task, rows in table.assign(site=sites).groupby("task", sort=False):
        scores = rows[(rows["measure"] == "score") & rows["score"].notna()]
        baselines, probes = scores[scores["seed"].isna()], scores[scores["seed"].notna()]
        ahead = rows[rows["measure"] == "ahead"]
        if baselines.empty or probes.empty or ahead.empty:
            continue
        strongest = baselines.loc[baselines["score"].idxmax()]
        means = probes.groupby(["site", "layer", "probe"], sort=False)["score"].mean()
        best: dict[tuple[str, str], list[int]] = {}
        for site, layer, probe in tied(means.to_dict(), means.max(), ".3f"):
            best.setdefault((site, f"{probe} probe"), []).append(layer)
        probed = " and ".join(
            f"{what}{'s' * (len(layers) > 1)} of {_place(site, layers)}" for (site, what), layers in best.items()
        )
        names = NUMBER_BASELINES if strongest["metric"] in _OF_NUMBERS else BASELINES
        name = names.get(strongest["probe"], str(strongest["probe"]))
        metric = str(strongest["metric"]).replace("_", " ")
        against = f"{metric} {means.max():.3f} ({probed}) against {strongest['score']:.3f}"
        better = ahead[(ahead["score"] > 0) & (ahead["low"] > 0) & (ahead["p"] <= _SIGNIFICANT)]
        if (seeds := probes["seed"].nunique()) < INTERVAL_SEEDS:
            few = "one seed" if seeds == 1 else f"{seeds} seeds"
            yield f"{task}: {few} cannot show whether a layer is better than {name}: {against}."
        elif better.empty:
            yield f"{task}: no better than {name}, as far as this study can tell: {against}."
        else:
            by_site = better.groupby("site", sort=False)["layer"].unique()
            places = " and ".join(_place(site, layers) for site, layers in by_site.items())
            yield f"{task}: {places} {'is' if by_site.map(len).sum() == 1 else 'are'} better than {name}: {against}."


def _place(site: str, layers: Iterable[int]) -> str:
    """Return the words for layers at a site, such as "layers 1, 2" (site "output") or "the ffn of layer 4"."""
    numbers = [f"{layer:g}" for layer in sorted(layers)]
    return f"{'' if site == 'output' else f'the {site} of '}layer{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _seeds(study: Study) -> list[int]:
    """Return the seeds in a study's table; without a column "seed", the seed in the settings; [] without any."""
    if "seed" in study.table:
        return sorted({int(seed) for seed in study.table["seed"].dropna()})
    seed = study.settings.get("seed")
    return [seed] if isinstance(seed, int) else []


def _examples(wrong: Frame) -> list[Example]:
    """Return at most `MOST_EXAMPLES` of the wrong predictions as examples, in the order of the rows.

    They are chosen in rounds: the first row of each pair of task and layer, then the second row of each pair, and so
    on. If there are more pairs than `MOST_EXAMPLES`, one row each is taken from evenly spaced pairs.
    """
    rank = wrong.groupby(["task", "layer"], sort=False).cumcount().to_numpy() if len(wrong) else np.zeros(0, int)
    places, groups = np.argsort(rank, kind="stable"), int((rank == 0).sum())
    if groups > MOST_EXAMPLES:
        places = places[np.linspace(0, groups - 1, MOST_EXAMPLES).astype(int)]
    shown = wrong.iloc[np.sort(places[:MOST_EXAMPLES])]
    return [_example(row) for row in shown.to_dict("records")]


def _example(row: Row) -> Example:
    """Return a row that lists a wrong prediction as an example for the page, with spans marked in its text.

    The spans of a pair are marked in its second text, which alone has tagged words.
    """
    true, predicted, text = (_parsed(row[key]) for key in ("true", "predicted", "text"))
    before: Spans = []
    if isinstance(text, list) and len(text) == 2:
        before, text = [(f"{text[0]} | ", "", "")], text[1]
    text = str(text)
    where = f"{row['task']} · layer {row['layer']} · row {row['row']}"
    sure = f"{row['metric']} {row['score']:.3f}"
    sides = [side if isinstance(side, list) else [side] for side in (true, predicted)]
    if any(isinstance(span, dict) for side in sides for span in side):
        spans = ([cast("Span", span) for span in side if isinstance(span, dict)] for side in sides)
        return Example(where, sure, [], *([*before, *marked_parts(text, side)] for side in spans))
    labels = ([(", ".join(map(str, side)), "", "")] for side in sides)
    return Example(where, sure, [*before, (text, "", "")], *labels)


def _parsed(cell: object) -> JSON:
    """Return a cell as it was before the table was saved: lists come back from Parquet as arrays or JSON text."""
    cell = _plain_python(cell)
    if isinstance(cell, str) and cell[:1] == "[":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cast("JSON", cell)


def _plain_python(cell: object) -> object:
    return cast("np.ndarray", cell).tolist() if hasattr(cell, "tolist") else cell


def marked_parts(text: str, spans: Sequence[Span]) -> Spans:
    """Cut a text at its spans, and return the pieces in order, as (text, label, error).

    `label` and `error` are "" for text between spans. If spans overlap, only the first is marked. No piece is empty.
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
    """Return the figure `name` of a study as a chart for the page.

    Rows that cannot be drawn are left out and counted in the remark below the chart. In a scatter plot each row is a
    point. In other charts, rows that differ only in their seed are averaged. Means of three seeds or more have an
    interval; if no mean has three, the chart shows the value of each seed (not in heat maps). In a line chart, a row
    without x becomes a line across the chart. Raises KeyError if the study has no such figure, UnknownNameError if its
    kind does not exist or the table lacks one of its columns, ConfigError if a heat map has no `y`, and DataError if
    its values are not numbers.
    """
    figure, rows = study.figures[name], study.rows(name)
    check_known(f"report: figure '{name}'", [figure.kind], ("line", "heat", "bar", "scatter"), "kind")
    if figure.kind == "heat" and figure.y is None:
        raise ConfigError(f"report: figure '{name}' is a heat map without y. Name the column of its vertical axis.")
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
        remarks.append(f"a dashed line has no {figure.x}, so its value is drawn across")
    remark = "; ".join([*remarks, *_counts(drawn, study.settings), *omissions])
    titles = {part: LAYER if column == "layer" else column.replace("_", " ") for part, column in columns.items()}
    titles |= {"value": figure.value_title or _value_title(rows, figure)}
    titles |= {"x": figure.x_title} if figure.x_title else {}
    titles |= {"low": "interval from", "high": "interval to"} if figure.half_interval is not None else {}
    note = _with_equal_share(figure.note, study, rows)
    return Drawing(figure.kind, points, figure.title or name, titles, note, remark[:1].upper() + remark[1:])


def _with_equal_share(note: str, study: Study, rows: Frame) -> str:
    """Return a figure's note; in a study of importances, with a sentence on the equal share, 1 / number of layers."""
    layers = rows["layer"].nunique() if study.name == "importance" and "layer" in rows else 0
    if not layers:
        return note
    return f"{note} If all layers counted the same, each would have 1/{layers} = {1 / layers:.3f}.".strip()


def _drawable(rows: Frame, figure: Figure, columns: dict[str, str], name: str) -> tuple[Frame, list[str]]:
    """Return the rows that can be drawn, and remarks that count the other rows.

    A row needs a finite value and a place on the axes. A row of a line chart may lack x: it becomes a line across the
    chart. `columns` is role in the chart ("x", "y", "colour", "facet" and so on) -> name of the table's column, and
    `name` is the figure's name, for messages. Raises DataError if the values are not numbers.
    """
    try:
        values = rows[figure.value].astype("float64")
    except (TypeError, ValueError):
        problem = f"column '{figure.value}' of figure '{name}' holds values that are not numbers"
        raise DataError(f"report: {problem}; a figure draws numbers.", column=figure.value) from None
    finite = values.abs().lt(math.inf)
    kept, remarks = rows.loc[finite], _omitted(~finite, "non-finite value")
    for part in ("x", "y", "colour", "facet"):
        if part in columns:
            column = kept[columns[part]]
            placed = column.notna() | (part == "x" and figure.kind == "line")
            if part == "x" and figure.kind in ("line", "scatter"):
                placed &= ~column.isin([math.inf, -math.inf])
            remarks += _omitted(~placed, "row", f" without a {'finite ' * (part == 'x')}{columns[part]}")
            kept = kept.loc[placed]
    return kept, remarks


def _omitted(missing: Frame, noun: str, reason: str = "") -> list[str]:
    """Return a remark, in a list, that rows are left out ("2 rows without a task are left out"); [] if none are.

    `missing` is True for each row that is left out. `noun` ("row") and `reason` (" without a task") are parts of the
    remark.
    """
    count = int(missing.sum())
    return [f"{pluralize(count, noun)}{reason} {'is' if count == 1 else 'are'} left out"] if count else []


def with_interval(rows: Frame, keys: Sequence[str], value: str) -> tuple[Frame, Frame]:
    """Return the mean of a column over seeds, with its 95 % t interval, for each combination of the keys.

    Args:
        rows: A table that may have a column "seed".
        keys: The columns to group by.
        value: The column to average. Several rows with one seed are averaged before the mean over seeds is computed.

    Returns:
        A table with the keys, which may have any name, and a table with "value", "low", "high" and "seeds": the number
        of seeds whose mean is not NaN; the others are left out. "low" and "high" are NaN for a single seed; they and
        "value" are NaN for no seed.
    """
    by = list(dict.fromkeys(keys))
    grouped = _per_seed(rows, by, value).groupby(by, dropna=False, sort=False, observed=True)[value]
    means = grouped.agg(value="mean", spread="std", seeds="count")  # NaN is no seed
    places, means = means.index.to_frame(index=False), means.reset_index(drop=True)
    half = half_interval(means["seeds"], means["spread"])
    return places, means.assign(low=means["value"] - half, high=means["value"] + half).drop(columns="spread")


def _per_seed(rows: Frame, keys: Sequence[str], value: str) -> Frame:
    """Return the mean of the column `value` for every combination of the keys and, if there is one, the seed."""
    seeded = [*keys, "seed"] if "seed" in rows and "seed" not in keys else list(keys)
    numbers = rows.assign(**{value: rows[value].astype("float64")})
    return numbers.groupby(seeded, dropna=False, sort=False, observed=True)[value].mean().reset_index()


def _averaged(rows: Frame, figure: Figure, columns: dict[str, str]) -> tuple[list[Mark], list[str]]:
    """Return means over seeds as rows of a chart, and remarks that say what was averaged; [] and [] without rows.

    A mean of three seeds or more gets an interval, or every point that of `figure.half_interval`. If no mean has three
    seeds, the means of two seeds also get a dot for each seed, except in heat maps. `columns` maps roles in the chart
    ("x", "colour" and so on) to columns of `rows`.
    """
    if not len(rows):
        return [], []
    keys, value = list(dict.fromkeys(columns.values())), figure.value
    places, means = with_interval(rows, keys, value)
    most = int(means["seeds"].max())
    metrics = _metrics(rows) if value == "score" else set()
    half = figure.half_interval
    if half is not None:
        means = means.assign(low=means["value"] - half, high=means["value"] + half)
    else:
        ends = [
            drawn_ends(mean, high - mean, metrics) for mean, high in zip(means["value"], means["high"], strict=True)
        ]
        means = means.assign(low=[low for low, _ in ends], high=[high for _, high in ends])
        means[["low", "high"]] = means[["low", "high"]].where(means["seeds"] >= INTERVAL_SEEDS)
    points = means[["value", "low", "high", "seeds"]].assign(**{part: places[name] for part, name in columns.items()})
    if points["x"].dtype.kind in "iuf":
        points = points.sort_values("x", kind="stable")
    marks = _records(points)
    has_dots = figure.kind != "heat" and 1 < most < INTERVAL_SEEDS
    if has_dots:
        several = places.loc[means["seeds"] > 1]
        seeds = _per_seed(rows.merge(several, on=keys), keys, value)
        dots = seeds[[value]].rename(columns={value: "value"})
        marks += [{**row, "mark": DOT} for row in _records(dots.assign(**{p: seeds[c] for p, c in columns.items()}))]
    remark = "one measurement per point, so there is no interval"
    if half is not None:
        remark = f"each interval is ± {half:.2f}"
    elif "seed" in rows and rows["seed"].notna().any():
        seeded = rows.groupby(keys, dropna=False, sort=False, observed=True)["seed"].count().to_numpy() > 0
        counts = {int(count) for count in means["seeds"][seeded]}  # without baselines, which have no seed
        remark = interval_remark(counts, "seed", has_dots=has_dots)
    return marks, [remark, *_also_averaged(rows, [*keys, *(["seed"] if "seed" in rows else [])], value)]


def _metrics(rows: Frame) -> set[str]:
    """Return the names of the metrics in which the rows' scores are measured.

    They are in the column "measure" or, if the only measure is "score", in the column "metric".
    """
    measures = set(rows["measure"]) if "measure" in rows else set()
    return set(rows["metric"]) if measures == {"score"} and "metric" in rows else measures


def _across(points: list[Mark]) -> list[Mark]:
    """Return the points of a line chart; a point without x is replaced by one at each end of the x axis.

    If no point has an x, the axis is the point 0.
    """
    along = list(dict.fromkeys(row["x"] for row in points if "x" in row))
    ends = list(dict.fromkeys([*along[:1], *along[-1:]])) or [0]
    pairs = [[row] if "x" in row else [{**row, "x": end, "across": True} for end in ends] for row in points]
    return [row for pair in pairs for row in pair]


def _also_averaged(rows: Frame, keys: list[str], value: str) -> list[str]:
    """Return a remark, in a list, that names the columns averaged over besides the seed; [] if nothing was averaged.

    If rows have equal `keys` and no other column differs, the remark says that rows with the same place are averaged.
    `keys` are the columns that tell the points of the chart apart, and "seed" if there is one; `value` is the column
    with the numbers.
    """
    groups = rows.groupby(keys, dropna=False, sort=False, observed=True)
    if not len(rows) or groups.size().max() == 1:
        return []
    others = [name for name in rows.columns if name not in (*keys, value, *COUNTS)]
    over = [name for name in others if groups[name].nunique(dropna=False).max() > 1]
    return [f"averaged over {', '.join(over)}" if over else "rows with the same place in the chart are averaged"]


def _scattered(rows: Frame, figure: Figure, columns: dict[str, str]) -> tuple[list[Mark], list[str]]:
    """Return the points of a scatter plot, one per row, and remarks that count the points.

    From more than `MOST_SCATTERED` rows, a random sample is drawn with a fixed seed. If the figure has no column of
    labels, the label of a point lists the columns that are not drawn and differ between rows. `columns` maps roles in
    the chart ("x", "colour" and so on) to columns of `rows`.
    """
    shown = rows if len(rows) <= MOST_SCATTERED else rows.sample(MOST_SCATTERED, random_state=0)
    points = shown[[]].assign(value=shown[figure.value], **{part: shown[name] for part, name in columns.items()})
    used = {figure.value, *columns.values(), *figure.where}
    unused = [name for name in rows.columns if name not in used and rows[name].nunique() > 1]
    if "label" not in columns and unused:
        texts = shown[unused].astype(str).to_dict("records")
        points["label"] = [", ".join(f"{name} {cell}" for name, cell in row.items()) for row in texts]
    remarks = [f"each point is one row of the table ({len(rows):,} in all)"]
    sampled = [f"{len(shown):,} drawn at random are shown"] if len(shown) < len(rows) else []
    return _records(points), remarks + sampled


def _records(rows: Frame) -> list[Mark]:
    records = rows.astype(object).where(rows.notna(), None).to_dict("records")
    return [{str(key): plain(cell) for key, cell in row.items() if cell is not None} for row in records]


def plain(cell: object) -> Cell:
    """Return a cell of a pandas table as a value that JSON can represent.

    Floats are rounded to 6 significant digits, unless they are whole numbers. NaN and infinite floats become strings,
    and so does anything that is not a number, bool, string or None.
    """
    cell = _plain_python(cell)
    if isinstance(cell, float):
        if not math.isfinite(cell):
            return str(cell)
        return cell if cell.is_integer() else float(f"{cell:.6g}")
    return cell if isinstance(cell, bool | int | str | None) else str(cell)


def _counts(rows: Frame, settings: Mapping[str, JSON]) -> list[str]:
    """Return a remark, in a list, on how much was measured, such as "n = 872 rows"; [] if that is not known.

    It comes from the first name in `COUNTS` that is a column with a value; otherwise, from the first that is a setting.
    """
    for name, noun in COUNTS.items():
        counts = sorted({int(count) for count in rows[name].dropna()}) if name in rows else []
        if counts:
            return [f"n = {count_range(counts)} {noun}{'s' * (counts != [1])}"]
    for name, noun in COUNTS.items():
        if isinstance(count := settings.get(name), int):
            return [f"n = {pluralize(count, noun)}"]
    return []


def _value_title(rows: Frame, figure: Figure) -> str:
    """Return the title of a figure's value axis.

    It is the name of the column with the values. If all values are scores of one measure, it is the measure instead,
    followed by the metric in brackets if their names differ. For the measure "score", it is the metric alone.
    """
    if figure.value != "score" or "measure" not in rows or rows["measure"].nunique() != 1:
        return figure.value.replace("_", " ")
    measure = str(rows["measure"].iloc[0])
    metrics = list(rows["metric"].dropna().unique()) if "metric" in rows else []
    if len(metrics) == 1 and metrics[0] != measure:
        measure = str(metrics[0]) if measure == "score" else f"{measure} ({metrics[0]})"
    return measure.replace("_", " ")


def tables_of(frame: Frame, title: str, axes: Collection[str] = ()) -> list[DataTable]:
    """Return a study's table as a table of the page. If its scores are of several seeds, a table of means comes first.

    There is no table of means if no column tells the rows apart (see `axes`).

    Args:
        frame: The table of the study.
        title: Title of the table.
        axes: Columns that figures use as axes. A mean is over rows that agree in these columns and in all columns
            without floats, except "seed". Other columns of floats are left out of the table of means.
    """
    whole = _data_table(frame, title)
    if "seed" not in frame or "score" not in frame or frame["seed"].nunique() < 2:
        return [whole]
    names = [str(name) for name in frame.columns if name not in ("seed", "score")]
    keys = [name for name in names if name in axes or frame[name].dtype.kind != "f"]
    if not keys:
        return [whole]
    places, means = with_interval(frame, keys, "score")
    means = means.rename(columns={"value": "mean"})[["mean", "low", "high", "seeds"]]
    means = places.merge(means, left_index=True, right_index=True, suffixes=("", " over seeds"))
    note = "low and high are the ends of the 95 % confidence interval over seeds. With one seed they are empty."
    return [_data_table(means, f"{title}: means over seeds", note), whole]


def _data_table(frame: Frame, title: str, note: str = "") -> DataTable:
    rows = frame.astype(object).where(frame.notna(), None).to_numpy().tolist()
    return DataTable(title, list(map(str, frame.columns)), [[plain(cell) for cell in row] for row in rows], note)
