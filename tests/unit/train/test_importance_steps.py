"""Importances between epochs: which steps they are of, what is counted, and that a resumed run has the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from tests.support.finetuned import bert
from tests.support.portions import one_in
from tests.support.training import names, reader, tiny_bank, tiny_tokenizer, train, weights, yes_no

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.gated import Gated
from lamina.fusion.last_layer import LastLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks.task import Task
from lamina.train import FitResult, fit
from lamina.train.engine import Engine
from lamina.train.learner import Learner

TEXTS = yes_no(train=20, validation=8)


def bank_of_two() -> tuple[ReaderBank, dict[str, Task]]:
    """One that weighs layers, and one that weighs them anew for each token; over texts of their own."""
    words = names(train=12, validation=6)
    gated = Reader(Gated(hidden=4), SequenceClassification(TEXTS.labels, pooling="mean"), seed=1)
    plain = Reader(LastLayer(), SequenceClassification(TEXTS.labels, pooling="mean"))
    bank = tiny_bank({"ada": reader(words), "gated": gated, "plain": plain})
    return bank, {"ada": words, "gated": TEXTS, "plain": TEXTS}


OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 4, "learning_rate": 0.02, "importance_steps": 2}


def at(rows: list[dict[str, Any]], name: str) -> list[tuple[Any, int]]:
    """Epoch and step of each time that a reader's importances were taken down."""
    return list(dict.fromkeys((row["epoch"], row["step"]) for row in rows if row["reader"] == name))


def test_rows_between_epochs_count_the_reader_s_own_steps():
    bank, tasks = bank_of_two()
    result = train(bank, tasks, **OPTIONS)
    ada = [(None, 0), (None, 2), (1, 3), (None, 4), (None, 6), (2, 6), (None, 8), (3, 9)]
    assert at(result.importances, "ada") == ada
    assert at(result.importances, "gated")[:5] == [(None, 0), (None, 2), (None, 4), (1, 5), (None, 6)]
    assert at(result.importances, "plain") == []
    sums: dict[Any, float] = {}
    for row in result.importances:
        key = (row["reader"], row["epoch"], row["step"])
        sums[key] = sums.get(key, 0.0) + row["importance"]
    assert all(total == pytest.approx(1, abs=1e-5) for total in sums.values())


@pytest.mark.long
def test_without_the_option_there_is_a_row_per_epoch_and_the_same_weights():
    bank, tasks = bank_of_two()
    fine = train(bank, tasks, **OPTIONS)
    other, _ = bank_of_two()
    coarse = train(other, tasks, **{**OPTIONS, "importance_steps": None})
    assert at(coarse.importances, "ada") == [(1, 3), (2, 6), (3, 9)]
    assert coarse.importances == [row for row in fine.importances if row["epoch"] is not None]
    assert all(torch.equal(value, weights(other)[key]) for key, value in weights(bank).items())


def test_they_are_the_importances_at_that_step(monkeypatch: pytest.MonkeyPatch):
    seen: dict[int, dict[int, float]] = {}
    step = Learner.step

    def spy(self: Learner, *given: Any) -> None:
        step(self, *given)
        if self.name == "ada":
            seen[self.progress.done] = self.importance()

    monkeypatch.setattr(Learner, "step", spy)
    bank, tasks = bank_of_two()
    result = train(bank, tasks, **OPTIONS)
    for done in (2, 4, 6, 8):
        rows = [r for r in result.importances if (r["reader"], r["epoch"], r["step"]) == ("ada", None, done)]
        assert {row["layer"]: row["importance"] for row in rows} == seen[done]
    first, last = seen[2], seen[8]
    assert max(abs(first[layer] - last[layer]) for layer in first) > 1e-3


def test_a_fusion_that_weighs_tokens_is_counted_over_the_rows_of_the_step(monkeypatch: pytest.MonkeyPatch):
    """Not over those of the steps before, nor over those that it was last scored on."""
    counted: list[torch.Tensor] = []
    observe = Gated.module.observe  # pyright: ignore[reportAttributeAccessIssue]

    def spy(self: Any, given: torch.Tensor, mask: torch.Tensor) -> None:
        if self.training:
            counted.append(given.detach().abs().masked_fill(~mask, 0).sum((1, 2)))
        observe(self, given, mask)

    monkeypatch.setattr("lamina.fusion.gated.InputWeighted.observe", spy)
    bank, tasks = bank_of_two()
    result = train(bank, tasks, **OPTIONS)
    for done in (2, 4, 6, 8):
        rows = [r for r in result.importances if (r["reader"], r["epoch"], r["step"]) == ("gated", None, done)]
        own = counted[done + 1]  # after the two passes that measured the memory
        assert [row["importance"] for row in rows] == pytest.approx((own / own.sum()).tolist(), abs=1e-6)


def test_importances_of_an_epoch_do_not_depend_on_the_readers_beside():
    """What a fusion counts while it is scored is still there when other texts were scored after it."""
    bank, tasks = bank_of_two()
    beside = train(bank, {"gated": tasks["gated"], "ada": tasks["ada"]}, **{**OPTIONS, "importance_steps": None})
    bank, _ = bank_of_two()
    alone = train(bank, {"gated": tasks["gated"]}, **{**OPTIONS, "importance_steps": None})
    shares = [[r["importance"] for r in result.importances if r["reader"] == "gated"] for result in (alone, beside)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-5)
    assert max(shares[0]) - min(shares[0]) > 1e-3


class Killed(BaseException):
    pass


SAVING = {**OPTIONS, "save_steps": 3}


@pytest.fixture(scope="module")
def whole() -> FitResult:
    """The run that nobody kills."""
    return train(*bank_of_two(), **SAVING)


@pytest.mark.long
@pytest.mark.parametrize("count", one_in(3, [0, 1, 4, 9, 11, 17], 1))
def test_a_killed_and_resumed_run_has_the_same_rows(count: int, whole: FitResult, tmp_path: Path):
    bank, tasks = bank_of_two()
    calls = iter(range(10**6))
    step = Engine.step

    def dying(self: Engine, *given: Any) -> None:
        if next(calls) == count:
            raise Killed
        step(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", dying)
        with pytest.raises(Killed):
            train(bank, tasks, output=tmp_path / "out", **SAVING)
    bank, _ = bank_of_two()
    resumed = train(bank, tasks, output=tmp_path / "out", resume=True, **SAVING)
    assert resumed.importances == whole.importances
    assert json.loads((tmp_path / "out" / "history.json").read_text())["importances"] == whole.importances
    assert parquet.read_table(tmp_path / "out" / "importances.parquet").to_pylist() == whole.importances


def test_a_whole_model_has_no_importances():
    with pytest.raises(ConfigError, match="fit: importance_steps is 5; a whole model has no use for it"):
        fit(bert(), TEXTS, processor=tiny_tokenizer(), importance_steps=5)
    with pytest.raises(ConfigError, match="fit: importance_steps is 0; it must be at least 1, or None"):
        train(tiny_bank({"a": reader(TEXTS)}), {"a": TEXTS}, importance_steps=0)
