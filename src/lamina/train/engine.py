"""The engine: trains any number of learners, step by step, on accelerate's `Accelerator`."""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from accelerate import Accelerator, PartialState

from lamina.errors import ConfigError, NotFiniteError, require_packages
from lamina.layers.nan_checks import first_non_finite
from lamina.layers.preserve import eval_mode, evaluating, preserve_randomness
from lamina.tasks.metrics import LOWER
from lamina.train.base import batches
from lamina.train.learner import BASE, Learner
from lamina.train.plan import Group, Plan, Step, parts_of
from lamina.utils import derive_seed, rank, run_in_first, seed_torch, world_size

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from tqdm import tqdm

    from lamina.tasks.outputs import Results
    from lamina.train.base import Runner
    from lamina.train.checkpoint import Checkpoints, RunProgress
    from lamina.train.options import FitOptions
    from lamina.train.results import TableRow

_SHOWN = 6  # maximum number of learners in a progress line


def start_accelerator(options: FitOptions, output: Path | None) -> Accelerator:
    """Return the Accelerator of a run, with the trackers that the options name; TensorBoard writes to `output`.

    Its own mixed precision stays off: each pass uses `Runner.autocast`.

    Raises:
        ConfigError: If the options do not suit the machine, or TensorBoard has no `output`; see `check_device`.
        MissingExtraError: If TensorBoard is set and not installed.
    """
    check_device(options, output)
    trackers = options.all_trackers() or None
    return Accelerator(cpu=not torch.cuda.is_available(), log_with=trackers, project_dir=output)  # pyright: ignore


