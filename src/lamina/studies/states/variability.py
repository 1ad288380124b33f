"""The study `variability`: nu, the ratio of the spread of states within classes to the distance between classes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lamina.errors import ConfigError, DataError, check_known
from lamina.layers.selectors import ranges
from lamina.studies.passes import LayerReader, group_batches, is_text_token, mean_state, row_groups
from lamina.studies.runner import check_given, encode_rows, labelled_task, own_processor
from lamina.studies.statistics import RankCorrelation, rank_correlation
from lamina.studies.study import Figure, Study, rows_where, study_settings
from lamina.train.groups import tasks_by_name
from lamina.train.results import tied
from lamina.utils import JSON, Row, check_types, pluralize, progress_bar

if TYPE_CHECKING:
    from jaxtyping import Float
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor
    from lamina.tasks.base import Inputs
    from lamina.tasks.task import Task

_OP = "variability"
_GROUP = 256  # rows that are batched together by length


@check_types("variability")
def variability(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Processor | None = None,
    split: str = "train",
    probed: Study | str | Path | None = None,
    layers: Selector = "all",
    stack: str | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = False,
) -> Study:
    """Measure nu at each layer: the variability of states within classes, divided by that between classes.

    `nu = tr(S_w S_b^+) / C`: S_w is the mean, over the C classes, of the population covariance of the class's vectors.
    S_b is the covariance of the class means, each counted once. The vector of a row is the mean of the states of its
    tokens, without special tokens. A low nu says that a layer is specialised for the task: its classes are tight and
    far apart. All rows are read once; memory grows with layers x width x width.

    Args:
        model: A transformers model of any supported family; it is not changed.
        tasks: Task name -> a task with one class per row, or a single such task.
        processor: Tokenizer or image processor. None: the one saved with `model.name_or_path`.
        split: Name of the split to read. Rows without a label are left out.
        probed: A study of `probe` over the same tasks, or the folder it is saved in. If given, nu is compared, by
            Spearman's rank correlation, with the mean score of each layer's linear probe (or MLP probe, if there is no
            linear one). None: no comparison.
        layers: Layers to read.
        stack: Name of the stack. None: the only one, or the encoder.
        batch_size: Rows per pass; it affects only the speed.
        max_length: Maximum tokens per text. None: what the model allows.
        progress: Show a progress bar.

    Returns:
        A study with the columns "task", "layer", "measure" ("nu"), "classes", "rows" and "score": nu, at least 0, and
        infinite if the means of all classes are equal. With `probed` there are two more measures. "probe": the probe's
        score, beside nu in the column "nu". "rank_correlation": the correlation of the two over "n" layers, with its
        "p"; it is negative if layers with a low nu have a high score.

    Raises:
        DataError: If no row has a label, or the rows have fewer than two classes.
        ConfigError: If there is no task, a task does not have one class per row, `probed` is a study of another kind,
            an option is not valid, or there is no processor that fits a task.
        StoreError: If `probed` is a folder without a study, or that study or the saved processor is damaged.
        UnknownNameError: If a task does not have the split, the model does not have the stack, or `probed` does not
            have a task.
        LayerIndexError: If a layer does not exist.
        UnsupportedModelError: If the model's layers cannot be found.

    Source:
        Xie et al. 2022, "Hidden State Variability of Pretrained Language Models Can Guide Computation Reduction for
        Transfer Learning", arXiv:2210.10041, eq. 1 to 3.
    """
    reader = LayerReader(model, layers, stack, op=_OP)
    named = tasks_by_name(_OP, tasks)
    check_given(_OP, tasks=named)
    used_processor = own_processor(reader.model, processor)
    named = {name: labelled_task(_OP, task, split) for name, task in named.items()}
    labels = {name: _classes(task, name, split) for name, task in named.items()}
    probe_scores = {} if probed is None else _probe_scores(probed, list(named))
    rows: list[Row] = []
    comparisons: list[Row] = []
    least: list[str] = []
    compared: list[str] = []
    for name, task in named.items():
        inputs = encode_rows(task, task.split(split), reader.model, used_processor, max_length)
        scatters = _read(reader, inputs, labels[name], used_processor, batch_size, progress=progress)
        nus = {layer: scatter.nu() for layer, scatter in zip(reader.layers, scatters, strict=True)}
        facts = {"classes": len(set(labels[name])), "rows": len(labels[name])}
        rows += [{"task": name, "layer": layer, "measure": "nu", **facts, "score": nu} for layer, nu in nus.items()]
        least += _conclusion(name, nus, len(labels[name]))
        if probed is not None:
            points, correlation = _compare(nus, probe_scores[name])
            comparisons += [{"task": name, **row} for row in points]
            compared.append(_comparison_sentence(name, correlation))
    table = pd.DataFrame([*rows, *comparisons])
    passes: dict[str, JSON] = {"max_length": max_length, "batch_size": batch_size, "split": split}
    settings = study_settings({"model": reader.model}, layers=reader.layers, stack=reader.stack.name, **passes)
    return Study(_OP, table, settings, _figures(with_probes=probed is not None), (*least, *compared))


def _figures(*, with_probes: bool) -> dict[str, Figure]:
    """Return the chart of nu by layer; with `with_probes`, also a chart of the probes' scores against nu."""
    figures = {
        "nu": Figure(
            "line",
            x="layer",
            colour="task",
            where={"measure": "nu"},
            title="Variability of hidden states by layer (low: specialised)",
            value_title="nu (no unit)",
            note="Lowest: the layer where texts of one class are closest together and the classes furthest apart.",
        )
    }
    if with_probes:
        figures["nu and probes"] = Figure(
            "scatter",
            x="nu",
            colour="task",
            where={"measure": "probe"},
            title="The score of a probe, by the variability of its layer",
            x_title="nu (no unit)",
            value_title="mean score of the probe",
            note="If points fall from left to right, nu can choose the layer to read without training a probe.",
        )
    return figures


