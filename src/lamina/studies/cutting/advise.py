"""The study `advise`: propose which layers to read and where to cut for each task; then cut, and measure again."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, final

import pandas as pd
import torch

from lamina.bank import Reader, ReaderBank
from lamina.editing.keep import truncate_
from lamina.errors import ConfigError
from lamina.fusion.scalar_mix import ScalarMix
from lamina.layers.devices import main_device
from lamina.layers.preserve import evaluating
from lamina.prediction.evaluate import evaluate
from lamina.recipes.schema import slug
from lamina.store.bank_folder import save_bank
from lamina.store.save_model import save
from lamina.studies.runner import (
    Cell,
    CellInputs,
    Training,
    check_given,
    encode_rows,
    linear_reader,
    named_tasks,
    run_cells,
    study_of_cells,
    whole_digests,
)
from lamina.studies.states.lens import perplexity
from lamina.studies.study import Figure, rows_where, scores_by_seed
from lamina.tasks.metrics import LOWER
from lamina.train.base import to_device
from lamina.train.fit import fit
from lamina.train.results import summarise
from lamina.utils import JSON, Row, check_range, check_types, pluralize

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers.types import Batch, Processor
    from lamina.studies.passes import Text
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

_OP = "advise"
_ROUNDING = 1e-9  # 0.86 - 0.87 is a little less than -0.01 in floating point
_TIMED_ROWS, _REPEATS = 32, 5  # rows of one timed pass, and number of passes
_COLUMNS = ["task", "phase", "layer", "blocks", "seed", "measure", "score"]


@final
@dataclass(frozen=True)
class Proposal:
    """A proposal of the study `advise` for one task: how many blocks to keep, and which layers to read.

    Attributes:
        keep: Number of blocks to keep, counted from the bottom of the stack.
        read: Numbers of the layers that a reader should mix.
        stack: Name of the stack that `keep` and `read` refer to.
    """

    keep: int
    read: tuple[int, ...]
    stack: str


@check_types("advise")
def advise(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task,
    texts: Iterable[Text] | None = None,
    *,
    processor: Processor | None = None,
    tolerance: float = 0.01,
    seeds: Sequence[int] = (0, 1, 2),
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
    max_length: int | None = None,
    stack: str | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    ray: str | None = None,
) -> Study:
    """Propose for each task which layers to read and how many blocks to keep; then cut the model, and measure again.

    1. In one pass of the frozen model, a linear reader of every single layer is trained, and one linear reader of a
       scalar mix of all layers but the embeddings.
    2. The lowest layer, from 1, whose mean score is within `tolerance` of the best such layer's score is the last block
       to keep. The layers to read are that layer, and every lower layer (the embeddings too) whose score is within
       `tolerance` of it. If the last block to keep is the top one, steps 3 and 4 are left out.
    3. The model is cut after that block, and a linear reader of a scalar mix of the layers to read is trained. Seed by
       seed, its score is compared with the score of the reader of all layers of the whole model.
    4. If the model has an output over a vocabulary, the perplexity of `texts` is measured before and after the cut.

    The conclusions say how much of the score was lost, and whether the 95 % interval supports that.

    The layers, the number of blocks and the best epoch of each reader are chosen on a tenth of the training rows. Each
    seed draws another tenth, and no reader is trained on it. The validation rows serve only to measure the loss. So the
    scores of the phase "layers" are scores on that tenth, and all other scores are on the validation rows.

    Args:
        model: A model, which is copied; or a folder or name, which each cell loads itself, as Ray requires.
        tasks: Task name -> task, with the splits "train" and "validation"; or a single task.
        texts: Texts, or pairs of texts, to measure the perplexity on. None: it is not measured.
        processor: Tokenizer or image processor. None: the one saved with the model.
        tolerance: How much of a task's score may be lost, in units of its metric; at least 0.
        seeds: Each seed decides the readers' initial weights, the tenth of the training rows, and the order of the
            rows. Fewer than three allow no conclusion.
        epochs: Number of epochs of the readers. Other options of training are as in `removal`; `stack`, `resume`,
            `progress` and `ray` as in `reinit`.
        output: Folder for the finished cells, in its subfolders "layers" and "cut". For each task whose model is cut,
            the cut model is saved in "models", and a bank with the reader of the first seed in "readers". None: nothing
            is written.

    Returns:
        A study with the columns "task", "phase" ("layers", "whole" or "cut"), "layer", "blocks" (number of blocks that
        are kept), "seed", "measure" and "score". Measures are the task's metric, "perplexity", "parameters" (number of
        parameters) and "speedup" (time of a pass of the whole model divided by that of the cut model).
        `settings["proposals"]` maps each task's name to its "keep" and "read", as in `Proposal`. Cells that
        raised an error have no rows; `settings["failures"]` lists them.

    Raises:
        ConfigError: If an option is out of range, there is no task or no seed, a seed is named twice, the processor
            fits no task, the stack has no module per block, a task has recorded states, or all cells failed; if
            `resume` is set without `output`, the cells in `output` were run with other settings, texts or library
            versions, or two tasks would be saved in one folder there.
        UnknownNameError: If a task does not have both splits, or the stack does not exist.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found.
        StoreError: If files of `model` are damaged, `output` cannot be written, or a finished cell in it is damaged.
        MissingExtraError: If `ray` is set and Ray is not installed.

    Source:
        The probe by cutting of Singh and Giovanardi 2020, figure 2, turned into a decision.
    """
    named, listed = named_tasks(_OP, tasks), [] if texts is None else list(texts)
    check_range(_OP, "tolerance", tolerance, 0)
    check_given(_OP, tasks=named, seeds=seeds)
    if output is not None:
        _check_folders(named)
    training = Training(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, max_length=max_length)
    inputs = CellInputs(model, processor, stack, training)
    options: dict[str, JSON] = {"texts": len(listed), "tolerance": tolerance, "chosen_on": "a tenth of train"}
    edited, settings, head = inputs.check(_OP, named, seeds, **options, phases=["layers", "whole", "cut"])
    folder = None if output is None else Path(output)
    run = partial(run_cells, settings=settings, resume=resume, progress=progress, ray=ray)
    layer_cells = [
        Cell({"task": name, "phase": "layers", "seed": seed}, partial(_score_layers, inputs, task, seed))
        for name, task in named.items()
        for seed in seeds
    ]
    layer_table, failures = run(layer_cells, output=folder and folder / "layers")
    metrics = {name: task.metric for name, task in named.items()}
    proposed: dict[str, Proposal] = {}
    if not layer_table.empty:
        proposed = proposals(rows_where(layer_table, {"phase": "layers"}), metrics, tolerance)
    settings["proposals"] = {
        name: {"keep": proposal.keep, "read": list(proposal.read)} for name, proposal in proposed.items()
    }
    score_cells: list[Cell] = []
    cost_cells: list[Cell] = []
    for name, proposal in proposed.items():
        if proposal.keep == edited.depth:
            continue
        for seed in seeds:
            saved = (folder, slug(name)) if folder is not None and seed == seeds[0] else None
            work = partial(_score_cut_model, inputs, named[name], proposal, seed, saved)
            score_cells.append(Cell({"task": name, "phase": "cut", "seed": seed}, work))
        work = partial(_measure_costs, inputs, named[name], proposal, listed)
        cost_cells.append(Cell({"task": name, "phase": "cut", "seed": None}, work, digests=whole_digests(head, listed)))
    cut_table, cut_failures = run([*score_cells, *cost_cells], output=folder and folder / "cut")
    table = pd.concat([part for part in (layer_table, cut_table) if len(part)] or [layer_table])
    table = table.reindex(columns=_COLUMNS).astype(dict.fromkeys(("layer", "blocks", "seed"), "Int64"))
    table = table.reset_index(drop=True)
    sentences = [
        sentence(name, proposal, edited.depth, table, metrics[name], tolerance) for name, proposal in proposed.items()
    ]
    return study_of_cells(_OP, table, [*failures, *cut_failures], settings, _figures(metrics), sentences)


def _check_folders(names: Iterable[str]) -> None:
    """Raise ConfigError if the cut models of two tasks with these names would be saved in one folder."""
    owners: dict[str, str] = {}
    for name in names:
        if (owner := owners.setdefault(slug(name), name)) != name:
            got = f"the tasks '{owner}' and '{name}' would be saved in one folder, '{slug(name)}'"
            raise ConfigError(f"{_OP}: {got}; their letters and digits must differ. Rename one of them.")


def _figures(metrics: Mapping[str, str]) -> dict[str, Figure]:
    return {
        metric: Figure(
            "line",
            x="layer",
            colour="task",
            where={"measure": metric, "phase": "layers"},
            title="What a linear reader of each layer scores",
            value_title=metric,
            note="From the layer where the line stops rising, the blocks above add nothing that this reader needs.",
        )
        for metric in dict.fromkeys(metrics.values())
    }


def _score_layers(inputs: CellInputs, task: Task, seed: int) -> list[Row]:
    """Run a cell of the phase "layers": in one pass, train a linear reader of each layer, and one of all layers from 1.

    Returns one table row per layer, scored on the tenth of the training rows that `seed` holds out, and one row of the
    phase "whole": the score of the reader of all layers on the validation rows.
    """
    model, processor, stack = inputs.fresh(_OP)
    held_out = task.held_out(seed).without_test()
    bank = ReaderBank(model, processor)
    layers = {f"layer{layer}": layer for layer in range(stack.layers)}
    for name, layer in layers.items():
        bank.add(name, _mix_reader(task, [layer], stack.name, seed))
    bank.add("whole", _mix_reader(task, range(1, stack.layers), stack.name, seed))
    fit(bank, dict.fromkeys(bank, held_out), seed=seed, progress=False, **inputs.training)
    scores = evaluate(bank, {**dict.fromkeys(layers, held_out), "whole": task})
    facts = {"measure": task.metric, "stack": stack.name}
    rows: list[Row] = [{"layer": layer, **facts, "score": scores[name][task.metric]} for name, layer in layers.items()]
    return [*rows, {"phase": "whole", "blocks": stack.depth, **facts, "score": scores["whole"][task.metric]}]


def _mix_reader(task: Task, layers: Sequence[int], stack: str, seed: int) -> Reader:
    """Return the config of an untrained reader: a linear head over a scalar mix of a stack's `layers`, with `seed`."""
    return Reader(ScalarMix(layers=list(layers)), linear_reader(task, stack=stack, seed=seed).head, stack, seed)


