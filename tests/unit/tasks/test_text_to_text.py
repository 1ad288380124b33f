"""Texts that become others: summaries and translations."""

from __future__ import annotations

import copy
from inspect import unwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.encoded import features
from tests.support.files import jsonl, put, tsv
from tests.support.tiny import FAMILIES

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import kind_of
from lamina.tasks.base import ColumnSpec, EncodeOptions, GenerationOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.tasks.text_to_text import PairInputs, TextToTextKind, texts_of

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE, IMAGE = "sequence_classification", "image_classification"
GENERATION = ("summarization", "translation")
KIND = kind_of("translation")


# From files


@pytest.mark.parametrize("kind", GENERATION)
def test_texts_to_write(tmp_path: Path, kind: str):
    path = jsonl(tmp_path / "t.jsonl", [{"text": f"Text {i}", "target": f"t {i}"} for i in range(20)])
    task = Task.from_files(kind, train=path, test=path)
    assert (task.kind, task.problem_type, task.labels) == (kind, "generation", ("text",))
    assert task.metrics == kind_of(kind).problem_types["generation"]
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 18, "validation": 2, "test": 20}
    assert task.split("test").texts[:2] == ("Text 0", "Text 1")
    assert task.split("test").labels[:2] == ("t 0", "t 1")
    assert task.metric == ("rougeL" if kind == "summarization" else "bleu")
    assert len(task.subsample(rows=5).split("train")) == 5


@pytest.mark.parametrize("columns", [{"text": "article", "label": "highlights"}, {}])
def test_columns_of_texts_to_write(tmp_path: Path, columns: dict[str, str]):
    """The usual names are found where a file has them."""
    names = tuple(columns.values()) or ("sentence", "label")
    path = put(tmp_path / "t.csv", f"{names[0]},{names[1]}\nlong,short\n")
    split = Task.from_files("summarization", test=path, **columns).split("test")
    assert (split.texts, split.labels) == (("long",), ("short",))


def test_columns_of_objects_hold_translations(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"translation": {"en": "yes", "ro": "da"}}])
    task = Task.from_files("translation", test=path, text="translation.en", label="translation.ro")
    assert (task.split("test").texts, task.split("test").labels) == (("yes",), ("da",))


@pytest.mark.parametrize("kind", GENERATION)
def test_a_part_may_be_a_pair_of_files(tmp_path: Path, kind: str):
    files = put(tmp_path / "train.en", "yes\nno\n"), put(tmp_path / "train.ro", "da\nnu\n")
    task = Task.from_files(kind, train=files, validation=[str(file) for file in files])
    assert task.name == "train"
    for part in ("train", "validation"):
        assert (task.split(part).texts, task.split(part).labels) == (("yes", "no"), ("da", "nu"))


@pytest.mark.parametrize("kind", [SEQUENCE, "masked_lm", IMAGE])
def test_other_kinds_have_one_file_for_a_part(tmp_path: Path, kind: str):
    path = tsv(tmp_path / "t.tsv", ["a\tx"])
    with pytest.raises(ConfigError, match=f"2 files were given for one part of a task of kind {kind}; it reads one"):
        Task.from_files(kind, train=(path, path))


@pytest.mark.parametrize(
    ("row", "column", "problem"),
    [
        ({"text": " ", "target": "b"}, "text", "is blank in column 'text'; there is nothing to read"),
        ({"text": "a", "target": ""}, "target", "has no label in column 'target'"),
    ],
)
def test_blank_texts_are_refused(tmp_path: Path, row: dict[str, str], column: str, problem: str):
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "target": "b"}, row])
    with pytest.raises(DataError, match=f"row 2 {problem}") as info:
        Task.from_files("translation", train=path)
    assert (info.value.row, info.value.column) == (2, column)


def test_blank_lines_of_a_pair_are_refused(tmp_path: Path):
    files = put(tmp_path / "a.en", "yes\n\nno\n"), put(tmp_path / "a.ro", "da\nnu\nba\n")
    with pytest.raises(DataError, match=r"a\.ro row 2 is blank in column 'sentence'"):
        Task.from_files("translation", train=files)


