"""What inputs of several kinds have in common."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from lamina.errors import ConfigError
from lamina.tasks import KINDS, kind_of
from lamina.tasks.base import EncodeOptions, Inputs
from lamina.tasks.kind import TextInputs
from lamina.tasks.split import Split
from lamina.tasks.targets import label_array

OPTIONS = EncodeOptions(part="test", max_length=16)
TEXTS = ["the film is good", "anna was in paris and ben", "bad"]
SPLITS = {"summarization": Split.of(TEXTS, TEXTS), "translation": Split.of(TEXTS, TEXTS)}


@pytest.mark.parametrize("name", [name for name in KINDS.names() if kind_of(name).processor == "tokenizer"])
def test_inputs_of_texts_pickle_and_need_a_tokenizer(words: Any, name: str):
    kind, split = kind_of(name), SPLITS.get(name, Split.of(TEXTS))
    inputs: Inputs = kind.encode(split, words, OPTIONS)
    rows = range(len(inputs.lengths))
    for same in (copy.deepcopy(inputs), pickle.loads(pickle.dumps(inputs))):
        assert same.digest == inputs.digest
        assert all(torch.equal(value, inputs.batch(rows)[key]) for key, value in same.batch(rows).items())
    assert inputs.digest != kind.encode(split.select_rows([1, 0]), words, OPTIONS).digest
    assert all(len(value) == len(rows) for value in inputs.batch(rows).values())
    for processor, message in [(None, "no processor was given"), (3, "the processor is a int")]:
        with pytest.raises(ConfigError, match=f"task: {message}; texts need a tokenizer"):
            kind.encode(split, processor, OPTIONS)


@pytest.mark.parametrize(
    ("name", "part", "max_length", "is_told"),
    [
        ("sequence_classification", "train", 4, True),
        ("sequence_classification", "train", 16, False),
        ("sequence_classification", "test", 4, False),
        ("token_classification", "train", 4, False),
    ],
)
def test_a_stride_that_has_no_effect_is_told(
    words: Any, caplog: pytest.LogCaptureFixture, name: str, part: str, max_length: int, is_told: bool
):
    options = EncodeOptions(part=part, max_length=max_length, stride=1)
    inputs = kind_of(name).encode(Split.of(TEXTS), words, options)
    assert ("encode: stride is 1, but no task labels the words of these texts" in caplog.text) is is_told
    assert (len(inputs.lengths) > len(TEXTS)) is (name == "token_classification")
    kind_of(name).encode(Split.of(TEXTS), words, replace(options, stride=None))
    assert caplog.text.count("stride") == is_told


def test_states_are_kept_only_of_plain_texts(words: Any):
    inputs = TextInputs.of(Split.of(TEXTS), words, OPTIONS)
    assert inputs.uncacheable is None
    inputs.encoded.keys = ("input_ids",)
    assert inputs.uncacheable == "the inputs are input_ids; only texts with an attention mask are cached"


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [([1, 0], "int64"), ([1.5, 0], "float32"), ([(1, 0), (0, 1)], "int64"), ([True, False], "int64")],
)
def test_labels_as_an_array(labels: list[Any], dtype: str):
    found = label_array(Split.of(["a", "b"], labels))
    assert (found.tolist(), str(found.dtype)) == ([list(x) if isinstance(x, tuple) else x for x in labels], dtype)
