"""Run what was trained over rows, and collect what it says: one loop for banks and models, scores and answers."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.batches import length_batches
from lamina.tasks import kind_of
from lamina.train.plan import batches
from lamina.utils import progress_bar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from lamina.tasks.base import Results
    from lamina.train.plan import Group
    from lamina.train.subjects import Subject


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients."""
    modes = [(one, one.training) for module in modules for one in module.modules()]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for one, mode in modes:
            one.training = mode


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The mixed precision of a run."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


def score(
    subject: Subject,
    group: Group,
    names: Sequence[str],
    *,
    batch_size: int,
    num_workers: int = 0,
    per_class: bool = False,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Score some of a group's learners.

    Args:
        subject: What is scored.
        group: Labelled rows.
        names: Which learners.
        batch_size: Rows per pass, at most.
        num_workers: Loader workers.
        per_class: Add "per_class" to each.
        progress: Show a progress bar.

    Returns:
        Learner name -> metric -> value.
    """
    results = {}
    for name in names:
        task = group.tasks[name]
        results[name] = kind_of(task.kind).results(task, task.split(group.part), group.inputs)
    collect(subject, group, results, batch_size=batch_size, num_workers=num_workers, progress=progress)
    return {
        name: {**one.scores(group.tasks[name].metrics), **({"per_class": one.per_class()} if per_class else {})}
        for name, one in results.items()
    }


def collect(
    subject: Subject,
    group: Group,
    results: Mapping[str, Results],
    *,
    batch_size: int,
    num_workers: int = 0,
    progress: bool = False,
) -> None:
    """Run learners over all rows of a group, and hand their outputs to `results` (learner name -> collection)."""
    names, inputs = list(results), group.inputs
    for name in names:
        batch_size = kind_of(group.tasks[name].kind).batch_size(batch_size, inputs, subject.outputs_per_position(name))
    order = length_batches(inputs.lengths, max(1, batch_size))
    made = batches([(inputs, rows, 0) for rows in order], num_workers)
    bar = progress_bar(order, show=progress, unit="batch", leave=False)
    with eval_mode(*subject.modules):
        for rows, batch in zip(bar, made, strict=True):
            labels = batch.pop("labels", None)
            labels = None if labels is None else labels.to(subject.device)
            states = None if group.states is None else group.states.batch(rows)
            outputs = subject.outputs(batch, labels, names, states)
            for name in names:
                results[name].add(rows, outputs[name], labels)
