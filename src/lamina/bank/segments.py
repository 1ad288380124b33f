"""Segment ids: which tokens of a tokenised pair belong to its first text, and which to its second."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from lamina.errors import ConfigError
from lamina.layers.types import tokenizer_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from lamina.layers.types import Tokenizer


_OP = "reader of pairs"


class Separators(NamedTuple):
    """What a tokenizer does to a pair of texts, so that their tokens can be told apart.

    Attributes:
        between: Ids inserted between the two texts, in this order.
        added: Ids inserted anywhere, ascending. They belong to neither text. Those in `between` are among them.
        second_type: Token type of the second text's tokens. None: the tokenizer gives both texts the same type, or
            gives no types.
    """

    between: tuple[int, ...]
    added: tuple[int, ...]
    second_type: int | None = None


_cache: WeakKeyDictionary[object, Separators] = WeakKeyDictionary()  # tokenizer -> its separators


def separators_of(processor: object) -> Separators:
    """Return the special tokens that a tokenizer adds to a pair of texts, and the token type of the second text.

    On the first call the tokenizer encodes a short pair; the result is cached for as long as the tokenizer exists.

    Args:
        processor: A tokenizer, a joint processor that contains one, or None.

    Raises:
        ConfigError: If there is no tokenizer, it is not a fast one, or does not encode pairs with a token in between.
    """
    tokenizer = tokenizer_of(processor)
    if tokenizer is None:
        problem = "the bank has no tokenizer, which is needed to tell two texts apart"
        raise ConfigError(f"{_OP}: {problem}. Use ReaderBank(model, processor=tokenizer).")
    if (separators := _cache.get(tokenizer)) is None:
        separators = _cache[tokenizer] = _encode_a_pair(tokenizer)
    return separators


def _encode_a_pair(tokenizer: Tokenizer) -> Separators:
    """Tokenise the pair ("a", "b"), and return what tells its two texts apart.

    Raises ConfigError if the tokenizer is not a fast one, does not encode pairs, or puts no token between two texts.
    """
    name = type(tokenizer).__name__
    encoding = tokenizer("a", "b")
    if not getattr(encoding, "is_fast", False):
        raise ConfigError(f"{_OP}: {name} does not tell the tokens of two texts apart. Use a fast tokenizer.")
    ids, owners = encoding["input_ids"], encoding.sequence_ids()  # owners: 0 or 1, or None for an added token
    if 0 not in owners or 1 not in owners:
        raise ConfigError(f"{_OP}: {name} does not encode pairs of texts. Use PooledLayers, which reads any text.")
    last, first = len(owners) - 1 - owners[::-1].index(0), owners.index(1)
    between = tuple(ids[last + 1 : first])
    if not between:
        problem = f"{name} puts no token between two texts, so they cannot be told apart"
        raise ConfigError(f"{_OP}: {problem}. Use PooledLayers, which reads both texts as one.")
    added = {token for token, owner in zip(ids, owners, strict=True) if owner is None}
    types = encoding["token_type_ids"] if "token_type_ids" in encoding else [0] * len(ids)
    second_type = types[first] if types[first] != types[last] else None
    return Separators(between, tuple(sorted(added)), second_type)


def segments_of(
    ids: Int[Tensor, "batch tokens"],
    separators: Separators,
    mask: Bool[Tensor, "batch tokens"],
    types: Int[Tensor, "batch tokens"] | None = None,
) -> Int[Tensor, "batch tokens"]:
    """Return the segment id of each token: 1 in the first text, 2 in the second, 0 for padding and special tokens.

    A text may contain the tokenizer's separators too, such as a literal "[SEP]". Token types tell the texts apart even
    so. Without types, the second text follows the last place where all of `separators.between` stand in order, with
    text on both sides. So a first text may contain separators; a second text, or a single one, is divided at them.

    Args:
        ids: Token ids.
        separators: What the tokenizer that made the ids does to pairs.
        mask: True at tokens, False at padding.
        types: Token types of the same tokenizer. None: not known. Not used if `separators.second_type` is None.
    """
    text = mask & ~_is_among(ids, separators.added)
    if types is not None and separators.second_type is not None:
        return text.int() * (1 + (types == separators.second_type).int())
    count = text.cumsum(1)
    divides = (count > 0) & (count < count[:, -1:])  # True between two tokens of texts
    for shift, token in enumerate(reversed(separators.between)):
        divides = divides & (pad(ids, (shift, 0), value=-1)[:, : ids.shape[1]] == token)
    seen = divides.cumsum(1)
    second = (seen > 0) & (seen == seen[:, -1:])
    return text.int() * (1 + second.int())


def _is_among(ids: Int[Tensor, "batch tokens"], wanted: tuple[int, ...]) -> Bool[Tensor, "batch tokens"]:
    """Return a mask, True where an id is one of `wanted`. Unlike `torch.isin`, it can be exported to ONNX."""
    return (ids.unsqueeze(-1) == torch.tensor(wanted, device=ids.device)).any(-1)
