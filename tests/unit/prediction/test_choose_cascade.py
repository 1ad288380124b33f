from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from tests.support.bad_spans import SPANS, fitted, spans, whole_task

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import LastScore, Monitor, calibrate, choose_cascade

CHEAP = Monitor("whole", "bad", LastScore(), name="cheap")
HOW: dict[str, Any] = {"positive": "bad", "false_positive_rate": 0.1}


def test_a_cascade_keeps_the_stated_recall_and_saves_work():
    bank = fitted()
    cheap = calibrate(bank, CHEAP, whole_task(), false_positive_rate=0.5, positive="bad", store=False)
    assert isinstance(cheap, Monitor)
    assert cheap.sketch is not None
    assert "state 1" in cheap.sketch.values
    choice = choose_cascade(bank, cheap, replace(SPANS, sketch=cheap.sketch), whole_task(), recall=0.6, **HOW)
    first, second = choice.cascade.first, choice.cascade.second
    assert (first.calibration, first.sketch, second.sketch) == (None, None, None)  # they hold for the monitors alone
    rates = choice.cascade.calibration
    assert rates is not None
    assert rates.asked is not None
    assert rates.recall >= 0.6
    assert (rates.negatives, rates.positives) == (30, 30)  # the half that chose no threshold
    assert choice.saving < 1 - rates.asked <= 1  # the first reader costs something too
    assert bank.monitors["cascade"] == choice.cascade
    bank.drop_monitor("cascade")
    cascade, alone = choice.seconds
    assert 0 < cascade < 60  # of a thousand tokens
    assert f"A thousand tokens take {cascade:.2g} s in place of {alone:.2g} s" in choice.sentence()
    again = calibrate(
        bank, choice.cascade, whole_task(), threshold=choice.cascade.threshold, store=False, positive="bad"
    )
    assert again.calibration is not None
    assert again.calibration.asked == pytest.approx(rates.asked, abs=0.15)


def test_seconds_are_those_of_the_first_reader_and_of_the_share_that_asks_the_second(monkeypatch: pytest.MonkeyPatch):
    module = import_module("lamina.prediction.choose_cascade")  # the package has a function of this name
    monkeypatch.setattr(module, "reader_seconds", lambda *_: {"whole": 1e-4, "spans": 5e-4})
    choice = choose_cascade(fitted(), CHEAP, SPANS, whole_task(), recall=0.6, store=False, **HOW)
    assert choice.cascade.calibration is not None
    assert choice.seconds == pytest.approx((0.1 + 0.5 * (choice.cascade.calibration.asked or 0), 0.5))


@pytest.mark.long
def test_the_stated_recall_holds_on_other_texts():
    """Choose three cascades on different texts, and measure each on texts that no choice has seen."""
    bank, recall, low = fitted(), 0.6, 0
    fresh = whole_task(spans(300, 999))
    for seed in range(3):
        task = whole_task(spans(120, 100 + seed))
        choice = choose_cascade(bank, CHEAP, SPANS, task, recall=recall, seed=seed, store=False, **HOW)
        threshold = choice.cascade.threshold
        found = calibrate(bank, choice.cascade, fresh, threshold=threshold, positive="bad", store=False).calibration
        assert found is not None
        assert found.recall < 0.99  # the cheapest cascade is near the stated recall
        low += found.recall < recall
    assert low <= 1  # with 95 % confidence; 2 or more of 3 would come by chance once in 140 times


def test_a_higher_recall_asks_for_more_of_the_second_reader():
    bank = fitted()
    low, high = (
        choose_cascade(bank, CHEAP, SPANS, whole_task(), recall=recall, store=False, **HOW) for recall in (0.4, 0.85)
    )
    assert low.considered >= high.considered
    assert low.saving > high.saving
    assert "cascade" not in bank.monitors


def test_what_cannot_be_chosen_is_said():
    bank, task = fitted(), whole_task()
    for recall in (0.0, 1.0):
        with pytest.raises(
            ConfigError, match=rf"choose_cascade: recall is {recall}; it must be above 0 and below 1, such as 0\.9"
        ):
            choose_cascade(bank, CHEAP, SPANS, task, recall=recall, **HOW)
    with pytest.raises(ConfigError, match=r"reader 'spans' multiplies \d+ .* the first must be smaller"):
        choose_cascade(bank, SPANS, CHEAP, task, recall=0.5, **HOW)
    with pytest.raises(
        ConfigError, match=r"no cascade has a recall of 0\.999 with 95% confidence; the second .* Ask for"
    ):
        choose_cascade(bank, CHEAP, SPANS, task, recall=0.999, **HOW)
    with pytest.raises(UnknownNameError, match=r"unknown reader 'cheaper'"):
        choose_cascade(bank, replace(CHEAP, reader="cheaper"), SPANS, task, recall=0.5, **HOW)


class MeanOfFeedForward(Mean):
    site = "ffn"


@pytest.mark.parametrize("reader", ["first", "second"])
def test_a_reader_inside_the_blocks_is_refused_before_anything_is_scored(reader: str):
    bank = ReaderBank(fitted().model, fitted().processor)
    bank.update(fitted())
    bank.add("inside", Reader(MeanOfFeedForward(), TokenClassification(("O", *SPANS.flag), encoder_layers=0)))
    monitors = {"first": CHEAP, "second": SPANS, reader: replace(SPANS, reader="inside")}
    with pytest.raises(ConfigError, match=r"choose_cascade: reader 'inside' reads inside the model's blocks"):
        choose_cascade(bank, **monitors, task=whole_task(), recall=0.6, **HOW)
    assert not bank.monitors


@pytest.mark.parametrize(
    "choose", [partial(calibrate, monitor=CHEAP), partial(choose_cascade, first=CHEAP, second=SPANS, recall=0.6)]
)
def test_no_threshold_is_chosen_on_a_model_that_has_changed(choose: Any):
    bank = fitted()
    weight = bank.model.transformer.h[0].attn.c_attn.weight.data  # pyright: ignore
    before = weight.clone()
    weight[0] += 1  # torch does not count this
    try:
        with pytest.raises(
            ConfigError, match=rf"{choose.func.__name__}: the model has changed since the bank was made"
        ):
            choose(bank, task=whole_task(), store=False, **HOW)
    finally:
        weight.copy_(before)
