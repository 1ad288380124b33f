"""Read spans of characters in the forms that annotation tools write, and find their places in a text.

The forms are: a text; `[start, end]`; `[start, end, label]` (spaCy, doccano); and objects with the keys of Label
Studio, of pipelines of transformers, of doccano, of Prodigy and others. If a span states its own text, it is compared
with the characters at its place.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard, cast, final

import regex

from lamina.tasks.annotator_marks import is_annotations
from lamina.tasks.label_cells import LabelCellError, class_name, is_missing, plain, shown, spelled_list
from lamina.tasks.tag_schemes import SPAN_LABEL
from lamina.tasks.words import Span
from lamina.utils import RepeatedKeyError

LabelledSpan: TypeAlias = tuple[Span, str]
Units: TypeAlias = Sequence[int]  # what the edges of spans count -> the character there

_STARTS = ("start", "start_offset", "begin", "start_char", "startOffset", "offset_start", "start_pos", "BeginOffset")
_ENDS = ("end", "end_offset", "stop", "end_char", "endOffset", "offset_end", "end_pos", "EndOffset")
_LABELS = ("label", "labels", "entity_group", "entity", "type", "tag", "entity_type", "category", "Type")
_TEXTS = ("text", "word", "surface", "mention", "quote", "phrase", "content", "Text")
_NEUTRAL = {"id", "score", "index", "confidence", "probability", "source", "meta", "token_start", "token_end", "Score"}
_CONTAINERS = ("entities", "spans", "annotations", "result", "ents", "Entities")
_TAG = regex.compile(r"[BI]-.+")
_TAG_OF_TOKEN = regex.compile(r"[BIELSU]-.+")  # in pipelines; elsewhere, "E-mail" may be the label of a span
_PLACE = regex.compile(r"[\s\[\](),.\d]*\d[\s\[\](),.\d]*")  # numbers, or lists of them
_PLACE_KEY = regex.compile("off|pos|idx|from|len|char|span|loc|begin|start|end|stop|^to$")
_NUMBER = regex.compile(r"\d+(?:\.\d+)?")
_UNSEEN = regex.compile(r"[\p{Cf}\p{Cc}]")  # marks of direction, soft hyphens and other characters without width


class SpanError(LabelCellError):
    """Raised when a span has an unknown form; the text says what came and what to do."""


class UnplacedSpanError(SpanError):
    """Raised when spans have a known form but give no tags. Such a row may stay without labels.

    Either a span is not in its text, covers no word, shares a word with another or has several labels; or the annotator
    skipped or rejected the row; or the row has several annotations.

    Attributes:
        reason: The message without its end, which says what to do with the row.
    """

    def __init__(self, got: str, rule: str, hint: str = "") -> None:
        self.reason = f"{got}{rule}"
        super().__init__(got, f"{rule} {hint}missing_labels='ignore' leaves such rows without labels.")


@final
@dataclass(frozen=True)
class SpanMark:
    """A span as it stands in a cell, before it is found in the text.

    Attributes:
        cell: The span as messages quote it.
        label: Its label.
        edges: Its start, and its end (excluded), as the annotation tool counts them; None: it is found by its text.
        text: The text that the span states; None if it states none.
        by_tokens: Whether that text was put together from tokens, and so may lack capitals and accents.
    """

    cell: str
    label: str
    edges: tuple[int, int] | None = None
    text: str | None = None
    by_tokens: bool = False


def read_spans(cell: object, default: str = SPAN_LABEL) -> tuple[list[SpanMark], int]:
    """Return the spans in a cell, and the number of results of Label Studio in it that are no spans.

    Such results are choices, ratings, relations and others; they are skipped.

    Raises SpanError if the cell or a span in it has another form; UnplacedSpanError if the cell says that its annotator
    skipped or rejected the row, it has several annotations of Label Studio, or a span has several labels;
    LabelCellError if a label is not a class name.

    Args:
        cell: One of these, or a JSON text with one of these: a list of spans; an object with the list under "entities",
            "ents", "spans", "annotations" or "result"; lists of starts, ends and labels; or lists of texts by label.
        default: Label of spans without a label.
    """
    cell = cell if isinstance(cell, list | tuple) else plain(cell)
    if isinstance(cell, str) and cell.strip()[:1] in ("[", "{"):
        cell = _spelled(cell.strip())
    if is_annotations(cell):  # of Label Studio, one for each annotator
        annotations = cast("Sequence[Mapping[str, object]]", cell)
        finished = [part for part in annotations if part.get("was_cancelled") is not True]
        if len(finished) > 1:
            raise UnplacedSpanError(f"{len(finished)} annotations of one text", "; a row has one.", "Keep one; ")
        cell = (finished or annotations)[0]
    if isinstance(cell, Mapping):
        # keys of Label Studio and Prodigy
        if cell.get("was_cancelled") is True or plain(cell.get("answer")) in ("reject", "ignore"):
            raise UnplacedSpanError(shown(cell), ", which its annotator skipped or rejected.", "Leave it out; ")
        cell = _list_of(cell)
    if not isinstance(cell, list | tuple):
        got, rule = type(cell).__name__, "; spans are a list, which may be empty."
        if isinstance(cell, str):
            got, is_tag = shown(cell), cell == "O" or _TAG.fullmatch(cell)
            rule += " If a row is one word, write CoNLL: a word and its tag a line, and blank lines." if is_tag else ""
        raise SpanError(got, rule)
    are_texts = len(cell) > 1 and all(isinstance(part, str) for part in cell)  # not arrays, which "in" cannot compare
    if are_texts and "O" in cell and all(part == "O" or _TAG.fullmatch(part) for part in cell):
        rule = "; they are tags of words, and the text is not a list of words. Divide it, as with text.split()."
        raise SpanError(shown(cell), rule)
    spans = [span for span in cell if not _is_other_result(span)]
    return [_mark(mention, default) for span in spans for mention in _mentions(span)], len(cell) - len(spans)


def _is_other_result(span: object) -> bool:
    """Return whether a span is a result of Label Studio that is no span, such as a choice, a rating or a relation."""
    if not isinstance(span, Mapping):
        return False
    is_result = "from_name" in span and isinstance(span.get("value"), Mapping)
    is_relation = span.get("from_id") is not None and span.get("to_id") is not None
    return is_relation or (is_result and not str(span.get("type") or "labels").endswith("labels"))


def _mentions(span: object) -> list[object]:
    """Return the mentions of an entity in Google's form as spans with its label; for any other span, a list of it."""
    if not isinstance(span, Mapping) or any(key in span for key in (*_STARTS, "offset", "offsets")):
        return [span]
    mentions = span.get("mentions") or None
    if not isinstance(mentions, list | tuple) or not all(isinstance(part, Mapping) for part in mentions):
        return [span]
    own, flat = {key: span[key] for key in _LABELS if key in span}, list[object]()
    for mention in mentions:
        text = mention.get("text")
        google = {"text": text.get("content"), "offset": text.get("beginOffset")} if isinstance(text, Mapping) else None
        flat.append({key: value for key, value in (google or mention).items() if not own or key not in _LABELS} | own)
    return flat


