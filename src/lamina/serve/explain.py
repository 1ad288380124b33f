"""Explain readers' answers: how much each layer and token contributed, and how long the readers take."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypedDict, final

import torch

from lamina.bank.layer_amounts import layer_amounts
from lamina.data.batches import tokenizer_of
from lamina.errors import NotFiniteError
from lamina.fusion.base import InputWeighted
from lamina.layers.preserve import evaluating
from lamina.serve.workers import ReaderWorker

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.data.batches import Budget
    from lamina.layers.types import Batch
    from lamina.prediction.predict import Prepared
    from lamina.train.plan import Group

_ROUNDS, _SPARE_S = 9, 0.1  # maximum timed passes after the first, and the seconds that they may take together
_DIGITS = 6  # digits of a share after the point


class PassSeconds(TypedDict):
    """Seconds of a pass over one text without and with its readers, up to the highest layer that they need."""

    without_readers: float
    with_readers: float


class TaskExplanation(TypedDict):
    """The contributions of layers and tokens to one reader's answer. `importance` and `contributions` each sum to 1.

    Keys:
        layers: Indices of the layers that the reader reads.
        importance: Learned share of each of these layers. None: the fusion has none, or its shares depend on the input.
        tokens: The text's tokens as the model reads them; None for images and audio.
        contributions: Share of each layer and token in this answer, `[layers][tokens]`; None for images and audio, and
            if the reader's fusion cannot compute it.
    """

    layers: list[int]
    importance: list[float] | None
    tokens: list[str] | None
    contributions: list[list[float]] | None


class Explanation(TypedDict):
    """The response of `/explain`: in `seconds` the time of a pass, in `tasks` the explanation of each answer."""

    seconds: PassSeconds
    tasks: dict[str, TaskExplanation]


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

        `budget` is not used. Raises NotFiniteError if a contribution is NaN or infinite.
        """
        yield from ()
        with evaluating(self.bank), torch.no_grad():
            return [self._explanation(prepared)]

    def _explanation(self, prepared: Prepared) -> Explanation:
        """Return the explanation of one text. If readers need several passes, the times of these are added.

        Raises NotFiniteError if a contribution is NaN or infinite.
        """
        seconds = PassSeconds(without_readers=0.0, with_readers=0.0)
        tasks: dict[str, TaskExplanation] = {}
        for group in prepared.groups:
            batch = {name: value.to(self.bank.device) for name, value in group.inputs.batch([0]).items()}
            tokens, amounts = self._tokens(batch), layer_amounts(self.bank, [*group.tasks], batch)
            tasks |= {name: self._task(name, tokens, amounts[name]) for name in group.tasks}
            measured = self._timed(group, batch)
            seconds["without_readers"] += measured["without_readers"]
            seconds["with_readers"] += measured["with_readers"]
        return {"seconds": seconds, "tasks": {name: tasks[name] for name in self.names}}

    def _tokens(self, batch: Batch) -> list[str] | None:
        """Return the text of each token in a batch of one row; None for images and audio."""
        if "input_ids" not in batch:
            return None
        tokenizer = tokenizer_of(self.bank.processor)
        return [tokenizer.decode([number]) for number in batch["input_ids"][0].tolist()]

    def _task(self, name: str, tokens: list[str] | None, amounts: Tensor | None) -> TaskExplanation:
        """Return the explanation of the answer of the reader `name` about a text. The answer is not a part of it.

        `tokens` are the text's tokens; None for images and audio. `amounts` are the contributions `[layers, tokens]`,
        which are scaled to sum to 1; None if the reader's fusion cannot compute them. Without tokens, no contributions
        are returned. Raises NotFiniteError if a contribution is NaN or infinite.
        """
        reader = self.bank[name]
        # A fusion whose weights depend on the input has no importance that holds for all texts.
        learned = {} if isinstance(reader.fusion, InputWeighted) else reader.importance()
        if amounts is not None and not bool(amounts.isfinite().all()):
            raise NotFiniteError(f"serve: a layer's contribution is NaN or infinite for reader '{name}'.", name=name)
        shares: list[list[float]] | None = None
        if amounts is not None and tokens is not None:
            shares = [[round(share, _DIGITS) for share in row] for row in (amounts / amounts.sum()).tolist()]
        return {
            "layers": list(reader.layers),
            "importance": [round(share, _DIGITS) for share in learned.values()] or None,
            "tokens": tokens,
            "contributions": shares,
        }

    def _timed(self, group: Group, batch: Batch) -> PassSeconds:
        """Time passes over a batch; return the shortest time without readers, and with the readers of `group`.

        Both kinds of pass end at the highest layer that the readers need. The first pass of each kind also warms up.
        Further passes take at most a tenth of a second in all, because other requests wait meanwhile.
        """
        top: dict[str, list[int]] = {}
        for reader in (self.bank[name] for name in group.tasks):
            top[reader.stack] = [max(*reader.layers, *top.get(reader.stack, [0]))]

        def bare() -> float:
            return self._seconds(lambda: self.bank.record_states(top, batch))

        def full() -> float:
            return self._seconds(lambda: self.bank(**batch, readers=[*group.tasks]))

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
