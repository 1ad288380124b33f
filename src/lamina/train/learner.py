"""Whatever is trained: its parameters and their rates, its schedule, its best epoch, its stop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lamina.bank import ReaderModule
from lamina.errors import StoreError
from lamina.tasks.metrics import better

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lamina.train.options import FitOptions

BASE = ".base"  # the learner of a base that is trained along; no reader's name has a dot


@dataclass
class Progress:
    """How far a learner has come, JSON-ready."""

    scores: dict[str, float] = field(default_factory=dict)  # all metrics of the weights that are kept
    best_epoch: int = 0  # their epoch, counted from 1; 0 before the first score
    top: float | None = None  # the best score so far
    stalled: int = 0  # epochs since the score last rose
    cooled: int = 0  # epochs since the score last rose or the plateau schedule last acted
    scale: float = 1.0  # what the plateau schedule has multiplied the learning rate by
    done: int = 0  # optimiser steps taken
    began: int = 0  # of those, the ones before the present stage (see `Fusion.on_epoch_end`)
    stopped: int | None = None  # the epoch (from 0) after which it stopped early; None while it goes on
    step: int = 0  # a reader's count of training passes, which fixes its dropout


class Learner:
    """A module that is trained: a reader, a base that is trained along, or a whole model.

    Its parameter groups have their highest rates as "lr"; the metric picks the best epoch; `total` is the number of
    steps it takes if it does not stop early.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[dict[str, Any]],
        *,
        metric: str,
        total: int,
        options: FitOptions,
    ) -> None:
        self.name, self.module, self.metric, self.total = name, module, metric, total
        self._options = options
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.rates = [float(group["lr"]) for group in groups]
        self.optimizer = _optimizer(groups, options)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}  # its tensors at the epoch that is kept; none with `keep="last"`
        learnt = {id(parameter) for parameter in self.parameters}
        named = module.named_parameters(remove_duplicate=False)
        self._frozen = {key for key, parameter in named if id(parameter) not in learnt}

    def factor(self) -> float:
        """The share of its highest rates that it takes its next step with."""
        options, progress = self._options, self.progress
        total, done = self.total - progress.began, progress.done - progress.began
        rise = int(total * options.warmup_ratio) if options.warmup_steps is None else options.warmup_steps
        if done < rise:
            return (done + 1) / rise
        if options.schedule == "linear":
            return max(0.0, (total - done) / max(1, total - rise))
        if options.schedule == "cosine":
            return (1 + math.cos(math.pi * min(1.0, (done - rise) / max(1, total - rise)))) / 2
        return progress.scale

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Take a step with the gradients that are there, and let them go; `scaler` undoes what it did to them."""
        factor = self.factor()
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        self.progress.done += 1

    def record(self, epoch: int, scores: dict[str, float]) -> bool:
        """Take in the scores after `epoch` (from 0), and slow down or stop; whether these weights are those to keep.

        A learner without rows to be scored on has no scores, and keeps its last weights.
        """
        if not scores:
            self.keep(epoch, scores)
            return True
        progress, options, score = self.progress, self._options, scores[self.metric]
        rose = progress.top is None or better(self.metric, score, progress.top)
        if rose:
            progress.top, progress.stalled, progress.cooled = score, 0, 0
        else:
            progress.stalled += 1
            progress.cooled += 1
            if options.schedule == "plateau" and progress.cooled > options.plateau_patience:
                lowest = min(1.0, options.min_learning_rate / max(self.rates))
                progress.scale, progress.cooled = max(progress.scale * options.plateau_factor, lowest), 0
            if options.early_stopping_patience is not None and progress.stalled >= options.early_stopping_patience:
                progress.stopped = epoch
        if keep := rose or options.keep == "last":
            self.keep(epoch, scores)
        return keep

    def keep(self, epoch: int, scores: dict[str, float]) -> None:
        """Keep the weights as they are now."""
        self.progress.scores, self.progress.best_epoch = dict(scores), epoch + 1
        self.best = self.tensors() if self._options.keep == "best" else {}

    def importance(self) -> dict[int, float]:
        """Layer -> share, of a reader that mixes layers."""
        return self.module.importance() if isinstance(self.module, ReaderModule) else {}

    def restart_importance(self) -> None:
        """Have a reader whose fusion counts what it weighs count from here."""
        if isinstance(self.module, ReaderModule):
            self.module.restart_importance()

    def end_epoch(self, done: float) -> bool:
        """Let a reader whose epochs are `done` to a share go on to its next stage; whether parameters start afresh."""
        afresh = isinstance(self.module, ReaderModule) and self.module.on_epoch_end(done)
        if afresh:
            self.optimizer.state.clear()
        return afresh

    def begin_stage(self, *, schedule: bool = True) -> None:
        """Start afresh, but for the count of steps and perhaps the schedule: scores before and after do not compare."""
        done, began = self.progress.done, self.progress.began
        self.progress = Progress(done=done, began=done if schedule else began)
        self.best = {}

    def tensors(self) -> dict[str, Tensor]:
        """A copy, on the CPU, of every tensor that training may change."""
        state = self.module.state_dict()
        return {key: value.detach().clone().cpu() for key, value in state.items() if key not in self._frozen}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        if tensors:
            self.module.load_state_dict(tensors, strict=False)

    # For checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """About how much `to_tensors` gives once it has learnt."""
        state = {key: value.nbytes for key, value in self.module.state_dict().items() if key not in self._frozen}
        moments = self._options.moments * sum(parameter.nbytes for parameter in self.parameters)
        return (2 if self._options.keep == "best" else 1) * sum(state.values()) + moments

    def to_tensors(self) -> dict[str, Tensor]:
        """Everything but the progress: weights, the best ones, and the optimiser's state."""
        tensors = {f"now/{key}": value for key, value in self.tensors().items()}
        tensors |= {f"best/{key}": value for key, value in self.best.items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{number}/{key}"] = value.detach().cpu().clone()
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def from_tensors(self, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Take up what a checkpoint holds."""
        parts: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
        for key, value in tensors.items():
            part, _, rest = key.partition("/")
            parts[part][rest] = value
        shapes = {key: value.shape for key, value in self.module.state_dict().items() if key not in self._frozen}
        for part in ("now", "best") if parts["best"] else ("now",):
            if {key: value.shape for key, value in parts[part].items()} != shapes:
                what = f"the checkpoint has other tensors than '{self.name}'; another version of lamina wrote it"
                raise StoreError(f"resume: {what}. Train without resume.")
        self.load(parts["now"])
        self.best = parts["best"]
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in parts["optimizer"].items():
            number, _, name = key.partition("/")
            state.setdefault(int(number), {})[name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.progress = Progress(**progress)
        if isinstance(self.module, ReaderModule):
            self.module.step = self.progress.step

    def to_json(self) -> dict[str, Any]:
        """The progress."""
        if isinstance(self.module, ReaderModule):
            self.progress.step = self.module.step
        return asdict(self.progress)


def _optimizer(groups: Sequence[dict[str, Any]], options: FitOptions) -> Optimizer:
    fused = groups[0]["params"][0].device.type in ("cpu", "cuda")
    if options.optimizer == "sgd":
        return torch.optim.SGD(list(groups), momentum=options.momentum, fused=fused)
    kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    return kind(list(groups), eps=options.adam_epsilon, fused=fused)
