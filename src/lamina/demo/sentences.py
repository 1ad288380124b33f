"""Read the demo's handwritten sentences: pairs of a correct sentence and the same sentence with one grammar fault.

The file is not part of the package. It lies in the repository, at `examples/data/demo-sentences.tsv`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from lamina.demo.templates import Sentence, words_of
from lamina.errors import DataError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set
    from pathlib import Path

COLUMNS = ("good", "broken", "fault", "sentiment", "names")
_PUNCTUATION = re.compile(r"[.,!?;:](?=[\s.,!?;:]|$)")  # at the end of a word


@dataclass(frozen=True)
class Pair:
    """One line of the file of sentences.

    Args:
        good: An acceptable sentence.
        broken: The same sentence with one fault.
        fault: Type of the fault: "agreement", "form", "number", "determiner", "order", "missing", "case",
            "comparison", "extra" or "word".
        sentiment: Sentiment of both sentences: "negative", "neutral" or "positive".
        names: Text and type (PER, ORG, LOC, MISC) of each entity. Both sentences contain them all.
    """

    good: str
    broken: str
    fault: str
    sentiment: str
    names: tuple[tuple[str, str], ...]

    def rows(self) -> list[Sentence]:
        """Return both sentences as rows of the corpus, the acceptable one first."""
        return [self._row(self.good, "acceptable"), self._row(self.broken, "unacceptable")]

    def words(self) -> set[str]:
        """Return the lower-case words of both sentences."""
        return words_of(f"{self.good} {self.broken}")

    def name_words(self) -> set[str]:
        """Return the lower-case words of the entities."""
        return {word for name, _ in self.names for word in words_of(name)}

    def _row(self, text: str, acceptability: str) -> Sentence:
        words, tags = _tag_words(text, self.names)
        return Sentence(
            text=" ".join(words), words=words, tags=tags, sentiment=self.sentiment, acceptability=acceptability
        )


def read_pairs(path: Path) -> tuple[Pair, ...]:
    """Read all pairs of a tab-separated file with the columns good, broken, fault, sentiment and names.

    Raises:
        DataError: If the file cannot be read, or a line does not have five columns.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise DataError(f"demo: {path} cannot be read ({first_line(error)}). Check --sentences.") from None
    pairs = []
    for number, line in enumerate(lines[1:], start=2):
        if len(columns := line.split("\t")) != len(COLUMNS):
            raise DataError(
                f"demo: {path}, line {number}: it has {len(columns)} columns; {', '.join(COLUMNS)} are needed."
            )
        pairs.append(_pair(*columns))
    return tuple(pairs)


def split_pairs(
    pairs: Sequence[Pair], seed: int, sizes: Mapping[str, int], *, elsewhere: Set[str], excluded: Set[str]
) -> dict[str, list[Pair]]:
    """Split pairs into train, validation and test; entities of validation and test occur in no other pair.

    Args:
        pairs: All pairs.
        seed: Seed of the shuffle.
        sizes: Number of pairs for "train", "validation" and "test". A split is smaller if there are not enough pairs.
        elsewhere: Lower-case words of sentences from templates; entities of validation and test contain none of them.
        excluded: Lower-case words; pairs that contain one of them are left out.
    """
    usable = [pair for pair in pairs if not pair.words() & excluded]
    random.Random(f"{seed}/written").shuffle(usable)
    count = Counter(word for pair in usable for word in pair.words())
    named = [pair for pair in usable if pair.names]
    # Only these may go into validation and test: no other pair has a word of their entities.
    unseen = [pair for pair in named if all(count[w] == 1 and w not in elsewhere for w in pair.name_words())]
    unnamed, share = [pair for pair in usable if not pair.names], len(named) / max(1, len(usable))
    splits: dict[str, list[Pair]] = {}
    for split in ("test", "validation"):
        with_names = round(sizes[split] * share)
        splits[split] = [unseen.pop() for _ in range(min(with_names, len(unseen)))]
        splits[split] += [unnamed.pop() for _ in range(min(sizes[split] - with_names, len(unnamed)))]
    held_out = {pair for pairs in splits.values() for pair in pairs}
    return {"train": [pair for pair in usable if pair not in held_out][: sizes["train"]], **splits}


def _pair(good: str, broken: str, fault: str, sentiment: str, names: str) -> Pair:
    """Return a pair made from the five columns of a line; `names` has the form "Anna=PER;Rosa's=ORG"."""
    entities = [name.rpartition("=") for name in names.split(";") if name]
    return Pair(good, broken, fault, sentiment, tuple((name, entity_type) for name, _, entity_type in entities))


def _tag_words(text: str, names: tuple[tuple[str, str], ...]) -> tuple[list[str], list[str]]:
    """Split a text into words; return them with one IOB2 tag each.

    Words end at spaces, before punctuation, and at both ends of an entity. `names` are the text and type of each
    entity; if entities overlap, the longer one wins.
    """
    longest_first = sorted(names, key=lambda name: -len(name[0]))
    spans = [
        (*match.span(), entity_type)
        for name, entity_type in longest_first
        for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    ]
    cuts = {edge for start, end, _ in spans for edge in (start, end)}
    cuts |= {mark.start() for mark in _PUNCTUATION.finditer(text)}
    words, tags = [], []
    for chunk in re.finditer(r"\S+", text):
        edges = {*chunk.span(), *(cut for cut in cuts if chunk.start() < cut < chunk.end())}
        for start, end in pairwise(sorted(edges)):
            entity = next(((first, name) for first, last, name in spans if first <= start and end <= last), None)
            words.append(text[start:end])
            tags.append("O" if entity is None else f"{'B' if entity[0] == start else 'I'}-{entity[1]}")
    return words, tags
