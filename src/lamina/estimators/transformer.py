"""A scikit-learn transformer that turns texts into features from layers or a fusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast, final

import numpy as np
from sklearn.base import TransformerMixin

from lamina.bank import Reader, ReaderBank, ReaderModule
from lamina.errors import ConfigError, DataError
from lamina.estimators.base import READER, LaminaEstimator
from lamina.estimators.examples import TargetsLike, Texts, any_targets
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from sklearn.utils import Tags, TransformerTags

    from lamina.fusion.base import FusionConfig
    from lamina.layers.selectors import Selector


@final
@dataclass(eq=False, repr=False, kw_only=True)
class LaminaTransformer(TransformerMixin, LaminaEstimator):
    """Turn texts, or pairs of texts, into the features of one layer, of several layers, or of a fusion.

    Layers, and fusions without parameters, need no training. A fusion with parameters is trained by `fit` together with
    a linear map that predicts y (classes, numbers or several labels); the linear map is then discarded.

    Args:
        model: Hub id, folder or "minilm"; or a loaded transformers model, which `fit` freezes.
        layer: Number of a layer: 0 the embeddings, 1 the first block, -1 the last. Or a selector of several layers
            ("top:4"), whose features are concatenated.
        fusion: A fusion to use instead of `layer`. None: `layer` counts.
        pooling: How features of tokens become features of a text: "mean" over the tokens, or the "first" token.
        processor: Tokenizer of the model. None: the one saved with the model.
        epochs: Number of passes over the texts to train a fusion. None: 3, or more if that is needed for 200 steps.
        batch_size: Texts per training step; `transform` reads twice as many per pass.
        learning_rate: Peak learning rate. None: 1e-3.
        max_length: Maximum tokens per text. None: what the model allows.
        validation_fraction: Share of the texts that is not trained on and chooses the best epoch. None: train on all
            texts, and use the last epoch.
        random_state: As in `LaminaClassifier`; only a fusion with parameters needs it.
        options: Further options of `lamina.fit`.
        backend: As in `LaminaClassifier`.

    Attributes:
        bank_: The `lamina.ReaderBank` whose readers compute the features.
        result_: The `lamina.train.FitResult` of the latest training; only set if a fusion was trained.
        n_features_in_: Number of columns of X; not set if X is one-dimensional.
        pairs_: Whether X of `fit` had pairs of texts; other methods need an X of the same form.
        feature_names_in_: Names of the columns; only set if X is a data frame.
    """

    kind: ClassVar = SequenceClassification.kind

    layer: Selector = -1
    fusion: FusionConfig | None = None
    pooling: Literal["mean", "first"] = "mean"

    def fit(self, X: object, y: object = None) -> Self:
        """Choose the layers, or train the fusion, and set the fitted attributes; return the estimator.

        If `model` is a loaded model, its weights do not change; it stays frozen and in eval mode. An earlier `bank_` is
        replaced, and is gone if training fails.

        Args:
            X: Texts, or pairs of texts.
            y: Targets for training a fusion with parameters; whole numbers are classes. Otherwise ignored.

        Raises:
            DataError: If X or y has the wrong form, or y is None and a fusion must be trained. It is also a ValueError.
            ConfigError: If a parameter is not valid; UnknownNameError for an unknown option.
            LayerIndexError: If the model does not have the layer.
            LaminaError: If the model cannot be found (ModelNotFoundError) or read, the fusion does not fit it, or a
                loss is NaN or infinite.
        """
        op = self._op()
        texts, columns = self._new_texts(X)
        if self.pooling not in ("mean", "first"):
            raise ConfigError(f"{op}: pooling is {self.pooling!r}; it must be 'mean' or 'first'.")
        bank, seed = self._new_bank(columns), self._seed()
        vars(self).pop("result_", None)  # of an earlier training
        max_length = FitOptions.of({"max_length": self.max_length}, op).max_length
        most = int(kind_of(self.kind).length_limit(bank.model, bank.processor, max_length))
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

    def _features(self, fusion: FusionConfig, like: ReaderModule, seed: int) -> Reader:
        """Return the config of a reader whose logits are the pooled features of `fusion`.

        `like` is a reader whose fusion has as many features, and `seed` decides the initial weights.
        """
        return self._with_head(fusion, tuple(map(str, range(like.fusion.dim))), seed, linear=False)

    def _with_head(self, fusion: FusionConfig, labels: tuple[str, ...], seed: int, *, linear: bool = True) -> Reader:
        return Reader(fusion, SequenceClassification(labels, pooling=self.pooling, linear=linear), seed=seed)

    def _learn(self, bank: ReaderBank, texts: Texts, y: TargetsLike, seed: int) -> ReaderModule:
        """Train the fusion on y, as `_train` does, and return its reader, which replaces the one that the bank had.

        Raises DataError if y is None or has the wrong form, ConfigError if `options` are wrong, and the errors of
        `lamina.fit`. `seed` decides the initial weights and the rows held out.
        """
        if y is None:
            came = f"the fusion {type(self.fusion).__name__} has weights to learn, but y is None"
            raise DataError(f"{self._op()}: {came}; it learns from labels. Give y, or `layer` instead.")
        targets = any_targets(y, texts, self._op())
        task = self._task(Split.of(texts, targets.values), targets, seed)
        bank.remove(READER)
        reader = bank.add(READER, self._reader(task, self.fusion, seed, pooling=self.pooling))
        self._train(bank, task, seed, targets)
        return reader

    def transform(self, X: object) -> np.ndarray:
        """Return features `[texts, dim]` in float32; those of several layers are side by side, lowest layer first.

        Raises:
            NotFittedError: If `fit` was not called.
            DataError: If X has the wrong form.
            LaminaError: If the backend cannot be used, or an output is NaN or infinite.
        """
        logits = self._logits_of(X, "transform")
        return np.hstack([logits[name].numpy() for name in self.bank_])

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        cast("TransformerTags", tags.transformer_tags).preserves_dtype = []  # texts become float32
        return tags

    def get_feature_names_out(self, input_features: object = None) -> np.ndarray:
        """Return the names of the features, such as "layer6_0" or "fusion_0"; raise NotFittedError before `fit`.

        `input_features` is ignored.
        """
        del input_features
        self._check_fitted()
        names = [f"{name}_{at}" for name in self.bank_ for at in range(self.bank_[name].fusion.dim)]
        return np.asarray(names, dtype=object)
