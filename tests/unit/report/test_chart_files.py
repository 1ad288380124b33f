from __future__ import annotations

import re
import struct
import sys

import pytest

from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.report import chart_files as figures
from lamina.report.chart_files import _labels, drawn_ends, importance, scores


def shares(readers: int, layers: int = 4) -> list[dict]:
    return [
        {"reader": f"reader-{r}", "layer": i, "importance": 0.7 if i == r % layers else 0.3 / (layers - 1)}
        for r in range(readers)
        for i in range(layers)
    ]


SCORES = [
    {"reader": "cola", "metric": "mcc", "method": "last layer", "score": 0.0612, "spread": 0.01},
    {"reader": "cola", "metric": "mcc", "method": "AdaLayers", "score": 0.2658, "spread": 0.02},
    {"reader": "ner", "method": "last layer", "score": 0.5307},
    {"reader": "ner", "method": "AdaLayers", "score": -0.25},
]


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def bars(svg: str) -> list[str]:
    return re.findall(r'<path aria-label="([^"]*)"[^>]*aria-roledescription="(?:bar|rect mark)"', svg)


@pytest.mark.parametrize("readers", [1, figures.MOST_BARS, figures.MOST_BARS + 1])
def test_importance_shows_every_reader_and_layer(tmp_path, readers):
    path = importance(shares(readers), tmp_path / "figure.svg")
    svg = path.read_text("utf-8")
    assert {"Which layers each reader uses", "layer (0 = embeddings)", "importance"} <= set(texts(svg))
    assert {f"reader-{r}" for r in range(readers)} <= set(texts(svg))
    assert {"0", "1", "2", "3"} <= set(texts(svg))
    assert len(bars(svg)) == 4 * readers


def test_bars_become_a_heat_map(tmp_path):
    few = importance(shares(figures.MOST_BARS), tmp_path / "few.svg").read_text("utf-8")
    many = importance(shares(figures.MOST_BARS + 1), tmp_path / "many.svg").read_text("utf-8")
    assert "70%" not in texts(few)
    assert texts(many).count("70%") == figures.MOST_BARS + 1
    assert texts(many).count("10%") >= 3 * (figures.MOST_BARS + 1)


def test_heat_map_of_many_layers_leaves_the_numbers_out(tmp_path):
    svg = importance(shares(5, layers=30), tmp_path / "deep.svg").read_text("utf-8")
    assert "1%" not in texts(svg)
    assert len(bars(svg)) == 150


def test_readers_keep_their_order(tmp_path):
    rows = [{"reader": name, "layer": 0, "importance": 1.0} for name in ("zebra", "ape")]
    shown = texts(importance(rows, tmp_path / "figure.svg").read_text("utf-8"))
    assert shown.index("zebra") < shown.index("ape")


def test_scores_show_every_number(tmp_path):
    svg = scores(SCORES, tmp_path / "figure.svg", title="Scores on dev").read_text("utf-8")
    shown = {"Scores on dev", "score (higher is better)", "cola (mcc)", "ner", "last layer", "AdaLayers"}
    shown |= {"0.061 ± 0.010", "0.266 ± 0.020", "0.531", "-0.250"}
    assert shown <= set(texts(svg))
    assert len(bars(svg)) == 4


def test_spread_is_drawn_only_where_there_is_one(tmp_path):
    rules = 'aria-roledescription="rule mark"'
    assert scores(SCORES, tmp_path / "with.svg").read_text("utf-8").count(rules) == 4
    assert scores(SCORES[2:], tmp_path / "without.svg").read_text("utf-8").count(rules) == 0


def test_png_has_two_pixels_per_unit(tmp_path):
    png = importance(shares(2), tmp_path / "figure.png").read_bytes()
    svg = importance(shares(2), tmp_path / "figure.svg").read_text("utf-8")
    assert png.startswith(b"\x89PNG")
    width = float(re.search(r'<svg[^>]*\swidth="([\d.]+)"', svg)[1])
    assert struct.unpack(">I", png[16:20])[0] == pytest.approx(2 * width, abs=2)


def test_html_carries_its_own_scripts(tmp_path):
    html = scores(SCORES, tmp_path / "figure.HTML").read_text("utf-8")
    assert "AdaLayers" in html
    assert not re.search(r"<script[^>]+src=", html)


def test_folder_is_made_and_nothing_else_left(tmp_path):
    path = importance(shares(1), str(tmp_path / "new" / "folder" / "figure.png"))
    assert [path] == list((tmp_path / "new" / "folder").iterdir())


def test_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = importance(shares(1), tmp_path / "figure.svg")
    before = path.read_bytes()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(figures.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        importance(shares(2), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("draw", [importance, scores])
def test_unknown_suffix(tmp_path, draw):
    with pytest.raises(ConfigError, match=r"the path ends in '\.gif'; known: \.png, \.svg, \.html\."):
        draw(SCORES, tmp_path / "figure.gif")


@pytest.mark.parametrize("draw", [importance, scores])
def test_no_rows(tmp_path, draw):
    with pytest.raises(DataError, match="there are no rows to draw"):
        draw([], tmp_path / "figure.png")


def test_missing_key_names_row_and_key(tmp_path):
    rows = [*shares(1), {"reader": "a", "layer": 1}]
    with pytest.raises(DataError, match="row 4 has no 'importance'; it has reader, layer") as caught:
        importance(rows, tmp_path / "figure.png")
    assert (caught.value.row, caught.value.column) == (4, "importance")
    with pytest.raises(DataError, match="row 0 has no 'reader'; it has nothing"):
        scores([{}], tmp_path / "figure.png")


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'.*lamina\[report\]"):
        importance(shares(1), tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


def test_an_interval_is_drawn_no_further_than_its_metric_goes():
    assert drawn_ends(0.9, 0.4, ["accuracy"]) == (0.5, 1.0)
    assert drawn_ends(5.0, 10.0, ["f1"], 100) == (0.0, 15.0)
    assert drawn_ends(-0.9, 0.4, ["mcc"]) == (-1.0, -0.5)
    assert drawn_ends(0.9, 0.4, ["accuracy", "mcc"]) == (0.5, 1.0)
    assert drawn_ends(0.1, 0.4, ["accuracy", "mcc"]) == pytest.approx((-0.3, 0.5))
    assert drawn_ends(0.9, 0.4, ["loss"]) == drawn_ends(0.9, 0.4, []) == (0.5, 1.3)
    assert drawn_ends(-0.1, 0.4, ["accuracy"]) == pytest.approx((-0.5, 0.3))  # a difference, which is no accuracy
    assert _labels({"reader": "a", "score": 0.9, "spread": 0.4, "metric": "accuracy"}) == {
        "group": "a (accuracy)", "low": 0.5, "high": 1.0, "label": "0.900 ± 0.400",
    }  # fmt: skip
