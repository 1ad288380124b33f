"""Tables of what was trained, sorted by what is better, the same in Parquet, and means of repeated runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from lamina.errors import ConfigError
from lamina.tasks.metrics import score_numbers
from lamina.train.results import (
    IMPORTANCES,
    FitResult,
    independent,
    sort_key,
    sorted_rows,
    summarise,
    tied,
    write_parquet,
)
from lamina.utils import write_text


def test_values_that_are_shown_alike_are_tied_whatever_their_sign():
    assert tied({1: -0.0002, 2: 0.0001, 3: 0.5}, -0.0002, ".3f") == [1, 2]
    assert tied({1: 4, 2: 5, 3: 4}, 4, ".0f") == [1, 3]


def test_rows_best_first_task_by_task():
    scores = {"cola_0001": 0.5, "cola_0002": 0.9, "cola_0003": 0.1, "rte": 0.7}
    rows = [
        {"task": name.partition("_")[0], "reader": name, "metric": "accuracy", "score": score}
        for name, score in scores.items()
    ]
    assert [row["reader"] for row in sorted_rows(rows)] == ["cola_0002", "cola_0001", "cola_0003", "rte"]


def test_less_perplexity_is_better():
    assert sorted([3.0, 4.0, 2.0], key=lambda score: sort_key("perplexity", score)) == [2.0, 3.0, 4.0]
    assert sorted([3.0, 4.0, 2.0], key=lambda score: sort_key("span_f1", score)) == [4.0, 3.0, 2.0]


def read(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


def test_parquet_has_a_column_per_nested_field_and_null_where_a_row_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [{"reader": "a", "n": 1, "importances": {1: 0.25, 2: 0.75}}, {"reader": "b", "n": 2, "importances": {}}]
    write_parquet(rows, tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == [
        {"reader": "a", "n": 1, "importances.1": 0.25, "importances.2": 0.75},
        {"reader": "b", "n": 2, "importances.1": None, "importances.2": None},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    monkeypatch.chdir(tmp_path)
    write_parquet(rows, Path("~") / "t.parquet")
    assert (tmp_path / "~" / "t.parquet").is_file()  # and not in the user's folder, as pyarrow has it


@pytest.mark.parametrize(
    ("cells", "written"),
    [
        ([1, 0.5, None], [1.0, 0.5, None]),
        ([1, "1-", None], ["1", "1-", None]),
        ([[1, 2], [3], None], ["[1, 2]", "[3]", None]),
        ([True, False], [True, False]),
        ([True, 2], ["True", "2"]),
        ([None, None], [None, None]),
    ],
)
def test_a_column_has_one_type(cells: list[Any], written: list[Any], tmp_path: Path):
    write_parquet([{"layers": cell} for cell in cells], tmp_path / "t.parquet")
    assert [row["layers"] for row in read(tmp_path / "t.parquet")] == written


def test_a_table_without_rows_has_its_columns(tmp_path: Path):
    write_parquet([], tmp_path / "t.parquet", IMPORTANCES)
    assert parquet.read_table(tmp_path / "t.parquet").column_names == list(IMPORTANCES)
    assert IMPORTANCES == ("reader", "epoch", "step", "layer", "importance")


def test_a_write_that_ends_early_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def half(_table: object, path: Path) -> None:
        path.write_bytes(b"PAR1")
        raise OSError("no space left")

    write_parquet([{"a": 1}], tmp_path / "t.parquet")
    monkeypatch.setattr(parquet, "write_table", half)
    with pytest.raises(OSError, match="no space left"):
        write_parquet([{"a": 2}], tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == [{"a": 1}]
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_a_text_that_is_written_in_part_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def half(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text.encode()[:2])
        raise OSError("no space left")

    write_text(tmp_path / "history.json", "[1]")
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        write_text(tmp_path / "history.json", "[1, 2]")
    assert (tmp_path / "history.json").read_bytes() == b"[1]"
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


def test_five_values_by_hand():
    found = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.count, found.mean) == (5, 3.0)
    assert found.spread == pytest.approx(math.sqrt(2.5))
    assert found.interval == pytest.approx(2.7764 * math.sqrt(2.5) / math.sqrt(5), rel=1e-4)


@pytest.mark.parametrize(("confidence", "quantile"), [(0.95, 12.7062), (0.9, 6.3138), (0.99, 63.6567)])
def test_two_values_at_several_confidences(confidence: float, quantile: float):
    assert summarise([0.0, 2.0], confidence=confidence).interval == pytest.approx(quantile, rel=1e-4)


def test_runs_of_one_subsample_are_averaged_before_the_interval():
    scores, repeats = [0.1, 0.5, 0.3, 0.7], [0, 1, 0, 1]  # two seeds for each of two subsamples
    assert independent(scores, repeats) == pytest.approx([0.2, 0.6])
    assert independent(scores, [0, 1, 2, 3]) == scores  # one seed
    assert independent(scores, [None] * 4) == independent(scores, [0] * 4) == scores  # no subsample, or a single one
    assert independent(scores[:3], repeats[:3]) == pytest.approx([0.2, 0.5])  # a run is missing


def test_many_values_come_near_the_normal_distribution():
    found = summarise([(-1.0) ** i for i in range(4000)])
    assert found.interval == pytest.approx(1.96 / math.sqrt(4000), rel=2e-3)


def test_one_value_has_no_interval():
    found = summarise([0.5])
    assert (found.count, found.mean, found.spread, found.interval) == (1, 0.5, 0.0, None)


def test_equal_values_have_an_interval_of_no_width():
    assert summarise([0.5, 0.5, 0.5]).interval == 0


def test_two_values_have_an_interval_that_is_not_shown():
    pair = summarise([0.5, 0.7])
    assert pair.interval is not None
    assert pair.shown_interval is None
    three = summarise([0.5, 0.7, 0.6])
    assert three.shown_interval == three.interval
    assert summarise([0.5]).shown_interval is None


@pytest.mark.parametrize("others", [1, 2])
def test_errors_of_diverged_runs_have_a_finite_interval(others: int):
    worst = score_numbers(("mae",), [math.nan], [1.0])["mae"]
    assert summarise([worst] * 2 * others).interval == 0
    found = summarise([worst] + [0.3] * others)
    assert found.interval is not None
    assert math.isfinite(found.interval)


def test_no_value():
    with pytest.raises(ConfigError, match="there are no values; at least one is needed"):
        summarise([])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_of_several_values_all_are_finite(value: float):
    with pytest.raises(ConfigError, match=f"summarise: 2 of 3 values are not finite, the first is {value}; a spread n"):
        summarise([0.5, value, -math.inf])


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_a_confidence_that_cannot_be(confidence: float):
    with pytest.raises(ConfigError, match=r"it must be above 0 and below 1, such as 0\.95"):
        summarise([1.0, 2.0], confidence=confidence)


def test_the_print_of_a_result_has_no_row_per_epoch():
    rows = [{"reader": "mood", "epoch": epoch, "accuracy": 0.5} for epoch in range(100)]
    result = FitResult(best={"mood": {"epoch": 1}}, history=rows, importances=rows, table=rows, steps=7)
    counts = "truncated={}, baselines={}, unlabelled={}, test={}, steps=7"
    assert repr(result).startswith(f"FitResult(best={{'mood': {{'epoch': 1}}}}, {counts}")
