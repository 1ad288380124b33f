"""Lines of importances over training, and what of a recipe's run is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lamina.errors import ConfigError, DataError
from lamina.report import importance_charts as figures
from lamina.report.importance_charts import draw_importances, importance_over_training, ramp
from lamina.train.results import summarise

LAYERS = (0, 1, 2)


def shares(reader: str, tilt: float = 0.0, epochs: int = 2, every: int | None = None) -> list[dict[str, Any]]:
    """Rows as a run gives them, four steps an epoch: more for layer 2 and less for layer 0 as training goes on."""
    moments: list[tuple[int | None, int]] = [(epoch, 4 * epoch) for epoch in range(1, epochs + 1)]
    if every:
        moments += [(None, step) for step in range(0, 4 * epochs + 1, every)]
    gains = {step: 0.02 * step + (tilt if step else 0) for _, step in moments}
    return [
        {
            "reader": reader,
            "epoch": epoch,
            "step": step,
            "layer": layer,
            "importance": 1 / 3 + (layer - 1) * gains[step],
        }
        for epoch, step in moments
        for layer in LAYERS
    ]


def drawn(path: Path) -> tuple[list[str], int, int]:
    """The texts of a figure, and how many lines and bands it has."""
    svg = path.read_text("utf-8")
    marks = [svg.count(f'aria-roledescription="{mark}"') for mark in ("line mark", "area mark")]
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg), marks[0], marks[1]


def spied(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the bars and of the lines that are passed on to be drawn."""
    seen: dict[str, list[dict[str, Any]]] = {}
    bars, lines = figures.importance, figures._lines
    monkeypatch.setattr(figures, "importance", lambda rows, path: seen.update(bars=rows) or bars(rows, path))
    monkeypatch.setattr(figures, "_lines", lambda alt, rows, x: seen.update(lines=rows) or lines(alt, rows, x))
    return seen


def test_a_line_per_layer_and_a_panel_per_reader(tmp_path: Path):
    rows = [*shares("one"), *shares("two")]
    texts, lines, bands = drawn(importance_over_training(rows, tmp_path / "a.svg", title="How they form"))
    assert {"How they form", "one", "two", "epoch", "importance", "0", "1", "2"} <= set(texts)
    assert (lines, bands) == (6, 0)
    assert texts.index("one") < texts.index("two")


def test_steps_are_drawn_where_they_were_taken_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = spied(monkeypatch)
    texts, lines, _ = drawn(importance_over_training(shares("one", every=2), tmp_path / "a.svg"))
    assert ("step" in texts, "epoch" in texts, lines) == (True, False, 3)
    assert sorted({row["step"] for row in seen["lines"]}) == [0, 2, 4, 6, 8]
    assert len(seen["lines"]) == 15  # none twice, though an epoch ends at steps 4 and 8


def test_runs_of_one_reader_are_their_mean_with_a_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen, tilts = spied(monkeypatch), (0.0, 0.03, 0.09)
    rows = [{**row, "run": str(tilt)} for tilt in tilts for row in shares("one", tilt)]
    _, lines, bands = drawn(importance_over_training(rows, tmp_path / "a.svg"))
    assert (lines, bands) == (3, 3)
    (last,) = (row for row in seen["lines"] if (row["epoch"], row["layer"]) == (2, 2))
    expected = summarise([1 / 3 + 0.16 + tilt for tilt in tilts])
    assert last["importance"] == pytest.approx(expected.mean)
    assert last["high"] - last["importance"] == pytest.approx(expected.interval)
    assert all(0 <= row["low"] <= row["importance"] <= row["high"] <= 1 for row in seen["lines"])


def test_the_highest_lines_are_named_at_their_end():
    rows = [
        {"reader": "a", "epoch": epoch, "layer": layer, "importance": share}
        for epoch in (1, 2)
        for layer, share in enumerate((0.4, 0.3, 0.29, 0.01))
    ]
    named = [(row["epoch"], row["layer"]) for row in figures._named(rows, "epoch") if row["name"]]
    assert named == [(2, 0), (2, 1)]  # layer 2 ends too near to layer 1


