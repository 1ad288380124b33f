"""The trainer of whole models: `transformers.Trainer`, with batches of like length and our own scores."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from lamina.errors import ConfigError
from lamina.train.runs import EpochProgress, MarkComplete
from lamina.train.scoring import score_model
from lamina.train.state import ReaderState, snapshot
from lamina.train.steps import SHARE, Steps, share_out
from lamina.utils import derive_seed, world_size

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, TrainerControl, TrainingArguments

    from lamina.tasks.task import Task
    from lamina.train.options import TuneOptions
    from lamina.train.rows import Rows

PROGRESS = "finetune.json"
BEST = "best.safetensors"
_FREE = ("resume", "progress", "tensorboard", "save_steps", "eval_batch_size")  # may change when a run resumes


@dataclass(frozen=True)
class Job:
    """What a model is fine-tuned on.

    Attributes:
        task: The task.
        train: Its rows to learn from.
        validation: Its rows to choose by.
        processor: Tokenizer or image processor.
        options: How.
        groups: The optimiser's groups of parameters, see `parameter_groups`.
    """

    task: Task
    train: Rows
    validation: Rows
    processor: Any
    options: TuneOptions
    groups: list[dict[str, Any]]


class Tuner(Trainer):
    """Fine-tunes a model; scores it after every epoch and keeps the best weights.

    A step takes the mean of the loss over its labels, however many batches and processes share its rows.

    Args:
        model: The model, with a head for the task.
        job: What it is fine-tuned on.
        arguments: The trainer's own arguments.
    """

    def __init__(self, model: PreTrainedModel, job: Job, arguments: TrainingArguments) -> None:
        self.job = job
        self.best = ReaderState(job.task.metric)
        self.history: list[dict[str, Any]] = []
        self.rows: Any = range(len(job.train.lengths))
        had = getattr(model.config, "use_cache", None)
        super().__init__(model=model, args=arguments, train_dataset=self.rows, eval_dataset=self.rows)
        if had is not None:  # the trainer turns it off for good
            model.config.use_cache = had  # pyright: ignore[reportAttributeAccessIssue]
        self.model_accepts_loss_kwargs = False  # the shares of the labels take their place
        self.remove_callback(PrinterCallback)
        self.add_callback(MarkComplete())
        if job.options.save_steps is not None and arguments.save_strategy != "no":
            self.add_callback(_SaveSteps(job.options.save_steps))
        if job.options.progress:
            self.add_callback(EpochProgress(self.history, {job.task.name: job.task.metric}))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Steps of rows of like length, each as the batches of this process."""
        options = self.job.options
        steps = Steps(
            self.job.train,
            options.batch_size * options.accumulate,
            batches=options.accumulate,
            seed=options.seed,
            epoch=lambda: self.state.global_step // len(steps),
        )
        return DataLoader(self.rows, batch_sampler=steps, collate_fn=steps.collate)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of every batch of a step; processes exchange their gradients with the last."""
        parts = inputs["parts"]
        share_out(parts, self.args.device)
        losses: list[Tensor] = []
        for part in parts:
            last = part is parts[-1]
            with nullcontext() if last else self.accelerator.no_sync(model):
                losses.append(super().training_step(model, part, *args, **kwargs))
        return torch.stack(losses).sum()

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch by its share of the step's labels; accelerate divides gradients by the processes."""
        del args, kwargs
        share = inputs[SHARE]
        out = model(**{key: value for key, value in inputs.items() if key != SHARE})
        if share == 0:  # the mean over no labels is no number
            return out.logits.sum() * 0.0
        return out.loss * share * world_size()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted."""
        del inputs
        return 0

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser, with a group per learning rate and weight decay."""
        del model
        if self.optimizer is None:
            options = self.job.options
            model_: Any = self.model
            groups = self.job.groups
            learn = {id(parameter) for group in groups for parameter in group["params"]}
            for parameter in model_.parameters():  # a rate of 0 costs nothing, and has no part in the gradient's norm
                parameter.requires_grad_(id(parameter) in learn)
            fused = self.args.device.type in ("cpu", "cuda")
            if options.optimizer == "sgd":
                self.optimizer = torch.optim.SGD(groups, momentum=options.momentum, fused=fused)
            else:
                kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
                self.optimizer = kind(groups, eps=options.epsilon, fused=fused)
        return self.optimizer

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Score the model after an epoch, keep it if it is the best so far, and see whether to stop."""
        del args, kwargs
        job, epoch = self.job, len(self.history)
        split = job.task.split("validation")
        model: Any = self.model
        scores = score_model(model, job.validation, job.task, split, job.processor, job.options)
        self.history.append({"reader": job.task.name, "epoch": epoch + 1, **scores})
        if self.best.record(epoch, scores, job.options, job.options.learning_rate):
            self.best.weights = snapshot(model)
        if self.best.stopped is not None:
            self.control.should_training_stop = True
        metrics = {f"eval_{key}": value for key, value in scores.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model's tensors, its best ones, and how far it has come; safetensors and JSON."""
        del _internal_call
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.model
        save_file(snapshot(model), folder / "model.safetensors", metadata={"format": "pt"})
        if self.best.weights:
            save_file(self.best.weights, folder / BEST)
        progress = {
            "run": self._run(),
            "best": self.best.to_json(),
            "history": self.history,
            "finished": self.control.should_training_stop,
        }
        (folder / PROGRESS).write_text(json.dumps(progress))

    def _run(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to fit."""
        job = self.job
        model: Any = self.model
        settings = {key: value for key, value in asdict(job.options).items() if key not in _FREE}
        rows, names = job.task.split("train").labels, [(name, *one.shape) for name, one in model.named_parameters()]
        what = {
            "task": job.task.name,
            "labels": list(job.task.labels),
            "rows": len(job.train.lengths),
            "rows' mark": derive_seed(job.train.lengths, rows),
            "model": type(model).__name__,
            "model's mark": derive_seed(names),
            "processes": world_size(),
        }
        return json.loads(json.dumps({**what, **settings}, default=str))

    def restore(self, checkpoint: Path) -> bool:
        """Take up scores and best weights from a checkpoint; the trainer itself restores the rest.

        Returns:
            Whether the run had ended there, so that nothing is left to do.

        Raises:
            ConfigError: If the checkpoint is of a run of another model, or with other rows or options.
        """
        progress = json.loads((checkpoint / PROGRESS).read_text())
        for name, now in self._run().items():
            if (before := progress["run"].get(name)) != now:
                raise ConfigError(
                    f"finetune: the checkpoint in {checkpoint} was made with {name} {before}, and this run has {now}; "
                    "a run resumes as it began. Use the same settings, or train without resume."
                )
        self.history[:] = progress["history"]
        weights = load_file(checkpoint / BEST) if (checkpoint / BEST).is_file() else {}
        self.best.__dict__.update(progress["best"], weights=weights)
        if progress["finished"]:
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        return progress["finished"]


class _SaveSteps(TrainerCallback):
    """Saves every so many steps; where an epoch ends, it is saved once it has been scored."""

    def __init__(self, every: int) -> None:
        self._every = every

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        del args
        ends = control.should_training_stop or state.global_step % len(kwargs["train_dataloader"]) == 0
        control.should_save = control.should_save or (state.global_step % self._every == 0 and not ends)
