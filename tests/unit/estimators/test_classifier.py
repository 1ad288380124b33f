from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import NotFittedError
from tests.support.portions import one_in

import lamina
from lamina.errors import ConfigError, DataError, ModelNotFoundError, UnknownNameError
from lamina.estimators.predictors import LaminaClassifier
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import SequenceClassification

FAST = {"learning_rate": 0.05, "epochs": 8, "batch_size": 4, "options": {"cache": "off"}}


@pytest.mark.parametrize(
    ("one", "two"),
    one_in(2, [("good", "bad"), (3, -1), (True, False), (2.0, 7.0)]),
    ids=["texts", "numbers", "truth", "floats"],
)
def test_labels_of_any_type_come_back_as_they_went_in(base: str, texts: list[str], one: object, two: object):
    y = np.array([one, two] * 4)
    fitted = LaminaClassifier(base, **FAST).fit(texts, y)
    said = fitted.predict(texts)
    assert (said.dtype, fitted.classes_.dtype, list(fitted.classes_)) == (y.dtype, y.dtype, sorted([one, two]))
    assert fitted.score(texts, y) == (said == y).mean() == 1.0
    with pytest.raises(DataError, match=r"^LaminaClassifier\.score: .* \[7, 8\]"):
        fitted.score(texts, y[:7])


def test_probabilities_scores_and_classes_agree(base: str, texts: list[str], caplog: pytest.LogCaptureFixture):
    y = ["a", "b", "c", "b"] * 2
    fitted = LaminaClassifier(base, **FAST).fit(texts, y)
    caplog.clear()
    fitted.predict(["", " ", "film"])
    assert caplog.messages == ["LaminaClassifier.predict: 2 texts are blank; the answers to them mean nothing"]
    proba, scores = fitted.predict_proba(texts), fitted.decision_function(texts)
    assert proba.shape == scores.shape == (8, 3)
    np.testing.assert_allclose(proba.sum(1), 1)
    np.testing.assert_allclose(np.log(proba), fitted.predict_log_proba(texts))
    assert (fitted.classes_[proba.argmax(1)] == fitted.predict(texts)).all()
    two = LaminaClassifier(base, **FAST).fit(texts, ["a", "b"] * 4)
    np.testing.assert_allclose(1 / (1 + np.exp(-two.decision_function(texts))), two.predict_proba(texts)[:, 1])


@pytest.mark.parametrize("sparse", one_in(2, [False, True]))
def test_several_labels_per_text(base: str, texts: list[str], sparse: bool):
    y = np.array([["good" in text, "film" in text] for text in texts]).astype(int)
    fitted = LaminaClassifier(base, **FAST | {"epochs": 30}).fit(texts, csr_array(y) if sparse else y)
    assert (fitted.predict(texts) == y).all()
    assert ((fitted.predict_proba(texts) > 0.5) == y).all()
    assert list(fitted.classes_) == [0, 1]
    with pytest.raises(ConfigError, match="class_weight is set, but y has several labels"):
        LaminaClassifier(base, class_weight="balanced").fit(texts, y)


def test_pairs_are_tuples_or_two_columns(base: str, texts: list[str], mood: list[str]):
    pairs = list(zip(texts, texts[::-1], strict=True))
    fitted = LaminaClassifier(base, **FAST).fit(pairs, mood)
    assert type(fitted.bank_["reader"].config.fusion) is lamina.PairedLayers
    frame = pd.DataFrame(pairs, columns=["one", "two"])
    of_frame = LaminaClassifier(base, **FAST).fit(frame, mood)
    assert (of_frame.n_features_in_, list(of_frame.feature_names_in_)) == (2, ["one", "two"])
    assert np.array_equal(of_frame.predict_proba(frame), fitted.predict_proba(pairs))


