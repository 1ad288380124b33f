"""How far each reader has come: its best score and weights, its stalls, its learning rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lamina.bank import ReaderModule
    from lamina.train.options import FitOptions


@dataclass
class ReaderState:
    """One reader's progress; everything but `weights` is JSON-ready.

    Attributes:
        metric: The metric that counts; greater is better.
        scores: All metrics at the best epoch.
        best_epoch: Counted from 1; 0 before the first score.
        stalled: Epochs since the score last rose.
        cooled: Epochs since the score last rose or the plateau schedule last acted.
        scale: What the plateau schedule has multiplied the learning rate by.
        done: Optimiser steps taken.
        step: The reader's count of training passes, which fixes its dropout.
        stopped: The epoch (from 0) after which it stopped early; None while it goes on.
        weights: The reader's tensors at the best epoch.
    """

    metric: str
    scores: dict[str, float] = field(default_factory=dict)
    best_epoch: int = 0
    stalled: int = 0
    cooled: int = 0
    scale: float = 1.0
    done: int = 0
    step: int = 0
    stopped: int | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    def record(
        self, epoch: int, scores: dict[str, float], reader: ReaderModule, options: FitOptions, rate: float
    ) -> None:
        """Take in the scores after `epoch` (from 0): keep the best, and see whether to slow down or stop."""
        if not self.best_epoch or scores[self.metric] > self.scores[self.metric]:
            self.scores, self.best_epoch, self.stalled, self.cooled = dict(scores), epoch + 1, 0, 0
            self.weights = {key: value.detach().clone().cpu() for key, value in reader.state_dict().items()}
            return
        self.stalled += 1
        self.cooled += 1
        if options.schedule == "plateau" and self.cooled > options.plateau_patience:
            self.scale = max(self.scale * options.plateau_factor, min(1.0, options.min_learning_rate / rate))
            self.cooled = 0
        if options.patience is not None and self.stalled >= options.patience:
            self.stopped = epoch

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {key: value for key, value in asdict(self).items() if key != "weights"}


class Schedules:
    """Each reader's learning rate over its own steps; stands where the trainer keeps its scheduler.

    Args:
        optimizer: Each of its parameter groups has the name of its "reader". (The groups themselves are replaced when
            a run resumes, so they are looked up every time.)
        states: Reader name -> progress.
        rates: Reader name -> highest learning rate.
        totals: Reader name -> steps it takes if it does not stop early.
        options: Names the schedule.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        states: dict[str, ReaderState],
        rates: dict[str, float],
        totals: dict[str, int],
        options: FitOptions,
    ) -> None:
        self._optimizer, self._states, self._rates = optimizer, states, rates
        self._totals, self._options = totals, options
        self.active: tuple[str, ...] = ()
        self.apply()

    def rate(self, name: str) -> float:
        """The reader's learning rate for its next step."""
        state, total = self._states[name], self._totals[name]
        rise = int(total * self._options.warmup)
        if state.done < rise:
            share = (state.done + 1) / rise
        elif self._options.schedule == "linear":
            share = max(0.0, (total - state.done) / max(1, total - rise))
        else:
            share = state.scale
        return self._rates[name] * share

    def apply(self) -> None:
        """Set every group's learning rate."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.rate(group["reader"])

    def step(self) -> None:
        """Count a step of the readers that took part in it."""
        for name in self.active:
            self._states[name].done += 1
        self.apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate of every group, as the trainer asks for it."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the readers' progress is saved by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the rates from the readers' progress, which was loaded before."""
        del state
        self.apply()
