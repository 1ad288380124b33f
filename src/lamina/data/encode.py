"""Tokenise texts into windows of tokens, or running text into blocks of equal length, and make batches of them."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast, final

import numpy as np
import pyarrow as pa
import tokenizers
import torch
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from lamina.data.arrow import CHUNK, Column, Ragged, chunks, dataset_of, join_tables
from lamina.data.continuations import WindowColumns, continued_windows, frame_of, joined_pairs
from lamina.errors import ConfigError
from lamina.layers.padding import reads_padding
from lamina.layers.stack import UNLIMITED, position_limit
from lamina.layers.types import encodable, padding_of, start_token, tokenizer_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import datasets
    from jaxtyping import Int
    from torch import nn
    from transformers import PreTrainedModel

    from lamina.data.continuations import Frame
    from lamina.layers.types import Processor, Tokenizer

    Text = str | tuple[str, str]

TokenizerOutput: TypeAlias = Any  # a `BatchEncoding` of transformers, whose stubs do not tell the types of its entries
_FEW = 64  # up to this number of windows stay in lists: converting them to Arrow would take longer
_FALLBACK_TOKENS = 512  # length of a window if neither model nor tokenizer has a limit
_CACHED = {"input_ids", "attention_mask", "token_type_ids"}
_BYTES, _INTS = pa.list_(pa.int8()), pa.list_(pa.int32())
TOKEN_KEYS = {"input_ids": _INTS, "attention_mask": _BYTES, "token_type_ids": _BYTES}
_PLACES = {"text": pa.int64(), "window": pa.int32(), "start": pa.int32(), "stop": pa.int32(), "number": pa.int32()}
TokenizerOptions: TypeAlias = "dict[str, int | str]"  # keyword arguments of a tokenizer


class TokenRange(NamedTuple):
    """The tokens of a text in one window, without special tokens (see `Encoded.token_ranges` for pairs and blocks).

    Attributes:
        start: Position of the first token in the window.
        stop: Position after the last token in the window.
        number: Index of the first token among all tokens of the text, from 0.
    """

    start: int
    stop: int
    number: int


def window_table(columns: WindowColumns) -> pa.Table:
    """Return windows of tokens as an Arrow table with one row per window.

    `columns` is column -> values. The table has those columns of `TOKEN_KEYS` that `columns` has, "offsets" (a flat
    list: start, end, start, end ...), "text" (index of the text), "window" (index of the window within its text) and
    the fields of `TokenRange`. {} gives a table without rows.
    """
    present = columns or ("input_ids",)
    tokens = {key: kind for key, kind in TOKEN_KEYS.items() if key in present}
    kinds = {**tokens, "offsets": _INTS, **_PLACES}
    return pa.table({name: pa.array(columns.get(name, ()), kind) for name, kind in kinds.items()})


def pad(rows: Sequence[Sequence[int] | np.ndarray], value: int) -> Int[Tensor, "batch tokens"]:
    """Return lists or arrays of unequal length as one tensor (int64), padded with `value` on the right."""
    padded = np.full((len(rows), max(map(len, rows), default=0)), value, dtype=np.int64)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)


def pairs_of(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs (start, end) from a flat list: start, end, start, end ..."""
    return list(zip(flat[::2], flat[1::2], strict=True))


