"""Rival methods on fixed features: logistic regression, PCA with regression, nearest neighbours and XGBoost.

They follow sae-probes 0.4.2: the same grids, folds and final fits, so that scores can be compared with the paper's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from lamina.errors import MissingExtraError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix: TypeAlias = NDArray[np.floating]  # [rows, features]; TF-IDF gives a sparse matrix in its place
    Classes: TypeAlias = NDArray[np.integer]  # [rows], 0 or 1
    Folds: TypeAlias = Sequence[tuple[Sequence[int] | Classes, Sequence[int] | Classes]]

_PARTS = (  # of scikit-learn
    *("decomposition", "exceptions", "feature_extraction.text", "linear_model"),
    *("metrics", "model_selection", "neighbors", "preprocessing"),
)
T = TypeVar("T")
STRENGTHS = np.logspace(5, -5, 10).tolist()  # values of C, the inverse of the L2 penalty
_PCA_MOST = 100  # largest number of components
_NEIGHBOURS_MOST = 100
_TRIALS = 10  # random settings of XGBoost that are tried
_ITERATIONS = 1000


class Fitted(NamedTuple):
    """The result of `logistic` or another method of this module on one data set.

    Attributes:
        scores: Scores of the test rows, higher for class 1.
        held_out: Mean AUC of the chosen setting on held-out training rows; 0.5 if none are held out.
        size: Number of parameters of the final model.
    """

    scores: Matrix
    held_out: float
    size: int


def import_packages(method: str) -> None:
    """Import what the methods of this module use, so that the first one that is timed does not pay for it.

    For the method "xgboost", that package is imported too; `boosted_trees` says if it is missing.
    """
    for part in _PARTS:
        import_module(f"sklearn.{part}")
    if method == "xgboost":
        with suppress(ImportError):
            import_module("xgboost")


def folds_of(classes: Classes, seed: int) -> Folds:
    """Return (training rows, held-out rows) of each fold, for choosing a method's setting. There may be no fold.

    `classes` are those of the training rows. From 128 rows on, the last fifth of them, at most 100, is held out. Fewer
    rows have no fold if all are of one class, or there are at most three. With up to 12 rows, all pairs are held out in
    turn; with more, there are six stratified folds, drawn with `seed`. Pairs and folds whose held-out rows lack a class
    are left out.
    """
    from sklearn.model_selection import LeavePOut, StratifiedKFold

    count = len(classes)
    if count >= 128:
        start = count - min(int(0.2 * count), 100)
        return [(range(start), range(start, count))]
    if count <= 3 or np.bincount(classes, minlength=2).min() < 1:
        return []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class")
        cv = LeavePOut(2) if count <= 12 else StratifiedKFold(6, shuffle=True, random_state=seed)
        splits = list(cv.split(np.zeros(count), classes))
    return [fold for fold in splits if len(np.unique(classes[fold[1]])) == 2]


def auc(classes: Classes, scores: Matrix) -> float:
    """Return the area under the ROC curve; 0.5 if only one class occurs."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(classes, scores)) if len(np.unique(classes)) == 2 else 0.5


def _held_out(make: Callable[[], Any], features: Matrix, classes: Classes, folds: Folds) -> float:
    """Return the mean AUC on the held-out rows of all folds; each fold fits a new model, which `make` returns.

    A fold whose training or held-out rows have one class counts 0.5; the result is 0.5 without folds.
    `features`, `[rows, features]`, and `classes` are those of all training rows.
    """
    scores: list[float] = []
    for train, held in folds:
        if len(np.unique(classes[train])) < 2:
            scores.append(0.5)
            continue
        model = make().fit(features[train], classes[train])
        scores.append(auc(classes[held], model.predict_proba(features[held])[:, 1]))
    return float(np.mean(scores)) if scores else 0.5


def _choose(values: Sequence[T], usual: T, folds: Folds, score: Callable[[T], float]) -> tuple[T, float]:
    """Return the value of a setting with the best `score` (the mean AUC on held-out rows), and that score.

    Without folds no rows are held out: `usual` is returned, with a score of 0.5.
    """
    if not folds:
        return usual, 0.5
    scores = [score(value) for value in values]
    return values[int(np.argmax(scores))], max(scores)


@contextmanager
def _in_one_thread() -> Iterator[None]:
    """Hide warnings that a regression has not converged, and use one thread, inside the `with` block.

    The matrices are small, and threads of linear algebra beside those of torch wait for each other.
    """
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1, "blas"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def logistic(train: Matrix, classes: Classes, test: Matrix, *, seed: int) -> Fitted:
    """Fit a logistic regression with an L2 penalty, whose strength is chosen on held-out rows, and score the test rows.

    `train` and `test` are features `[rows, features]`; `classes` are 0 or 1 for each training row; `seed` decides the
    folds. Without folds no rows are held out, and C is 1.
    """
    size = train.shape[1] + 1
    folds = folds_of(classes, seed)
    with _in_one_thread():
        train, test = fewer_columns(train, test)
        strength, held_out = _choose(
            STRENGTHS, 1.0, folds, lambda c: _held_out(partial(_regression, c, seed), train, classes, folds)
        )
        order = np.random.RandomState(seed).permutation(len(classes))
        model = _regression(strength, seed).fit(train[order], classes[order])
    return Fitted(model.predict_proba(test)[:, 1], held_out, size)


