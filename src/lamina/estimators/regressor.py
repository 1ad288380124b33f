"""A scikit-learn regressor of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self, cast, final

import torch
from sklearn.base import RegressorMixin

from lamina.errors import ConfigError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.examples import number_targets
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks.split import Split

if TYPE_CHECKING:
    import numpy as np
    from torch import nn


@final
class LaminaRegressor(RegressorMixin, LaminaEstimator):
    """Predict a number for each text, or pair of texts, with a reader on a frozen model.

    X has the same forms as for `LaminaClassifier`; y is one number per text. The reader is trained on numbers that are
    scaled to mean 0 and standard deviation 1. After training, mean and standard deviation are folded into its last
    linear map, so that the saved bank predicts unscaled numbers.

    Args:
        model: Hub id, folder or "minilm"; or a loaded transformers model, which `fit` freezes.
        reader: None, a fusion or a `lamina.Reader`, as in `LaminaClassifier`.
        processor: Tokenizer of the model. None: the one saved with the model.
        epochs: Number of passes over the texts. None: 3, or more if that is needed for 200 steps.
        batch_size: Texts per step.
        learning_rate: Peak learning rate. None: 1e-3.
        max_length: Maximum tokens per text. None: what the model allows.
        validation_fraction: Share of the texts that is not trained on and chooses the best epoch, by Pearson's
            correlation. None: train on all texts, and use the last epoch.
        random_state: Seed of the reader's initial weights, of dropout and of the order of the texts.
        options: Further options of `lamina.fit`.
        backend: What computes predictions on a CPU, as in `lamina.predict`: "auto", "torch", "onnx" or "int8". An
            estimator that was loaded from a folder writes its ONNX export into this folder.

    Attributes:
        bank_: The `lamina.ReaderBank` with the reader, which is named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
        n_features_in_: Number of columns of X; not set if X is one-dimensional.
        feature_names_in_: Names of the columns; only set if X is a data frame.
    """

    kind: ClassVar = SequenceClassification.kind

    def _head_of_a_fusion(self) -> dict[str, object]:
        return {"pooling": "mean"}

    def fit(self, X: object, y: object) -> Self:
        """Train a new reader, set the fitted attributes, and return the estimator.

        The model's weights do not change; a loaded model is frozen and put into eval mode. An earlier `bank_` is
        replaced.

        Args:
            X: Texts, or pairs of texts.
            y: One number per text.

        Raises:
            DataError: If X or y has the wrong form. It is also a ValueError.
            ConfigError: If a parameter is not valid, or the reader's head does not end with a linear map.
            ModelNotFoundError: If the model cannot be found.
        """
        op = self._op()
        texts = self._texts(X, "fit", reset=True)
        targets, seed = number_targets(y, texts, op), self._seed()
        task = self._task(Split.of(texts, targets.values), targets, seed)
        bank = self._new_bank()
        reader = bank.add(READER, self._reader(task, self.reader, seed))
        if not reader.config.head.linear:  # pyright: ignore
            raise ConfigError(f"{op}: the reader's head has linear=False; a regressor needs the linear map at its end.")
        self._train(bank, task, seed)
        with torch.no_grad():
            output = cast("nn.Linear", reader.head.output)
            output.weight.mul_(targets.scale)
            output.bias.mul_(targets.scale).add_(targets.mean)
        return self

    def predict(self, X: object) -> np.ndarray:
        """Return one number per text, `[texts]`.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X has the wrong form.
            LaminaError: If the backend does not exist or cannot be used.
        """
        self._check_fitted()
        texts = self._texts(X, "predict", reset=False)
        logits = self._logits_of(Split.of(texts), "predict")[READER]
        return logits[:, 0].double().numpy()
