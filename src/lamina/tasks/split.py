"""One part of a task, and drawing rows from it."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import pyarrow as pa

from lamina.data.arrow import Column, chunks, dataset_of, derived, encodable
from lamina.data.windows import pairs_of
from lamina.errors import ConfigError, DataError
from lamina.utils import check_range

if TYPE_CHECKING:
    import datasets

HELD_OUT = 0.1
_SIDES = ("text", "text_pair")


@final
class Split:
    """Examples with their labels, in Arrow: a row each, as `Split.of` makes them.

    `open_text` makes what stands for an example's text of the cells in columns "text" and "row"; None: "text" itself.
    `labels` has a column "label" in place of that of `rows`.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        open_text: Callable[[Any, int], Any] | None = None,
        labels: datasets.Dataset | None = None,
    ) -> None:
        self.rows, self._open_text, self._labels = rows, open_text, rows if labels is None else labels

    @classmethod
    def of(
        cls,
        texts: Iterable[Any],
        labels: Iterable[Any] | None = None,
        words: Iterable[Sequence[tuple[int, int]]] | None = None,
    ) -> Split:
        """From columns of Python values, which are taken one by one; half characters, which cannot be encoded, go."""
        given = {"text": texts, "label": labels, "words": words}
        return cls(dataset_of(_tables({name: cells for name, cells in given.items() if cells is not None})))

    @cached_property
    def texts(self) -> Column:
        """A text each, a pair of texts, words joined by one space, or images, which are opened when they are needed."""
        second = ["text_pair"] * self.pairs or ["row"] * (self._open_text is not None)
        return Column(self.rows, ["text", *second], self._open_text)

    @property
    def written(self) -> bool:
        """Whether its texts are texts or pairs of them, not files that are opened."""
        return self._open_text is None

    @cached_property
    def labels(self) -> Column:
        """Per text a class id, a number, zeros and ones (multi-label), a class id per word, text to write, or None."""
        rows = self._labels
        if "label" not in rows.column_names:
            rows = dataset_of([pa.table({"label": pa.nulls(len(rows))})])
        return Column(rows, ["label"], _as_tuple)

    @cached_property
    def words(self) -> Column | None:
        """Token tasks: the character span of every word in its text; else None."""
        return Column(self.rows, ["words"], _as_spans) if "words" in self.rows.column_names else None

    @property
    def pairs(self) -> bool:
        """Whether every example is a pair of texts."""
        return "text_pair" in self.rows.column_names

    @property
    def labelled(self) -> bool:
        """Whether examples have labels."""
        kinds = self._labels.features.arrow_schema
        return "label" in kinds.names and not pa.types.is_null(kinds.field("label").type)

    @cached_property
    def key(self) -> str:
        """Equal for equal texts in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        for text in self.texts:
            own = getattr(text, "messages", text)  # of a chat, in which who speaks counts as well
            digest.update(f"{len(own)}:{own}\0".encode() if isinstance(own, str) else repr(own).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return self.texts == other.texts and self.labels == other.labels and self.words == other.words

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def select_rows(self, rows: Sequence[int]) -> Split:
        """The rows named, in the order named."""
        labels = None if self._labels is self.rows else derived(self._labels.select(rows), self._labels)
        return Split(derived(self.rows.select(rows), self.rows), self._open_text, labels)

    def with_labels(self, labels: Sequence[Any]) -> Split:
        """The same examples with other labels; -100 stands for a class that is not told."""
        changed = Split(self.rows, self._open_text, dataset_of([pa.table({"label": pa.array(labels)})]))
        changed.key = self.key
        return changed

    def without_labels(self, *, rows: bool = False) -> Split:
        """The texts alone, those of a pair one after the other, or with `rows` as they are; blank ones are left out."""
        sides = ((text, (text,) if isinstance(text, str) else text) for text in self.texts)
        if rows:
            return Split.of(text for text, parts in sides if any(part.strip() for part in parts))
        return Split.of(part for _, parts in sides for part in parts if part.strip())


def _as_tuple(label: Any) -> Any:
    return tuple(label) if isinstance(label, list) else label


def _as_spans(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pairs_of(flat))


def _tables(columns: dict[str, Iterable[Any]]) -> Iterator[pa.Table]:
    label_type: pa.DataType | None = None
    pairs = False
    for part in chunks(zip(*columns.values(), strict=True)):
        cells = {name: [row[at] for row in part] for at, name in enumerate(columns)}
        texts, labels = cells["text"], cells.get("label", ())
        if label_type is None:
            label_type = _type_of(labels)
            pairs = bool(texts) and not isinstance(texts[0], str)
        sides = zip(*texts, strict=True) if pairs else [texts]
        table = {name: pa.array(map(encodable, side), pa.string()) for name, side in zip(_SIDES, sides, strict=False)}
        if "label" in cells:
            strings = pa.types.is_string(label_type)
            table["label"] = pa.array(map(encodable, labels) if strings else labels, label_type)
        if "words" in cells:
            flat = [[edge for span in words for edge in span] for words in cells["words"]]
            table["words"] = pa.array(flat, pa.list_(pa.int32()))
        yield pa.table(table)


def _type_of(labels: Sequence[Any]) -> pa.DataType:
    """The Arrow type of a column of labels, as its first one tells."""
    first = labels[0] if labels else None
    if isinstance(first, list | tuple):
        return pa.list_(pa.int64())
    return pa.string() if isinstance(first, str) else pa.scalar(first).type


def limited(split: Split, limit: int | None, seed: int, *, option: str = "limit") -> Split:
    """At most `limit` rows (None: all), drawn uniformly without replacement; the rows keep their order."""
    if limit is not None and type(limit) is not int:
        raise ConfigError(f"task: {option} is {limit!r}; it must be a whole number of at least 1.")
    check_range("task", option, limit, 1)
    if limit is None or limit >= len(split):
        return split
    return split.select_rows(sorted(random.Random(seed).sample(range(len(split)), limit)))


def held_out(split: Split, *, stratify: bool, seed: int, last: bool = False) -> tuple[Split, Split]:
    """What is left for training, and a tenth of the rows set aside for validation; both keep the order of the rows.

    `stratify` keeps the share of each class; `last` takes the last rows of running text, whose lines belong together.
    """
    count = len(split)
    if count < 2:
        raise DataError(f"task: the train part has {count} rows; two are needed to set one aside for validation.")
    tenth = max(1, round(HELD_OUT * count))
    if last:
        return split.select_rows(range(count - tenth)), split.select_rows(range(count - tenth, count))
    rng = random.Random(seed)
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, label in enumerate(split.labels if stratify else itertools.repeat(None, count)):
        groups[label].append(row)
    aside: set[int] = set()
    for group, share in zip(groups.values(), shares([len(g) for g in groups.values()], tenth), strict=True):
        aside.update(rng.sample(group, share))
    return split.select_rows([row for row in range(count) if row not in aside]), split.select_rows(sorted(aside))


def shares(sizes: list[int], total: int) -> list[int]:
    """How many of each group make up `total`: in proportion, rounded down, the rest to the largest remainders."""
    exact = [total * size / sum(sizes) for size in sizes]
    whole = [int(x) for x in exact]
    order = sorted(range(len(sizes)), key=lambda i: (whole[i] - exact[i], -sizes[i]))
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole
