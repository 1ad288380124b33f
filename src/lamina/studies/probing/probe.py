"""Probes: what of a task can be read off each layer, beside what the text alone gives away."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import pandas as pd

from lamina.errors import ConfigError, DataError, UnsupportedModelError, check_known
from lamina.layers import Site, at_site, default_stack, select
from lamina.layers.wrappers import unwrapped
from lamina.store import load
from lamina.studies.probing.baselines import baseline_guesses
from lamina.studies.probing.probe_cell import MLP, ProbeSettings, plain_metric, probe_rows
from lamina.studies.probing.probe_conclusions import compare_probes, conclusions
from lamina.studies.probing.row_scores import row_counts
from lamina.studies.runner import Cell, run_cells
from lamina.studies.sources import own_processor
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.tasks import kind_of
from lamina.utils import check_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector
    from lamina.tasks.task import Task

RATES = {"linear": 3e-3, MLP: 1e-3}
"""The highest learning rate of each kind of probe, where none is given."""
PROBES = tuple(RATES)
COLUMNS = ("task", "seed", "layer", "site", "probe", "measure", "metric", "rows", "score", "low", "high", "p")
logger = logging.getLogger(__name__)


def probe(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel | str,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Any = None,
    split: str = "validation",
    layers: Selector = "all",
    stack: str | None = None,
    sites: Sequence[Site] = ("output",),
    probes: Sequence[Literal["linear", "mlp"]] = ("linear", "mlp"),
    hidden: int = 128,
    seeds: Sequence[int] = (0, 1, 2),
    controls: bool = True,
    code_length: bool = True,
    baselines: bool = True,
    epochs: int = 10,
    batch_size: int = 32,
    learning_rate: float | None = None,
    max_length: int | None = None,
    add_prefix_space: bool = False,
    cache: Literal["off", "auto", "on"] = "off",
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> Study:
    """Train probes on every layer of a frozen model, all in the same passes, and say what their scores are worth.

    A probe reads one layer, layer-normed without affine part: of tasks that tag words each token, else the mean over a
    text's real tokens. "linear" is one linear map, "mlp" has a hidden layer with GELU. Nothing is chosen by the rows
    that are scored: probes end with the weights of their last epoch.

    Beside each score stand a control, how well the same probe learns labels that say nothing (one at random per word
    type, or per distinct text); selectivity, the accuracy less that of the control; and the length of an online code,
    for which probes learn from growing portions of the rows and send the labels of the next. Of whole texts no text
    that is scored was learnt from, so that their control is chance; code length tells what probes find easily there.

    Args:
        model: A transformers model of any family that can be read, which is left as it is; or its hub id or folder,
            from which the workers of Ray load it.
        tasks: Name -> a task with classes, tags or numbers, or such a task alone.
        processor: Tokenizer or image processor; None: the one that belongs to `model.name_or_path`.
        split: The part that is scored.
        layers: Which layers; with `baselines` the embeddings, layer 0, are always among them.
        stack: Which stack; None: the only one, or the encoder.
        sites: Where in the blocks, all in the same passes: "output", the layers' states; "attention" and "ffn", what
            that part of block i adds to its state, as `lamina.tap` gives it. The embeddings are read as they are.
        probes: "linear", "mlp" or both.
        hidden: Size of the MLP's hidden layer.
        seeds: Each decides a start, an order of the rows, a control and a code.
        controls: Whether to train controls.
        code_length: Whether to measure online codes, of tasks with classes; about twice the time.
        baselines: Whether to score what reads the text alone; see `lamina.studies.baselines`.
        epochs: How often probes go through the rows.
        batch_size: Rows per step.
        learning_rate: The highest one of AdamW, which falls to 0 linearly; None: 3e-3 for linear probes, 1e-3 for MLPs.
        max_length: Tokens of a text; None: what the model reads.
        add_prefix_space: As of `fit`.
        cache: As of `fit`: keep the hidden states on disk, so that later epochs need no pass.
        output: Folder to write the study and its cells into; None: nothing is written.
        resume: Take the cells, a task with a seed each, that ended in that folder before.
        progress: Show a progress bar.
        ray: Where to run cells as tasks of Ray; see `lamina.studies.runner.run_cells`.

    Returns:
        A study whose table has "task", "seed", "layer", "site", "probe", "measure", "metric", "rows" and
        "score". Measures are "score" (in the task's metric), "accuracy" (where it is another), "control",
        "selectivity", "code_length" (in bits) and "compression" (the uniform code's length over it). Baselines have
        their names for a probe, and neither layer nor seed. Rows of "ahead" say by how much the mean over seeds is
        ahead of the best baseline that reads the text alone, with "low", "high" (95 %) and "p" (after Holm).

    Raises:
        DataError: If the rows to learn from are of fewer than two classes.
        ConfigError: If a task has neither classes nor numbers, there is no seed or site, or one twice, a site is asked
            of the embeddings alone, or no cell gave rows.
        UnknownNameError: If there is no such probe, split, stack or site.
        UnsupportedModelError: If what the parts of a block add cannot be seen; gives the reason.
        LayerIndexError: If there is no such layer.

    Source:
        Hewitt and Liang 2019, arXiv:1909.03368 (controls); Voita and Titov 2020, arXiv:2003.12298 (codes). Theirs are
        trained until the loss stops falling; here for `epochs`, so that codes are upper bounds.
    """
    source, found = load(model) if isinstance(model, str) else (unwrapped(model), None)
    named = dict(tasks) if isinstance(tasks, Mapping) else {tasks.name: tasks}
    check_known("probe", probes, PROBES, "probe")
    if not probes or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"probe: probes are {list(probes)}, seeds {list(seeds)}; one of each is needed, none twice.")
    check_range("probe", "hidden", hidden, 1)
    used = default_stack(source, stack, op="probe")
    chosen = select(layers, used.layers, op="probe")
    _check_sites(source, used, sites, chosen)
    missing = {name: check_task(name, task, split) for name, task in named.items()}
    own = own_processor(source, found if processor is None else processor)
    training = {"epochs": epochs, "batch_size": batch_size, "max_length": max_length}
    training |= {"add_prefix_space": add_prefix_space, "cache": cache, "augment": False, "progress": False}
    how = ProbeSettings(
        layers=tuple(sorted({0, *chosen}) if baselines else chosen),
        stack=used.name,
        probes=tuple(dict.fromkeys(probes)),
        split=split,
        hidden=hidden,
        rates=RATES if learning_rate is None else dict.fromkeys(PROBES, learning_rate),
        controls=controls,
        code_length=code_length,
        training=training,
        sites=tuple(sites),
    )
    settings = {**asdict(how), "baselines": baselines, "seeds": list(seeds), "versions": library_versions()}
    settings["models"] = {"model": model_facts(source)}
    read = model if isinstance(model, str) and ray is not None else source
    cells = _cells(read, own, named, how, seeds=seeds, baselines=baselines)
    folder = None if output is None else Path(output)
    kept = {name: value for name, value in settings.items() if name not in ("seeds", "baselines")}
    rows, failures = run_cells(cells, settings=kept, output=folder, resume=resume, progress=progress, ray=ray)
    if rows.empty:
        raise ConfigError(f"probe: no cell gave rows; the first ended with: {failures[0].error}")
    settings["failures"] = [{"key": dict(failure.key), "error": failure.error} for failure in failures]
    study = _study(rows, named, settings, missing)
    if folder is not None:
        study.save(folder)
    return study


def _check_sites(model: PreTrainedModel, stack: LayerStack, sites: Sequence[Site], layers: Sequence[int]) -> None:
    """Raise an error unless the model can be read at these sites."""
    check_known("probe", sites, get_args(Site), "site")
    if not sites or len(set(sites)) < len(sites):
        raise ConfigError(f"probe: sites are {list(sites)}; at least one is needed, none twice.")
    inside: list[Site] = [site for site in sites if site != "output"]
    if inside and not any(layers):
        raise ConfigError(f"probe: layer 0 is the embeddings; they have no {inside[0]}. Use layers from 1.")
    for site in inside:
        try:
            at_site(model, stack, site)
        except UnsupportedModelError as error:
            hint = "Use sites=['output']."
            given = {"model_type": error.model_type, "reason": error.reason, "hint": hint}
            raise UnsupportedModelError(op="probe", **given) from error


def check_task(name: str, task: Task, split: str) -> list[str]:
    """Classes that no row to learn from has; an error unless there are labels of two classes, or numbers."""
    kind = kind_of(task.kind)
    task.split(split)
    if not kind.has_classes:
        came = f"task '{name}' is of kind {task.kind}, which has no labels to probe for"
        raise ConfigError(f"probe: {came}; classes, tags or numbers are needed.")
    if task.problem_type == "regression":
        return []
    classes, several = _classes(task, "train"), task.problem_type == "multi_label"
    seen = {number for row in classes for number in row}
    if len(seen) < 2 and not several:
        which = ", ".join(f"'{task.labels[number]}'" for number in seen) or "none"
        raise DataError(f"probe: the rows of task '{name}' (train) are of one class only ({which}); 2 are needed.")
    if kind.tags_words:  # I-x comes with every B-x, whether or not any word has it
        seen |= set(range(len(task.labels))) - {number for row in _classes(task, split) for number in row}
    never = [label for number, label in enumerate(task.labels) if number not in seen]
    if never:
        logger.warning("probe: no row of task '%s' (train) is of class '%s'", name, "', '".join(never))
    return never


def _classes(task: Task, part: str) -> list[tuple[int, ...]]:
    """The numbers of the classes that each row of a part has."""
    labels = task.split(part).labels
    if task.problem_type == "multi_label":
        return [tuple(number for number, is_set in enumerate(row) if is_set) for row in labels]
    return [row if isinstance(row, tuple) else (row,) for row in labels]


def baseline_rows(task: Task, split: str) -> list[dict[str, Any]]:
    """Scores of the baselines, with their guesses."""
    truths = list(task.split(split).labels)
    rows: list[dict[str, Any]] = []
    for name, guesses in baseline_guesses(task, split):
        for measure, metric in {"score": task.metric, plain_metric(task): plain_metric(task)}.items():
            if measure == "score" or metric != task.metric:
                counts, score = row_counts(task, metric, guesses, truths)
                facts = {"probe": name, "rows": len(truths), "measure": measure, "metric": metric}
                rows.append({**facts, "score": float(score(counts.sum(0)))})
        rows[-1 if plain_metric(task) == task.metric else -2]["guesses"] = guesses
    return rows


def _cells(
    model: PreTrainedModel | str,
    processor: Any,
    tasks: Mapping[str, Task],
    how: ProbeSettings,
    *,
    seeds: Sequence[int],
    baselines: bool,
) -> list[Cell]:
    cells: list[Cell] = []
    for name, task in tasks.items():
        if baselines:
            cells.append(Cell({"task": name, "seed": None}, partial(baseline_rows, task, how.split)))
        for seed in seeds:
            work = partial(probe_rows, model, processor, task, how, seed)
            cells.append(Cell({"task": name, "seed": seed}, work))
    return cells


def _study(
    rows: pd.DataFrame, tasks: Mapping[str, Task], settings: dict[str, Any], missing: Mapping[str, Sequence[str]]
) -> Study:
    said: list[str] = []
    ahead: list[dict[str, Any]] = []
    records: Any = rows.astype(object).where(rows.notna(), None).to_dict("records")
    for name, task in tasks.items():
        own = [row for row in records if row["task"] == name]
        found = compare_probes(own, task, settings["split"])
        ahead += [{"task": name, **row} for row in found.rows()]
        said += conclusions(name, found)
        if never := missing[name]:
            said.append(f"{name}: no row to learn from is of class {', '.join(never)}, which no probe can find.")
    table = pd.concat([rows.drop(columns="guesses", errors="ignore"), pd.DataFrame(ahead)], ignore_index=True)
    table = table.reindex(columns=[column for column in COLUMNS if column in table])
    table = table.astype({column: "Int64" for column in ("seed", "layer") if column in table})
    return Study("probe", table, settings, _figures(table), tuple(said))


def _figures(table: pd.DataFrame) -> dict[str, Figure]:
    names = {
        "score": ("Score of each layer's probe", "Above the text alone: see the baselines, and layer 0."),
        "selectivity": ("Selectivity of each layer's probe", "Low: the probe learns labels that say nothing as well."),
        "compression": ("Compression of the labels by each layer's probe", "High: the layer shows them plainly."),
    }
    figures = {}
    several = "site" in table and len(set(table["site"].dropna())) > 1
    for measure, (title, note) in names.items():
        if measure not in set(table["measure"]) or "layer" not in table:
            continue
        x: dict[str, Any] = {"x": "layer", "facet": "task", "x_title": "layer (0 = embeddings)", "note": note}
        if not several:
            figures[measure] = Figure("line", **x, colour="probe", where={"measure": measure}, title=title)
            continue
        for probe in table.loc[table["layer"].notna(), "probe"].unique():
            where = {"measure": measure, "probe": probe}
            named = f"{title}, by site ({probe})"
            figures[f"{measure}, {probe}"] = Figure("line", **x, colour="site", where=where, title=named)
    return figures
