"""Why readers say what they say of one text: the layers and tokens they take it from, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.bank.layer_amounts import layer_amounts
from lamina.data.batches import tokenizer_of
from lamina.errors import NotFiniteError
from lamina.fusion.base import InputWeighted
from lamina.layers.preserve import evaluating
from lamina.serve.uploads import plain
from lamina.serve.workers import Worker, predictor_of

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.batches import Budget
    from lamina.prediction.predict import Prepared
    from lamina.train.groups import Group

_ROUNDS, _SPARE_S = 9, 0.1  # of timed passes after the first, as many as take no longer
_DIGITS = 6


@final
class ExplainWorker(Worker):
    """What readers took their answers from; each text has passes of its own. Of a long one, its first window."""

    def __init__(self, bank: ReaderBank, names: tuple[str, ...]) -> None:
        self.bank, self._names = bank, names
        self._predictor = predictor_of(bank, names)

    def read(self, texts: Sequence[Any]) -> _Each:
        """As the answers of each text by itself are read."""
        return _Each(self._predictor.prepare(plain([text])) for text in texts)

    def run(self, prepared: _Each, budget: Budget) -> list[dict[str, Any]]:  # noqa: ARG002  a text is never too much
        """Per text "seconds" (of a pass without and with the readers) and "tasks", each as `_task` gives it."""
        with evaluating(self.bank), torch.no_grad():
            return [self._explained(own) for own in prepared]

    @property
    def max_length(self) -> int:
        """As for the answers."""
        return min(self._predictor.max_length([name]) for name in self._names)

    def _explained(self, prepared: Prepared) -> dict[str, Any]:
        seconds = {"without_readers": 0.0, "with_readers": 0.0}
        tasks: dict[str, Any] = {}
        for group in prepared.groups:
            batch = {name: value.to(self.bank.device) for name, value in group.inputs.batch([0]).items()}
            tokens, amounts = self._tokens(batch), layer_amounts(self.bank, [*group.tasks], batch)
            tasks |= {name: self._task(name, tokens, amounts[name]) for name in group.tasks}
            taken = self._timed(group, batch)
            seconds = {what: seconds[what] + taken[what] for what in seconds}
        return {"seconds": seconds, "tasks": {name: tasks[name] for name in self._names}}

    def _tokens(self, batch: Mapping[str, Tensor]) -> list[str] | None:
        """As the model reads them; None of what is no text."""
        if "input_ids" not in batch:
            return None
        tokenizer = tokenizer_of(self.bank.processor)
        return [tokenizer.decode([number]) for number in batch["input_ids"][0].tolist()]

    def _task(self, name: str, tokens: list[str] | None, amounts: Tensor | None) -> dict[str, Any]:
        """Layers with learned "importance" and "contributions" `[layers][tokens]`: shares of 1, None if it has none."""
        reader = self.bank[name]
        learned = {} if isinstance(reader.fusion, InputWeighted) else reader.importance()
        if amounts is not None and not bool(amounts.isfinite().all()):
            raise NotFiniteError(f"serve: what reader '{name}' takes from the layers is NaN or infinite.", name=name)
        shares = None if amounts is None or tokens is None else _rounded((amounts / amounts.sum()).tolist())
        return {
            "layers": list(reader.layers),
            "importance": [round(share, _DIGITS) for share in learned.values()] or None,
            "tokens": tokens,
            "contributions": shares,
        }

    def _timed(self, group: Group, batch: Mapping[str, Tensor]) -> dict[str, float]:
        """Least seconds of a pass up to the highest layer that is read, without the readers and with them."""
        top: dict[str, list[int]] = {}
        for reader in (self.bank[name] for name in group.tasks):
            top[reader.stack] = [max(*reader.layers, *top.get(reader.stack, [0]))]
        runs: dict[str, Callable[[], object]] = {
            "without_readers": lambda: self.bank.record_states(top, batch),
            "with_readers": lambda: self.bank(**batch, readers=[*group.tasks]),
        }
        taken = {what: self._seconds(run) for what, run in runs.items()}
        for _ in range(min(_ROUNDS, int(_SPARE_S / sum(taken.values())))):  # others wait meanwhile
            taken = {what: min(taken[what], self._seconds(run)) for what, run in runs.items()}
        return taken

    def _seconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if self.bank.device.type == "cuda":
            torch.cuda.synchronize(self.bank.device)
        return time.perf_counter() - start


class _Each(list[Any]):
    @property
    def tokens(self) -> int:
        return sum(prepared.tokens for prepared in self)

    @property
    def cut(self) -> int:
        return sum(prepared.cut for prepared in self)


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(share, _DIGITS) for share in row] for row in rows]
