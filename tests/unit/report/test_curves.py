"""Curves of a report: the rows they are drawn from, and files that show them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError
from lamina.recipes.report_file import Curves, Point
from lamina.report.importance_charts import curve_rows, curves_drawing, draw_curves


def point(series: str, x: float | str | None, mean: float, interval: float | None = 0.1, **more: Any) -> Point:
    return Point(more.get("facet", ""), series, x, more.get("metric", "mcc"), mean, 0.0, interval, 3, {})


POINTS = [point("AdaLayers", None, 0.8), point("one", 1, 0.5), point("one", 2, 0.6, None), point("one", 4, 0.7)]


def curves(points: list[Point], **fields: Any) -> Curves:
    return Curves("One layer or all", "validation", "layer", points, **fields)


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def marks(svg: str, kind: str) -> int:
    return svg.count(f'aria-roledescription="{kind}"')


def test_points_have_the_ends_of_their_intervals_and_a_line_across_those_of_its_panel():
    rows = curve_rows(curves(POINTS))
    ends = [None if "low" not in row else (round(row["low"], 6), round(row["high"], 6)) for row in rows]
    assert ends == [(0.7, 0.9), (0.7, 0.9), (0.4, 0.6), None, (0.6, 0.8)]
    found = [(row["colour"], row["x"], row.get("across", False)) for row in rows]
    assert found == [
        ("AdaLayers", 1, True),
        ("AdaLayers", 4, True),
        ("one", 1, False),
        ("one", 2, False),
        ("one", 4, False),
    ]


def test_bands_end_where_the_metric_does():
    high, scaled = point("a", 1, 0.95), point("a", 1, 97.0, 5.0, metric="accuracy")
    assert [(row["low"], row["high"]) for row in curve_rows(curves([high]))] == [(pytest.approx(0.85), 1.0)]
    assert [(row["low"], row["high"]) for row in curve_rows(curves([scaled], scale=100.0))] == [(92.0, 100.0)]


def test_panels_of_several_metrics_say_which_and_have_ends_of_their_own():
    points = [point("a", None, 1.0, facet="x", metric="f1"), point("b", 3, 1.0, facet="x", metric="f1")]
    points += [point("a", None, 1.0, facet="y"), point("b", 5, 1.0, facet="y"), point("b", 9, 1.0, facet="y")]
    rows = curve_rows(curves(points))
    assert [(row["facet"], row["x"]) for row in rows] == [
        ("x (f1)", 3), ("x (f1)", 3), ("x (f1)", 3), ("y (mcc)", 5), ("y (mcc)", 9), ("y (mcc)", 5), ("y (mcc)", 9),
    ]  # fmt: skip


def test_names_on_x_keep_their_order_and_a_line_across_all_of_them():
    rows = curve_rows(curves([point("s", "low", 0.1), point("s", "high", 0.2), point("base", None, 0.3)]))
    assert [(row["colour"], row["x"]) for row in rows] == [
        ("s", "low"),
        ("s", "high"),
        ("base", "low"),
        ("base", "high"),
    ]


def test_the_drawing_shows_points_lines_bands_and_the_source(tmp_path: Path):
    drawn = draw_curves(curves(POINTS, source="a paper", notes=["no numbers " * 12]), tmp_path / "figure.svg")
    svg = drawn.read_text("utf-8")
    shown = texts(svg)
    assert {"One layer or all", "layer", "mcc (validation)", "AdaLayers", "one", "1", "2", "4"} <= set(shown)
    below = re.findall(r"<tspan[^>]*>([^<]*)</tspan>", svg)
    assert "a paper. no numbers" in below[1]
    assert below[-1] == "Mean of 3 runs, with its 95 % confidence interval"
    assert max(map(len, below)) <= 84
    assert (marks(svg, "point"), marks(svg, "line mark"), marks(svg, "area mark")) == (3, 2, 2)
    assert "stroke-dasharray" in svg


@pytest.mark.parametrize(
    ("runs", "remark"),
    [
        ([], ""),
        ([1, 1], "One run per point, so there is no interval"),
        ([2, 1], "Mean of 1 to 2 runs; each dot is a run, and fewer than 3 give no interval"),
        ([2, 5], "Mean of 2 to 5 runs{}; each dot is a run, and fewer than 3 give no interval"),
        ([1, 5], "Mean of 1 to 5 runs{}; fewer than 3 give no interval"),
    ],
)
def test_the_remark_says_which_means_have_an_interval(runs: list[int], remark: str):
    points = [replace(point("a", 1, 0.5), runs=count) for count in runs]
    assert curves_drawing(curves(points)).remark == remark.format(", with its 95 % confidence interval")


@pytest.mark.parametrize("others", [0, 2])
def test_a_remark_names_dots_only_where_they_are_drawn(others: int):
    across = replace(point("base", None, 0.5), runs=2)
    remark = curves_drawing(curves([across, *[point("a", x, 0.5) for x in range(others)]])).remark
    assert "fewer than 3 give no interval" in remark
    assert "dot" not in remark


def test_a_curve_of_test_scores_by_the_hundred_says_so(tmp_path: Path):
    figure = Curves("t", "test", "k", [point("a", 8, 50.0), point("a", 128, 60.0)], log_x=True, scale=100.0)
    assert {"mcc (test) x 100", "8", "128"} <= set(texts(draw_curves(figure, tmp_path / "f.svg").read_text("utf-8")))


def test_names_have_no_line_between_them(tmp_path: Path):
    points = [point(series, x, 0.1, facet=facet) for series in "ab" for x in ("low", "high") for facet in ("p", "q")]
    svg = draw_curves(curves(points), tmp_path / "f.svg").read_text("utf-8")
    assert {"p", "q", "low", "high"} <= set(texts(svg))
    assert (marks(svg, "point"), marks(svg, "rule mark"), marks(svg, "line mark")) == (8, 8, 0)


def test_a_line_across_alone_is_drawn(tmp_path: Path):
    assert draw_curves(curves(POINTS[:1]), tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_other_formats(tmp_path: Path, suffix: str):
    path = draw_curves(curves(POINTS), tmp_path / f"f.{suffix}")
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<html" in start.lower()


def test_what_cannot_be_drawn(tmp_path: Path):
    empty = curves_drawing(curves([]))
    assert (empty.rows, empty.remark) == ([], "")
    with pytest.raises(DataError, match="figure: there are no rows to draw"):
        draw_curves(curves([]), tmp_path / "f.png")
    with pytest.raises(ConfigError, match=r"figure: the path ends in '\.gif'"):
        draw_curves(curves(POINTS), tmp_path / "f.gif")


def test_series_beyond_the_last_colour_have_marks_of_their_own(tmp_path: Path):
    for count in (8, 10):
        points = [point(f"s{number}", x, 0.1 * number) for number in range(count) for x in (1, 2)]
        svg = draw_curves(curves(points), tmp_path / f"{count}.svg").read_text(encoding="utf-8")
        drawn = re.findall(r'<path[^>]*aria-roledescription="point"[^>]*>', svg)
        looks = {tuple(re.search(rf' {key}="([^"]*)"', path)[1] for key in ("d", "fill")) for path in drawn}  # pyright: ignore
        assert len(drawn) == 2 * count
        assert len(looks) == count
