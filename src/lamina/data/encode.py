"""Tokenise texts into windows of tokens, or running text into blocks of equal length."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from torch import nn

from lamina.data.arrow import CHUNK, chunks, encodable, join_tables
from lamina.data.batches import tokenizer_of
from lamina.data.windows import TOKEN_KEYS, Encoded, TokenRange, window_table
from lamina.errors import ConfigError
from lamina.layers.towers import towers_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from transformers import PreTrainedModel

    from lamina.data.batches import Tokenizer
    from lamina.data.windows import WindowRow
    from lamina.layers.types import Processor

    Text = str | tuple[str, str]

TokenizerOutput: TypeAlias = Any  # a `BatchEncoding` of transformers, whose stubs do not tell the types of its entries
_UNLIMITED = 10**9  # larger than any real limit; a tokenizer without a limit says 1e30
_FALLBACK_TOKENS = 512  # length of a window if neither model nor tokenizer has a limit
_POSITIONS = re.compile(r"(^|\.)(position_embeddings?|embed_positions?|pos_embeddings?|wpe)$")


def length_limit(model: PreTrainedModel, processor: Processor, asked: int | None = None) -> int:
    """Return the maximum number of tokens in a window, special tokens included.

    Args:
        model: The model, whose position table or config may have a limit.
        processor: Its tokenizer, which may have a lower limit.
        asked: The length that the user wants. None: the limit of model and tokenizer, or 512 if they have none.

    Raises:
        ConfigError: If `asked` is below 1 or above the limit.
    """
    allowed = int(min(_positions(model), getattr(tokenizer_of(processor), "model_max_length", _UNLIMITED)))
    if asked is None:
        return allowed if allowed < _UNLIMITED else _FALLBACK_TOKENS
    if not 1 <= asked <= allowed:
        rule = f"model and tokenizer take 1 to {allowed}" if allowed < _UNLIMITED else "it must be positive"
        raise ConfigError(f"encode: max_length is {asked}; {rule}.")
    return asked


def _positions(model: PreTrainedModel) -> int:
    """Return the number of positions that a model has for text, by its position tables or else by its config.

    If the model has several towers, the tower that reads text counts. Without a limit the result is `_UNLIMITED`.
    """
    text_towers = (tower for tower in towers_of(model).values() if tower.main_input_name == "input_ids")
    module = next(iter(text_towers), model)
    tables = [part for name, part in module.named_modules() if _POSITIONS.search(name)]
    weights = [(part, getattr(part, "weight", None)) for part in tables]
    sizes = [weight.shape[0] - _padding_rows(part) for part, weight in weights if isinstance(weight, nn.Parameter)]
    config = module.config
    limit = getattr(config, "max_position_embeddings", None)
    if not sizes and isinstance(limit, int) and limit > 0 and not getattr(config, "relative_attention", False):
        return limit
    return min(sizes, default=_UNLIMITED)


def _padding_rows(module: nn.Module) -> int:
    """Return how many rows of a position table do not stand for a position.

    These are the rows up to the padding row (RoBERTa), and a number of rows given by the table's offset (BART).
    """
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

    If the tokenizer makes no token of a text, as GPT-2's of "", the text becomes a single start token, which the model
    attends to. So the model has a state for the text, which does not depend on the batch.

    Args:
        texts: Texts, or pairs of texts.
        processor: A tokenizer, or a processor that contains one.
        max_length: Maximum number of tokens in a window, special tokens included.
        windows: Whether to cut a longer text into several windows. False: only its beginning is used, and the text
            counts as truncated. In a pair, the second text is cut into windows, and every window begins with the first
            text. If the first text is longer than half a window, it is cut to half a window and the pair counts as
            truncated. Offsets and token ranges are those of the second text.
        stride: Number of tokens that neighbouring windows share. None: a quarter of `max_length`.
        offsets: Whether to store the character range of each token. Only token tasks need them; they take much memory.
        add_prefix_space: Whether to put a space before the first word of each text, for tokenizers that otherwise read
            this word differently (byte-level BPE, as RoBERTa's). Offsets refer to the text without the space.

    Returns:
        The windows, in memory or in a temporary file if they are large. The tokenizer's settings are as before.

    Raises:
        ConfigError: If `max_length` leaves no room for text, `stride` is not allowed, or `windows` is set for a
            tokenizer that is not a fast one.
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
            problem = "is a slow tokenizer; token tasks need character offsets, which only fast ones give"
            raise ConfigError(f"encode: {type(tokenizer).__name__} {problem}. Use a model that has a fast one.")
        options |= _window_options(room, stride, max_length, pairs=pairs)
    truncated: list[int] = []
    is_second = windows and pairs  # whether the second text of a pair is cut into windows
    space = add_prefix_space and _needs_prefix_space(tokenizer)

    def tables() -> Iterator[pa.Table]:
        for number, part in enumerate(chunks(texts)):
            spaced = list(map(_spaced, part)) if space else part
            spaced, count = _cut_first_texts(tokenizer, spaced, room // 2) if is_second else (spaced, 0)
            output = _call(tokenizer, spaced, options)
            truncated.append(count if windows else _count_truncated(tokenizer, spaced, output["input_ids"], max_length))
            if offsets and space:
                _shift_offsets(output, part, spaced, side=int(is_second))
            shared = options.get("stride", 0)
            yield _windows(tokenizer, output, start=number * CHUNK, shared=shared, is_second=is_second)

    with _unchanged(tokenizer, windows=windows):
        return Encoded(join_tables(tables()), sum(truncated))


def _window_options(room: int, stride: int | None, max_length: int, *, pairs: bool) -> dict[str, Any]:
    """Return the options with which a tokenizer cuts texts into windows with `room` tokens besides special tokens.

    In a pair, at least half of them belong to the second text. The default of `stride` is a quarter of `max_length`, or
    less if a window is too small. Raises ConfigError if `stride` is negative, or not smaller than the text's part of a
    window.
    """
    room = room - room // 2 if pairs else room
    shared = min(max_length // 4, room - 1) if stride is None else stride
    if not 0 <= shared < room:
        rule = f"windows hold {room} tokens of a text, so they can share 0 to {room - 1}"
        raise ConfigError(f"encode: stride is {stride}; {rule}.")
    side = {"truncation": "only_second"} if pairs else {}
    return {"stride": shared, "return_overflowing_tokens": True, **side}


def _cut_first_texts(tokenizer: Tokenizer, pairs: Sequence[Text], max_tokens: int) -> tuple[list[Text], int]:
    """Return the pairs with their first texts cut to `max_tokens` tokens, and how many first texts were cut."""
    options = {"truncation": False, "return_offsets_mapping": True, "add_special_tokens": False}
    spans = _call(tokenizer, [str(first) for first, _ in pairs], options).get("offset_mapping", ())
    long = [row for row, tokens in enumerate(spans) if len(tokens) > max_tokens]
    shortened = list(pairs)
    for row in long:
        first, second = pairs[row]
        shortened[row] = (str(first)[: spans[row][max_tokens - 1][1]] if max_tokens else "", str(second))
    return shortened, len(long)


def _needs_prefix_space(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer reads the first word of a text differently from the same word after a space.

    That is so for byte-level BPE, whose tokens include the space before a word, unless the tokenizer adds a space to
    the first word by itself.
    """
    step = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    state = {} if step is None else json.loads(step.__getstate__())
    steps = state.get("pretokenizers", [state])
    return any(part.get("type") == "ByteLevel" and not part["add_prefix_space"] for part in steps)


