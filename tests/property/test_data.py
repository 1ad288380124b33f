# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false

"""Whatever the words, lengths or tags are: no word is lost, no row is lost, spans stay spans."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.encoded import features
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lamina.data.batches import length_batches
from lamina.data.encode import encode
from lamina.data.windows import IGNORED, read_flags, word_labels
from lamina.tasks.split import Split, held_out, limited
from lamina.tasks.tag_schemes import to_iob2
from lamina.tasks.words import join

CORPUS = ["the cat sat on the mat .", "äöü 12,345.67 numbers - dashes"] * 5


@cache
def byte_level() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


letters = st.characters(exclude_categories=["Cs", "Cc", "Z"])  # a byte-level tokenizer has tokens for all of them
words = st.lists(st.text(letters, min_size=1, max_size=12), max_size=25)


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(words, min_size=1, max_size=4), max_length=st.integers(3, 40), data=st.data())
def test_no_word_is_lost_and_none_counts_twice(rows: list[list[str]], max_length: int, data: st.DataObject):
    stride = data.draw(st.integers(0, max_length - 3))
    texts, spans = zip(*map(join, rows), strict=True)
    numbers = [tuple(range(len(row))) for row in rows]
    encoded = encode(texts, byte_level(), max_length=max_length, windows=True, stride=stride)
    labels = list(word_labels(encoded, spans, numbers))
    for text, row in enumerate(rows):
        found = [
            label for i, some in enumerate(labels) if encoded.text[i] == text for label in some if label != IGNORED
        ]
        assert sorted(found) == list(range(len(row)))


@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=200), max_length=st.integers(3, 30), data=st.data())
def test_windows_hold_every_token_once(text: str, max_length: int, data: st.DataObject):
    stride = data.draw(st.integers(0, max_length - 3))
    whole = encode([text], byte_level(), max_length=10_000)
    encoded = encode([text], byte_level(), max_length=max_length, windows=True, stride=stride)
    kept = [
        feature["input_ids"][at]
        for feature, flags in zip(features(encoded), read_flags(encoded), strict=True)
        for at, flag in enumerate(flags)
        if flag
    ]
    assert kept == features(whole)[0]["input_ids"][1:-1]
    assert max(encoded.lengths) <= max_length


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 500), max_size=300),
    batch_size=st.integers(1, 40),
    seed=st.none() | st.integers(0, 99),
)
def test_every_row_is_in_one_batch(lengths: list[int], batch_size: int, seed: int | None):
    batches = length_batches(lengths, batch_size, seed=seed)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert len(batches) == -(-len(lengths) // batch_size)
    assert all(1 <= len(batch) <= batch_size for batch in batches)


@given(tags=st.lists(st.sampled_from(["O", "I-A", "B-A", "I-B", "B-B"]), max_size=20))
def test_iob2_is_reached_in_one_step(tags: list[str]):
    once = to_iob2(tags)
    assert to_iob2(once) == once
    assert [tag[1:] for tag in once] == [tag[1:] for tag in tags]
    for before, tag in zip(("O", *once), once, strict=False):
        assert not tag.startswith("I-") or before[2:] == tag[2:]


@settings(deadline=None, max_examples=40)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=200), seed=st.integers(0, 99), limit=st.integers(1, 250))
def test_parts_share_no_row(labels: list[int], seed: int, limit: int):
    split = Split.of(map(str, range(len(labels))), labels)
    train, validation = held_out(split, stratify=True, seed=seed)
    assert sorted(map(int, (*train.texts, *validation.texts))) == list(range(len(labels)))
    assert len(validation) == max(1, round(0.1 * len(labels)))
    drawn = limited(train, limit, seed)
    assert len(drawn) == min(limit, len(train))
    assert set(drawn.texts) <= set(train.texts)
