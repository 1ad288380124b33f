"""Tokenise texts into windows, or running text into blocks."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lamina.data.arrow import CHUNK, chunks, encodable, rows_of
from lamina.data.batches import tokenizer_of
from lamina.data.windows import TOKEN_KEYS, Encoded, Run, window_table
from lamina.errors import ConfigError
from lamina.layers.towers import towers_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from transformers import PreTrainedModel

    from lamina.data.batches import Processor

    Text = str | tuple[str, str]
    Tokenizer = Any  # the stubs of its calls are narrower than what they take and give

_UNLIMITED = 10**9  # a tokenizer without a limit says 1e30
_FALLBACK_TOKENS = 512
_POSITIONS = re.compile(r"(^|\.)(position_embeddings?|embed_positions?|pos_embeddings?|wpe)$")


def length_limit(model: PreTrainedModel, processor: Processor, asked: int | None = None) -> int:
    """Return the maximum tokens of a window, special tokens included.

    Args:
        model: The model, whose position table or config has a limit.
        processor: Its tokenizer, which may have a lower limit.
        asked: The requested length; None: as many as model and tokenizer allow, or 512 if they have no limit.

    Raises:
        ConfigError: If `asked` is not positive, or more than they allow.
    """
    allowed = int(min(_positions(model), getattr(tokenizer_of(processor), "model_max_length", _UNLIMITED)))
    if asked is None:
        return allowed if allowed < _UNLIMITED else _FALLBACK_TOKENS
    if not 1 <= asked <= allowed:
        most = f"model and tokenizer take 1 to {allowed}" if allowed < _UNLIMITED else "it must be positive"
        raise ConfigError(f"encode: max_length is {asked}; {most}.")
    return asked


def _positions(model: PreTrainedModel) -> int:
    """Return the number of positions in the model's tables or config; a very large number if there is no limit."""
    reads_text: Any = (tower for tower in towers_of(model).values() if tower.main_input_name == "input_ids")
    model = next(reads_text, model)
    named = model.named_modules()
    weights = [(module, getattr(module, "weight", None)) for name, module in named if _POSITIONS.search(name)]
    tables = [rows.shape[0] - _padding_rows(module) for module, rows in weights if isinstance(rows, nn.Parameter)]
    known = getattr(model.config, "max_position_embeddings", None)
    if not tables and isinstance(known, int) and known > 0 and not getattr(model.config, "relative_attention", False):
        return known
    return min(tables, default=_UNLIMITED)


def _padding_rows(module: nn.Module) -> int:
    """Return how many rows of a position table are not positions: up to the padding row, plus an offset (BART)."""
    padding = getattr(module, "padding_idx", None)
    return (0 if padding is None else int(padding) + 1) + int(getattr(module, "offset", 0))


