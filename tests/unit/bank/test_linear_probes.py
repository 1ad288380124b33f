"""Linear models of scikit-learn become readers with the same scores, and linear readers become such models."""

from __future__ import annotations

import copy
import json
from functools import partial
from inspect import unwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.portions import one_in
from tests.support.training import tiny_bank

from lamina.bank import Reader
from lamina.errors import ConfigError, StoreError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.base import FusionConfig
from lamina.fusion.concat import Concat
from lamina.fusion.elementwise import Elementwise
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.mean import Mean
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.store.linear_reader import LinearReader

sklearn = pytest.importorskip("sklearn")
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.linear_model import (  # noqa: E402
    LinearRegression,
    LogisticRegression,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    SGDRegressor,
)
from sklearn.multiclass import OneVsRestClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import MinMaxScaler, StandardScaler  # noqa: E402
from sklearn.svm import LinearSVC  # noqa: E402

WIDTH, WITHIN = 16, 1e-6


class MeanOfFeedForward(Mean):
    site = "ffn"


from_sklearn: Any = partial(unwrap(Reader.from_sklearn.__func__), Reader)  # without the type checks of the tests


def normal(*size: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=size)


def diverged() -> SGDRegressor:
    probe = SGDRegressor().fit(normal(20, WIDTH), normal(20))
    probe.coef_[0] = np.nan
    return probe


def states(rows: int, layers: int, tokens: int = 5) -> dict[int, torch.Tensor]:
    return dict(enumerate(torch.from_numpy(normal(layers, rows, tokens, WIDTH).astype(np.float32))))


def pooled(by_layer: dict[int, torch.Tensor], pooling: str | None) -> np.ndarray:
    pools: Any = {
        "mean": lambda s: s.mean(1),
        "first": lambda s: s[:, 0],
        "last": lambda s: s[:, -1],
        None: lambda s: s,
    }
    return torch.cat([pools[pooling](state) for state in by_layer.values()], dim=-1).double().numpy()


def logits(reader: Reader, by_layer: dict[int, torch.Tensor]) -> np.ndarray:
    bank = tiny_bank({"x": reader}).eval()
    batch = {"attention_mask": torch.ones(by_layer[0].shape[:2], dtype=torch.long)}
    with torch.no_grad():
        return bank.read_states({"main": by_layer}, batch)["x"].logits.double().numpy()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("layers", [[2], [0, 1, 3]])
def test_a_logistic_regression_behind_a_scaler_has_the_same_probabilities(layers: list[int], pooling: Any):
    by_layer = states(60, 4)
    features = pooled({layer: by_layer[layer] for layer in layers}, pooling)
    labels = np.array(["a", "b", "c"])[features[:, :3].argmax(1)]
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(features, labels)
    reader = Reader.from_sklearn(probe, layers=layers, pooling=pooling)
    found = torch.from_numpy(logits(reader, by_layer)).softmax(-1).numpy()
    assert reader.head.labels == ("a", "b", "c")
    np.testing.assert_allclose(found, probe.predict_proba(features), atol=WITHIN)


@pytest.mark.parametrize(
    "model", [LogisticRegression(), LinearSVC(), RidgeClassifier()], ids=lambda m: type(m).__name__
)
def test_the_scores_of_two_classes_are_the_decision_function(model: Any):
    by_layer = states(40, 4)
    features = pooled({1: by_layer[1]}, "mean")
    model.fit(features, features[:, 0] > 0)
    found = logits(Reader.from_sklearn(model, layers=1, labels=["no", "yes"]), by_layer)
    np.testing.assert_allclose(found[:, 1] - found[:, 0], model.decision_function(features), atol=WITHIN, rtol=WITHIN)


