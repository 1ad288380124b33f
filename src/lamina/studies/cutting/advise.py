"""Advice per task: which layers to read and where to cut; done, measured again, and written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, final

import pandas as pd
import torch

from lamina.bank import Reader, ReaderBank
from lamina.editing.editable import select_blocks
from lamina.editing.truncate import truncate_
from lamina.errors import ConfigError
from lamina.fusion.scalar_mix import ScalarMix
from lamina.layers.preserve import evaluating
from lamina.prediction.evaluate import evaluate
from lamina.recipes.schema import slug
from lamina.store.bank_folder import save_bank
from lamina.store.save_model import save
from lamina.studies.runner import Cell, run_cells
from lamina.studies.sources import cell_settings, edited_stack, fresh_model, linear_reader, named_tasks, study_of_cells
from lamina.studies.states.lens import perplexity
from lamina.studies.study import Figure
from lamina.tasks.base import EncodeOptions
from lamina.tasks.metrics import LOWER
from lamina.train.fit import fit
from lamina.train.results import summarise
from lamina.utils import check_range, pluralize

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.studies.runner import Failure
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

_OP = "advise"
_TIMED_ROWS, _TIMES = 32, 5
Row = dict[str, Any]


def advise(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    texts: Iterable[Any] | None = None,
    *,
    processor: Any = None,
    tolerance: float = 0.01,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    max_length: int | None = None,
    stack: str | None = None,
    output: Path | None = None,
    resume: bool = False,
    progress: bool = False,
    ray: str | None = None,
) -> Study:
    """Propose for each task which layers to read and how many blocks to keep; do it, and measure again.

    First a linear reader of every layer is trained, and one of a scalar mix of all of them, in one pass of the frozen
    model. The lowest layer whose mean score is within `tolerance` of the best tells how many blocks stay; the readers'
    layers are those up to there that come as close to it. Then the model is cut, a linear reader of a scalar mix of
    those layers is trained, and held against that of all layers of the whole model, seed by seed. A model with an
    output over a vocabulary is asked for the tokens of `texts` too, whole and cut. The conclusions say what was lost,
    and whether the interval allows it.

    What is chosen (layers, blocks, and the epoch of every reader) is chosen on a tenth of the training rows, which each
    seed holds out anew, and no reader learns from them; the validation rows have no part in it, and measure what was
    lost. The scores of the phase "layers" are of the rows held out.

    Args:
        model: A folder or name, which each cell loads itself (as Ray needs), or a model.
        tasks: Name -> task, with train and validation parts.
        texts: For perplexity.
        processor: Tokenizer or image processor; None: the one of the name.
        tolerance: How much of a task's score may be lost.
        seeds: Of the readers' start, the rows held out and the order of rows; one allows no conclusion.
        output: Folder for the cells that ended (in "layers" and "cut"), and for each task that is cut its model (in
            "models") and the bank with its reader, of the first seed (in "readers"), which that seed's cell writes;
            None: nothing is written.
        epochs: Of the readers' training, as in `removal`; so are all other options.

    Returns:
        A study whose table has "task", "phase" ("layers", "whole" or "cut"), "layer", "blocks" (that stay), "seed",
        "measure" (the task's metric; "perplexity", "parameters" and "speedup", how many times as fast a pass of the cut
        model is) and "score". `settings["proposals"]` has "keep" and "read" of each task.

    Raises:
        ConfigError: If `tolerance` is negative, there is no task or no seed, or all cells failed.

    Source:
        The probe by cutting of Singh and Giovanardi 2020, figure 2, turned into a decision.
    """
    named, listed = named_tasks(tasks), list(texts or ())
    check_range(_OP, "tolerance", tolerance, 0)
    if not named or not seeds:
        raise ConfigError(f"{_OP}: there is no {'seed' if named else 'task'}; at least one is needed.")
    edited = edited_stack(model, processor, stack, _OP)
    training = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "max_length": max_length}
    facts = {"texts": len(listed), "tolerance": tolerance, "seeds": list(seeds), "chosen_on": "a tenth of train"}
    facts["phases"] = ["layers", "whole", "cut"]
    settings = cell_settings(model, named, edited, training, **facts)
    how: dict[str, Any] = {"resume": resume, "progress": progress, "ray": ray}
    first = [
        Cell(
            {"task": name, "phase": "layers", "seed": seed},
            partial(_layers, model, processor, task, stack, seed, training),
        )
        for name, task in named.items()
        for seed in seeds
    ]
    probed, failures = run_cells(first, settings=settings, output=output and output / "layers", **how)
    layers: DataFrame = probed if probed.empty else probed.query("phase == 'layers'")
    found = {} if layers.empty else proposals(layers, {name: task.metric for name, task in named.items()}, tolerance)
    settings["proposals"] = {
        name: {"keep": proposal.keep, "read": list(proposal.read)} for name, proposal in found.items()
    }
    cut = {name: proposal for name, proposal in found.items() if proposal.keep < edited.depth}
    written: dict[tuple[str, int], tuple[Path, Path]] = {}
    if output is not None:
        places = {name: (output / "models" / slug(name), output / "readers" / slug(name)) for name in cut}
        written = {(name, seeds[0]): place for name, place in places.items()}
    second = [
        Cell(
            {"task": name, "phase": "cut", "seed": seed},
            partial(_cut, model, processor, named[name], proposal, seed, training, written.get((name, seed))),
        )
        for name, proposal in cut.items()
        for seed in seeds
    ]
    second += [
        Cell(
            {"task": name, "phase": "cut", "seed": None},
            partial(_costs, model, processor, named[name], proposal, listed, training["max_length"]),
        )
        for name, proposal in cut.items()
    ]
    measured, more = run_cells(second, settings=settings, output=output and output / "cut", **how)
    return _study(probed, measured, [*failures, *more], settings, found, edited.depth, named)


def _study(
    probed: Any,
    measured: Any,
    failures: list[Failure],
    settings: Row,
    found: Mapping[str, Proposal],
    depth: int,
    named: Any,
) -> Study:
    columns = ["task", "phase", "layer", "blocks", "seed", "measure", "score"]
    table = pd.concat([part for part in (probed, measured) if len(part)] or [probed]).reindex(columns=columns)
    table = table.astype(dict.fromkeys(("layer", "blocks", "seed"), "Int64")).reset_index(drop=True)
    metrics = {name: task.metric for name, task in named.items()}
    tolerance = settings["tolerance"]
    sentences = [sentence(name, found[name], depth, table, metrics[name], tolerance) for name in found]
    figures = {
        metric: Figure(
            "line",
            x="layer",
            colour="task",
            where={"measure": metric, "phase": "layers"},
            title="What a linear reader of each layer scores",
            value_title=metric,
            note="Where the curve is level, the blocks above can go.",
        )
        for metric in dict.fromkeys(metrics.values())
    }
    return study_of_cells(_OP, table, failures, settings, figures, sentences)


def _layers(
    model: Any, processor: Any, task: Task, stack: str | None, seed: int, training: Mapping[str, Any]
) -> list[Row]:
    """In one pass a linear reader of every layer, scored on rows that were held out of those to learn from.

    Beside them stands one of all layers, "whole", which is scored on the validation rows.
    """
    own, reader = fresh_model(model, processor)
    held = task.held_out(seed)
    bank, used = ReaderBank(own, reader), select_blocks(own, "all", stack, _OP)[0]
    names = {f"layer{layer}": layer for layer in range(used.layers)}
    for name, layer in names.items():
        bank.add(name, _reader(task, [layer], used.name, seed))
    bank.add("whole", _reader(task, range(1, used.layers), used.name, seed))
    fit(bank, dict.fromkeys(bank, held), seed=seed, progress=False, **training)
    scores = evaluate(bank, {**dict.fromkeys(names, held), "whole": task})
    facts = {"measure": task.metric, "stack": used.name}
    rows = [{"layer": layer, **facts, "score": scores[name][task.metric]} for name, layer in names.items()]
    return [*rows, {"phase": "whole", "blocks": used.depth, **facts, "score": scores["whole"][task.metric]}]


def _reader(task: Task, layers: Sequence[int], stack: str, seed: int) -> Reader:
    plain = linear_reader(task, stack=stack, seed=seed)
    return Reader(ScalarMix(layers=list(layers)), plain.head, stack, seed)


def _cut(
    model: Any,
    processor: Any,
    task: Task,
    plan: Proposal,
    seed: int,
    training: Mapping[str, Any],
    folders: tuple[Path, Path] | None,
) -> list[Row]:
    """A reader of a mix of layers of the cut model, scored on the validation rows; both are written to `folders`."""
    own, reader = fresh_model(model, processor)
    truncate_(own, plan.keep, plan.stack)
    bank = ReaderBank(own, reader)
    bank.add("task", _reader(task, plan.read, plan.stack, seed))
    fit(bank, {"task": task.held_out(seed)}, seed=seed, progress=False, **training)
    score = evaluate(bank, {"task": task})["task"][task.metric]
    if folders is not None:
        _write(bank, reader, *folders)
    return [{"blocks": plan.keep, "measure": task.metric, "score": score}]


def _costs(
    model: Any, processor: Any, task: Task, plan: Proposal, texts: list[Any], max_length: int | None
) -> list[Row]:
    """Parameters, time and perplexity of the whole model and the cut one."""
    whole, reader = fresh_model(model, processor)
    cut, _ = fresh_model(model, processor)
    depth = select_blocks(whole, "all", plan.stack, _OP)[0].depth
    truncate_(cut, plan.keep, plan.stack)
    sides = {"whole": (whole, depth), "cut": (cut, plan.keep)}
    rows: list[Row] = []
    for phase, (own, blocks) in sides.items():
        place = {"phase": phase, "blocks": blocks}
        rows.append({**place, "measure": "parameters", "score": own.num_parameters()})
        if texts and own.get_output_embeddings() is not None:
            rows.append({**place, "measure": "perplexity", "score": perplexity(own, texts, reader, blocks, max_length)})
    kind = task.kind
    options = EncodeOptions(part="predict", max_length=kind.length_limit(whole, reader, max_length))
    part = task.split("validation")
    count = min(len(part), _TIMED_ROWS)
    inputs = kind.encode(part.select_rows(range(count)), reader, options)
    batch = {key: value for key, value in inputs.batch(list(range(count))).items() if key != "labels"}
    ratios = []
    for _ in range(_TIMES):
        took = [_seconds(own, batch) for own, _ in sides.values()]
        ratios.append(took[0] / took[1])
    return [*rows, {"blocks": plan.keep, "measure": "speedup", "score": median(ratios)}]


@torch.no_grad()
def _seconds(model: PreTrainedModel, batch: Mapping[str, Any]) -> float:
    with evaluating(model):
        start = time.perf_counter()
        model.base_model(**batch)
        return time.perf_counter() - start


def _write(bank: ReaderBank, processor: Any, model: Path, readers: Path) -> None:
    """The cut model, and the bank with its reader, which names that folder as its base."""
    save(bank.model, model, processor)
    save_bank(bank, readers)


@final
@dataclass(frozen=True)
class Proposal:
    """How many blocks to keep, and at which layers to read."""

    keep: int
    read: tuple[int, ...]
    stack: str


def proposals(table: DataFrame, metrics: Mapping[str, str], tolerance: float) -> dict[str, Proposal]:
    """Per task the fewest blocks whose top layer scores within `tolerance` of the best layer, by the mean over seeds.

    `table` has "task", "layer", "stack" and "score", a row per seed. One block at least stays. Layers to read are that
    one, and those below that come within `tolerance` of it.
    """
    found: dict[str, Proposal] = {}
    for name, rows in table.groupby("task", sort=False):
        sign = -1 if metrics[str(name)] in LOWER else 1
        means: dict[int, float] = {int(k): sign * v for k, v in rows.groupby("layer")["score"].mean().items()}  # pyright: ignore
        best = max(score for layer, score in means.items() if layer)
        keep = min(layer for layer, score in means.items() if layer and score >= best - tolerance)
        read = tuple(layer for layer in sorted(means) if layer <= keep and means[layer] >= means[keep] - tolerance)
        found[str(name)] = Proposal(keep, read, str(rows["stack"].iloc[0]))
    return found


def sentence(task: str, proposal: Proposal, depth: int, table: Any, metric: str, tolerance: float) -> str:
    """What is proposed, what came of it, and whether the interval allows to say so."""
    if proposal.keep == depth:
        return f"{task}: keep all {depth} blocks; no lower layer comes within {tolerance:g} of the best {metric}."
    own = table[table["task"] == task]
    what = f"{task}: read at {_and(proposal.read)}; keep {proposal.keep} of {pluralize(depth, 'block')}"
    sides = [own[(own["measure"] == metric) & (own["phase"] == phase)] for phase in ("whole", "cut")]
    whole, cut = (side.dropna(subset=["seed"]).set_index("seed")["score"].to_dict() for side in sides)
    changes = [cut[seed] - whole[seed] for seed in cut if seed in whole]
    if not changes:
        return f"{what}. It could not be measured: its cells failed."
    summary = summarise(changes)
    interval = "" if summary.interval is None else f" ± {summary.interval:.3f}"
    said = f"{what}: {metric} {summary.mean:+.3f}{interval}{_costs_text(own)}"
    return f"{said}. {_verdict(-1 if metric in LOWER else 1, summary.mean, summary.interval, tolerance, len(changes))}"


def _verdict(sign: int, mean: float, interval: float | None, tolerance: float, seeds: int) -> str:
    if interval is None:
        return "One seed allows no interval, and no conclusion."
    worst, best = sign * mean - interval, sign * mean + interval
    facts = f"(95 % interval over {seeds} seeds)"
    if worst >= -tolerance:
        return f"No more than {tolerance:g} is lost {facts}."
    if best < -tolerance:
        return f"More than {tolerance:g} is lost {facts}: do not cut there."
    return f"The interval does not allow to conclude that no more than {tolerance:g} is lost {facts}."


def _costs_text(own: Any) -> str:
    scores = {(row.phase, row.measure): row.score for row in own.itertuples()}
    parts: list[str] = []
    if ("cut", "speedup") in scores:
        parts.append(f"{scores['cut', 'speedup']:.2f} x as fast")
    if ("cut", "parameters") in scores:
        parts.append(f"{1 - scores['cut', 'parameters'] / scores['whole', 'parameters']:.0%} fewer parameters")
    if ("cut", "perplexity") in scores:
        parts.append(f"perplexity {scores['whole', 'perplexity']:.2f} -> {scores['cut', 'perplexity']:.2f}")
    return "".join(f", {part}" for part in parts)


def _and(layers: Sequence[int]) -> str:
    *most, last = map(str, layers)
    return f"{', '.join(most)} and {last}" if most else last
