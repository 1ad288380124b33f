"""From tokens to text while it is written: pieces of it, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

_BROKEN = "\ufffd"  # what stands for a character whose bytes are not all there
_BEFORE = 6  # tokens of the prompt that a text is decoded after: the first one's space depends on them


@final
class Detokenizer:
    """Decodes token by token; the pieces joined are the text.

    Args:
        tokenizer: Of the model.
        prompt: Ids that the text goes on from.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)
        self._ids = [token for token in prompt if token not in self._special][-_BEFORE:]
        self._begin, self._told = 0, len(self._ids)
        self.text = ""

    def sign(self, token: int) -> str | None:
        """How a special token is written; None: it is text."""
        return str(self._tokenizer.decode([token])) if token in self._special else None

    def add(self, token: int) -> str:
        """What a token adds to the text; nothing while a character of several tokens is not whole."""
        if token not in self._special:
            self._ids.append(token)
        return self._piece()

    def rest(self) -> str:
        """What is left of a character that did not become whole, at the end."""
        return self._piece(last=True)

    def _piece(self, *, last: bool = False) -> str:
        if self._told == len(self._ids):
            return ""
        before, after = self._decode(self._ids[self._begin : self._told]), self._decode(self._ids[self._begin :])
        if after.endswith(_BROKEN) and not last:
            return ""
        self._begin, self._told = self._told, len(self._ids)
        piece = after[len(before) :]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids)) if ids else ""


@final
class StopStrings:
    """Cuts a text off before the first of some strings; what may be the start of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """What of the text may be shown now."""
        if self.stopped:
            return ""
        text = self._held + piece
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped = bool(places)
        shown = min(places) if places else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = "" if places else text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the start of a string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
