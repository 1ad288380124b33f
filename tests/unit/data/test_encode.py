from __future__ import annotations

import pytest
import torch
from tests.support.encoded import features
from tests.support.portions import one_in
from transformers import (
    AutoModel,
    BartConfig,
    BertConfig,
    ByT5Tokenizer,
    DebertaV2Config,
    GPT2Config,
    IBertConfig,
    LlamaConfig,
    OPTConfig,
    RobertaConfig,
    T5Config,
)

from lamina.data.encode import blocks, encodable, encode, length_limit
from lamina.errors import ConfigError
from lamina.layers.types import padding_of

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
MODELS = {
    "bert": (BertConfig(**SMALL, max_position_embeddings=20), 20),
    "roberta": (RobertaConfig(**SMALL, max_position_embeddings=20), 18),
    "ibert": (IBertConfig(**SMALL, max_position_embeddings=20), 18),
    "opt": (OPTConfig(**SMALL, ffn_dim=16, max_position_embeddings=20), 20),
    "gpt2": (GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=20), 20),
    "bart": (
        BartConfig(
            vocab_size=40,
            **BART,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_position_embeddings=20,
        ),
        20,
    ),
    "llama": (LlamaConfig(**SMALL, max_position_embeddings=20), 20),
    "t5": (T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), None),
    "deberta-v2": (
        DebertaV2Config(
            **SMALL,
            relative_attention=True,
            position_biased_input=False,
            pos_att_type=["c2p"],
            max_position_embeddings=20,
        ),
        None,
    ),
}
ODD = ["", "   ", "a" * 100_000, "word " * 20_000, "😀👨‍👩‍👧 😀", "שלום עולם", "half \ud83d of it", "\x00\u200b"]


@pytest.mark.parametrize("family", MODELS)
def test_length_limit_is_what_the_model_reads(family: str, byte_level):
    config, expected = MODELS[family]
    model = AutoModel.from_config(config).eval()
    limit = length_limit(model, byte_level)
    assert limit == (expected or 512)
    ids = torch.full((1, limit), 7)
    more = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
    with torch.no_grad():
        assert model(input_ids=ids, **more).last_hidden_state.shape[1] == limit


def test_length_limit_heeds_tokenizer_and_wish(minilm, metaspace):
    model = AutoModel.from_config(BertConfig(**SMALL, max_position_embeddings=100))
    assert length_limit(model, minilm) == 100
    assert length_limit(model, metaspace) == 64
    assert length_limit(model, metaspace, 10) == 10
    for asked in (0, 65):
        with pytest.raises(ConfigError, match=f"max_length is {asked}; model and tokenizer take 1 to 64"):
            length_limit(model, metaspace, asked)


def test_length_limit_without_any(byte_level):
    model = AutoModel.from_config(MODELS["t5"][0])
    assert length_limit(model, byte_level, 9999) == 9999
    with pytest.raises(ConfigError, match="max_length is -1; it must be positive"):
        length_limit(model, byte_level, -1)


def test_one_window_a_text(tokenizer):
    texts = ["the cat sat", "on the mat and looked at the moon"]
    encoded = encode(texts, tokenizer, max_length=64)
    assert (encoded.text.tolist(), encoded.window.tolist(), encoded.truncated) == ([0, 1], [0, 0], 0)
    for i, text in enumerate(texts):
        expected = tokenizer(text, truncation=False, padding=False)
        assert features(encoded)[i]["input_ids"] == list(expected["input_ids"])
        assert features(encoded)[i]["attention_mask"] == [1] * len(expected["input_ids"])
        run = encoded.token_ranges[i]
        spans = encoded.offsets[i]
        assert text[spans[run.start][0] : spans[run.stop - 1][1]] == text
        assert all(span == (0, 0) for span in spans[: run.start] + spans[run.stop :])


def test_truncated_texts_are_counted(tokenizer):
    texts = ["the cat", "the cat sat on the mat " * 20, "moon", "the dog " * 50]
    encoded = encode(texts, tokenizer, max_length=12)
    assert encoded.truncated == 2
    assert len(encoded) == 4
    assert max(encoded.lengths) == 12


def test_a_text_that_just_fits_is_not_truncated(tokenizer):
    text = "the cat sat on the mat"
    length = len(tokenizer(text, truncation=False)["input_ids"])
    assert encode([text], tokenizer, max_length=length).truncated == 0
    assert encode([text], tokenizer, max_length=length - 1).truncated == 1