def encode(
    texts: Sequence[Text],
    processor: Processor,
    *,
    max_length: int,
    windows: bool = False,
    stride: int | None = None,
    offsets: bool = True,
    add_prefix_space: bool = False,
) -> Encoded:
    """Tokenise texts or pairs of texts.

    A text without any token (GPT-2 reads "" so) becomes one start token that is attended to, so that the model has a
    state for it, the same one in every batch.

    Args:
        texts: Texts, or pairs of texts.
        processor: A tokenizer, or a processor that has one.
        max_length: Maximum tokens of a window, special tokens included.
        windows: Whether a longer text is cut into several windows. Otherwise it loses its end and is counted as
            truncated. In a pair the second text is cut: every window begins with the first text, which loses (and is
            counted for) what is longer than half a window; offsets and runs belong to the second text.
        stride: Tokens that neighbouring windows share. None: a quarter of the window.
        offsets: Whether to keep the characters of each token. Only token tasks need them; they take much memory.
        add_prefix_space: Whether tokenizers that read the first word of a text differently (byte-level BPE, as in
            RoBERTa) get a space before it. Offsets are those of the text without the space.

    Raises:
        ConfigError: If `max_length` leaves no room for text, `stride` does not fit, or windows need a fast tokenizer.
    """
    tokenizer = tokenizer_of(processor)
    pairs = bool(texts) and not isinstance(texts[0], str)
    room = max_length - tokenizer.num_special_tokens_to_add(pair=pairs)
    if room < 1:
        raise ConfigError(f"encode: max_length is {max_length}; the special tokens alone are {max_length - room}.")
    options: dict[str, Any] = {
        "truncation": True,
        "max_length": max_length,
        "return_special_tokens_mask": True,
        "return_offsets_mapping": offsets and tokenizer.is_fast,
    }
    if windows:
        if not tokenizer.is_fast:
            what = "is a slow tokenizer; token tasks need character offsets, which only fast ones give"
            raise ConfigError(f"encode: {type(tokenizer).__name__} {what}. Take a model that has a fast one.")
        options |= _window_options(room, stride, max_length, pairs=pairs)
    truncated: list[int] = []
    second = windows and pairs
    space = add_prefix_space and _parts_first_word(tokenizer)

    def tables() -> Iterator[pa.Table]:
        for number, part in enumerate(chunks(texts)):
            given = list(map(_spaced, part)) if space else part
            given, cut = _halved(tokenizer, given, room // 2) if second else (given, 0)
            raw = _call(tokenizer, given, options)
            truncated.append(cut if windows else _count_truncated(tokenizer, given, raw["input_ids"], max_length))
            if offsets and space:
                _move_back(raw, part, given, side=int(second))
            yield _windows(
                tokenizer, raw, start=number * CHUNK, shared=options.get("stride", 0), second=windows and pairs
            )

    with _unchanged(tokenizer, windows=windows):
        return Encoded(rows_of(tables()), sum(truncated))


def _window_options(room: int, stride: int | None, max_length: int, *, pairs: bool) -> dict[str, Any]:
    """Return the tokenizer's options for windows.

    Args:
        room: Tokens of a window without special tokens; in a pair at least half of them are the second text's.
        stride: Tokens that windows share; None: a quarter of the window.
        max_length: Tokens of a window.
        pairs: Whether the texts are pairs.

    Raises:
        ConfigError: If the windows cannot share as many tokens.
    """
    room = room - room // 2 if pairs else room
    shared = min(max_length // 4, room - 1) if stride is None else stride
    if not 0 <= shared < room:
        what = f"windows hold {room} tokens of a text, so they can share 0 to {room - 1}"
        raise ConfigError(f"encode: stride is {stride}; {what}.")
    side = {"truncation": "only_second"} if pairs else {}
    return {"stride": shared, "return_overflowing_tokens": True, **side}


def _halved(tokenizer: Tokenizer, pairs: Sequence[Text], most: int) -> tuple[list[Text], int]:
    """Return the pairs with their first texts cut to at most `most` tokens, and how many were cut."""
    how = {"truncation": False, "return_offsets_mapping": True, "add_special_tokens": False}
    spans = _call(tokenizer, [str(first) for first, _ in pairs], how).get("offset_mapping", ())
    long = [row for row, own in enumerate(spans) if len(own) > most]
    halved = list(pairs)
    for row in long:
        first, second = pairs[row]
        halved[row] = (str(first)[: spans[row][most - 1][1]] if most else "", str(second))
    return halved, len(long)


def _parts_first_word(tokenizer: Tokenizer) -> bool:
    """Return whether a word's token includes the space before it, and the tokenizer adds none to the first word."""
    step = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    state = {} if step is None else json.loads(step.__getstate__())
    steps = state.get("pretokenizers", [state])
    return any(part.get("type") == "ByteLevel" and not part["add_prefix_space"] for part in steps)


def _spaced(text: Text) -> Text:
    """Return a text, or both texts of a pair, with a space in front unless there is one."""
    if not isinstance(text, str):
        first, second = (str(_spaced(part)) for part in text)
        return first, second
    return f" {text}" if text and not text[0].isspace() else text


def _move_back(raw: Mapping[str, Any], texts: Sequence[Text], given: Sequence[Text], *, side: int) -> None:
    """Shift the tokenizer's offsets in place, so that they count in the texts without the spaces of `_spaced`.

    Args:
        raw: The tokenizer's output.
        texts: The texts without spaces.
        given: The texts as the tokenizer read them.
        side: Which text of a pair the offsets belong to, 0 or 1.
    """
    both = [[text if isinstance(text, str) else text[side] for text in pair] for pair in zip(texts, given, strict=True)]
    numbers = raw.get("overflow_to_sample_mapping") or range(len(texts))
    for spans, text in zip(raw.get("offset_mapping", ()), numbers, strict=False):
        if both[text][0] != both[text][1]:
            spans[:] = [(max(0, start - 1), max(0, end - 1)) for start, end in spans]


def blocks(texts: Sequence[str], processor: Processor, *, max_length: int, add_prefix_space: bool = False) -> Encoded:
    """Tokenise texts, join them and cut the result into blocks of `max_length` tokens, as language modelling does.

    Texts keep their special tokens; a block may begin or end anywhere. The last block may be shorter. Every block
    counts as a text, without offsets.

    Args:
        texts: The texts.
        processor: A tokenizer, or a processor that has one.
        max_length: Tokens of a block.
        add_prefix_space: Whether byte-level BPE tokenizers get a space before the first word of each text.
    """
    tokenizer = tokenizer_of(processor)
    if add_prefix_space and _parts_first_word(tokenizer):
        texts = [str(_spaced(text)) for text in texts]
    with _unchanged(tokenizer, windows=False):
        return Encoded(rows_of(_blocks(tokenizer, texts, max_length)))


def _blocks(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> Iterator[pa.Table]:
    joined: dict[str, list[int]] = {}
    count = 0
    for part in itertools.chain(chunks(texts), [None]):
        for key, numbers in _call(tokenizer, part or (), {"truncation": False}).items():
            if key in TOKEN_KEYS:
                joined.setdefault(key, []).extend(itertools.chain.from_iterable(numbers))
        length = len(joined["input_ids"])
        whole = length if part is None else length - length % max_length
        rows: list[dict[str, Any]] = []
        for number, at in enumerate(range(0, whole, max_length), start=count):
            tokens = {key: row[at : at + max_length] for key, row in joined.items()}
            run = Run(0, len(tokens["input_ids"]), 0)
            rows.append({**tokens, **run._asdict(), "text": number, "window": 0, "offsets": []})
        joined = {key: row[whole:] for key, row in joined.items()}
        if rows or (part is None and not count):
            yield window_table(rows)
        count += len(rows)


@contextmanager
def _unchanged(tokenizer: Tokenizer, *, windows: bool) -> Iterator[None]:
    """Restore the tokenizer's truncation and padding when the context ends, since they would be saved with it.

    With `windows` texts are cut on the right inside the context.
    """
    side = tokenizer.truncation_side
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    truncation, padding = getattr(backend, "truncation", None), getattr(backend, "padding", None)
    if windows:
        tokenizer.truncation_side = "right"
    try:
        yield
    finally:
        tokenizer.truncation_side = side
        if truncation:
            backend.enable_truncation(**truncation)
        elif backend is not None and tokenizer.is_fast:
            backend.no_truncation()
        if backend is not None and padding:
            backend.enable_padding(**padding)


def _call(tokenizer: Tokenizer, texts: Sequence[Text], options: Mapping[str, Any]) -> Mapping[str, Any]:
    if not texts:
        return {"input_ids": []}
    sides = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    columns = [[encodable(str(text)) for text in side] for side in sides]
    return tokenizer(*columns, return_attention_mask=True, verbose=False, **options)


def _count_truncated(tokenizer: Tokenizer, texts: Sequence[Text], ids: Sequence[list[int]], max_length: int) -> int:
    """Return how many texts have more than `max_length` tokens, by tokenising those again that fill a window."""
    full = [text for text, row in zip(texts, ids, strict=True) if len(row) >= max_length]
    return sum(len(row) > max_length for row in _call(tokenizer, full, {})["input_ids"]) if full else 0


def _windows(tokenizer: Tokenizer, raw: Any, *, start: int, shared: int, second: bool) -> pa.Table:
    """Return the windows of one call of the tokenizer as an Arrow table.

    Args:
        tokenizer: The tokenizer.
        raw: Its output.
        start: Number of the first text of the call.
        shared: Tokens that neighbouring windows share.
        second: Whether runs and offsets belong to the second texts of pairs.
    """
    keys = [key for key in TOKEN_KEYS if key in raw]
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
    start_token = next(token for token in known if token is not None)
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(raw.get("overflow_to_sample_mapping") or range(len(raw["input_ids"]))):
        row = {key: raw[key][i] for key in keys}
        spans = raw["offset_mapping"][i] if "offset_mapping" in raw else []
        follows = bool(rows) and rows[-1]["text"] == start + text
        if second:
            special = [int(owner != 1) for owner in raw.sequence_ids(i)] + [1]
        else:
            special = [*raw["special_tokens_mask"][i], 1]  # the text's own tokens are between special ones
        first = special.index(0) if 0 in special else 0
        number = rows[-1]["number"] + rows[-1]["stop"] - rows[-1]["start"] - shared if follows else 0
        run, window = Run(first, special.index(1, first), number), rows[-1]["window"] + 1 if follows else 0
        if len(row["input_ids"]) == 0:
            row = {key: [0] for key in keys} | {"input_ids": [start_token], "attention_mask": [1]}
            spans = [(0, 0)] * ("offset_mapping" in raw)
        edges = [edge for at, span in enumerate(spans) for edge in (span if run.start <= at < run.stop else (0, 0))]
        rows.append({**row, **run._asdict(), "text": start + text, "window": window, "offsets": edges})
    return window_table(rows)