def _score_cut_model(
    inputs: CellInputs, task: Task, proposal: Proposal, seed: int, saved: tuple[Path, str] | None
) -> list[Row]:
    """Run a cell of the phase "cut": cut the model as proposed, train a reader of the proposed layers, and score it.

    Returns one table row, with the score on the validation rows. `saved` is (the study's output folder, a name): the
    cut model is saved in its `models/<name>`, the bank in `readers/<name>`. None: neither. `seed` decides the reader's
    initial weights, the held-out rows and the order of the rows.
    """
    model, processor, _ = inputs.fresh(_OP)
    truncate_(model, proposal.keep, proposal.stack)
    bank = ReaderBank(model, processor)
    bank.add("task", _mix_reader(task, proposal.read, proposal.stack, seed))
    fit(bank, {"task": task.held_out(seed).without_test()}, seed=seed, progress=False, **inputs.training)
    score = evaluate(bank, {"task": task})["task"][task.metric]
    if saved is not None:
        output, name = saved
        save(bank.model, output / "models" / name, processor)
        save_bank(bank, output / "readers" / name)  # it names the model's folder as its base
    return [{"blocks": proposal.keep, "measure": task.metric, "score": score}]


def _measure_costs(inputs: CellInputs, task: Task, proposal: Proposal, texts: list[Text]) -> list[Row]:
    """Measure parameters and perplexity of the whole model and of the proposed cut model, and the speedup by the cut.

    Returns table rows: parameters and perplexity have one row per model, and the speedup has one row. There is no
    perplexity if there are no texts or the model has no output over a vocabulary. The speedup is measured on up to 32
    validation rows.
    """
    (whole, processor, stack), (cut, *_) = inputs.fresh(_OP), inputs.fresh(_OP)
    truncate_(cut, proposal.keep, proposal.stack)
    max_length = inputs.training["max_length"]
    rows: list[Row] = []
    for phase, model, blocks in (("whole", whole, stack.depth), ("cut", cut, proposal.keep)):
        place = {"phase": phase, "blocks": blocks}
        rows.append({**place, "measure": "parameters", "score": model.num_parameters()})
        if texts and model.get_output_embeddings() is not None:
            score = perplexity(model, texts, processor, blocks, max_length)
            rows.append({**place, "measure": "perplexity", "score": score})
    speedup = measure_speedup(whole, cut, task, processor, max_length)
    return [*rows, {"blocks": proposal.keep, "measure": "speedup", "score": speedup}]


