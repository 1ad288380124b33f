"""The trainer of readers: `transformers.Trainer`, with everything that is decided per reader decided per reader."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from lamina.errors import ConfigError
from lamina.tasks.kinds import LOWER
from lamina.train.inference import score
from lamina.train.parallel import add_gradients, own_part
from lamina.train.runs import EpochProgress, MarkComplete
from lamina.train.state import BASE, ReaderState, Schedules, snapshot
from lamina.utils import world_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from transformers import TrainerControl, TrainerState

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.options import FitOptions
    from lamina.train.plan import Group, Plan, Step

PROGRESS = "readers.json"
BEST = "best.safetensors"
BASE_NOW = "base.safetensors"


class Batches:
    """The plan as a loader: every batch is made when it is asked for, so a reader that stops costs nothing more.

    Attributes:
        current: The step whose batch came last.
        ends_epoch: Whether it is the last of its epoch.
    """

    def __init__(self, plan: Plan, bank: ReaderBank, state: Mapping[str, int]) -> None:
        self._plan, self._bank, self._state = plan, bank, state
        self.current: Step | None = None
        self.ends_epoch = False

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, ends_epoch in self._plan.walk(self._state["done"]):
            self.current, self.ends_epoch = step, ends_epoch
            names = self._plan.active(step.group, step.epoch)
            batch = self._plan.groups[step.group].batch(step.rows, names, self._bank.processor, epoch=step.epoch)
            yield own_part(batch, {name: self._bank[name].head for name in names})


class BankTrainer(Trainer):
    """Trains readers; clipping, schedule, best weights and early stop are each reader's own.

    Args:
        bank: The readers and their model.
        tasks: Reader name -> task.
        plan: The order of the texts.
        validation: Groups of the validation texts.
        rates: Reader name -> highest learning rate.
        options: Everything else.
        arguments: The trainer's own arguments.
    """

    def __init__(
        self,
        bank: ReaderBank,
        tasks: Mapping[str, Task],
        plan: Plan,
        validation: list[Group],
        rates: dict[str, float],
        *,
        options: FitOptions,
        arguments: TrainingArguments,
    ) -> None:
        self.bank, self.tasks, self.plan, self.validation = bank, tasks, plan, validation
        self.rates, self.options = rates, options
        self.states = {name: ReaderState(task.metric) for name, task in tasks.items()}
        self.base = ReaderState("mean")  # of the readers' scores; only for a base that is trained too
        self.history: list[dict[str, Any]] = []
        self.importances: list[dict[str, Any]] = []
        self.walked = {"done": 0}
        self.batches = Batches(plan, bank, self.walked)
        super().__init__(model=bank, args=arguments)
        self.model_accepts_loss_kwargs = False  # the bank's keywords are the model's inputs
        # Processes add up their gradients themselves (`parallel`): readers take turns, and a base is no submodule.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.remove_callback(PrinterCallback)
        self.add_callback(_Flow(self))
        self.add_callback(MarkComplete())
        if options.progress:
            self.add_callback(EpochProgress(self.history, {name: task.metric for name, task in tasks.items()}))

    def get_train_dataloader(self) -> Any:
        """The plan's batches, made one by one on the main thread."""
        return self.batches

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The next batch; ends the run where the plan ends, which early stops may bring forward."""
        del num_batches, device
        batch = next(epoch_iterator, None)
        if batch is None:
            self.control.should_training_stop = True
            return [], None
        return [batch], None

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """One optimiser; two parameter groups per reader (and the base), of which only the one of matrices decays."""
        del model
        if self.optimizer is None:
            kind = torch.optim.AdamW if self.options.optimizer == "adamw" else torch.optim.Adam
            groups: list[dict[str, Any]] = []
            for name, module in self._trained().items():
                parameters = [p for p in module.parameters() if p.requires_grad]
                for decays in (True, False):
                    chosen = [p for p in parameters if (p.ndim >= 2) is decays]
                    decay = self.options.weight_decay if decays else 0.0
                    if chosen:
                        groups.append({"params": chosen, "weight_decay": decay, "reader": name})
            fused = self.bank.device.type in ("cpu", "cuda")
            self.optimizer = kind(groups, lr=max(self.rates.values()), fused=fused)
        return self.optimizer

    def _trained(self) -> dict[str, nn.Module]:
        """Everything that learns: name -> module."""
        readers: dict[str, nn.Module] = {name: self.bank[name] for name in self.tasks}
        return {**readers, BASE: self.bank.model} if self.bank.train_base else readers

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Each reader's schedule over its own steps."""
        del num_training_steps, optimizer
        totals = {name: self.plan.steps_of(name) for name in self.tasks} | {BASE: len(self.plan)}
        states, rates = {**self.states, BASE: self.base}, {**self.rates, BASE: self.options.base_learning_rate}
        optimizer = cast("torch.optim.Optimizer", self.optimizer)
        self.lr_scheduler: Any = Schedules(optimizer, states, rates, totals, self.options)
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Sum of the readers' losses; they share no parameter, so each gets the gradient of its own."""
        del args, kwargs
        names = tuple(inputs["readers"])
        self.lr_scheduler.active = (*names, BASE) if self.bank.train_base else names
        shares, states = inputs.pop("shares"), inputs.pop("states", None)
        if states is None:
            out = model(**inputs)
        else:
            with self.accelerator.autocast():
                labels = inputs.pop("labels")
                out = self.bank.read_states(states, inputs, readers=inputs.pop("readers"), labels=labels)
        return torch.stack([out[name].loss * shares[name] for name in names if out[name].loss is not None]).sum()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward; then every process has the gradients of all."""
        if self.bank.train_base:
            self.bank.model.zero_grad()  # no submodule of the bank, whose gradients the trainer clears
        loss = super().training_step(*args, **kwargs)
        trained = self._trained()
        add_gradients(p for name in self.lr_scheduler.active for p in trained[name].parameters())
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip each reader by itself, for which the trainer has no public place; returns the largest norm."""
        del model
        self.accelerator.unscale_gradients()
        trained = self._trained()
        norms = [
            torch.nn.utils.clip_grad_norm_(trained[name].parameters(), self.options.clip)
            for name in self.lr_scheduler.active
        ]
        return torch.stack(norms).max()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score every reader that learned in this epoch, and let each draw its own conclusions."""
        del args, kwargs
        epoch = cast("Step", self.batches.current).epoch
        found: dict[str, dict[str, float]] = {}
        for group in self.validation:
            names = [n for n in group.names if self._learned(n, epoch)]
            if names:
                size = self.options.eval_batch_size or 2 * self.options.batch_size
                found |= score(self.bank, group, self.tasks, names, batch_size=size)
        for name, scores in found.items():
            self._note(name, epoch, scores)
        if self.bank.train_base:
            self._record_together(epoch, found)
        else:
            for name, scores in found.items():
                self._record(name, epoch, scores)
        self.lr_scheduler.apply()
        metrics = {f"eval_{name}_{key}": value for name, scores in found.items() for key, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _learned(self, name: str, epoch: int) -> bool:
        return epoch < self.plan.epochs[name] and epoch <= self.plan.stopped.get(name, epoch)

    def _note(self, name: str, epoch: int, scores: dict[str, float]) -> None:
        self.history.append({"reader": name, "epoch": epoch + 1, **scores})
        for layer, share in self.bank[name].importance().items():
            self.importances.append({"reader": name, "epoch": epoch + 1, "layer": layer, "importance": share})

    def _record(self, name: str, epoch: int, scores: dict[str, float]) -> None:
        reader, state = self.bank[name], self.states[name]
        if state.record(epoch, scores, self.options, self.rates[name]):
            state.weights = snapshot(reader)
        if self._advance(name, epoch, stopped=state.stopped is not None):
            state.begin_stage()
        if state.stopped is not None:
            self.plan.stopped[name] = state.stopped

    def _advance(self, name: str, epoch: int, *, stopped: bool) -> bool:
        """Let a reader whose training has stages go on to the next, which an early stop brings forward."""
        done = (epoch + 1) / self.plan.epochs[name]
        reader = self.bank[name]
        if not reader.on_epoch_end(math.nextafter(1, 0) if stopped and done < 1 else done):
            return False
        for parameter in reader.parameters():
            cast("torch.optim.Optimizer", self.optimizer).state.pop(parameter, None)
        return True

    def _record_together(self, epoch: int, found: dict[str, dict[str, float]]) -> None:
        """Where the base is trained too there is one best epoch, and one stop: by the mean of the readers' scores."""
        metrics = {name: self.tasks[name].metric for name in found}
        signed = [found[name][one] * (-1 if one in LOWER else 1) for name, one in metrics.items()]
        if self.base.record(epoch, {"mean": statistics.fmean(signed)}, self.options, self.options.base_learning_rate):
            self.base.weights = snapshot(self.bank.model)
            for name, scores in found.items():
                state = self.states[name]
                state.scores, state.best_epoch, state.weights = dict(scores), epoch + 1, snapshot(self.bank[name])
        stopped = self.base.stopped is not None
        if advanced := {name for name in found if self._advance(name, epoch, stopped=stopped)}:
            for name, state in {**self.states, BASE: self.base}.items():
                state.begin_stage(schedule=name in advanced)
        for name in found:
            self.states[name].scale = self.base.scale
            if self.base.stopped is not None:
                self.states[name].stopped = self.plan.stopped[name] = self.base.stopped

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the readers, their best weights and their progress; safetensors and JSON."""
        del _internal_call
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.bank.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        states = {**self.states, BASE: self.base}
        save_file({f"{n}/{k}": v for n, state in states.items() for k, v in state.weights.items()}, folder / BEST)
        if self.bank.train_base:
            save_file(snapshot(self.bank.model), folder / BASE_NOW)
        for name, state in self.states.items():
            state.step = self.bank[name].step
        progress = {
            "run": self._run(),
            "states": {name: state.to_json() for name, state in states.items()},
            "history": self.history,
            "importances": self.importances,
        }
        (folder / PROGRESS).write_text(json.dumps(progress))

    def _run(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to fit."""
        plan = self.plan
        texts = [len(group.encoded.features) for group in plan.groups]
        free = ("epochs", "learning_rate", "resume", "progress", "tensorboard", "save_steps", "eval_batch_size")
        free += ("cache_dir",)
        settings = {key: value for key, value in asdict(self.options).items() if key not in free}
        labels = {name: list(task.labels) for name, task in self.tasks.items()}
        what = {"epochs": dict(plan.epochs), "rates": self.rates, "labels": labels, "windows": texts}
        return {**what, "train_base": self.bank.train_base, "processes": world_size(), **settings}

    def restore(self, checkpoint: Path) -> None:
        """Take up the readers' progress from a checkpoint; the trainer itself restores weights and optimiser.

        Raises:
            ConfigError: If the checkpoint is of a run with other readers, epochs, batch size, seed or texts.
        """
        progress = json.loads((checkpoint / PROGRESS).read_text())
        for name, now in self._run().items():
            if (before := progress["run"].get(name)) != now:
                raise ConfigError(
                    f"fit: the checkpoint in {checkpoint} was made with {name} {before}, and this run has {now}; a run "
                    "resumes as it began. Use the same settings, or train without resume."
                )
        self.history[:], self.importances[:] = progress["history"], progress["importances"]
        best = load_file(checkpoint / BEST)
        if self.bank.train_base:
            self.bank.model.load_state_dict(load_file(checkpoint / BASE_NOW))
        for name, fields in progress["states"].items():
            weights = {k.removeprefix(f"{name}/"): v for k, v in best.items() if k.startswith(f"{name}/")}
            state = self.base if name == BASE else self.states[name]
            state.__dict__.update(fields, weights=weights)  # in place: the schedules hold the same objects
            if name != BASE:
                self.bank[name].step = fields["step"]
                if fields["stopped"] is not None:
                    self.plan.stopped[name] = fields["stopped"]


class _Flow(TrainerCallback):
    """Scores and saves where the plan's epochs end."""

    def __init__(self, trainer: BankTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        self._trainer.walked["done"] = state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        del args, kwargs
        ends = self._trainer.batches.ends_epoch
        every = self._trainer.options.save_steps
        control.should_log = control.should_evaluate = ends
        saves = self._trainer.args.save_only_model is False
        control.should_save = saves and (ends or (every is not None and state.global_step % every == 0))