def _regression(strength: float, seed: int) -> Any:  # noqa: ANN401 scikit-learn's class, which is imported late
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=_ITERATIONS, random_state=seed)


def fewer_columns(train: Matrix, test: Matrix) -> tuple[Matrix, Matrix]:
    """Return training and test features, rotated so that there are no more columns than training rows.

    A regression with an L2 penalty has the same solution on the rotated features, which saves time. Features with no
    more columns than rows, and sparse ones, are returned as they are.
    """
    rows, columns = train.shape
    if columns <= rows or not isinstance(train, np.ndarray):
        return train, test
    left, values, right = np.linalg.svd(train, full_matrices=False)
    return left * values, test @ right.T


def principal_components(train: Matrix, classes: Classes, test: Matrix, *, seed: int) -> Fitted:
    """Fit a logistic regression on the first principal components of standardised features, and score the test rows.

    The number of components, up to 100, is the one that scores best on held-out rows; the largest if none are held out.
    Arguments as in `logistic`.
    """
    from sklearn.decomposition import PCA

    train, test = _standardised(train, test)
    most = min(*train.shape, _PCA_MOST)
    pca = PCA(most, random_state=seed)
    folds, make = folds_of(classes, seed), partial(_regression, 1.0, seed)
    with _in_one_thread():
        parts, test_parts = pca.fit_transform(train), pca.transform(test)
        number, held_out = _choose(
            _spaced(most), most, folds, lambda number: _held_out(make, parts[:, :number], classes, folds)
        )
        model = make().fit(parts[:, :number], classes)
    scores = model.predict_proba(test_parts[:, :number])[:, 1]
    return Fitted(scores, held_out, number * (train.shape[1] + 1) + 1)


def neighbours(train: Matrix, classes: Classes, test: Matrix, *, seed: int) -> Fitted:
    """Score test rows by a vote of their nearest training rows, with standardised features.

    The number of voters, up to 100, is the one that scores best on held-out rows; 1 if none are held out. Arguments as
    in `logistic`.
    """
    from sklearn.neighbors import KNeighborsClassifier

    train, test = _standardised(train, test)
    folds = folds_of(classes, seed)
    numbers = _spaced(min(len(classes) - 1, _NEIGHBOURS_MOST, *(len(fold[0]) for fold in folds)))
    number, held_out = _choose(
        numbers, 1, folds, lambda number: _held_out(partial(KNeighborsClassifier, number), train, classes, folds)
    )
    model = KNeighborsClassifier(number).fit(train, classes)
    return Fitted(model.predict_proba(test)[:, 1], held_out, train.size)


def boosted_trees(train: Matrix, classes: Classes, test: Matrix, *, seed: int) -> Fitted:
    """Fit XGBoost, and score the test rows.

    The setting is the best of ten random ones on held-out rows; the defaults if none are held out. Arguments as in
    `logistic`. Raises MissingExtraError if XGBoost is not installed.
    """
    import random

    try:
        import xgboost  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError.of(error, op="bench", extra="probes") from error
    train, test = _standardised(train, test)
    folds, rng = folds_of(classes, seed), random.Random(seed)
    trials = [{name: rng.choice(list(values)) for name, values in _TREES.items()} for _ in range(_TRIALS)]
    new = partial(xgboost.XGBClassifier, eval_metric="logloss", random_state=seed)
    trial, held_out = _choose(trials, {}, folds, lambda trial: _held_out(partial(new, **trial), train, classes, folds))
    model = new(**trial).fit(train, classes)
    nodes = len(model.get_booster().trees_to_dataframe())
    return Fitted(model.predict_proba(test)[:, 1], held_out, nodes)


_TREES: Mapping[str, Any] = {
    "n_estimators": np.arange(50, 300, step=50),
    "max_depth": np.arange(2, 6),
    "learning_rate": np.logspace(-3, -1, num=10),
    "subsample": np.linspace(0.7, 1.0, num=5),
    "colsample_bytree": np.linspace(0.7, 1.0, num=5),
    "reg_alpha": np.logspace(-3, 1, num=10),
    "reg_lambda": np.logspace(-3, 1, num=10),
    "min_child_weight": np.arange(1, 10),
}


def _standardised(train: Matrix, test: Matrix) -> tuple[Matrix, Matrix]:
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train)
    return np.asarray(scaler.transform(train)), np.asarray(scaler.transform(test))


def _spaced(most: int) -> list[int]:
    return np.unique(np.logspace(0, np.log2(most), num=10, base=2, dtype=int)).tolist()
