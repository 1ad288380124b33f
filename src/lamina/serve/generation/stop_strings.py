"""Find stop strings in a text while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class StopStrings:
    """Cuts a stream of text before its first stop string. Text that may begin a stop string is held back.

    Args:
        stops: The stop strings.

    Attributes:
        stopped: Whether a stop string has occurred.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Append a piece of text; return the text that can be shown now. It ends before the first stop string."""
        if self.stopped:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        shown = min(places) if places else len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = "" if places else text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return the text that was held back. Call it at the end, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
