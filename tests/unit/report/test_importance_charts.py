"""Lines of importances over training, and what of a recipe's run is drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lamina.errors import ConfigError, DataError
from lamina.report.charts import RULE, Drawing
from lamina.report.importance_charts import (
    FINAL,
    MOST_BARS,
    TRAINING,
    draw_importances,
    importance,
    importance_drawings,
    importance_over_training,
)
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


def marks(drawing: Drawing) -> list[dict[str, Any]]:
    """The rows of a chart without its lines of reference."""
    return [row for row in drawing.rows if row.get("mark") != RULE]


@pytest.mark.parametrize("readers", [1, MOST_BARS, MOST_BARS + 1])
def test_importance_shows_every_reader_and_layer(tmp_path: Path, readers: int):
    rows = [row for number in range(readers, 0, -1) for row in shares(f"reader-{number}", epochs=1)]
    path = importance(rows, tmp_path / "figure.svg")
    texts, *_ = drawn(path)
    assert {"Which layers each reader uses", "layer (0 = embeddings)", "share of the layer"} <= set(texts)
    named = [text for text in texts if text.startswith("reader-")]
    assert named == [f"reader-{number}" for number in range(readers, 0, -1)]
    bars = re.findall(r'aria-roledescription="(?:bar|rect mark)"', path.read_text("utf-8"))
    assert len(bars) == 3 * readers
    # Bars have a line at equal shares, the cells of a heat map have numbers.
    expected = {"1/3": readers, "0.41": 0} if readers <= MOST_BARS else {"1/3": 0, "0.41": readers}
    assert {text: texts.count(text) for text in expected} == expected


def test_numbers_of_numpy_are_drawn_as_those_of_python(tmp_path: Path):
    rows = [{"reader": "one", "layer": layer, "importance": share} for layer, share in enumerate([0.25, 0.75])]
    numpy = [{**row, "layer": np.int64(row["layer"]), "importance": np.float32(row["importance"])} for row in rows]
    first, second = drawn(importance(rows, tmp_path / "a.svg")), drawn(importance(numpy, tmp_path / "b.svg"))
    assert first == second


def test_a_line_per_layer_and_a_panel_per_reader(tmp_path: Path):
    rows = [*shares("one"), *shares("two")]
    texts, lines, bands = drawn(importance_over_training(rows, tmp_path / "a.svg", title="How they form"))
    assert {"How they form", "one", "two", "epoch", "share of the layer", "0", "1", "2"} <= set(texts)
    assert (lines, bands) == (6, 0)
    assert texts.index("one") < texts.index("two")


def test_steps_are_drawn_where_they_were_taken_down():
    lines = importance_drawings(shares("one", every=2), [table_row("cola", "Ada", {"one": 2})])[TRAINING]
    assert lines.titles["x"] == "step"
    assert sorted({row["x"] for row in lines.rows}) == [0, 2, 4, 6, 8]
    assert len(lines.rows) == 15  # none twice, though an epoch ends at steps 4 and 8


def test_runs_of_one_reader_are_their_mean_with_a_band(tmp_path: Path):
    tilts = {"a-0": 0.0, "a-1": 0.03, "a-2": 0.09}
    rows = [row for run, tilt in tilts.items() for row in shares(run, tilt)]
    two = table_row("cola", "Two", {"b-0": 2, "b-1": 2})
    both = [*rows, *shares("b-0"), *shares("b-1")]
    drawings = importance_drawings(both, [table_row("cola", "Ada", dict.fromkeys(tilts, 2)), two])
    interval = "Mean of 2 to 3 runs, with its 95 % confidence interval; fewer than 3 give no interval"
    assert [drawing.remark for drawing in drawings.values()] == [interval] * 2
    lines = [row for row in drawings[TRAINING].rows if row["facet"] == "Ada"]
    (last,) = (row for row in lines if (row["x"], row["colour"]) == (2, 2))
    expected = summarise([1 / 3 + 0.16 + tilt for tilt in tilts.values()])
    assert last["value"] == pytest.approx(expected.mean)
    assert last["high"] - last["value"] == pytest.approx(expected.interval)
    assert all(0 <= row["low"] <= row["value"] <= row["high"] <= 1 for row in lines)
    of_one = [{**row, "reader": "a"} for row in rows]
    assert drawn(importance_over_training(of_one, tmp_path / "a.svg"))[1:] == (3, 3)


def test_seeds_of_one_subsample_are_averaged_before_the_band():
    repeats = {"a-0-0": 0, "a-0-1": 1, "a-0-2": 2, "a-1-0": 0, "a-1-1": 1, "a-1-2": 2}
    tilts = dict(zip(repeats, (0.0, 0.03, 0.09, 0.02, 0.05, 0.05), strict=True))
    row = table_row("cola", "Ada", dict.fromkeys(repeats, 2))
    row["runs"] = [{**run, "repeat": repeats[run["reader"]]} for run in row["runs"]]
    drawings = importance_drawings([row for run, tilt in tilts.items() for row in shares(run, tilt)], [row])
    assert {drawing.remark for drawing in drawings.values()} == {
        "Mean of 3 subsamples, with its 95 % confidence interval"
    }
    (last,) = (row for row in drawings[TRAINING].rows if (row["x"], row["colour"]) == (2, 2))
    expected = summarise([1 / 3 + 0.16 + tilt for tilt in (0.01, 0.04, 0.07)])
    assert (last["value"], last["high"] - last["value"]) == pytest.approx((expected.mean, expected.interval))


# A recipe's run


def table_row(task: str, method: str, runs: dict[str, int | None], **settings: Any) -> dict[str, Any]:
    of_runs = [{"reader": name} | ({} if best is None else {"best_epoch": best}) for name, best in runs.items()]
    return {"task": task, "method": method, "settings": settings, "runs": of_runs}


def test_the_bars_are_those_of_the_epochs_that_were_kept(tmp_path: Path):
    table = [
        table_row("cola", "AdaLayers", {"a-0": 1, "a-1": 2}),
        table_row("cola", "last layer", {"last": 2}),
        table_row("ner", "AdaLayers", {"n-0": None}),  # written before best epochs were noted
    ]
    rows = [*shares("n-0"), *shares("a-0"), *shares("a-1", 0.06)]
    paths = draw_importances(rows, table, tmp_path)
    assert paths == [tmp_path / "importance.png", tmp_path / "importance-over-training.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    bars = {(row["facet"], row["x"]): row for row in marks(importance_drawings(rows, table)[FINAL])}
    assert list(dict.fromkeys(reader for reader, _ in bars)) == ["cola: AdaLayers", "ner: AdaLayers"]
    kept = [1 / 3 + 0.08, 1 / 3 + 0.16 + 0.06]  # of layer 2: the first epoch of one run, the second of the other
    assert bars["cola: AdaLayers", 2]["value"] == pytest.approx(sum(kept) / 2)
    assert "low" not in bars["cola: AdaLayers", 2]  # two runs are too few for an interval
    assert bars["ner: AdaLayers", 2]["value"] == pytest.approx(1 / 3 + 0.16)
    assert "low" not in bars["ner: AdaLayers", 2]
    remarks = {drawing.remark for drawing in importance_drawings(rows, table).values()}
    assert remarks == {"Mean of 1 to 2 runs; fewer than 3 give no interval"}


def test_of_a_grid_the_best_setting_is_drawn():
    table = [
        table_row("cola", "AdaLayers", {"a-8": 2}, **{"fusion.alpha": 8}),
        table_row("cola", "AdaLayers", {"a-1": 2}, **{"fusion.alpha": 1}),
    ]
    drawings = importance_drawings([*shares("a-1", 0.1), *shares("a-8")], table)
    assert {drawing.panels[0] for drawing in drawings.values()} == {"AdaLayers, fusion.alpha=8"}
    assert [len(drawing.panels) for drawing in drawings.values()] == [1, 1]
    assert marks(drawings[FINAL])[2]["value"] == pytest.approx(1 / 3 + 0.16)


def test_steps_after_the_epoch_that_was_kept_change_no_bar():
    bars = importance_drawings(shares("a", every=1), [table_row("cola", "Ada", {"a": 1})])[FINAL]
    assert [row["value"] for row in marks(bars)] == pytest.approx([1 / 3 - 0.08, 1 / 3, 1 / 3 + 0.08])


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
