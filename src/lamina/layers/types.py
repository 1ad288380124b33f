"""Types that all packages of Lamina use: a model's inputs, and the processor that makes them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast, overload

import torch
from torch import Tensor

from lamina.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers
    from torch import nn
    from transformers import PreTrainedModel

# What a model is called with: argument -> tensor `[batch, ...]`.
Batch: TypeAlias = Mapping[str, Tensor]


class Processor(Protocol):
    """Turns examples into a model's inputs: a tokenizer, image processor or feature extractor of transformers."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inputs of a batch of examples, as a mapping of tensors or lists."""
        ...

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> Any:
        """Write to a folder the files that `AutoProcessor.from_pretrained` reads."""
        ...


class WritingModel(Protocol):
    """A model that writes text, with the `generate` of transformers."""

    def generate(self, **arguments: Any) -> Tensor:
        """Return token ids `[sequences, tokens]`."""
        ...


class Tokenizer(Processor, Protocol):
    """A tokenizer of transformers.

    A token that the tokenizer lacks is None, and so is its id. Only tokenizers for translation have languages.
    """

    is_fast: bool
    model_max_length: int
    model_input_names: list[str]
    truncation_side: Literal["left", "right"]
    chat_template: object
    init_kwargs: dict[str, object]
    special_tokens_map: dict[str, object]
    added_tokens_decoder: dict[int, object]
    all_special_ids: list[int]
    bos_token: str | None
    bos_token_id: int | None
    eos_token: str | None
    eos_token_id: int | None
    mask_token: str | None
    mask_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    src_lang: str | None
    tgt_lang: str | None

    def __len__(self) -> int:
        """Return the number of tokens, with those that were added."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        ...

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return how many special tokens a text gets, or with `pair`, a pair of texts."""
        ...

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Return the token with an id, or the tokens with several ids."""
        ...

    def decode(self, token_ids: Sequence[int] | Tensor, **options: bool) -> str:
        """Return the text of token ids; `options` are transformers' (`skip_special_tokens`)."""
        ...

    def batch_decode(self, sequences: Sequence[Sequence[int]] | Tensor, **options: bool) -> list[str]:
        """Return the text of each row of token ids; `options` are transformers' (`skip_special_tokens`)."""
        ...

    def get_chat_template(self) -> str:
        """Return the template that turns a chat into a text."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, object]], *, tokenize: Literal[False], add_generation_prompt: bool
    ) -> str:
        """Return the text of a chat, a list of messages with "role" and "content".

        `add_generation_prompt` adds the tokens that begin a reply.
        """
        ...


def tokenizer_of(processor: object) -> Tokenizer:
    """Return the tokenizer inside a processor. Anything without one, such as a tokenizer or None, is returned as is."""
    return cast("Tokenizer", getattr(processor, "tokenizer", processor))


def check_tokenizer(processor: object) -> Processor:
    """Return the processor if it is, or has, a tokenizer; otherwise raise ConfigError."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer_of(processor), PreTrainedTokenizerBase):
        got = "no processor was given" if processor is None else f"the processor is a {type(processor).__name__}"
        hint = "Give the one that AutoTokenizer.from_pretrained finds for the model."
        raise ConfigError(f"task: {got}; texts need a tokenizer. {hint}")
    return cast("Processor", processor)


def token_rows(model: nn.Module) -> int | None:
    """Return the number of rows of a model's token table; None if the model has no such table."""
    with suppress(NotImplementedError, AttributeError):  # such as a model of images
        return getattr(cast("PreTrainedModel", model).get_input_embeddings(), "num_embeddings", None)
    return None


def ids_problem(model: nn.Module, batch: Batch) -> str | None:
    """Return, as text, that a batch on the CPU has token ids beyond the model's token table; None if it has not."""
    rows, ids = token_rows(model), batch.get("input_ids")
    if rows is None or ids is None or not ids.numel() or (highest := int(ids.max())) < rows:
        return None
    problem = f"the tokenizer gives ids up to {highest}; the model's token table has {rows} rows, 0 to {rows - 1}"
    hint = f"Use the model's own tokenizer, or call model.resize_token_embeddings({highest + 1}) if it got new tokens"
    return f"{problem}. {hint}"


def padding_of(processor: Processor) -> dict[str, int]:
    """Return {"input_ids": padding value, "token_type_ids": padding value} for a processor's tokenizer.

    Input ids are padded with the padding token; with the end token if the tokenizer has no padding token (GPT-2); with
    0 if it has neither. Token types are padded with `pad_token_type_id`; with 0 if the tokenizer has none. Lamina pads
    on the right, even if the tokenizer pads on the left, so that no token's position depends on its batch.
    """
    tokenizer = tokenizer_of(processor)
    token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {"input_ids": 0 if token is None else token, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}


def start_token(tokenizer: Tokenizer) -> int:
    """Return the id of a tokenizer's start token; of its end or padding token if it has none; 0 if it has neither."""
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
    return next(token for token in candidates if token is not None)


def adds_end(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer puts its end token after a text. A model that continues the text must not read it."""
    return tokenizer.eos_token_id is not None and _last_id(tokenizer) == tokenizer.eos_token_id


def adds_last(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer puts any special token after a text, so that the last token is no part of a word."""
    last = _last_id(tokenizer)
    return last is not None and bool((special_ids(tokenizer) == last).any())


def special_ids(processor: object) -> Tensor:
    """Return the ids of the special tokens of a processor's tokenizer, ascending; none without a tokenizer.

    Monitors score none of these tokens, because training gives them no label. The unknown token is not among them: it
    stands for text.
    """
    tokenizer = tokenizer_of(processor)
    ids = {*getattr(tokenizer, "all_special_ids", ())} - {None, getattr(tokenizer, "unk_token_id", None)}
    return torch.tensor(sorted(ids), dtype=torch.long)


def _last_id(tokenizer: Tokenizer) -> int | None:
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        ids = tokenizer("a")["input_ids"]
    else:  # unlike a call of `tokenizer`, this changes no settings
        ids = (one := backend.encode("a")).ids[unpadded(one)]
    return ids[-1] if ids else None


def unpadded(encoding: tokenizers.Encoding) -> slice:
    """Return the positions of an encoding's tokens without padding, which the settings of a tokenizer may ask for."""
    mask = encoding.attention_mask
    start = mask.index(1) if 1 in mask else 0
    return slice(start, start + sum(mask))


def encodable(text: str) -> str:
    """Return the text with "�" in place of lone surrogates, because UTF-8 cannot encode them."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)
