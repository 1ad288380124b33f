from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.bad_spans import SPANS, fitted, whole_task

from lamina.errors import ConfigError, UnknownNameError
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
    assert "saves" in choice.sentence()
    again = calibrate(
        bank, choice.cascade, whole_task(), threshold=choice.cascade.threshold, store=False, positive="bad"
    )
    assert again.calibration is not None
    assert again.calibration.asked == pytest.approx(rates.asked, abs=0.15)


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
        with pytest.raises(ConfigError, match=rf"choose_cascade: recall is {recall}; it must be above 0 and below 1"):
            choose_cascade(bank, CHEAP, SPANS, task, recall=recall, **HOW)
    with pytest.raises(ConfigError, match=r"reader 'spans' multiplies \d+ .* the first must be smaller"):
        choose_cascade(bank, SPANS, CHEAP, task, recall=0.5, **HOW)
    with pytest.raises(
        ConfigError, match=r"no cascade has a recall of 0\.999 with 95% confidence; the second .* Ask for"
    ):
        choose_cascade(bank, CHEAP, SPANS, task, recall=0.999, **HOW)
    with pytest.raises(UnknownNameError, match=r"unknown reader 'cheaper'"):
        choose_cascade(bank, replace(CHEAP, reader="cheaper"), SPANS, task, recall=0.5, **HOW)
