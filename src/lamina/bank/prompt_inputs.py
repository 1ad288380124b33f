"""Turn what a user gives `bank.stream` (texts, token ids, a tokenizer's output) into the arguments of `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lamina.bank.stack_pass import Inputs
from lamina.errors import ConfigError
from lamina.layers.stack import table_sizes
from lamina.layers.types import adds_end, encodable, padding_of, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank.reader_collection import ReaderCollection
    from lamina.layers.types import Tokenizer

# What a tokenizer returns, token ids, or one or more texts; in a list, also pairs of texts.
Prompts = Inputs | Tensor | str | Sequence[str | tuple[str, str]]
_EMPTY = "has no token; each prompt needs at least one."


def text_tokenizer(bank: ReaderCollection) -> PreTrainedTokenizerBase | None:
    """Return the bank's tokenizer: its processor, or the tokenizer inside the processor. None: there is none."""
    tokenizer = tokenizer_of(bank.processor)
    return tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None


def prompt_tokens(bank: ReaderCollection, tokenizer: Tokenizer) -> slice:
    """Return which token ids of a prompt the bank's model reads, with the special tokens that `tokenizer` adds.

    They are all, but for a decoder-only model without the end token that the tokenizer may add: the model would begin
    another text after it.
    """
    return slice(-1 if "main" in bank.stacks and adds_end(tokenizer) else None)


def encode_prompts(bank: ReaderCollection, inputs: Prompts) -> dict[str, object]:
    """Return the arguments of `generate` for prompts.

    Texts are tokenised, padded as in `padding_of`, and moved to the bank's device. For a decoder-only model, padding
    comes on the left, and an end token that the tokenizer adds is left out. Token ids and mappings are used as they
    are, on their own device.

    Raises ConfigError if there is no prompt, a prompt has no token or is neither a text nor a pair of texts, token ids
    have another form than `[batch, tokens]`, or the bank has no tokenizer for texts.
    """
    if isinstance(inputs, Mapping):
        return _check_tokens(inputs)
    if isinstance(inputs, Tensor):
        return _check_tokens({"inputs": inputs})
    if not isinstance(inputs, Iterable):
        problem = f"the prompts are of type {type(inputs).__name__}; a text, texts, token ids or a mapping is needed"
        raise ConfigError(f"bank.stream: {problem}.")
    if (tokenizer := text_tokenizer(bank)) is None:
        problem = "a text was given, and the bank has no processor with a tokenizer to read it"
        raise ConfigError(f"bank.stream: {problem}. Use ReaderBank(model, processor=...).")
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    if not texts:
        raise ConfigError("bank.stream: there is no prompt; at least one is needed.")
    kept = prompt_tokens(bank, cast("Tokenizer", tokenizer))
    encoded: list[Tensor] = []
    for number, text in enumerate(texts):
        is_pair = isinstance(text, tuple | list) and len(text) == 2 and all(isinstance(part, str) for part in text)
        if not (is_pair or isinstance(text, str)):
            problem = f"prompt {number} is of type {type(text).__name__}; a text, or a pair of texts, is needed"
            raise ConfigError(f"bank.stream: {problem}. Give token ids as a tensor.")
        parts = [text] if isinstance(text, str) else text
        tokens = cast("Tokenizer", tokenizer)(*map(encodable, parts))
        encoded.append(torch.tensor(tokens["input_ids"][kept]).long())
    # in a decoder-only model, the new tokens must follow the text, not the padding
    side = "left" if "main" in bank.stacks else tokenizer.padding_side
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = pad(encoded, padding_value=padding_of(tokenizer)["input_ids"]).to(bank.device)
    mask = pad(list(map(torch.ones_like, encoded))).to(bank.device)
    prompts = _check_tokens({"input_ids": ids, "attention_mask": mask})
    if not all(map(len, encoded)):
        raise ConfigError(f"bank.stream: a prompt {_EMPTY}")
    return prompts


def _check_tokens(prompts: Mapping[str, object]) -> dict[str, object]:
    """Return `prompts` as a dictionary.

    Raises ConfigError if its token ids are not a tensor `[batch, tokens]`, or are empty and no embeddings replace them.
    Under the name "inputs", a tensor of floats is taken for sound or images.
    """
    name = "input_ids" if prompts.get("input_ids") is not None else "inputs"
    if (ids := prompts.get(name)) is None:
        return dict(prompts)
    need = "token ids must be a tensor of integers [batch, tokens]"
    if not isinstance(ids, Tensor):
        hint = 'Call the tokenizer with return_tensors="pt"'
        raise ConfigError(f"bank.stream: {name} is of type {type(ids).__name__}; {need}. {hint}.")
    if ids.is_floating_point() and name == "inputs":
        return dict(prompts)
    if ids.ndim != 2 or ids.is_floating_point():
        hint = " Give ids[None] for one prompt." if ids.ndim == 1 else ""
        raise ConfigError(f"bank.stream: {name} has shape {list(ids.shape)} and type {ids.dtype}; {need}.{hint}")
    if not ids.numel() and "inputs_embeds" not in prompts:
        raise ConfigError(f"bank.stream: the prompt {_EMPTY}")
    return dict(prompts)


def check_prompt_length(model: PreTrainedModel, arguments: Mapping[str, object]) -> None:
    """Raise ConfigError if a prompt has more tokens than the model's learned position table.

    `arguments` are those of `generate`. Not checked: embeddings, encoder-decoders, and models that read more than text
    or have no such table, such as those with rotary positions; transformers warns of these.
    """
    ids, mask = (arguments.get(key) for key in ("input_ids", "attention_mask"))
    ids, config = arguments.get("inputs") if ids is None else ids, model.config
    if not isinstance(ids, Tensor) or ids.ndim != 2 or config.is_encoder_decoder or hasattr(config, "text_config"):
        return
    if sizes := table_sizes(model):
        real = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids)
        if (tokens := int(real.sum(1).max())) > (most := min(sizes)):
            raise ConfigError(f"bank.stream: a prompt has {tokens} tokens; the model reads at most {most}. Shorten it.")
