"""Word tags that mark spans: `B-PER I-PER O` and relatives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_IOB = re.compile(r"O|[BI]-.+")
_SPANS = re.compile(r"O|[BIESLU]-.+")


def is_iob(tags: Iterable[str]) -> bool:
    """Whether every tag is `O`, `B-...` or `I-...`, and at least one is not `O`."""
    return _all(_IOB, tags)


def marks_spans(tags: Iterable[str]) -> bool:
    """Whether the tags mark spans (IOB, IOBES, BILOU), so that span F1 has a meaning."""
    return _all(_SPANS, tags)


def _all(pattern: re.Pattern[str], tags: Iterable[str]) -> bool:
    seen = set(tags)
    return bool(seen - {"O"}) and all(pattern.fullmatch(tag) for tag in seen)


def to_iob2(tags: Sequence[str]) -> tuple[str, ...]:
    """IOB1 or IOB2 tags of one sentence as IOB2, where every span starts with `B-`.

    In IOB1 it starts with `I-` unless it touches a span of its own type.
    """
    out: list[str] = []
    before = ""
    for tag in tags:
        inside = tag[:2] == "I-"
        out.append(f"B-{tag[2:]}" if inside and tag[2:] != before else tag)
        before = tag[2:]
    return tuple(out)


def continued(labels: Sequence[str]) -> list[int]:
    """Per label the number of the one that goes on inside a word: `I-x` after `B-x` where it exists, else itself."""
    number = {label: at for at, label in enumerate(labels)}
    return [number.get(f"I-{label[2:]}", at) if label[:2] == "B-" else at for at, label in enumerate(labels)]


def both_ends(labels: Iterable[str]) -> set[str]:
    """Add `B-x` for every `I-x` and the other way round, and `O`."""
    kinds = {label[2:] for label in labels if label != "O"}
    return {"O"} | {f"{mark}-{kind}" for mark in "BI" for kind in kinds}
