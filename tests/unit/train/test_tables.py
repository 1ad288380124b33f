"""Tables of readers: sorted by what is better, and the same in Parquet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lamina.train.tables import IMPORTANCES, sort_key, table, write_parquet
from pyarrow import parquet
from tests.support.training import reader, tiny_bank, yes_no

from lamina.bank import ReaderBank
from lamina.train.fit import FitResult
from lamina.train.grid import Member, expand_into
from lamina.train.options import FitOptions


@pytest.fixture
def bank() -> ReaderBank:
    return tiny_bank({"cola": reader(yes_no()), "rte": reader(yes_no())})


def result(scores: dict[str, float], metric: str = "accuracy", epochs: int = 2) -> FitResult:
    """Scores of readers that all ran so many epochs, and were best in the first."""
    history = [{"reader": name, "epoch": epoch, metric: 0.1} for name in scores for epoch in range(1, epochs + 1)]
    return FitResult({name: {"epoch": 1, metric: score} for name, score in scores.items()}, history, [])


def test_rows_best_first_task_by_task(bank: ReaderBank):
    tasks = {"cola": yes_no(), "rte": yes_no()}
    found = expand_into(bank, tasks, {"cola": {"alpha": [1.0, 2.0, 3.0]}}, FitOptions(epochs=5))
    scores = {"cola_0001": 0.5, "cola_0002": 0.9, "cola_0003": math.nan, "rte": 0.7}
    rows = table(found.members, result(scores), found.tasks, bank)
    assert [(row["task"], row["reader"]) for row in rows] == [
        ("cola", "cola_0002"),
        ("cola", "cola_0001"),
        ("cola", "cola_0003"),
        ("rte", "rte"),
    ]
    best = rows[0]
    assert best["importances"] == pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3})
    assert {key: value for key, value in best.items() if key != "importances"} == {
        "task": "cola",
        "reader": "cola_0002",
        "fusion.alpha": 2.0,
        "metric": "accuracy",
        "score": 0.9,
        "best_epoch": 1,
        "epochs_run": 2,
        "stopped": True,
        "parameters": bank["cola_0002"].size(),
    }


def test_a_reader_that_ran_to_its_end_did_not_stop(bank: ReaderBank):
    members = {"rte": Member("rte", bank["rte"].config, epochs=2, template="rte")}
    (row,) = table(members, result({"rte": 0.5}), {"rte": yes_no()}, bank)
    assert (row["epochs_run"], row["stopped"]) == (2, False)


def test_less_perplexity_is_better():
    assert sorted([3.0, math.nan, 2.0], key=lambda score: sort_key("perplexity", score))[:2] == [2.0, 3.0]
    assert sorted([3.0, math.nan, 2.0], key=lambda score: sort_key("span_f1", score))[:2] == [3.0, 2.0]
    assert sort_key("perplexity", math.nan) == sort_key("span_f1", math.nan) == math.inf


def read(path: Path) -> list[dict[str, Any]]:
    return parquet.read_table(path).to_pylist()


def test_parquet_has_a_column_per_nested_field_and_null_where_a_row_has_none(tmp_path: Path):
    rows = [{"reader": "a", "n": 1, "importances": {1: 0.25, 2: 0.75}}, {"reader": "b", "n": 2, "importances": {}}]
    write_parquet(rows, tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == [
        {"reader": "a", "n": 1, "importances.1": 0.25, "importances.2": 0.75},
        {"reader": "b", "n": 2, "importances.1": None, "importances.2": None},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


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
    assert parquet.read_table(tmp_path / "t.parquet").column_names == ["reader", "epoch", "layer", "importance"]


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
