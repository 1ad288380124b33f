"""Hidden-state variability: how much texts of one class differ at each layer, beside how far classes lie apart."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lamina.errors import ConfigError, DataError, check_known
from lamina.studies.passes import LayerReader, group_batches
from lamina.studies.sources import own_processor
from lamina.studies.states.vectors import mean_state, own_tokens
from lamina.studies.statistics import rank_correlation
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.tasks.base import EncodeOptions
from lamina.utils import pluralize, progress_bar

if TYPE_CHECKING:
    from jaxtyping import Float
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
    probed: Study | str | Path | None = None,
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
        probed: A study of `probe` over the same tasks, or its folder: the mean score of the linear probe of each layer
            (of the MLP, where there is no linear one) is set beside nu, with Spearman's rank correlation.
        layers: Which layers.
        stack: Which stack; None: the only one, or the encoder.
        batch_size: Rows per pass; it changes nothing but speed.
        max_length: Tokens of a text; None: what the model reads.
        progress: Show a progress bar.

    Returns:
        A study whose table has "task", "layer", "measure" ("nu"), "classes", "rows" and "score": from 0; infinite where
        the means of all classes are the same. With `probed` also rows of measure "probe", with "nu" beside the score,
        and of "rank_correlation" with "p" over "n" layers, which is below 0 where a low nu goes with a high score.

    Raises:
        DataError: If the rows are of fewer than two classes.
        ConfigError: If a task has not one class per row, or `probed` is another study.
        StoreError: If `probed` is a folder without a study, or damaged.
        UnknownNameError: If a task has no such split, the model no such stack, or `probed` no such task.
        LayerIndexError: If there is no such layer.

    Source:
        Xie et al. 2022, "Hidden State Variability of Pretrained Language Models Can Guide Computation Reduction for
        Transfer Learning", arXiv:2210.10041, eq. 1 to 3.
    """
    reader = LayerReader(model, layers, stack, op=_OP)
    named = dict(tasks) if isinstance(tasks, Mapping) else {tasks.name: tasks}
    own = own_processor(reader.model, processor)
    labels = {name: _classes(task, name, split) for name, task in named.items()}
    probes = None if probed is None else _probes(probed, list(named))
    rows: list[dict[str, Any]] = []
    for name, task in named.items():
        limit = task.kind.length_limit(reader.model, own, max_length)
        options = EncodeOptions(part="predict", max_length=limit)
        inputs = task.kind.encode(task.split(split), own, options)
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
    drawn = {"x": "layer", "colour": "task", "where": {"measure": "nu"}}
    figures = {"nu": Figure("line", **drawn, title=title, value_title="nu (no unit)", note=note)}
    said = list(_conclusions(rows))
    if probes is not None:
        beside = [row for name in named for row in _beside(name, rows, probes)]
        rows, said = rows + beside, said + [_compared(row) for row in beside if row["measure"] == "rank_correlation"]
        figures["nu and probes"] = Figure(
            "scatter",
            x="nu",
            colour="task",
            where={"measure": "probe"},
            title="The score of a probe, by the variability of its layer",
            x_title="nu (no unit)",
            value_title="mean score of the probe",
            note="Where nu tells which layer to read, points fall from the left to the right.",
        )
    return Study(_OP, pd.DataFrame(rows), settings, figures, tuple(said))


def _probes(probed: Study | str | Path, tasks: Sequence[str]) -> dict[str, dict[int, float]]:
    """Task -> layer -> mean score over seeds."""
    study = probed if isinstance(probed, Study) else Study.load(probed)
    if study.name != "probe":
        raise ConfigError(f"{_OP}: probed is a study '{study.name}'; it is one that `probe` made.")
    table: Any = study.table
    own: Any = table[(table["measure"] == "score") & table["layer"].notna() & (table["site"] == "output")]
    own = own[own["probe"] == ("linear" if "linear" in set(own["probe"]) else "mlp")]
    means = {str(task): part.groupby("layer")["score"].mean() for task, part in own.groupby("task")}
    check_known(f"{_OP}: probed", tasks, means, "task")
    return {task: {int(layer): float(score) for layer, score in means[task].items()} for task in tasks}


