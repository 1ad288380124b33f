"""Workers: each gives one kind of answer of a bank. It first tokenises texts, then runs the model."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    final,
    runtime_checkable,
)

import torch

from lamina.data.batches import length_batches
from lamina.data.encode import encode, length_limit
from lamina.errors import ConfigError, LaminaError, NotFiniteError
from lamina.layers.discovery import pick_stack
from lamina.layers.padding import reads_padding
from lamina.layers.preserve import evaluating
from lamina.layers.selectors import select
from lamina.layers.types import check_tokenizer, encodable, padding_of, tokenizer_of
from lamina.prediction.predict import Predictor, Prepared
from lamina.serve.uploads import Example, Upload, plain
from lamina.tasks import kind_of
from lamina.train.options import PassOptions
from lamina.utils import JSON

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.batches import Budget
    from lamina.data.encode import Encoded
    from lamina.layers.types import Tokenizer
    from lamina.tasks.base import Kind
    from lamina.train.bank_runner import AnswerEngine

Side: TypeAlias = Literal["left", "right"]  # the side on which a text that is too long loses tokens
# Whether a request allows cutting its texts; a side: only if the readers cut on that side.
Truncate: TypeAlias = bool | Side
# Held while a tokenizer runs. Truncation is a state of the tokenizer object that is set before each call, so two
# threads at once would cut each other's texts. There is one lock in the process, because banks may share a tokenizer.
# Who tokenises many texts releases it in between, so that others go on.
TOKENIZER_LOCK = RLock()
_GIVE_WAY_S = 1e-4  # seconds between parts of a request's texts, so that a thread that waits for the tokenizer gets it
_PIECE = 1 << 13  # characters that are tokenised at a time
_CHARACTERS = 8  # characters per token, more than in any usual text


class TooLongError(LaminaError):
    """Raised when a request has too many texts or tokens, or a text is longer than what is read and may not be cut."""


def _tokens(tokenizer: Tokenizer, *parts: str, **options: bool) -> Mapping[str, Any]:
    """Return the tokenizer's output for a text or a pair. `options` are passed to the tokenizer.

    By default, texts are not truncated and get no special tokens. Waits until no other thread uses a tokenizer.
    """
    with TOKENIZER_LOCK:
        whole = {"add_special_tokens": False, "truncation": False, "verbose": False, **options}
        return tokenizer(*map(encodable, parts), **whole)


def count_tokens(tokenizer: Tokenizer, text: str, most: int) -> tuple[int, bool]:
    """Return a text's number of tokens without special tokens, and whether the whole text was counted.

    Counting stops once the number exceeds `most`. The text is counted in pieces, which end at spaces if it has any, so
    that the number is exact for most texts.
    """
    count = start = 0
    while start < len(text) and count <= most:
        end = start + _PIECE
        space = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = space if space > 0 else end
        count += len(_tokens(tokenizer, text[start:end])["input_ids"])
        start = end
    return count, start >= len(text)


def near_end(tokenizer: Tokenizer, text: str, most: int, side: Side) -> str:
    """Return a part of a long text that is quick to tokenise, with the `most` tokens at one end that are read.

    `side` is where the text is cut: "left" keeps its end, "right" its start. The part has at least `2 * most` tokens,
    so the tokens that are read are the same as in the whole text. A short text is returned whole. Raises TooLongError
    if even a very long part has fewer tokens.
    """
    size = 2 * _CHARACTERS * most + _PIECE
    for end in (size, 4 * size):
        part = text[:end] if side == "right" else text[-end:]
        if len(text) <= end or count_tokens(tokenizer, part, 2 * most)[0] > 2 * most:
            return part
    came = f"a text has {len(text)} characters, of which {4 * size} are not even {2 * most} tokens"
    raise TooLongError(f"serve: {came}; it cannot be cut. Send a shorter text.")


def token_ends(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the positions in a text at which it may be cut: 0, and the end of each token that is not special.

    The tokenizer must be a fast one. [0] for a text without tokens.
    """
    return [0, *(end for _, end in _tokens(tokenizer, text, return_offsets_mapping=True)["offset_mapping"])]


