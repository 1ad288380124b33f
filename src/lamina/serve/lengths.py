"""Count the tokens of long texts, and cut such texts, without tokenising more than needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from lamina.data.arrow import encodable
from lamina.errors import LaminaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.layers.types import Tokenizer

Side: TypeAlias = Literal["left", "right"]  # the side on which a text that is too long loses tokens

_PIECE = 1 << 13  # characters that are tokenised at a time
_WHOLE = {"add_special_tokens": False, "truncation": False, "verbose": False}
_CHARACTERS = 8  # characters per token, more than in any usual text


class TooLongError(LaminaError):
    """Raised when a text has more tokens than are read, and the request does not allow cutting it."""


def count_tokens(tokenizer: Tokenizer, text: str, most: int) -> tuple[int, bool]:
    """Return a text's number of tokens without special tokens, and whether the whole text was counted.

    Counting stops after the piece that brings the number above `most`. The text is divided at spaces if it has some, so
    the number is exact for most texts.
    """
    text, count, start = encodable(text), 0, 0
    while start < len(text) and count <= most:
        end = start + _PIECE
        space = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = space if space > 0 else end
        count += len(tokenizer(text[start:end], **_WHOLE)["input_ids"])
        start = end
    return count, start >= len(text)


def near_end(tokenizer: Tokenizer, text: str, most: int, side: Side) -> str:
    """Return the beginning of a long text with at least twice `most` tokens; for `side` "left", its end.

    A tokenizer reads the same tokens there as in the whole text, which would take seconds to tokenise.

    Args:
        tokenizer: The tokenizer.
        text: The text. A short one is returned whole.
        most: Number of tokens that are read.
        side: "right" keeps the first tokens, "left" the last.

    Raises:
        TooLongError: If a very long part of the text has too few tokens.
    """
    size = 2 * _CHARACTERS * most + _PIECE
    for end in (size, 4 * size):
        part = text[:end] if side == "right" else text[-end:]
        if len(text) <= end or count_tokens(tokenizer, part, 2 * most)[0] > 2 * most:
            return part
    came = f"a text has {len(text)} characters, of which {4 * size} are not even {2 * most} tokens"
    raise TooLongError(f"serve: {came}; it cannot be cut. Send a shorter text.")


def first_tokens(tokenizer: Tokenizer, text: str, most: int) -> tuple[str, int]:
    """Cut a text after its token number `most`; return the text and its number of tokens without special tokens."""
    output = tokenizer(encodable(text), return_offsets_mapping=True, **_WHOLE)
    spans: Sequence[tuple[int, int]] = output["offset_mapping"]
    if len(spans) <= most:
        return text, len(spans)
    return (text[: spans[most - 1][1]] if most > 0 else ""), most


def check_request(tokenizer: Tokenizer, texts: Sequence[Sequence[str]], limit: int, most: int | None = None) -> None:
    """Raise TooLongError if the texts of a request have more than `limit` tokens, or 8 times as many characters.

    Args:
        tokenizer: The tokenizer.
        texts: Single texts and pairs of texts, each as a sequence of one or two parts.
        limit: Number of tokens that a request may have.
        most: Maximum number of tokens that are read of a single text or pair; longer ones are cut. None: all are read.
    """
    if sum(len(part.encode(errors="replace")) + 4 for parts in texts for part in parts) <= limit:
        return  # a token has at least one byte
    characters = sum(len(part) for parts in texts for part in parts)
    if most is None and characters > _CHARACTERS * limit:
        rule = f"at most {_CHARACTERS * limit} are accepted, {_CHARACTERS} for each of {limit} tokens"
        raise TooLongError(f"serve: the request has {characters} characters; {rule}. Send fewer or shorter texts.")
    total, is_exact = 0, True
    for parts in texts:
        size = tokenizer.num_special_tokens_to_add(pair=len(parts) == 2)
        for part in parts:
            count, is_whole = count_tokens(tokenizer, part, limit - total if most is None else most)
            size, is_exact = size + count, is_exact and (is_whole or most is not None)
        total += size if most is None else min(size, most)
        if total > limit:
            exactly = "" if is_exact and parts is texts[-1] else "at least "
            came = f"the request has {exactly}{total} tokens"
            raise TooLongError(f"serve: {came}; at most {limit} are accepted. Send fewer or shorter texts.")
