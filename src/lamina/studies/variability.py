"""Hidden-state variability: how much texts of one class differ at each layer, beside how far classes lie apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lamina.errors import ConfigError, DataError
from lamina.studies.class_scatter import ClassScatter
from lamina.studies.passes import LayerReader, group_batches
from lamina.studies.provenance import library_versions, model_facts
from lamina.studies.sources import own_processor
from lamina.studies.study import Figure, Study
from lamina.studies.vectors import mean_state, own_tokens
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.utils import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.tasks.base import Inputs
    from lamina.tasks.task import Task

_OP = "variability"
_GROUP = 256  # rows that are summed up at a time


def variability(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Any = None,
    split: str = "train",
    layers: Selector = "all",
    stack: str | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = False,
) -> Study:
    """Measure nu, the variability of hidden states within classes relative to that between them, at each layer.

    `nu = tr(S_w S_b^+) / C`: S_w is the mean over the C classes of the covariance of their vectors (population), S_b
    the covariance of the class means (each counted once). A row's vector is the mean of the states of its tokens,
    special ones left out. Low says that a layer is specialised to the task: its classes are tight and far apart.

    All rows are read once and none is kept; memory is layers x width x width.

    Args:
        model: A transformers model of any family that can be read; it is left as it is.
        tasks: Name -> a task with one class per row, or such a task alone.
        processor: Tokenizer or image processor; None: the one that belongs to `model.name_or_path`.
        split: The part of the task that is read.
        layers: Which layers.
        stack: Which stack; None: the only one, or the encoder.
        batch_size: Rows per pass; it changes nothing but speed.
        max_length: Tokens of a text; None: what the model reads.
        progress: Show a progress bar.

    Returns:
        A study whose table has "task", "layer", "measure" ("nu"), "classes", "rows" and "score": from 0; infinite where
        the means of all classes are the same.

    Raises:
        DataError: If the rows are of fewer than two classes.
        ConfigError: If a task has not one class per row.
        UnknownNameError: If a task has no such split, or the model no such stack.
        LayerIndexError: If there is no such layer.

    Source:
        Xie et al. 2022, "Hidden State Variability of Pretrained Language Models Can Guide Computation Reduction for
        Transfer Learning", arXiv:2210.10041, eq. 1 to 3.
    """
    reader = LayerReader(model, layers, stack, op=_OP)
    named = dict(tasks) if isinstance(tasks, Mapping) else {tasks.name: tasks}
    own = own_processor(reader.model, processor)
    labels = {name: _classes(task, name, split) for name, task in named.items()}
    rows: list[dict[str, Any]] = []
    for name, task in named.items():
        limit = kind_of(task.kind).length_limit(reader.model, own, max_length)
        options = EncodeOptions(part="predict", max_length=limit)
        inputs = kind_of(task.kind).encode(task.split(split), own, options)
        scatter = _read(reader, inputs, labels[name], own, batch_size, progress=progress)
        facts = {"measure": "nu", "classes": len(set(labels[name])), "rows": len(labels[name])}
        rows += [
            {"task": name, "layer": layer, **facts, "score": layer_scatter.nu()}
            for layer, layer_scatter in zip(reader.layers, scatter, strict=True)
        ]
    settings = {
        "models": {"model": model_facts(reader.model)},
        "layers": reader.layers,
        "stack": reader.stack.name,
        "split": split,
        "max_length": max_length,
        "batch_size": batch_size,
        "versions": library_versions(),
    }
    title = "Variability of hidden states by layer (low: specialised)"
    note = "Where the line is lowest, the classes of the task are tight and far apart: read there first."
    figure = Figure("line", x="layer", colour="task", title=title, value_title="nu (no unit)", note=note)
    return Study(_OP, pd.DataFrame(rows), settings, {"nu": figure}, tuple(_conclusions(rows)))


def _conclusions(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for task in dict.fromkeys(row["task"] for row in rows):
        least = min((row for row in rows if row["task"] == task), key=lambda row: row["score"])
        if not math.isfinite(least["score"]):
            continue
        said = f"{task}: layer {least['layer']} has the lowest nu, {least['score']:.3g} over {least['rows']:,} rows"
        yield f"{said}; it is the first to try a reader at. One measurement, so no interval is claimed."


def _classes(task: Task, name: str, split: str) -> list[int]:
    """The class of each row."""
    rows = task.split(split)
    if not kind_of(task.kind).single_label(task.problem_type):
        came = f"task '{name}' is of kind {task.kind} ({task.problem_type})"
        raise ConfigError(f"{_OP}: {came}; each row must have one class.")
    classes = [int(label) for label in rows.labels]
    if len(set(classes)) < 2:
        which = ", ".join(f"'{task.labels[number]}'" for number in set(classes)) or "none"
        raise DataError(f"{_OP}: the rows of task '{name}' ({split}) are of one class only ({which}); 2 are needed.")
    return classes


def _read(
    reader: LayerReader, inputs: Inputs, labels: Sequence[int], processor: Any, batch_size: int, *, progress: bool
) -> list[ClassScatter]:
    counts = Counter(labels)
    scatter = [ClassScatter(counts) for _ in reader.layers]
    order = np.random.default_rng(0).permutation(len(labels))  # groups of like length would be of like texts
    groups = np.array_split(order, max(1, len(labels) // _GROUP))
    for group in progress_bar(groups, show=progress, desc=_OP):
        for numbers, batch in group_batches(inputs, group.tolist(), batch_size):
            classes = torch.tensor([labels[number] for number in numbers])
            own = own_tokens(batch["input_ids"], processor) if "input_ids" in batch else None

            def take(layer: int, state: Tensor, real: Tensor, own: Any = own, classes: Tensor = classes) -> None:
                counted = real if own is None else real & own.to(real.device)
                counted = torch.where(counted.any(1, keepdim=True), counted, real)
                scatter[reader.layers.index(layer)].add(mean_state(state, counted), classes)

            reader.read(batch, take)
    return scatter