def test_pairs_and_single_texts_are_not_confused(base: str, texts: list[str], mood: list[str], tmp_path: Path):
    pairs = list(zip(texts, texts[::-1], strict=True))
    of_pairs = LaminaClassifier(base, **FAST | {"epochs": 1}).fit(pairs, mood)
    of_texts = LaminaClassifier(base, **FAST | {"epochs": 1}).fit(texts, mood)
    assert (vars(of_pairs)["pairs_"], vars(of_texts)["pairs_"]) == (True, False)
    of_texts.save(tmp_path / "texts")
    for fitted in (of_texts, pickle.loads(pickle.dumps(of_texts)), LaminaClassifier.load(tmp_path / "texts")):
        with pytest.raises(
            DataError, match=r"^LaminaClassifier\.predict: X has pairs of texts, but LaminaClassifier was"
        ):
            fitted.predict(pairs)
    refused = (
        r"predict: X has single texts, but LaminaClassifier was fitted on pairs of texts\. Give pairs of texts, or fit"
    )
    with pytest.raises(ValueError, match=refused):
        of_pairs.score(texts, mood)
    del vars(of_pairs)["pairs_"]  # as in a pickle of an earlier version
    assert len(of_pairs.predict(texts)) == 8
    assert of_pairs.fit(texts, mood).predict(texts).shape == (8,)


@pytest.mark.parametrize("kind", one_in(2, [np.array, pd.Series, tuple, lambda texts: np.array(texts)[:, None]]))
def test_texts_of_any_list(base: str, texts: list[str], mood: list[str], kind: type):
    fitted = LaminaClassifier(base, **FAST).fit(kind(texts), mood)
    assert np.array_equal(
        fitted.predict_proba(texts), LaminaClassifier(base, **FAST).fit(texts, mood).predict_proba(texts)
    )


def test_which_reader(base: str, texts: list[str], mood: list[str]):
    head = lamina.SequenceClassification(("x",), attention_heads=2, dropout=0.3)
    readers = [None, lamina.ScalarMix(), lamina.Reader(lamina.fusion.Mean(), head, seed=9)]
    made = [LaminaClassifier(base, reader=reader, epochs=1, random_state=4).fit(texts, mood) for reader in readers]
    configs = [fitted.bank_["reader"].config for fitted in made]
    assert [type(config.fusion) for config in configs] == [lamina.PooledLayers, lamina.ScalarMix, lamina.fusion.Mean]
    assert [config.head.pooling for config in configs] == ["first", "mean", "attention"]
    assert [config.head.labels for config in configs] == [("bad", "good")] * 3
    assert [config.seed for config in configs] == [4, 4, 4]
    assert configs[2].head.dropout == 0.3


@pytest.mark.parametrize("reader", ["mean", lamina.Reader(lamina.fusion.Mean(), lamina.TokenClassification(("a",)))])
def test_another_reader_is_refused(base: str, texts: list[str], mood: list[str], reader: object):
    with pytest.raises(ConfigError, match=r"LaminaClassifier.fit: reader is .*a lamina.Reader with a SequenceClassif"):
        LaminaClassifier(base, reader=reader).fit(texts, mood)


def test_weights_of_classes_reach_the_loss(base: str, texts: list[str]):
    y = ["good"] * 6 + ["bad"] * 2
    fitted = [LaminaClassifier(base, class_weight=given, **FAST).fit(texts, y) for given in ("balanced", {"bad": 5})]
    heads = [one.bank_["reader"].config.head for one in fitted]
    np.testing.assert_allclose([head.class_weights for head in heads], [(2.0, 2 / 3), (5.0, 1.0)])


def test_class_weights_of_a_given_reader_stay(base: str, texts: list[str], mood: list[str]):
    classes = sorted(set(mood))
    head = SequenceClassification(tuple(classes), pooling="mean", class_weights=(1.0, 5.0))
    fitted = LaminaClassifier(base, reader=lamina.Reader(ScalarMix(), head), **FAST).fit(texts, mood)
    assert fitted.bank_["reader"].config.head.class_weights == (1.0, 5.0)
    other = lamina.Reader(ScalarMix(), replace(head, labels=tuple(reversed(classes))))
    with pytest.raises(ConfigError, match="the reader's class_weights are for"):
        LaminaClassifier(base, reader=other).fit(texts, mood)