def _spaced(text: Text) -> Text:
    """Return a text, or both texts of a pair, with a space in front; empty texts and leading spaces stay."""
    if not isinstance(text, str):
        first, second = (str(_spaced(part)) for part in text)
        return first, second
    return f" {text}" if text and not text[0].isspace() else text


def _shift_offsets(output: TokenizerOutput, texts: Sequence[Text], spaced: Sequence[Text], *, side: int) -> None:
    """Shift the offsets of a tokenizer's `output`, in place, from the `spaced` texts to the texts without the space.

    `side` is the text of a pair to which the offsets belong, 0 or 1.
    """
    pairs = zip(texts, spaced, strict=True)
    before_after = [[text if isinstance(text, str) else text[side] for text in pair] for pair in pairs]
    numbers = output.get("overflow_to_sample_mapping") or range(len(texts))
    for spans, text in zip(output.get("offset_mapping", ()), numbers, strict=False):
        if before_after[text][0] != before_after[text][1]:
            spans[:] = [(max(0, start - 1), max(0, end - 1)) for start, end in spans]


def blocks(texts: Sequence[str], processor: Processor, *, max_length: int, add_prefix_space: bool = False) -> Encoded:
    """Tokenise texts, join them and cut the result into blocks of `max_length` tokens, as language modelling does.

    Texts keep their special tokens; a block may begin and end inside a text. Only the last block may be shorter.

    Args:
        texts: The texts.
        processor: A tokenizer, or a processor that contains one.
        max_length: Number of tokens in a block.
        add_prefix_space: Whether to put a space before the first word of each text; see `encode`.

    Returns:
        The blocks, without offsets. Each block counts as a text with one window, and no text counts as truncated.
    """
    tokenizer = tokenizer_of(processor)
    if add_prefix_space and _needs_prefix_space(tokenizer):
        texts = [str(_spaced(text)) for text in texts]
    with _unchanged(tokenizer, windows=False):
        return Encoded(join_tables(_blocks(tokenizer, texts, max_length)))


