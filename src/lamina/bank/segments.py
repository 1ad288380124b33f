"""Which tokens belong to which of the two texts of a pair, found by looking at what a tokenizer puts between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


_OP = "reader of pairs"


class Separators(NamedTuple):
    """Ids that a tokenizer adds to a pair of texts."""

    between: tuple[int, ...]  # behind the first text
    added: tuple[int, ...]  # anywhere: these belong to no text


_known: WeakKeyDictionary[Any, Separators] = WeakKeyDictionary()  # by tokenizer


def separators_of(processor: Any) -> Separators:
    """What a tokenizer adds to a pair, by having it join two texts the first time it is asked.

    Raises:
        ConfigError: If there is no tokenizer, or it puts nothing between two texts.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        raise ConfigError(f"{_OP}: the bank has no tokenizer, which tells two texts apart. Give ReaderBank one.")
    if (separators := _known.get(tokenizer)) is None:
        separators = _known[tokenizer] = _read_separators(tokenizer)
    return separators


def _read_separators(tokenizer: Any) -> Separators:
    encoding = tokenizer("a", "b")
    if not getattr(encoding, "is_fast", False):
        raise ConfigError(
            f"{_OP}: {type(tokenizer).__name__} does not tell the tokens of two texts apart; use a fast one."
        )
    ids, owners = encoding["input_ids"], encoding.sequence_ids()
    if 0 not in owners or 1 not in owners:
        raise ConfigError(f"{_OP}: {type(tokenizer).__name__} does not read pairs of texts.")
    last, first = len(owners) - 1 - owners[::-1].index(0), owners.index(1)
    between = tuple(ids[last + 1 : first])
    if not between:
        came = f"{type(tokenizer).__name__} puts no token between two texts, so that none tells them apart"
        raise ConfigError(f"{_OP}: {came}. Use PooledLayers, which reads both as one.")
    added = {token for token, owner in zip(ids, owners, strict=True) if owner is None}
    return Separators(between, tuple(sorted(added)))


def segments_of(
    ids: Int[Tensor, "batch tokens"], separators: Separators, mask: Bool[Tensor, "batch tokens"]
) -> Int[Tensor, "batch tokens"]:
    """1 at the tokens of the first text, 2 at those of the second, 0 at padding and at what the tokenizer added.

    Whatever follows the first separator that has text before it is the second text. `mask` is True at real tokens.
    """
    text = mask & ~_is_among(ids, separators.added)
    is_between = _is_among(ids, separators.between)
    second = (is_between & (text.cumsum(1) > 0)).cumsum(1) > 0
    return text.int() * (1 + second.int())


def _is_among(ids: Int[Tensor, "batch tokens"], wanted: tuple[int, ...]) -> Bool[Tensor, "batch tokens"]:
    """As `torch.isin`, which has no counterpart in ONNX."""
    return (ids.unsqueeze(-1) == torch.tensor(wanted, device=ids.device)).any(-1)
