"""A split of a task: its examples with their labels; draw rows from it, or hold rows out."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast, final

import numpy as np
import pyarrow as pa

from lamina.data.arrow import Cell, Column, chunks, dataset_of, derived
from lamina.data.encode import encodable, pairs_of
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError
from lamina.tasks.stratify import Strata, choose, spare_last
from lamina.utils import check_range, check_type

if TYPE_CHECKING:
    import datasets

HELD_OUT = 0.1
_SIDES = ("text", "text_pair")
JOIN_WORDS = "Join the words of a text with spaces"  # in errors about lists of words in place of texts


@final
class Split:
    """The examples of one split of a task, with their labels, stored in Arrow. Most are made by `Split.of`.

    Args:
        rows: A dataset with a row per example: column "text", and perhaps "text_pair", "label", "words" and "row".
        open_text: Function that makes the example from two cells, "text" and "row"; also an attribute. It may return
            an object that opens a file when it is accessed. None: the cell in "text" is the example.
        labels: A dataset whose column "label" is used in place of that of `rows`. None: that of `rows`, if any.
        strata: A dataset for stratified sampling. Its column "strata" has one list per row: the row's class ids in all
            label columns of the source. None: they are unknown.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        open_text: Callable[[Cell, int], object] | None = None,
        labels: datasets.Dataset | None = None,
        strata: datasets.Dataset | None = None,
    ) -> None:
        self.rows, self.open_text, self._other_labels = rows, open_text, labels
        self._strata = strata

    @classmethod
    def of(
        cls,
        texts: Iterable[object],
        labels: Iterable[object] | None = None,
        words: Iterable[Sequence[tuple[int, int]]] | None = None,
    ) -> Split:
        """Return a split made from Python values; they are read one by one.

        The first text decides whether all are pairs. Characters that UTF-8 cannot encode are replaced.

        Args:
            texts: Texts or pairs of texts.
            labels: A label per text, in one of the forms of `Split.labels`. None: examples without labels.
            words: The character range (start, end) of every word of each text. None: examples without words.
        """
        columns = {"text": texts, "label": labels, "words": words}
        return cls(dataset_of(_tables({name: cells for name, cells in columns.items() if cells is not None})))

    @classmethod
    def of_texts(cls, texts: Sequence[Cell]) -> Split:
        """Return a split of unlabelled texts or pairs of texts.

        If the first is not a str, all are pairs. Lone surrogates are replaced. The texts stay in memory; they are
        written to Arrow only if something reads `rows`.
        """
        split = cls.__new__(cls)
        split.open_text = split._other_labels = split._strata = None
        split.pairs = pairs = bool(texts) and not isinstance(texts[0], str)
        split.texts = tuple(tuple(map(encodable, pair)) for pair in texts) if pairs else tuple(map(encodable, texts))
        return split

    @cached_property
    def rows(self) -> datasets.Dataset:
        """The examples as a dataset; `Split` describes its columns."""
        return dataset_of(_tables({"text": self.texts}))

    @cached_property
    def origin(self) -> tuple[int, np.ndarray]:
        """Number of rows of the split from which `select_rows` made this one, and the indices of this one's rows there.

        By default both are of this split itself. Recorded states are found by these indices.
        """
        return len(self), np.arange(len(self))

    @property
    def _labels(self) -> datasets.Dataset:
        return self.rows if self._other_labels is None else self._other_labels

    @cached_property
    def texts(self) -> Sequence[Cell]:
        """The examples: texts, pairs of texts, chats, or files that are opened on access."""
        second = ["text_pair"] * self.pairs or ["row"] * (self.open_text is not None)
        return Column(self.rows, ["text", *second], self.open_text)

    @property
    def written(self) -> bool:
        """Whether examples are texts or pairs of texts. False for files, chats and recorded states."""
        return self.open_text is None

    @cached_property
    def labels(self) -> Column:
        """The label of each example; each is None if the split has no labels.

        A label is a class id, a number, a tuple of 0 and 1 per class, a tuple with a class id per word, or a target
        text.
        """
        rows = self._labels
        if "label" not in rows.column_names:
            rows = dataset_of([pa.table({"label": pa.nulls(len(rows))})])
        return Column(rows, ["label"], _as_tuple)

    @cached_property
    def unlabelled(self) -> int:
        """Number of examples without a label; 0 if the split has no labels at all, as in running text."""
        return sum(map(is_missing, self.labels)) if self.labelled else 0

    def labelled_rows(self) -> list[int]:
        """Return the indices of the examples that have a label; all indices if the split has no labels at all."""
        return [row for row, label in enumerate(self.labels) if not is_missing(label)]

    @cached_property
    def strata(self) -> Column | None:
        """For each example a tuple of class numbers over all label columns of the source; None if unknown.

        `strata_of` counts these classes; they are not the ids in `labels`.
        """
        return None if self._strata is None else Column(self._strata, ["strata"], _as_tuple)

    @cached_property
    def words(self) -> Column | None:
        """The character range (start, end), without `end`, of every word of each text; None for tasks without words."""
        return Column(self.rows, ["words"], _as_spans) if "words" in self.rows.column_names else None

    @cached_property
    def pairs(self) -> bool:
        """Whether every example is a pair of texts."""
        return "text_pair" in self.rows.column_names

    @property
    def labelled(self) -> bool:
        """Whether there are labels; even then, single examples may lack theirs (see `unlabelled`)."""
        schema = self._labels.features.arrow_schema
        return "label" in schema.names and not pa.types.is_null(schema.field("label").type)

    @cached_property
    def key(self) -> str:
        """A hash of the examples in their order, without their labels: equal in every process for equal examples.

        Files on disk count by their names and paths, not by their contents.
        """
        digest = hashlib.blake2b(str(getattr(self.open_text, "digest", "")).encode(), digest_size=16)
        for text in self.texts:
            content = getattr(text, "messages", text)  # a chat differs by its roles too
            part = f"{len(content)}:{content}\0" if isinstance(content, str) else repr(content)
            digest.update(part.encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.texts if "texts" in vars(self) else self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return self.texts == other.texts and self.labels == other.labels and self.words == other.words

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def select_rows(self, rows: Sequence[int]) -> Split:
        """Return a split of the rows with the indices `rows`, in the order of `rows`."""
        other = self._other_labels
        labels = None if other is None else derived(other.select(rows), other)
        strata = None if self._strata is None else derived(self._strata.select(rows), self._strata)
        chosen = Split(derived(self.rows.select(rows), self.rows), self.open_text, labels, strata)
        chosen.origin = self.origin[0], self.origin[1][np.asarray(rows, np.int64)]
        return chosen

    def with_examples(self, rows: datasets.Dataset, open_text: Callable[[Cell, int], object]) -> Split:
        """Return a split with the same labels and other examples: `open_text` of the cells "text" and "row" of `rows`.

        There must be one row per example, in the same order.
        """
        return Split(derived(rows, self.rows), open_text, self._labels, self._strata)

    def with_labels(self, labels: Sequence[object]) -> Split:
        """Return a split with the same examples and one of `labels` for each; -100 marks a missing class."""
        column = dataset_of([pa.table({"label": pa.array(labels)})])
        changed = Split(self.rows, self.open_text, column, self._strata)
        changed.key, changed.origin = self.key, self.origin
        return changed

    def with_strata(self, strata: Strata | None) -> Split:
        """Return the same split with other `strata`: the class ids of each row. With None, return the split itself."""
        if strata is None:
            return self
        column = dataset_of([pa.table({"strata": pa.array(map(list, strata), pa.list_(pa.int32()))})])
        return Split(self.rows, self.open_text, None if self._labels is self.rows else self._labels, column)

    def without_labels(self, *, rows: bool = False) -> Split:
        """Return a split of the same texts without labels; blank texts and pairs of blank texts are left out.

        Args:
            rows: Whether pairs stay pairs. False: each text of a pair becomes an example of its own.
        """
        sides = ((text, (text,) if isinstance(text, str) else text) for text in self.texts)
        if rows:
            return Split.of(text for text, parts in sides if any(part.strip() for part in parts))
        return Split.of(part for _, parts in sides for part in parts if part.strip())


def is_missing(label: object) -> bool:
    """Return whether a label of `Split.labels` stands for "no label": -100, NaN, or only -1 and -100 in a list.

    None, as in a split without labels, is not missing; nor is the empty label of a text without words.
    """
    if isinstance(label, tuple | list):
        return bool(label) and all(part in (IGNORED, -1) for part in label)
    return label == IGNORED or (isinstance(label, float) and math.isnan(label))


def _as_tuple(label: object) -> object:
    return tuple(label) if isinstance(label, list) else label


def _as_spans(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pairs_of(flat))


def _tables(columns: dict[str, Iterable[object]]) -> Iterator[pa.Table]:
    """Yield `columns` ("text", "label" and "words" -> values) as Arrow tables of some rows each.

    Pairs of texts become two columns, "text" and "text_pair". The first label and the first text decide the types.
    """
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


def _type_of(labels: Sequence[object]) -> pa.DataType:
    """Return the Arrow type for a column of labels, decided by the first label; the null type if there is none."""
    first = labels[0] if labels else None
    if isinstance(first, list | tuple):
        return pa.list_(pa.int64())
    return pa.string() if isinstance(first, str) else pa.scalar(first).type


def limited(split: Split, limit: int | None, seed: int, *, option: str = "limit") -> Split:
    """Return a split of `limit` rows, drawn by `seed` without replacement; they keep their order.

    If it has no more rows, or `limit` is None, return `split` itself. Raises ConfigError, which calls the limit
    `option`, if it is not a whole number of at least 1.
    """
    limit = check_type("task", option, limit, "int | None")
    check_range("task", option, limit, 1)
    if limit is None or limit >= len(split):
        return split
    return split.select_rows(sorted(random.Random(seed).sample(range(len(split)), limit)))


def held_out(
    split: Split, *, stratify: bool, seed: int, last: bool = False, classes: Strata | None = None
) -> tuple[Split, Split]:
    """Move a tenth of a train split's rows, at least one, to a validation split; return (train, validation).

    Rows keep their order. Raises DataError if there are fewer than two.

    Args:
        split: The train split.
        stratify: Whether both splits get the same share of each class. The classes of all label columns of the source
            count, if they are known; otherwise the split's classes.
        seed: Seed of the draw.
        last: Whether to move the last rows instead of a random choice, for running text, whose lines belong together.
            `stratify`, `seed` and `classes` are then ignored.
        classes: The class ids of each row. No class loses its last training row to the validation split, which may
            therefore get fewer rows, or none. If `classes` is None, any row may be moved.
    """
    count = len(split)
    if count < 2:
        rule = "two are needed, because one is held out for validation"
        raise DataError(f"task: the train split has {count} rows; {rule}.")
    tenth = max(1, round(HELD_OUT * count))
    if last:
        return split.select_rows(range(count - tenth)), split.select_rows(range(count - tenth, count))
    strata = cast("Strata", list(split.strata or zip(split.labels))) if stratify else None  # equal labels: one class
    aside = set(random.Random(seed).sample(range(count), tenth)) if strata is None else choose(strata, tenth, seed)
    aside = aside if classes is None else spare_last(aside, classes, seed, strict=True)
    return split.select_rows([row for row in range(count) if row not in aside]), split.select_rows(sorted(aside))


def as_examples(examples: object) -> list[object]:
    """Return the examples that a user passed to `predict` as a list.

    Raises ConfigError if `examples` is a single text or path, bytes, a mapping, a set, a table or not iterable.

    Args:
        examples: A list or another ordered iterable, such as a NumPy array, a tensor or a pandas column. An array of
            numbers with several axes is a list of images or clips.
    """
    is_numeric = getattr(getattr(examples, "dtype", None), "kind", "f") in "biuf"
    has_media = is_numeric and getattr(examples, "ndim", 1) > 1
    to_list = None if has_media else getattr(examples, "tolist", None)
    listed = examples if to_list is None else to_list()
    is_single = isinstance(listed, str | bytes | Path | Mapping | Set) or hasattr(listed, "__dataframe__")
    if is_single or not isinstance(listed, Iterable):
        rule = "a list of texts, pairs of texts, images or clips is needed"
        raise ConfigError(f"predict: got one {type(examples).__name__}; {rule}.")
    return list(listed)


def checked_texts(raw: Sequence[object], *, pairs: bool) -> list[str] | list[tuple[str, str]]:
    """Return a user's examples `raw` after a check that all are texts, or all pairs (tuples or lists of two texts).

    Raises ConfigError if an example has another type, or there are pairs and `pairs` does not allow them.
    """
    are_texts = len(raw) == 0 or isinstance(raw[0], str)
    for row, entry in enumerate(raw):
        if not (isinstance(entry, str) if are_texts else _is_pair(entry)):
            got = f"entry {row} is {type(entry).__name__}"
            is_words = isinstance(entry, list) and all(isinstance(word, str) for word in entry)
            hint = f" {JOIN_WORDS}." if is_words else ""
            hint = " Give the text itself, or a tuple of two texts." if isinstance(entry, Mapping) else hint
            raise ConfigError(f"predict: {got}; all must be texts, or all pairs of texts.{hint}")
    if not (are_texts or pairs):
        raise ConfigError("predict: got pairs of texts; this kind of task reads single texts.")
    if are_texts:
        return cast("list[str]", list(raw))
    return [(first, second) for first, second in cast("Sequence[tuple[str, str]]", raw)]


def _is_pair(entry: object) -> bool:
    """Return whether a user's example is a tuple or list of two texts."""
    return isinstance(entry, tuple | list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)