def test_what_texts_to_write_do_not_have(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "target": "b"}] * 3)
    with pytest.raises(ConfigError, match="labels are x; a task of kind translation has texts to generate"):
        Task.from_files("translation", train=path, labels=("x",))
    assert Task.from_files("translation", train=path, labels=("text",)).labels == ("text",)
    with pytest.raises(ConfigError, match="text_pair is 'b'; a task of kind summarization reads one text"):
        Task.from_files("summarization", train=path, text_pair="b")
    with pytest.raises(UnknownNameError, match="unknown metric 'bleu'; known: rougeL, rouge1, rouge2, rougeLsum"):
        Task.from_files("summarization", train=path, metric="bleu")
    with pytest.raises(UnknownNameError, match="unknown problem type 'classification'; known: generation"):
        Task.from_files("summarization", train=path, problem_type="classification")
    task = Task.from_files("summarization", train=path)
    with pytest.raises(ConfigError, match="subsample: per_class is 1; this task has no classes"):
        task.subsample(per_class=1)
    with pytest.raises(ConfigError, match=r"stratified is set for a task of kind summarization \(generation\)"):
        task.subsample(rows=1, stratified=True)


# From examples to batches


@pytest.fixture
def pieces(metaspace: Any):
    """The sentence pieces, which know how to become a text again."""
    from tokenizers import decoders

    tokenizer = copy.deepcopy(metaspace)
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    return tokenizer


CAT, FOX = "the cat sat on the mat and looked at the moon", "a quick brown fox"
SPLIT = Split.of((CAT, FOX, "in Paris"), ("the moon", "jumps over the lazy dog", "the dog"))


def pairs(tokenizer: Any, split: Split = SPLIT, **options: Any) -> PairInputs:
    given = EncodeOptions(part="train", **{"max_length": 64, "max_target_length": 64} | options)
    return KIND.encode(split, tokenizer, given)


def tokens(encoded: Any) -> list[list[int]]:
    return [row["input_ids"] for row in features(encoded)]


def test_sources_and_targets_are_tokens(metaspace: Any):
    rows = pairs(metaspace)
    assert KIND.truncated(rows) == 0
    assert tokens(rows.encoded) == [metaspace(text)["input_ids"] for text in SPLIT.texts]
    assert tokens(rows.targets) == [metaspace(text)["input_ids"] for text in SPLIT.labels]
    assert list(rows.lengths) == [len(metaspace(text)["input_ids"]) for text in SPLIT.texts]
    assert rows.uncacheable == "the model generates texts"
    assert (
        KIND.targets(Task(kind_of("translation"), "generation", ("text",), "bleu", ("bleu",), {}, ""), SPLIT, rows)
        is None
    )


def test_a_batch_is_padded_on_the_right(metaspace: Any):
    rows = pairs(metaspace)
    batch = rows.batch([1, 2])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    short, target = len(tokens(rows.encoded)[2]), len(tokens(rows.targets)[2])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, rows.lengths[1])
    assert batch["input_ids"][1, short:].unique().tolist() == [metaspace.pad_token_id]
    assert batch["attention_mask"].sum(1).tolist() == list(rows.lengths[1:])
    assert batch["labels"].shape[1] == len(tokens(rows.targets)[1])
    assert batch["labels"][1, target:].unique().tolist() == [-100]
    assert (batch["labels"][1, :target] >= 0).all()
    again = rows.batch([1, 2], epoch=3)
    assert all(torch.equal(batch[key], again[key]) for key in batch)


def test_word_pieces_bring_no_token_types(minilm: Any):
    """Encoder-decoders take none."""
    assert set(pairs(minilm).batch([0])) == {"input_ids", "attention_mask", "labels"}


def test_what_loses_its_end_is_counted(metaspace: Any):
    rows = pairs(metaspace, max_length=8, max_target_length=6)
    assert max(rows.lengths) == 8
    lengths = [[len(metaspace(text)["input_ids"]) for text in texts] for texts in (SPLIT.texts, SPLIT.labels)]
    assert rows.targets is not None
    assert KIND.truncated(rows) == sum(length > 8 for length in lengths[0]) > 0
    assert rows.targets.truncated == sum(length > 6 for length in lengths[1]) > 0
    assert {row[-1] for row in tokens(rows.encoded) + tokens(rows.targets)} == {metaspace.eos_token_id}


