"""Run learners over encoded examples without gradients, to score them or to collect their predictions."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.batches import length_batches
from lamina.errors import NotFiniteError
from lamina.layers.preserve import evaluating
from lamina.train.plan import batches
from lamina.utils import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from lamina.data.batches import Budget
    from lamina.tasks.base import Results
    from lamina.train.base import Runner
    from lamina.train.groups import Group
    from lamina.train.options import PassOptions


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Put modules in eval mode and compute no gradients inside the `with` block; then restore both."""
    with evaluating(*modules), torch.no_grad():
        yield


def autocast(runner: Runner, options: PassOptions) -> AbstractContextManager[object]:
    """Return the context for a pass of the model: torch's autocast to `options.precision`, or nothing for "float32"."""
    if options.precision == "float32":
        return nullcontext()
    return torch.autocast(runner.device.type, getattr(torch, options.precision))


def score(
    runner: Runner,
    groups: Iterable[Group],
    options: PassOptions,
    *,
    names: Collection[str] | None = None,
    more: Callable[[Results, Sequence[str]], Mapping[str, Any]] | None = None,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Compute the metrics of learners on encoded examples.

    Args:
        runner: Runs the batches.
        groups: The encoded examples, with their tasks.
        options: Options of each pass.
        names: Learners that are scored. None: all learners of the groups.
        more: Function from the results and the metrics of a learner to further entries, such as a table per class.
        progress: Show a progress bar per group on standard error.

    Returns:
        Learner name -> metric -> value, and the entries that `more` returned.

    Raises:
        NotFiniteError: If the outputs for a row, or a score, are NaN or infinite.
    """
    scores: dict[str, dict[str, Any]] = {}
    for group in groups:
        tasks = {name: task for name, task in group.tasks.items() if names is None or name in names}
        results = {name: task.kind.results(task, task.split(group.part), group.inputs) for name, task in tasks.items()}
        for name, result in results.items():
            result.set_learnt(runner.info(name))
        if results:
            collect(runner, group, results, options, progress=progress)
        for name, result in results.items():
            scores[name] = dict(result.scores(tasks[name].metrics))
            if bad := [metric for metric, value in scores[name].items() if not math.isfinite(value)]:
                what = f"the {bad[0]} of {runner.title(name)} is {scores[name][bad[0]]}; a score is a finite number"
                raise NotFiniteError(f"{runner.op}: {what}.", name=name)
            if more is not None:
                scores[name] |= more(result, tasks[name].metrics)
    return scores


def scoring_rows(runner: Runner, group: Group, names: Iterable[str], options: PassOptions) -> int:
    """Return how many rows of a group are scored in one batch: at least 1.

    It is `options.scoring_batch_size`, or less if the kind of task of a learner in `names` has many outputs per
    position, such as one for every word of a vocabulary.
    """
    size = options.scoring_batch_size
    for name in names:
        size = group.tasks[name].kind.batch_size(size, group.inputs, runner.outputs_per_position(name))
    return max(1, size)


def collect(
    runner: Runner,
    group: Group,
    results: Mapping[str, Results],
    options: PassOptions,
    *,
    progress: bool = False,
    budget: Budget | None = None,
) -> None:
    """Run learners over all rows of a group without gradients, and add their outputs to `results`; see `passes`."""
    for _ in passes(runner, group, results, options, progress=progress, budget=budget):
        pass


def passes(
    runner: Runner,
    group: Group,
    results: Mapping[str, Results],
    options: PassOptions,
    *,
    progress: bool = False,
    budget: Budget | None = None,
) -> Iterator[None]:
    """Run learners over all rows of a group without gradients, and yield between two batches.

    Modes and gradients are restored before each yield, so that the caller may continue in another thread.

    Args:
        runner: Runs the batches.
        group: The encoded examples.
        results: Learner name -> the collection that its outputs are added to, in place. Only these learners run.
        options: Options of each pass.
        progress: Show a progress bar on standard error.
        budget: Maximum number of tokens per batch, beside the maximum number of rows (`scoring_rows`). None: no such
            limit.

    Raises:
        NotFiniteError: If a learner outputs NaN or infinity for a row.
    """
    names, inputs = list(results), group.inputs
    size = scoring_rows(runner, group, names, options)
    order = length_batches(inputs.lengths, size, equal=group.equal_lengths, budget=budget)
    loader = batches([(inputs, rows, 0) for rows in order], options.num_workers)
    bar = progress_bar(order, show=progress, unit="batch", leave=False)
    for number, (rows, batch) in enumerate(zip(bar, loader, strict=True)):
        if number:
            yield
        with eval_mode(*runner.modules), autocast(runner, options):
            labels = batch.pop("labels", None)
            labels = None if labels is None else labels.to(runner.device)
            states = None if group.states is None else group.states.batch(rows)
            outputs = runner.outputs(batch, labels, names, states)
            for name in names:
                results[name].add(rows, outputs[name], labels)
    for name, result in results.items():
        if (row := result.first_not_finite()) is not None:
            what = f"example {row}" if group.part == "predict" else f"row {row} of the {group.part} part"
            message = f"{runner.op}: {runner.title(name)} gives NaN or infinity for {what}, counted from 0"
            raise NotFiniteError(f"{message}; a score is a finite number.", name=name, row=row)