def _with_edges(span: Mapping[str, object]) -> Mapping[str, object]:
    """Return a span with "start" and "end" in place of an offset and a length, or of pairs of offsets.

    Azure, Google and bigbio write these beside the span's text. A span that has a start already, or no text, is
    returned as it is. Raises SpanError if a span has several pieces.
    """
    if any(key in span for key in _STARTS):
        return span
    text, offset = plain(span.get("text")), plain(span.get("offset"))
    if isinstance(pairs := plain(span.get("offsets")), list) and isinstance(text, list):
        if len(pairs) != 1 or len(text) != 1 or not isinstance(pairs[0], list) or len(pairs[0]) != 2:
            raise SpanError(f"{shown(span)} as a span", "; a span is one piece of its text. Leave it out or join it.")
        return {**span, "text": text[0], "start": pairs[0][0], "end": pairs[0][1]}
    if isinstance(text, str) and _is_offset(offset):
        length = plain(span.get("length", len(text)))
        if _is_offset(length):
            return {**span, "start": int(offset), "end": int(offset) + int(length)}
    return span


def _spelled(text: str) -> object:
    """Return the list or object that a text spells in JSON or Python; raise SpanError if it spells neither.

    Objects with commas between them are a list.
    """
    try:
        values = cast("list[object]", plain(spelled_list(text if text[0] + text[-1] == "[]" else f"[{text}]")))
        return values[0] if text[0] == "{" and len(values) == 1 else values
    except ValueError as error:
        why = f"in which {error.__cause__}" if isinstance(error.__cause__, RepeatedKeyError) else "which is not JSON"
        raise SpanError(shown(text), f", {why}; a text with spans is a list of them in JSON.") from None


