"""A kind of task is one file: one that lamina does not know goes from files and data at hand to scores and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets
import pytest
import torch
from tests.support.files import tsv
from tests.support.letters import register_letters
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions, Inputs, Results, Targets
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXTS = ["a b", "z b", "z z a", "b z a z", "b", "a z"] * 5


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield register_letters(tmp_path, monkeypatch)
    kind_of.cache_clear()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: at for at, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "z"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16)


def test_from_files(letters: Any, tmp_path: Path):
    path = tsv(tmp_path / "some.tsv", TEXTS, header="sentence")
    task = Task.from_files("letters", train=path, test=path, metric="f1")
    assert (task.kind, task.problem_type, task.labels) == ("letters", "classification", ("never", "once", "often"))
    assert (task.metric, task.metrics, task.name) == ("f1", ("f1", "accuracy"), "some")
    assert task.split("test").labels == (0, 1, 2, 2, 0, 1) * 5
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 27, "validation": 3, "test": 30}
    assert sorted(task.split("validation").labels) == [0, 1, 2]
    assert len(task.subsample(per_class=2, stratified=True).split("train")) == 6
    assert task.masked_lm().split("test").texts == TEXTS
    with pytest.raises(UnknownNameError, match="unknown metric 'mcc'; known: accuracy, f1"):
        Task.from_files("letters", train=path, metric="mcc")
    with pytest.raises(ConfigError, match="labels are x; a task of kind letters has counts of a letter"):
        Task.from_files("letters", train=path, labels=["x"])
    with pytest.raises(ConfigError, match="text_pair is 'other'; a task of kind letters reads one text"):
        Task.from_files("letters", train=path, text_pair="other")


@pytest.mark.usefixtures("letters")
def test_from_data_at_hand():
    rows = datasets.Dataset.from_dict({"words": TEXTS, "number": range(30)})
    for part in (rows, [{"words": text} for text in TEXTS]):
        task = Task.from_dataset("letters", {"test": part}, text="words")
        assert task.split("test").labels == (0, 1, 2, 2, 0, 1) * 5
    with pytest.raises(DataError, match="no column 'sentence'; its columns are: words, number"):
        Task.from_dataset("letters", {"test": rows})


def test_from_batches_to_scores_and_answers(letters: Any, tokenizer: Any):
    task = Task.from_dataset("letters", {"test": [{"sentence": text} for text in TEXTS]})
    split = task.split("test")
    inputs = letters.encode(split, tokenizer, EncodeOptions(part="test", max_length=16))
    targets, results = letters.targets(task, split, inputs), letters.results(task, split, inputs)
    assert isinstance(inputs, Inputs)
    assert isinstance(targets, Targets)
    assert isinstance(results, Results)
    rows = range(len(TEXTS))
    counts = (inputs.batch(rows)["input_ids"] == 6).sum(1).clamp(max=2)
    assert torch.equal(counts, targets.tensor(rows))
    results.add(rows, torch.eye(3)[counts])
    assert results.scores(task.metrics) == {"accuracy": 1.0, "f1": 1.0}
    assert [row["label"] for row in results.per_class()] == ["never", "once", "often"]
    examples = letters.examples(["z", "a b"], tokenizer)
    inputs = letters.encode(examples, tokenizer, EncodeOptions(part="predict", max_length=16))
    answers = letters.answers(task, examples, inputs, tokenizer)
    answers.add([1, 0], torch.eye(3)[[0, 1]])
    assert [answer["label"] for answer in answers.predictions()] == ["once", "never"]
    assert letters.model_rows(10, 3.0, 16, None) == (10, 3)


def test_it_is_gone_where_it_is_not_registered():
    with pytest.raises(UnknownNameError, match="kind: unknown name 'letters'"):
        kind_of("letters")
