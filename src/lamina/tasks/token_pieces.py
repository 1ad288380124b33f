"""Tag words that share a token with others, or that have no token.

A tokenizer for Chinese or Japanese joins several words into one token; byte-level tokenizers join signs, as in "C++". A
model has one state for such a token, and so predicts one tag. How far a span reaches inside the token is learnt by
counting in the train split: token, number of words and predicted tag -> the most frequent tags of the words.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, cast, final

from lamina.data.encode import Encoded
from lamina.data.windows import IGNORED, deciding_tokens
from lamina.tasks.tag_schemes import continued
from lamina.tasks.words import Span
from lamina.utils import JSON

PIECES = "pieces"  # the key in the `info` of a reader
Key = tuple[int, int, int]  # a token, how many words it decides about, and its tag


class WordGroup(NamedTuple):
    """Neighbouring words whose tags are predicted from one token, or a word that the tokenizer drops.

    Attributes:
        first: Index of the first word among the words of all texts.
        size: Number of words.
        token: Id of the token; -1 for a dropped word.
        place: The token's window and its position there; None for a dropped word.
        text: Index of the text.
    """

    first: int
    size: int
    token: int
    place: tuple[int, int] | None
    text: int


def decided_words(encoded: Encoded, words: Sequence[Sequence[Span]]) -> list[WordGroup]:
    """Return the words of all texts in groups; each group is predicted from one token. See `deciding_tokens`."""
    groups: list[WordGroup] = []
    texts = [text for text, row in enumerate(words) for _ in row]
    for number, (text, place) in enumerate(zip(texts, deciding_tokens(encoded, words), strict=True)):
        if groups and place is not None and groups[-1].place == place:
            groups[-1] = groups[-1]._replace(size=groups[-1].size + 1)
        else:
            groups.append(WordGroup(number, 1, -1 if place is None else encoded.token(*place), place, text))
    return groups


@final
@dataclass(frozen=True)
class Pieces:
    """The learnt tags of words that share a token. Only tags other than those of one continuing span are stored.

    Attributes:
        labels: The class names.
        tags: (token id, number of words, tag of the first word) -> the tags of all the words.
    """

    labels: Sequence[str]
    tags: Mapping[Key, tuple[int, ...]]

    @classmethod
    def learnt(
        cls, encoded: Encoded, words: Sequence[Sequence[Span]], labels: Sequence[Sequence[int]], names: Sequence[str]
    ) -> Pieces:
        """Count the tags of words that share a token in texts with labels.

        Args:
            encoded: The texts as tokens.
            words: The characters of each word of each text.
            labels: The label of each word.
            names: The class names.
        """
        flat, further = list(chain.from_iterable(labels)), continued(names)
        counts: dict[Key, Counter[tuple[int, ...]]] = defaultdict(Counter)
        for group in decided_words(encoded, words):
            tags = tuple(flat[group.first : group.first + group.size])
            if group.size > 1 and IGNORED not in tags:
                counts[group.token, group.size, tags[0]][tags] += 1
        tags_of: dict[Key, tuple[int, ...]] = {}
        for key, count in counts.items():
            usual = _going_on(key, further)
            most, times = count.most_common(1)[0]
            if times > count[usual]:
                tags_of[key] = most
        return cls(names, tags_of)

    def __or__(self, other: Pieces) -> Pieces:
        """Return the pieces of both objects; the tags of `other` win if both have a key."""
        return Pieces(self.labels, {**self.tags, **other.tags})

    @classmethod
    def from_json(cls, labels: Sequence[str], saved: JSON) -> Pieces:
        """Return the pieces that `as_json` wrote; `saved` None gives an object without pieces."""
        rows = cast("list[list[int]]", saved or [])
        return cls(labels, {(token, len(tags), tags[0]): tuple(tags) for token, *tags in rows})

    def as_json(self) -> JSON:
        """Return a JSON-ready list with a row for each piece: the token, and the tags of its words."""
        return [[token, *tags] for (token, _, _), tags in self.tags.items()]

    def spread(self, groups: Sequence[WordGroup], tags: list[int], scores: list[float]) -> None:
        """Set the tags of words that share a token or have none, in place.

        Words that share a token get the tags counted in training, or else continue the first word's span. A dropped
        word between two words of one span joins the span; otherwise it keeps its tag.

        Args:
            groups: The words of all texts.
            tags: Id of each word's tag. The first word of a group must have the tag that was predicted for the token.
            scores: Probability of each word's tag; changed in place too.
        """
        further = continued(self.labels)
        for at, group in enumerate(groups):
            words = range(group.first, group.first + group.size)
            if group.size > 1:
                key = group.token, group.size, tags[group.first]
                tags[words.start : words.stop] = self.tags.get(key) or _going_on(key, further)
                scores[words.start : words.stop] = [scores[group.first]] * group.size
            elif group.place is None and at and groups[at - 1].text == group.text:
                after = next((later for later in groups[at + 1 :] if later.place is not None), None)
                inside = further[tags[group.first - 1]]
                if after is not None and after.text == group.text and tags[after.first] == inside:
                    tags[group.first], scores[group.first] = inside, scores[group.first - 1]

    def lost(self, encoded: Encoded, words: Sequence[Sequence[Span]], labels: Sequence[Sequence[int]]) -> int:
        """Return the number of words that get a wrong tag even if the tag of every token is predicted right."""
        true, groups = list(chain.from_iterable(labels)), decided_words(encoded, words)
        tags = [max(tag, 0) for tag in true]
        for group in groups:
            if group.place is None:
                tags[group.first] = self.labels.index("O") if "O" in self.labels else 0
        self.spread(groups, tags, [1.0] * len(tags))
        return sum(tag != label for tag, label in zip(tags, true, strict=True) if label != IGNORED)


def _going_on(key: Key, further: Sequence[int]) -> tuple[int, ...]:
    """Return the tags of a token's words for the case that the first word's span continues to the last word."""
    _, count, first = key
    return (first, *[further[first]] * (count - 1))
