"""A kind of task is one file: one that lamina does not know goes from files and data at hand to scores and answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import datasets
import pytest
import torch
from tests.support.files import tsv
from tests.support.letters import register_letters
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from lamina import evaluate, finetune, fit, predict
from lamina.bank import Reader, ReaderBank
from lamina.cli import main
from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.recipes.run_recipe import run_recipe
from lamina.recipes.schema import load_recipe
from lamina.tasks import KINDS, kind_of
from lamina.tasks.base import EncodeOptions, Inputs, Targets
from lamina.tasks.outputs import Results
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXTS = ["a b", "z b", "z z a", "b z a z", "b", "a z"] * 5
RUN: dict[str, Any] = {"epochs": 20, "batch_size": 6, "learning_rate": 0.1, "progress": False}


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
    assert [row["label"] for row in results.per_class()[:3]] == ["never", "once", "often"]
    examples = letters.examples(["z", "a b"], tokenizer)
    inputs = letters.encode(examples, tokenizer, EncodeOptions(part="predict", max_length=16))
    answers = letters.answers(task, examples, inputs, tokenizer)
    answers.add([1, 0], torch.eye(3)[[0, 1]])
    assert [answer["label"] for answer in answers.predictions()] == ["once", "never"]
    assert letters.model_rows(10, 3.0, 16, None) == (10, 3)


FROM_SCRATCH = """
import torch

from lamina.tasks.kind import Kind, Results, RowTargets, Split, TextInputs, label_array, texts, without_classes


class LengthKind(Kind):
    name = "length"
    problem_types = {"classification": ("accuracy",)}
    auto_class = "AutoModelForSequenceClassification"

    def build(self, spec, tables):
        spec = without_classes(spec, ("short", "long"), "classification", "lengths")
        columns = {part: texts(table, spec.text) for part, table in tables.items()}
        return spec, {part: Split.of(rows, [int(len(text) > 3) for text in rows]) for part, rows in columns.items()}

    def encode(self, split, processor, options):
        return TextInputs.of(split, processor, options)

    def targets(self, task, split, inputs):
        return RowTargets(label_array(split))

    def batch_size(self, asked, inputs, outputs):
        return 2

    def results(self, task, split, inputs):
        return Lengths(split)


class Lengths(Results):
    def __init__(self, split):
        self.split, self.longer = split, torch.zeros(len(split))

    def add(self, rows, outputs, labels=None):
        assert len(rows) <= 2
        self.longer[list(rows)] = outputs[:, 1] - outputs[:, 0]

    def scores(self, metrics):
        truth = torch.from_numpy(label_array(self.split)) == 1
        return {"accuracy": float(((self.longer > 0) == truth).float().mean())}

    def predictions(self):
        return ["long" if longer > 0 else "short" for longer in self.longer.tolist()]
"""


def test_a_kind_is_one_file_that_imports_from_one_module(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "length_kind.py").write_text(FROM_SCRATCH)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(KINDS, "_rows", dict(zip(KINDS.names(), KINDS._rows.values(), strict=True)))
    KINDS.add("length", "length_kind:LengthKind")
    rows = [{"sentence": text} for text in TEXTS]
    task = Task.from_dataset("length", {"train": rows, "validation": rows}, name="long")
    assert task.split("train").labels == (0, 0, 1, 1, 0, 0) * 5
    whole = model(BertForSequenceClassification, num_labels=2)
    result = fit(whole, task, processor=tokenizer, **{**RUN, "learning_rate": 5e-3})
    assert result.table[0]["score"] > 0.9
    answers = predict(whole, ["a b z a", "a"], kind="length", processor=tokenizer)
    assert [answer["length"] for answer in answers] == ["long", "short"]
    kind_of.cache_clear()


def test_it_is_gone_where_it_is_not_registered():
    with pytest.raises(UnknownNameError, match="kind: unknown name 'letters'"):
        kind_of("letters")


# Training, scores and answers


@pytest.fixture
def task(letters: Any) -> Task:
    rows = [{"sentence": text} for text in TEXTS]
    return Task.from_dataset("letters", {"train": rows, "validation": rows[:12], "test": rows[:6]}, name="z")


def model(cls: Any = BertModel, **more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=7,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
            initializer_range=0.3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **more,
        )
        return cls(config).eval()


def bank_of(tokenizer: Any) -> ReaderBank:
    from letter_kind import Letters  # pyright: ignore[reportMissingImports]

    bank = ReaderBank(model(), tokenizer)
    bank.add("z", Reader(Mean(), Letters()))
    return bank


def test_a_reader_is_trained_scored_and_asked(task: Task, tokenizer: Any, tmp_path: Path):
    bank = bank_of(tokenizer)
    before = evaluate(bank, {"z": task}, progress=False)["z"]["accuracy"]
    result = fit(bank, {"z": task}, output=tmp_path / "out", **RUN)
    assert result.table[0]["task"] == "z"
    assert result.table[0]["score"] > max(before, 0.9)
    assert evaluate(bank, {"z": task}, split="test", progress=False)["z"]["accuracy"] > 0.9
    answers = predict(bank, ["a z", "a b"], progress=False)
    assert [answer["z"]["label"] for answer in answers] == ["once", "never"]
    bank.save_pretrained(tmp_path / "bank")
    again = ReaderBank.from_pretrained(tmp_path / "bank", model=bank.model)
    assert predict(again, ["a z", "a b"], processor=tokenizer, progress=False) == answers


def test_a_whole_model_is_finetuned_scored_and_asked(task: Task, tokenizer: Any):
    whole = model(BertForSequenceClassification, num_labels=3)
    result = finetune(whole, task, processor=tokenizer, **{**RUN, "learning_rate": 5e-3})
    assert result.table[0]["score"] > 0.9
    assert whole.config.id2label == {0: "never", 1: "once", 2: "often"}
    assert evaluate(whole, {"z": task}, processor=tokenizer, progress=False)["z"]["accuracy"] > 0.9
    answers = predict(whole, ["a z", "a b"], kind="letters", processor=tokenizer)
    assert [answer["letters"]["label"] for answer in answers] == ["once", "never"]


def test_a_recipe_and_the_command_line(task: Task, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    del task  # registers the kind
    folder = tmp_path / "model"
    model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = tsv(tmp_path / "rows.tsv", TEXTS, header="sentence")
    recipe = tmp_path / "letters.yaml"
    recipe.write_text(
        f"""
model: {folder}
fit: {{epochs: 20, batch_size: 6, learning_rate: 0.1}}
tasks:
  z:
    kind: letters
    files: {{train: {path}, validation: {path}}}
    readers:
      mean: {{fusion: mean}}
"""
    )
    run = run_recipe(load_recipe(recipe), output=tmp_path / "out", progress=False)
    assert (run.table[0]["metric"], run.table[0]["mean"]) == ("accuracy", 1.0)
    for arguments in (
        ["train", str(recipe), "--dry-run", "--json"],
        ["evaluate", str(tmp_path / "out"), "--task", f"z-mean-0={path}", "--json"],
        ["predict", str(tmp_path / "out"), "a z", "--json"],
    ):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        assert end.value.code == 0, printed.err
        assert json.loads(printed.out)
