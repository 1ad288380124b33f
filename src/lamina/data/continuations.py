"""Tokenise pairs whose second text continues the first, as a reply continues its prompt when a model writes it.

Many tokenizers of decoders put something before every text: a start token (Llama), or a mark or space that makes the
first word look like any other (the "▁" of SentencePiece). A model that writes a reply puts neither before it.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import tokenizers

from lamina.layers.types import encodable, start_token, tokenizer_of, unpadded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerFast

    from lamina.layers.types import Processor, Tokenizer

# Windows as columns of a `window_table`: column -> a number, or a list of numbers, of each window.
WindowColumns: TypeAlias = "dict[str, list[Any]]"
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}  # step -> key of the parts of a "Sequence"


class Frame(NamedTuple):
    """What a tokenizer puts around a pair whose second text continues the first.

    Attributes:
        backend: The tokenizer of the library tokenizers.
        before: Token ids before the first text.
        between: Start tokens that the tokenizer puts between the texts. A continuation is read without them.
        after: Token ids after the second text.
    """

    backend: tokenizers.Tokenizer
    before: list[int]
    between: list[int]
    after: list[int]


def frame_of(tokenizer: Tokenizer) -> Frame | None:
    """Return what is put around a pair; None for slow tokenizers, and for separators as in BERT and T5."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    pair = backend.encode("a", "a")  # unlike a call of `tokenizer`, it changes no settings
    ids, sides = pair.ids[unpadded(pair)], pair.sequence_ids[unpadded(pair)]
    if not {0, 1} <= set(sides):
        return None
    first, second = sides.index(0), sides.index(1)
    between, after = ids[first + sides.count(0) : second], ids[second + sides.count(1) :]
    if not set(between) <= {tokenizer.bos_token_id}:
        return None
    return Frame(backend, ids[:first], between, after)


def reads_replies_apart(processor: Processor) -> bool:
    """Return whether tasks on tokens and tasks on whole texts tokenise a pair differently.

    They do if the tokenizer puts a start token, a mark or a space before both texts: tasks on tokens read the second
    text without it. False for slow tokenizers.
    """
    frame = frame_of(tokenizer_of(processor))
    return frame is not None and (bool(frame.between) or _adds_prefix(frame.backend))


