"""Modes that `evaluating` changes and restores."""

from __future__ import annotations

import pytest
from torch import nn

from lamina.layers.preserve import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_the_last_to_end_gives_modes_back(training: bool):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout()))
    model[1].train(training)
    before = [part.training for part in model.modules()]
    first, second = evaluating(model), evaluating(model[1])
    first.__enter__()
    second.__enter__()
    assert not any(part.training for part in model.modules())
    first.__exit__(None, None, None)
    assert not any(part.training for part in model[1].modules())
    second.__exit__(None, None, None)
    assert [part.training for part in model.modules()] == before


def test_what_is_in_eval_mode_stays_so_while_another_context_ends():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    with evaluating(model):
        inner = evaluating(model[0])  # all in eval mode, but not for good
        inner.__enter__()
    assert not model[0].training
    inner.__exit__(None, None, None)
    assert model[0].training


def test_modules_that_were_in_eval_mode_return_to_it():
    model = nn.Dropout().eval()
    with evaluating(model):
        model.train()
    assert not model.training