def check_request(tokenizer: Tokenizer, texts: Sequence[Sequence[str]], limit: int, most: int | None = None) -> None:
    """Raise TooLongError if the texts of a request have more than `limit` tokens.

    If `most` is None, more than `8 * limit` characters are refused without counting tokens.

    Args:
        tokenizer: The tokenizer.
        texts: Single texts and pairs of texts, each as a sequence of one or two parts.
        limit: Number of tokens that a request may have.
        most: Maximum number of tokens that are read of a single text or pair; longer ones are cut. None: all are read.
    """
    if sum(len(part.encode(errors="replace")) + 4 for parts in texts for part in parts) <= limit:
        return  # a token has at least one byte
    characters = sum(len(part) for parts in texts for part in parts)
    if most is None and characters > _CHARACTERS * limit:
        rule = f"at most {_CHARACTERS * limit} are accepted, {_CHARACTERS} for each of {limit} tokens"
        raise TooLongError(f"serve: the request has {characters} characters; {rule}. Send fewer or shorter texts.")
    total, is_exact = 0, True
    for parts in texts:
        size = tokenizer.num_special_tokens_to_add(pair=len(parts) == 2)
        for part in parts:
            count, is_whole = count_tokens(tokenizer, part, limit - total if most is None else most)
            size, is_exact = size + count, is_exact and (is_whole or most is not None)
        total += size if most is None else min(size, most)
        if total > limit:
            exactly = "" if is_exact and parts is texts[-1] else "at least "
            came = f"the request has {exactly}{total} tokens"
            raise TooLongError(f"serve: {came}; at most {limit} are accepted. Send fewer or shorter texts.")


_ROWS = 4096  # maximum rows of a pass; in practice the budget of tokens limits a pass first
Prediction: TypeAlias = Mapping[str, JSON]  # task -> the prediction for one text, as `lamina.predict` returns it


@runtime_checkable  # so that annotations can be checked in tests
class Tokenised(Protocol):
    """The tokenised texts of a batch, which `Worker.read` returns and `Worker.run` takes."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts, without padding."""
        ...

    @property
    def cut(self) -> int:
        """Number of texts that were too long and were cut."""
        ...


TokenisedT = TypeVar("TokenisedT", bound=Tokenised)
AnswerT = TypeVar("AnswerT")


class Lengths(NamedTuple):
    """How many tokens of a text the readers read, special tokens included: one number per reader.

    `whole` has the numbers of readers of whole texts, which read only a part of a longer text. `windows` has those of
    readers of tokens, which read a longer text in windows of this length.
    """

    whole: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()


