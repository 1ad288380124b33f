"""Features of texts from any layer or fusion, by scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import numpy as np
from sklearn.base import TransformerMixin

from lamina.bank import Reader
from lamina.errors import ConfigError, DataError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.targets import any_targets
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks import kind_of
from lamina.tasks.split import Split

if TYPE_CHECKING:
    from lamina.bank import ReaderBank, ReaderModule
    from lamina.estimators.examples import Texts
    from lamina.fusion.base import FusionConfig
    from lamina.layers.selectors import Selector


@final
class LaminaTransformer(TransformerMixin, LaminaEstimator):
    """Turn texts, or pairs of texts, into the features of a layer, of several, or of a fusion.

    Nothing is learnt for layers as they are, nor for a fusion without parameters. A fusion with parameters is trained
    at `fit` under a linear map to y (classes, numbers or several labels); the map is then let go.

    Args:
        model: Hub id, folder or "minilm"; or a model of transformers, which is used as it is, and frozen.
        layer: Which layer: 0 the embeddings, 1 the first block, -1 the last; or a selector of several ("top:4"),
            whose features then stand side by side.
        fusion: A fusion, in place of `layer`.
        pooling: "mean" over the tokens of a text, or its "first" one.
        processor: Tokenizer of a model; None: its own.
        epochs: Of a fusion that learns: how often it goes through the texts; None: 3 times, or as often as makes 200
            steps.
        batch_size: Texts per step, and per pass.
        learning_rate: The highest; None: 1e-3.
        max_length: Tokens of a text that are read; None: what the model allows.
        validation_fraction: Share of the texts that is set aside to choose the best epoch; None: learn from all, and
            keep the last.
        random_state: Seeds a fusion that learns.
        options: Further options of `lamina.fit`.

    Attributes:
        bank_: The `lamina.ReaderBank` whose readers give the features.
        n_features_in_: Columns of X, where it had any.
        feature_names_in_: Their names, where X was a data frame.
    """

    kind: ClassVar = SequenceClassification.kind

    def __init__(  # noqa: PLR0913
        self,
        model: Any = "minilm",
        *,
        layer: Selector = -1,
        fusion: FusionConfig | None = None,
        pooling: Literal["mean", "first"] = "mean",
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
        self.layer = layer
        self.fusion = fusion
        self.pooling: Any = pooling
        self.processor = processor
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.max_length = max_length
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.options = options

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the layers, or train the fusion; the model stays as it is.

        Args:
            X: Texts, or pairs of texts.
            y: What a fusion with parameters learns from; else not looked at.

        Raises:
            DataError: If X or y does not fit, or y is missing where a fusion learns; it is a ValueError.
            ConfigError: If a parameter does not fit.
            LayerIndexError: If the model has no such layer.
            ModelNotFoundError: If there is no such model.
        """
        op = self._op()
        texts = self._texts(X, "fit", reset=True)
        if self.pooling not in ("mean", "first"):
            raise ConfigError(f"{op}: pooling is {self.pooling!r}; it must be 'mean' or 'first'.")
        bank, seed = self._new_bank(), self._seed()
        most = int(kind_of(self.kind).length_limit(bank.model, bank.processor, self.max_length))
        fusion = Mean(layers=self.layer) if self.fusion is None else self.fusion
        reader = bank.add(READER, self._with_head(fusion, ("0", "1"), seed))
        reader.info = {"max_length": most}
        if self.fusion is not None and any(True for _ in reader.fusion.parameters()):
            reader = self._learn(bank, texts, y, seed)
        bank.remove(READER)
        if self.fusion is None:
            for layer in reader.layers:
                bank.add(f"layer{layer}", self._features(Mean(layers=layer), reader, seed)).info = reader.info
        else:
            features = bank.add("fusion", self._features(fusion, reader, seed))
            features.fusion.load_state_dict(reader.fusion.state_dict())
            features.info = reader.info
        self.bank_ = bank.eval()
        self._n_features_out = sum(bank[name].fusion.dim for name in bank)
        return self

    def _head_of_a_fusion(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    def _features(self, fusion: FusionConfig, like: ReaderModule, seed: int) -> Reader:
        """A reader whose logits are the features, which are as many as those of another."""
        return self._with_head(fusion, tuple(map(str, range(like.fusion.dim))), seed, linear=False)

    def _with_head(self, fusion: FusionConfig, labels: tuple[str, ...], seed: int, **settings: Any) -> Reader:
        return Reader(fusion, SequenceClassification(labels, pooling=self.pooling, **settings), seed=seed)

    def _learn(self, bank: ReaderBank, texts: Texts, y: Any, seed: int) -> ReaderModule:
        """Train the fusion on y."""
        if y is None:
            came = f"the fusion {type(self.fusion).__name__} has weights to learn, but y is None"
            raise DataError(f"{self._op()}: {came}; it learns from labels. Give y, or `layer` in its place.")
        targets = any_targets(y, texts, self._op())
        task = self._task(Split.of(texts, targets.values), targets, seed)
        bank.remove(READER)
        reader = bank.add(READER, self._reader(task, self.fusion, seed))
        self._train(bank, task, seed)
        return reader

    def transform(self, X: Any) -> np.ndarray:
        """Features `[texts, dim]`, float32.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X does not fit.
        """
        self._check_fitted()
        texts = self._texts(X, "transform", reset=False)
        results: dict[str, Any] = self._results(Split.of(texts), "transform")
        return np.hstack([results[name].logits.numpy() for name in self.bank_])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # texts become float32
        return tags

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the features: "layer6_0", "layer6_1", ..., or "fusion_0", ...; `input_features` is not used."""
        del input_features
        self._check_fitted()
        names = [f"{name}_{at}" for name in self.bank_ for at in range(self.bank_[name].fusion.dim)]
        return np.asarray(names, dtype=object)
