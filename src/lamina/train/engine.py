"""The engine: trains any number of learners, step by step, on accelerate's `Accelerator`."""

from __future__ import annotations

import math
import random
import statistics
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator

from lamina.errors import ConfigError, MissingExtraError
from lamina.tasks.metrics import LOWER
from lamina.train.learner import BASE
from lamina.train.plan import batches, parts_of
from lamina.train.scoring import autocast, score
from lamina.utils import barrier, derive_seed, rank, world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from lamina.tasks.task import Task
    from lamina.train.checkpoint import Checkpoints
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Group, Plan, Step
    from lamina.train.subjects import Subject

_SHOWN = 6  # learners in a line of progress


def start_accelerator(options: FitOptions, output: Path | None) -> Accelerator:
    """The device, the processes of the run, and its trackers.

    Mixed precision is the engine's own (`autocast`), since accelerate fixes it once for a whole process.

    Raises:
        ConfigError: If the precision needs a GPU and there is none, or events have nowhere to go.
        MissingExtraError: If TensorBoard is not installed.
    """
    if options.precision == "float16" and not torch.cuda.is_available():
        raise ConfigError(
            "fit: precision is 'float16' and there is no GPU; only there it is faster and safe. Use 'bfloat16'."
        )
    if not options.tensorboard:
        return Accelerator(cpu=not torch.cuda.is_available())
    if output is None:
        raise ConfigError("fit: tensorboard is set but no output folder; events are written there.")
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingExtraError.of(error, op="fit", extra="tensorboard") from error
    return Accelerator(cpu=not torch.cuda.is_available(), log_with="tensorboard", project_dir=output)