def _blocks(tokenizer: Tokenizer, texts: Sequence[str], max_length: int) -> Iterator[pa.Table]:
    """Yield tables of blocks (see `window_table`) as texts are tokenised; without any token, a single empty table."""
    joined: dict[str, list[int]] = {}
    count = 0
    for part in itertools.chain(chunks(texts), [None]):
        for key, numbers in _call(tokenizer, part or (), {"truncation": False}).items():
            if key in TOKEN_KEYS:
                joined.setdefault(key, []).extend(itertools.chain.from_iterable(numbers))
        length = len(joined["input_ids"])
        whole = length if part is None else length - length % max_length
        rows: list[WindowRow] = []
        for number, at in enumerate(range(0, whole, max_length), start=count):
            tokens = {key: row[at : at + max_length] for key, row in joined.items()}
            token_range = TokenRange(0, len(tokens["input_ids"]), 0)
            rows.append({**tokens, **token_range._asdict(), "text": number, "window": 0, "offsets": []})
        joined = {key: row[whole:] for key, row in joined.items()}
        if rows or (part is None and not count):
            yield window_table(rows)
        count += len(rows)


@contextmanager
def _unchanged(tokenizer: Tokenizer, *, windows: bool) -> Iterator[None]:
    """Restore a tokenizer's settings of truncation and padding at the end of the `with` block.

    Calls of the tokenizer change these settings, and `save_pretrained` would save them. With `windows`, texts are cut
    on the right inside the block, because the windows must be in the order of the text.
    """
    side = tokenizer.truncation_side
    backend = getattr(tokenizer, "backend_tokenizer", None)
    truncation, padding = getattr(backend, "truncation", None), getattr(backend, "padding", None)
    if windows:
        tokenizer.truncation_side = "right"
    try:
        yield
    finally:
        tokenizer.truncation_side = side
        if truncation and backend is not None:
            backend.enable_truncation(**truncation)
        elif backend is not None and tokenizer.is_fast:
            backend.no_truncation()
        if backend is not None and padding:
            backend.enable_padding(**padding)


def _call(tokenizer: Tokenizer, texts: Sequence[Text], options: Mapping[str, object]) -> TokenizerOutput:
    """Call a tokenizer with texts or pairs of texts, and return its output; without texts, empty "input_ids".

    Lone surrogates in texts are replaced, because tokenizers refuse them.
    """
    if not texts:
        return {"input_ids": []}
    sides = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    columns = [[encodable(str(text)) for text in side] for side in sides]
    return tokenizer(*columns, return_attention_mask=True, verbose=False, **options)


def _count_truncated(tokenizer: Tokenizer, texts: Sequence[Text], ids: Sequence[list[int]], max_length: int) -> int:
    """Return how many texts, or pairs, have more than `max_length` tokens; `ids` are cut to `max_length`.

    Texts that fill a window are tokenised again, because truncated token ids do not show whether tokens are missing.
    """
    full = [text for text, row in zip(texts, ids, strict=True) if len(row) >= max_length]
    return sum(len(row) > max_length for row in _call(tokenizer, full, {})["input_ids"]) if full else 0


class _Window(NamedTuple):
    """The facts about a window that the following window of the same text depends on."""

    text: int  # index of the text
    number: int  # index of the window within its text
    tokens: TokenRange


def _windows(tokenizer: Tokenizer, output: TokenizerOutput, *, start: int, shared: int, is_second: bool) -> pa.Table:
    """Return the windows in one `output` of a tokenizer as an Arrow table; see `window_table`.

    `start` is the index of its first text among all texts, `shared` the number of tokens that neighbouring windows
    share. With `is_second`, offsets and token ranges are those of the second texts of pairs.
    """
    keys = [key for key in TOKEN_KEYS if key in output]
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, 0)
    start_token = next(token for token in candidates if token is not None)
    rows: list[WindowRow] = []
    before: _Window | None = None
    for i, text in enumerate(output.get("overflow_to_sample_mapping") or range(len(output["input_ids"]))):
        row = {key: output[key][i] for key in keys}
        spans = output["offset_mapping"][i] if "offset_mapping" in output else []
        window = _Window(start + text, 0, _text_tokens(output, i, is_second=is_second))
        if before is not None and before.text == window.text:
            first = before.tokens.number + before.tokens.stop - before.tokens.start - shared
            window = _Window(window.text, before.number + 1, window.tokens._replace(number=first))
        if len(row["input_ids"]) == 0:
            row = {key: [0] for key in keys} | {"input_ids": [start_token], "attention_mask": [1]}
            spans = [(0, 0)] * ("offset_mapping" in output)
        tokens = window.tokens
        edges = [
            edge for at, span in enumerate(spans) for edge in (span if tokens.start <= at < tokens.stop else (0, 0))
        ]
        rows.append({**row, **tokens._asdict(), "text": window.text, "window": window.number, "offsets": edges})
        before = window
    return window_table(rows)


def _text_tokens(output: TokenizerOutput, window: int, *, is_second: bool) -> TokenRange:
    """Return the range of a window's tokens that belong to the text or, with `is_second`, to the second text of a pair.

    The `number` of the range is 0, as for the first window of a text.
    """
    if is_second:
        is_other = [int(side != 1) for side in output.sequence_ids(window)]
    else:
        is_other = output["special_tokens_mask"][window]
    is_other = [*is_other, 1]  # special tokens surround the text's; without them, the end of the window does
    first = is_other.index(0) if 0 in is_other else 0
    return TokenRange(first, is_other.index(1, first), 0)