@pytest.mark.parametrize("steps", [[], [MinMaxScaler()], [StandardScaler(with_mean=False), PCA(5, whiten=True)]])
@pytest.mark.parametrize("model", [Ridge(), LinearRegression()], ids=lambda m: type(m).__name__)
def test_a_regression_predicts_the_same_numbers(steps: list[Any], model: Any):
    by_layer = states(40, 4)
    features = pooled({1: by_layer[1], 2: by_layer[2]}, "mean")
    probe = make_pipeline(*steps, model).fit(features, features[:, 0] + 3)
    found = logits(Reader.from_sklearn(probe, layers=[1, 2]), by_layer)
    np.testing.assert_allclose(found[:, 0], probe.predict(features), atol=WITHIN, rtol=WITHIN)


def test_a_probe_of_tokens_labels_tokens():
    by_layer = states(8, 4)
    features = pooled({3: by_layer[3]}, None)
    probe = LogisticRegression().fit(features.reshape(-1, WIDTH), features.reshape(-1, WIDTH)[:, 0] > 0)
    found = torch.from_numpy(logits(Reader.from_sklearn(probe, layers=3, pooling=None), by_layer)).softmax(-1)
    np.testing.assert_allclose(found.reshape(-1, 2), probe.predict_proba(features.reshape(-1, WIDTH)), atol=WITHIN)


@pytest.mark.parametrize("part", [LogisticRegression(), make_pipeline(StandardScaler(), LogisticRegression())])
def test_several_labels(part: Any):
    by_layer = states(40, 4)
    features = pooled({1: by_layer[1]}, "mean")
    probe = OneVsRestClassifier(part).fit(features, (features[:, :3] > 0).astype(int))
    reader = Reader.from_sklearn(probe, layers=1, labels=["x", "y", "z"])
    found = torch.from_numpy(logits(reader, by_layer)).sigmoid()
    np.testing.assert_allclose(found, probe.predict_proba(features), atol=WITHIN)


@pytest.mark.parametrize("model", [RidgeClassifier(), RidgeClassifierCV()], ids=lambda m: type(m).__name__)
def test_a_ridge_classifier_of_several_labels_predicts_the_same_labels(model: Any):
    by_layer = states(40, 4)
    features = pooled({1: by_layer[1]}, "mean")
    for labels in (2, 3):
        probe = make_pipeline(StandardScaler(), model).fit(features, (features[:, :labels] > 0).astype(int))
        reader: Any = Reader.from_sklearn(probe, layers=1)
        found = logits(reader, by_layer)
        assert reader.head.problem_type == "multi_label"
        assert {0, 1, 2} <= set(probe.predict(features).sum(1))
        np.testing.assert_allclose(found, probe.decision_function(features), atol=WITHIN, rtol=WITHIN)
        np.testing.assert_array_equal(found > 0, probe.predict(features))


def test_one_vs_rest_is_read_only_over_several_labels():
    features = normal(20, WIDTH)
    exclusive = OneVsRestClassifier(LogisticRegression()).fit(features, features[:, :3].argmax(1))
    with pytest.raises(ConfigError, match="has exclusive classes; only one fitted on a 0/1 matrix of labels is read"):
        Reader.from_sklearn(exclusive, layers=1)
    with pytest.raises(ConfigError, match="the OneVsRestClassifier is not fitted"):
        Reader.from_sklearn(OneVsRestClassifier(LogisticRegression()), layers=1)
    numbers = OneVsRestClassifier(Ridge()).fit(features, (features[:, :3] > 0).astype(int))
    with pytest.raises(ConfigError, match="does not have a classifier for every label"):
        Reader.from_sklearn(numbers, layers=1)