def test_a_reader_with_weights_is_refused(base: str, texts: list[str], mood: list[str]):
    head = SequenceClassification(tuple(sorted(set(mood))), pooling="mean")
    given = lamina.Reader(ScalarMix(), head, weights={"fusion.scores": torch.zeros(1)})
    with pytest.raises(ConfigError, match="reader has weights, and fit trains from new ones"):
        LaminaClassifier(base, reader=given).fit(texts, mood)


def test_a_fraction_is_set_aside_to_choose_by(base: str, texts: list[str], mood: list[str]):
    fitted = LaminaClassifier(base, validation_fraction=0.25, **FAST).fit(texts, mood)
    row = fitted.result_.table[0]
    assert row["score"] is not None
    assert fitted.bank_["reader"].info["rows"] == 6
    whole = LaminaClassifier(base, **FAST).fit(texts, mood)
    assert whole.result_.table[0]["score"] is None
    assert (whole.bank_["reader"].info["rows"], whole.bank_["reader"].info["scores"]) == (8, {})


def test_few_texts_are_read_more_often(base: str, texts: list[str], mood: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.train.plan.LEAST_STEPS", 15)
    assert LaminaClassifier(base, batch_size=4).fit(texts, mood).result_.steps == 16
    assert LaminaClassifier(base, batch_size=np.int64(4), epochs=np.int64(2)).fit(texts, mood).result_.steps == 4
    assert LaminaClassifier(base, batch_size=1).fit(texts, mood).result_.steps == 24
    accumulated = LaminaClassifier(base, batch_size=2, options={"gradient_accumulation_steps": 2})
    assert accumulated.fit(texts, mood).result_.steps == 16


def test_states_that_are_kept_are_those_of_the_model(base: str, texts: list[str], mood: list[str]):
    kept = LaminaClassifier(base, **FAST | {"options": None}).fit(texts, mood)
    anew = LaminaClassifier(base, **FAST).fit(texts, mood)
    np.testing.assert_allclose(kept.decision_function(texts), anew.decision_function(texts), rtol=1e-4, atol=1e-4)


def test_the_seed_decides_and_a_generator_is_drawn_from(base: str, texts: list[str], mood: list[str]):
    def fit(random_state: object) -> np.ndarray:
        estimator = LaminaClassifier(base, random_state=random_state, epochs=1, options={"cache": "off"})
        return estimator.fit(texts, mood).predict_proba(texts)

    assert np.array_equal(fit(1), fit(1))
    assert not np.array_equal(fit(1), fit(2))
    rng = np.random.RandomState(0)
    assert np.array_equal(first := fit(rng), fit(np.random.RandomState(0)))
    assert not np.array_equal(first, fit(rng))


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"options": {"epoch": 3}}, UnknownNameError, "unknown option 'epoch'"),
        ({"options": {"epochs": 3}}, ConfigError, "options has 'epochs'; it is a parameter by itself"),
        ({"options": {"seed": 3}}, ConfigError, "use random_state instead"),
        ({"options": "cache"}, ConfigError, "options are a str; they must be a mapping"),
        ({"batch_size": "8"}, ConfigError, "batch_size is '8'; it must be a whole number"),
        ({"epochs": 0}, ConfigError, "epochs is 0; it must be at least 1"),
        ({"random_state": "x"}, DataError, "'x' cannot be used to seed"),
        ({"validation_fraction": 2.0}, DataError, "test_size"),
        ({"model": 3}, ConfigError, "model is int; it must be a hub id, a folder"),
    ],
)
def test_parameters_that_do_not_fit(
    base: str, texts: list[str], mood: list[str], parameters: dict, error: type, message: str
):
    with pytest.raises(error, match=message):
        LaminaClassifier(**{"model": base, **parameters}).fit(texts, mood)


def test_before_fit_and_with_one_class(base: str, texts: list[str]):
    with pytest.raises(NotFittedError):
        LaminaClassifier(base).predict(texts)
    with pytest.raises(DataError, match=r"y has one class, .*'good'.*needs at least two classes"):
        LaminaClassifier(base).fit(texts, ["good"] * 8)


