"""A sweep trains every member as it would be trained alone, and a member that has stopped costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest
import torch
from tests.support.training import reader, tiny_bank, yes_no

from lamina import fit
from lamina.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

GRID = {"fusion.dim": [4, 8], "fusion.alpha": [1.0, 8.0], "fusion.entropy": [0.0, 0.1], "learning_rate": [1e-3, 3e-3]}
OPTIONS: dict[str, Any] = {"epochs": 5, "batch_size": 8, "progress": False, "early_stopping_patience": 2}


def without_key_bias(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An attention's key bias has no true gradient; Adam follows the rounding there."""
    found = {}
    for key, value in weights.items():
        parts = value.clone().chunk(3) if key.endswith("attention.bias") else (value,)
        found[key] = torch.cat([parts[0], *parts[2:]])
    return found


def test_a_member_learns_what_it_learns_alone():
    task = yes_no(train=60)
    sweep = tiny_bank({"r": reader(task)})
    result = fit(sweep, {"r": task}, grid={"r": GRID}, **OPTIONS)
    assert len(sweep) == 16
    assert "r" not in sweep
    stops = set()
    for name in list(sweep)[::15]:  # every value of every key is among these
        settings = next(row for row in result.table if row["reader"] == name)
        alone = tiny_bank({"r": sweep[name].config})
        rate = settings["learning_rate"]
        single = fit(alone, {"r": task}, **{**OPTIONS, "learning_rate": rate})
        stops.add(max(row["epoch"] for row in single.history))
        assert single.best["r"]["epoch"] == result.best[name]["epoch"]
        ours, theirs = without_key_bias(sweep[name].state_dict()), without_key_bias(alone["r"].state_dict())
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=0, atol=1e-4, msg=f"{name} {key}")
    assert len(stops) > 1  # some stopped early, others went on beside them


def test_a_member_that_has_stopped_is_not_run(monkeypatch: pytest.MonkeyPatch):
    task = yes_no(train=24)
    bank = tiny_bank({"r": reader(task)})
    seen: list[tuple[str, ...]] = []
    forward = type(bank).forward

    def watched(self: Any, **kwargs: Any) -> Any:
        if self.training:
            seen.append(tuple(kwargs["readers"]))
        return forward(self, **kwargs)

    monkeypatch.setattr(type(bank), "forward", watched)
    fit(bank, {"r": task}, grid={"r": {"epochs": [1, 3], "seed": [0, 1]}}, batch_size=8, cache="off", progress=False)
    assert seen == [("r_0001", "r_0002", "r_0003", "r_0004")] * 3 + [("r_0003", "r_0004")] * 6


def test_the_table_is_sorted_and_saved(tmp_path: Path):
    task = yes_no()
    bank = tiny_bank({"r": reader(task), "other": reader(task)})
    grid = {"r": {"alpha": [1.0, 64.0], "seed": [0, 1]}}
    result = fit(bank, {"r": task, "other": task}, grid=grid, output=tmp_path, epochs=2, progress=False)
    swept = [row for row in result.table if row["task"] == "r"]
    assert [row["score"] for row in swept] == sorted((row["score"] for row in swept), reverse=True)
    assert {(row["fusion.alpha"], row["seed"]) for row in swept} == {(1.0, 0), (1.0, 1), (64.0, 0), (64.0, 1)}
    written = pyarrow.parquet.read_table(tmp_path / "table.parquet").to_pylist()
    assert [row["reader"] for row in written] == [row["reader"] for row in result.table]
    assert written[0]["importances.1"] == pytest.approx(result.table[0]["importances"][1])
    history = pyarrow.parquet.read_table(tmp_path / "importances.parquet").to_pylist()
    assert len(history) == 5 * 2 * 3  # readers, epochs, layers


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        ({"r": {"fusion.depth": [1]}}, UnknownNameError, "fusion.alpha"),
        ({"x": {"seed": [1]}}, UnknownNameError, "'x'"),
        ({"r": {"fusion.cutoff": [0.0, 0.5]}}, ConfigError, "would remove every layer"),
        ({"r": {"fusion.alpha": []}}, ConfigError, "no values"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_training(grid: Any, error: type[Exception], message: str):
    bank = tiny_bank({"r": reader()})
    with pytest.raises(error, match=message):
        fit(bank, {"r": yes_no()}, grid=grid, progress=False)
    assert list(bank) == ["r"]