def _list_of(cell: Mapping[str, object]) -> object:
    """Return the spans inside the object `cell`: the value of a key such as "entities", even if that is no list.

    One list per field, or one list of texts per label, becomes a list of spans. Any other object is itself a span, in a
    list of one. Raises SpanError if lists of starts, ends and labels have different lengths.
    """
    for key in _CONTAINERS:
        if key in cell and not any(name in cell for name in _STARTS):
            inner = cell[key]
            return _list_of(cell=cast("Mapping[str, object]", inner)) if isinstance(inner, Mapping) else inner
    lists = {key: plain(value) for key, value in cell.items()}
    if cell and all(isinstance(value, list) for value in lists.values()):
        columns = cast("dict[str, list[object]]", lists)
        if any(key in cell for key in (*_STARTS, "offset", "offsets")):
            if len({len(column) for column in columns.values()}) > 1:
                raise SpanError(shown(cell), "; lists of starts, ends and labels have one length. Correct the row.")
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if all(isinstance(text, str) for column in columns.values() for text in column):
            return [{"text": text, "label": label} for label, column in columns.items() for text in column]
    return [cell]


def _mark(span: object, default: str) -> SpanMark:
    """Return `span`, one entry of a list of spans, as a `SpanMark`, with the label `default` if it has none.

    Raises SpanError if the entry has an unknown form or no valid label, LabelCellError if its label is no class name,
    and UnplacedSpanError if it has several labels.
    """
    entries = plain(span)
    if isinstance(entries, str):
        return SpanMark(shown(span), default, text=entries)
    if isinstance(entries, list) and len(entries) in (2, 3) and all(map(_is_offset, entries[:2])):
        label = default if len(entries) == 2 else _label(span, [entries[2]], default)
        return SpanMark(shown(span), label, (int(entries[0]), int(entries[1])))
    if isinstance(span, Mapping):
        return _object_mark(span, default)
    rule = "a span is a text, [start, end], [start, end, label], or an object with start, end and label"
    raise SpanError(f"{shown(span)} as a span", f"; {rule}. Numbers count characters.")


def _object_mark(span: Mapping[str, object], default: str) -> SpanMark:
    """Return the span that a JSON object describes, with the label `default` if it has none.

    An object with a text, and without start and end, gives a span without edges. In {"entity": "Lima", "type": "LOC"},
    as language models write spans ("label" for "type" too), "entity" is the text; beside a start, an end or another
    text it is a label. Otherwise start and end must be whole numbers. Raises SpanError if they are not, or if the label
    or the place may be under an unknown key. `_label` raises errors about labels.
    """
    fields: Mapping[str, object] = span
    if isinstance(span.get("value"), Mapping):  # Label Studio, whose "type" beside it is the type of the form
        fields = cast("Mapping[str, object]", span["value"])
    fields = _with_edges(fields)
    start, end, text = (next((key for key in keys if key in fields), None) for keys in (_STARTS, _ENDS, _TEXTS))
    names = [key for key in _LABELS if key in fields]
    if text is None and start is None and end is None and set(names) in ({"entity", "type"}, {"entity", "label"}):
        text = "entity"  # {"entity": "Lima", "type": "LOC"}
    labels = [fields[key] for key in names if key != text]
    if not labels and (other := sorted(set(map(str, fields)) - {*_STARTS, *_ENDS, *_TEXTS} - _NEUTRAL)):
        known = ", ".join(_LABELS)
        rule = f", a span with the keys {', '.join(other)}; its label is under one of: {known}"
        raise SpanError(shown(span), f"{rule}.")
    label = _label(span, labels, default) if labels else default
    content = None if text is None else plain(fields[text])
    carried = None if content is None or isinstance(content, Mapping | list) else str(content)
    if start is None and end is None and carried is not None:
        others = [key for key in fields if key not in {*_LABELS, *_TEXTS} | _NEUTRAL]
        if numbers := [key for key in others if _may_be_place(str(key), str(plain(fields[key])))]:
            rule = "its place is under start and end"
            raise SpanError(shown(span), f", a span with numbers under {', '.join(numbers)}; {rule}.")
        return SpanMark(shown(span), label, text=carried)
    edges = [None if key is None else plain(fields[key]) for key in (start, end)]
    offsets = [int(edge) for edge in edges if _is_offset(edge)]
    if len(offsets) < 2:
        rule = "; an object has its first character under 'start' and the one after its last under 'end', as"
        raise SpanError(f"{shown(span)} as a span", f"{rule} whole numbers.")
    return SpanMark(shown(span), label, (offsets[0], offsets[1]), carried, text == "word")