@final
class Encoded:
    """Tokenised texts as windows of tokens, in the order of the texts; `encode` and `blocks` return it.

    Args:
        rows: One row per window, with the columns of `window_table`; in memory, or as a dataset on disk. A dict of
            columns, for a few windows, saves the conversion to Arrow.
        truncated: Number of texts that lost tokens; also an attribute.

    Attributes:
        keys: The arguments of the model that a batch has, such as "input_ids".
        lengths: Number of tokens of each window, as an array.
        text: Index of each window's text, as an array.
        window: Index of each window within its text, as an array.
    """

    def __init__(self, rows: WindowColumns | pa.Table | datasets.Dataset, truncated: int = 0) -> None:
        self._rows, self.truncated = rows, truncated
        self._tokens: dict[str, Sequence[Any] | Ragged] = {}
        if isinstance(rows, dict):
            for key in filter(rows.__contains__, TOKEN_KEYS):
                self._tokens[key] = rows[key]
            self.lengths = np.array(list(map(len, rows["input_ids"])))
            self.text, self.window = np.array(rows["text"]), np.array(rows["window"])
        else:
            column = self._table.column
            self._tokens |= {key: Ragged(column(key)) for key in TOKEN_KEYS if key in rows.column_names}
            self.lengths = cast("Ragged", self._tokens["input_ids"]).lengths
            self.text, self.window = column("text").to_numpy(), column("window").to_numpy()
        self.keys = tuple(self._tokens)

    @cached_property
    def _table(self) -> pa.Table:
        if isinstance(self._rows, dict):
            return window_table(self._rows)
        return self._rows if isinstance(self._rows, pa.Table) else self._rows.data.table

    def __reduce__(self) -> tuple[type[Encoded], tuple[WindowColumns | pa.Table | datasets.Dataset, int]]:
        return Encoded, (self._rows, self.truncated)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def texts(self) -> int:
        """Number of texts."""
        return int(self.text[-1]) + 1 if len(self) else 0

    @cached_property
    def offsets(self) -> Column:
        """For each window, the character range (start, end) of each token in the text; (0, 0) outside `token_ranges`.

        The list of a window is empty if the texts were tokenised without offsets.
        """
        in_memory = isinstance(self._rows, dict | pa.Table)
        rows = dataset_of([self._table.select(["offsets"])]) if in_memory else cast("datasets.Dataset", self._rows)
        return Column(rows, ["offsets"], pairs_of)

    @cached_property
    def token_ranges(self) -> list[TokenRange]:
        """For each window, where the tokens of the text stand in it.

        For pairs that are cut into windows, these are the tokens of the second text. For other pairs, they are those
        before the special token that follows the first text; without one, those of both texts. For blocks: all tokens.
        """
        return list(map(TokenRange, *(self._table.column(name).to_pylist() for name in TokenRange._fields)))

    @cached_property
    def digest(self) -> str:
        """A hash of all tokens and of their division into windows."""
        tokens = b"".join(Ragged(self._table.column(key)).digest() for key in self.keys)
        return hashlib.blake2b(tokens, digest_size=16).hexdigest()

    def token(self, window: int, position: int) -> int:
        """Return the token id at a position of a window."""
        return int(self._tokens["input_ids"][window][position])

    def batch(self, rows: Sequence[int], fill: Mapping[str, int]) -> dict[str, Tensor]:
        """Return windows, by index, as a model's arguments: tensors (int64) `[batch, tokens]`, padded on the right.

        `fill` is argument -> padding value; the default is 0.
        """
        return {key: pad(list(map(tokens.__getitem__, rows)), fill.get(key, 0)) for key, tokens in self._tokens.items()}


@dataclass(frozen=True)
class Windows:
    """Tokenised texts as rows that a model reads, with their padding; base class of the inputs of tasks on texts.

    Attributes:
        encoded: Windows of texts, or blocks of joined texts.
        processor: The tokenizer, or a processor that contains one; it determines the padding values.
        equal_lengths: Whether all rows of a batch must have the same length; see `for_model`.
    """

    encoded: Encoded
    processor: Processor
    equal_lengths: bool = field(default=False, kw_only=True)

    @property
    def lengths(self) -> Any:  # an array, which pyright does not take for the sequence of int that `Inputs` has  # noqa: ANN401
        """Tokens of each row, as an array of int64."""
        return self.encoded.lengths

    @property
    def uncacheable(self) -> str | None:
        """Why states cannot be cached, as text; None if a batch has only ids, a mask and token types."""
        keys = set(self.encoded.keys)
        if "attention_mask" in keys and keys <= _CACHED:
            return None
        return f"the inputs are {', '.join(self.encoded.keys)}; only texts with an attention mask are cached"

    @property
    def digest(self) -> str:
        """A hash of the tokens and of their division into rows; another one if a batch has rows of one length only."""
        return self.encoded.digest + "-equal" * self.equal_lengths

    def for_model(self, model: nn.Module) -> Self:
        """Return these inputs, with `equal_lengths` set if padding would change the results of the model."""
        varies = len(set(self.lengths.tolist())) > 1
        return replace(self, equal_lengths=True) if varies and reads_padding(model) else self

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:  # noqa: ARG002  alike in every epoch
        """Return a model's arguments for the rows with these indices; see `Encoded.batch`. `epoch` is unused."""
        return self.encoded.batch(rows, padding_of(self.processor))


