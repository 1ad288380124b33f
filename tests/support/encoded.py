"""Windows of tokens as plain lists."""

from __future__ import annotations

from typing import Any


def features(encoded: Any) -> list[dict[str, list[int]]]:
    """Per window its input ids, attention mask and, where the model takes them, token type ids."""
    return [{key: rows[0].tolist() for key, rows in encoded.batch([row], {}).items()} for row in range(len(encoded))]
