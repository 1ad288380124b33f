"""The report of a folder: written all at once or not at all, and anew over an older one."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lamina.errors import ConfigError, MissingExtraError, StoreError, UnknownNameError
from lamina.recipes.report_file import (
    REPORT,
    Cell,
    Curves,
    PivotTable,
    Point,
    Report,
    read_report_file,
    write_report_file,
)
from lamina.report import run_report as reports
from lamina.report import write_report
from lamina.store.files import claimed


def reported(figures: int = 2) -> Report:
    table = PivotTable("t", "validation", ["a"], ["b"], [Cell("a", "b", "f1", 0.5, 0.0, None, 1, {})])
    curve = Curves("f", "validation", "k", [Point("", "a", x, "f1", 0.1 * x, 0.0, 0.1, 2, {}) for x in (1, 2)])
    return Report([table], [curve] * figures)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_report_file(tmp_path / REPORT, reported())
    (tmp_path / "table.json").write_text("[]")
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_tables_and_figures_are_written_and_listed(run: Path):
    written = write_report(run)
    assert written.files == ["report.md", "report.tex", "figure-1.png", "figure-2.png"]
    assert names(run) == {"table.json", REPORT, *written.files}
    assert read_report_file(run) == written
    assert "![f](figure-2.png)" in (run / "report.md").read_text()
    assert (run / "report.tex").read_text().count(r"\toprule") == 1


def test_a_page_is_linked_and_not_shown_as_an_image(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reports, "draw_curves", lambda _figure, path: path.write_text(""))
    monkeypatch.setattr(reports, "draw_importances", lambda *_: [Path("importance.html"), Path("importance.png")])
    write_report(run, ["html", "png"])
    lines = (run / "report.md").read_text().splitlines()
    linked = ["[f](figure-1.html)", "[f](figure-2.html)", "[Importance of layers](importance.html)"]
    assert [line for line in lines if "](" in line] == linked
    write_report(run, ["png", "html"])
    lines = (run / "report.md").read_text().splitlines()
    shown = ["![f](figure-1.png)", "![f](figure-2.png)", "![Importance of layers](importance.png)"]
    assert [line for line in lines if "](" in line] == shown


@pytest.mark.long
def test_an_older_report_goes_with_its_figures_alone(run: Path):
    write_report(run, ["png", "svg"])
    (run / "figure-7.png").write_bytes(b"mine")
    write_report(run, ["html"])
    listed = {"report.md", "report.tex", "figure-1.html", "figure-2.html"}
    assert names(run) == {"table.json", REPORT, "figure-7.png", *listed}
    write_report(run, [])
    assert names(run) == {"table.json", REPORT, "figure-7.png", "report.md", "report.tex"}
    assert "figure" not in (run / "report.md").read_text()


def test_figures_of_other_runs_are_drawn_beside(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        reports, "draw_curves", lambda figure, path: (drawn.append(series(figure)), path.write_text(""))[0]
    )
    other = tmp_path / "other"
    curve = reported().figures[0]
    points = [replace(point, series="large") for point in curve.points]
    write_report_file(other / REPORT, replace(reported(), figures=[replace(curve, points=points)]))
    report = write_report(run, beside=[other])
    assert drawn == [["a", "large"], ["a"]]
    assert report.figures == reported().figures == read_report_file(run).figures
    write_report_file(other / REPORT, reported(1))
    write_report(run, beside=[other])
    assert drawn[2:] == [[f"a, {run.name}", "a, other"], ["a"]]


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        reports, "draw_curves", lambda figure, path: (drawn.append(series(figure)), path.write_text(""))[0]
    )
    for place in ("one", "two"):
        write_report_file(tmp_path / place / run.name / REPORT, reported(1))
    write_report(run, beside=[tmp_path / "one" / run.name, tmp_path / "two" / run.name])
    assert drawn[0] == [f"a, {place}/{run.name}" for place in (run.parent.name, "one", "two")]
    with pytest.raises(ConfigError, match=r"report: .* is given twice"):
        write_report(run, beside=[run])


def series(figure: Curves) -> list[str]:
    return list(dict.fromkeys(point.series for point in figure.points))


def test_a_figure_without_points_is_left_out(run: Path):
    report = reported()
    write_report_file(run / REPORT, replace(report, figures=[replace(report.figures[0], points=[]), *report.figures]))
    assert write_report(run).files == ["report.md", "report.tex", "figure-2.png", "figure-3.png"]


def test_a_report_that_fails_leaves_the_old_one(run: Path, monkeypatch: pytest.MonkeyPatch):
    write_report(run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(reports, "latex", fail)
    with pytest.raises(StoreError, match=r"cannot be written \(disk full\); nothing in it was changed"):
        write_report(run, ["svg"])
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_what_cannot_be_reported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnknownNameError, match="report: unknown format 'gif'; known: png, svg, html"):
        write_report(run, ["gif"])
    with pytest.raises(StoreError, match=r"report: .*none holds no report\.json"):
        write_report(tmp_path / "none")
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lamina\[report\]'|lamina\[report\]"):
        write_report(run)
    assert names(run) == {"table.json", REPORT}


@pytest.mark.usefixtures("impatient")
def test_a_folder_that_another_run_writes_is_refused(run: Path):
    import threading

    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with claimed(run):
            held.set()
            go_on.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(StoreError, match="is being written by another run"):
            write_report(run)
    finally:
        go_on.set()
        thread.join()