class Worker(ABC, Generic[TokenisedT, AnswerT]):
    """Answers one kind of question about texts (such as predictions or embeddings) with one bank.

    The scheduler calls `read` in one thread at a time, possibly while `run` works on another batch.

    Attributes:
        tasks: Names of the readers whose answers are counted; empty if there are none.
        bank: The bank that answers.
        texts_at_once: Maximum number of texts for `read`.
    """

    tasks: tuple[str, ...] = ()
    bank: ReaderBank
    texts_at_once: ClassVar[int] = 1024

    @abstractmethod
    def read(self, texts: Sequence[Example]) -> TokenisedT:
        """Tokenise texts, or read the headers of files, without running the model; return the result with its counts.

        Texts that are too long are cut.
        """

    @abstractmethod
    def run(self, prepared: TokenisedT, budget: Budget) -> Generator[None, None, Sequence[AnswerT]]:
        """Run the model in passes within `budget`; return a list with one answer per text.

        A generator: it yields between two passes, and may be continued in another thread.
        """

    def read_parts(self, texts: Sequence[Example]) -> tuple[list[TokenisedT], float]:
        """Read texts in parts of `texts_at_once`, for `answer`; return these, and the seconds that this took.

        The time of waiting for the tokenizer does not count. Raises the errors of `read`.
        """
        parts, seconds = list[TokenisedT](), 0.0
        for first in range(0, len(texts), self.texts_at_once):
            if parts:
                time.sleep(_GIVE_WAY_S)
            with TOKENIZER_LOCK:
                start = time.perf_counter()
                parts.append(self.read(texts[first : first + self.texts_at_once]))
                seconds += time.perf_counter() - start
        return parts, seconds

    def answer(self, parts: Sequence[TokenisedT], budget: Budget) -> Generator[None, None, list[AnswerT]]:
        """Run the model on the parts of a batch from `read_parts`; return one list with an answer per text.

        A generator like `run`, whose errors it raises.
        """
        answers: list[AnswerT] = []
        for part in parts:
            if answers:
                yield
            answers += yield from self.run(part, budget)
        return answers

    @cached_property
    def lengths(self) -> Lengths:
        """How many tokens of a text are read (see `Lengths`); here one number, that of the model, for all readers."""
        return Lengths((length_limit(self.bank.model, self.bank.processor),))

    @property
    def max_length(self) -> int:
        """Number of tokens up to which every reader reads a text whole, in one window: the least of `lengths`."""
        return min(self.lengths.whole + self.lengths.windows)

    @cached_property
    def side(self) -> Side | None:
        """The side on which texts that are too long are cut (default: the tokenizer's); None if the readers differ."""
        return tokenizer_of(self.bank.processor).truncation_side

    @property
    def window_length(self) -> int | None:
        """Number of tokens to which texts are cut, so that a reader reads one window at most. None: not needed."""
        return None

    def fit(self, texts: Sequence[Example], *, truncate: Truncate, limit: int) -> Sequence[Example]:
        """Cut texts to little more than the part that is read, so that tokenising is fast; return the texts.

        Args:
            texts: Texts, pairs or files; files are returned unchanged.
            truncate: Whether texts that are too long are cut. "left" or "right": they must be cut on this side. False:
                they are returned whole.
            limit: Number of tokens that the request may have.

        Raises:
            TooLongError: If all texts together have more than `limit` tokens, or a text is so long that it cannot be
                cut.
            ConfigError: If the bank has no tokenizer, the readers do not cut on the side that is asked for, or a text
                is too long and they cut on different sides, or at different lengths.
        """
        if any(isinstance(text, Upload) for text in texts):
            return texts
        parts = [[text] if isinstance(text, str) else [*text] for text in texts if not isinstance(text, Upload)]
        tokenizer = tokenizer_of(check_tokenizer(self.bank.processor))
        most, side = self.window_length or self.max_length, self.side
        if isinstance(truncate, str) and truncate != side:
            rule = "they cut on different sides" if side is None else f"they cut on the {side}"
            raise ConfigError(f"serve: texts are to be cut on the {truncate} for these readers; {rule}.")
        if truncate and side is not None:
            parts = [[near_end(tokenizer, part, most, side) for part in row] for row in parts]
        check_request(tokenizer, parts, limit, most if truncate and side is not None else None)
        if truncate and side is None:
            try:
                self.check_lengths(texts)
            except TooLongError as error:
                rule = "these readers cut such texts on different sides. Ask them in separate requests"
                raise ConfigError(f"serve: a text is too long; {rule}.") from error
        if truncate and self.window_length is not None and tokenizer.is_fast:  # windows need a fast one, as `read` says
            self._check_same_cut(parts)
            parts = [self._cut(row) for row in parts]
        return [row[0] if len(row) == 1 else (row[0], row[1]) for row in parts]

    def _check_same_cut(self, rows: Sequence[Sequence[str]]) -> None:
        """Raise ConfigError if a text is longer than the window of a reader of tokens, and another reader reads more.

        `rows` has a list for each text or pair of a request, with one or two texts.
        """
        shortest = min(self.lengths.windows)
        for number, parts in enumerate(rows if shortest < (self.window_length or 0) else ()):
            tokens = len(_tokens(tokenizer_of(self.bank.processor), *parts, add_special_tokens=True)["input_ids"])
            if tokens > shortest:
                rule = f"these readers cut texts at different lengths, {shortest} and {self.window_length} tokens"
                raise ConfigError(f"serve: text {number} is too long; {rule}. Ask them in separate requests.")

    def _cut(self, parts: Sequence[str]) -> list[str]:
        """Return a text or pair, cut so that readers of tokens need one window and others read the same as uncut.

        Readers of tokens read at most half a window of the first text of a pair. Tokenizers cut the longer text for the
        other readers, so the text that is longer must stay the longer one.
        """
        tokenizer = tokenizer_of(self.bank.processor)
        room = (self.window_length or 0) - tokenizer.num_special_tokens_to_add(pair=len(parts) == 2)
        # a token has at least one character, so a short text fits: it is not tokenised here. Outside ASCII, tokenizers
        # may replace a character by several.
        if all(part.isascii() and len(part) < room // len(parts) for part in parts):
            return list(parts)
        ends = [token_ends(tokenizer, part) for part in parts]
        counts = [len(places) - 1 for places in ends]
        most = [room]
        if len(parts) == 2:
            second = min(counts[1], room - min(counts[0], room // 2))
            most = [room if counts[0] > counts[1] else second, second]
        cut = zip(parts, ends, counts, most, strict=True)
        return [part[: places[max(0, limit)]] if limit < count else part for part, places, count, limit in cut]

    def check_lengths(self, texts: Sequence[Example]) -> None:
        """Raise TooLongError if a text, pair or file is longer than a reader reads; the message gives its index.

        Readers of tokens read texts in windows. They limit only the first text of a pair, to half a window.
        """
        tokenizer, (whole, windows) = tokenizer_of(self.bank.processor), self.lengths

        def check(what: str, most: int, *parts: str, special: bool = True) -> None:
            tokens = len(_tokens(tokenizer, *parts, add_special_tokens=special)["input_ids"])
            if tokens > most:
                rule = f"at most {most} are read. Send truncate=true to cut it"
                raise TooLongError(f"serve: {what} has {tokens} tokens; {rule}.")

        for number, text in enumerate(texts):
            if isinstance(text, Upload):
                ((part,), _) = self.read_parts([text])  # holds the lock: a processor of files may have a tokenizer
                if part.cut:
                    raise TooLongError(
                        f"serve: file {number} is longer than what is read. Send truncate=true to cut it."
                    )
                continue
            parts = [text] if isinstance(text, str) else text
            if windows and len(parts) == 2:
                half = (min(windows) - tokenizer.num_special_tokens_to_add(pair=True)) // 2
                check(f"the first text of pair {number}", half, parts[0], special=False)
            if whole:
                check(f"text {number}", min(whole), *parts)


AnyWorker: TypeAlias = Worker[Any, Any]  # a worker whose types of batch and answer do not matter


class ReaderWorker(Worker[Prepared, AnswerT]):
    """Base class of the workers that answer with the readers `names` of a bank. A subclass writes `run`."""

    def __init__(self, bank: ReaderBank, names: tuple[str, ...]) -> None:
        self.bank, self.names = bank, names
        # passes are limited by tokens, not by a number of rows
        self.predictor = Predictor(bank, PassOptions(batch_size=_ROWS), readers=names)

    def read(self, texts: Sequence[Example]) -> Prepared:
        """Encode texts as inputs of the model; files are decoded later, by `run`.

        Raises ConfigError if an example is not what a reader reads, and DataError if an audio file is empty.
        """
        return self.predictor.prepare(plain(texts))

    @cached_property
    def lengths(self) -> Lengths:
        """How many tokens of a text each reader reads."""
        whole, windows = list[int](), list[int]()
        for name in self.names:
            reads_windows = self._kind(name).per_token
            (windows if reads_windows else whole).append(self.predictor.max_length([name]))
        return Lengths(tuple(whole), tuple(windows))

    @cached_property
    def side(self) -> Side | None:
        """The side ("left" or "right") on which texts that are too long are cut; None if the readers differ."""
        sides: set[Side] = set()
        for kind in map(self._kind, self.names):
            own = tokenizer_of(self.bank.processor).truncation_side
            sides.add("left" if kind.keeps_end else "right" if kind.per_token else own)
        return sides.pop() if len(sides) == 1 else None

    def _kind(self, name: str) -> Kind:
        return kind_of(self.bank[name].config.head.kind)


@final
class PredictWorker(ReaderWorker[Prediction]):
    """Answers with the readers' predictions, in the form of `lamina.predict`.

    Args:
        bank: The readers and their model.
        tasks: Names of the readers.
        raw: Return logits in place of probabilities.
        engine: The engine that computes the answers. None: PyTorch.
    """

    def __init__(
        self, bank: ReaderBank, tasks: tuple[str, ...], *, raw: bool, engine: AnswerEngine | None = None
    ) -> None:
        super().__init__(bank, tasks)
        self.tasks, self._raw, self.predictor.engine = tasks, raw, engine

    def run(self, prepared: Prepared, budget: Budget) -> Generator[None, None, Sequence[Prediction]]:
        """Predict in passes within `budget`; return a list of predictions, one per text.

        A generator: it yields between two passes. Raises NotFiniteError if a reader gives NaN or infinity, DataError if
        a file cannot be decoded, and ConfigError if the frozen model has changed.
        """
        return self.predictor.answer_by_pass(prepared, raw=self._raw, budget=budget)

    @property
    def window_length(self) -> int | None:
        """Number of tokens to which texts are cut: the largest of `lengths`, over all readers.

        None if no reader reads in windows.
        """
        return max(self.lengths.whole + self.lengths.windows) if self.lengths.windows else None


class TokenisedTexts(NamedTuple):
    """Texts as token ids, each in one window, with the counts that the scheduler needs. It implements `Tokenised`."""

    encoded: Encoded
    tokens: int
    cut: int


@final
class EmbedWorker(Worker[TokenisedTexts, list[float]]):
    """Answers with embeddings: the mean of one layer's state over a text's tokens, special tokens included.

    The pass stops at that layer, which is one of the encoder if the model has several stacks.

    Raises ConfigError if the bank has no tokenizer, or its model has several stacks and no encoder; LayerIndexError if
    the layer does not exist.

    Args:
        bank: The bank whose model is run; its readers take no part.
        layer: Index of the layer; 0 is the embeddings, negative ones count from the top.
        normalize: Whether vectors are scaled to length 1.
    """

    def __init__(self, bank: ReaderBank, layer: int, *, normalize: bool) -> None:
        check_tokenizer(bank.processor)
        self.bank, self._normalize = bank, normalize
        self._stack = pick_stack(bank.stacks, None, op="serve")
        self._equal = reads_padding(bank.model)  # whether a batch needs texts of one length
        (self._layer,) = select(layer, self._stack.layers, op="serve")

    def read(self, texts: Sequence[Example]) -> TokenisedTexts:
        """Tokenise texts, each as one window, cut at the model's limit; ConfigError if that has no room for text."""
        words = [text for text in texts if not isinstance(text, Upload)]  # /embed accepts texts only
        encoded = encode(words, self.bank.processor, max_length=self.max_length, offsets=False)
        return TokenisedTexts(encoded, int(sum(encoded.lengths)), encoded.truncated)

    def run(self, prepared: TokenisedTexts, budget: Budget) -> Generator[None, None, list[list[float]]]:
        """Compute embeddings in passes within `budget`; return a list of vectors, one per text.

        A generator: it yields between two passes. Raises NotFiniteError if a vector has NaN or infinity, and
        ConfigError if the frozen model has changed.
        """
        encoded, lengths = prepared.encoded, [int(length) for length in prepared.encoded.lengths]
        vectors: dict[int, list[float]] = {}
        for number, rows in enumerate(length_batches(lengths, _ROWS, equal=self._equal, budget=budget)):
            if number:
                yield
            batch = encoded.batch(rows, padding_of(self.bank.processor))
            batch = {key: value.to(self.bank.device) for key, value in batch.items()}
            with evaluating(self.bank), torch.no_grad():
                states = self.bank.record_states({self._stack.name: [self._layer]}, batch)
            vectors |= zip(rows, self._pooled(states[self._stack.name][self._layer], batch), strict=True)
        return [vectors[row] for row in range(len(lengths))]  # passes are sorted by length, answers are not

    def _pooled(self, state: Float[Tensor, "batch tokens width"], batch: dict[str, Tensor]) -> list[list[float]]:
        """Return each text's mean state over its tokens, without padding; scaled to length 1 if `normalize` was set.

        `batch` has the attention mask. Raises NotFiniteError if a mean is NaN or infinite.
        """
        counted = batch["attention_mask"].bool().unsqueeze(-1)
        mean = state.float().masked_fill(~counted, 0.0).sum(1) / counted.sum(1)  # half precision could not hold the sum
        if not bool(mean.isfinite().all()):
            name = f"layer {self._layer}"
            raise NotFiniteError(f"serve: the mean state of {name} of a text is NaN or infinite.", name=name)
        return (torch.nn.functional.normalize(mean, dim=-1) if self._normalize else mean).tolist()
