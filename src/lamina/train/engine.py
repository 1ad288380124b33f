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

from lamina.errors import ConfigError, MissingExtraError, NotFiniteError
from lamina.layers.nan_checks import first_non_finite
from lamina.layers.preserve import evaluating, preserve_randomness
from lamina.tasks.metrics import LOWER
from lamina.train.learner import BASE
from lamina.train.plan import batches, parts_of
from lamina.train.scoring import autocast, eval_mode, score
from lamina.utils import barrier, derive_seed, rank, seed_torch, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from lamina.train.base import Runner
    from lamina.train.checkpoint import Checkpoints
    from lamina.train.groups import Group
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Plan, Step

_SHOWN = 6  # learners in a line of progress


def start_accelerator(options: FitOptions, output: Path | None) -> Accelerator:
    """The device, the processes of the run, and its trackers.

    Mixed precision is the engine's own (`autocast`), since accelerate fixes it once for a whole process.
    """
    check_device(options, output)
    cpu = not torch.cuda.is_available()
    if not options.tensorboard:
        return Accelerator(cpu=cpu)
    return Accelerator(cpu=cpu, log_with="tensorboard", project_dir=output)


def check_device(options: FitOptions, output: Path | None) -> None:
    """Raise an error unless this machine has what the options ask for."""
    if options.precision == "float16" and not torch.cuda.is_available():
        raise ConfigError("fit: precision is 'float16' and there is no GPU, which it needs. Use 'bfloat16'.")
    if not options.tensorboard:
        return
    if output is None:
        raise ConfigError("fit: tensorboard is set but no output folder; events are written there.")
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingExtraError.of(error, op="fit", extra="tensorboard") from error


