"""Tokenizers that put a mark or a space before every text, as those of SentencePiece do."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PREPEND, SPACES = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
MARKS = {
    "Prepend": lambda backend: setattr(backend, "normalizer", normalizers.Sequence([PREPEND, SPACES])),
    "Metaspace": lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Metaspace(split=False)),
    "first": lambda backend: setattr(
        backend, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "ByteLevel": lambda backend: setattr(
        backend, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    ),
}


def letters(mark: str, *, starts: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per letter that puts a mark or a space before every text, and a start token."""
    alphabet = ["<s>", "▁", "Ġ", "Ċ", "\n", ",", "?", *string.ascii_letters]
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, [], unk_token="?"))
    MARKS[mark](backend)
    if starts:
        pair = "<s> $A <s> $B"
        backend.post_processor = processors.TemplateProcessing("<s> $A", pair, special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", model_max_length=64)
