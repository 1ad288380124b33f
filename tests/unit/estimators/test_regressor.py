from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lamina
from lamina.errors import ConfigError, DataError
from lamina.estimators.predictors import LaminaRegressor
from lamina.estimators.transformer import LaminaTransformer

FAST = {"learning_rate": 0.05, "epochs": 20, "batch_size": 4, "options": {"cache": "off"}}


def test_numbers_of_any_size_are_learnt_and_said_by_the_bank_too(base: str, texts: list[str]):
    y = np.array([5010.0, 5200.0] * 4)
    fitted = LaminaRegressor(base, **FAST).fit(texts, y)
    said = fitted.predict(texts)
    assert said.dtype == np.float64
    assert fitted.score(texts, y) > 0.9
    with pytest.raises(DataError, match=r"^LaminaRegressor\.score: .* \[7, 8\]"):
        fitted.score(texts, y[:7])
    alone = lamina.predict(fitted.bank_, texts[:1])[0]["reader"]["value"]
    np.testing.assert_allclose(alone, said[0], rtol=1e-6)


def test_what_the_head_says_beside_its_weights_is_put_to_the_scale_of_y(
    base: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    def train(self: Any, bank: lamina.ReaderBank, task: Any, seed: int, targets: Any) -> None:
        output: Any = bank["reader"].head.output
        torch.nn.init.zeros_(output.weight)
        torch.nn.init.constant_(output.bias, 0.5)
        self.bank_ = bank.eval()

    monkeypatch.setattr(LaminaRegressor, "_train", train)
    said = LaminaRegressor(base).fit(texts, [5010.0, 5200.0] * 4).predict(texts[:2])
    assert said.tolist() == [5105 + 0.5 * 95] * 2


@pytest.mark.parametrize("estimator", [LaminaRegressor, LaminaTransformer])
def test_errors_have_the_units_of_y(base: str, texts: list[str], estimator: Any):
    y = np.array([5010.5, 5200.5] * 4)
    reader = {"fusion": lamina.PooledLayers(dim=6)} if estimator is LaminaTransformer else {}
    fitted = estimator(base, **{**FAST, "epochs": 2}, validation_fraction=0.5, **reader).fit(texts, y)
    result, (module,) = fitted.result_, fitted.bank_.readers.values()
    results, _ = result.results["reader"]
    _, held_out = results._both()
    assert set(held_out.tolist()) <= {5010.5, 5200.5}
    mae = float((results.logits[:, 0] - held_out).abs().mean())
    assert result.best["reader"]["mae"] == pytest.approx(mae, rel=1e-4)
    assert 20 < mae < 2000
    assert [row["mae"] for row in result.history][result.best["reader"]["epoch"] - 1] == result.best["reader"]["mae"]
    assert result.table[0]["mae"] == module.info["scores"]["mae"] == result.best["reader"]["mae"]
    assert 5000 <= float(result.baselines["reader"]["always"]) <= 5210
    assert 0 <= result.baselines["reader"]["mae"] <= 190
    low, high = result.intervals["reader"]["mae"]
    assert low <= mae <= high
    if estimator is LaminaRegressor:
        said = fitted.predict(texts)
        assert mae == pytest.approx(np.abs(said - y)[_held_out(results, texts)].mean(), rel=1e-3)


def test_a_folder_with_a_reader_of_scaled_numbers_is_not_written(base: str, texts: list[str], tmp_path: Path):
    made = LaminaRegressor(base, epochs=1, options={"output": str(tmp_path / "out")})
    with pytest.raises(ConfigError, match=r"options has 'output'; .* call save"):
        made.fit(texts, [5010.0, 5200.0] * 4)
    assert not list(tmp_path.iterdir())


def _held_out(results: Any, texts: list[str]) -> list[int]:
    """Return the places of the rows of `results` among the texts."""
    return [texts.index(text) for text in results._split.texts]


@pytest.mark.parametrize(
    ("y", "within"), [([2015.0 + row for row in range(8)], 20), ([1.7e9] * 8, 128)], ids=["years", "one time"]
)
def test_numbers_far_from_zero_that_are_not_too_close(base: str, texts: list[str], y: list[float], within: float):
    np.testing.assert_allclose(LaminaRegressor(base, **FAST).fit(texts, y).predict(texts), np.mean(y), atol=within)


def test_one_number_for_all(base: str, texts: list[str]):
    said = LaminaRegressor(base, **FAST).fit(texts, [7.0] * 8).predict(texts)
    np.testing.assert_allclose(said, 7.0, atol=0.5)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (["a"] * 8, "could not convert"),
        ([1.0] * 7 + [np.inf], "infinity"),
        ([1.0] * 7 + [-1e300], r"y has the size 1e\+300; at most 1e\+37 is possible"),
        ([1.0] * 7 + [2e38], r"y has the size 2e\+38"),
        ([1] * 7 + [10**400], "int too large"),
        (
            [1.7e9 + 50 * row for row in range(8)],
            "y has a standard deviation of 115 around 1700000175.*multiples of 128",
        ),
        ([-1e6 + 0.1 * row for row in range(8)], r"deviation of 0\.229 .*Subtract a constant"),
        (np.array(["2020-01-01", "2021-01-01"] * 4, dtype="datetime64[D]"), "y has dates or durations"),
    ],
)
def test_what_is_no_number(base: str, texts: list[str], y: Any, message: str):
    with pytest.raises(DataError, match=f"LaminaRegressor.fit: .*{message}"):
        LaminaRegressor(base).fit(texts, y)


def test_a_head_without_a_linear_map_is_refused(base: str, texts: list[str]):
    head = lamina.SequenceClassification(("x",), pooling="mean", problem_type="regression", linear=False)
    reader = lamina.Reader(lamina.PooledLayers(dim=1), head)
    with pytest.raises(ConfigError, match="a regressor needs the linear map"):
        LaminaRegressor(base, reader=reader).fit(texts, [1.0, 2.0] * 4)
