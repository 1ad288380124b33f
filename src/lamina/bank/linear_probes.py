"""Convert fitted linear models of scikit-learn, and probes of lmprobe, to weights of readers."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lamina.heads.base import ProblemType

Array = npt.NDArray[np.float64]

_CLASSIFIERS = (
    *("LogisticRegression", "LogisticRegressionCV", "SGDClassifier", "LinearSVC", "RidgeClassifier"),
    *("RidgeClassifierCV", "Perceptron", "PassiveAggressiveClassifier", "LinearDiscriminantAnalysis"),
)
_REGRESSORS = (
    *("LinearRegression", "Ridge", "RidgeCV", "Lasso", "LassoCV", "ElasticNet", "ElasticNetCV", "SGDRegressor"),
    *("LinearSVR", "HuberRegressor", "BayesianRidge"),
)
_SCALERS = ("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "PCA")


@dataclass(frozen=True)
class LinearProbe:
    """A linear map from states to logits.

    Attributes:
        weight: Weight `[logits, features]`.
        bias: Bias `[logits]`.
        classes: Names of the classes; empty for a regression.
        problem_type: "classification", "regression" or "multi_label".
    """

    weight: Array
    bias: Array
    classes: tuple[str, ...]
    problem_type: ProblemType

    def after(self, scale: Array, shift: Array) -> LinearProbe:
        """Return the map that gives for x what this one gives for `x * scale + shift`, or `x @ scale + shift`.

        The second holds if `scale` is a matrix, the first if it is a vector.
        """
        weight = self.weight * scale if scale.ndim == 1 else self.weight @ scale.T
        return LinearProbe(weight, self.bias + self.weight @ shift, self.classes, self.problem_type)

    def by_layer(self, layers: int) -> tuple[Tensor, Tensor]:
        """Split the features by layer: return the weight `[layers, logits, width]` and the bias `[logits]` as float32.

        Raises:
            ConfigError: If the number of features is not a multiple of the number of layers.
        """
        logits, features = self.weight.shape
        if features % layers:
            got = f"the probe reads {features} features, and {layers} layers were named"
            raise ConfigError(f"reader: {got}; it reads the states of each layer, one after the other.")
        weight = self.weight.reshape(logits, layers, -1).transpose(1, 0, 2)
        return torch.tensor(weight, dtype=torch.float32), torch.tensor(self.bias, dtype=torch.float32)


def linear_probe(probe: object) -> LinearProbe:
    """Return the linear map that a fitted model computes, with the scalers before it folded in.

    Args:
        probe: A linear classifier or regressor of scikit-learn, a `Pipeline` or grid search that ends with one, a
            `OneVsRestClassifier` of linear classifiers that was fitted on several labels, or a `Probe` of lmprobe.

    Raises:
        ConfigError: If it is a file or another model, is not fitted, has coefficients that are NaN or infinite, or
            predicts several numbers; if a step before it is unknown, not linear or not fitted; or if it is a
            `OneVsRestClassifier` over exclusive classes or of regressors.
    """
    if isinstance(probe, str | bytes | PathLike):
        hint = "Load it in your own program, if you trust where it is from, and pass the model itself"
        raise ConfigError(f"reader: got a file instead of a probe; files are not unpickled. {hint}.")
    model: Any = probe
    if hasattr(model, "best_estimator_"):
        return linear_probe(model.best_estimator_)
    if _is(model, ("Pipeline",)):
        return _pipeline([step for _, step in model.steps if step is not None and not isinstance(step, str)])
    if _module(model) == "lmprobe" and hasattr(model, "classifier_"):
        return _pipeline([step for step in (getattr(model, "scaler_", None), model.classifier_) if step is not None])
    if _is(model, ("OneVsRestClassifier",)):
        return _one_vs_rest(model)
    return _estimator(model)


def _one_vs_rest(model: Any) -> LinearProbe:  # noqa: ANN401
    """Return the linear map of a `OneVsRestClassifier` over several labels, with one logit per label.

    Raises ConfigError if it is not fitted, its classes exclude each other, or the model of a label is a regressor or
    one that `linear_probe` refuses.
    """
    what = "reader: the OneVsRestClassifier"
    if not hasattr(model, "estimators_"):
        raise ConfigError(f"{what} is not fitted; it has no estimators. Call its fit first.")
    if not model.multilabel_:
        hint = "For classes that exclude each other, fit a linear classifier such as LogisticRegression without it"
        raise ConfigError(f"{what} has exclusive classes; only one fitted on a 0/1 matrix of labels is read. {hint}.")
    parts = [linear_probe(estimator) for estimator in model.estimators_]
    if any(part.problem_type != "classification" for part in parts):  # regressors give a label from 0.5 on, not from 0
        raise ConfigError(f"{what} does not have a classifier for every label. Fit it with a linear classifier.")
    weight, bias = np.stack([part.weight[-1] for part in parts]), np.stack([part.bias[-1] for part in parts])
    return LinearProbe(weight, bias, tuple(map(str, model.classes_)), "multi_label")


def _pipeline(steps: Sequence[Any]) -> LinearProbe:
    """Return the linear map that the fitted `steps` of a pipeline compute; the last is a linear model.

    Raises ConfigError if there are no steps, or a step is unknown, not fitted or not linear.
    """
    if not steps:
        raise ConfigError("reader: the pipeline has no step that computes anything. Let it end with a linear model.")
    linear = linear_probe(steps[-1])
    for step in reversed(steps[:-1]):
        linear = linear.after(*_affine(step))
    return linear


def _estimator(model: Any) -> LinearProbe:  # noqa: ANN401
    """Return the linear map of a single classifier or regressor; the first of two exclusive classes has the logit 0.

    Raises ConfigError if the class of `model` is not known; if it is not fitted, or has coefficients that are NaN or
    infinite; or if it is a regressor of several numbers.
    """
    classifies = _is(model, _CLASSIFIERS)
    if not classifies and not _is(model, _REGRESSORS):
        known = ", ".join((*_CLASSIFIERS[:5], *_REGRESSORS[:2]))
        raise ConfigError(f"reader: a {type(model).__name__} is not a known linear model; {known} and others are.")
    what = f"reader: the {type(model).__name__}"
    if not hasattr(model, "coef_"):
        raise ConfigError(f"{what} is not fitted; it has no coefficients. Call its fit first.")
    coefficients = model.coef_.toarray() if hasattr(model.coef_, "toarray") else model.coef_  # after `sparsify`
    weight = np.atleast_2d(np.asarray(coefficients, dtype=np.float64))
    bias = np.broadcast_to(np.asarray(model.intercept_, dtype=np.float64).reshape(-1), (len(weight),)).copy()
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise ConfigError(f"{what} has coefficients that are NaN or infinite. Fit it again.")
    if not classifies:
        if len(weight) != 1:
            raise ConfigError(f"{what} predicts {len(weight)} numbers; a reader predicts one.")
        return LinearProbe(weight, bias, (), "regression")
    classes = tuple(map(str, model.classes_))
    binarizer = getattr(model, "_label_binarizer", None)  # of RidgeClassifier and RidgeClassifierCV
    if binarizer is not None and binarizer.y_type_.startswith("multilabel"):  # a label applies if its score is above 0
        return LinearProbe(weight, bias, classes, "multi_label")
    if len(classes) == 2 and len(weight) == 1:  # the score of the second class against the first
        weight, bias = np.concatenate([0 * weight, weight]), np.concatenate([0 * bias, bias])
    return LinearProbe(weight, bias, classes, "classification")


def _affine(step: Any) -> tuple[Array, Array]:  # noqa: ANN401
    """Return the scale (vector or matrix) and the shift that `step`, a fitted scaler or PCA, applies to its input.

    Raises ConfigError if its class is not known, it is not fitted, or it clips its output.
    """
    if _module(step) == "lmprobe" and hasattr(step, "stds_"):  # PerLayerScaler, whose numbers broadcast over layers
        shape = (1, step.n_layers, step.hidden_dim)
        means, stds = (np.broadcast_to(part, shape).reshape(-1) for part in (step.means_, step.stds_))
        return 1 / stds, -means / stds
    what = f"reader: the step {type(step).__name__}"
    if not _is(step, _SCALERS):
        raise ConfigError(f"{what} is not folded into weights; {', '.join(_SCALERS)} are.")
    if not hasattr(step, "n_features_in_"):
        raise ConfigError(f"{what} is not fitted. Call fit of the whole pipeline first.")
    if _is(step, ("PCA",)):
        matrix = np.asarray(step.components_, np.float64).T
        if step.whiten:
            scale = np.sqrt(step.explained_variance_)
            matrix = matrix / np.maximum(scale, np.finfo(scale.dtype).eps)  # as PCA.transform does
        return matrix, -np.asarray(step.mean_, np.float64) @ matrix
    size = step.n_features_in_
    if getattr(step, "clip", False):  # of MinMaxScaler and MaxAbsScaler
        raise ConfigError(f"{what} clips its output, which is not linear. Fit the pipeline with clip=False.")
    if _is(step, ("MinMaxScaler",)):
        return np.asarray(step.scale_, np.float64), np.asarray(step.min_, np.float64)
    scale = 1 / np.asarray(np.ones(size) if step.scale_ is None else step.scale_, np.float64)
    mean = getattr(step, "mean_", None) if getattr(step, "with_mean", False) else None
    return scale, np.zeros(size) if mean is None else -np.asarray(mean, np.float64) * scale


def _module(model: object) -> str:
    return type(model).__module__.partition(".")[0]


def _is(model: object, names: Sequence[str]) -> bool:
    """Return whether an object's class is a scikit-learn class in `names`, or a subclass. Does not import sklearn."""
    mro = cast("Sequence[type]", type(model).__mro__)
    return any(kind.__module__.partition(".")[0] == "sklearn" and kind.__name__ in names for kind in mro)
