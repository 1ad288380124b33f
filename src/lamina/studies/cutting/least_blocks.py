"""Drop the blocks of a model that matter least to a task, heal the model, and measure what was lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, final, get_args

import torch

from lamina.bank import ReaderBank
from lamina.editing.editable import movable_stack
from lamina.editing.keep import drop_
from lamina.errors import ConfigError, LaminaError, check_known
from lamina.prediction.evaluate import evaluate
from lamina.studies.cutting.advise import REPEATS, TIMED_ROWS, pass_seconds
from lamina.studies.cutting.removal import removal, skipping
from lamina.studies.passes import row_groups
from lamina.studies.sources import encode_rows, linear_reader
from lamina.studies.states.similarity import similarity
from lamina.studies.study import rows_where
from lamina.tasks.metrics import LOWER
from lamina.train.fit import finetune, fit
from lamina.train.results import Summary, summarise
from lamina.utils import JSON, check_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.tasks.task import Task

By = Literal["influence", "loss", "readers"]
_OP = "edit"
_ROWS, _SEEDS = 256, (0, 1, 2)  # training rows that influence is measured on; seeds of readers
_PARTS = 10  # of the validation split


@final
@dataclass(frozen=True)
class LeastBlocks:
    """The report of `drop_least_`: which blocks it dropped, and what the model lost.

    Attributes:
        task: Name of the task.
        metric: The task's metric.
        by: The method of choosing blocks, as passed to `drop_least_`.
        dropped: Numbers of the dropped blocks, before the edit.
        costs: Number of a block -> its influence, or how much the score falls without it; only blocks that were
            measured.
        scored_by: "head": the model's own head, on parts of the validation split; "readers": linear readers of the last
            layer, one per seed, trained on the whole model and again on the cut one.
        whole, cut, healed: Mean scores of the whole model, after the cut, and after healing (None: it was not healed).
        change: Mean difference between the last score and the score of the whole model.
        interval: Half the width of the 95 % interval of `change`; None if there is one value.
        values: Number of values that `change` is the mean of: parts, or seeds.
        speedup: Time of a pass of the whole model, divided by the time of a pass of the cut model.
        parameters: Numbers of parameters before and after.
        bytes: Sizes of the weights in memory before and after.
    """

    task: str
    metric: str
    by: str
    dropped: tuple[int, ...]
    costs: Mapping[int, float]
    scored_by: str
    whole: float
    cut: float
    healed: float | None
    change: float
    interval: float | None
    values: int
    speedup: float
    parameters: tuple[int, int]
    bytes: tuple[int, int]

    def to_dict(self) -> dict[str, JSON]:
        """Return the report as a JSON-ready dict."""
        return {
            **asdict(self),
            "sentence": self.sentence(),
            "dropped": list(self.dropped),
            "costs": {str(layer): cost for layer, cost in self.costs.items()},
            "parameters": list(self.parameters),
            "bytes": list(self.bytes),
        }

    def sentence(self) -> str:
        """Return a sentence that says what the model lost."""
        blocks = ", ".join(map(str, self.dropped))
        interval = "" if self.interval is None else f" ± {self.interval:.3f}"
        over = f"95 % interval over {self.values} {'parts of the rows' if self.scored_by == 'head' else 'seeds'}"
        after = f"{self.cut:.3f}" + ("" if self.healed is None else f", healed {self.healed:.3f}")
        fewer = 1 - self.parameters[1] / self.parameters[0]
        return (
            f"{self.task}: without blocks {blocks} {self.metric} {self.whole:.3f} -> {after} "
            f"({self.change:+.3f}{interval}, {over}), {self.speedup:.2f} x as fast, {fewer:.0%} fewer parameters, "
            f"{self.bytes[0] / 2**20:.1f} -> {self.bytes[1] / 2**20:.1f} MiB of weights."
        )


def drop_least_(  # noqa: PLR0913 options of the command
    model: PreTrainedModel,
    task: Task,
    count: int,
    *,
    by: By = "influence",
    heal_epochs: int = 0,
    processor: Processor | None = None,
    stack: str | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LeastBlocks:
    """Drop the `count` blocks that matter least to a task, in place, and measure what the model lost.

    Blocks are chosen on training rows only. Scores are measured on the validation split.

    Args:
        model: A model. If the model has a head for the task, the head is scored; otherwise linear readers of the last
            layer are.
        task: The task, with the splits "train" and "validation".
        count: Number of blocks to drop, less than the depth.
        by: How blocks are chosen. "influence": the blocks that change the tokens' states least, by 1 - mean cosine
            between a block's input and output. "loss": blocks are removed one after the other; each time the score of
            the model's head may fall as little as possible. The model needs a head for the task. "readers": the blocks
            without which the scores of trained linear readers fall least.
        heal_epochs: Epochs of fine-tuning after the cut; the model needs a head for the task. 0: none.
        processor: Tokenizer or image processor. None: the one saved with the model.
        stack: Name of the stack. None: the only one, or the encoder.
        seed: Seed of the parts of the validation split and of healing.
        progress: Whether to show progress bars.

    Raises:
        ConfigError: If `count` is out of range, or the model needs a head for the task and has none.
        UnknownNameError: If `by` is unknown, or the task lacks a split.

    Source:
        Block influence: Men et al. 2024, "ShortGPT", arXiv:2403.03853.
    """
    check_known(_OP, [by], get_args(By), "way to choose blocks")
    edited = movable_stack(model, stack, _OP)
    check_range(_OP, "auto", count, 1, edited.depth - 1)
    own = _has_head(model, task, processor)
    if not own and (by == "loss" or heal_epochs):
        what = "--by loss" if by == "loss" else "--heal"
        raise ConfigError(
            f"{_OP}: {what} needs a {type(model).__name__} with a trained head for '{task.name}', and it has none. Use "
            "--by influence or readers, or a model that was fine-tuned for the task."
        )
    costs, chosen = _CHOICES[by](model, task, count, processor, edited)
    before = _scores(model, task, processor, edited.name, seed, own=own)
    whole, sizes = copy.deepcopy(model), [_sizes(model)]
    drop_(model, chosen, stack=edited.name)
    sizes.append(_sizes(model))
    speedup = _speedup(whole, model, task, processor)
    del whole
    after = cut = _scores(model, task, processor, edited.name, seed, own=own)
    if heal_epochs:
        options = {"epochs": heal_epochs, "seed": seed, "progress": progress, "keep": "last"}
        finetune(model, task.without_test(), processor=processor, **options)
        after = _scores(model, task, processor, edited.name, seed, own=own)
    change: Summary = summarise([now - then for now, then in zip(after, before, strict=True)])
    return LeastBlocks(
        task=task.name,
        metric=task.metric,
        by=by,
        dropped=tuple(chosen),
        costs=costs,
        scored_by="head" if own else "readers",
        whole=fmean(before),
        cut=fmean(cut),
        healed=fmean(after) if heal_epochs else None,
        change=change.mean,
        interval=change.interval,
        values=change.count,
        speedup=speedup,
        parameters=(sizes[0][0], sizes[1][0]),
        bytes=(sizes[0][1], sizes[1][1]),
    )


def _has_head(model: PreTrainedModel, task: Task, processor: Processor | None) -> bool:
    """Return whether the model has a head that fits the task."""
    try:
        evaluate(model, {task.name: _rows_of(task, range(min(2, len(task.split("validation")))))}, processor=processor)
    except (LaminaError, ValueError, TypeError):
        return False
    return True


def _rows_of(task: Task, rows: Sequence[int]) -> Task:
    """Return the task with its validation split reduced to the rows with these indices."""
    return replace(task, splits={**task.splits, "validation": task.split("validation").select_rows(rows)})


def _scores(
    model: PreTrainedModel, task: Task, processor: Processor | None, stack: str, seed: int, *, own: bool
) -> list[float]:
    """Return scores on the validation split. With `own`, the model's own head is scored, on parts of the split.

    Without `own`, linear readers of the last layer are scored, one per seed.
    """
    if not own:
        return [_reader_score(model, task, processor, stack, reader_seed) for reader_seed in _SEEDS]
    count = len(task.split("validation"))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    parts = max(1, min(_PARTS, count // 20))
    tasks = [_rows_of(task, sorted(order[part::parts])) for part in range(parts)]
    return [evaluate(model, {task.name: part}, processor=processor)[task.name][task.metric] for part in tasks]


def _reader_score(model: PreTrainedModel, task: Task, processor: Processor | None, stack: str, seed: int) -> float:
    """Train a linear reader of the stack's last layer, and return its score on the validation split.

    `seed` decides the reader's initial weights and the order of the rows.
    """
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bank = ReaderBank(model, processor)
    bank.add("task", linear_reader(task, seed=seed, stack=stack))
    fit(bank, {"task": task.without_test()}, seed=seed, progress=False)
    for parameter in required:  # the bank froze them
        parameter.requires_grad_(True)
    return evaluate(bank, {"task": task})["task"][task.metric]


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    """Return a model's number of parameters, and their size in bytes."""
    return model.num_parameters(), sum(part.numel() * part.element_size() for part in model.parameters())


