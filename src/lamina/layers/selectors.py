"""Layer selectors: the forms in which layers are named everywhere in Lamina."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from lamina.errors import ConfigError, LayerIndexError

Selector = int | str | Sequence[int]

FORMS = "an int (negative counts from the top), a list of ints, 'all', 'bottom:4', 'top:4', '2-6', or '1-' (to the top)"


def is_all(selector: object) -> bool:
    """Return whether a layer selector is "all"."""
    return isinstance(selector, str) and selector == "all"


def select(selector: object, layers: int, *, op: str) -> list[int]:
    """Return the layer numbers that a selector selects, in ascending order.

    Args:
        selector: One of the forms in `FORMS`. Tuples, ranges, arrays and tensors count as lists, "3" as 3.
        layers: Number of layers that exist, embeddings included.
        op: The operation that error messages begin with.

    Raises:
        LayerIndexError: If a layer does not exist.
        ConfigError: If the selector is in no valid form, selects no layer, or selects a layer twice.
    """
    if (to_list := getattr(selector, "tolist", None)) is not None:  # an array or a tensor
        selector = cast("Selector", to_list())
    if isinstance(selector, str):
        return _from_text(selector, layers, op)
    given = cast("Sequence[object]", selector) if isinstance(selector, (list, tuple, range)) else (selector,)
    items: list[object] = [cast("Any", item).item() if getattr(item, "ndim", None) == 0 else item for item in given]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ConfigError(f"{op}: layers is {selector!r}, which is not a layer selector. Use {FORMS}.")
    chosen = sorted(_index(cast("int", item), layers, op) for item in items)
    if not chosen:
        raise ConfigError(f"{op}: layers is {selector!r}, which names no layer; at least one is needed. Use {FORMS}.")
    twice = [str(layer) for layer, following in pairwise(chosen) if layer == following]
    if twice:
        raise ConfigError(f"{op}: layers {selector!r} names layer {twice[0]} twice; each counts once.")
    return chosen


def _from_text(selector: str, layers: int, op: str) -> list[int]:
    """Return the layer numbers of a selector that is a string, such as "top:4"; see `select` for `layers` and `op`.

    Raises ConfigError if the string is not a selector, selects nothing, or has a range that runs backwards, and
    LayerIndexError if a layer does not exist.
    """
    text = selector.strip()
    if text == "all":
        return list(range(layers))
    if re.fullmatch(r"\d{1,9}", text):
        return [_index(int(text), layers, op)]
    if end := re.fullmatch(r"(bottom|top):(\d{1,9})", text):
        count = int(end[2])
        if count == 0:
            raise ConfigError(f"{op}: '{text}' names no layer; at least one is needed. Use '{end[1]}:1' or more.")
        if count > layers:
            raise LayerIndexError(op=op, got=count - 1, layers=layers, end=end[1])
        return list(range(layers))[:count] if end[1] == "bottom" else list(range(layers))[-count:]
    if span := re.fullmatch(r"(\d{1,9})-(\d{0,9})", text):
        low, high = span.groups()
        first, last = _index(int(low), layers, op), _index(int(high), layers, op) if high else layers - 1
        if first > last:
            raise ConfigError(f"{op}: '{text}' is descending; a range must ascend. Use '{high}-{low}'.")
        return list(range(first, last + 1))
    raise ConfigError(f"{op}: layers is {selector!r}, which is not a layer selector. Use {FORMS}.")


def _index(layer: int, layers: int, op: str) -> int:
    """Return a layer's number from 0; a negative one counts from the top.

    Raises LayerIndexError, about the operation `op`, if there is no such layer; `layers` is the number of layers.
    """
    if not -layers <= layer < layers:
        raise LayerIndexError(op=op, got=layer, layers=layers)
    return layer % layers


def ranges(layers: Sequence[int]) -> str:
    """Return ascending layer numbers as text, with runs of numbers joined: "1-6", "0, 3-5"; "" for none."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
