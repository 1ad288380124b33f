"""Turn tokens into text, piece by piece, while a text is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from lamina.layers.types import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoding puts in place of a character that lacks some of its bytes
_CONTEXT = 6  # last tokens of the prompt that are decoded along: whether the text begins with a space depends on them


@final
class Detokenizer:
    """Decodes a text token by token, without special tokens.

    The pieces that `add` and `rest` return add up to the text.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Ids of the tokens that the text continues; empty if the model's decoder begins a new text.

    Attributes:
        text: The text so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)
        self._ids = [token for token in prompt if token not in self._special][-_CONTEXT:]
        # Tokens from `_begin` on are decoded; those before `_emitted` are already in the text or the prompt. So each
        # new piece is decoded after the piece before it, and the cost of a token does not grow with the text.
        self._begin, self._emitted = 0, len(self._ids)
        self.text = ""

    def special_text(self, token: int) -> str | None:
        """Return a special token as text, such as "</s>"; None if `token` is not a special token."""
        return str(self._tokenizer.decode([token])) if token in self._special else None

    def add(self, token: int) -> str:
        """Append a token, and return the text that it adds.

        "" for a special token, and while a character needs further tokens.
        """
        if token not in self._special:
            self._ids.append(token)
        return self._next_piece()

    def rest(self) -> str:
        """Return the text that `add` still holds back, with U+FFFD for an incomplete character; "" if there is none."""
        return self._next_piece(last=True)

    def _next_piece(self, *, last: bool = False) -> str:
        """Append the text of the tokens since the last piece to the attribute `text`, and return it.

        Text that ends in an incomplete character is held back, and "" is returned, unless `last` says that no tokens
        follow.
        """
        if self._emitted == len(self._ids):
            return ""
        before, after = self._decode(self._ids[self._begin : self._emitted]), self._decode(self._ids[self._begin :])
        if after.endswith(_REPLACEMENT) and not last:
            return ""
        piece = after[len(before) :]
        if piece:  # after a token without text, such as an id beyond the vocabulary, the next one would lose its space
            self._begin = self._emitted
        self._emitted = len(self._ids)
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        """Return the text of token ids; "" for an empty list."""
        return str(self._tokenizer.decode(ids)) if ids else ""
