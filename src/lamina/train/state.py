"""How far each reader has come: its best score and weights, its stalls, its learning rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lamina.tasks.kinds import better
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lamina.train.options import TrainOptions

BASE = ".base"  # stands among the readers' names for a base that is trained too; no reader's name has a dot


@dataclass
class ReaderState:
    """One reader's progress; everything but `weights` is JSON-ready.

    Attributes:
        metric: The metric that counts; `lamina.tasks.kinds.better` knows its direction.
        scores: All metrics at the best epoch.
        best_epoch: Counted from 1; 0 before the first score.
        stalled: Epochs since the score last rose.
        cooled: Epochs since the score last rose or the plateau schedule last acted.
        scale: What the plateau schedule has multiplied the learning rate by.
        done: Optimiser steps taken.
        began: Of those, the ones before the present stage (see `Fusion.advance`).
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
    began: int = 0
    step: int = 0
    stopped: int | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    def record(self, epoch: int, scores: dict[str, float], options: TrainOptions, rate: float) -> bool:
        """Take in the scores after `epoch` (from 0): whether they are the best, and whether to slow down or stop."""
        if not self.best_epoch or better(self.metric, scores[self.metric], self.scores[self.metric]):
            self.scores, self.best_epoch, self.stalled, self.cooled = dict(scores), epoch + 1, 0, 0
            return True
        self.stalled += 1
        self.cooled += 1
        if isinstance(options, FitOptions) and options.schedule == "plateau" and self.cooled > options.plateau_patience:
            self.scale = max(self.scale * options.plateau_factor, min(1.0, options.min_learning_rate / rate))
            self.cooled = 0
        if options.patience is not None and self.stalled >= options.patience:
            self.stopped = epoch
        return False

    def begin_stage(self, *, schedule: bool = True) -> None:
        """Start afresh, but for the count of steps: what was best before does not compare with what follows.

        Args:
            schedule: Whether the learning rate starts again as well.
        """
        self.scores, self.best_epoch, self.weights = {}, 0, {}
        self.stalled, self.cooled, self.scale, self.stopped = 0, 0, 1.0, None
        self.began = self.done if schedule else self.began

    def to_json(self) -> dict[str, Any]:
        """Everything but the weights."""
        return {key: value for key, value in asdict(self).items() if key != "weights"}


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's tensors, on the CPU."""
    return {key: value.detach().clone().cpu() for key, value in module.state_dict().items()}


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
        state = self._states[name]
        total, done = self._totals[name] - state.began, state.done - state.began
        rise = int(total * self._options.warmup)
        if done < rise:
            share = (done + 1) / rise
        elif self._options.schedule == "linear":
            share = max(0.0, (total - done) / max(1, total - rise))
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
