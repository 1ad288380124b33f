"""Choose a part of a recipe: the runs whose task, method and settings match the patterns of the key `only`."""

from __future__ import annotations

import csv
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from lamina.errors import ConfigError
from lamina.recipes.table_layouts import to_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# "task", "method" or a key of a grid -> patterns, in which * stands for any text; one of them must match
Only: TypeAlias = "dict[str, list[str]]"


def to_patterns(value: object) -> object:
    """Return a recipe's key `only` with a list of strings for each of its keys; a single value becomes a list of one.

    A value that is not a mapping is returned unchanged.
    """
    if not isinstance(value, dict):
        return value
    listed = {key: item if isinstance(item, list) else [item] for key, item in value.items()}
    return {key: [to_text(item) for item in items] for key, items in listed.items()}


def matches(only: Mapping[str, Sequence[str]], run: Mapping[str, object]) -> bool:
    """Return whether a run matches the patterns of every key that it has.

    Args:
        only: Key -> patterns, one of which must match. A key that the run lacks is ignored, so that methods without a
            grid stay.
        run: "task", "method" and keys of the grid -> the run's value. Some may be missing.
    """
    return all(
        any(fnmatchcase(to_text(run[key]), pattern) for pattern in patterns)
        for key, patterns in only.items()
        if key in run
    )


def read_only(texts: Sequence[str]) -> Only:
    """Return key -> patterns from the option --only of the command line, such as "method=baseline,unit*".

    If a key occurs several times, its patterns are joined. A name with a comma is put in double quotes. Raises
    ConfigError if a text has another form.
    """
    only: Only = {}
    for text in texts:
        key, _, values = text.partition("=")
        patterns = [pattern for row in csv.reader([values], skipinitialspace=True) for pattern in row if pattern]
        if not key.strip() or not patterns:
            raise ConfigError(
                f"only: '{text}' names nothing; the form is key=pattern,pattern, as in task=cola or 'method=unit*'."
            )
        only.setdefault(key.strip(), []).extend(pattern.strip() for pattern in patterns)
    return only
