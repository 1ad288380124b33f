"""Read the class names that the schema of a data set declares, and replace class ids by these names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from lamina.data.arrow import Cell

if TYPE_CHECKING:
    import datasets

Decoder: TypeAlias = Callable[[Cell], Cell]
Feature: TypeAlias = Any  # a feature of `datasets`: an object, or a list or mapping of features
_MOST_VALUES = 1000  # a dictionary column with more values holds texts, not classes


def decoder(feature: Feature) -> Decoder | None:
    """Return a function that replaces class ids in a cell, at any depth, by class names; None if no names are declared.

    The id -1, which stands for a missing label, becomes None. Other numbers without a name stay.
    """
    if (names := getattr(feature, "names", None)) is not None:
        return partial(_name, tuple(map(str, names)))
    if (item := _item(feature)) is not None:
        inner = decoder(item)
        return None if inner is None else partial(_each, inner)
    if isinstance(feature, Mapping):
        fields = {key: decode for key, value in feature.items() if (decode := decoder(value)) is not None}
        return partial(_fields, fields) if fields else None
    return None


def _item(feature: Feature) -> Feature | None:
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    return getattr(feature, "feature", None)


def _name(names: tuple[str, ...], cell: Cell) -> Cell:
    if cell == -1:
        return None
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell


def _each(decode: Decoder, cell: Cell) -> Cell:
    return [decode(part) for part in cell] if isinstance(cell, list) else cell


def _fields(fields: Mapping[str, Decoder], cell: Cell) -> Cell:
    if not isinstance(cell, Mapping):
        return cell
    return {**cell, **{key: decode(cell[key]) for key, decode in fields.items() if key in cell}}


def names_of(features: Mapping[str, Feature] | None) -> dict[str, tuple[str, ...]]:
    """Return column -> declared class names, for the columns whose feature declares class names.

    If a column has objects, or lists of objects, the names of an object's field are under "column.field". {} if
    `features` is None.
    """
    found: dict[str, tuple[str, ...]] = {}
    for column, feature in (features or {}).items():
        inner = _item(feature) or feature
        fields = {f"{column}.{key}": value for key, value in inner.items()} if isinstance(inner, Mapping) else {}
        for key, value in {str(column): feature, **fields}.items():
            if (names := getattr(_item(value) or value, "names", None)) is not None:
                found[key] = tuple(map(str, names))
    return found


def parquet_features(schema: pa.Schema) -> datasets.Features | None:
    """Return the features that `datasets` wrote into the schema of a Parquet file; None if there are none."""
    if b"huggingface" not in (schema.metadata or {}):
        return None
    import datasets

    return datasets.Features.from_arrow_schema(schema)


def dictionary_names(column: pa.ChunkedArray) -> tuple[str, ...] | None:
    """Return the values of a dictionary column (a pandas Categorical), as texts, also those that no row has.

    Ordered values keep their order; others are sorted as texts. Null is left out. None: the column has another type, or
    over 1,000 values.
    """
    kind = column.type
    if not pa.types.is_dictionary(kind):
        return None
    values: Sequence[object] = dict.fromkeys(v for chunk in column.chunks for v in chunk.dictionary.to_pylist()).keys()  # pyright: ignore
    names = [str(value) for value in values if value is not None]
    return tuple(names if kind.ordered else sorted(names)) if len(names) <= _MOST_VALUES else None
