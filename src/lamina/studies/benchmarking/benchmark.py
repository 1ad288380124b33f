"""The benchmark: readers and rival methods on 113 public probing data sets, compared over the sets."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import psutil
import torch

from lamina.data.disk_cache import check_room
from lamina.data.encode import length_limit
from lamina.data.state_cache import hash_processor
from lamina.errors import CacheError, ConfigError, check_known, require_packages
from lamina.layers import default_stack
from lamina.layers.types import check_tokenizer
from lamina.layers.wrappers import unwrapped
from lamina.store import load
from lamina.studies.benchmarking.benchmark_cell import (
    METHODS,
    OF_MEANS,
    USUAL,
    CellSettings,
    SetStates,
    cell_rows,
    set_texts,
)
from lamina.studies.benchmarking.probing_sets import (
    MOST_TRAINED,
    SETTINGS,
    SHARES,
    SIZES,
    chosen_sets,
    find_data,
    set_digest,
)
from lamina.studies.runner import Cell, check_each_once, own_processor, run_cells
from lamina.studies.statistics import LEAST_DIFFERING, corrected, few_differ, paired_bootstrap
from lamina.studies.study import Figure, Pivot, Study, study_settings
from lamina.utils import JSON, Row, check_range, check_types, pluralize, write_text

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.benchmarking.probing_sets import Setting
    from lamina.studies.study import Frame

    Scores: TypeAlias = Mapping[str, NDArray[np.floating]]  # method -> scores `[seeds, sets]`; sets are the same

SUMMARY = "summary.md"  # file in the output folder: the tables and conclusions
_OP = "bench"
_MOST_SCORED = 4000  # more rows than any of the published sets leaves to be scored; the largest leaves 3,975
_POINTS: Mapping[str, Sequence[float | None]] = {"scarce": SIZES, "imbalance": SHARES}  # other settings have one point
COLUMNS = (
    *("set", "point", "method", "seed", "measure", "metric", "score", "low", "high", "p", "against"),
    *("wins", "level", "losses", "trained", "rows", "seconds", "bytes", "chosen", "pass_seconds"),
)
LEVEL = 0.005  # two scores that differ by at most this count as level
_MOST_APART = LEVEL + 1e-9  # 0.855 - 0.85 is a little more than 0.005 in floating point
_ALPHA = 0.05
_SHOWN = {  # column of the summary -> its cell in a row of `over_sets`, empty if a value is missing
    "point": "{point:g}",
    "method": "{method}",
    "mean AUC": "{score:.3f}",
    "spread over seeds": "{spread:.3f}",
    "mean rank": "{rank:.3f}",
    "the leader is ahead by": "{behind_by:.3f}",
    "95 % interval": "{low:.3f} to {high:.3f}",
    "Holm p": "{p}",
    "wins / level / losses": "{wins} / {level} / {losses}",
    "s to train": "{seconds:.1f}",
    "bytes": "{bytes:,.0f}",
}


@check_types("benchmark")
def benchmark(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    *,
    data: str | Path | None = None,
    processor: Processor | None = None,
    setting: Setting = "normal",
    sets: Sequence[str] | None = None,
    methods: Sequence[str] = USUAL,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    points: Sequence[float] | None = None,
    scored: int | None = 500,
    unique: bool = True,
    max_length: int = 128,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> Study:
    """Compare readers with rival methods on public binary probing sets, and say what holds over all sets.

    The work is divided into cells, which run and are saved one by one: one per set, or in the settings "scarce" and
    "imbalance" one per set and point. The model reads every text of a set once, for all its points (not so with `ray`).
    Cells of a set that is missing, damaged or too small have no rows; `settings["failures"]` lists them.

    Methods without seeds follow sae-probes 0.4.2, with its grids and folds. "embedding", "pca", "knn" and "xgboost"
    read the mean of the last layer's states over the tokens. "best_layer" reads the layer that is best on held-out
    rows, "all_layers" all layers side by side. "tfidf" reads the words, and "majority" predicts the most frequent
    class. Readers are trained with the settings of `LaminaClassifier`: "attention_probe" (a linear map of the last
    layer, with one query that weighs the tokens), "scalar_mix", "ada_layers" and "default" (`Reader.default`).

    Args:
        model: A transformers model, or its hub id or folder; it is not changed.
        data: Folder of the package sae-probes, or of its data. None: the installed package.
        processor: The model's tokenizer. None: the one saved with the model.
        setting: "normal": up to 1,024 training rows. "scarce": few rows. "imbalance": one class is rarer. "shift": the
            scored texts are of another kind.
        sets: Names or numbers of the sets. None: all of the setting.
        methods: Names of the methods. By default all but "xgboost", which needs an extra package.
        seeds: Seeds of the readers: their initial weights and dropout. The rows and their order stay the same.
        points: In "scarce" numbers of training rows, in "imbalance" shares of the positive class; not allowed in the
            other settings. None: 16, 64, 256 and 1,024 rows; 0.05, 0.1, 0.25, 0.5, 0.75, 0.9 and 0.95.
        scored: Maximum number of scored rows per set. None: all.
        unique: Whether each text counts once. The published sets repeat texts of the rarer class, so that the same text
            may be trained on and scored; False keeps the published rows.
        max_length: Maximum tokens per text; less if the model allows less.
        output: Folder for the study, `summary.md` (tables and conclusions) and each finished cell. None: nothing is
            written.
        resume: Do not repeat cells that are already finished in `output`.
        progress: Show a progress bar.
        ray: Run the cells as tasks of Ray, each on one core: "local" (on this machine), "auto" (the cluster that runs
            on this machine), or the address of a cluster. Pass the model by its name: an object is copied for each
            cell. With several points, the model then reads the texts of each point anew. None: in this process, one by
            one.

    Returns:
        A study with the columns "set", "point", "method", "seed", "measure", "score" and others, and these measures.
        "score": the AUC of a method on a set. "mean": its mean over the sets for which every method has a score, with
        the median "seconds" and "bytes". "rank": its mean rank (1 is best). "ahead": how far "default" (or the best
        method, if that did not run) is above each other method on average, with "low", "high", "p" (after Holm's
        correction), "wins", "level" and "losses". If fewer than six sets have different scores, "low", "high" and "p"
        are empty. With points, the charts show "shared_mean" and "shared_rank": mean and mean rank over the sets with
        a score of every method at every point.

    Raises:
        UnknownNameError: If a setting, set or method does not exist.
        ModelNotFoundError: If `model` is a name and there is no such model.
        ConfigError: If nothing is to be run, an entry of a list occurs twice, an option is out of range, the model has
            no tokenizer, or every cell failed; if the means of the states would not fit into the memory; if
            `resume` is set without `output`, or the cells in `output` were run with other settings or library versions;
            if no Ray cluster answers.
        DataError: If the data cannot be found, or its list of sets cannot be read.
        CacheError: If the states would not fit on the disk. Raised before anything runs.
        StoreError: If files of `model` are damaged, `output` cannot be written, or a finished cell in it is damaged.
        MissingExtraError: If a method needs a package that is not installed, or `ray` is set and Ray is not installed.
        UnsupportedModelError: If the model's layers cannot be found.

    Source:
        Kantamneni et al. 2025, arXiv:2502.16681, and its package sae-probes (MIT).
    """
    check_known(_OP, [setting], SETTINGS, "setting")
    check_known(_OP, methods, METHODS, "method")
    check_each_once(_OP, "methods", methods)
    check_each_once(_OP, "seeds", seeds)
    check_range(_OP, "scored", scored, 2)
    check_range(_OP, "max_length", max_length, 1)
    if "xgboost" in methods:
        require_packages(_OP, "probes", "xgboost")
    folder = find_data(data)
    chosen = chosen_sets(folder, setting, sets)
    used_points = _points(setting, points)
    source, loaded_processor = load(model) if isinstance(model, str | Path) else (unwrapped(model), None)
    tokenizer = check_tokenizer(own_processor(source, loaded_processor if processor is None else processor))
    length = min(max_length, length_limit(source, tokenizer, None))
    settings = CellSettings(setting, tuple(methods), tuple(seeds), scored, unique, length)
    workers = 0 if ray is None else 1  # of a cluster or a resumed run, the cells that are left are not known here
    if ray == "local" and not resume:
        workers = min(torch.cuda.device_count() or os.cpu_count() or 1, len(chosen) * len(used_points))
    _check_room(default_stack(source, None, op=_OP), settings, used_points, workers)
    options = {key: value for key, value in asdict(settings).items() if key not in ("readers", "training")}
    facts = {**study_settings({"model": source}, **options), "tokenizer": hash_processor(tokenizer)}
    place = None if output is None else Path(output)
    with SetStates(partial(set_texts, folder, used_points, settings)) as states:
        kept = states if len(used_points) > 1 and ray is None else None
        # a result depends on the files of its set, which matters for results that are kept
        files = {name: {} if place is None else {"data": set_digest(folder, name, setting)} for name in chosen}
        used = source
        if ray is not None and isinstance(model, str | Path):  # each worker loads it, from another current folder
            used = str(Path(model).resolve()) if Path(model).is_dir() else model
        work = partial(cell_rows, used, tokenizer, folder.resolve())
        cells = [
            Cell({"set": name, "point": point}, partial(work, name, point, settings, kept), "", files[name])
            for name in chosen
            for point in used_points
        ]
        table, failures = run_cells(cells, settings=facts, output=place, resume=resume, progress=progress, ray=ray)
    if table.empty:
        raise ConfigError(f"{_OP}: no cell returned rows; the first failed with: {failures[0].error}")
    listed = [{"key": dict(failure.key), "error": failure.error} for failure in failures]
    study = benchmark_study(table, {**facts, "failures": listed})
    if place is not None:
        study.save(place)
        write_text(place / SUMMARY, markdown_summary(study))
    return study


def _points(setting: Setting, points: Sequence[float] | None) -> Sequence[float | None]:
    """Return the points of a setting; each makes one cell per data set. (None,): the setting has no points.

    A point is a number of training rows (setting "scarce") or a share of the positive class (setting "imbalance").
    `points` are the user's; None: the usual ones. Raises ConfigError if the setting has no points but `points` are
    given, the list is empty, or a point is given twice, out of range or not a whole number of rows.
    """
    if setting not in _POINTS:
        if points is not None:
            raise ConfigError(f"{_OP}: points are given for the setting '{setting}', which has none. Leave them out.")
        return (None,)
    if points is None:
        return _POINTS[setting]
    check_each_once(_OP, "points", points)
    for point in points:
        if setting == "imbalance":
            check_range(_OP, "points", point, min(SHARES), max(SHARES))
            continue
        check_range(_OP, "points", point, 4, MOST_TRAINED)
        if point != int(point):
            raise ConfigError(f"{_OP}: points are {list(points)}; they are whole numbers of rows. Use 16, for example.")
    return points


def _check_room(stack: LayerStack, settings: CellSettings, points: Sequence[float | None], workers: int) -> None:
    """Raise CacheError unless the states of the largest possible sets fit into the folder for temporary files.

    Raise ConfigError unless their means over the tokens fit into the memory, for the methods that need them: the means
    of all layers, and for "all_layers" three copies of them.

    `points` are those of `_points`; with the setting "imbalance", each has rows of its own. `stack` is the stack that
    is read. `workers` is the number of cells that are counted to run at once with Ray, each with the states of its own
    point; 0: without Ray, one set after the other.
    """
    trained = int(max(map(float, filter(None, points)))) if settings.setting == "scarce" else MOST_TRAINED
    rows = trained + (settings.scored or _MOST_SCORED)
    # points of other settings draw from the same rows
    several = workers or (len(points) if settings.setting == "imbalance" else 1)
    first = "Run without Ray, or " if workers > 1 else ""
    held = f"the states of {workers} cells at once" if workers > 1 else "one set's states"
    needed = several * rows * settings.max_length * stack.layers * stack.width * 2  # float16
    try:
        check_room(Path(tempfile.gettempdir()), needed)
    except CacheError as error:
        hint = f"{first}set TMPDIR to a folder with more room, or use a smaller max_length or fewer scored rows"
        hint = hint[0].upper() + hint[1:]
        message = f"{_OP}: {held} may take {needed / 1e9:.1f} GB; {error.free_bytes} bytes are free. {hint}."
        raise CacheError(message, needed_bytes=needed, free_bytes=error.free_bytes) from error
    copies = 4 if "all_layers" in settings.methods else int(bool(OF_MEANS & {*settings.methods}))
    means = max(1, workers) * copies * rows * stack.layers * stack.width * 4  # float32
    if means > (free := psutil.virtual_memory().available):
        got = f"the means of {held} may take {means / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free"
        hint = f"{first}leave out the methods that read them, or use fewer scored rows"
        raise ConfigError(f"{_OP}: {got}. {hint[0].upper()}{hint[1:]}.")


def benchmark_study(rows: Frame, settings: Mapping[str, JSON]) -> Study:
    """Return the study: the cells' table `rows`, and for each point the comparison of methods over all data sets.

    A conclusion about a point (see `_points`) begins with that point.
    """
    scored = rows.assign(measure="score")
    more: list[Row] = []
    told: list[str] = []
    distance: float | None = None
    for point, part in scored.groupby("point", dropna=False, sort=False):
        where = None if pd.isna(point) else float(point)
        summary = _over_sets(part)
        more += [{**row, "point": where} for row in summary.rows]
        prefix = "" if where is None else f"{where:g}: "
        told += [prefix + sentence for sentence in summary.sentences]
        distance = summary.distance
    several = bool(scored["point"].notna().any())
    shared = _sets_at_every_point(scored) if several else []
    more += _curves(scored[scored["set"].isin(shared)]) if shared else []
    figures = _curve_figures(len(shared), scored["set"].nunique()) if several else _figures(distance)
    table: Frame = pd.concat([scored, pd.DataFrame(more)], ignore_index=True).reindex(columns=list(COLUMNS))
    table = table.astype(dict.fromkeys(("seed", "wins", "level", "losses", "trained", "rows", "chosen"), "Int64"))
    table["point"] = pd.to_numeric(table["point"])
    pivot = Pivot(index=("set", "point") if several else ("set",), columns=("method",), where={"measure": "score"})
    return Study("benchmark", table, settings, figures, tuple(told), pivot)


class _Summary(NamedTuple):
    """The comparison of methods over all data sets at one point (see `_points`).

    Attributes:
        rows: Table rows of the measures "mean", "rank" and "ahead".
        sentences: The conclusions.
        distance: The smallest difference of mean ranks that is significant. None: fewer than six sets, or one method.
    """

    rows: list[Row]
    sentences: list[str]
    distance: float | None = None


def _over_sets(part: Frame) -> _Summary:
    """Return the comparison of methods at one point (see `_points`), over the sets for which all have a score.

    `part` holds the table rows of that point. "default", or the best method if "default" did not run, is compared with
    each other method. With one method there are only "mean" and "rank" rows. With fewer than six sets, a sentence says
    that they allow no conclusion about other sets.
    """
    scores = _scores(part)
    sets = next(iter(scores.values())).shape[1]
    best = "default" if "default" in scores else max(scores, key=lambda name: scores[name].mean())
    ranks = mean_ranks(scores)
    rows: list[Row] = []
    for method in sorted(scores, key=lambda name: ranks[name]):  # charts keep this order
        own = part[part["method"] == method]
        cost = {name: float(own[name].median()) for name in ("seconds", "bytes")}  # one stalled set counts little
        rows.append({"method": method, "measure": "mean", "score": float(scores[method].mean()), **cost})
        rows.append({"method": method, "measure": "rank", "score": ranks[method]})
    if len(scores) < 2:
        return _Summary(rows, [])
    compared = compare_methods(scores, best)
    rows += [{"measure": "ahead", **row} for row in compared]
    told = [_sentence(row, sets, max(len(scores[best]), len(scores[str(row["against"])]))) for row in compared]
    if sets < LEAST_DIFFERING:
        few = f"{pluralize(sets, 'set')} {'allows' if sets == 1 else 'allow'}"
        return _Summary(rows, [*told, f"{few} no conclusion about other sets; {LEAST_DIFFERING} or more are needed."])
    distance = critical_difference(len(scores), sets)
    told.append(f"Mean ranks over {pluralize(sets, 'set')} differ at the 5 % level if {distance:.2f} apart (Nemenyi).")
    return _Summary(rows, told, distance)


def _scores(part: Frame) -> dict[str, np.ndarray]:
    """Return method -> scores `[seeds, sets]`, over the data sets for which every method has a score.

    Methods without seeds have one row. `part` holds the rows of one point (see `_points`).
    """
    wide = part.assign(seed=part["seed"].fillna(-1)).pivot_table("score", ["method", "seed"], "set", sort=False)
    wide = wide.dropna(axis=1)
    return {str(method): own.to_numpy() for method, own in wide.groupby(level="method", sort=False)}


def _sets_at_every_point(scored: Frame) -> list[str]:
    """Return the data sets for which every method has a score at every point (see `_points`)."""
    wide = scored.assign(seed=scored["seed"].fillna(-1)).pivot_table("score", ["method", "seed"], ["set", "point"])
    complete = wide.notna().all().unstack(fill_value=False).all(axis=1)  # False at a point without any score
    return [str(name) for name in complete[complete].index]


def _curves(scored: Frame) -> list[Row]:
    """Return table rows of the measures "shared_mean" and "shared_rank": a method's mean score and mean rank per point.

    `scored` holds the scores of the data sets that every point has. With other sets at each point, a curve could fall
    although no method gets worse: sets with few rows have no score at the points that need many.
    """
    rows: list[Row] = []
    for point, part in scored.groupby("point", sort=False):
        scores = _scores(part)
        ranks = mean_ranks(scores)
        for method in sorted(scores, key=lambda name: ranks[name]):  # charts keep this order
            place = {"point": point, "method": method}
            rows.append({**place, "measure": "shared_mean", "score": float(scores[method].mean())})
            rows.append({**place, "measure": "shared_rank", "score": ranks[method]})
    return rows


_MEAN_AUC, _MEAN_AUC_TITLE, _RANK_TITLE = "mean AUC", "Mean AUC over the sets", "Mean rank (1 is best)"


def _curve_figures(shared: int, sets: int) -> dict[str, Figure]:
    """Return chart name -> curve of the mean score or the mean rank over the points (see `_points`).

    `shared` of the `sets` data sets have a score at every point; without any, there is no chart.
    """
    if not shared:
        return {}
    axes: dict[str, Any] = {"x": "point", "colour": "method"}
    axes["x_title"] = "training rows, or share of the positive class"
    note = f"The points have the same {pluralize(shared, 'set')}."
    if sets > shared:
        lack = "lacks a score at some point and is" if sets - shared == 1 else "lack a score at some point and are"
        note = f"{note} {pluralize(sets - shared, 'other set')} {lack} left out."
    axes["note"] = note
    mean, rank = {"measure": "shared_mean"}, {"measure": "shared_rank"}
    return {
        "score": Figure("line", **axes, where=mean, title=_MEAN_AUC_TITLE, value_title=_MEAN_AUC),
        "rank": Figure("line", **axes, where=rank, title=_RANK_TITLE, value_title="mean rank"),
    }


def _figures(distance: float | None) -> dict[str, Figure]:
    """Return chart name -> chart of a benchmark without points (see `_points`).

    The charts are bars of each method's mean score and mean rank over the data sets, and scatter charts of the mean
    score against time and size. `distance` is the smallest significant difference of mean ranks, which decides their
    intervals; None: it is not known, and they have none.
    """
    mean, title = {"measure": "mean"}, _MEAN_AUC_TITLE
    cost = {"colour": "method", "where": mean, "value_title": _MEAN_AUC}
    time = "seconds of training per reader, without the pass of the model"
    rank: dict[str, Any] = {"where": {"measure": "rank"}, "title": _RANK_TITLE}
    if distance is not None:  # Nemenyi's test as intervals: two methods differ where theirs do not overlap
        apart = f"Methods whose intervals overlap (less than {distance:.2f} apart) do not differ"
        rank |= {"half_interval": distance / 2, "note": f"{apart} at the 5 % level (Nemenyi)."}
    return {
        "score": Figure("bar", "method", where=mean, title=title, value_title=_MEAN_AUC),
        "rank": Figure("bar", "method", **rank),
        "time": Figure("scatter", "seconds", **cost, title=f"{title} and time", x_title=time),
        "size": Figure("scatter", "bytes", **cost, title=f"{title} and size", x_title="bytes"),
    }


def compare_methods(scores: Scores, best: str) -> list[Row]:
    """Compare one method with each of the others over the same data sets.

    Args:
        scores: Method -> its scores `[seeds, sets]`. Methods without seeds have one row.
        best: The method that is compared with the others.

    Returns:
        A row per other method: "method" (`best`), "against" (the other) and "score" (mean difference; positive: `best`
        is ahead). "low" and "high": 95 % interval of the paired bootstrap over sets and seeds. "p": after Holm's
        correction. "wins", "level" (at most 0.005 apart) and "losses": numbers of sets. "differing": the number of sets
        on which the two do not have the same scores. If it is below six, "low", "high" and "p" are None.
    """
    first = scores[best]
    others = [name for name in scores if name != best]
    differences = corrected([paired_bootstrap(*_paired(first, scores[name]), names=(best, name)) for name in others])
    rows: list[Row] = []
    for name, difference in zip(others, differences, strict=True):
        apart = first.mean(0) - scores[name].mean(0)
        rows.append(
            {
                "method": best,
                "against": name,
                "score": difference.value,
                "low": None if difference.few_differ else difference.low,
                "high": None if difference.few_differ else difference.high,
                "p": None if difference.few_differ else difference.corrected_p,
                "wins": int((apart > _MOST_APART).sum()),
                "level": int((np.abs(apart) <= _MOST_APART).sum()),
                "losses": int((apart < -_MOST_APART).sum()),
                "differing": difference.differing,
            }
        )
    return rows


def _paired(first: NDArray[np.floating], second: NDArray[np.floating]) -> tuple[NDArray[np.floating], ...]:
    seeds = max(len(first), len(second))
    return tuple(np.repeat(matrix, seeds, 0) if len(matrix) == 1 else matrix[:seeds] for matrix in (first, second))


def mean_ranks(scores: Scores) -> dict[str, float]:
    """Return method -> mean over the sets of the rank of its mean score over seeds; 1 is the highest score.

    Equal scores share the mean of their ranks.
    """
    from scipy.stats import rankdata

    table = np.stack([matrix.mean(0) for matrix in scores.values()])
    ranks = rankdata(-table, axis=0).mean(1)
    return dict(zip(scores, (float(rank) for rank in ranks), strict=True))


def critical_difference(methods: int, sets: int) -> float:
    """Return the smallest significant difference of two mean ranks, by Nemenyi's test at the 5 % level.

    `methods` and `sets` are the numbers of ranked methods and of data sets.

    Source:
        Demšar 2006, "Statistical Comparisons of Classifiers over Multiple Data Sets", section 3.2.2.
    """
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(1 - _ALPHA, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * sets))


def _sentence(row: Row, sets: int, seeds: int) -> str:
    """Return the sentence for a row of `compare_methods`, with its interval and p value if it has them.

    If it has none although there are six sets or more, the sentence says on how few of them the methods differ.
    `sets` is the number of data sets, and `seeds` that of the method with more seeds.
    """
    value = float(row["score"])  # pyright: ignore
    counts = f"ahead on {row['wins']}, level on {row['level']}, behind on {row['losses']} of {pluralize(sets, 'set')}"
    mean = f"{row['method']} is {abs(value):.3f} {'above' if value >= 0 else 'below'} {row['against']} on average"
    interval = f"{few_differ(int(row['differing']), 'set')}; " if sets >= LEAST_DIFFERING else ""  # pyright: ignore
    if row["p"] is not None:
        low, high, p = (float(row[name]) for name in ("low", "high", "p"))  # pyright: ignore
        low, high = (low, high) if value >= 0 else (-high, -low)
        interval = f"95 % interval {low:.3f} to {high:.3f}, Holm p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}; "
    return f"{mean} ({interval}{pluralize(seeds, 'seed')}), {counts}."


def over_sets(study: Study) -> Frame:
    """Return one row per method (and per point, if a benchmark has several), sorted by point, the best mean first.

    Columns: "point" and "method"; "score" (mean AUC), "spread" (mean over the data sets of the standard deviation over
    seeds; missing without seeds), "rank" (mean rank), "seconds" and "bytes" (medians). "behind_by", "low", "high", "p",
    "wins", "level" and "losses" compare the leader ("default", or the best method without it) with this method, as in
    `compare_methods`; they are missing in the leader's row.
    """
    table: Frame = study.table
    keys = ["point", "method"]
    mean = table[table["measure"] == "mean"].set_index(keys)[["score", "seconds", "bytes"]]
    rank = table[table["measure"] == "rank"].set_index(keys)["score"].rename("rank")
    scores = table[table["measure"] == "score"]
    spread = scores.groupby([*keys, "set"], dropna=False)["score"].std().groupby(level=[0, 1], dropna=False).mean()
    ahead = table[table["measure"] == "ahead"].drop(columns="method").rename(columns={"against": "method"})
    ahead = ahead.set_index(keys)[["score", "low", "high", "p", "wins", "level", "losses"]]
    joined = mean.join(rank).join(spread.rename("spread")).join(ahead.rename(columns={"score": "behind_by"}))
    return joined.reset_index().sort_values(["point", "score"], ascending=[True, False], ignore_index=True)


def markdown_summary(study: Study) -> str:
    """Return a benchmark as Markdown: methods over all sets, conclusions, failed cells, and the AUC on each set.

    Columns without any value are left out, and failed cells if there are none.
    """
    table: Frame = study.table
    leaders = table.loc[table["measure"] == "ahead", "method"].unique()
    leader = str(leaders[0]) if len(leaders) == 1 else "the leader"
    rows = [_cells(row) for row in over_sets(study).to_dict("records")]
    used = [title for title in _SHOWN if any(row[title] for row in rows)]
    titles = [title.replace("the leader", leader) for title in used]
    parts = ["## Over all sets", _table(titles, [[row[title] for title in used] for row in rows])]
    parts.append("\n".join(f"- {sentence}" for sentence in study.conclusions))
    if failures := study.settings.get("failures"):
        listed = "\n".join(f"- {_place(failure['key'])}: {failure['error']}" for failure in failures)
        parts.append(f"{pluralize(len(failures), 'cell')} failed:\n\n{listed}")
    wide: Frame = study.summary()
    if "point" in wide:
        wide["point"] = [f"{point:g}" for point in wide["point"]]
    texts = wide.map(lambda cell: cell if isinstance(cell, str) else f"{cell:.3f}", na_action="ignore").fillna("")
    parts += ["## Every set", _table([str(name) for name in wide.columns], texts.to_numpy().tolist())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _place(key: Mapping[str, Any]) -> str:
    return key["set"] if key["point"] is None else f"{key['set']}, {key['point']:g}"


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells of a row of `over_sets` in Markdown: key of `_SHOWN` -> text, "" if the method has no value."""
    if not pd.isna(row["p"]):
        row = {**row, "p": "< 0.001" if row["p"] < 0.001 else f"{row['p']:.3f}"}
    cells = dict.fromkeys(_SHOWN, "")
    for title, cell in _SHOWN.items():
        if not any(pd.isna(row[name]) for _, name, _, _ in Formatter().parse(cell) if name):
            cells[title] = cell.format(**row)
    return cells


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
