"""What a chart's marks are: ends of intervals, names of lines."""

from __future__ import annotations

import pytest

from lamina.report.charts import MOST_LABELS, Drawing, drawn_ends, spec_of


def test_an_interval_is_drawn_no_further_than_its_metric_goes():
    assert drawn_ends(0.9, 0.4, ["accuracy"]) == (0.5, 1.0)
    assert drawn_ends(5.0, 10.0, ["f1"], 100) == (0.0, 15.0)
    assert drawn_ends(-0.9, 0.4, ["mcc"]) == (-1.0, -0.5)
    assert drawn_ends(0.9, 0.4, ["accuracy", "mcc"]) == (0.5, 1.0)
    assert drawn_ends(0.1, 0.4, ["accuracy", "mcc"]) == pytest.approx((-0.3, 0.5))
    assert drawn_ends(0.9, 0.4, ["loss"]) == drawn_ends(0.9, 0.4, []) == (0.5, 1.3)
    assert drawn_ends(-0.1, 0.4, ["accuracy"]) == pytest.approx((-0.5, 0.3))  # a difference, which is no accuracy


def test_many_lines_have_a_legend_and_the_highest_are_named():
    ends = {0: 0.4, 1: 0.3, 2: 0.2, 3: 0.1}
    rows = [{"x": x, "colour": layer, "value": end * x} for layer, end in ends.items() for x in (1, 2)]
    drawing = Drawing("line", rows, "Layers")
    assert drawing.has_legend
    named = [(row["x"], row["colour"]) for row in spec_of(drawing)["data"]["values"] if "label_y" in row]
    assert named == [(2, layer) for layer in range(MOST_LABELS)]


@pytest.mark.parametrize(("names", "palette"), [(8, None), (9, "tableau20"), (20, "tableau20")])
def test_named_series_have_a_colour_and_a_symbol_each(names: int, palette: str | None):
    rows = [{"x": 1.0, "value": place / 30, "colour": f"method {place}"} for place in range(names)]
    encoding = spec_of(Drawing("scatter", rows, "Score and time"))["encoding"]
    assert (encoding["color"]["type"], encoding["color"]["scale"].get("scheme")) == ("nominal", palette)
    assert "shape" in encoding


@pytest.mark.parametrize("series", [[f"method {place}" for place in range(21)], [0, 1, 2]])
def test_numbers_and_very_many_series_have_shades(series: list[str | int]):
    rows = [{"x": 1.0, "value": place / 30, "colour": name} for place, name in enumerate(series)]
    encoding = spec_of(Drawing("scatter", rows, "Score and time"))["encoding"]
    assert encoding["color"]["type"] == "ordinal"
    assert "shape" not in encoding
