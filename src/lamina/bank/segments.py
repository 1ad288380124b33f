"""Segment ids: which tokens of a tokenised pair belong to its first text, and which to its second."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamina.errors import ConfigError
from lamina.layers.types import tokenizer_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from lamina.layers.types import Tokenizer


_OP = "reader of pairs"


class Separators(NamedTuple):
    """Ids of the special tokens that a tokenizer adds to a pair of texts.

    Attributes:
        between: Ids inserted between the two texts, in this order.
        added: Ids inserted anywhere, ascending. They belong to neither text. Those in `between` are among them.
    """

    between: tuple[int, ...]
    added: tuple[int, ...]


_cache: WeakKeyDictionary[object, Separators] = WeakKeyDictionary()  # tokenizer -> its separators


def separators_of(processor: object) -> Separators:
    """Return the special tokens that a tokenizer adds to a pair of texts.

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
    """Tokenise the pair ("a", "b"); return the ids between the two texts, and all ids that belong to neither text.

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
    return Separators(between, tuple(sorted(added)))


def segments_of(
    ids: Int[Tensor, "batch tokens"], separators: Separators, mask: Bool[Tensor, "batch tokens"]
) -> Int[Tensor, "batch tokens"]:
    """Return the segment id of each token: 1 in the first text, 2 in the second, 0 for padding and special tokens.

    The second text follows the first of the `separators.between` that comes after a token of a text.

    Args:
        ids: Token ids.
        separators: The special tokens of the tokenizer that made the ids.
        mask: True at tokens, False at padding.
    """
    text = mask & ~_is_among(ids, separators.added)
    is_between = _is_among(ids, separators.between)
    second = (is_between & (text.cumsum(1) > 0)).cumsum(1) > 0
    return text.int() * (1 + second.int())


def _is_among(ids: Int[Tensor, "batch tokens"], wanted: tuple[int, ...]) -> Bool[Tensor, "batch tokens"]:
    """Return a mask, True where an id is one of `wanted`. Unlike `torch.isin`, it can be exported to ONNX."""
    return (ids.unsqueeze(-1) == torch.tensor(wanted, device=ids.device)).any(-1)