def _speedup(whole: PreTrainedModel, cut: PreTrainedModel, task: Task, processor: Processor | None) -> float:
    """Return how many times as fast the cut model is as the `whole` one: the median over alternating passes."""
    validation = task.split("validation")
    rows = range(min(len(validation), TIMED_ROWS))
    inputs = encode_rows(task, validation.select_rows(rows), whole, processor, None)
    batch = {key: value for key, value in inputs.batch(list(rows)).items() if key != "labels"}
    return median(pass_seconds(whole, batch) / pass_seconds(cut, batch) for _ in range(REPEATS))


# The choice of blocks: each returns the cost of each block, where it was measured, and the chosen blocks.

_Choice = tuple[dict[int, float], list[int]]


def _by_influence(
    model: PreTrainedModel, task: Task, count: int, processor: Processor | None, stack: LayerStack
) -> _Choice:
    """Choose the blocks with the lowest block influence on training rows.

    Returns block number -> influence, and the numbers of the chosen blocks.
    """
    train = task.split("train")
    rows = range(min(len(train), _ROWS))
    inputs = encode_rows(task, train.select_rows(rows), model, processor, None)
    batches = [
        {key: value for key, value in inputs.batch(group).items() if key != "labels"}
        for group in row_groups(len(rows), 32, 0)
    ]
    table = similarity(model, batches=batches, stack=stack.name, measures=["block_influence"]).table
    costs = {int(layer): float(score) for layer, score in zip(table["layer"], table["score"], strict=True)}
    return costs, _least(costs, count)