def _beside(
    task: str, rows: Sequence[Mapping[str, Any]], probes: Mapping[str, Mapping[int, float]]
) -> list[dict[str, Any]]:
    """The probe's score of each layer that both studies have, and the rank correlation with nu."""
    nus = {row["layer"]: row["score"] for row in rows if row["task"] == task}
    both = [layer for layer in nus if layer in probes[task]]
    points = [
        {"task": task, "layer": layer, "measure": "probe", "nu": nus[layer], "score": probes[task][layer]}
        for layer in both
    ]
    found = rank_correlation([nus[layer] for layer in both], [probes[task][layer] for layer in both])
    return [*points, {"task": task, "measure": "rank_correlation", **found._asdict()}]


def _compared(row: Mapping[str, Any]) -> str:
    """What the rank correlation allows to say."""
    n = f"n = {pluralize(row['n'], 'layer')}"
    if math.isnan(row["score"]):
        return f"{row['task']}: whether nu tells which layer a probe reads best cannot be said ({n})."
    facts = f"rank correlation {row['score']:.2f}, p = {row['p']:.2g}, {n}"
    if row["p"] > 0.05:
        return f"{row['task']}: that nu tells which layer a probe reads best cannot be concluded ({facts})."
    what = "a low nu goes with a high score of a probe" if row["score"] < 0 else "nu contradicts the probe's score"
    return f"{row['task']}: {what} ({facts})."


def _conclusions(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for task in dict.fromkeys(row["task"] for row in rows):
        least = min((row for row in rows if row["task"] == task), key=lambda row: row["score"])
        if not math.isfinite(least["score"]):
            continue
        rows_read = pluralize(least["rows"], "row")
        said = f"{task}: layer {least['layer']} has the lowest nu, {least['score']:.3g} over {rows_read}"
        yield f"{said}; it is the first to try a reader at. One measurement, so no interval is claimed."


def _classes(task: Task, name: str, split: str) -> list[int]:
    """The class of each row."""
    rows = task.split(split)
    if not task.kind.single_label(task.problem_type):
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
            if own is not None and reader.stack.name == "decoder" and "decoder_input_ids" not in batch:
                own = own.roll(1, dims=1)  # the decoder reads its input shifted right, behind a start token
                own[:, 0] = False

            def on_state(layer: int, state: Tensor, real: Tensor, own: Any = own, classes: Tensor = classes) -> None:
                pluralize = real if own is None else real & own.to(real.device)
                pluralize = torch.where(pluralize.any(1, keepdim=True), pluralize, real)
                scatter[reader.layers.index(layer)].add(mean_state(state, pluralize), classes)

            reader.read(batch, on_state)
    return scatter


@final
class ClassScatter:
    """Sums of one layer's vectors by class; `counts` says how many rows each class has."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._place = {number: place for place, number in enumerate(sorted(counts))}
        self._counts = torch.tensor([counts[number] for number in sorted(counts)], dtype=torch.float64)
        self._shift: Tensor | None = None
        self._sums = self._squares = torch.empty(0)

    def add(self, vectors: Float[Tensor, "rows width"], classes: Tensor) -> None:
        """Take in rows of known classes `[rows]`."""
        exact = vectors.double().cpu()
        if self._shift is None:  # near the mean, so that squares and means do not cancel
            self._shift = exact.mean(0)
            width = len(self._shift)
            self._sums = torch.zeros(len(self._counts), width, dtype=torch.float64)
            self._squares = torch.zeros(width, width, dtype=torch.float64)
        places = torch.tensor([self._place[int(number)] for number in classes])
        shifted = exact - self._shift
        self._sums.index_add_(0, places, shifted)
        self._squares += (shifted / self._counts[places].unsqueeze(1)).T @ shifted

    def nu(self) -> float:
        """`tr(S_w S_b^+) / C`, from the singular vectors of the centred class means: no inverse is taken."""
        classes = len(self._counts)
        means = self._sums / self._counts.unsqueeze(1)
        within = (self._squares - means.T @ means) / classes
        _, sizes, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
        scale = float(means.norm())
        kept = sizes > max(means.shape) * torch.finfo(torch.float32).eps * max(
            scale, float(within.trace().clamp(0)) ** 0.5
        )
        if not kept.any():
            return float("inf")
        directions, sizes = directions[kept], sizes[kept]
        spread = ((directions @ within) * directions).sum(1)
        return float((spread / sizes**2).sum())
