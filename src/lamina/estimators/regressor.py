"""A regressor of texts, by scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, final

import torch
from sklearn.base import RegressorMixin

from lamina.errors import ConfigError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.targets import number_targets
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks.split import Split

if TYPE_CHECKING:
    import numpy as np

    from lamina.bank import Reader
    from lamina.fusion.base import FusionConfig


@final
class LaminaRegressor(RegressorMixin, LaminaEstimator):
    """Say a number of texts, or pairs of texts, by a reader on a frozen model.

    X is as for `LaminaClassifier`, y a number per text. The reader learns y less its mean, over its standard deviation,
    and both are put into its last linear map when it has learnt, so that the saved bank says numbers such as y's.

    Args:
        model: Hub id, folder or "minilm"; or a model of transformers, which is used as it is, and frozen.
        reader: As of `LaminaClassifier`.
        processor: Tokenizer of a model; None: its own.
        epochs: How often the reader goes through the texts; None: 3 times, or as often as makes 200 steps.
        batch_size: Texts per step.
        learning_rate: The highest; None: 1e-3.
        max_length: Tokens of a text that are read; None: what the model allows.
        validation_fraction: Share of the texts that is set aside to choose the best epoch, by Pearson's correlation;
            None: learn from all, and keep the last.
        random_state: Seeds the reader's start, dropout and the order of the texts.
        options: Further options of `lamina.fit`.

    Attributes:
        bank_: The `lamina.ReaderBank` with the reader, named "reader".
        result_: The `lamina.train.FitResult` of the last `fit`.
        n_features_in_: Columns of X, where it had any.
        feature_names_in_: Their names, where X was a data frame.
    """

    kind: ClassVar = SequenceClassification.kind

    def __init__(  # noqa: PLR0913
        self,
        model: Any = "minilm",
        *,
        reader: FusionConfig | Reader | None = None,
        processor: Any = None,
        epochs: int | None = None,
        batch_size: int = 32,
        learning_rate: float | None = None,
        max_length: int | None = None,
        validation_fraction: float | None = None,
        random_state: Any = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.reader = reader
        self.processor = processor
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.max_length = max_length
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.options = options

    def _head_of_a_fusion(self) -> dict[str, Any]:
        return {"pooling": "mean"}

    def fit(self, X: Any, y: Any) -> Self:
        """Train the reader; the model stays as it is.

        Args:
            X: Texts, or pairs of texts.
            y: A number per text.

        Raises:
            DataError: If X or y does not fit; it is a ValueError.
            ConfigError: If a parameter does not fit.
            ModelNotFoundError: If there is no such model.
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
            output: Any = reader.head.output
            output.weight.mul_(targets.scale)
            output.bias.mul_(targets.scale).add_(targets.mean)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """A number for each text.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X does not fit.
        """
        self._check_fitted()
        texts = self._texts(X, "predict", reset=False)
        logits: Any = self._results(Split.of(texts), "predict")[READER].logits  # pyright: ignore
        return logits[:, 0].double().numpy()