def measure_speedup(
    whole: PreTrainedModel, cut: PreTrainedModel, task: Task, processor: Processor | None, max_length: int | None = None
) -> float:
    """Return the time of a pass of the whole model divided by that of the cut model: the median over five pairs.

    A pass runs the model without its head on up to 32 validation rows of the task. A decoder beside an encoder reads as
    many tokens as the labels have if the task is to generate text. In other tasks it reads as many as the encoder, or
    one if that reads no text. Raises ConfigError as `encode_rows` does. `max_length` is the maximum tokens per text;
    None: what the model allows.
    """
    validation = task.split("validation")
    count = min(len(validation), _TIMED_ROWS)
    inputs = encode_rows(task, validation.select_rows(range(count)), whole, processor, max_length)
    batch = to_device(inputs.batch(list(range(count))), main_device(whole))
    labels = batch.pop("labels", None)
    accepted = inspect.signature(whole.base_model.forward).parameters
    if getattr(whole.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        read = labels if task.kind.generates else batch.get("input_ids")
        width = 1 if read is None else read.shape[1]
        batch["decoder_input_ids"] = torch.zeros(count, width, dtype=torch.long, device=main_device(whole))
    # in turns, because the speed of a machine changes over time
    return median(_pass_seconds(whole, batch) / _pass_seconds(cut, batch) for _ in range(_REPEATS))


@torch.no_grad()
def _pass_seconds(model: PreTrainedModel, batch: Batch) -> float:
    is_cuda = (device := main_device(model)).type == "cuda"  # a GPU runs behind the calls
    with evaluating(model):
        if is_cuda:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        model.base_model(**batch)  # pyright: ignore[reportCallIssue]
        if is_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start


def proposals(table: DataFrame, metrics: Mapping[str, str], tolerance: float) -> dict[str, Proposal]:
    """Return task name -> proposal, from the scores of each layer's linear reader.

    The blocks to keep end at the lowest layer whose mean score over seeds is within `tolerance` of the best layer's
    mean score. Layer 0, the embeddings, does not count here, so at least one block is kept. The layers to read are that
    layer, and all lower layers, 0 included, that score within `tolerance` of it.

    Args:
        table: Columns "task", "layer", "stack" and "score", one row per task, layer and seed.
        metrics: Task name -> metric name, which says whether higher scores are better.
        tolerance: How much of the score may be lost, in units of the metric.
    """
    scores: dict[str, dict[int, list[float]]] = {}
    stacks: dict[str, str] = {}
    columns = (table[column] for column in ("task", "stack", "layer", "score"))
    for task, stack, layer, score in zip(*columns, strict=True):
        sign = -1 if metrics[task] in LOWER else 1
        scores.setdefault(task, {}).setdefault(int(layer), []).append(sign * score)
        stacks[task] = stack
    proposed: dict[str, Proposal] = {}
    for task, by_layer in scores.items():
        means = {layer: fmean(by_layer[layer]) for layer in sorted(by_layer)}
        best = max(score for layer, score in means.items() if layer)
        keep = min(layer for layer, score in means.items() if layer and score >= best - tolerance - _ROUNDING)
        read = tuple(layer for layer in means if layer <= keep and means[layer] >= means[keep] - tolerance - _ROUNDING)
        proposed[task] = Proposal(keep, read, stacks[task])
    return proposed


def sentence(task: str, proposal: Proposal, depth: int, table: DataFrame, metric: str, tolerance: float) -> str:
    """Return the conclusion for one task: the proposal, what the cut changed, and what the 95 % interval supports.

    `table` is the table of the study `advise`, and `depth` the number of blocks of the whole model. `tolerance` is how
    much of the score may be lost, in units of the metric. If all blocks are kept, or the cut could not be measured
    because its cells failed, the sentence says so.
    """
    if proposal.keep == depth:
        return f"{task}: keep all {depth} blocks; no lower layer comes within {tolerance:g} of the best {metric}."
    what = f"{task}: read at {_and(proposal.read)}; keep {proposal.keep} of {pluralize(depth, 'block')}"
    whole, cut = (
        scores_by_seed(table, {"task": task, "measure": metric, "phase": phase}) for phase in ("whole", "cut")
    )
    changes = [cut[seed] - whole[seed] for seed in cut if seed in whole]
    if not changes:
        return f"{what}. It could not be measured: its cells failed."
    summary = summarise(changes)
    half = summary.shown_interval
    interval = "" if half is None else f" ± {half:.3f}"
    change = f"{metric} {summary.mean:+.3f}{interval}{_costs_text(rows_where(table, {'task': task}))}"
    sign = -1 if metric in LOWER else 1
    return f"{what}: {change}. {_verdict(sign * summary.mean, half, tolerance, len(changes))}"


def _verdict(change: float, interval: float | None, tolerance: float, seeds: int) -> str:
    """Return the sentence that says whether the score fell by no more than `tolerance`, or that this cannot be said.

    `change` is the mean change of the score over `seeds` seeds (negative: worse). `interval` is half the width of its
    95 % interval; None with fewer than three seeds.
    """
    if interval is None:
        return f"{'One seed allows' if seeds == 1 else 'Two seeds allow'} no interval, and no conclusion."
    facts = f"(95 % interval over {seeds} seeds)"
    if change - interval >= -tolerance - _ROUNDING:
        return f"No more than {tolerance:g} is lost {facts}."
    if change + interval < -tolerance - _ROUNDING:
        return f"More than {tolerance:g} is lost {facts}: do not cut there."
    return f"The interval does not allow to conclude that no more than {tolerance:g} is lost {facts}."


def _costs_text(rows: DataFrame) -> str:
    """Return what a cut changes besides the score, such as ", 1.30 x as fast, 16% fewer parameters".

    `rows` are the study's table rows of one task. A measure without rows is left out of the text.
    """
    columns = (rows[column] for column in ("phase", "measure", "score"))
    scores = {(phase, measure): score for phase, measure, score in zip(*columns, strict=True)}
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