class Engine:
    """Trains learners; clipping, schedule, best weights and early stop are each learner's own.

    Args:
        subject: What is trained.
        learners: Its learners, a base that is trained along last.
        plan: The order of the rows.
        validation: Labelled rows to choose the best epoch by.
        options: Everything else.
        accelerator: Device, processes, trackers.
        checkpoints: Where checkpoints go; None: there are none.

    Attributes:
        history: One row per learner and epoch, with every score.
        importances: One row per learner, epoch and layer, for fusions that mix layers.
        steps: Steps taken.
    """

    def __init__(
        self,
        subject: Subject,
        learners: Sequence[Learner],
        plan: Plan,
        validation: Sequence[Group],
        *,
        options: FitOptions,
        accelerator: Accelerator,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.subject, self.plan, self.validation, self.options = subject, plan, validation, options
        self.base = next((one for one in learners if one.name == BASE), None)
        self.learners = {one.name: one for one in learners if one.name != BASE}
        self.tasks: dict[str, Task] = {name: task for group in plan.groups for name, task in group.tasks.items()}
        self.history: list[dict[str, Any]] = []
        self.importances: list[dict[str, Any]] = []
        self.steps = 0
        self._accelerator, self._checkpoints = accelerator, checkpoints
        self._epoch, self._at = 0, 0
        self._scaler = torch.amp.GradScaler(subject.device.type) if options.precision == "float16" else None

    @property
    def everyone(self) -> list[Learner]:
        """All learners, a base that is trained along last."""
        return [*self.learners.values(), *([] if self.base is None else [self.base])]

    def run(self) -> None:
        """Train to the end, and put the weights that are kept in place."""
        self._accelerator.init_trackers("events")
        if self._checkpoints is not None:
            found = self._checkpoints.begin(resume=self.options.resume)
            if found is not None:
                self._restore(*found)
        with _kept_randomness(), _put_back(self.everyone, self.subject.modules), self._bar() as bar:
            while self._epoch < self.plan.last_epoch():
                self._run_epoch(bar)
        for learner in self.everyone:
            learner.load(learner.best)

    def _run_epoch(self, bar: Any) -> None:
        steps = self.plan.epoch(self._epoch)
        active = {number: self.plan.active(number, self._epoch) for number in range(len(self.plan.groups))}
        parts = [self._parts(step.rows) for step in steps[self._at :]]
        jobs = [
            (self.plan.groups[step.group].inputs, rows, step.epoch)
            for step, some in zip(steps[self._at :], parts, strict=True)
            for rows, _ in some
        ]
        made = batches(jobs, self.options.num_workers)
        for module in self.subject.modules:
            module.train()
        for step, some in zip(steps[self._at :], parts, strict=True):
            self.step(step, active[step.group], [(rows, counts, next(made)) for rows, counts in some])
            self.steps, self._at = self.steps + 1, self._at + 1
            bar.update()
            if self.options.save_steps and self.steps % self.options.save_steps == 0 and self._at < len(steps):
                self.save()
        if steps:
            self.score({name for names in active.values() for name in names}, bar)
        self._epoch, self._at = self._epoch + 1, 0
        if steps:
            self.save()

    def _parts(self, rows: Sequence[int]) -> list[tuple[list[int], bool]]:
        count = self.options.gradient_accumulation_steps * world_size()
        return parts_of(rows, count, rank(), world_size())

    def step(self, step: Step, names: tuple[str, ...], parts: list[tuple[list[int], bool, dict[str, Tensor]]]) -> None:
        """Take one step of the learners of a group.

        Args:
            step: Which.
            names: The learners that take part.
            parts: This process's rows, whether they count, and their batch.
        """
        group, learners = self.plan.groups[step.group], [self.learners[name] for name in names]
        if self.base is not None:
            learners.append(self.base)
        if self.subject.draws:  # so that a run that resumes needs no record of torch's random numbers
            _seed(derive_seed(self.options.seed, "step", self.steps, rank()))
        labels = [group.labels(rows, batch.pop("labels", None), names) for rows, _, batch in parts]
        weights = self._weights(names, labels, [counts for _, counts, _ in parts], len(step.rows))
        for number, (rows, _, batch) in enumerate(parts):
            states = None if group.states is None else group.states.batch(rows)
            with autocast(self.subject.device, self.options.precision):
                losses = torch.stack(self.subject.losses(batch, labels[number], names, states))
                loss = losses.sum() if weights is None else (losses * weights[number].to(losses)).sum()
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        self._add_gradients(learners)
        for learner in learners:
            self._update(learner)
        if self._scaler is not None:
            self._scaler.update()

    def _weights(
        self, names: Sequence[str], labels: Sequence[Mapping[str, Tensor]], counts: Sequence[bool], rows: int
    ) -> Tensor | None:
        """Share of the step's labels `[parts, learners]` that each part holds; None where one part holds them all."""
        parts = self.options.gradient_accumulation_steps * world_size()
        if parts == 1:
            return None
        found = torch.tensor(
            [
                [self.subject.count(name, some[name]) if valid else 0.0 for name in names]
                for some, valid in zip(labels, counts, strict=True)
            ],
            dtype=torch.float32,
        )
        total = found.sum(0)
        if world_size() > 1:
            total = self._accelerator.reduce(total.to(self._accelerator.device), "sum").cpu()  # pyright: ignore
        even = torch.tensor([[float(valid) / min(parts, rows)] for valid in counts])  # of a step without labels
        return torch.where(total > 0, found / total.clamp(min=1e-30), even)

    def _add_gradients(self, learners: Sequence[Learner]) -> None:
        """Sum the gradients of all processes, in place; all of them have the same ones."""
        if world_size() == 1:
            return
        gradients = [one.grad for learner in learners for one in learner.parameters if one.grad is not None]
        flat: Any = self._accelerator.reduce(torch.cat([one.flatten() for one in gradients]), "sum")
        for gradient, total in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def _update(self, learner: Learner) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(learner.optimizer)
        if self.options.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(learner.parameters, self.options.max_grad_norm)
        learner.step(self._scaler)

    # After an epoch

    def score(self, names: set[str], bar: Any) -> None:
        """Score every learner that learnt in this epoch, and let each draw its own conclusions."""
        found: dict[str, dict[str, float]] = {}
        for group in self.validation:
            if learnt := [name for name in group.names if name in names]:
                with autocast(self.subject.device, self.options.precision):
                    found |= score(
                        self.subject,
                        group,
                        learnt,
                        batch_size=self.options.scoring_batch_size,
                        num_workers=self.options.num_workers,
                    )
        for name, scores in found.items():
            self.history.append({"reader": name, "epoch": self._epoch + 1, **scores})
            for layer, share in self.subject.importance(name).items():
                row = {"reader": name, "epoch": self._epoch + 1, "layer": layer, "importance": share}
                self.importances.append(row)
        self._conclude(found)
        self._tell(found, bar)

    def _conclude(self, found: Mapping[str, dict[str, float]]) -> None:
        if self.base is not None:
            self._conclude_together(self.base, found)
            return
        for name, scores in found.items():
            learner = self.learners[name]
            learner.record(self._epoch, scores)
            if self._end_epoch(name, stopped=learner.progress.stopped is not None):
                learner.begin_stage()
            if learner.progress.stopped is not None:
                self.plan.stopped[name] = learner.progress.stopped

    def _conclude_together(self, base: Learner, found: Mapping[str, dict[str, float]]) -> None:
        """Where the base is trained too there is one best epoch, and one stop: by the mean of the readers' scores."""
        metrics = {name: self.learners[name].metric for name in found}
        signed = [found[name][metric] * (-1 if metric in LOWER else 1) for name, metric in metrics.items()]
        if base.record(self._epoch, {"mean": statistics.fmean(signed)}):
            for name, scores in found.items():
                self.learners[name].keep(self._epoch, scores)
        stopped = base.progress.stopped is not None
        if advanced := {name for name in found if self._end_epoch(name, stopped=stopped)}:
            for learner in self.everyone:
                learner.begin_stage(schedule=learner.name in advanced)
        for name in found:
            progress = self.learners[name].progress
            progress.scale, progress.stopped = base.progress.scale, base.progress.stopped
            if base.progress.stopped is not None:
                self.plan.stopped[name] = base.progress.stopped

    def _end_epoch(self, name: str, *, stopped: bool) -> bool:
        """Let a learner whose training has stages go on to the next, which an early stop brings forward."""
        done = (self._epoch + 1) / self.plan.epochs[name]
        if not self.subject.end_epoch(name, math.nextafter(1, 0) if stopped and done < 1 else done):
            return False
        self.learners[name].forget()
        return True

    # What is told and kept

    @contextmanager
    def _bar(self) -> Iterator[Any]:
        from tqdm.auto import tqdm

        hidden = not self.options.progress or rank() > 0
        with tqdm(total=len(self.plan), initial=self.steps, disable=hidden, unit="step") as bar:
            yield bar

    def _tell(self, found: Mapping[str, dict[str, float]], bar: Any) -> None:
        values = {f"{name}/{key}": value for name, scores in found.items() for key, value in scores.items()}
        self._accelerator.log(values, step=self.steps)
        if not bar.disable:
            shown = [f"{name} {scores[self.learners[name].metric]:.3f}" for name, scores in found.items()]
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            bar.write(f"epoch {self._epoch + 1}: {', '.join(shown[:_SHOWN])}{more}", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint, where they are kept."""
        if self._checkpoints is None:
            return
        if rank() == 0:
            tensors = {f"{one.name}/{key}": value for one in self.everyone for key, value in one.to_tensors().items()}
            progress = {
                "position": [self._epoch, self._at, self.steps],
                "learners": {one.name: one.to_json() for one in self.everyone},
                "stopped": self.plan.stopped,
                "history": self.history,
                "importances": self.importances,
                "scaler": None if self._scaler is None else self._scaler.state_dict(),
            }
            self._checkpoints.save(self.steps, tensors, progress)
        barrier()

    def _restore(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        self._epoch, self._at, self.steps = progress["position"]
        self.history[:], self.importances[:] = progress["history"], progress["importances"]
        self.plan.stopped.update(progress["stopped"])
        if self._scaler is not None and progress["scaler"]:
            self._scaler.load_state_dict(progress["scaler"])
        for learner in self.everyone:
            start = f"{learner.name}/"
            own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            learner.from_tensors(own, progress["learners"][learner.name])


def _seed(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def _kept_randomness() -> Iterator[None]:
    """Give the global generators back as they were."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])


@contextmanager
def _put_back(learners: Sequence[Learner], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give modules back as they were, but for their weights; meanwhile nothing but what is learnt has gradients."""
    modes = [(one, one.training) for module in modules for one in module.modules()]
    parameters = [one for module in modules for one in module.parameters()]
    flags = [one.requires_grad for one in parameters]
    learnt = {id(one) for learner in learners for one in learner.parameters}
    for parameter in parameters:
        parameter.requires_grad_(id(parameter) in learnt)
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None
