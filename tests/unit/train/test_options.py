"""What may be said about a training run, and what may not."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from lamina import evaluate, finetune, fit, predict, predict_file
from lamina.errors import ConfigError, UnknownNameError
from lamina.monitors import calibrate
from lamina.tasks import kind_of
from lamina.train.options import FitOptions, PassOptions, per_reader


def test_an_unknown_option_is_answered_with_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"known: epochs.* others \(all: help\(lamina\.fit\)\)\. Did you mean 'epochs'"
    ):
        FitOptions.of({"epoch": 3})


def test_options_from_keywords():
    options = FitOptions.of({"epochs": {"a": 2}, "max_grad_norm": 0.0, "learning_rate": 1})
    assert (options.epochs, options.max_grad_norm, options.learning_rate) == ({"a": 2}, 0.0, 1)


NOT_OPTIONS = {
    "bank_or_model",
    "model",
    "tasks",
    "task",
    "states",
    "grid",
    "positive",
    "processor",
    "output",
    "unknown",
}
READERS_ONLY = {"cache", "cache_dtype", "cache_dir", "base_learning_rate", "importance_steps"}


def test_every_option_is_a_keyword_with_the_same_default():
    signature = inspect.signature(fit).parameters
    defaults = {key: parameter.default for key, parameter in signature.items() if key not in NOT_OPTIONS}
    fields = {key: field.get_default(call_default_factory=True) for key, field in FitOptions.model_fields.items()}
    assert {**defaults, "layer_rates": {}} == fields
    assert defaults["layer_rates"] is None
    assert FitOptions.of({"layer_rates": None}).layer_rates == {}


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (predict, {}),
        (evaluate, {"batch_size": 64}),
        (predict_file, {"batch_size": None, "progress": True}),  # by tokens
        (calibrate, {}),
    ],
)
def test_every_option_of_a_pass_has_its_default_everywhere(function: Any, defaults: dict[str, Any]):
    fields = {key: field.default for key, field in PassOptions.model_fields.items()} | defaults
    parameters = inspect.signature(function).parameters
    shared = [key for key in fields if key in parameters]
    assert {"batch_size", "add_prefix_space", "progress"} <= set(shared)
    assert {key: parameters[key].default for key in shared} == {key: fields[key] for key in shared}


@pytest.mark.parametrize("function", [fit, predict, evaluate, predict_file, calibrate])
def test_every_keyword_is_documented_once(function: Any):
    documented = (inspect.getdoc(function) or "").split("\nReturns:")[0]
    keys = [key for key in inspect.signature(function).parameters if key != "unknown"]
    assert {key: documented.count(f"\n    {key}: ") for key in keys} == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("option", sorted(READERS_ONLY))
def test_finetune_has_no_option_of_readers_and_names_those_it_has(option: str):
    model: Any = None
    one_option: dict[str, Any] = {option: 1}
    with pytest.raises(UnknownNameError, match=f"finetune: unknown option '{option}'; known: .*") as caught:
        finetune(model, model, **one_option)
    assert "(all: help(lamina.finetune))" in str(caught.value)
    assert {"epochs", "batch_size"} < set(caught.value.known)
    assert not READERS_ONLY & set(caught.value.known)


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [
        ("optimizer", "adm", "adam"),
        ("schedule", "liner", "linear"),
        ("precision", "float61", "float16"),
        ("keep", "least", "last"),
        ("cache", "of", "off"),
    ],
)
def test_a_choice_there_is_not(option: str, value: str, near: str):
    with pytest.raises(UnknownNameError, match=f"finetune: unknown {option} '{value}'; .*Did you mean '{near}'"):
        FitOptions.of({option: value}, "finetune")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("learning_rate", 0.0, "above 0, or None"),
        ("learning_rate", {"a": 1.0, "b": -1.0}, "above 0, or None"),
        ("base_learning_rate", 0, "above 0"),
        ("epochs", 0, "at least 1"),
        ("epochs", {"a": 0}, "at least 1"),
        ("weight_decay", -0.1, "at least 0"),
        ("warmup_ratio", 1.0, "below 1"),
        ("warmup_ratio", -0.1, "at least 0"),
        ("plateau_factor", 0.0, "above 0"),
        ("plateau_factor", 1.0, "below 1"),
        ("plateau_patience", -1, "at least 0"),
        ("max_grad_norm", -1.0, "at least 0"),
        ("early_stopping_patience", 0, "at least 1, or None"),
        ("save_steps", 0, "at least 1, or None"),
        ("eval_batch_size", 0, "at least 1, or None"),
        ("min_learning_rate", -1e-9, "at least 0"),
        ("max_steps", 0, "at least 1, or None"),
        ("max_steps", 1.5, "a whole number, or None"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("layer_decay", 0.0, "above 0"),
        ("layer_decay", 1.1, "at most 1"),
        ("layer_rates", {1: -1.0}, "at least 0"),
        ("layer_rates", {1: "1e-3"}, "a number, such as 0.001"),
        ("layer_rates", 1e-3, "a mapping"),
        ("momentum", 1.0, "below 1"),
        ("adam_epsilon", 0.0, "above 0"),
        ("warmup_steps", -1, "at least 0, or None"),
        ("max_target_length", 0, "at least 1"),
        ("num_beams", 0, "at least 1"),
        ("num_workers", -1, "at least 0"),
        ("length_penalty", "long", "a number, such as 0.001"),
        ("learning_rate", "1e-3", "a number, such as 0.001"),  # what YAML makes of 1e-3
        ("learning_rate", {"a": "fast"}, "a number, such as 0.001"),
        ("learning_rate", float("nan"), "a finite number"),
        ("epochs", "3", "a whole number"),
        ("epochs", {"a": 2.5}, "a whole number"),
        ("epochs", True, "a whole number"),
        ("epochs", None, "a whole number"),
        ("max_grad_norm", None, "a number, such as 0.001"),
        ("batch_size", 2.5, "a whole number"),
        ("resume", "yes", "true or false"),
        ("augment", 1, "true or false"),
        ("prefix", 3, "a text"),
        ("seed", -1, "at least 0"),
        ("seed", 2**63, f"below {2**63}"),
        ("seed", 10**30, f"below {2**63}"),
        ("seed", True, "a whole number"),
        ("seed", 1.0, "a whole number"),
        ("trackers", "mlflow", "a list"),
        ("trackers", 5, "a list"),
        ("weight_decay_on", 5, "'matrices' or 'all'"),
    ],
)
def test_a_value_that_does_not_fit(option: str, value: Any, rule: str):
    with pytest.raises(ConfigError, match=rf"fit: {option} is .*; it must be {rule}"):
        FitOptions.of({option: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_grad_norm", 0.0),
        ("warmup_ratio", 0.0),
        ("early_stopping_patience", 1),
        ("plateau_patience", 0),
        ("save_steps", 1),
        ("epochs", 1),
        ("layer_decay", 1),
        ("layer_rates", {"head": 0, 3: 1e-3}),
        ("seed", 0),
        ("seed", 2**63 - 1),
    ],
)
def test_the_last_value_that_fits(option: str, value: Any):
    assert getattr(FitOptions.of({option: value}), option) == value


@pytest.mark.parametrize("kind", [np.int64, np.array, torch.tensor])
def test_a_number_may_be_one_of_numpy_or_torch(kind: Any):
    options = FitOptions.of({"batch_size": kind(4), "epochs": {"a": kind(2)}, "learning_rate": np.float32(0.5)})
    assert (options.batch_size, options.epochs, options.learning_rate) == (4, {"a": 2}, 0.5)
    assert [*map(type, (options.batch_size, options.learning_rate))] == [int, float]


def test_one_value_for_all_or_one_for_each():
    assert per_reader(3, ["a", "b"], "epochs") == {"a": 3, "b": 3}
    assert per_reader({"b": 1, "a": 2}, ["a", "b"], "epochs") == {"a": 2, "b": 1}
    with pytest.raises(UnknownNameError, match=r"fit: epochs: unknown reader 'aa'; known: a, b\. Did you mean 'a'"):
        per_reader({"a": 1, "b": 1, "aa": 1}, ["a", "b"], "epochs")
    with pytest.raises(ConfigError, match="fit: epochs has no value for reader 'b'; it needs one for each"):
        per_reader({"a": 1}, ["a", "b"], "epochs")


NO_EFFECT = [
    ({"momentum": 0.5}, "momentum is 0.5 and only has an effect with optimizer=sgd"),
    ({"optimizer": "sgd", "adam_epsilon": 0.1}, "only has an effect with optimizer=adamw or adam"),
    ({"plateau_factor": 0.1}, "only has an effect with schedule=plateau"),
    ({"plateau_patience": 1}, "only has an effect with schedule=plateau"),
    ({"min_learning_rate": 0.1}, "only has an effect with schedule=plateau"),
    ({"early_stopping_min_delta": 0.1}, "has no effect without early_stopping_patience"),
    ({"weight_decay_on": "all"}, "has no effect without weight_decay"),
    ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_ratio is 0.1 and warmup_steps is set too; only one can be set"),
    ({"num_beams": 4}, "num_beams is 4 for a task of kind sequence_classification, which has no use for it"),
    ({"max_target_length": 9}, "max_target_length is 9 for a task of kind sequence_classification"),
    ({"length_penalty": 0.5}, "has no effect without num_beams"),
]


@pytest.mark.parametrize(("options", "message"), NO_EFFECT, ids=lambda value: str(value)[:40])
def test_an_option_without_effect_is_refused(options: dict[str, Any], message: str):
    made = FitOptions.of(options)
    with pytest.raises(ConfigError, match=message):
        made.check_use("fit", [kind_of("sequence_classification")], bank=True)


def test_options_with_an_effect_are_allowed():
    kinds = [kind_of(name) for name in ("sequence_classification", "token_classification", "summarization")]
    options = {"num_beams": 4, "length_penalty": 0.5, "max_target_length": 9, "stride": 4, "schedule": "plateau"}
    options |= {"plateau_factor": 0.1, "early_stopping_patience": 2, "early_stopping_min_delta": 0.1}
    FitOptions.of(options).check_use("fit", kinds, bank=True)
    FitOptions.of({"augment": False}).check_use("fit", [kind_of("image_classification")], bank=True)
    FitOptions.of({"optimizer": "sgd", "momentum": 0.5, "warmup_steps": 3}).check_use("fit", kinds[:1], bank=True)