def _by_loss(model: PreTrainedModel, task: Task, count: int, processor: Processor | None, stack: LayerStack) -> _Choice:
    """Choose blocks one by one: in each round, the block that can be dropped with the smallest loss of score.

    The model's own head is scored, on held-out training rows.
    """
    held_out = task.held_out(0).without_test()
    sign = -1 if task.metric in LOWER else 1
    costs: dict[int, float] = {}
    chosen: list[int] = []

    def score(without: Sequence[int]) -> float:
        with skipping(model, stack, without, op=_OP):
            return sign * evaluate(model, {task.name: held_out}, processor=processor)[task.name][task.metric]

    whole = sign * evaluate(model, {task.name: held_out}, processor=processor)[task.name][task.metric]
    for _ in range(count):
        falls = {layer: whole - score([*chosen, layer]) for layer in range(1, stack.depth + 1) if layer not in chosen}
        costs = costs or falls
        chosen += _least(falls, 1)
    return costs, sorted(chosen)


def _by_readers(
    model: PreTrainedModel, task: Task, count: int, processor: Processor | None, stack: LayerStack
) -> _Choice:
    """Choose the blocks whose removal costs linear readers least of their score on held-out rows.

    The readers are trained on the whole model.
    """
    held_out = task.held_out(0).without_test()
    study = removal(model, held_out, processor=processor, stack=stack.name, seeds=_SEEDS[:1])
    drops = rows_where(study.table, {"measure": "drop"})
    by_layer: dict[int, list[float]] = {}
    for layer, score in zip(drops["layer"], drops["score"], strict=True):
        by_layer.setdefault(int(layer), []).append(float(score))
    costs = {layer: fmean(scores) for layer, scores in sorted(by_layer.items()) if layer}
    return costs, _least(costs, count)


def _least(costs: Mapping[int, float], count: int) -> list[int]:
    """Return the numbers of the `count` blocks with the lowest costs, ascending; ties go to the higher block."""
    return sorted(sorted(costs, key=lambda layer: (costs[layer], -layer))[:count])


_CHOICES = {"influence": _by_influence, "loss": _by_loss, "readers": _by_readers}