def test_pairs(minilm):
    encoded = encode([("the cat", "a dog sat"), ("moon", "the moon " * 50)], minilm, max_length=16)
    assert encoded.truncated == 1
    assert features(encoded)[0]["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert encoded.offsets[0] == [(0, 0), (0, 3), (4, 7), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)]
    assert encoded.token_ranges[0][:2] == (1, 3)


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_cover_the_text_from_its_start(tokenizer, side: str):
    text = "the quick brown fox jumps over the lazy dog in Paris " * 8
    whole = encode([text], tokenizer, max_length=10_000)
    tokenizer.truncation_side = side
    try:
        encoded = encode(["moon", text], tokenizer, max_length=20, windows=True, stride=6)
        assert tokenizer.truncation_side == side
    finally:
        tokenizer.truncation_side = "right"
    assert (encoded.truncated, encoded.text[0], set(encoded.text[1:].tolist())) == (0, 0, {1})
    assert encoded.window.tolist() == [0, *range(len(encoded) - 1)]
    inner = features(whole)[0]["input_ids"][whole.token_ranges[0].start : whole.token_ranges[0].stop]
    covered = 0
    for feature, run in zip(features(encoded)[1:], encoded.token_ranges[1:], strict=True):
        some = feature["input_ids"][run.start : run.stop]
        assert some == inner[run.number : run.number + len(some)]
        assert run.number == 0 or covered - run.number == 6
        covered = run.number + len(some)
    assert covered == len(inner)


def test_the_tokenizer_is_left_as_it_was(tokenizer):
    backend = tokenizer.backend_tokenizer
    before = backend.to_str()
    encode(["the cat " * 50], tokenizer, max_length=8)
    encode(["the cat " * 50], tokenizer, max_length=8, windows=True)
    assert backend.to_str() == before


@pytest.mark.parametrize("windows", one_in(3, [False, True]))
def test_odd_texts_encode_to_something(tokenizer, windows: bool):
    encoded = encode(ODD, tokenizer, max_length=60, windows=windows)
    assert sorted(set(encoded.text.tolist())) == list(range(len(ODD)))
    assert encoded.texts == len(ODD)
    assert all(1 <= length <= 60 for length in encoded.lengths)
    assert all(sum(feature["attention_mask"]) >= 1 for feature in features(encoded))
    assert [len(spans) for spans in encoded.offsets] == encoded.lengths.tolist()
    batch = encoded.batch(range(len(encoded)), padding_of(tokenizer))
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (len(encoded), max(encoded.lengths))


def test_nothing_becomes_one_attended_token(byte_level):
    encoded = encode([""], byte_level, max_length=8, windows=True)
    assert features(encoded)[0]["input_ids"] == [byte_level.eos_token_id]
    assert features(encoded)[0]["attention_mask"] == [1]
    assert encoded.offsets == [[(0, 0)]]
    assert encoded.token_ranges[0][:2] == (0, 0)


def test_nothing_without_special_tokens(byte_level, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_level, "_special_tokens_map", dict.fromkeys(byte_level._special_tokens_map))
    assert byte_level.eos_token_id is None
    encoded = encode([""], byte_level, max_length=8)
    assert features(encoded)[0]["input_ids"] == [0]


def test_many_texts_keep_their_numbers(minilm):
    texts = [f"moon {i}" for i in range(2100)]
    encoded = encode(texts, minilm, max_length=16)
    assert encoded.text.tolist() == list(range(2100))
    some = encode([texts[2050]], minilm, max_length=16)
    assert features(encoded)[2050] == features(some)[0]


def test_no_texts(tokenizer):
    encoded = encode([], tokenizer, max_length=16)
    assert (len(encoded), encoded.texts, features(encoded)) == (0, 0, [])
    assert (encoded.text.tolist(), encoded.lengths.tolist()) == ([], [])


def test_offsets_can_be_left_out(minilm):
    assert encode(["the cat"], minilm, max_length=16, offsets=False).offsets == [[]]


def test_a_processor_holds_a_tokenizer(minilm):
    class Processor:
        tokenizer = minilm

    assert features(encode(["cat"], Processor(), max_length=8)) == features(encode(["cat"], minilm, max_length=8))


def test_lengths_that_cannot_be(minilm):
    with pytest.raises(ConfigError, match="max_length is 2; the special tokens alone are 2"):
        encode(["cat"], minilm, max_length=2)
    for stride in (-1, 6):
        with pytest.raises(ConfigError, match=f"stride is {stride}; windows hold 6 tokens of a text"):
            encode(["cat"], minilm, max_length=8, windows=True, stride=stride)
    assert len(encode(["cat mat"], minilm, max_length=3, windows=True)) == 2


def test_windows_of_pairs_cut_the_second_text(minilm):
    text = "one two three four five six seven"
    encoded = encode([("a", text)], minilm, max_length=8, stride=2, windows=True)
    ids = encoded.batch(range(len(encoded)), {})["input_ids"]
    assert [minilm.decode(row) for row in ids] == [
        "[CLS] a [SEP] one two three four [SEP]",
        "[CLS] a [SEP] three four five six [SEP]",
        "[CLS] a [SEP] five six seven [SEP] [PAD]",
    ]
    assert [tuple(run) for run in encoded.token_ranges] == [(3, 7, 0), (3, 7, 2), (3, 6, 4)]
    spans = [[text[start:end] for start, end in window if start < end] for window in encoded.offsets]
    assert spans == [text.split()[:4], text.split()[2:6], text.split()[4:]]


def test_slow_tokenizers(minilm):
    slow = ByT5Tokenizer()
    encoded = encode(["cat", "a longer text"], slow, max_length=8)
    assert encoded.truncated == 1
    assert encoded.offsets == [[], []]
    with pytest.raises(ConfigError, match="ByT5Tokenizer is a slow tokenizer"):
        encode(["cat"], slow, max_length=8, windows=True)


PARAGRAPHS = ("the cat sat on the mat", "and looked", "at the moon over a lazy dog in Paris", "", "words")


@pytest.mark.parametrize("max_length", [1, 4, 7, 1000])
def test_running_text_is_cut_into_blocks(tokenizer, max_length: int):
    tokenizer("a", truncation=False)  # any call drops the limit that a file of a tokenizer may bring
    before = tokenizer.truncation_side, repr(getattr(tokenizer.backend_tokenizer, "truncation", None))
    encoded = blocks(PARAGRAPHS, tokenizer, max_length=max_length)
    joined = [token for text in PARAGRAPHS for token in tokenizer(text, truncation=False)["input_ids"]]
    cut = [feature["input_ids"] for feature in features(encoded)]
    assert [token for block in cut for token in block] == joined
    assert all(len(block) == max_length for block in cut[:-1])
    assert 1 <= len(cut[-1]) <= max_length
    assert all(len(set(map(len, feature.values()))) == 1 for feature in features(encoded))
    assert all(set(feature["attention_mask"]) == {1} for feature in features(encoded))
    assert encoded.text.tolist() == list(range(len(cut)))
    assert (set(encoded.window.tolist()), encoded.truncated) == ({0}, 0)
    assert before == (tokenizer.truncation_side, repr(getattr(tokenizer.backend_tokenizer, "truncation", None)))


def test_many_texts_are_tokenised_in_parts(minilm, monkeypatch: pytest.MonkeyPatch):
    whole = blocks(PARAGRAPHS * 3, minilm, max_length=8)
    texts = encode(PARAGRAPHS * 3, minilm, max_length=8, windows=True)
    monkeypatch.setattr("lamina.data.arrow.chunks.__defaults__", (4,))
    monkeypatch.setattr("lamina.data.encode.CHUNK", 4)
    parts = blocks(PARAGRAPHS * 3, minilm, max_length=8), encode(PARAGRAPHS * 3, minilm, max_length=8, windows=True)
    for one, other in zip((whole, texts), parts, strict=True):
        assert (features(one), one.token_ranges, one.offsets) == (features(other), other.token_ranges, other.offsets)
        assert (one.text.tolist(), one.window.tolist()) == (other.text.tolist(), other.window.tolist())
        assert one.digest == other.digest


def test_no_text_is_no_block(minilm):
    assert len(blocks((), minilm, max_length=8)) == 0


def test_half_characters_are_replaced():
    assert encodable("a \ud83d b \U0001f600") == "a \ufffd b \U0001f600"