def _may_be_place(key: str, text: str) -> bool:
    """Return whether `text`, the value of an unknown `key` of a span, may be the span's place.

    It may if it holds nothing but numbers, and either it holds two or the key's name suggests a place.
    """
    return bool(_PLACE.fullmatch(text)) and bool(_PLACE_KEY.search(key.lower()) or len(_NUMBER.findall(text)) == 2)


def _label(span: object, labels: Sequence[object], default: str) -> str:
    """Return the label of a span. `labels` are the values of its label keys: a name, {"value": name}, or a list of one.

    Raises SpanError if there is no label or one is missing, or if the label is "O" or begins with "B-" or "I-". In a
    span with the keys "index" and "entity", as pipelines write them, it may not begin with "E-", "L-", "S-" or "U-"
    either. Raises LabelCellError if a label is not a class name, and UnplacedSpanError if labels differ. The message
    about a missing label names `default`, the label of spans without a label key.
    """
    entries = [part for label in map(plain, labels) for part in (label if isinstance(label, list) else [label])]
    # flair writes its labels with their confidence
    entries = [part["value"] if isinstance(part, Mapping) and "value" in part else part for part in entries]
    if not entries or any(map(is_missing, entries)):
        rule = f"; a span has one label. Leave out the key for '{default}'."
        raise SpanError(f"the span {shown(span)} without a label", rule)
    names = list(dict.fromkeys(map(class_name, entries)))
    if len(names) > 1:
        raise UnplacedSpanError(f"the span {shown(span)} with the labels {', '.join(names)}", *_ONE_LABEL)
    if names[0] == "O":
        rule = "; O is the tag of words outside all spans. Leave such spans out, or rename the label."
        raise SpanError(f"the span {shown(span)} with the label O", rule)
    is_of_token = isinstance(span, Mapping) and "index" in span and "entity" in span
    if (_TAG_OF_TOKEN if is_of_token else _TAG).fullmatch(names[0]):
        hint = "Give pipelines aggregation_strategy='simple'"
        rule = f"; labels of spans have no B-, I-, E-, L-, S- or U-. {hint}."
        raise SpanError(f"the span {shown(span)} with the tag {names[0]}", rule)
    return names[0]


_ONE_LABEL = ("; a word has one label.", "Make a task per label; ")


def _is_offset(value: object) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


# Places


def utf16_units(text: str) -> list[int]:
    """Return the character offset for each UTF-16 offset in a text, its end included; -1 inside a surrogate pair.

    Most annotation tools in a browser count UTF-16 units: an emoji is two.
    """
    units: list[int] = []
    for number, char in enumerate(text):
        units += [number, -1] if ord(char) > 0xFFFF else [number]
    return [*units, len(text)]


def places(mark: SpanMark, text: str, words: Sequence[Span], units: Units | None = None) -> list[Span]:
    """Return the (start, end) characters of the span `mark` in its text, which has the words `words`.

    A span without edges gives every place where its own text occurs as whole words, or else at all. `units` is the list
    of `utf16_units`, if edges count UTF-16 units. None: they count characters. Raises UnplacedSpanError if the span is
    not in the text, or the characters there differ from the text that the span states.
    """
    if mark.edges is None:
        wanted = regex.sub(r"^[\s\p{Cf}]+|[\s\p{Cf}]+$", "", mark.text or "")
        for form in (wanted, *(unicodedata.normalize(name, wanted) for name in ("NFC", "NFD"))) if wanted else ():
            if found := [match.span() for match in regex.finditer(regex.escape(form), text)]:
                starts, ends = {start for start, _ in words}, {end for _, end in words}
                return [span for span in found if span[0] in starts and span[1] in ends] or found
        raise UnplacedSpanError(f"the span {mark.cell}", ", which is not in its text.", "Correct it; ")
    start, end = mark.edges
    if units is not None:
        start, end = (units[edge] if 0 <= edge < len(units) else -1 for edge in (start, end))
    if not 0 <= start < end <= len(text):
        rule = f"which is not in its text of {len(text)} characters; 0 <= start < end must hold"
        raise UnplacedSpanError(f"the span {mark.cell}", f", {rule}.")
    if mark.text is not None and not _agree(text[start:end], mark.text, loosely=mark.by_tokens):
        rule = f", whose text is not {shown(text[start:end])}, the characters {start} to {end}; both must agree."
        raise UnplacedSpanError(f"the span {mark.cell}", f"{rule}{_explained(mark, text)}")
    return [(start, end)]