def test_a_probe_of_lmprobe_is_known_by_its_parts():
    """lmprobe is not a dependency: an object with the attributes of its `Probe` and `PerLayerScaler` stands for it."""
    by_layer = states(40, 4)
    features = pooled({1: by_layer[1], 2: by_layer[2]}, "last")
    means, stds = normal(1, 2, WIDTH), 1 + abs(normal(1, 2, WIDTH))
    scaled = (features - means.reshape(-1)) / stds.reshape(-1)
    classifier = LogisticRegression().fit(scaled, scaled[:, 0] > 0)
    kinds = [type(name, (SimpleNamespace,), {"__module__": "lmprobe.probe"}) for name in ("Probe", "PerLayerScaler")]
    scaler = kinds[1](n_layers=2, hidden_dim=WIDTH, means_=means, stds_=stds)
    reader = Reader.from_sklearn(kinds[0](classifier_=classifier, scaler_=scaler), layers=[1, 2], pooling="last")
    found = torch.from_numpy(logits(reader, by_layer)).softmax(-1)
    np.testing.assert_allclose(found, classifier.predict_proba(scaled), atol=WITHIN)


@pytest.mark.parametrize(
    ("probe", "options", "error"),
    [
        ("probe.pkl", {}, "got a file instead of a probe; files are not unpickled"),
        (LogisticRegression(), {}, "LogisticRegression is not fitted"),
        (RandomForestClassifier(), {}, "a RandomForestClassifier is not a known linear model"),
        (make_pipeline("passthrough"), {}, "the pipeline has no step that computes anything"),
        (Ridge().fit(normal(20, WIDTH), normal(20)), {"labels": "ab"}, "labels is 'ab'; it must be a list"),
        (diverged(), {}, "the SGDRegressor has coefficients that are NaN or infinite"),
    ],
)
def test_what_is_no_fitted_linear_model_is_refused(probe: Any, options: Any, error: str):
    with pytest.raises(ConfigError, match=error):
        Reader.from_sklearn(probe, layers=1, **options)


def test_sparse_coefficients_are_those_of_the_dense_model():
    features = normal(20, WIDTH)
    probe = LogisticRegression().fit(features, features[:, 0] > 0)
    layer = np.int64(1)  # such as np.argmax returns
    dense, sparse = (from_sklearn(model, layers=layer).weights for model in (probe, copy.deepcopy(probe).sparsify()))
    assert dense is not None
    assert sparse is not None
    assert torch.equal(dense["fusion.projection"], sparse["fusion.projection"])


def test_a_component_without_variance_is_whitened_as_pca_does():
    features = np.repeat(normal(20, 1), WIDTH, axis=1)  # of rank 1
    probe = make_pipeline(PCA(2, whiten=True, svd_solver="full"), Ridge()).fit(features, features[:, 0])
    probe[0].explained_variance_[1] = 0
    reader = Reader.from_sklearn(probe, layers=1)
    assert reader.weights is not None
    assert all(weight.isfinite().all() for weight in reader.weights.values())


@pytest.mark.parametrize("layers", [[-1, 1], [2, 1], [], True, 1.0, "1", None])
def test_layers_of_a_probe_ascend_from_0(layers: Any):
    features = normal(20, 2 * WIDTH)
    with pytest.raises(ConfigError, match="the layers of a probe are ascending numbers from 0"):
        from_sklearn(Ridge().fit(features, features[:, 0]), layers=layers)


def test_a_scaler_that_clips_is_refused():
    features = normal(20, WIDTH)
    probe = make_pipeline(MinMaxScaler(clip=True), Ridge()).fit(features, features[:, 0])
    with pytest.raises(ConfigError, match=r"clips its output, which is not linear. Fit .* with clip=False"):
        Reader.from_sklearn(probe, layers=1)


def test_a_probe_of_another_width_is_refused_when_it_is_added():
    features = normal(20, 8)
    reader = Reader.from_sklearn(Ridge().fit(features, features[:, 0]), layers=1)
    with pytest.raises(ConfigError, match="the probe belongs to a model of another width"):
        tiny_bank({"x": reader})
    with pytest.raises(ConfigError, match="the probe reads 8 features, and 3 layers were named"):
        Reader.from_sklearn(Ridge().fit(features, features[:, 0]), layers=[1, 2, 3])


FUSIONS = [Mean(), ScalarMix(), Elementwise(), Concat(dim=6, bias=True)]


