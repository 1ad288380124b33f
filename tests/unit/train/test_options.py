"""What may be said about a training run, and what may not."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.errors import ConfigError, UnknownNameError
from lamina.train.options import FitOptions, TuneOptions, each


def test_an_unknown_option_is_answered_with_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"fit: unknown option 'epoch'; known: .*, epochs, .*Did you mean 'epochs'"
    ):
        FitOptions.of({"epoch": 3})


def test_options_from_keywords():
    options = FitOptions.of({"epochs": {"a": 2}, "max_grad_norm": 0.0, "learning_rate": 1})
    assert (options.epochs, options.clip, options.learning_rate) == ({"a": 2}, 0.0, 1)


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [("optimizer", "adm", "adam"), ("schedule", "liner", "linear"), ("precision", "float61", "float16")],
)
def test_a_choice_there_is_not(option: str, value: str, near: str):
    with pytest.raises(UnknownNameError, match=f"fit: unknown {option} '{value}'; .*Did you mean '{near}'"):
        FitOptions(**{option: value})  # pyright: ignore


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("learning_rate", 0.0, "positive"),
        ("learning_rate", {"a": 1.0, "b": -1.0}, "positive"),
        ("epochs", 0, "at least 1"),
        ("epochs", {"a": 0}, "at least 1"),
        ("weight_decay", -0.1, "0 or more"),
        ("warmup_ratio", 1.0, "a share"),
        ("warmup_ratio", -0.1, "a share"),
        ("plateau_factor", 0.0, "between 0 and 1"),
        ("plateau_factor", 1.0, "between 0 and 1"),
        ("plateau_patience", -1, "0 or more"),
        ("max_grad_norm", -1.0, "0 .none. or more"),
        ("early_stopping_patience", 0, "at least 1, or None"),
        ("save_steps", 0, "at least 1, or None"),
        ("eval_batch_size", 0, "at least 1, or None"),
        ("min_learning_rate", -1e-9, "0 or more"),
        ("learning_rate", "1e-3", "a number, such as 0.001"),  # what YAML makes of 1e-3
        ("learning_rate", {"a": "fast"}, "a number, such as 0.001"),
        ("epochs", "3", "a whole number"),
        ("epochs", {"a": 2.5}, "a whole number"),
        ("epochs", True, "a whole number"),
        ("batch_size", 2.5, "a whole number"),
    ],
)
def test_a_value_that_cannot_be(option: str, value: Any, rule: str):
    with pytest.raises(ConfigError, match=rf"fit: {option} is .*; it must be {rule}"):
        FitOptions(**{option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_grad_norm", 0.0),
        ("warmup_ratio", 0.0),
        ("early_stopping_patience", 1),
        ("plateau_patience", 0),
        ("save_steps", 1),
        ("epochs", 1),
    ],
)
def test_the_last_value_that_can_be(option: str, value: Any):
    assert getattr(FitOptions(**{option: value}), option) == value


def test_one_value_for_all_or_one_for_each():
    assert each(3, ["a", "b"], "epochs") == {"a": 3, "b": 3}
    assert each({"b": 1, "a": 2}, ["a", "b"], "epochs") == {"a": 2, "b": 1}
    with pytest.raises(UnknownNameError, match=r"fit: epochs: unknown reader 'aa'; known: a, b\. Did you mean 'a'"):
        each({"a": 1, "b": 1, "aa": 1}, ["a", "b"], "epochs")
    with pytest.raises(ConfigError, match="fit: epochs has no value for reader 'b'; it needs one for each"):
        each({"a": 1}, ["a", "b"], "epochs")


# Of fine-tuning


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("epochs", 0, "at least 1"),
        ("epochs", {"a": 1}, "a whole number"),
        ("max_steps", 0, "at least 1, or None"),
        ("max_steps", 1.5, "a whole number"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("learning_rate", 0.0, "positive"),
        ("learning_rate", "1e-3", "a number, such as 0.001"),
        ("learning_rate", {"a": 1e-3}, "a number, such as 0.001"),
        ("layer_decay", 0.0, "above 0, up to 1"),
        ("layer_decay", 1.1, "above 0, up to 1"),
        ("layer_rates", {1: -1.0}, "0 or more, each"),
        ("layer_rates", {1: "1e-3"}, "a number, such as 0.001"),
        ("layer_rates", 1e-3, "a mapping of layers to rates"),
        ("momentum", 1.0, "from 0 up to but not 1"),
        ("adam_epsilon", 0.0, "positive"),
        ("warmup_steps", -1, "0 or more, or None"),
        ("warmup_ratio", 1.0, "a share"),
        ("max_target_length", 0, "at least 1"),
        ("num_beams", 0, "at least 1"),
        ("length_penalty", "long", "a number, such as 0.001"),
        ("learning_rate", float("nan"), "positive"),
        ("epochs", None, "a whole number"),
        ("max_grad_norm", None, "a number, such as 0.001"),
        ("resume", "yes", "true or false"),
        ("augment", 1, "true or false"),
        ("prefix", 3, "a text"),
    ],
)
def test_a_value_that_cannot_be_in_fine_tuning(option: str, value: Any, rule: str):
    with pytest.raises(ConfigError, match=rf"finetune: {option} is .*; it must be {rule}"):
        TuneOptions(**{option: value})


@pytest.mark.parametrize(("option", "value"), [("optimizer", "lion"), ("schedule", "plateau"), ("precision", "int8")])
def test_a_choice_there_is_not_in_fine_tuning(option: str, value: str):
    with pytest.raises(UnknownNameError, match=f"finetune: unknown {option} '{value}'; known: "):
        TuneOptions(**{option: value})  # pyright: ignore


def test_options_of_readers_are_not_those_of_fine_tuning():
    with pytest.raises(UnknownNameError, match="finetune: unknown option 'cache'"):
        TuneOptions.of({"cache": "on"})
    with pytest.raises(UnknownNameError, match="fit: unknown option 'beams'"):
        FitOptions.of({"num_beams": 2})
