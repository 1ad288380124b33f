"""Sentences written one by one, each with a twin that one fault breaks, its sentiment, and the names in it."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lamina.demo.templates import words_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

_MARK = re.compile(r"[.,!?;:](?=[\s.,!?;:]|$)")  # of punctuation, at the end of a word


@dataclass(frozen=True)
class Pair:
    """A line of sentences.tsv.

    Args:
        good: An acceptable sentence.
        broken: The same with one fault.
        fault: Its kind: "agreement", "form", "number", "determiner", "order", "missing", "case", "comparison", "extra"
            or "word".
        sentiment: "negative", "neutral" or "positive", of both.
        names: Name and type (PER, ORG, LOC, MISC) of each entity, as it stands in both.
    """

    good: str
    broken: str
    fault: str
    sentiment: str
    names: tuple[tuple[str, str], ...]

    def rows(self) -> list[dict[str, Any]]:
        """Both sentences as rows of the corpus."""
        return [self._row(self.good, "acceptable"), self._row(self.broken, "unacceptable")]

    def words(self) -> set[str]:
        """The words of both, in small letters."""
        return words_of(f"{self.good} {self.broken}")

    def name_words(self) -> set[str]:
        """The words of its names, in small letters."""
        return {word for name, _ in self.names for word in words_of(name)}

    def _row(self, text: str, judgement: str) -> dict[str, Any]:
        words, tags = _tagged(text, self.names)
        labels = {"sentiment": self.sentiment, "acceptability": judgement}
        return {"text": " ".join(words), "words": words, "tags": tags, **labels}


@cache
def pairs() -> tuple[Pair, ...]:
    """All of them."""
    lines = resources.files("lamina.demo").joinpath("sentences.tsv").read_text(encoding="utf-8").splitlines()
    return tuple(_pair(*line.split("\t")) for line in lines[1:])


def split(seed: int, sizes: Mapping[str, int], *, elsewhere: Set[str], kept_back: Set[str]) -> dict[str, list[Pair]]:
    """So many pairs for each part, or as many as there are; the names of validation and test occur in no other pair.

    Args:
        seed: Of the choice.
        sizes: Pairs of "train", "validation" and "test".
        elsewhere: Words in small letters that such names may not have, either.
        kept_back: Words in small letters that no pair may have: names that other sentences show in one part alone.
    """
    some = [pair for pair in pairs() if not pair.words() & kept_back]
    random.Random(f"{seed}/written").shuffle(some)
    count = Counter(word for pair in some for word in pair.words())
    named = [pair for pair in some if pair.names]
    unseen = [pair for pair in named if all(count[w] == 1 and w not in elsewhere for w in pair.name_words())]
    unnamed, share = [pair for pair in some if not pair.names], len(named) / len(some)
    parts: dict[str, list[Pair]] = {}
    for part in ("test", "validation"):
        with_names = round(sizes[part] * share)
        parts[part] = [unseen.pop() for _ in range(min(with_names, len(unseen)))]
        parts[part] += [unnamed.pop() for _ in range(min(sizes[part] - with_names, len(unnamed)))]
    held_out = {pair for part in parts.values() for pair in part}
    return {"train": [pair for pair in some if pair not in held_out][: sizes["train"]], **parts}


def _pair(good: str, broken: str, fault: str, sentiment: str, names: str) -> Pair:
    entities = [name.rpartition("=") for name in names.split(";") if name]
    return Pair(good, broken, fault, sentiment, tuple((name, kind) for name, _, kind in entities))


def _tagged(text: str, names: tuple[tuple[str, str], ...]) -> tuple[list[str], list[str]]:
    """Words, cut at blanks, before punctuation and around names; and their tags."""
    longest_first = sorted(names, key=lambda name: -len(name[0]))
    spans = [
        (*place.span(), kind)
        for name, kind in longest_first
        for place in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    ]
    cuts = {edge for start, end, _ in spans for edge in (start, end)} | {mark.start() for mark in _MARK.finditer(text)}
    words, tags = [], []
    for piece in re.finditer(r"\S+", text):
        edges = {*piece.span(), *(cut for cut in cuts if piece.start() < cut < piece.end())}
        for start, end in pairwise(sorted(edges)):
            inside = next(((first, kind) for first, last, kind in spans if first <= start and end <= last), None)
            words.append(text[start:end])
            tags.append("O" if inside is None else f"{'B' if inside[0] == start else 'I'}-{inside[1]}")
    return words, tags