@pytest.mark.parametrize("fusion", one_in(3, FUSIONS), ids=lambda fusion: type(fusion).__name__)
@pytest.mark.parametrize("problem", ["classification", "binary", "regression", "multi_label", "tokens"])
def test_linear_readers_become_other_formats(tmp_path: Path, fusion: Any, problem: str):
    labels = {"binary": ("a", "b"), "regression": ("n",)}.get(problem, ("a", "b", "c"))
    head: Any = TokenClassification(labels, encoder_layers=0)
    if problem != "tokens":
        kind: Any = "classification" if problem == "binary" else problem
        head = SequenceClassification(labels, pooling="mean", problem_type=kind)
    bank, by_layer = tiny_bank({"x": Reader(fusion, head)}).eval().double(), states(6, 4)
    with torch.no_grad():
        for parameter in bank["x"].parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        batch = {"attention_mask": torch.ones(6, 5, dtype=torch.long)}
        doubled = {layer: state.double() for layer, state in by_layer.items()}
        expected = bank.read_states({"main": doubled}, batch)["x"].logits.numpy().reshape(-1, len(labels))
    linear = LinearReader.of(bank, "x")
    pooling = None if problem == "tokens" else "mean"
    features = pooled({layer: by_layer[layer] for layer in linear.layers}, pooling)
    features = features.reshape(-1, features.shape[-1])
    model: Any = linear.to_sklearn()
    scores = model.predict(features)[:, None] if problem == "regression" else model.decision_function(features)
    against = expected[:, 1] - expected[:, 0] if len(labels) == 2 else expected
    np.testing.assert_allclose(scores, against, atol=WITHIN)
    linear.save_safetensors(tmp_path / "x.safetensors")
    again = LinearReader.load(tmp_path / "x.safetensors")
    assert torch.equal(again.weight, linear.weight)
    assert (again.layers, again.labels, again.pooling) == (linear.layers, linear.labels, linear.pooling)
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    linear.save_onnx(tmp_path / "x.onnx")
    session = runtime.InferenceSession(str(tmp_path / "x.onnx"), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"states": features.astype(np.float32)})
    np.testing.assert_allclose(answer, expected, atol=WITHIN, rtol=WITHIN)


def test_a_file_of_a_later_version_is_read_and_one_without_a_setting_is_refused(tmp_path: Path):
    facts = {"layers": [1], "labels": ["a", "b"], "pooling": "mean", "problem_type": "classification"}
    tensors, path = {"weight": torch.eye(2), "bias": torch.zeros(2)}, tmp_path / "x.safetensors"
    save_file(tensors, path, {"lamina_linear": json.dumps({**facts, "later": 1})})
    assert LinearReader.load(path).labels == ("a", "b")
    del facts["pooling"]
    for metadata, lost in (({"lamina_linear": json.dumps(facts)}, "pooling"), (None, "lamina_linear")):
        save_file(tensors, path, metadata)
        with pytest.raises(StoreError, match=rf"is not a linear reader \(KeyError '{lost}'\)"):
            LinearReader.load(path)


def test_a_reader_that_is_not_linear_is_refused():
    head = SequenceClassification(("a", "b"), pooling="mean")
    with pytest.raises(
        ConfigError, match="AdaLayers under a head with pooling 'mean' and encoder_layers=0, which is not linear"
    ):
        LinearReader.of(tiny_bank({"x": Reader(AdaLayers(dim=4), head)}), "x")


@pytest.mark.parametrize("fusion", [MeanOfFeedForward(), ExtraLayers()])
def test_a_reader_inside_the_blocks_is_not_linear(fusion: FusionConfig):
    head = SequenceClassification(("a", "b"), pooling="mean")
    with pytest.raises(ConfigError, match="linear reader: 'x' reads inside the blocks, and a linear map gets only"):
        LinearReader.of(tiny_bank({"x": Reader(fusion, head)}), "x")
