"""Recognise how tags mark spans, and write them in one way.

Tags mark spans as IOB1, IOB2, IOBES (BIOES), BILOU or BMES, with the mark before or after the label (`B-PER`, `PER-B`,
`B_PER`, `B:PER`, `B/PER`, or with a dash), in capitals or not, or without a label (`B`, `I`, `O`). Lamina writes all of
them as IOB2: "O" outside spans, "B-x" at the first word of a span with label x, "I-x" inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from lamina.tasks.label_cells import look

SPAN_LABEL = "span"  # label of spans without a label
_SINGLE, _LAST = "SUW", "EL"  # marks of a span of one word, and of the last word of a span
_MARKS = f"BIM{_LAST}{_SINGLE}"


@final
@dataclass(frozen=True)
class TagScheme:
    """One way to write tags that mark spans.

    Attributes:
        form: A regular expression with the groups "mark" and "label" that matches every tag but `outside`.
        outside: The tag of words outside spans.
    """

    form: re.Pattern[str]
    outside: str

    def read(self, tag: str) -> tuple[str, str] | None:
        """Return (mark, label) of a tag, such as ("B", "PER"): the mark as a capital letter; without a label, "span".

        Returns ("O", "") for the tag of words outside spans, and None if the tag does not fit the scheme.
        """
        if tag == self.outside:
            return "O", ""
        match = self.form.fullmatch(tag)
        return match and (match["mark"].upper(), match.groupdict().get("label") or SPAN_LABEL)


# Between mark and label: a hyphen, an underscore, or other signs, among them the dashes of word processors.
_JOINS = ("-", "_", r"[\u2010-\u2015\u2212\uff0d:/|.]")
_LABEL = r"(?P<label>(?!O$|.*[|,;] ?(?:O|[BI]-.*)$).+)"  # not two tags in one, such as "PER|B-LOC" after "B-"
_FORMS = (
    *(f"(?P<mark>[{{}}]){join}{_LABEL}" for join in _JOINS),
    *(f"{_LABEL}{join}(?P<mark>[{{}}])" for join in _JOINS),
    "(?P<mark>[{}])",
)
_OUTSIDE = re.compile(r"(o|0|_|-|other|out(side)?|none)(?!\w).*")
_BRACKET = re.compile(r"\(.+\*?\)?")  # "(PER*", which opens a span in CoNLL-2012
_USUAL = TagScheme(re.compile(_FORMS[0].format(_MARKS)), "O")
_SCHEMES = tuple(
    TagScheme(re.compile(form.format(marks)), outside)
    for marks, outside in ((_MARKS, "O"), (_MARKS.lower(), "o"))
    for form in _FORMS
)


def recognise(tags: Iterable[str]) -> TagScheme | None:
    """Return the first known scheme in which all of `tags` mark spans; None if there is none."""
    tags = set(tags)
    for scheme in _SCHEMES:
        if all(scheme.read(tag) is not None for tag in tags) and _marks_spans(scheme, tags):
            return scheme
    return None


def _marks_spans(scheme: TagScheme, tags: set[str]) -> bool:
    """Return whether tags that fit a scheme are likely to mark spans, and do not fit only by chance.

    In the usual scheme, "B" or "I" is enough, and so is any other mark beside "O". In other schemes, the tags need "B"
    and either "O" or a mark for the following words of a span. Tags without labels need "B" and a mark for the
    following words.
    """
    marks = {found[0] for found in map(scheme.read, tags) if found is not None}
    if scheme == _USUAL:
        return bool(marks & {"B", "I"} or (marks & set(_SINGLE + _LAST) and "O" in marks))
    follows = bool(marks & {"I", "M", *_LAST})
    return "B" in marks and (follows or ("O" in marks and "label" in scheme.form.groupindex))


def has_outside(tags: Iterable[str]) -> bool:
    """Return whether one of `tags` looks like that of words outside spans, such as O, 0, _ or OTHER."""
    return any(_OUTSIDE.fullmatch(look(tag)) for tag in tags)


def odd_tag(tags: Iterable[str]) -> str | None:
    """Return a tag that does not fit the scheme of the others, such as "0" among "B-x" and "I-x".

    Tags in brackets, such as "(PER*" and "*)", do not fit either. Returns None if the tags do not show a scheme. Only
    called if `recognise` returned None for the tags.
    """
    tags = list(dict.fromkeys(tags))
    if (opening := next(filter(_BRACKET.fullmatch, tags), None)) and any(")" in tag for tag in tags):
        return opening
    for scheme in _SCHEMES:
        odd = [tag for tag in tags if scheme.read(tag) is None]
        fitting = set(tags) - set(odd)
        is_likely = scheme == _USUAL or len(fitting) > len(odd)
        if odd and is_likely and "label" in scheme.form.groupindex and _marks_spans(scheme, fitting):
            return odd[0]
    return None


def is_iob2(labels: Iterable[str]) -> bool:
    """Return whether every class name is "O", "B-x" or "I-x", and one is "B-x"."""
    labels = set(labels)
    return any(label[:2] == "B-" for label in labels) and all(re.fullmatch("O|[BI]-.+", label) for label in labels)


def to_iob2(tags: Sequence[str | None], scheme: TagScheme = _USUAL) -> tuple[str | None, ...]:
    """Return one sentence's tags, written in `scheme`, as IOB2. None (no tag) and tags that do not fit `scheme` stay.

    An inside mark ("I-x") begins a span if no span with its label is open, as in IOB1. None does not end a span.
    """
    changed: list[str | None] = []
    before = ""  # label of the span that goes on, if there is one
    for tag in tags:
        mark, label = (None, before) if tag is None else scheme.read(tag) or (None, "")
        if mark is None:
            changed.append(tag)
        elif mark == "O":
            changed.append("O")
        else:
            begins = mark in "B" + _SINGLE or label != before
            changed.append(f"{'B' if begins else 'I'}-{label}")
        before = "" if mark is not None and mark in _SINGLE + _LAST else label
    return tuple(changed)


def with_ends(tags: Sequence[str | None], labels: Sequence[str]) -> tuple[str | None, ...]:
    """Return one sentence's IOB2 tags with the marks of last and single words that `labels` have (IOBES, BILOU).

    So the only word of a span gets S-x or U-x, and the last of several E-x or L-x, if that is in `labels`. Other tags,
    and None (no tag), stay.
    """
    changed: list[str | None] = []
    following = "O"  # the next tag that is not None
    for tag in reversed(tags):
        if tag is None:
            changed.append(tag)
            continue
        marks = ""
        if tag != "O" and following != f"I-{tag[2:]}":  # the span ends here
            marks = _SINGLE if tag[:2] == "B-" else _LAST
        ends = (f"{mark}{tag[1:]}" for mark in marks)
        changed.append(next((end for end in ends if end in labels), tag))
        following = tag
    return tuple(reversed(changed))


def iob2_labels(names: Sequence[str], scheme: TagScheme) -> tuple[str, ...]:
    """Return class names that are tags of `scheme` as IOB2 tags, in the same order; missing IOB2 tags come last."""
    read = [found for name in names if (found := scheme.read(name)) is not None]
    tags = ["O" if mark == "O" else f"{'B' if mark in 'B' + _SINGLE else 'I'}-{label}" for mark, label in read]
    return tuple(dict.fromkeys([*tags, *sorted(both_ends(tags))]))


def both_ends(labels: Iterable[str]) -> set[str]:
    """Return a complete set of IOB tags: `labels`, the `B-x` for each `I-x`, the `I-x` for each `B-x`, and "O"."""
    types = {label[2:] for label in labels if label != "O"}
    return {"O"} | {f"{mark}-{type_}" for mark in "BI" for type_ in types}


def continued(labels: Sequence[str]) -> list[int]:
    """Return for each tag in `labels` the id of the tag that continues its span: that of `I-x` for `B-x`.

    All other tags, and a `B-x` without an `I-x`, keep their id.
    """
    number = {label: at for at, label in enumerate(labels)}
    return [number.get(f"I-{label[2:]}", at) if label[:2] == "B-" else at for at, label in enumerate(labels)]