def continued_windows(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], frame: Frame, *, room: int, shared: int
) -> WindowColumns:
    """Tokenise pairs as windows over the second texts; every window begins with the whole first text.

    The second text gets no start token, mark or space of its own. If the first text has no tokens, the second
    keeps its mark or space, like a text alone. Truncation and padding of the tokenizer's backend are switched off.

    Args:
        tokenizer: The tokenizer.
        pairs: The pairs. Only the first `room // 2` tokens of a first text are used.
        frame: What the tokenizer puts around a pair.
        room: Maximum number of tokens of both texts in a window.
        shared: Number of tokens that neighbouring windows share.

    Returns:
        The columns of a `window_table`, with offsets. "text" counts the pairs from 0.
    """
    columns: WindowColumns = defaultdict(list)
    has_types = "token_type_ids" in tokenizer.model_input_names
    for text, (first, second) in enumerate(_both_texts(tokenizer, frame.backend, pairs)):
        prompt = [*frame.before, *first.ids[: room // 2]]
        start, length = len(prompt), len(second.ids)
        size = room - (start - len(frame.before))  # tokens of the second text in a window
        for window, number in enumerate(range(0, max(1, length - shared), size - shared)):
            own = second.ids[number : number + size]
            ids = [*prompt, *own, *frame.after] or [start_token(tokenizer)]
            edges = [0] * (2 * len(ids))
            for at, span in enumerate(second.offsets[number : number + size], start):
                edges[2 * at : 2 * at + 2] = span
            types = {"token_type_ids": [0] * len(ids)} if has_types else {}
            place = {"text": text, "window": window, "start": start, "stop": start + len(own), "number": number}
            tokens = {"input_ids": ids, "attention_mask": [1] * len(ids), **types, "offsets": edges}
            for name, cell in {**tokens, **place}.items():
                columns[name].append(cell)
    return columns


def joined_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, max_length: int
) -> tuple[WindowColumns, list[list[int]], int]:
    """Tokenise each pair as one row: the first text's tokens, as it has them alone, then those of the second.

    The special tokens are those around a single text; the second text is tokenised as in `continued_windows`. A pair
    that is too long is truncated on the tokenizer's side. Truncation and padding of its backend are switched off.

    Args:
        tokenizer: A fast tokenizer.
        pairs: The pairs.
        max_length: Maximum number of tokens of a pair; more than the special tokens.

    Returns:
        The columns of a `window_table`, without offsets; for each pair 1 at the tokens of the second text, 0 at others;
        and the number of truncated pairs.
    """
    backend = cast("PreTrainedTokenizerFast", tokenizer).backend_tokenizer
    alone = backend.encode("a", add_special_tokens=True)
    ids, special = alone.ids[unpadded(alone)], alone.special_tokens_mask[unpadded(alone)]
    start = special.index(0) if 0 in special else len(special)
    before, after = ids[:start], ids[start + special.count(0) :]
    room = max_length - len(before) - len(after)
    kept = slice(-room, None) if tokenizer.truncation_side == "left" else slice(room)
    has_types = "token_type_ids" in tokenizer.model_input_names
    columns: WindowColumns = defaultdict(list)
    marks, truncated = list[list[int]](), 0
    for text, (first, second) in enumerate(_both_texts(tokenizer, backend, pairs)):
        words = [*first.ids, *second.ids]
        truncated += len(words) > room
        ids = [*before, *words[kept], *after] or [start_token(tokenizer)]
        is_second = [*[0] * len(first), *[1] * len(second)][kept]
        marks.append([*[0] * start, *is_second, *[0] * (len(ids) - start - len(is_second))])
        types = {"token_type_ids": [0] * len(ids)} if has_types else {}
        place = {"text": text, "window": 0, "start": start, "stop": start + len(is_second), "number": 0}
        for name, cell in {"input_ids": ids, "attention_mask": [1] * len(ids), **types, "offsets": [], **place}.items():
            columns[name].append(cell)
    return columns, marks, truncated


def _both_texts(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer, pairs: Sequence[tuple[str, str]]
) -> Iterator[tuple[tokenizers.Encoding, tokenizers.Encoding]]:
    """Yield the tokens of each pair's texts, without special tokens, and without a prefix before the second text."""
    backend.no_truncation()
    backend.no_padding()

    def encoded(texts: list[str], by: tokenizers.Tokenizer = backend) -> list[tokenizers.Encoding]:
        return by.encode_batch(list(map(encodable, texts)), add_special_tokens=False)

    firsts, seconds = encoded([first for first, _ in pairs]), [second for _, second in pairs]
    if (bare := _bare(tokenizer, backend)) is backend:
        yield from zip(firsts, encoded(seconds), strict=True)
        return
    replies = encoded(seconds, bare)
    alone = iter(encoded([second for first, second in zip(firsts, seconds, strict=True) if not len(first)]))
    for first, reply in zip(firsts, replies, strict=True):
        yield first, reply if len(first) else next(alone)


def _bare(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the backend, or a copy that puts no mark or space before a text, if the backend does so.

    A copy is kept for the tokenizer until one of the two steps or the number of tokens changes. The backend itself is
    not changed, since another thread may use it.
    """
    steps = _steps(backend)
    changed = {step: _without_prefix(own) for step, own in steps.items()}
    if changed == steps:
        return backend
    key = json.dumps([steps, len(tokenizer)])
    known, copy = _copies.get(tokenizer, ("", backend))
    if known != key:
        copy = tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | changed))
        copy.no_truncation()
        copy.no_padding()
        _copies[tokenizer] = key, copy
    copy.encode_special_tokens = backend.encode_special_tokens
    return copy


# tokenizer -> what the copy depends on, and a copy of its backend that puts nothing before a text
_copies: weakref.WeakKeyDictionary[object, tuple[str, tokenizers.Tokenizer]] = weakref.WeakKeyDictionary()


def _adds_prefix(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a tokenizer puts a mark or a space before every text."""
    return any(_without_prefix(state) != state for state in _steps(backend).values())


def _steps(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the states of a tokenizer's normalizer and pre-tokenizer.

    None for a step that the tokenizer does not have, or that is written in Python and has no state.
    """
    states: dict[str, Any] = {}
    for step in _STEPS:
        part = getattr(backend, step)
        try:
            states[step] = None if part is None else json.loads(part.__getstate__())
        except Exception:  # the library raises plain Exceptions
            states[step] = None
    return states


def _without_prefix(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the state of a step of a tokenizer so that it puts nothing before a text; None if nothing else is left."""
    if state is None or state["type"] == "Prepend":
        return None
    if state["type"] == "Metaspace":
        return state | {"prepend_scheme": "never"}
    if state["type"] == "ByteLevel" and "add_prefix_space" in state:
        return state | {"add_prefix_space": False}
    for parts in filter(state.__contains__, _STEPS.values()):
        kept = [part for part in map(_without_prefix, state[parts]) if part is not None]
        return state | {parts: kept} if kept else None
    return state
