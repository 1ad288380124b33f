from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from tests.support.training import tiny_model, tiny_tokenizer

import lamina
from lamina.errors import ConfigError
from lamina.estimators import base as shared
from lamina.estimators.base import model_of
from lamina.estimators.predictors import LaminaClassifier

FAST = {"epochs": 1, "options": {"cache": "off"}}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are loaded."""
    names: list[str] = []

    def counted(name: str) -> object:
        names.append(name)
        return lamina.load(name)

    shared._load.cache_clear()
    monkeypatch.setattr(shared, "load", counted)
    return names


def test_a_search_loads_its_model_once(base: str, texts: list[str], mood: list[str], loads: list[str]):
    readers = [None, lamina.fusion.LastLayer(), lamina.fusion.Mean()]
    search = GridSearchCV(LaminaClassifier(base, **FAST), {"reader": readers}, cv=2).fit(texts, mood)
    assert loads == [base]
    assert search.best_estimator_.bank_.model is model_of(base, None, "op")[0]


def test_threads_that_ask_at_once_wait_for_one_load(base: str, loads: list[str]):
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: model_of(base, None, "op")[0], range(4)))
    assert (len({id(model) for model in models}), loads) == (1, [base])


def test_a_folder_that_is_written_anew_is_read_anew(tmp_path: Path, loads: list[str]):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    first = model_of(tmp_path, None, "op")[0]
    (tmp_path / "more").mkdir()
    assert model_of(tmp_path, None, "op")[0] is first
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert model_of(tmp_path, None, "op")[0] is not first
    assert len(loads) == 2


def test_a_model_without_a_tokenizer(texts: list[str], mood: list[str]):
    with pytest.raises(ConfigError, match="there is no tokenizer with the model"):
        LaminaClassifier(tiny_model(), **FAST).fit(texts, mood)


def test_a_model_that_is_given_is_used_as_it_is_and_by_clones_too(texts: list[str], mood: list[str]):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    estimator = LaminaClassifier(model, processor=tokenizer, reader=lamina.fusion.Mean(), **FAST)
    copied = clone(estimator)
    assert copied.model is model
    assert copied.processor is tokenizer
    assert copied.reader == estimator.reader
    assert copied.fit(texts, mood).bank_.model is model
