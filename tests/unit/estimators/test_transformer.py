from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import lamina
from lamina.errors import ConfigError, DataError, LayerIndexError
from lamina.estimators.transformer import LaminaTransformer


def states(base: str, text: str) -> list[torch.Tensor]:
    model, tokenizer = lamina.load(base)
    with torch.no_grad():
        return [
            state[0] for state in model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        ]


def test_the_features_are_the_states_of_the_layer(base: str, texts: list[str]):
    own = states(base, texts[0])
    for layer, state in ((-1, own[3]), (0, own[0]), (2, own[2])):
        features = LaminaTransformer(base, layer=layer).fit_transform(texts)
        assert (features.shape, features.dtype) == ((8, 16), np.float32)
        np.testing.assert_allclose(features[0], state.mean(0), atol=1e-5)
    first = LaminaTransformer(base, pooling="first").fit_transform(texts)
    np.testing.assert_allclose(first[0], own[3][0], atol=1e-5)


def test_only_so_many_tokens_are_read(base: str, caplog: pytest.LogCaptureFixture):
    long, start = "the film is good and bad", "the film"
    made = LaminaTransformer(base, max_length=4).fit([long])
    np.testing.assert_allclose(made.transform([long]), LaminaTransformer(base).fit_transform([start]), atol=1e-5)
    assert "LaminaTransformer.transform: 1 example is longer than what is read of it;" in caplog.text
    with pytest.raises(ConfigError, match="max_length is 99"):
        LaminaTransformer(base, max_length=99).fit([long])
    with pytest.raises(ConfigError, match=r"LaminaTransformer\.fit: max_length is '4'"):
        LaminaTransformer(base, max_length="4").fit([long])  # pyright: ignore[reportArgumentType]


def test_layers_stand_side_by_side_under_their_names(base: str, texts: list[str]):
    made = LaminaTransformer(base, layer="top:2").set_output(transform="pandas")
    frame = made.fit_transform(texts)
    assert list(frame.columns[[0, 15, 16, 31]]) == ["layer2_0", "layer2_15", "layer3_0", "layer3_15"]
    np.testing.assert_array_equal(frame["layer3_0"], LaminaTransformer(base).fit_transform(texts)[:, 0])
    assert list(clone(made).fit_transform(texts).columns) == list(frame.columns)


def test_a_fusion_learns_from_classes_numbers_or_several_labels(base: str, texts: list[str], mood: list[str]):
    fusion = lamina.PooledLayers(dim=6)
    several = np.eye(2, dtype=int)[[0, 1] * 4]
    made = {}
    for name, y in (("classes", mood), ("numbers", [0.5, 1.5] * 4), ("several", several)):
        made[name] = LaminaTransformer(base, fusion=fusion, epochs=3).fit_transform(texts, y)
        assert made[name].shape == (8, 6)
    assert not np.allclose(made["classes"], made["numbers"])
    again = LaminaTransformer(base, fusion=fusion, epochs=1).fit(texts, mood)
    assert again.result_
    assert not hasattr(again.set_params(fusion=None, layer=1).fit(texts), "result_")
    pipeline = make_pipeline(
        LaminaTransformer(base, fusion=fusion, epochs=20, learning_rate=0.05), LogisticRegression(C=100)
    )
    assert pipeline.fit(texts, mood).score(texts, mood) == 1.0
    assert list(pipeline[0].get_feature_names_out()) == [f"fusion_{at}" for at in range(6)]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_fusion_is_trained_with_the_pooling_of_its_features(
    base: str, texts: list[str], mood: list[str], pooling: Any, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []
    monkeypatch.setattr(
        LaminaTransformer, "_train", lambda _, bank, *__: seen.append(bank["reader"].config.head.pooling)
    )
    LaminaTransformer(base, fusion=lamina.ScalarMix(), pooling=pooling).fit(texts, mood)
    assert seen == [pooling]


def test_a_fusion_without_weights_needs_no_labels(base: str, texts: list[str]):
    mean = LaminaTransformer(base, fusion=lamina.fusion.Mean()).fit_transform(texts)
    np.testing.assert_allclose(mean[0], torch.stack(states(base, texts[0])).mean((0, 1)), atol=1e-5)
    with pytest.raises(DataError, match="the fusion ScalarMix has weights to learn, but y is None"):
        LaminaTransformer(base, fusion=lamina.ScalarMix()).fit(texts)


def test_columns_of_a_frame_and_what_was_done_before(base: str, texts: list[str], mood: list[str]):
    frame = pd.DataFrame({"title": texts, "body": texts[::-1], "length": range(8)})
    upper = FunctionTransformer(lambda column: column.str.upper(), feature_names_out="one-to-one")
    columns = ColumnTransformer(
        [
            ("one", make_pipeline(upper, LaminaTransformer(base)), "title"),
            ("both", LaminaTransformer(base, layer=0), ["title", "body"]),
            ("rest", "passthrough", ["length"]),
        ]
    )
    assert columns.fit_transform(frame).shape == (8, 33)
    both = columns.named_transformers_["both"]
    assert (both.n_features_in_, list(both.feature_names_in_)) == (2, ["title", "body"])
    with pytest.raises(DataError, match=r"transform: X has single texts, but LaminaTransformer was fitted on pairs"):
        both.transform(texts)
    assert columns.get_feature_names_out()[-2:].tolist() == ["both__layer0_15", "rest__length"]
    assert make_pipeline(columns, LogisticRegression(C=100)).fit(frame, mood).score(frame, mood) == 1.0


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"layer": 9}, LayerIndexError, "layer 9 does not exist"),
        ({"pooling": "last"}, ConfigError, "pooling is 'last'; it must be 'mean' or 'first'"),
    ],
)
def test_parameters_that_do_not_fit(base: str, texts: list[str], parameters: dict, error: type, message: str):
    with pytest.raises(error, match=message):
        LaminaTransformer(base, **parameters).fit(texts)


def test_before_fit(base: str, texts: list[str]):
    with pytest.raises(NotFittedError):
        LaminaTransformer(base).transform(texts)
    with pytest.raises(NotFittedError):
        LaminaTransformer(base).get_feature_names_out()