def test_a_prefix_comes_before_every_source(pieces: Any):
    rows = pairs(pieces, prefix="words with ")
    assert texts_of(torch.tensor([tokens(rows.encoded)[2]]), pieces) == ["words with in Paris"]
    assert tokens(rows.targets) == tokens(pairs(pieces).targets)


def test_the_tokenizer_is_left_as_it_was(tokenizer: Any):
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.truncation_side
    pairs(tokenizer, max_length=6, max_target_length=6)
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.truncation_side) == before


def test_classes_are_no_targets(metaspace: Any):
    with pytest.raises(DataError, match="generation: row 0 has 1 as its target; targets are texts") as info:
        pairs(metaspace, Split.of(("a", "b"), (1, 2)))
    assert info.value.row == 0


@pytest.mark.parametrize("option", ["max_length", "max_target_length"])
def test_a_length_must_leave_room(metaspace: Any, option: str):
    with pytest.raises(ConfigError, match="encode: max_length is 1; the special tokens alone are 1"):
        pairs(metaspace, **{option: 1})


# Languages


@pytest.fixture
def bilingual():
    """mBART's tokenizer, with letters for a vocabulary."""
    from transformers import MBartTokenizer
    from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    letters = [("\u2581", -3.0), *((letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz")]
    codes = [(code, 0.0) for code in (*FAIRSEQ_LANGUAGE_CODES, "<mask>")]
    vocabulary = [*((sign, 0.0) for sign in special), *letters, *codes]
    return MBartTokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="ro_RO")


TWO = Split.of(("a cat sat", "dog"), ("un caine mic", "pisic"))


def last_tokens(rows: PairInputs, tokenizer: Any) -> list[set[str]]:
    return [{tokenizer.convert_ids_to_tokens(row[-1]) for row in tokens(part)} for part in (rows.encoded, rows.targets)]


def test_targets_are_in_the_language_of_targets(bilingual: Any):
    rows = pairs(bilingual, TWO, max_target_length=8)
    assert last_tokens(rows, bilingual) == [{"en_XX"}, {"ro_RO"}]
    assert rows.targets is not None
    assert rows.targets.truncated == 1
    assert texts_of(rows.batch([0, 1])["labels"], bilingual) == ["un ca", "pisic"]
    assert bilingual.convert_ids_to_tokens(bilingual("a")["input_ids"])[-1] == "en_XX"


def test_without_one_they_are_in_the_language_of_sources(bilingual: Any, caplog: pytest.LogCaptureFixture):
    pairs(bilingual, TWO)
    assert caplog.text == ""
    bilingual.tgt_lang = None
    assert last_tokens(pairs(bilingual, TWO), bilingual) == [{"en_XX"}, {"en_XX"}]
    assert "tgt_lang is not set; targets are read in en_XX" in caplog.text
    assert bilingual.tgt_lang is None


# Back to texts


@pytest.mark.parametrize("name", ["byte_level", "pieces", "minilm"])
def test_texts_come_back(request: pytest.FixtureRequest, name: str):
    tokenizer = request.getfixturevalue(name)
    split = Split.of(("a", "b"), ("the lazy dog", " over the cat and the moon "))
    labels = pairs(tokenizer, split).batch([0, 1])["labels"]
    assert (labels == -100).any()
    assert texts_of(labels, tokenizer) == ["the lazy dog", "over the cat and the moon"]


# The models make the inputs of their decoders


def shifted(name: str, model: Any, labels: torch.Tensor) -> torch.Tensor:
    """What the decoder reads: the labels one later, behind a first token."""
    start = model.config.decoder_start_token_id
    first = torch.full((len(labels), 1), 0 if start is None else start)
    if name == "mbart":  # it begins with the language, which ends the labels
        first = torch.stack([row[row != -100][-1:] for row in labels])
    return torch.cat([first, labels[:, :-1]], 1).masked_fill(torch.cat([first, labels[:, :-1]], 1) == -100, 0)


@pytest.mark.parametrize("name", ["bart", "mbart", "marian", "pegasus", "m2m_100", "t5", "mt5", "longt5"])
def test_models_shift_labels_themselves(metaspace: Any, name: str):
    import transformers

    config = FAMILIES[name].config()
    config.vocab_size = config.decoder_vocab_size = len(metaspace)
    config.pad_token_id = metaspace.pad_token_id
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    batch = pairs(metaspace).batch([0, 1, 2])
    labels = batch.pop("labels")
    with torch.no_grad():
        loss = model(**batch, labels=labels).loss
        logits = model(**batch, decoder_input_ids=shifted(name, model, labels)).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# From models to scores and answers


class Writer(torch.nn.Module):
    """Writes what it reads, and keeps what it was asked."""

    def generate(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **asked: Any) -> torch.Tensor:
        assert attention_mask.shape == input_ids.shape
        self.asked = asked
        return input_ids


def test_written_texts_are_scored_and_answered(pieces: Any):
    split = KIND.examples(["the cat", "a dog in Paris"], pieces)
    inputs = KIND.encode(split, pieces, EncodeOptions(part="predict", max_length=32))
    assert set(inputs.batch([0])) == {"input_ids", "attention_mask"}
    writer: Any = Writer()
    scored = Split.of(["the cat", "a dog in Paris"], ["the cat", "a dog in Paris"])
    task = Task(kind_of("translation"), "generation", ("text",), "bleu", ("bleu", "chrf"), {}, "it")
    answers, results = KIND.answers(task, split, inputs, pieces), KIND.results(task, scored, inputs)
    for row in (1, 0):
        texts = KIND.outputs(writer, inputs.batch([row]), pieces, GenerationOptions(max_target_length=9))
        answers.add([row], texts)
        results.add([row], texts)
    assert writer.asked == {"do_sample": False, "max_new_tokens": 9}
    assert answers.predictions() == [{"text": "the cat"}, {"text": "a dog in Paris"}]
    assert results.scores(("chrf",)) == {"chrf": pytest.approx(100)}
    assert results.per_class() == []
    KIND.outputs(writer, inputs.batch([0]), pieces, GenerationOptions(num_beams=3, length_penalty=0.5))
    assert writer.asked == {"do_sample": False, "max_new_tokens": 128, "num_beams": 3, "length_penalty": 0.5}


def test_only_models_that_write_can_do_it():
    def model(encoder_decoder: bool, generates: bool) -> Any:
        return SimpleNamespace(
            config=SimpleNamespace(is_encoder_decoder=encoder_decoder), can_generate=lambda: generates
        )

    assert KIND.model_problem(model(True, True)) is None
    assert KIND.model_problem(model(False, True)) == "it is not an encoder-decoder that generates text"
    assert KIND.model_problem(model(True, False)) == "it is not an encoder-decoder that generates text"


def test_what_an_estimate_asks():
    assert KIND.generates
    assert not kind_of(SEQUENCE).generates
    assert KIND.model_rows(10, 900.4, 512, None) == (10, 512)


def test_a_pair_may_be_an_array_of_paths_of_any_class(tmp_path: Path):
    class Place:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __fspath__(self) -> str:
            return str(self.path)

    files = [put(tmp_path / "train.en", "yes\nno\n"), put(tmp_path / "train.ro", "da\nnu\n")]
    kind = kind_of("translation")
    for source in (np.array([*map(str, files)]), [*map(Place, files)]):
        table = unwrap(TextToTextKind.read)(kind, source, ColumnSpec(kind, "sentence", "label"))
        assert list(table.cells("label")) == ["da", "nu"]


@pytest.mark.parametrize(("source", "got"), [(("a.txt", 5), "5"), ((None, "a.txt"), "None")])
def test_files_of_a_pair_are_paths(source: Any, got: str):
    kind = kind_of("translation")
    with pytest.raises(ConfigError, match=f"task: a file is {got}; a path is needed"):
        unwrap(TextToTextKind.read)(kind, source, ColumnSpec(kind, "sentence", "label"))
