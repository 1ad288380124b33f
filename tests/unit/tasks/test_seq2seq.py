"""Rows of sources and targets, and texts back from tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES

from lamina.errors import ConfigError, DataError
from lamina.tasks.seq2seq import Pairs, texts_of
from lamina.tasks.split import Split


@pytest.fixture
def pieces(metaspace: Any):
    """The sentence pieces, which know how to become a text again."""
    from tokenizers import decoders

    tokenizer = copy.deepcopy(metaspace)
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    return tokenizer


CAT, FOX = "the cat sat on the mat and looked at the moon", "a quick brown fox"
SPLIT = Split((CAT, FOX, "in Paris"), ("the moon", "jumps over the lazy dog", "the dog"))


def pairs(tokenizer: Any, split: Split = SPLIT, **options: Any) -> Pairs:
    return Pairs.of(split, tokenizer, **{"max_length": 64, "max_target_length": 64} | options)


def test_sources_and_targets_are_tokens(metaspace: Any):
    rows = pairs(metaspace)
    assert len(rows) == 3
    assert (rows.truncated, rows.truncated_targets) == (0, 0)
    for row, source, target in zip(rows.features, SPLIT.texts, SPLIT.labels, strict=True):
        assert row["input_ids"] == metaspace(source)["input_ids"]
        assert row["labels"] == metaspace(target)["input_ids"]
    assert rows.lengths == [len(metaspace(text)["input_ids"]) for text in SPLIT.texts]


def test_a_batch_is_padded_on_the_right(metaspace: Any):
    rows = pairs(metaspace)
    batch = rows.batch([1, 2])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    short, target = (len(rows.features[2][key]) for key in ("input_ids", "labels"))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, rows.lengths[1])
    assert batch["input_ids"][1, short:].unique().tolist() == [metaspace.pad_token_id]
    assert batch["attention_mask"].sum(1).tolist() == rows.lengths[1:]
    assert batch["labels"].shape[1] == len(rows.features[1]["labels"])
    assert batch["labels"][1, target:].unique().tolist() == [-100]
    assert (batch["labels"][1, :target] >= 0).all()
    again = rows.batch([1, 2], epoch=3)
    assert all(torch.equal(batch[key], again[key]) for key in batch)


def test_word_pieces_bring_no_token_types(minilm: Any):
    """Encoder-decoders take none."""
    assert set(pairs(minilm).features[0]) == {"input_ids", "attention_mask", "labels"}


def test_what_loses_its_end_is_counted(metaspace: Any):
    rows = pairs(metaspace, max_length=8, max_target_length=6)
    assert max(rows.lengths) == 8
    lengths = [[len(metaspace(text)["input_ids"]) for text in texts] for texts in (SPLIT.texts, SPLIT.labels)]
    assert rows.truncated == sum(length > 8 for length in lengths[0]) > 0
    assert rows.truncated_targets == sum(length > 6 for length in lengths[1]) > 0
    for row in rows.features:
        assert row["input_ids"][-1] == row["labels"][-1] == metaspace.eos_token_id


def test_a_prefix_comes_before_every_source(pieces: Any):
    rows = pairs(pieces, prefix="words with ")
    assert texts_of(torch.tensor([rows.features[2]["input_ids"]]), pieces) == ["words with in Paris"]
    assert rows.features[2]["labels"] == pairs(pieces).features[2]["labels"]


def test_the_tokenizer_is_left_as_it_was(tokenizer: Any):
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.truncation_side
    pairs(tokenizer, max_length=6, max_target_length=6)
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.truncation_side) == before


def test_classes_are_no_targets(metaspace: Any):
    with pytest.raises(DataError, match="generation: row 1 has 1 for its target; texts are written") as info:
        pairs(metaspace, Split(("a", "b"), ("c", 1)))
    assert info.value.row == 1


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


TWO = Split(("a cat sat", "dog"), ("un caine mic", "pisic"))


def last_tokens(rows: Pairs, tokenizer: Any) -> list[set[str]]:
    return [{tokenizer.convert_ids_to_tokens(row[key][-1]) for row in rows.features} for key in ("input_ids", "labels")]


def test_targets_are_in_the_language_of_targets(bilingual: Any):
    rows = pairs(bilingual, TWO, max_target_length=8)
    assert last_tokens(rows, bilingual) == [{"en_XX"}, {"ro_RO"}]
    assert rows.truncated_targets == 1
    assert texts_of(rows.batch([0, 1])["labels"], bilingual) == ["un ca", "pisic"]
    assert bilingual.convert_ids_to_tokens(bilingual("a")["input_ids"])[-1] == "en_XX"


def test_without_one_they_are_in_the_language_of_sources(bilingual: Any, caplog: pytest.LogCaptureFixture):
    pairs(bilingual, TWO)
    assert caplog.text == ""
    bilingual.tgt_lang = None
    assert last_tokens(pairs(bilingual, TWO), bilingual) == [{"en_XX"}, {"en_XX"}]
    assert "tgt_lang is not set; targets are taken to be in en_XX" in caplog.text
    assert bilingual.tgt_lang is None


# Back to texts


@pytest.mark.parametrize("name", ["byte_level", "pieces", "minilm"])
def test_texts_come_back(request: pytest.FixtureRequest, name: str):
    tokenizer = request.getfixturevalue(name)
    split = Split(("a", "b"), ("the lazy dog", " over the cat and the moon "))
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