def _probe_scores(probed: Study | str | Path, tasks: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return task -> layer -> mean score of its probe over seeds, from a probing study or the folder that has one.

    Only probes at the site "output" count: the linear ones, or the MLPs if none is linear. Raises ConfigError if
    another function made the study; UnknownNameError if the study does not have a task in `tasks`; StoreError if the
    folder does not hold a study, or the study is damaged.
    """
    study = probed if isinstance(probed, Study) else Study.load(probed)
    if study.name != "probe":
        raise ConfigError(f"{_OP}: probed is a study '{study.name}'; pass one that `probe` returned.")
    table = rows_where(study.table, {"measure": "score", "site": "output"}).dropna(subset=["layer"])
    table = rows_where(table, {"probe": "linear" if "linear" in set(table["probe"]) else "mlp"})
    scores: dict[str, dict[int, list[float]]] = {}
    for task, layer, score in zip(table["task"], table["layer"], table["score"], strict=True):
        scores.setdefault(str(task), {}).setdefault(int(layer), []).append(float(score))
    check_known(f"{_OP}: probed", tasks, scores, "task")
    return {task: {layer: float(np.mean(values)) for layer, values in scores[task].items()} for task in tasks}


def _compare(nus: Mapping[int, float], scores: Mapping[int, float]) -> tuple[list[Row], RankCorrelation]:
    """Compare nu, the variability within classes, with the scores of probes, over the layers that have both.

    `nus` and `scores` are layer -> number. Returns table rows, and the rank correlation. The rows are one of measure
    "probe" per layer, with nu in the column "nu", and one of measure "rank_correlation".
    """
    both = [layer for layer in nus if layer in scores]
    rows: list[Row] = [{"layer": layer, "measure": "probe", "nu": nus[layer], "score": scores[layer]} for layer in both]
    correlation = rank_correlation([nus[layer] for layer in both], [scores[layer] for layer in both])
    return [*rows, {"measure": "rank_correlation", **correlation._asdict()}], correlation


def _comparison_sentence(task: str, correlation: RankCorrelation) -> str:
    """Return the sentence that says whether a low nu goes with a high score of a probe, or that this cannot be said."""
    return f"{task}: " + correlation.sentence(
        "nu tells which layer a probe reads best",
        "nu contradicts the probe's score",
        "a low nu goes with a high score of a probe",
        pluralize(correlation.n, "layer"),
    )


def _conclusion(task: str, nus: Mapping[int, float], rows: int) -> list[str]:
    """Return [a sentence on which layers have the lowest nu over `rows` rows]; [] if every nu is infinite.

    `nus` is layer -> nu.
    """
    least = min(nus.values())
    if not math.isfinite(least):
        return []
    layers = tied(nus, least, ".3g")
    over = f"{least:.3g} over {pluralize(rows, 'row')}"
    first = f"{task}: layer {layers[0]} has the lowest nu, {over}; it is the first to try a reader at."
    if len(layers) > 1:
        which = f"layers {ranges(sorted(layers))}"
        first = f"{task}: {which} have the lowest nu, {over}; they are the first to try a reader at."
    return [f"{first} This is one measurement, so no interval is claimed."]


def _classes(task: Task, name: str, split: str) -> list[int]:
    """Return the class number of each row of a split. Messages call the task `name`.

    Raises UnknownNameError if the split does not exist; ConfigError if the task does not have one class per row;
    DataError if the rows have fewer than two classes.
    """
    if not task.kind.single_label(task.problem_type):
        problem = f"task '{name}' is of kind {task.kind} ({task.problem_type})"
        raise ConfigError(f"{_OP}: {problem}; each row must have one class.")
    classes = [int(label) for label in task.split(split).labels]
    if len(set(classes)) < 2:
        which = ", ".join(f"'{task.labels[number]}'" for number in set(classes)) or "none"
        raise DataError(f"{_OP}: the rows of task '{name}' ({split}) are of one class only ({which}); 2 are needed.")
    return classes


def _read(
    reader: LayerReader,
    inputs: Inputs,
    labels: Sequence[int],
    processor: Processor | None,
    batch_size: int,
    *,
    progress: bool,
) -> list[ClassScatter]:
    """Run the model over all encoded rows of a task, and return the accumulated class sums of each layer.

    `labels` are the class numbers of the rows. The processor tells which tokens are special; images need none. All
    tokens count in a text that has only special tokens. `batch_size` is the number of rows per pass.
    """
    counts = Counter(labels)
    scatters = [ClassScatter(counts) for _ in reader.layers]
    groups = row_groups(len(labels), _GROUP, 0)  # random, because neighbouring rows may be of one class or one length
    for group in progress_bar(groups, show=progress, desc=_OP):
        for numbers, batch in group_batches(inputs, group, batch_size):
            classes = torch.tensor([labels[number] for number in numbers])
            in_text = None
            if "input_ids" in batch:
                in_text = is_text_token(batch["input_ids"], cast("Processor", processor))
                if reader.stack.name == "decoder" and "decoder_input_ids" not in batch:
                    # the decoder reads its input shifted right, behind a start token
                    in_text = in_text.roll(1, dims=1)
                    in_text[:, 0] = False

            def on_state(
                layer: int,
                state: Tensor,
                real: Tensor,
                in_text: Tensor | None = in_text,
                classes: Tensor = classes,
            ) -> None:
                counted = real if in_text is None else real & in_text.to(real.device)
                counted = torch.where(counted.any(1, keepdim=True), counted, real)  # a text of special tokens only
                scatters[reader.layers.index(layer)].add(mean_state(state, counted), classes)

            reader.read(batch, on_state)
    return scatters


@final
class ClassScatter:
    """Accumulates the vectors of one layer class by class, so that nu can be computed without storing them.

    `counts` is class number -> number of rows that will be added.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._place = {number: place for place, number in enumerate(sorted(counts))}
        self._counts = torch.tensor([counts[number] for number in sorted(counts)], dtype=torch.float64)
        self._shift: Tensor | None = None
        self._sums = self._squares = torch.empty(0)

    def add(self, vectors: Float[Tensor, "rows width"], classes: Tensor) -> None:
        """Add the vectors of some rows; `classes`, `[rows]`, are their class numbers."""
        exact = vectors.double().cpu()
        if self._shift is None:
            # all vectors are shifted by about their mean, because squares of large numbers would lose digits when the
            # squares of the means are subtracted
            self._shift = exact.mean(0)
            width = len(self._shift)
            self._sums = torch.zeros(len(self._counts), width, dtype=torch.float64)
            self._squares = torch.zeros(width, width, dtype=torch.float64)
        places = torch.tensor([self._place[int(number)] for number in classes])
        shifted = exact - self._shift
        self._sums.index_add_(0, places, shifted)
        self._squares += (shifted / self._counts[places].unsqueeze(1)).T @ shifted

    def nu(self) -> float:
        """Return nu, `tr(S_w S_b^+) / C` (see `variability`); infinity if the means of all classes are equal."""
        classes = len(self._counts)
        means = self._sums / self._counts.unsqueeze(1)
        within = (self._squares - means.T @ means) / classes
        _, sizes, directions = torch.linalg.svd(means - means.mean(0), full_matrices=False)
        # singular values below the rounding error of float32 states are noise, relative to the states' own size
        scale = max(float(means.norm()), float(within.trace().clamp(0)) ** 0.5)
        is_signal = sizes > max(means.shape) * torch.finfo(torch.float32).eps * scale
        if not is_signal.any():
            return float("inf")
        directions, sizes = directions[is_signal], sizes[is_signal]
        spread = ((directions @ within) * directions).sum(1)
        return float((spread / sizes**2).sum())