def join_processes() -> None:
    """Wait until all processes that `torchrun` started have called this, and make them a process group if necessary.

    A single process returns at once.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()


def check_device(options: FitOptions, output: Path | None) -> None:
    """Check that this machine has what the options need.

    Raises:
        ConfigError: If float16 is set without a GPU or TensorBoard without an output folder, or another tracker is not
            installed.
        MissingExtraError: If TensorBoard is set and not installed.
    """
    if options.precision == "float16" and not torch.cuda.is_available():
        raise ConfigError("fit: precision is 'float16' and there is no GPU, which it needs. Use 'bfloat16'.")
    for name in options.all_trackers():
        if name == "tensorboard":
            if output is None:
                raise ConfigError("fit: tensorboard is set but no output folder; events are written there.")
            require_packages("fit", "tensorboard", "tensorboard")
        elif find_spec(name) is None:
            raise ConfigError(f"fit: trackers has '{name}', which is not installed. Run pip install {name}.")


class Engine:
    """Trains any number of learners together; each has its own gradient clipping, schedule, best epoch and early stop.

    Args:
        runner: Runs batches through the bank or model.
        learners: The learners to train. A base model that is trained with its readers comes last.
        plan: The steps, in order, with the training rows of each.
        validation: Groups of examples that are scored after each epoch; the scores decide the best epochs.
        options: Options of the run.
        accelerator: The object that `start_accelerator` returned.
        checkpoints: Where checkpoints are written. None: no checkpoints.

    Attributes:
        learners: Name -> learner, without a base model that is trained with its readers.
        base: The learner of that base model. None: there is none.
        all_learners: All of them, the base last.
        history: A row per learner and epoch, with all metrics.
        importances: The rows of `FitResult.importances`.
        best_results: Learner name -> validation results at its best epoch, unless that precedes a resumed checkpoint.
        steps: Optimizer steps so far.
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
        self.all_learners = list(learners)
        self.learners = {learner.name: learner for learner in learners}
        self.base = self.learners.pop(BASE, None)
        self.history: list[TableRow] = []
        self.importances: list[TableRow] = []
        self.best_results: dict[str, Results] = {}
        self.steps = 0
        self._accelerator, self._checkpoints = accelerator, checkpoints
        self._epoch, self._at = 0, 0
        self._parts = options.gradient_accumulation_steps * world_size()  # batches of a step, over all processes
        self._guard = DivergenceGuard(runner)
        self._scaler = torch.amp.GradScaler(runner.device.type, enabled=options.precision == "float16")

    def run(self) -> None:
        """Train to the end, from a checkpoint if `resume` is set; then load each learner's best weights (see `keep`).

        Without `resume`, older checkpoints are removed first. An error leaves the weights as they are then. Random
        generators, modes and `requires_grad` are always restored.

        Raises:
            NotFiniteError: If a loss, gradient, weight or score becomes NaN or infinite.
            LaminaError: If an example cannot be read, for example a damaged image.
            StoreError: If a checkpoint is damaged or cannot be written.
            ConfigError: If the checkpoint to resume from belongs to another run.
        """
        state = None if self._checkpoints is None else self._checkpoints.begin(resume=self.options.resume)
        if state is not None:
            self._restore(*state)
        elif self.options.importance_steps:
            for learner in self.all_learners:
                learner.restart_importance()
                self._note_importance(learner)
        with (
            self._tracked(),
            preserve_randomness(),
            _restored(self.all_learners, self.runner.modules),
            self._bar() as bar,
        ):
            while self._epoch < self.plan.last_epoch():
                self._run_epoch(bar)
        for learner in self.all_learners:
            learner.load(learner.best)

    def _run_epoch(self, bar: tqdm) -> None:
        """Run the remaining steps of the current epoch, then score the learners and save a checkpoint.

        `bar` is the progress bar over all steps. An epoch in which no learner is left has no steps, scores or
        checkpoint. Errors are those of `run`.
        """
        steps = self.plan.epoch(self._epoch)
        groups = self.plan.groups
        active = [self.plan.active(number, self._epoch) for number in range(len(groups))]
        left = [(step, parts_of(step.rows, self._parts, rank(), world_size())) for step in steps[self._at :]]
        jobs = [(groups[step.group].batched, rows, step.epoch) for step, parts in left for rows, _ in parts]
        loader = batches(jobs, self.options.num_workers)
        for module in self.runner.modules:
            module.train()
            for part in module.modules():
                if _has_frozen_statistics(part):
                    part.eval()
        for step, parts in left:
            self.step(step, active[step.group], [(rows, counts, next(loader)) for rows, counts in parts])
            self.steps, self._at = self.steps + 1, self._at + 1
            bar.update()
            if self.options.save_steps and self.steps % self.options.save_steps == 0 and self._at < len(steps):
                self._guard.check_weights(self.all_learners, self.steps)
                self.save()
        if steps:
            self._guard.check_weights(self.all_learners, self.steps)
            self.score({name for names in active for name in names}, bar)
        self._epoch, self._at = self._epoch + 1, 0
        if steps:
            self.save()

    def step(self, step: Step, names: tuple[str, ...], parts: list[tuple[list[int], bool, dict[str, Tensor]]]) -> None:
        """Take one optimizer step with the gradients of all accumulated batches, summed over all processes.

        If the runner uses the global random generators, they are seeded. Importances are recorded if the option
        `importance_steps` says so.

        Args:
            step: The step of the plan.
            names: The learners that are still training on the step's group. A base model that is trained steps too.
            parts: For each accumulated batch of this process: the indices of its rows, whether its loss counts, and its
                tensors.

        Raises:
            NotFiniteError: If a loss or gradient is NaN or infinite. On a GPU it may be raised up to 99 steps later.
        """
        group = self.plan.groups[step.group]
        learners = [self.learners[name] for name in names] + ([] if self.base is None else [self.base])
        every = self.options.importance_steps
        observed = [learner for learner in learners if every and (learner.progress.done + 1) % every == 0]
        for learner in observed:
            learner.restart_importance()
        if self.runner.uses_global_rng:  # seeded anew at each step, so a checkpoint need not hold the random state
            _seed(derive_seed(self.options.seed, "step", self.steps, rank()))
        labels = [group.labels(rows, batch.pop("labels", None), names) for rows, _, batch in parts]
        parts_losses: list[Tensor] = []
        weights = self._weights(names, labels, [counts for _, counts, _ in parts], len(step.rows))
        for number, (rows, _, batch) in enumerate(parts):
            states = None if group.states is None else group.states.batch(rows)
            with self.runner.autocast(self.options):
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
        for learner in observed:
            self._note_importance(learner)

    def _note_importance(self, learner: Learner, epoch: int | None = None) -> None:
        """Append a learner's current layer importances to `self.importances`, one row per layer.

        `epoch` is the epoch that has just ended, from 1; None in the middle of an epoch.
        """
        when = {"reader": learner.name, "epoch": epoch, "step": learner.progress.done}
        for layer, share in learner.importance().items():
            self.importances.append({**when, "layer": layer, "importance": share})

    def _clip(self, learners: Sequence[Learner]) -> list[Tensor]:
        """Unscale each learner's gradients and clip them to `max_grad_norm` in place; return the norms before clipping.

        If `max_grad_norm` is 0, nothing is clipped and the list is empty. In float16 the list is empty too, although
        gradients are clipped: infinite norms are normal there, and the gradient scaler skips the step.
        """
        norms: list[Tensor] = []
        for learner in learners:
            self._scaler.unscale_(learner.optimizer)
            if limit := self.options.max_grad_norm:
                norms.append(torch.nn.utils.clip_grad_norm_(learner.parameters, limit))
        return [] if self._scaler.is_enabled() else norms

    def _weights(
        self, names: Sequence[str], labels: Sequence[Mapping[str, Tensor]], counts: Sequence[bool], rows: int
    ) -> Tensor | None:
        """Return weights `[batches, learners]` for the losses of a step's batches; None if a step has a single batch.

        A weight is the batch's fraction of all labels of the step, over all processes, so the weighted sum of the
        batches' mean losses is the mean loss of the step. A learner without labels in the step has equal weights.
        `labels` (learner name -> labels) and `counts` (whether the loss counts; if not, the weight is 0) have an entry
        for each batch of this process. `rows` is the number of rows of the whole step. All processes must call this
        together.
        """
        if self._parts == 1:
            return None
        labelled = torch.tensor(
            [
                [self.runner.count_labels(name, own[name]) if valid else 0.0 for name in names]
                for own, valid in zip(labels, counts, strict=True)
            ],
            dtype=torch.float32,
        )
        total = labelled.sum(0)
        if world_size() > 1:
            total = self._accelerator.reduce(total.to(self._accelerator.device), "sum").cpu()  # pyright: ignore
        # learners without a label in this step: every batch has the same weight
        even = torch.tensor([[float(valid) / min(self._parts, rows)] for valid in counts])
        return torch.where(total > 0, labelled / total.clamp(min=1e-30), even)

    def _add_gradients(self, learners: Sequence[Learner]) -> None:
        """Sum the gradients over all processes, in place; with one process, do nothing.

        All processes must have gradients for the same parameters.
        """
        if world_size() == 1:
            return
        parameters = [parameter for learner in learners for parameter in learner.parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = cast("Tensor", self._accelerator.reduce(flat, "sum"))
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    # After an epoch

    def score(self, names: set[str], bar: tqdm) -> None:
        """Score the learners `names`; update each one's best epoch, schedule and stop.

        The scores are added to `history`, and the layers' importances to `importances`. The deciding scores are printed
        above `bar`. A learner without validation examples has no scores; its latest epoch is its best. Raises
        NotFiniteError if a score or an output is NaN or infinite.
        """
        # The mode is set once for all groups, since each change of mode resets the counts of importances.
        results: dict[str, Results] = {}
        with eval_mode(*self.runner.modules):
            scores = self.runner.score(self.validation, self.options, names=names, collected=results)
        epoch = self._epoch + 1
        scores |= {name: {} for name in self.learners if name in names and name not in scores}
        for name, metrics in scores.items():
            self.history.append({"reader": name, "epoch": epoch, **metrics})
            self._note_importance(self.learners[name], epoch)
        if self.base is not None:
            self._conclude_together(self.base, scores)
        for name, metrics in scores.items():
            learner = self.learners[name]
            if self.base is None:
                learner.record(self._epoch, metrics)
                if self._end_epoch(learner, stopped=learner.progress.stopped is not None):
                    learner.begin_stage()
            progress = learner.progress
            if progress.stopped is not None:
                self.plan.stopped[name] = progress.stopped
            if name in results and progress.best_epoch == epoch:
                self.best_results[name] = results[name]
            elif not progress.best_epoch:  # a new stage has begun
                self.best_results.pop(name, None)
        self._show(scores, bar)

    def _conclude_together(self, base: Learner, scores: Mapping[str, dict[str, float]]) -> None:
        """End an epoch of the base model and the readers that are trained with it; `scores` is reader name -> scores.

        The mean score of the readers decides whether the epoch is the best for all of them, and whether they all stop.
        If the fusion of one reader begins a new training stage, the best scores of all learners start anew.
        """
        readers = [self.learners[name] for name in scores]
        signed = [scores[reader.name][reader.metric] * (-1 if reader.metric in LOWER else 1) for reader in readers]
        if base.record(self._epoch, {"mean": statistics.fmean(signed)}):
            for reader in readers:
                reader.keep(self._epoch, scores[reader.name])
        stopped = base.progress.stopped is not None
        if advanced := [reader for reader in readers if self._end_epoch(reader, stopped=stopped)]:
            for learner in self.all_learners:
                learner.begin_stage(schedule=learner in advanced)
        for reader in readers:
            reader.progress.scale, reader.progress.stopped = base.progress.scale, base.progress.stopped

    def _end_epoch(self, learner: Learner, *, stopped: bool) -> bool:
        """Tell a learner that an epoch has ended; return whether the next training stage of its fusion begins now.

        With `stopped`, the learner is told that its epochs are almost over, so that its next stage begins now.
        """
        done = (self._epoch + 1) / self.plan.epochs[learner.name]
        return learner.end_epoch(math.nextafter(1, 0) if stopped and done < 1 else done)

    # Progress and checkpoints

    def _bar(self) -> tqdm:
        """Return a progress bar over the steps. It is hidden without `progress`, and in all processes but the first."""
        from tqdm.auto import tqdm

        hidden = not self.options.progress or rank() > 0
        return tqdm(desc=self.runner.op, total=len(self.plan), initial=self.steps, disable=hidden, unit="step")

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Start the trackers with the run's options, and end them even after an error.

        Options that are no text or number, or that differ between learners, are left out. TensorBoard gets no options.
        """
        # in a run of MLflow that the caller has opened, this one is nested; two at one level would be an error
        self._accelerator.init_trackers("lamina", init_kwargs={"mlflow": {"nested_run": True}})
        values: dict[str, str | int | float] = {"learners": ", ".join(self.learners)[:250]}
        for name, value in self.options:
            own = list(value.values()) if isinstance(value, Mapping) else [value]
            if isinstance(own[0] if own else None, str | int | float) and own.count(own[0]) == len(own):
                values[name] = own[0]  # the value of all learners; values that differ are in the run's own files
        try:
            for tracker in self._accelerator.trackers:
                if tracker.name != "tensorboard":  # it would write them into a folder of their own
                    tracker.store_init_configuration(values)
            yield
        finally:
            # an open run of MLflow would make the next one fail; `end_training` would also end the process group
            for tracker in self._accelerator.trackers:
                tracker.finish()

    def _show(self, scores: Mapping[str, dict[str, float]], bar: tqdm) -> None:
        """Send all scores of an epoch to the trackers, and print up to six learners' deciding scores on standard error.

        `scores` is learner name -> metric -> score; "deciding" is the metric that chooses the best epoch. Nothing is
        printed if `bar` is hidden.
        """
        values = {f"{name}/{key}": value for name, metrics in scores.items() for key, value in metrics.items()}
        self._accelerator.log(values, step=self.steps)
        shown = [f"{name} {metrics[self.learners[name].metric]:.3f}" for name, metrics in scores.items() if metrics]
        if shown and not bar.disable:
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            bar.write(f"epoch {self._epoch + 1}: {', '.join(shown[:_SHOWN])}{more}", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint, if the run has checkpoints. Every process must call this; only the first one writes.

        Raises StoreError in every process if the checkpoint cannot be written.
        """
        checkpoints = self._checkpoints
        if checkpoints is not None:
            run_in_first(lambda: self._write(checkpoints))

    def _write(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint of this step; StoreError if that fails."""
        states = {learner.name: learner.to_tensors() for learner in self.all_learners}
        tensors = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
        progress: RunProgress = {
            "position": [self._epoch, self._at, self.steps],
            "learners": {learner.name: learner.to_json() for learner in self.all_learners},
            "stopped": self.plan.stopped,
            "history": self.history,
            "importances": self.importances,
            "scaler": self._scaler.state_dict(),  # empty unless the precision is float16
        }
        checkpoints.save(self.steps, tensors, progress)

    def _restore(self, tensors: Mapping[str, Tensor], progress: RunProgress) -> None:
        """Restore the run and its learners from a checkpoint's tensors and progress; StoreError if they do not fit."""
        self._epoch, self._at, self.steps = progress["position"]
        self.history[:], self.importances[:] = progress["history"], progress["importances"]
        self.plan.stopped.update(progress["stopped"])
        if progress["scaler"]:
            self._scaler.load_state_dict(progress["scaler"])
        for learner in self.all_learners:
            start = f"{learner.name}/"
            state = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
            learner.from_tensors(state, progress["learners"][learner.name])


def _has_frozen_statistics(module: nn.Module) -> bool:
    """Return whether a module must stay in eval mode while its model is trained.

    It then has running statistics, as a batch norm, and parameters of its own, all frozen.
    """
    parameters = list(module.parameters(recurse=False))
    has_statistics = getattr(module, "running_mean", None) is not None
    return has_statistics and bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _seed(seed: int) -> None:
    """Seed the global random generators of torch, Python and NumPy, because a model's code may use them."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def _restored(learners: Sequence[Learner], modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the `with` block, let only the learners' parameters require gradients, among all those of `modules`.

    At the end of the block, the flags and modes of the modules are restored, and all gradients are dropped.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    flags = [parameter.requires_grad for parameter in parameters]
    trained = {id(parameter) for learner in learners for parameter in learner.parameters}
    for parameter in parameters:
        parameter.requires_grad_(id(parameter) in trained)
    try:
        with evaluating(*modules):
            yield
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.requires_grad_(flag)
            parameter.grad = None


_NEVER = 2**62  # larger than any step
_EVERY = 100  # steps between checks on a GPU, since each check waits for the device; on a CPU every step is checked
_HINT = "The learning rate may be too high, or an input or a label is not finite"


class DivergenceGuard:
    """Ends a run with NotFiniteError if its losses or gradients become NaN or infinite.

    It does not wait for the GPU at every step.

    For each learner it records, on the device, the first step (from 1) at which a number was not finite. It reads this
    record every 100 steps on a GPU, and at every step on a CPU.

    Args:
        runner: The runner. Messages name its operation and its learners.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # names of learners -> for each of them the first step with a bad number, `[learners]`
        self._first: dict[tuple[str, ...], Tensor] = {}

    def note(self, step: int, names: Sequence[str], losses: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
        """Record whether the losses and gradient norms of a step are finite.

        Args:
            step: Number of the step, from 1.
            names: The learners of the step. If the base model is trained with its readers, it is the last learner, and
                it has no loss.
            losses: Losses `[readers]` of each accumulated batch of the step.
            norms: Gradient norm of each learner; may be empty.

        Raises:
            NotFiniteError: If a number is not finite. On a GPU up to 99 steps later; the message names the right step.
        """
        values = torch.stack(list(losses)).sum(0) if len(losses) > 1 else losses[0]
        if len(values) < len(names):  # the base, which has no loss
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
        """Raise NotFiniteError if a number that is not finite was recorded; the message names the earliest."""
        firsts = (
            (at, name) for names, own in self._first.items() for at, name in zip(own.tolist(), names, strict=True)
        )
        step, name = min(firsts, default=(_NEVER, ""))
        if step < _NEVER:
            what = f"the loss or the gradient of {self._runner.title(name)} is NaN or infinite at step {step}"
            raise self._error(what, name, step)

    def check_weights(self, learners: Iterable[Learner], step: int) -> None:
        """Raise NotFiniteError as `check` does, or if a trained weight is not finite.

        `step` is the number of steps so far, for the message.
        """
        self.check()
        for learner in learners:
            if weight := first_non_finite((str(number), own) for number, own in enumerate(learner.parameters)):
                names = {id(own): key for key, own in learner.module.named_parameters()}
                weight = names[id(learner.parameters[int(weight)])]
                what = f"the weight '{weight}' of {self._runner.title(learner.name)} is NaN or infinite"
                raise self._error(f"{what} at or before step {step}", learner.name, step)

    def _error(self, what: str, name: str, step: int) -> NotFiniteError:
        """Return the NotFiniteError that ends training: a number of the learner `name` was not finite at `step`.

        `what` says which number, as a part of the message.
        """
        return NotFiniteError(f"{self._runner.op}: {what}; training stops. {_HINT}.", name=name, step=step)
