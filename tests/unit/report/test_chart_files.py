from __future__ import annotations

import re
import struct
import sys

import pytest

from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.report import chart_files as figures
from lamina.report.chart_files import checked_path
from lamina.report.importance_charts import importance


def shares(readers: int, layers: int = 4) -> list[dict]:
    return [
        {"reader": f"reader-{r}", "layer": i, "importance": 0.7 if i == r % layers else 0.3 / (layers - 1)}
        for r in range(readers)
        for i in range(layers)
    ]


def test_png_has_two_pixels_per_unit(tmp_path):
    png = importance(shares(2), tmp_path / "figure.png").read_bytes()
    svg = importance(shares(2), tmp_path / "figure.svg").read_text("utf-8")
    assert png.startswith(b"\x89PNG")
    width = float(re.search(r'<svg[^>]*\swidth="([\d.]+)"', svg)[1])
    assert struct.unpack(">I", png[16:20])[0] == pytest.approx(2 * width, abs=2)


def test_html_carries_its_own_scripts(tmp_path):
    html = importance(shares(1), tmp_path / "figure.HTML").read_text("utf-8")
    assert "reader-0" in html
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


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ConfigError, match=r"the path ends in '\.gif'; known: \.png, \.svg, \.html\."):
        checked_path("figure", tmp_path / "figure.gif", shares(1), ())
    with pytest.raises(DataError, match="there are no rows to draw"):
        checked_path("figure", tmp_path / "figure.png", [], ())
    rows = [*shares(1), {"reader": "a", "layer": 1}]
    with pytest.raises(DataError, match="row 4 has no 'importance'; it has reader, layer") as caught:
        importance(rows, tmp_path / "figure.png")
    assert (caught.value.row, caught.value.column) == (4, "importance")
    with pytest.raises(DataError, match="row 0 has no 'reader'; it has nothing"):
        importance([{}], tmp_path / "figure.png")


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'.*lamina\[report\]"):
        importance(shares(1), tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []
