"""What surrounds every training run: its checkpoints, its random numbers, its progress bar."""

from __future__ import annotations

import random
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from lamina.utils import barrier, rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from transformers import TrainerState, TrainingArguments

COMPLETE = "complete"


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def begin(folder: Path, *, resume: bool) -> Path | None:
    """Clear a run's folder, and find where it goes on.

    Args:
        folder: Of the checkpoints. Those that were not written to their end are removed, and without `resume` all are.
        resume: Go on from the newest.

    Returns:
        The checkpoint to go on from; None: from the start.
    """
    barrier()
    if rank() == 0:
        for path in folder.glob("checkpoint-*"):
            if not (resume and (path / COMPLETE).is_file()):
                shutil.rmtree(path)
    barrier()
    return newest_checkpoint(folder) if resume else None


@contextmanager
def checkpoint_folder(output: str | Path | None) -> Iterator[Path]:
    """Where a run keeps its checkpoints; without an output, a folder that is gone afterwards."""
    if output is not None:
        yield Path(output) / "checkpoints"
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def own_randomness() -> Iterator[None]:
    """The trainer seeds every global generator; give them back as they were."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(before[0])
    np.random.set_state(before[1])


_WRAPPED = ("forward", "_original_forward")  # what accelerate sets on a model for mixed precision


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Give a module back as it was, but for its weights: its modes, what is trained, and no mixed precision."""
    modes = [(one, one.training) for one in module.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    before = {name: module.__dict__[name] for name in _WRAPPED if name in module.__dict__}
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
            parameter.grad = None
        for name in _WRAPPED:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)


class MarkComplete(TrainerCallback):
    """Marks every checkpoint that was written to its end."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Called when a checkpoint has been written."""
        del control, kwargs
        barrier()
        if args.should_save:
            (Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / COMPLETE).touch()


class EpochProgress(ProgressCallback):
    """The trainer's progress bar, with a short line per epoch in place of a dump of every number.

    Args:
        history: The rows that the run appends its scores to.
        metrics: Name of what is trained -> the metric that is shown.
    """

    def __init__(self, history: Sequence[Mapping[str, Any]], metrics: Mapping[str, str]) -> None:
        super().__init__()
        self._history, self._metrics = history, metrics

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Called when the trainer logs; only scores are shown."""
        del args, state, control, kwargs
        if self.training_bar is None or not logs or not any(key.startswith("eval_") for key in logs):
            return
        epoch = self._history[-1]["epoch"]
        rows = [row for row in self._history if row["epoch"] == epoch]
        shown = [f"{row['reader']} {row[self._metrics[row['reader']]]:.3f}" for row in rows]
        more = f" and {len(shown) - 6} more" if len(shown) > 6 else ""
        self.training_bar.write(f"epoch {epoch}: {', '.join(shown[:6])}{more}")
