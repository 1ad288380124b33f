"""Estimators that read tables of numbers, a word for each number, so that scikit-learn's own checks can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.validation import validate_data
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from lamina.estimators.examples import check_given, data_errors
from lamina.estimators.predictors import LaminaClassifier, LaminaRegressor, LaminaTagger
from lamina.estimators.transformer import LaminaTransformer
from lamina.layers.discovery import stacks

BINS, COLUMNS = range(-6, 7), 20  # half as wide as one; the most that a check has
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def model() -> BertModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(MARKS) + COLUMNS * len(BINS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=64,
            initializer_range=0.5,
        )
        made = BertModel(config, add_pooling_layer=False).eval()
    stacks(made)
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    known = [*MARKS, *(f"{column}:{number}" for column in range(COLUMNS) for number in BINS)]
    vocabulary = {word: at for at, word in enumerate(known)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    marks = {f"{mark[1:-1].lower()}_token": mark for mark in MARKS}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **marks)


def save_base(folder: Path) -> str:
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def words(table: Any) -> list[list[str]]:
    bins = np.clip(np.round(np.asarray(table, dtype=float) * 2), BINS[0], BINS[-1]).astype(int)
    return [[f"{column}:{number}" for column, number in enumerate(row)] for row in bins]


class _OnNumbers:
    def _new_texts(self, X: Any) -> Any:
        table = validate_data(self, X)
        texts, _ = super()._new_texts([" ".join(row) for row in words(table)])  # pyright: ignore
        return texts, {"n_features_in_": table.shape[1]}

    def _texts(self, X: Any, method: str) -> Any:
        table = validate_data(self, X, reset=False)
        return super()._texts([" ".join(row) for row in words(table)], method)  # pyright: ignore

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # pyright: ignore
        tags.input_tags.two_d_array, tags.input_tags.one_d_array, tags.input_tags.string = True, False, False
        return tags


class TaggerOfNumbers(_OnNumbers, LaminaTagger):
    """Every word of a row has the row's y as its tag."""

    def fit(self, X: Any, y: Any) -> Any:
        table = validate_data(self, X, reset=True)
        with data_errors(self._op()):
            check_given(y, self._op())
            tags = column_or_1d(check_array(y, ensure_2d=False, dtype=None), warn=True)
            check_consistent_length(table, tags)
        super().fit(words(table), [[tag] * table.shape[1] for tag in tags])
        self.n_features_in_ = table.shape[1]
        return self

    def predict(self, X: Any) -> Any:
        self._check_fitted()
        return np.array([row[0] for row in super().predict(words(validate_data(self, X, reset=False)))])

    def score(self, X: Any, y: Any) -> float:
        return float((self.predict(X) == np.asarray(y)).mean())


class ClassifierOfNumbers(_OnNumbers, LaminaClassifier):
    pass


class RegressorOfNumbers(_OnNumbers, LaminaRegressor):
    pass


class TransformerOfNumbers(_OnNumbers, LaminaTransformer):
    pass
