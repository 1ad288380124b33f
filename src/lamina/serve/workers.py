"""What may be asked of a bank: answers of its readers, or a layer's states as embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.data.arrow import encodable
from lamina.data.batches import length_batches, padding_of, tokenizer_of
from lamina.data.encode import encode, length_limit
from lamina.errors import LaminaError, NotFiniteError
from lamina.layers.discovery import pick_stack
from lamina.layers.preserve import evaluating
from lamina.layers.selectors import select
from lamina.prediction.predict import Predictor
from lamina.serve.uploads import Upload, plain
from lamina.tasks.inputs import check_tokenizer
from lamina.train.options import PassOptions

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.batches import Budget
    from lamina.data.windows import Encoded

_ROWS = 4096  # of a pass, whatever their lengths


class TooLongError(LaminaError):
    """A text has more tokens than are read of it, and may not be cut."""


class Worker(ABC):
    """Reads texts, and runs what was read."""

    tasks: tuple[str, ...] = ()
    bank: ReaderBank

    @abstractmethod
    def read(self, texts: Sequence[Any]) -> Any:
        """Texts as tokens; what is given has `tokens`, how many, and `cut`, how many texts lost their end."""

    @abstractmethod
    def run(self, prepared: Any, budget: Budget) -> Sequence[Any]:
        """An answer for each text."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Tokens of a text that are read, special ones included."""

    def check_lengths(self, texts: Sequence[Any]) -> None:
        """Raise TooLongError for a text that would be cut."""
        for number, text in enumerate(texts):
            if isinstance(text, Upload):
                if self.read([text]).cut:
                    raise TooLongError(
                        f"serve: file {number} is longer than what is read. Send truncate=true to cut it."
                    )
                continue
            parts = [encodable(part) for part in ([text] if isinstance(text, str) else text)]
            tokens = len(tokenizer_of(self.bank.processor)(*parts, truncation=False, verbose=False)["input_ids"])
            if tokens > self.max_length:
                most = f"{self.max_length} are read"
                raise TooLongError(f"serve: text {number} has {tokens} tokens; {most}. Send truncate=true to cut it.")


def predictor_of(bank: ReaderBank, tasks: tuple[str, ...]) -> Predictor:
    """What reads texts and answers for some readers of a bank; how many rows a pass has is for a budget to say."""
    options = PassOptions(batch_size=_ROWS)
    return Predictor(bank, options, readers=tasks)


@final
class PredictWorker(Worker):
    """The answers of some readers, as `lamina.predict` gives them."""

    def __init__(self, bank: ReaderBank, tasks: tuple[str, ...], *, raw: bool) -> None:
        self.bank, self.tasks, self._raw = bank, tasks, raw
        self._predictor = predictor_of(bank, tasks)

    def read(self, texts: Sequence[Any]) -> Any:
        """As `Predictor.prepare`."""
        return self._predictor.prepare(plain(texts))

    def run(self, prepared: Any, budget: Budget) -> Sequence[Any]:
        """Per text, task -> answer."""
        return self._predictor.answer(prepared, raw=self._raw, budget=budget)

    @property
    def max_length(self) -> int:
        """As the readers were trained, if they say so; of several that which reads least."""
        return min(self._predictor.max_length([task]) for task in self.tasks)


@final
class EmbedWorker(Worker):
    """The mean over a text's tokens of one layer's state; the pass stops there."""

    def __init__(self, bank: ReaderBank, layer: int, *, normalize: bool) -> None:
        check_tokenizer(bank.processor)
        self.bank, self._normalize = bank, normalize
        self._stack = pick_stack(bank.stacks, None, op="serve")
        (self._layer,) = select(layer, self._stack.layers, op="serve")

    def read(self, texts: Sequence[Any]) -> _Read:
        """Texts as tokens, one window each."""
        return _Read(encode(texts, self.bank.processor, max_length=self.max_length, offsets=False))

    def run(self, prepared: _Read, budget: Budget) -> list[list[float]]:
        """A vector for each text."""
        encoded, lengths = prepared.encoded, [int(length) for length in prepared.encoded.lengths]
        vectors: list[Any] = [None] * len(lengths)
        for rows in length_batches(lengths, _ROWS, budget=budget):
            batch = {key: value.to(self.bank.device) for key, value in self._batch(encoded, rows).items()}
            with evaluating(self.bank), torch.no_grad():
                states = self.bank.record_states({self._stack.name: [self._layer]}, batch)
            for row, vector in zip(rows, self._pooled(states[self._stack.name][self._layer], batch), strict=True):
                vectors[row] = vector
        return vectors

    def _batch(self, encoded: Encoded, rows: Sequence[int]) -> dict[str, Tensor]:
        return encoded.batch(rows, padding_of(self.bank.processor))

    def _pooled(self, state: Float[Tensor, "batch tokens width"], batch: dict[str, Tensor]) -> list[list[float]]:
        counted = batch["attention_mask"].bool().unsqueeze(-1)
        mean = state.float().masked_fill(~counted, 0.0).sum(1) / counted.sum(1)  # half precision could not hold the sum
        if not bool(mean.isfinite().all()):
            name = f"layer {self._layer}"
            raise NotFiniteError(
                f"serve: {name} of a text is NaN or infinite; a vector is of finite numbers.", name=name
            )
        return (torch.nn.functional.normalize(mean, dim=-1) if self._normalize else mean).tolist()

    @property
    def max_length(self) -> int:
        """As many tokens as the model reads."""
        return length_limit(self.bank.model, self.bank.processor)


@final
class _Read:
    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self.tokens, self.cut = int(sum(encoded.lengths)), encoded.truncated
