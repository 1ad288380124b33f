"""Training in stages: Head2Toe scores its features, chooses some, and trains a fresh head on those, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.training import reader, tiny_bank, tiny_model, tiny_tokenizer, yes_no

from lamina import Head2Toe, Reader, ReaderBank, SequenceClassification, Task, evaluate, fit

if TYPE_CHECKING:
    from pathlib import Path

SCORES = {"good": 10.5, "fun": 20.5, "bad": -10.5, "slow": 0.5}
OPTIONS: dict[str, Any] = {"batch_size": 8, "progress": False, "learning_rate": 1e-2}


def choosing(**settings: Any) -> Reader:
    head = SequenceClassification(("no", "yes"), pooling="first", dropout=0.0)
    return Reader(Head2Toe(fraction=0.25, **settings), head)


def test_it_chooses_between_the_stages_and_the_best_epoch_is_of_the_last():
    bank, task = tiny_bank({"r": choosing(), "other": reader()}), yes_no()
    result = fit(bank, {"r": task, "other": task}, epochs=4, **OPTIONS)
    fusion: Any = bank["r"].fusion
    assert bool(fusion.selected)
    assert int(fusion.kept.sum()) == round(0.25 * 4 * 16)
    assert result.best["r"]["epoch"] in (3, 4)
    assert evaluate(bank, {"r": task})["r"]["accuracy"] == pytest.approx(result.best["r"]["accuracy"])


def test_an_early_stop_ends_the_stage_not_the_run():
    bank, task = tiny_bank({"r": choosing(score_share=0.9)}), yes_no()
    options = {**OPTIONS, "learning_rate": 1e-9}
    result = fit(bank, {"r": task}, epochs=20, early_stopping_patience=2, **options)
    assert bool(bank["r"].fusion.selected)
    epochs = [row["epoch"] for row in result.history]
    assert epochs[-1] < 18  # both stages stalled at once
    assert result.best["r"]["epoch"] == 4  # the first of the second stage


@pytest.mark.long
def test_a_trained_base_waits_for_the_last_stage_too():
    bank, task = ReaderBank(tiny_model(), tiny_tokenizer(), train_base=True), yes_no()
    bank.add("r", choosing())
    bank.add("other", reader())
    result = fit(bank, {"r": task, "other": task}, epochs=4, base_learning_rate=1e-3, **OPTIONS)
    assert bool(bank["r"].fusion.selected)
    assert result.best["r"]["epoch"] == result.best["other"]["epoch"] > 2


@pytest.mark.parametrize("offset", [0.0, 200.0])
def test_a_regression_starts_at_its_labels_in_both_stages(offset: float):
    data = {
        part: [{"text": f"the film is {word}", "score": score + offset} for word, score in SCORES.items()] * copies
        for part, copies in (("train", 16), ("validation", 2))
    }
    task = Task.from_dataset("sequence_classification", data, text="text", label="score", name="r")
    head = SequenceClassification(task.labels, pooling="first", dropout=0.0, problem_type="regression")
    bank = tiny_bank({"r": Reader(Head2Toe(fraction=0.25), head)})
    result = fit(bank, {"r": task}, epochs=4, **OPTIONS)
    assert bool(bank["r"].fusion.selected)
    assert max(row["mae"] for row in result.history) < 20  # always the mean: 10.75


def test_a_run_that_is_ended_in_the_second_stage_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lamina.train.engine import Engine

    whole, cut, again = (tiny_bank({"r": choosing()}) for _ in range(3))
    task = yes_no()
    fit(whole, {"r": task}, epochs=4, output=tmp_path / "whole", **OPTIONS)
    evaluated, count = Engine.score, 0

    def killed(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return evaluated(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(cut, {"r": task}, epochs=4, output=tmp_path / "cut", **OPTIONS)
    monkeypatch.undo()
    fit(again, {"r": task}, epochs=4, output=tmp_path / "cut", resume=True, **OPTIONS)
    for key, value in whole["r"].state_dict().items():
        torch.testing.assert_close(again["r"].state_dict()[key], value, rtol=0, atol=1e-6)
