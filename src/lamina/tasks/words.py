"""Find the words of a text, and join listed words into a text. Character ranges (start, end) exclude `end`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import regex

Span: TypeAlias = tuple[int, int]  # first character, and the one after the last

# Characters of scripts that put no spaces between words, and the signs that are written with them.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\u30fc\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_SIGNS = r"\u3000-\u303f\uff00-\uffef"
_LETTERS = rf"(?:(?![{_UNSPACED}])[\w\p{{M}}])+"
# Characters without width that stand inside words: joiners, soft hyphens, marks of direction. U+200B separates words.
_JOINERS = r"(?:(?![\u200b\ufeff])\p{Cf})+"
# A word: letters and digits, which may be joined inside by - ' . , / : (as in U.N., 1996-08-22 or 7:30) or by
# characters without width; or one character of a script that puts no spaces between words; or one other sign, such as
# an emoji with all its parts. Combining marks belong to the character before them.
_WORD = regex.compile(
    rf"(?=[{_UNSPACED}]|[\d#*]\ufe0f?\u20e3)\X|{_LETTERS}(?:(?:[-'\u2019.,/:]|{_JOINERS}){_LETTERS})*|(?=[^\w\s\p{{Cf}}\p{{Cc}}])\X"
)
_NO_SPACE = regex.compile(rf"[{_UNSPACED}{_SIGNS}]")
_ONE = regex.compile(r"\X")


def word_spans(text: str) -> list[Span]:
    """Return the character range (start, end) of every word of a text.

    A punctuation mark or symbol is a word of its own, except for some between letters or digits (`don't`, `7:30`). Each
    character of a script that puts no spaces between words is a word too.
    """
    return [match.span() for match in _WORD.finditer(text)]


def join(words: Sequence[object]) -> tuple[str, tuple[Span, ...]]:
    """Join listed words into a text as it would be written; return it and the character range of each word.

    Words are joined by a space, except beside a character of a script that puts no spaces between words. If all words
    are single characters and one of them is of such a script, there are no spaces at all.
    """
    texts = [str(word) for word in words]
    single = any(map(_NO_SPACE.search, texts)) and all(map(_ONE.fullmatch, texts))
    joined, spans, end = "", [], 0
    parts: list[str] = []
    for text in texts:
        is_apart = bool(parts) and not (single or _NO_SPACE.match(text[:1]) or _NO_SPACE.match(joined[-1:]))
        parts += [" "] * is_apart + [text]
        end += is_apart
        spans.append((end, end + len(text)))
        end, joined = end + len(text), text or joined
    return "".join(parts), tuple(spans)


def divided(text: str, words: Sequence[Span]) -> list[list[Span]]:
    """Divide each word in `words` into the smaller words of `text` that `word_spans` finds inside it.

    `words` and the result are ranges of characters. A word without a smaller one is its own only part.
    """
    found = word_spans(text)
    parts: list[list[Span]] = []
    at = 0
    for start, end in words:
        while at < len(found) and found[at][0] < start:
            at += 1
        first = at
        while at < len(found) and found[at][1] <= end:
            at += 1
        parts.append(found[first:at] or [(start, end)])
    return parts
