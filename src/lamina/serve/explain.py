"""Explain readers' answers: how much each layer and token contributed, and how long the readers take."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, final

import torch

from lamina.bank.layer_amounts import layer_amounts
from lamina.errors import NotFiniteError
from lamina.fusion.input_weighted import InputWeighted
from lamina.layers.hooks import record_token_ids
from lamina.layers.preserve import evaluating
from lamina.layers.types import tokenizer_of
from lamina.serve.workers import ReaderWorker
from lamina.utils import JSONObject

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.data.batches import Budget
    from lamina.layers.types import Batch
    from lamina.prediction.predict import Prepared
    from lamina.train.plan import Group

_ROUNDS, _SPARE_S = 9, 0.1  # maximum timed passes after the first, and the seconds that they may take together
_DIGITS = 6  # digits of a share after the point


# The response of `/explain`: "seconds" has the times of `_timed`, "tasks" the explanation of each answer by `_task`.
Explanation: TypeAlias = JSONObject


@final
class ExplainWorker(ReaderWorker[Explanation]):
    """Explains readers' answers. Each text has passes of its own; only the first window of a long text is explained."""

    texts_at_once = 1

    def run(
        self,
        prepared: Prepared,
        budget: Budget,  # noqa: ARG002  passes have one text
    ) -> Generator[None, None, list[Explanation]]:
        """Explain a text; return a list with its explanation. A generator without a pause.

        An explanation has "seconds", the times "without_readers" and "with_readers" of `_timed`, and "tasks": reader's
        name -> "layers", "importance", "tokens" and "contributions", see `_task`. `budget` is not used. Raises
        NotFiniteError if a contribution is NaN or infinite, DataError if a file cannot be decoded, and ConfigError if
        the frozen model has changed.
        """
        yield from ()  # makes this a generator, as `Worker.run` is, without a pause between passes
        with evaluating(self.bank), torch.no_grad():
            return [self._explanation(prepared)]

    def _explanation(self, prepared: Prepared) -> Explanation:
        """Return the explanation of one text. If readers need several passes, the times of these are added.

        Raises NotFiniteError, DataError or ConfigError in the cases of `run`.
        """
        seconds = {"without_readers": 0.0, "with_readers": 0.0}
        tasks: JSONObject = {}
        for group in prepared.groups:
            batch = {name: value.to(self.bank.device) for name, value in group.inputs.batch([0]).items()}
            with record_token_ids(self.bank.model, self.bank.stacks.values(), batch) as ids:
                amounts = layer_amounts(self.bank, [*group.tasks], batch)
            tokens = {
                stack: [tokenizer_of(self.bank.processor).decode([number]) for number in read[0].tolist()]
                for stack, read in ids.items()
            }
            tasks |= {name: self._task(name, tokens.get(self.bank[name].stack), amounts[name]) for name in group.tasks}
            seconds = {kind: seconds[kind] + spent for kind, spent in self._timed(group, batch).items()}
        return {"seconds": dict(seconds), "tasks": {name: tasks[name] for name in self.names}}

    def _task(self, name: str, tokens: list[str] | None, amounts: Tensor | None) -> JSONObject:
        """Return the explanation of the answer of the reader `name` about a text. The answer is not a part of it.

        `tokens` are the text's as the reader's stack reads them; None for images and audio, and if `record_token_ids`
        has none for the stack. `amounts` are the contributions to the answer, `[layers, tokens]`. None: the reader's
        fusion cannot compute them.

        Returns:
            "layers": indices of the layers that the reader reads. "importance": learned share of each of these layers,
            all together 1; None if the fusion has none, or its shares depend on the input. "tokens": as given.
            "contributions": share of each layer and token in this answer, `[layers][tokens]`, all together 1; None
            without tokens or amounts, and if all amounts are 0.

        Raises:
            NotFiniteError: If a contribution is NaN or infinite.
        """
        reader = self.bank[name]
        # A fusion whose weights depend on the input has no importance that holds for all texts.
        learned = {} if isinstance(reader.fusion, InputWeighted) else reader.importance()
        if amounts is not None and not bool(amounts.isfinite().all()):
            raise NotFiniteError(f"serve: a layer's contribution is NaN or infinite for reader '{name}'.", name=name)
        shares: list[list[float]] | None = None
        if amounts is not None and tokens is not None and bool(amounts.any()):
            shares = [[round(share, _DIGITS) for share in row] for row in (amounts / amounts.sum()).tolist()]
        return {
            "layers": list(reader.layers),
            "importance": [round(share, _DIGITS) for share in learned.values()] or None,
            "tokens": tokens,
            "contributions": shares,
        }

    def _timed(self, group: Group, batch: Batch) -> dict[str, float]:
        """Return the shortest seconds of passes over a batch, "without_readers" and "with_readers" (those of `group`).

        Both kinds of pass end at the highest layer that the readers need. The first pass of each kind also warms up.
        Further passes take at most a tenth of a second in all, because other requests wait meanwhile.
        """
        top: dict[str, list[int]] = {}
        for reader in (self.bank[name] for name in group.tasks):
            top[reader.stack] = [max(*reader.layers, *top.get(reader.stack, [0]))]

        bare = partial(self._seconds, partial(self.bank.record_states, top, batch))
        full = partial(self._seconds, partial(self.bank, **batch, readers=[*group.tasks]))
        alone, together = bare(), full()
        for _ in range(min(_ROUNDS, int(_SPARE_S / (alone + together)))):
            alone, together = min(alone, bare()), min(together, full())
        return {"without_readers": alone, "with_readers": together}

    def _seconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        if self.bank.device.type == "cuda":
            torch.cuda.synchronize(self.bank.device)
        return time.perf_counter() - start
