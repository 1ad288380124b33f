"""The study `probe`: what each layer knows about a task, compared with what the text alone gives away."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, cast, get_args

import numpy as np
import pandas as pd

from lamina.data.state_cache import hash_processor
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, DataError, UnsupportedModelError, check_known
from lamina.layers import Site, at_site, default_stack, select
from lamina.layers.selectors import ranges
from lamina.layers.wrappers import unwrapped
from lamina.store import load
from lamina.studies.probing.controls import BASELINES, baseline_predictions
from lamina.studies.probing.probe_cell import MLP, Place, ProbeSettings, plain_metric, probe_rows
from lamina.studies.runner import (
    Cell,
    cell_digests,
    check_each_once,
    check_given,
    labelled_task,
    own_processor,
    run_cells,
)
from lamina.studies.statistics import (
    Difference,
    corrected,
    few_seeds,
    mean_and_interval,
    of_best,
    paired_bootstrap,
    repeats_for,
    row_counts,
    row_metric,
)
from lamina.studies.study import Figure, Pivot, Study, library_versions, model_facts
from lamina.tasks.metrics import labelled_words
from lamina.train.checkpoint import task_settings
from lamina.train.groups import tasks_by_name, warn_of_texts
from lamina.train.options import FitOptions
from lamina.train.results import INTERVAL_SEEDS, tied
from lamina.utils import JSON, Row, check_range, check_types, pluralize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor
    from lamina.studies.statistics import Array, Label
    from lamina.tasks.metrics import Tags
    from lamina.tasks.task import Task


RATES: dict[str, float] = {"linear": 3e-3, MLP: 1e-3}
"""Peak learning rate of each kind of probe, unless `learning_rate` is set."""
PROBES = tuple(RATES)
COLUMNS = ("task", "seed", "layer", "site", "probe", "measure", "metric", "rows", "score", "low", "high", "p")
logger = logging.getLogger(__name__)


@check_types("probe")
def probe(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Processor | None = None,
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
    cache: Literal["off", "auto", "on"] = "auto",
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> Study:
    """Train probes on every layer of a frozen model in shared passes, and compare them with baselines and controls.

    A probe reads one layer, after a layer norm without parameters. In word tagging tasks it reads each token, in all
    others the mean over a text's tokens without padding. "linear" is one linear map; "mlp" has one hidden layer with
    GELU. Every probe is scored with the weights of its last epoch.

    Three measures complete each score:

    - "control": the score of a probe of the same kind on random labels: one per word type, or one per distinct text.
    - "selectivity": the accuracy minus the control's accuracy. Tasks without accuracy use their own metric here.
    - "code_length": the size of an online code of the training labels. Probes learn growing portions of the rows, and
      each sends the labels of the next portion. A short code means that a probe finds the labels easily.

    In sequence tasks, prefer "code_length" to the control. The scored texts are usually not in the train split, so that
    no probe can know their random labels, and the control's score is at chance for every layer.

    Args:
        model: A transformers model of any supported family; it is not changed. Or a hub id or folder, so that Ray's
            workers can load the model.
        tasks: Task name -> a task with classes, tags or numbers; or a single task.
        processor: Tokenizer, image processor or feature extractor. None: the one saved with `model.name_or_path`.
        split: Name of the split to score. Rows without a label are left out, here and in training.
        layers: Layers to read. With `baselines`, layer 0 (the embeddings) is always added.
        stack: Name of the stack to read. None: the only one, or the encoder.
        sites: What to read in each block, all in the same passes: "output" is the layer's state; "attention" and "ffn"
            are what that part of the block adds to the state, as in `lamina.tap`. Layer 0 has only "output".
        probes: Kinds of probes to train: "linear", "mlp" or both.
        hidden: Size of the MLP's hidden layer.
        seeds: Each seed decides initial weights, order of the rows, the control's labels and the code's portions.
        controls: Whether to train controls.
        code_length: Whether to measure online codes in tasks with classes; doubles the time.
        baselines: Whether to score baselines that read the text alone; see `lamina.studies.probing.controls`.
        epochs: Number of passes of the probes over the training rows.
        batch_size: Rows per step.
        learning_rate: Peak learning rate of AdamW; it falls to 0 linearly. None: 3e-3 for linear probes, 1e-3 for MLPs.
        max_length: Maximum tokens per text. None: what the model allows.
        add_prefix_space: Put a space before every text, for byte-level tokenizers; see `lamina.fit`.
        cache: Whether to keep the hidden states so that later epochs need no pass of the model; see `lamina.fit`.
        output: Folder for the study and for each finished cell. None: nothing is written.
        resume: Do not repeat cells (one task with one seed each) that are finished in `output`. Failed cells run again.
        progress: Show a progress bar.
        ray: Where to run the cells as Ray tasks; see `lamina.studies.runner.run_cells`. None: in this process.

    Returns:
        A study with the columns "task", "seed", "layer", "site", "probe", "measure", "metric", "rows" and "score".
        Measures are "score" (in the task's metric), "accuracy" (if that is another metric), "control", "selectivity",
        "code_length" (in bits) and "compression". The compression is the length of a code that spends log2(classes)
        bits on every label, divided by the code length. Baselines have their name as "probe", and no layer or seed. In
        rows of measure "ahead", the score is how far a probe's mean score over seeds is above the best baseline's, with
        "low" and "high" (95 % interval) and "p" (after Holm's correction). Cells that raised an error have no rows;
        the study's `settings["failures"]` lists them.

    Raises:
        DataError: If no row of a split has a label, or the training rows have fewer than two classes; multi-label tasks
            may.
        ConfigError: If a task has neither classes nor numbers; if there is no task, probe, seed or site, or a seed or
            site is named twice; an option is out of range; or `sites` names "attention" or "ffn" but layer 0 is the
            only layer. Also if `resume` is set without `output`, the cells in `output` were run with other settings or
            library versions, or every probe failed.
        UnknownNameError: If a probe, split, stack or site does not exist, or a task's metric cannot be computed from
            sums over rows.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found, or the parts of a block cannot be read separately;
            the message gives the reason.
        LayerIndexError: If a layer does not exist.
        StoreError: If files of `model` are damaged, `output` cannot be written, or a finished cell in it is damaged.
        MissingExtraError: If `ray` is set and Ray is not installed.

    Source:
        Hewitt and Liang 2019, arXiv:1909.03368 (controls); Voita and Titov 2020, arXiv:2003.12298 (codes). They train
        until the loss stops falling; here probes train for `epochs`, so that the code lengths are upper bounds.
    """
    model = str(model) if isinstance(model, Path) else model
    source, loaded_processor = load(model) if isinstance(model, str) else (unwrapped(model), None)
    named = tasks_by_name("probe", tasks)
    check_given("probe", tasks=named, probes=probes)
    check_known("probe", probes, PROBES, "probe")
    check_each_once("probe", "seeds", seeds)
    check_range("probe", "hidden", hidden, 1)
    used_stack = default_stack(source, stack, op="probe")
    selected = select(layers, used_stack.layers, op="probe")
    _check_sites(source, used_stack, sites, selected)
    named = {name: labelled_task("probe", task, "train", split) for name, task in named.items()}
    missing = {name: check_task(name, task, split) for name, task in named.items()}
    for task in named.values():
        row_metric(task, task.metric)  # an error comes before any probe is trained
    warn_of_texts("probe", named.values())
    own = own_processor(source, loaded_processor if processor is None else processor)
    training = {"epochs": epochs, "batch_size": batch_size, "max_length": max_length}
    training |= {"add_prefix_space": add_prefix_space, "cache": cache, "augment": False, "progress": False}
    FitOptions.checked("probe", learning_rate=learning_rate, **training)
    probe_settings = ProbeSettings(
        layers=tuple(sorted({0, *selected}) if baselines else selected),
        stack=used_stack.name,
        probes=tuple(dict.fromkeys(probes)),
        split=split,
        hidden=hidden,
        rates=RATES if learning_rate is None else dict.fromkeys(PROBES, learning_rate),
        controls=controls,
        code_length=code_length,
        training=training,
        sites=tuple(sites),
    )
    # What a cell's rows depend on. Seeds and baselines are not part of it, so that a later run can add some.
    cell_settings = {**asdict(probe_settings), "versions": library_versions()}
    cell_settings["models"] = {"model": model_facts(source)}
    cell_model = model if isinstance(model, str) and ray is not None else source
    cells = _cells(cell_model, own, named, probe_settings, seeds=seeds, baselines=baselines)
    rows, failures = run_cells(cells, settings=cell_settings, output=output, resume=resume, progress=progress, ray=ray)
    if "layer" not in rows:  # baselines have none
        error = next(failure.error for failure in failures if failure.key["seed"] is not None)
        raise ConfigError(f"probe: no probe could be trained; the first failed with: {error}")
    settings: dict[str, JSON] = {**cell_settings, "baselines": baselines, "seeds": list(seeds)}
    settings["failures"] = [{"key": dict(failure.key), "error": failure.error} for failure in failures]
    study = _study(rows, named, settings, missing)
    if output is not None:
        study.save(output)
    return study


def _check_sites(model: PreTrainedModel, stack: LayerStack, sites: Sequence[Site], layers: Sequence[int]) -> None:
    """Check that the chosen sites exist, once each, and can be read in the model's blocks.

    Raises:
        UnknownNameError: If a site does not exist.
        ConfigError: If there is no site, one is named twice, or one is inside blocks and layer 0 is the only layer.
        UnsupportedModelError: If the parts of the model's blocks cannot be read separately.
    """
    check_known("probe", sites, get_args(Site), "site")
    check_each_once("probe", "sites", sites)
    inside: list[Site] = [site for site in sites if site != "output"]
    if inside and not any(layers):
        raise ConfigError(f"probe: layer 0 is the embeddings; they have no {inside[0]}. Use layers from 1.")
    for site in inside:
        try:
            at_site(model, stack, site)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                op="probe", model_type=error.model_type, reason=error.reason, hint="Use sites=['output']."
            ) from error


def check_task(name: str, task: Task, split: str) -> list[str]:
    """Check that a task can be probed; log and return its classes that no training row has.

    Args:
        name: The task's name, for messages.
        task: The task.
        split: Name of the split that will be scored.

    Returns:
        Names of the classes that no training row has; [] if labels are numbers. A word tag is only among them if it
        occurs in `split`.

    Raises:
        ConfigError: If the task's kind has no labels to probe for.
        DataError: If the training rows have fewer than two classes; in multi-label tasks they may.
        UnknownNameError: If the split does not exist.
    """
    kind = task.kind
    task.split(split)
    if not kind.has_classes:
        problem = f"task '{name}' is of kind {task.kind}, which has no labels to probe for"
        raise ConfigError(f"probe: {problem}; classes, tags or numbers are needed.")
    if task.problem_type == "regression":
        return []
    seen = {number for row in _class_numbers(task, "train") for number in row}
    if len(seen) < 2 and task.problem_type != "multi_label":
        which = ", ".join(f"'{task.labels[number]}'" for number in seen) or "none"
        raise DataError(f"probe: the rows of task '{name}' (train) are of one class only ({which}); 2 are needed.")
    if kind.tags_words:  # a task has a tag I-x for every B-x, even if no word has it: it is only missed where scored
        seen |= set(range(len(task.labels))) - {number for row in _class_numbers(task, split) for number in row}
    never = [label for number, label in enumerate(task.labels) if number not in seen]
    if never:
        logger.warning("probe: no row of task '%s' (train) is of class '%s'", name, "', '".join(never))
    return never


def _class_numbers(task: Task, part: str) -> list[tuple[int, ...]]:
    """Return the class numbers of each row of the split `part`: one, several or none (multi-label), or one per word.

    Words without a label have none.
    """
    labels = task.split(part).labels
    if task.problem_type == "multi_label":
        return [tuple(number for number, is_set in enumerate(row) if is_set) for row in labels]
    rows = (row if isinstance(row, tuple) else (row,) for row in labels)
    return [tuple(number for number in row if number != IGNORED) for row in rows]


def baseline_rows(task: Task, split: str) -> list[Row]:
    """Train a task's baselines, which read only its text, and return table rows with their scores on a split.

    Each baseline has a row of measure "score" (in the task's metric), and a row of measure "accuracy" if the task has
    that metric too. Rows of measure "score" also have the scored predictions, under the key "guesses". Raises
    UnknownNameError if the split does not exist, or the metric cannot be computed from sums over rows.
    """
    truths = list(task.split(split).labels)
    plain = plain_metric(task)
    rows: list[Row] = []
    for name, predictions in baseline_predictions(task, split):
        for measure, metric in {"score": task.metric, plain: plain}.items():
            if measure != "score" and metric == task.metric:
                continue
            counts, score = row_counts(task, metric, predictions, truths)
            row: dict[str, JSON] = {"probe": name, "rows": len(truths), "measure": measure, "metric": metric}
            row["score"] = float(score(counts.sum(0)))
            rows.append({**row, "guesses": predictions} if measure == "score" else row)
    return rows


def _cells(
    model: PreTrainedModel | str,
    processor: Processor | None,
    tasks: Mapping[str, Task],
    settings: ProbeSettings,
    *,
    seeds: Sequence[int],
    baselines: bool,
) -> list[Cell]:
    """Return the study's cells: one per task and seed; with `baselines`, also one per task for the baselines."""
    cells: list[Cell] = []
    inputs = {} if processor is None else {"": {"tokenizer or processor": hash_processor(processor)}}
    for name, task in tasks.items():
        facts: dict[str, JSON] = {**task_settings(task), "metrics": list(task.metrics)}
        facts |= {"code": "per label"} if task.kind.tags_words else {}  # earlier versions: per word
        data = cell_digests(name, task, "train", settings.split)
        if baselines:
            work = partial(baseline_rows, task, settings.split)
            cells.append(Cell({"task": name, "seed": None}, work, settings=facts, digests=data))
        for seed in seeds:
            work = partial(probe_rows, model, processor, task, settings, seed)
            cells.append(Cell({"task": name, "seed": seed}, work, settings=facts, digests={**inputs, **data}))
    return cells


def _study(
    rows: pd.DataFrame, tasks: Mapping[str, Task], settings: Mapping[str, JSON], missing: Mapping[str, Sequence[str]]
) -> Study:
    """Return the study, with its charts and conclusions; its table also has the comparisons, of measure "ahead".

    `rows` are the table rows of all cells, and `missing` is task name -> names of classes that no training row has.
    """
    sentences: list[str] = []
    ahead: list[Row] = []
    records = cast("list[ScoredRow]", rows.astype(object).where(rows.notna(), None).to_dict("records"))
    for name, task in tasks.items():
        comparison = compare_probes([row for row in records if row["task"] == name], task, str(settings["split"]))
        ahead += [{"task": name, **row} for row in comparison.rows()]
        sentences += conclusions(name, comparison)
        if never := missing[name]:
            sentences.append(f"{name}: no row to learn from is of class {', '.join(never)}, which no probe can find.")
    table = pd.concat([rows.drop(columns="guesses", errors="ignore"), pd.DataFrame(ahead)], ignore_index=True)
    table = table.reindex(columns=[column for column in COLUMNS if column in table])
    table = table.astype({column: "Int64" for column in ("seed", "layer") if column in table})
    columns = ("site", "probe") if _several_sites(table) else ("probe",)
    summary = Pivot(index=("task", "metric", "layer"), columns=columns, where={"measure": "score"})
    return Study("probe", table, settings, _figures(table), tuple(sentences), summary)


def _several_sites(table: pd.DataFrame) -> bool:
    return "site" in table and len(set(table["site"].dropna())) > 1


def _figures(table: pd.DataFrame) -> dict[str, Figure]:
    """Return chart name -> line chart over layers, for "score", "selectivity" and "compression" if they were measured.

    A chart is named after its measure; each task has a panel, and each kind of probe a colour. With several sites in
    the table, each kind of probe has a chart "measure, kind", and each site a colour.
    """
    notes = {
        "score": (
            "Score of each layer's probe",
            "A layer knows the task if it scores above layer 0 and the baselines (dashed), which do not use the model.",
        ),
        "selectivity": (
            "Selectivity of each layer's probe",
            "Score minus the score on random labels. Near 0, the probe itself could have learnt the labels by heart.",
        ),
        "compression": (
            "Compression of the labels by each layer's probe",
            "Higher: fewer examples are needed to read the labels from the layer. 1 is no better than guessing.",
        ),
    }
    figures: dict[str, Figure] = {}
    for measure, (title, note) in notes.items():
        if measure not in set(table["measure"]):
            continue
        axes: dict[str, Any] = {"x": "layer", "facet": "task", "x_title": "layer (0 = embeddings)", "note": note}
        if not _several_sites(table):
            figures[measure] = Figure("line", **axes, colour="probe", where={"measure": measure}, title=title)
            continue
        for kind in table.loc[table["layer"].notna(), "probe"].unique():
            figures[f"{measure}, {kind}"] = Figure(
                "line",
                **axes,
                colour="site",
                where={"measure": measure, "probe": kind},
                title=f"{title}, by site ({kind})",
            )
    return figures


class ScoredRow(TypedDict):
    """A row of measure "score". Baselines have neither layer, site nor seed.

    Attributes:
        site: Where in the block the state was read.
        probe: Kind of probe, or the name of a baseline.
        guesses: The scored predictions.
    """

    task: str
    seed: NotRequired[int | None]
    layer: NotRequired[int | None]
    site: NotRequired[Site]
    probe: str
    measure: str
    score: float
    guesses: list[Label]


@dataclass(frozen=True)
class ProbeComparison:
    """The probes of one task, compared with the best baseline and with the embeddings. `compare_probes` makes it.

    Attributes:
        metric: Name of the task's metric.
        rows_scored: Number of rows that every probe and baseline was scored on.
        scores: Probe -> its scores, one per seed. A probe is named by its `Place`.
        baseline: Name and score of the best baseline. The one that reads nothing is called "the most frequent class",
            or for numbers "the mean of the training labels". None: no baseline was scored.
        ahead: Probe -> its score minus the score of that baseline; {} without a baseline.
        over_embeddings: Score of the best probe minus that of its kind at layer 0. None: there is none, or it is best.
    """

    metric: str
    rows_scored: int
    scores: dict[Place, list[float]]
    baseline: tuple[str, float] | None
    ahead: dict[Place, Difference]
    over_embeddings: Difference | None

    @property
    def best(self) -> Place:
        """Place of the probe with the best mean score over seeds; ValueError if there are no scores."""
        return max(self.scores, key=lambda place: float(np.mean(self.scores[place])))

    def rows(self) -> Iterator[Row]:
        """Yield one table row of measure "ahead" per probe, with interval and p value.

        Interval and p value are NaN with fewer than three seeds, or if the two differ on fewer than six rows.
        """
        for place, difference in self.ahead.items():
            low, high, p = difference.low, difference.high, difference.corrected_p
            if difference.seeds < INTERVAL_SEEDS or difference.few_differ:
                low = high = p = math.nan
            numbers = {"rows": difference.rows, "score": difference.value, "low": low, "high": high, "p": p}
            yield {**place._asdict(), "measure": "ahead", "metric": self.metric, **numbers}


def compare_probes(rows: Sequence[ScoredRow], task: Task, split: str) -> ProbeComparison:
    """Compare the probes of one task with the best baseline and with the embeddings, on the same rows.

    `rows` are the task's table rows, and `split` is the scored split. Only rows of measure "score" are used; those
    without a seed are baselines. Raises UnknownNameError if the task's metric cannot be computed from sums over rows.
    """
    truths: list[Label] = list(task.split(split).labels)
    scored = [row for row in rows if row["measure"] == "score"]
    baselines = [row for row in scored if row.get("seed") is None]
    probes: dict[Place, list[ScoredRow]] = {}
    for row in scored:
        if row.get("seed") is not None:
            place = Place(int(row.get("layer") or 0), row.get("site", "output"), row["probe"])
            probes.setdefault(place, []).append(row)
    scores = {place: [row["score"] for row in place_rows] for place, place_rows in probes.items()}
    _, metric = row_counts(task, task.metric, truths, truths)

    def counts(row: ScoredRow) -> Array:
        return row_counts(task, task.metric, row["guesses"], truths)[0]

    def probe_counts(place: Place) -> Array:
        return np.stack([counts(row) for row in probes[place]])

    best = max(baselines, key=lambda row: row["score"], default=None)
    name = "" if best is None else best["probe"]
    if name == "majority":  # the only one for images; it reads no text
        name = "the mean of the training labels" if task.problem_type == "regression" else "the most frequent class"
    ahead: dict[Place, Difference] = {}
    if best is not None:
        baseline_counts = counts(best)
        for place in probes:
            own_counts = probe_counts(place)
            repeated = np.broadcast_to(baseline_counts, own_counts.shape)  # the baseline has no seeds
            ahead[place] = paired_bootstrap(
                own_counts,
                repeated,
                metric=metric,
                differing=_differing(task, probes[place], [best] * len(own_counts), truths),
                names=(title(place), name),
                repeats=repeats_for(len(probes)),
            )
        ahead = dict(zip(ahead, corrected(list(ahead.values())), strict=True))
    baseline = None if best is None else (name, best["score"])
    comparison = ProbeComparison(task.metric, len(truths), scores, baseline, ahead, None)
    if not scores or comparison.best.layer == 0:
        return comparison
    embeddings = Place(0, "output", comparison.best.probe)
    if embeddings not in scores:
        return comparison
    pair, others = (comparison.best, embeddings), sum(place.layer > 0 for place in scores)
    over_embeddings = paired_bootstrap(
        *map(probe_counts, pair),
        metric=metric,
        differing=_differing(task, probes[pair[0]], probes[pair[1]], truths),
        names=(title(pair[0]), title(pair[1])),
        repeats=repeats_for(others),
    )
    return replace(comparison, over_embeddings=of_best(over_embeddings, others))


def _differing(task: Task, first: Sequence[ScoredRow], second: Sequence[ScoredRow], truths: list[Label]) -> int:
    """Return on how many rows the predictions of two methods differ with any seed; words without a label do not count.

    `first` and `second` have one table row per seed, and `truths` are the true labels.
    """
    differs = np.zeros(len(truths), bool)
    for rows in zip(first, second, strict=True):
        pair = [row["guesses"] for row in rows]
        if task.kind.tags_words:
            pair = [labelled_words(cast("Tags", guesses), cast("Tags", truths))[0] for guesses in pair]
        differs |= [not np.array_equal(*predictions) for predictions in zip(*pair, strict=True)]
    return int(differs.sum())


def title(place: Place) -> str:
    """Return the name of a probe in sentences, such as "attention of layer 3 (linear)"."""
    return f"{_site_of(place.site)}layer {place.layer} ({place.probe})"


def _site_of(site: Site) -> str:
    return "" if site == "output" else f"{site} of "


def conclusions(task: str, comparison: ProbeComparison) -> list[str]:
    """Return sentences that begin with the task's name `task`, the most important first; [] if there is no score.

    They name the best probe, and say whether probes beat the best baseline (if one was scored) and the embeddings (if
    these are compared).
    """
    if not comparison.scores:
        return []
    best = comparison.scores[comparison.best]
    over = f", 95 % over {len(best)} seeds" if len(best) >= INTERVAL_SEEDS else ""
    score = f"{comparison.metric} {mean_and_interval(best)}{over}, n = {pluralize(comparison.rows_scored, 'row')}"
    probes = pluralize(len(comparison.scores), "probe")
    means = {place: float(np.mean(scores)) for place, scores in comparison.scores.items()}
    if len(ties := tied(means, means[comparison.best], ".3f")) > 1:
        if len(best) >= INTERVAL_SEEDS:  # each probe has an interval of its own
            mean = f"{comparison.metric} {means[comparison.best]:.3f} over {len(best)} seeds"
            score = f"{mean}, n = {pluralize(comparison.rows_scored, 'row')}"
        sentences = [f"{task}: {_named(ties)} share the best score of {probes}: {score}."]
    else:
        sentences = [f"{task}: {title(comparison.best)} has the best score of {probes}: {score}."]
    if comparison.baseline is not None:
        name, value = comparison.baseline
        reads_text = name in BASELINES
        baseline = f"the best baseline that reads the text alone, {name}" if reads_text else name
        baseline = f"{baseline} ({comparison.metric} {value:.3f})"
        beaten = _probes_that_beat(comparison, baseline, "the text alone" if reads_text else "it")
        sentences.append(f"{task}: {beaten}")
        sentences.append(f"{task}: {comparison.ahead[comparison.best]}")
    if comparison.over_embeddings is not None:
        sentences.append(f"{task}: {comparison.over_embeddings}")
    return sentences


def _probes_that_beat(comparison: ProbeComparison, baseline: str, short: str) -> str:
    """Return the end of a sentence: which probes are conclusively better than the baseline.

    If there is none, or too few seeds, it says so. `baseline` is the phrase that describes the baseline, and `short` is
    the phrase for its second mention in the sentence.
    """
    if (seeds := max(map(len, comparison.scores.values()))) < INTERVAL_SEEDS:
        return f"{few_seeds(seeds)} no probe can be said to beat {baseline}."
    ahead = {place: item.value for place, item in comparison.ahead.items() if item.conclusive and item.value > 0}
    if not ahead:
        return f"no probe is shown to beat {baseline}."
    values = ahead.values()
    by = " to ".join(dict.fromkeys(f"{value:.3f}" for value in (min(values), max(values))))
    rest = f"; the others are not shown to be better than {short}" if len(values) < len(comparison.ahead) else ""
    return f"{_named(ahead)} beat {baseline}, by {by}{rest}."


def _named(places: Iterable[Place]) -> str:
    """Return the name of several probes, such as "linear probes of layers 1-2 and mlp probes of layer 2"."""
    layers: dict[tuple[str, Site], list[int]] = {}
    for place in places:
        layers.setdefault((place.probe, place.site), []).append(place.layer)
    return " and ".join(
        f"{probe} probes of {_site_of(site)}layer{'s' * (len(numbers) > 1)} {ranges(sorted(numbers))}"
        for (probe, site), numbers in layers.items()
    )