def test_colours_are_in_order_and_differ():
    assert ramp(len(figures.RAMP)) == list(figures.RAMP)
    assert (ramp(25)[0], ramp(25)[-1], len(set(ramp(25)))) == (figures.RAMP[0], figures.RAMP[-1], 25)
    assert ramp(1) == [figures.RAMP[0]]


# A recipe's run


def table_row(task: str, method: str, runs: dict[str, int | None], **settings: Any) -> dict[str, Any]:
    of_runs = [{"reader": name} | ({} if best is None else {"best_epoch": best}) for name, best in runs.items()]
    return {"task": task, "method": method, "settings": settings, "runs": of_runs}


def test_the_bars_are_those_of_the_epochs_that_were_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = spied(monkeypatch)
    table = [
        table_row("cola", "AdaLayers", {"a-0": 1, "a-1": 2}),
        table_row("cola", "last layer", {"last": 2}),
        table_row("ner", "AdaLayers", {"n-0": None}),  # written before best epochs were noted
    ]
    rows = [*shares("n-0"), *shares("a-0"), *shares("a-1", 0.06)]
    paths = draw_importances(rows, table, tmp_path)
    assert paths == [tmp_path / "importance.png", tmp_path / "importance-over-training.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    bars = {(row["reader"], row["layer"]): row for row in seen["bars"]}
    assert list(dict.fromkeys(reader for reader, _ in bars)) == ["cola: AdaLayers", "ner: AdaLayers"]
    kept = [1 / 3 + 0.08, 1 / 3 + 0.16 + 0.06]  # of layer 2: the first epoch of one run, the second of the other
    assert bars["cola: AdaLayers", 2]["importance"] == pytest.approx(sum(kept) / 2)
    assert "low" not in bars["cola: AdaLayers", 2]  # two runs are too few for an interval
    assert bars["ner: AdaLayers", 2]["importance"] == pytest.approx(1 / 3 + 0.16)
    assert "low" not in bars["ner: AdaLayers", 2]


def test_of_a_grid_the_best_setting_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = spied(monkeypatch)
    table = [
        table_row("cola", "AdaLayers", {"a-8": 2}, **{"fusion.alpha": 8}),
        table_row("cola", "AdaLayers", {"a-1": 2}, **{"fusion.alpha": 1}),
    ]
    draw_importances([*shares("a-1", 0.1), *shares("a-8")], table, tmp_path)
    assert (
        {row["reader"] for row in seen["bars"]} == {"AdaLayers, fusion.alpha=8"} == {r["reader"] for r in seen["lines"]}
    )
    assert seen["bars"][2]["importance"] == pytest.approx(1 / 3 + 0.16)


def test_steps_after_the_epoch_that_was_kept_change_no_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = spied(monkeypatch)
    draw_importances(shares("a", every=1), [table_row("cola", "Ada", {"a": 1})], tmp_path)
    assert [row["importance"] for row in seen["bars"]] == pytest.approx([1 / 3 - 0.08, 1 / 3, 1 / 3 + 0.08])


def test_there_may_be_nothing_to_draw(tmp_path: Path):
    assert draw_importances([], [table_row("cola", "last layer", {"last": 2})], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_rows_and_paths_that_cannot_be_drawn(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"importance figure: the path ends in '\.gif'"):
        importance_over_training(shares("a"), tmp_path / "a.gif")
    with pytest.raises(DataError, match="importance figure: there are no rows to draw"):
        importance_over_training([], tmp_path / "a.png")
    with pytest.raises(DataError, match="row 0 has no 'importance'"):
        importance_over_training([{"reader": "a", "epoch": 1, "layer": 0}], tmp_path / "a.png")
