"""A tokenizer with a token per byte."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per byte, so that most characters beyond ASCII are several tokens."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({sign: at for at, sign in enumerate(signs)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


BYTES = bytes_tokenizer()
