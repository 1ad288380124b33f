from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from tests.support.training import tiny_bank, tiny_model, tiny_tokenizer

import lamina
from lamina.errors import BaseMismatchError, ConfigError, StoreError
from lamina.estimators.predictors import LaminaClassifier, LaminaRegressor, LaminaTagger
from lamina.estimators.transformer import LaminaTransformer

FAST = {"epochs": 2, "options": {"cache": "off"}}
READER = lamina.Reader(lamina.fusion.Mean(layers=(1, 3)), lamina.SequenceClassification(("x",), attention_heads=2))


def fitted(base: Any, texts: list[str], **more: Any) -> list[Any]:
    words = [text.split() for text in texts]
    return [
        LaminaClassifier(base, reader=READER, class_weight={1: 2.0}, **FAST, **more).fit(texts, [0, 1] * 4),
        LaminaClassifier(base, **FAST, **more).fit(texts, ["no", "yes"] * 4),
        LaminaRegressor(base, reader=lamina.ScalarMix(), **FAST, **more).fit(texts, [10.0, 30.0] * 4),
        LaminaTagger(base, **FAST, **more).fit(words, [list(range(len(row))) for row in words]),
        LaminaTransformer(base, layer=[1, 2], **more).fit(texts),
        LaminaTransformer(base, fusion=lamina.ScalarMix(), **FAST, **more).fit(texts, [0, 1] * 4),
    ]


def said(estimator: Any, texts: list[str]) -> list[Any]:
    """All that an estimator says of texts."""
    if isinstance(estimator, LaminaTagger):
        return estimator.predict([text.split() for text in texts])
    method = next(name for name in ("transform", "predict_proba", "predict") if hasattr(estimator, name))
    return getattr(estimator, method)(texts).tolist()


@pytest.mark.long
def test_what_is_pickled_says_the_same_on_the_shared_model(base: str, texts: list[str]):
    for estimator in fitted(base, texts):
        pickled = pickle.dumps(estimator)
        again = pickle.loads(pickled)
        assert len(pickled) < 50_000 + 4 * sum(estimator.bank_[name].size() for name in estimator.bank_)
        assert again.bank_.model is estimator.bank_.model
        assert said(again, texts) == said(estimator, texts)
        assert hasattr(estimator, "bank_")


def test_a_model_without_a_name_is_pickled_along(texts: list[str]):
    model = tiny_model()
    estimator = LaminaClassifier(model, processor=tiny_tokenizer(), **FAST).fit(texts, [0, 1] * 4)
    for again in (pickle.loads(pickle.dumps(estimator)), copy.deepcopy(estimator)):
        assert again.bank_.model is again.model is not model
        assert said(again, texts) == said(estimator, texts)


@pytest.mark.long
def test_a_process_that_built_no_model_opens_a_pickle_with_one(texts: list[str], tmp_path: Path):
    estimator = LaminaClassifier(tiny_model(), processor=tiny_tokenizer(), **FAST).fit(texts, [0, 1] * 4)
    (path := tmp_path / "estimator.pkl").write_bytes(pickle.dumps(estimator))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).predict_proba(sys.argv[2:]).tolist())"
    done = subprocess.run([sys.executable, "-c", code, path, *texts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert np.allclose(json.loads(done.stdout), said(estimator, texts), atol=1e-6)


def test_what_is_saved_comes_back_and_is_a_bank(base: str, texts: list[str], tmp_path: Path):
    for number, estimator in enumerate(fitted(base, texts, random_state=3)):
        estimator.save(folder := tmp_path / str(number))
        again = type(estimator).load(folder)
        assert said(again, texts) == said(estimator, texts)
        assert again.get_params() == estimator.get_params()
        assert again.bank_.model is estimator.bank_.model
        again.save(folder)
        assert list(lamina.ReaderBank.from_pretrained(folder, estimator.bank_.model)) == list(estimator.bank_)
    classes = LaminaClassifier.load(tmp_path / "0").classes_
    assert (classes.dtype, list(classes)) == (np.dtype(int), [0, 1])


def test_a_model_without_a_name_is_asked_for(texts: list[str], tmp_path: Path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    estimator = LaminaClassifier(model, processor=tokenizer, **FAST).fit(texts, [0, 1] * 4)
    estimator.save(tmp_path)
    with pytest.raises(StoreError, match="names no model"):
        LaminaClassifier.load(tmp_path)
    again = LaminaClassifier.load(tmp_path, model=model, processor=tokenizer)
    assert said(again, texts) == said(estimator, texts)
    with pytest.raises(BaseMismatchError, match="trained on another base"):
        LaminaClassifier.load(tmp_path, model=tiny_model(seed=5), processor=tokenizer)


@pytest.mark.parametrize("folder", ["", None])
def test_what_is_no_folder(base: str, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any):
    (estimator := LaminaTransformer(base).fit(texts)).save(tmp_path)
    monkeypatch.chdir(tmp_path)  # an empty text is not the current folder
    with pytest.raises(ConfigError, match=r"LaminaTransformer\.save: folder is"):
        estimator.save(folder)
    with pytest.raises(ConfigError, match=r"LaminaTransformer\.load: folder is"):
        LaminaTransformer.load(folder)


def test_what_is_no_saved_estimator(base: str, texts: list[str], tmp_path: Path):
    with pytest.raises(NotFittedError):
        LaminaClassifier(base).save(tmp_path)
    with pytest.raises(StoreError, match=r"has no estimator.json"):
        LaminaClassifier.load(tmp_path / "none")
    tiny_bank({}).save_pretrained(tmp_path / "bank")
    with pytest.raises(StoreError, match=r"wrote\. It is a bank: ask it by lamina.predict\(folder, texts\)"):
        LaminaClassifier.load(tmp_path / "bank")
    LaminaTransformer(base).fit(texts).save(tmp_path)
    with pytest.raises(StoreError, match="was saved by a LaminaTransformer; it is not a LaminaClassifier"):
        LaminaClassifier.load(tmp_path)
    path = tmp_path / "estimator.json"
    facts = json.loads(path.read_text())
    for damage, message in (
        ({"format": 9}, "has format 9"),
        ({"params": {"model": base, "layers": 3}}, "unexpected keyword argument 'layers'"),
        ({"params": 3}, "cannot be understood"),
        ({"learnt": {"classes_": {"array": [1]}}}, "cannot be understood"),
    ):
        path.write_text(json.dumps(facts | damage))
        with pytest.raises(StoreError, match=message):
            LaminaTransformer.load(tmp_path)
    path.write_text("{")
    with pytest.raises(StoreError):
        LaminaTransformer.load(tmp_path)


@pytest.mark.parametrize(("module", "name"), [("classifier", "LaminaClassifier"), ("tagger", "LaminaTagger")])
def test_pickles_of_earlier_versions_find_their_classes(module: str, name: str):
    pickled = f"clamina.estimators.{module}\n{name}\n.".encode()
    assert pickle.loads(pickled).__name__ == name