def test_a_fit_that_fails_leaves_nothing_of_the_one_before(base: str, texts: list[str], mood: list[str]):
    fitted = LaminaClassifier(base, **FAST).fit(texts, mood)
    with pytest.raises(ConfigError, match="batch_size"):
        fitted.set_params(batch_size=0).fit(texts, ["a", "b"] * 4)
    with pytest.raises(NotFittedError):
        fitted.predict(texts)


def test_a_fit_that_is_refused_before_training_leaves_the_one_before(base: str, texts: list[str], mood: list[str]):
    fitted = LaminaClassifier(base, **FAST).fit(texts, mood)
    with pytest.raises(DataError, match="test_size"):
        fitted.set_params(validation_fraction=2.0).fit(texts, ["a", "b"] * 4)
    assert fitted.predict(texts).tolist() == mood
    fitted.set_params(validation_fraction=None)
    frame = pd.DataFrame({"one": texts, "two": texts})
    with pytest.raises(DataError, match="one class"):
        fitted.fit(frame, ["good"] * 8)
    with pytest.raises(ModelNotFoundError):
        fitted.set_params(model=f"{base}-missing").fit(frame, mood)
    assert not hasattr(fitted, "n_features_in_")
    assert not hasattr(fitted, "feature_names_in_")
    assert fitted.predict(texts).tolist() == mood


def test_calibrated(base: str, texts: list[str], mood: list[str]):
    fitted = CalibratedClassifierCV(LaminaClassifier(base, **FAST), cv=2).fit(texts, mood)
    assert fitted.score(texts, mood) == 1.0
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(texts), fitted.predict_proba(texts))


def test_predictions_go_through_the_backend(
    base: str, texts: list[str], mood: list[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []
    predicting = sys.modules["lamina.prediction.predict"]  # the package has a function of this name
    monkeypatch.setattr(predicting, "engine_of", lambda _bank, backend, *_, **__: asked.append(backend))
    classifier = LaminaClassifier(base, epochs=1, backend="onnx").fit(texts, mood)
    classifier.predict(texts)
    assert clone(classifier).backend == "onnx"
    classifier.set_params(backend="torch").predict_proba(texts)
    assert asked == ["onnx", "torch"]
    with pytest.raises(UnknownNameError, match="unknown backend 'jax'; known: auto, torch, onnx, int8"):
        classifier.set_params(backend="jax").predict(texts)


@pytest.mark.full
def test_onnx_runtime_predicts_the_same_classes(base: str, texts: list[str], mood: list[str]):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    classifier = LaminaClassifier(base, epochs=1, backend="torch").fit(texts, mood)
    expected = classifier.predict_proba(texts)
    np.testing.assert_allclose(classifier.set_params(backend="onnx").predict_proba(texts), expected, atol=1e-4)


@pytest.mark.parametrize(("one", "other"), [("warm", "warm "), ("caf\u00e9", "cafe\u0301"), ("warm", "\twarm")])
def test_labels_that_become_one_class_are_named_and_scored_as_one(
    base: str, texts: list[str], mood: list[str], caplog: pytest.LogCaptureFixture, one: str, other: str
):
    y = [(one, other)[row % 4 > 1] if label == mood[0] else label for row, label in enumerate(mood)]
    assert len(set(y)) == 3
    fitted = LaminaClassifier(base, learning_rate=0.05, epochs=20, batch_size=4).fit(texts, y)
    assert len(fitted.classes_) == 2
    assert "become one class. Clean y: scorers of scikit-learn count them as different" in caplog.text
    assert fitted.score(texts, y) == fitted.score(texts, np.array(y, object)) == 1.0
    assert fitted.score(texts, np.array(y, object)[:, None]) == fitted.score(texts, pd.DataFrame({"y": y})) == 1.0
    assert fitted.score(texts, ["other"] * len(texts)) == 0.0
