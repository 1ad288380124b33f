"""benchmarks/frontier.py: all rows of a task, and one run of a method that draws nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lamina import Reader
from lamina.train.results import summarise

ROOT = Path(__file__).parents[2]


@pytest.fixture
def frontier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield import_module("frontier")
    for name in ("frontier", "frontier_tables", "rivals", "common"):
        sys.modules.pop(name, None)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "cola").mkdir()
    for part, count in (("train", 40), ("dev", 10)):
        lines = [f"x\t{row % 2}\t\t{('apples fall', 'fall apples them')[row % 2]} {row}\n" for row in range(count)]
        (tmp_path / "cola" / f"{part}.tsv").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def test_all_rows_lift_the_limit_of_a_task(frontier: Any, data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(frontier.TASKS, "cola", {"rows": 20})
    for text, count in ((None, 20), ("10", 10), ("all", 40)):
        rows = None if text is None else frontier.row_limit(text)
        task = frontier.limited(data, "cola", rows=rows, scored=None)
        assert len(task.split("train")) + len(task.split("validation")) == count


def test_a_run_without_any_result_ends_in_one_sentence(
    frontier: Any, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folders = ("--data", str(data / "lost"), "--output", str(data / "out"))
    monkeypatch.setattr(sys, "argv", ["frontier.py", "--tasks", "cola", "--methods", "default", *folders])
    with pytest.raises(SystemExit, match="frontier: every run failed, as listed above, so there is no table"):
        frontier.main()
    assert "failed: {'task': 'cola'" in capsys.readouterr().out


def test_rates_replace_the_grid_of_a_rival(
    frontier: Any, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runs: list[tuple[int, str]] = []

    def tuned(_task: object, *, seed: int, only: str, **_: object) -> dict[str, Any]:
        runs.append((seed, only))
        return {"variant": only, "score": 0.5, "held out": 0.5, "trained": 1, "stored": 1, "seconds": 1.0}

    monkeypatch.setitem(frontier.METHODS, frontier.TUNED, tuned)
    options = ("--methods", frontier.TUNED, "--seeds", "1", "2", "--rates", "2e-5", "--repeats", "0")
    folders = ("--data", str(data), "--output", str(data / "out"))
    monkeypatch.setattr(sys, "argv", ["frontier.py", "--tasks", "cola", *options, *folders])
    frontier.main()
    assert runs == [(1, "rate 2e-05"), (2, "rate 2e-05")]


@pytest.mark.long
def test_a_regression_runs_once_a_reader_with_every_seed_and_neither_twice(
    frontier: Any, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runs: list[tuple[int, object]] = []

    def trained(_task: object, *, seed: int, states: object, **_: object) -> dict[str, Any]:
        runs.append((seed, states))
        return {"variant": "one", "score": 0.5, "held out": 0.5, "trained": 1, "stored": 1, "seconds": 1.0}

    monkeypatch.setitem(frontier.METHODS, "default", trained)
    names = ("--methods", "default", *frontier.REGRESSIONS, "--seeds", "0", "1", "--repeats", "0", "--json")
    folders = ("--data", str(data), "--output", str(data / "out"), "--states", str(data / "states"))
    monkeypatch.setattr(sys, "argv", ["frontier.py", "--tasks", "cola", "--rows", "all", *names, *folders])
    for _ in range(2):
        frontier.main()
    assert runs == [(0, data / "states"), (1, data / "states")]
    rows, _ = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    assert [(row["method"], row["seeds"]) for row in rows] == [
        ("default", 2),
        *((one, 1) for one in frontier.REGRESSIONS),
    ]
    assert [row["trained"] for row in rows[1:]] == [2 * 384, 2 * 7 * 384]


def test_scores_without_spread_have_a_lead_and_runs_are_put_together(frontier: Any):
    """A reader that always gives one class has a correlation of 0 with every seed."""
    columns = ["task", "method", "seeds", "score", "±"]
    rows = [["cola", "default", 3, 0.25, 0.05], ["cola", "last layer", 3, 0.0, 0.0]]
    rows += [["cola", "LoRA", 1, 0.2, None], ["cola", "LoRA", 2, 0.3, 0.0], ["sst2", "default", 3, 0.5, 0.0]]
    rows += [["sst2", "LoRA", 3, 0.4, 0.0]]
    found = frontier.recorded(frontier.pd.DataFrame(rows, columns=columns), {})
    assert [(row["seeds"], round(row["score"], 4)) for row in found[:3]] == [(3, 0.25), (3, 0.0), (3, 0.2667)]
    assert found[2]["±"] == pytest.approx(summarise([0.2, 0.3, 0.3]).interval)
    _, leads, *_ = frontier.tables(found)
    by_method = {row["default minus"]: row for row in leads}
    assert by_method["last layer"]["cola"] == "+0.250 ± 0.050"
    assert by_method["LoRA"]["sst2"] == "+0.100 ± 0.000"


def test_the_timed_readers_are_those_of_the_scored_tasks(frontier: Any, monkeypatch: pytest.MonkeyPatch):
    fusions = {name: type(Reader.default(frontier._stand_in(name)).fusion).__name__ for name in frontier.TASKS}
    pairs = dict.fromkeys(("mrpc", "rte", "stsb", "qnli"), "PairedLayers")
    assert fusions == dict.fromkeys(("cola", "sst2", "imdb"), "PooledLayers") | pairs | {"conll2003": "Concat"}
    assert frontier._stand_in("stsb").problem_type == "regression"
    assert len(frontier._stand_in("conll2003").labels) == 9
    timed: list[str] = []
    variants = frontier._variants

    def noted(name: str, task: Any) -> Any:
        timed.append(task.problem_type if task.kind == "sequence_classification" else str(task.kind))
        return variants(name, task)

    monkeypatch.setattr(frontier, "_variants", noted)
    times = frontier._answering(["default"], ["cola", "stsb", "conll2003"], 1)
    assert set(times) >= {"base", "default", frontier.TUNED}
    kinds = ["classification", "regression", "token_classification"]
    assert timed == [*kinds, *kinds, *kinds[:2]]
