"""Check the examples that a user passes to `predict`, and return them as lists of one type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import cast

from lamina.errors import ConfigError


def as_examples(examples: object) -> list[object]:
    """Return the examples that a user passed to `predict` as a list.

    Args:
        examples: A list or another ordered iterable, such as a NumPy array, a tensor or a pandas column. An array of
            numbers with several axes is a list of images or clips.

    Raises:
        ConfigError: If `examples` is a single text or path, a mapping, a set or a table.
    """
    is_numeric = getattr(getattr(examples, "dtype", None), "kind", "f") in "biuf"
    has_media = is_numeric and getattr(examples, "ndim", 1) > 1
    to_list = None if has_media else getattr(examples, "tolist", None)
    listed = examples if to_list is None else to_list()
    is_single = isinstance(listed, str | bytes | Path | Mapping | Set) or hasattr(listed, "__dataframe__")
    if is_single or not isinstance(listed, Iterable):
        raise ConfigError(
            f"predict: got one {type(examples).__name__}; a list of texts, pairs of texts, images or clips is needed."
        )
    return list(listed)


def checked_texts(raw: Sequence[object], *, pairs: bool) -> list[str] | list[tuple[str, str]]:
    """Check that a user's examples are all texts, or all pairs of texts, and return them.

    Args:
        raw: The examples; either all of them are texts, or all are pairs (tuples or lists of two texts).
        pairs: Whether pairs are allowed.

    Raises:
        ConfigError: If an example has another type, or pairs are not allowed.
    """
    if len(raw) == 0 or isinstance(raw[0], str):
        for row, text in enumerate(raw):
            if not isinstance(text, str):
                raise _not_alike(row, text)
        return cast("list[str]", list(raw))
    if not pairs:
        raise ConfigError("predict: got pairs of texts; this kind of task reads single texts.")
    return [_checked_pair(row, pair) for row, pair in enumerate(raw)]


def _checked_pair(row: int, entry: object) -> tuple[str, str]:
    """Return an example as a tuple if it is a pair of texts; otherwise raise ConfigError with its index `row`."""
    if isinstance(entry, tuple | list) and len(entry) == 2:
        first, second = entry
        if isinstance(first, str) and isinstance(second, str):
            return first, second
    raise _not_alike(row, entry)


def _not_alike(row: int, entry: object) -> ConfigError:
    """Return the ConfigError for an example that has another type than the first one."""
    return ConfigError(f"predict: entry {row} is {type(entry).__name__}; all must be texts, or all pairs of texts.")