def _agree(characters: str, carried: str, *, loosely: bool) -> bool:
    """Return whether `characters`, those of a span in its text, equal `carried`, the text that the span states.

    Runs of blanks count as one blank, and so does a backslash with "n". Unseen characters do not count, and Unicode
    forms may differ. With `loosely`, blanks, capitals, accents and tokenizers' marks do not count, and a stated text
    with "[UNK]" equals anything.
    """
    if loosely and "[UNK]" in carried:
        return True
    # in both, as a text may really hold a backslash and an "n"; blanks beside an unseen character are one run
    texts = (_UNSEEN.sub("", " ".join(text.replace("\\n", "\n").split())) for text in (characters, carried))
    both = [unicodedata.normalize("NFC", " ".join(text.split())) for text in texts]
    if loosely:
        bare = (unicodedata.normalize("NFKD", text.replace("##", "")).casefold() for text in both)
        both = [regex.sub(r"[\s\p{M}▁Ġ]", "", text) for text in bare]
    return both[0] == both[1]


def _explained(mark: SpanMark, text: str) -> str:
    """Return a sentence, after a blank, that guesses how the edges of `mark` are counted; "" without a guess.

    The guesses are: in bytes, up to the last character, or from 1.
    """
    start, end = cast("tuple[int, int]", mark.edges)
    in_bytes = text.encode()[max(0, start) : max(0, end)].decode(errors="replace")
    guesses = {
        " The edges fit as bytes of UTF-8; convert them to characters.": in_bytes,
        " The end seems to be the last character; add 1.": text[max(0, start) : end + 1],
        " The edges seem to count from 1; subtract 1.": text[max(0, start - 1) : max(0, end - 1)],
    }
    return next((hint for hint, part in guesses.items() if _agree(part, mark.text or "", loosely=mark.by_tokens)), "")


# Tags


def tags_of_spans(text: str, words: Sequence[Span], spans: Collection[LabelledSpan]) -> list[str]:
    """Return the IOB2 tag of each word of a text; `words` are ranges of characters.

    A word gets the tag of the span with which it shares characters; other words get "O". Raises UnplacedSpanError if
    two different `spans` share a word, or one shares characters with no word.
    """
    tags = ["O"] * len(words)
    owners: dict[int, LabelledSpan] = {}  # word -> its span
    at = 0
    for span in sorted(set(spans)):
        (start, end), label = span
        while at < len(words) and words[at][1] <= start:
            at += 1
        last = at
        while last < len(words) and words[last][0] < end:
            if last in owners:
                both = f"the spans {_quoted(text, owners[last])} and {_quoted(text, span)}"
                rule, hint = _ONE_LABEL
                raise UnplacedSpanError(both, f", which share the word '{text[slice(*words[last])]}'{rule}", hint)
            owners[last] = span
            tags[last] = f"{'B' if last == at else 'I'}-{label}"
            last += 1
        if last == at:
            raise UnplacedSpanError(f"the span {_quoted(text, span)}", ", which has no letter or sign.", "Correct it; ")
    return tags


def _quoted(text: str, span: LabelledSpan) -> str:
    return f"{shown(text[slice(*span[0])])} ({span[1]})"


def cuts_word(words: Sequence[Span], spans: Collection[LabelledSpan]) -> bool:
    """Return whether a span begins or ends where no word does; readers then learn the whole words that it touches."""
    starts, ends = {start for start, _ in words}, {end for _, end in words}
    return any(start not in starts or end not in ends for (start, end), _ in spans)