def length_limit(model: PreTrainedModel, processor: Processor, asked: int | None = None) -> int:
    """Return the maximum number of tokens in a window, special tokens included.

    Raises ConfigError if `asked` is below 1 or above the limit.

    Args:
        model: The model, whose position table or config may have a limit.
        processor: The model's tokenizer, which may have a lower limit.
        asked: The length that the user asks for; it is returned. None: the limit of model and tokenizer, or 512 if they
            have none.
    """
    allowed = int(min(position_limit(model), getattr(tokenizer_of(processor), "model_max_length", UNLIMITED)))
    if asked is None:
        return allowed if allowed < UNLIMITED else _FALLBACK_TOKENS
    if not 1 <= asked <= allowed:
        rule = f"model and tokenizer take 1 to {allowed}" if allowed < UNLIMITED else "it must be positive"
        raise ConfigError(f"encode: max_length is {asked}; {rule}.")
    return asked


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

    If the tokenizer makes no token of a text (GPT-2's makes none of ""), the text becomes a single start token (or end
    or padding token, if there is none), which the model attends to. Lone surrogates in texts are replaced.

    Args:
        texts: Texts, or pairs of texts.
        processor: A tokenizer, or a processor that contains one.
        max_length: Maximum number of tokens in a window, special tokens included.
        windows: Whether to cut a longer text into several windows. False: the tokenizer truncates it on its own side (a
            pair: the longer text), and it counts as truncated. With windows, the second text of a pair is cut, and
            every window begins with the first text. A first text longer than half a window (without special tokens) is
            cut to that half, and the pair counts as truncated. Offsets and token ranges are those of the second text.
            If the tokenizer puts no separator between the two, the second text continues the first, as when a model
            writes a reply: a start token, a mark ("▁") or a space before the second text is left out.
        stride: With `windows`, number of tokens that neighbouring windows share. None: a quarter of `max_length`, or
            the text's part of a window minus one if that is less.
        offsets: Whether to store the character range of each token; slow tokenizers give none. Only token tasks need
            them; they take much memory.
        add_prefix_space: Whether to put a space before each text, if the tokenizer is byte-level BPE (as RoBERTa's) and
            puts none itself. Offsets refer to the text without the space. A second text that continues the first gets
            none.

    Returns:
        The windows, in memory or in a temporary file if they are large. The tokenizer's settings are as before.

    Raises:
        ConfigError: If `max_length` leaves no room for text. With `windows` also if the tokenizer is slow; if `stride`
            is negative or not smaller than the text's part of a window; or if a text fills a window and the installed
            version of tokenizers loses windows.
        DataError: If windows of more than 64 MiB cannot be written to a temporary file.
    """
    tokenizer = tokenizer_of(processor)
    has_pairs = bool(texts) and not isinstance(texts[0], str)
    room = _check_room(tokenizer, max_length, pairs=has_pairs)
    options: TokenizerOptions = {
        "truncation": True,
        "max_length": max_length,
        "return_special_tokens_mask": True,
        "return_offsets_mapping": offsets and tokenizer.is_fast,
    }
    if windows:
        if not tokenizer.is_fast:
            problem = "is a slow tokenizer; token tasks need character offsets, which only fast ones give"
            raise ConfigError(f"encode: {type(tokenizer).__name__} {problem}. Use a model that has a fast one.")
        options |= _window_options(room, stride, max_length, pairs=has_pairs)
    truncated: list[int] = []
    space = add_prefix_space and _needs_prefix_space(tokenizer)
    frame = frame_of(tokenizer) if windows and has_pairs else None  # None: second texts do not continue the first ones

    def by_chunk() -> Iterator[WindowColumns]:
        for start in range(0, max(1, len(texts)), CHUNK):
            part = texts[start : start + CHUNK]
            if frame:
                columns, count = _read_replies(tokenizer, part, frame, options, space=space, room=room)
            else:
                half = room // 2 if windows and has_pairs else None
                columns, count = _read_texts(tokenizer, part, options, space=space, half=half)
            if columns:
                columns["text"] = [start + text for text in columns["text"]]
            truncated.append(count)
            yield columns

    with _unchanged(tokenizer, windows=windows):
        chunked = by_chunk()
        first = next(chunked)
        if 0 < len(first.get("text", ())) <= _FEW and len(texts) <= CHUNK:  # one chunk holds all texts
            return Encoded(first, sum(truncated))
        return Encoded(join_tables(map(window_table, itertools.chain([first], chunked))), sum(truncated))


def encode_replies(
    pairs: Sequence[tuple[str, str]], processor: Processor, *, max_length: int, add_prefix_space: bool = False
) -> tuple[Encoded, list[list[int]]]:
    """Tokenise prompts, each followed by its reply, and tell which tokens are those of the reply.

    The prompt's tokens are those that the model reads before it writes the reply. A reply has no start token, mark or
    space of its own in front; see `joined_pairs`. The tokenizer's settings are as before.

    Args:
        pairs: Prompts and replies.
        processor: A fast tokenizer, or a processor that contains one.
        max_length: Maximum number of tokens of a pair, special tokens included. Longer ones are truncated.
        add_prefix_space: As in `encode`, for the prompts.

    Returns:
        The pairs, one row each, without offsets; and for each row 1 at the tokens of the reply, and 0 at others.

    Raises:
        ConfigError: If `max_length` leaves no room for text.
        DataError: If rows of more than 64 MiB cannot be written to a temporary file.
    """
    tokenizer = tokenizer_of(processor)
    _check_room(tokenizer, max_length, pairs=False)
    space = add_prefix_space and _needs_prefix_space(tokenizer)
    marks, truncated = list[list[int]](), list[int]()

    def by_chunk() -> Iterator[pa.Table]:
        for start in range(0, max(1, len(pairs)), CHUNK):
            part = pairs[start : start + CHUNK]
            spaced = [(str(_spaced(first)), second) for first, second in part] if space else part
            columns, own, count = joined_pairs(tokenizer, spaced, max_length=max_length)
            marks.extend(own)
            truncated.append(count)
            yield window_table({**columns, "text": [start + text for text in columns["text"]]} if own else {})

    with _unchanged(tokenizer, windows=False):
        return Encoded(join_tables(by_chunk()), sum(truncated)), marks


def _check_room(tokenizer: Tokenizer, max_length: int, *, pairs: bool) -> int:
    """Return how many tokens of text fit into `max_length`, beside special tokens; raise ConfigError if none does."""
    room = max_length - tokenizer.num_special_tokens_to_add(pair=pairs)
    if room < 1:
        raise ConfigError(f"encode: max_length is {max_length}; the special tokens alone are {max_length - room}.")
    return room


def _read_replies(
    tokenizer: Tokenizer, pairs: Sequence[Text], frame: Frame, options: TokenizerOptions, *, space: bool, room: int
) -> tuple[WindowColumns, int]:
    """Return pairs whose second texts continue the first ones as windows, and the number of first texts that were cut.

    `space` says whether the first texts get a space in front, `room` how many tokens of both texts a window holds.
    """
    both = [(str(first), str(second)) for first, second in pairs]
    spaced = [(str(_spaced(first)), second) for first, second in both] if space else both
    cut, count = _cut_first_texts(tokenizer, spaced, room // 2)
    columns = continued_windows(tokenizer, cut, frame, room=room, shared=int(options["stride"]))
    if not options["return_offsets_mapping"]:
        columns["offsets"] = [[]] * len(columns["text"])
    return columns, count


def _read_texts(
    tokenizer: Tokenizer, texts: Sequence[Text], options: TokenizerOptions, *, space: bool, half: int | None
) -> tuple[WindowColumns, int]:
    """Return texts or pairs as windows, and the number of those that lost tokens.

    `space` says whether each text gets a space in front. `half` is the maximum number of tokens of a first text, if the
    second texts of pairs are cut into windows; otherwise None.
    """
    spaced = list(map(_spaced, texts)) if space else texts
    spaced, count = (spaced, 0) if half is None else _cut_first_texts(tokenizer, spaced, half)
    output = _call(tokenizer, spaced, options)
    size = int(options["max_length"])
    is_full = max(map(len, output["input_ids"]), default=0) >= size  # a text fills a window
    if is_full and "stride" in options:
        check_tokenizers()
    elif is_full:  # texts that fill a window are tokenised again, to see whether tokens are missing
        full = [text for text, row in zip(spaced, output["input_ids"], strict=True) if len(row) >= size]
        count = sum(len(row) > size for row in _call(tokenizer, full, {})["input_ids"])
    is_second = half is not None
    if options["return_offsets_mapping"] and space:
        _shift_offsets(output, texts, spaced, side=int(is_second))
    return _windows(tokenizer, output, shared=int(options.get("stride", 0)), is_second=is_second), count


@cache
def check_tokenizers() -> None:
    """Raise ConfigError if the installed version of tokenizers loses windows of long texts, as 0.23.1 and 0.23.2 do."""
    words = tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    words.enable_truncation(1)
    if len(words.encode("a a a").overflowing) != 2:
        problem = f"tokenizers {tokenizers.__version__} loses the windows of long texts but the first one or two"
        raise ConfigError(f"encode: {problem}. Run: pip install 'tokenizers!=0.23.1,!=0.23.2'")


def _window_options(room: int, stride: int | None, max_length: int, *, pairs: bool) -> TokenizerOptions:
    """Return the further options, besides the length, with which a tokenizer cuts texts into overlapping windows.

    `room` is the number of tokens of a window besides special tokens; the second text of a pair gets at least half.
    `encode` describes the other arguments, and the ConfigError for a wrong `stride`.
    """
    room = room - room // 2 if pairs else room
    shared = min(max_length // 4, room - 1) if stride is None else stride
    if not 0 <= shared < room:
        rule = f"windows hold {room} tokens of a text, so they can share 0 to {room - 1}"
        raise ConfigError(f"encode: stride is {stride}; {rule}.")
    side = {"truncation": "only_second"} if pairs else {}
    return {"stride": shared, "return_overflowing_tokens": True, **side}


def _cut_first_texts(tokenizer: Tokenizer, pairs: Sequence[Text], max_tokens: int) -> tuple[list[tuple[str, str]], int]:
    """Return pairs with first texts cut to at most `max_tokens` tokens, and the number of first texts that were cut."""
    options = {"truncation": False, "return_offsets_mapping": True, "add_special_tokens": False}
    spans = _call(tokenizer, [str(first) for first, _ in pairs], options).get("offset_mapping", ())
    long = [row for row, tokens in enumerate(spans) if len(tokens) > max_tokens]
    shortened = [(str(first), str(second)) for first, second in pairs]
    for row in long:
        first, second = shortened[row]
        shortened[row] = (first[: spans[row][max_tokens - 1][1]] if max_tokens else "", second)
    return shortened, len(long)


def _needs_prefix_space(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer is a fast byte-level BPE that does not put a space before the first word itself."""
    step = getattr(getattr(tokenizer, "backend_tokenizer", None), "pre_tokenizer", None)
    state = {} if step is None else json.loads(step.__getstate__())
    steps = state.get("pretokenizers", [state])
    return any(part.get("type") == "ByteLevel" and not part["add_prefix_space"] for part in steps)


def _spaced(text: Text) -> Text:
    """Return a text, or both texts of a pair, with a space in front; one that is empty or begins with a space stays."""
    if not isinstance(text, str):
        first, second = (str(_spaced(part)) for part in text)
        return first, second
    return f" {text}" if text and not text[0].isspace() else text


def _shift_offsets(output: TokenizerOutput, texts: Sequence[Text], spaced: Sequence[Text], *, side: int) -> None:
    """Shift the offsets in a tokenizer's `output`, in place, so that they refer to the texts without the added space.

    `texts` lack the space, `spaced` have it. `side` is 0 or 1: the text of a pair to which the offsets belong.
    """
    pairs = zip(texts, spaced, strict=True)
    before_after = [[text if isinstance(text, str) else text[side] for text in pair] for pair in pairs]
    numbers = output.get("overflow_to_sample_mapping") or range(len(texts))
    for spans, text in zip(output.get("offset_mapping", ()), numbers, strict=False):
        if before_after[text][0] != before_after[text][1]:
            spans[:] = [(max(0, start - 1), max(0, end - 1)) for start, end in spans]


def blocks(texts: Sequence[str], processor: Processor, *, max_length: int, add_prefix_space: bool = False) -> Encoded:
    """Tokenise texts, join them and cut the result into blocks of `max_length` tokens.

    Texts keep their special tokens; a block may begin and end inside a text. Only the last block may be shorter. Raises
    DataError if blocks of more than 64 MiB cannot be written to a temporary file.

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
    """Tokenise texts, join their tokens, and yield tables (see `window_table`) of blocks of `max_length` tokens.

    Texts are tokenised by chunks, each text with its special tokens. The last block may be shorter. There is at least
    one table, which may be empty.
    """
    joined: dict[str, list[int]] = {}
    count = 0
    for part in itertools.chain(chunks(texts), [None]):
        for key, numbers in _call(tokenizer, part or (), {"truncation": False}).items():
            if key in TOKEN_KEYS:
                joined.setdefault(key, []).extend(itertools.chain.from_iterable(numbers))
        length = len(joined["input_ids"])
        whole = length if part is None else length - length % max_length
        starts = range(0, whole, max_length)
        columns: WindowColumns = {key: [row[at : at + max_length] for at in starts] for key, row in joined.items()}
        columns |= {"text": list(range(count, count + len(starts))), "stop": list(map(len, columns["input_ids"]))}
        columns |= {"offsets": [[]] * len(starts), **dict.fromkeys(("window", "start", "number"), [0] * len(starts))}
        joined = {key: row[whole:] for key, row in joined.items()}
        if starts or (part is None and not count):
            yield window_table(columns)
        count += len(starts)


@contextmanager
def _unchanged(tokenizer: Tokenizer, *, windows: bool) -> Iterator[None]:
    """Restore a tokenizer's truncation and padding settings at the end of the `with` block.

    Calls of the tokenizer change them, and `save_pretrained` would save them. With `windows`, texts are cut on the
    right inside the block, so that windows come in the order of the text.
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
        if backend is not None:
            backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
            if padding:
                backend.enable_padding(**padding)


def _call(tokenizer: Tokenizer, texts: Sequence[Text], options: Mapping[str, object]) -> TokenizerOutput:
    """Call a tokenizer with texts or pairs of texts; return its output. For no texts, "input_ids" is empty.

    `options` are keyword arguments of the tokenizer. Lone surrogates in texts are replaced, because tokenizers refuse
    them.
    """
    if not texts:
        return {"input_ids": []}
    sides = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    columns = [list(map(encodable, map(str, side))) for side in sides]
    return tokenizer(*columns, return_attention_mask=True, verbose=False, **options)


def _windows(tokenizer: Tokenizer, output: TokenizerOutput, *, shared: int, is_second: bool) -> WindowColumns:
    """Return the windows in one `output` of a tokenizer as columns of a `window_table`.

    "text" counts the texts in `output` from 0. `shared` is the number of tokens that neighbouring windows share. A text
    without tokens gets a start token, as in `encode`. With `is_second`, offsets and token ranges belong to the second
    texts of pairs.
    """
    columns: WindowColumns = defaultdict(list)
    keys = [key for key in TOKEN_KEYS if key in output]
    texts = output.get("overflow_to_sample_mapping") or range(len(output["input_ids"]))
    for i, text in enumerate(texts):
        tokens = {key: output[key][i] for key in keys}
        spans = output["offset_mapping"][i] if "offset_mapping" in output else []
        others = [side != 1 for side in output.sequence_ids(i)] if is_second else output["special_tokens_mask"][i]
        others = [*others, 1]  # the text ends before the first special token after it, or at the end of the window
        first = others.index(0) if 0 in others else 0
        own = range(first, others.index(1, first))  # positions of the tokens of the text
        if not tokens["input_ids"]:
            tokens = {key: [int(key == "attention_mask")] for key in keys} | {"input_ids": [start_token(tokenizer)]}
            spans = [(0, 0)] * ("offset_mapping" in output)
        window = number = 0
        if i and texts[i - 1] == text:  # the next window of the same text
            window = columns["window"][-1] + 1
            number = columns["number"][-1] + columns["stop"][-1] - columns["start"][-1] - shared
        edges = list[int]()
        for at, span in enumerate(spans):
            edges += span if at in own else (0, 0)
        place = {"text": text, "window": window, "start": own.start, "stop": own.stop, "number": number}
        for name, cell in {**tokens, "offsets": edges, **place}.items():
            columns[name].append(cell)
    return columns