class Engine:
    """Trains learners; clipping, schedule, best weights and early stop are each learner's own.

    The plan orders the rows to learn from; the best epochs are chosen by the scores on `validation`.
    """

    def __init__(
        self,
        runner: Runner,
        learners: Sequence[Learner],
        plan: Plan,
        validation: Sequence[Group],
        *,
        options: FitOptions,
        accelerator: Accelerator,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.runner, self.plan, self.validation, self.options = runner, plan, validation, options
        self.everyone = list(learners)  # a base that is trained along last
        self.learners = {learner.name: learner for learner in learners}
        self.base = self.learners.pop(BASE, None)
        self.history: list[dict[str, Any]] = []  # a row per learner and epoch, with every score
        self.importances: list[dict[str, Any]] = []  # see `FitResult.importances`
        self.steps = 0
        self._accelerator, self._checkpoints = accelerator, checkpoints
        self._epoch, self._at = 0, 0
        self._parts = options.gradient_accumulation_steps * world_size()  # of a step
        self._guard = DivergenceGuard(runner)
        self._scaler = torch.amp.GradScaler(runner.device.type, enabled=options.precision == "float16")

    def run(self) -> None:
        """Train to the end, and put the weights that are kept in place."""
        self._accelerator.init_trackers("events")
        state = None if self._checkpoints is None else self._checkpoints.begin(resume=self.options.resume)
        if state is not None:
            self._restore(*state)
        elif self.options.importance_steps:
            for learner in self.everyone:
                learner.restart_importance()
                self._note_importance(learner)
        with preserve_randomness(), _put_back(self.everyone, self.runner.modules), self._bar() as bar:
            while self._epoch < self.plan.last_epoch():
                self._run_epoch(bar)
        for learner in self.everyone:
            learner.load(learner.best)

    def _run_epoch(self, bar: Any) -> None:
        steps = self.plan.epoch(self._epoch)
        groups = self.plan.groups
        active = [self.plan.active(number, self._epoch) for number in range(len(groups))]
        left = [(step, parts_of(step.rows, self._parts, rank(), world_size())) for step in steps[self._at :]]
        jobs = [(groups[step.group].inputs, rows, step.epoch) for step, parts in left for rows, _ in parts]
        loader = batches(jobs, self.options.num_workers)
        for module in self.runner.modules:
            module.train()
            for part in module.modules():
                if _is_still(part):
                    part.eval()
        for step, parts in left:
            self.step(step, active[step.group], [(rows, counts, next(loader)) for rows, counts in parts])
            self.steps, self._at = self.steps + 1, self._at + 1
            bar.update()
            if self.options.save_steps and self.steps % self.options.save_steps == 0 and self._at < len(steps):
                self._guard.check_weights(self.everyone, self.steps)
                self.save()
        if steps:
            self._guard.check_weights(self.everyone, self.steps)
            self.score({name for names in active for name in names}, bar)
        self._epoch, self._at = self._epoch + 1, 0
        if steps:
            self.save()

    def step(self, step: Step, names: tuple[str, ...], parts: list[tuple[list[int], bool, dict[str, Tensor]]]) -> None:
        """Take one step of some learners of a group; the parts are this process's rows, whether they count, a batch."""
        group = self.plan.groups[step.group]
        learners = [self.learners[name] for name in names] + ([] if self.base is None else [self.base])
        every = self.options.importance_steps
        noted = [learner for learner in learners if every and (learner.progress.done + 1) % every == 0]
        for learner in noted:
            learner.restart_importance()
        if self.runner.draws:  # so that a run that resumes needs no record of torch's random numbers
            _seed(derive_seed(self.options.seed, "step", self.steps, rank()))
        labels = [group.labels(rows, batch.pop("labels", None), names) for rows, _, batch in parts]
        parts_losses: list[Tensor] = []
        weights = self._weights(names, labels, [counts for _, counts, _ in parts], len(step.rows))
        for number, (rows, _, batch) in enumerate(parts):
            states = None if group.states is None else group.states.batch(rows)
            with autocast(self.runner, self.options):
                losses = torch.stack(self.runner.losses(batch, labels[number], names, states))
                loss = losses.sum() if weights is None else (losses * weights[number].to(losses)).sum()
            parts_losses.append(losses.detach())
            self._scaler.scale(loss).backward()
        self._add_gradients(learners)
        norms = self._clip(learners)
        self._guard.note(self.steps + 1, [learner.name for learner in learners], parts_losses, norms)
        for learner in learners:
            learner.step(self._scaler)
        self._scaler.update()
        for learner in noted:
            self._note_importance(learner)

    def _note_importance(self, learner: Learner, epoch: int | None = None) -> None:
        """Take down the share of each layer, after an epoch (from 1) or a step."""
        when = {"reader": learner.name, "epoch": epoch, "step": learner.progress.done}
        for layer, share in learner.importance().items():
            self.importances.append({**when, "layer": layer, "importance": share})

    def _clip(self, learners: Sequence[Learner]) -> list[Tensor]:
        """Clip the gradients of each learner; their norms, but for float16, whose scaler skips what is not finite."""
        norms: list[Tensor] = []
        for learner in learners:
            self._scaler.unscale_(learner.optimizer)
            if limit := self.options.max_grad_norm:
                norms.append(torch.nn.utils.clip_grad_norm_(learner.parameters, limit))
        return [] if self._scaler.is_enabled() else norms

    def _weights(
        self, names: Sequence[str], labels: Sequence[Mapping[str, Tensor]], counts: Sequence[bool], rows: int
    ) -> Tensor | None:
        """Share of the step's labels `[parts, learners]` that each part holds; None where one part holds them all."""
        if self._parts == 1:
            return None
        own = torch.zeros(len(counts), len(names))
        for number, valid in enumerate(counts):
            if valid:
                own[number] = torch.tensor([self.runner.count(name, labels[number][name]) for name in names])
        total = own.sum(0)
        if world_size() > 1:
            total = self._accelerator.reduce(total.to(self._accelerator.device), "sum").cpu()  # pyright: ignore
        even = torch.tensor([[float(valid) / min(self._parts, rows)] for valid in counts])  # of a step without labels
        return torch.where(total > 0, own / total.clamp(min=1e-30), even)

    def _add_gradients(self, learners: Sequence[Learner]) -> None:
        """Sum the gradients of all processes, in place; all of them have the same ones."""
        if world_size() == 1:
            return
        parameters = [parameter for learner in learners for parameter in learner.parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat: Any = self._accelerator.reduce(torch.cat([gradient.flatten() for gradient in gradients]), "sum")
        for gradient, total in zip(gradients, flat.split([own.numel() for own in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    # After an epoch

    def score(self, names: set[str], bar: Any) -> None:
        """Score every learner that learnt in this epoch, and let each draw its own conclusions."""
        with eval_mode(*self.runner.modules):  # once for all groups: each change of mode starts importances anew
            scores, epoch = score(self.runner, self.validation, self.options, names=names), self._epoch + 1
        scores |= {name: {} for name in self.learners if name in names and name not in scores}
        for name, own in scores.items():
            self.history.append({"reader": name, "epoch": epoch, **own})
            self._note_importance(self.learners[name], epoch)
        if self.base is None:
            for name, own in scores.items():
                self._conclude(self.learners[name], own)
        else:
            self._conclude_together(self.base, scores)
        for name in scores:
            if (stopped := self.learners[name].progress.stopped) is not None:
                self.plan.stopped[name] = stopped
        self._show(scores, bar)

    def _conclude(self, learner: Learner, scores: dict[str, float]) -> None:
        learner.record(self._epoch, scores)
        if self._end_epoch(learner, stopped=learner.progress.stopped is not None):
            learner.begin_stage()

    def _conclude_together(self, base: Learner, scores: Mapping[str, dict[str, float]]) -> None:
        """Where the base is trained too there is one best epoch, and one stop: by the mean of the readers' scores."""
        readers = [self.learners[name] for name in scores]
        signed = [scores[own.name][own.metric] * (-1 if own.metric in LOWER else 1) for own in readers]
        if base.record(self._epoch, {"mean": statistics.fmean(signed)}):
            for reader in readers:
                reader.keep(self._epoch, scores[reader.name])
        stopped = base.progress.stopped is not None
        if advanced := [reader for reader in readers if self._end_epoch(reader, stopped=stopped)]:
            for learner in self.everyone:
                learner.begin_stage(schedule=learner in advanced)
        for reader in readers:
            reader.progress.scale, reader.progress.stopped = base.progress.scale, base.progress.stopped

    def _end_epoch(self, learner: Learner, *, stopped: bool) -> bool:
        """Let a learner whose training has stages go on to the next, which an early stop brings forward."""
        done = (self._epoch + 1) / self.plan.epochs[learner.name]
        return learner.end_epoch(math.nextafter(1, 0) if stopped and done < 1 else done)

    # What is shown and kept

    def _bar(self) -> Any:
        from tqdm.auto import tqdm

        hidden = not self.options.progress or rank() > 0
        return tqdm(total=len(self.plan), initial=self.steps, disable=hidden, unit="step")

    def _show(self, scores: Mapping[str, dict[str, float]], bar: Any) -> None:
        values = {f"{name}/{key}": value for name, own in scores.items() for key, value in own.items()}
        self._accelerator.log(values, step=self.steps)
        if not bar.disable:
            shown = [f"{name} {own[self.learners[name].metric]:.3f}" for name, own in scores.items() if own]
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            bar.write(f"epoch {self._epoch + 1}: {', '.join(shown[:_SHOWN])}{more}", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint, where they are kept."""
        if self._checkpoints is None:
            return
        if rank() == 0:
            own = {learner.name: learner.to_tensors() for learner in self.everyone}
            tensors = {f"{name}/{key}": value for name, state in own.items() for key, value in state.items()}
            progress = {
                "position": [self._epoch, self._at, self.steps],
                "learners": {learner.name: learner.to_json() for learner in self.everyone},
                "stopped": self.plan.stopped,
                "history": self.history,
                "importances": self.importances,
                "scaler": self._scaler.state_dict(),  # empty but for float16
            }
            self._checkpoints.save(self.steps, tensors, progress)
        barrier()

    def _restore(self, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
        self._epoch, self._at, self.steps = progress["position"]
        self.history[:], self.importances[:] = progress["history"], progress["importances"]
        self.plan.stopped.update(progress["stopped"])
        if progress["scaler"]:
            self._scaler.load_state_dict(progress["scaler"])
        for learner in self.everyone:
            start = f"{learner.name}/"
            own = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            learner.from_tensors(own, progress["learners"][learner.name])


def _is_still(module: nn.Module) -> bool:
    """Whether it keeps statistics of what it has seen, though nothing of it is learnt."""
    own = list(module.parameters(recurse=False))
    kept = getattr(module, "running_mean", None) is not None
    return kept and bool(own) and not any(parameter.requires_grad for parameter in own)


def _seed(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def _put_back(learners: Sequence[Learner], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give modules back as they were, but for their weights; meanwhile nothing but what is learnt has gradients."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    flags = [parameter.requires_grad for parameter in parameters]
    learnt = {id(parameter) for learner in learners for parameter in learner.parameters}
    for parameter in parameters:
        parameter.requires_grad_(id(parameter) in learnt)
    try:
        with evaluating(*modules):
            yield
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None


_NEVER = 2**62
_EVERY = 100  # steps between looks at what a GPU has noted; on a CPU, which makes nobody wait, every step is looked at
_HINT = "The learning rate may be too high, or an input or a label is not finite"


class DivergenceGuard:
    """Notes on the device at which step the loss or gradient of a learner was first NaN or infinite, counted from 1."""

    def __init__(self, runner: Runner) -> None:
        self._subject = runner
        self._first: dict[tuple[str, ...], Tensor] = {}  # learners of a step -> the first bad one of each

    def note(self, step: int, names: Sequence[str], losses: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """Take note of a step: its losses `[readers]`, part by part, and perhaps the norm of each learner's gradients.

        Raises:
            NotFiniteError: If one is not finite; for a GPU perhaps up to 99 steps later, with the step that it was.
        """
        values = torch.stack(list(losses)).sum(0) if len(losses) > 1 else losses[0]
        if len(values) < len(names):  # a base has no loss of its own
            values = torch.cat([values, values.new_zeros(1)])
        if norms:
            values = values + torch.stack([norm.to(values.device) for norm in norms])
        on_cpu, key = values.device.type == "cpu", tuple(names)
        if on_cpu and bool(values.isfinite().all()):
            return
        if key not in self._first:
            self._first[key] = torch.full(values.shape, _NEVER, device=values.device)
        self._first[key] = torch.where(values.isfinite(), self._first[key], self._first[key].clamp(max=step))
        if on_cpu or step % _EVERY == 0:
            self.check()

    def check(self) -> None:
        """Raise NotFiniteError for the first number that was noted."""
        noted = [
            (at, name) for names, first in self._first.items() for name, at in zip(names, first.tolist(), strict=True)
        ]
        step, name = min(noted, default=(_NEVER, ""))
        if step < _NEVER:
            what = f"the loss or the gradient of {self._subject.title(name)} is NaN or infinite at step {step}"
            raise self._error(what, name, step)

    def check_weights(self, learners: Iterable[Learner], step: int) -> None:
        """The same for the weights that are trained, before they are kept; here a step means: there or before."""
        self.check()
        for learner in learners:
            if weight := first_non_finite((str(number), own) for number, own in enumerate(learner.parameters)):
                names = {id(own): key for key, own in learner.module.named_parameters()}
                weight = names[id(learner.parameters[int(weight)])]
                what = f"the weight '{weight}' of {self._subject.title(learner.name)} is NaN or infinite"
                raise self._error(f"{what} at or before step {step}", learner.name, step)

    def _error(self, what: str, name: str, step: int) -> NotFiniteError:
        return NotFiniteError(f"{self._subject.op}: {what}; training stops. {_HINT}.", name=name, step=step)
