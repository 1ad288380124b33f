"""What a model loses with each block, or run of blocks: measured, beside what cheap proxies foretold."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import get_ident
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor, nn

from lamina.bank import ReaderBank
from lamina.bank.listening import can_generate
from lamina.data.batches import tokenizer_of
from lamina.data.encode import length_limit
from lamina.editing.editable import select_blocks
from lamina.errors import ConfigError, DataError, UnsupportedModelError
from lamina.layers.preserve import evaluating
from lamina.layers.roles import family_of
from lamina.prediction.evaluate import evaluate
from lamina.studies.passes import row_groups, text_inputs
from lamina.studies.runner import Cell, run_cells
from lamina.studies.sources import cell_settings, edited_stack, fresh_model, linear_reader, named_tasks, study_of_cells
from lamina.studies.states.lens import perplexity
from lamina.studies.states.output_head import OutputHead
from lamina.studies.states.similarity import similarity
from lamina.studies.states.variability import variability
from lamina.studies.states.vectors import is_text_token
from lamina.studies.statistics import RankCorrelation, rank_correlation
from lamina.studies.study import Figure
from lamina.tasks.base import EncodeOptions
from lamina.tasks.metrics import LOWER
from lamina.train.fit import fit
from lamina.train.results import summarise
from lamina.utils import check_range, pluralize

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.studies.study import Study
    from lamina.tasks.base import Inputs
    from lamina.tasks.task import Task

_OP = "removal"
LANGUAGE, GENERATION = "language model", "generation"  # the tasks of a model's own output head
_PROMPTS, _PROMPT_TOKENS = 32, 8  # texts whose first tokens are prompts, and how many
_PROXY_ROWS = 512  # that proxies are measured on
Row = dict[str, Any]


def removal(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task | None = None,
    texts: Iterable[Any] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    new_tokens: int = 32,
    processor: Any = None,
    runs: Sequence[int] = (1,),
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
    """Take each block, and each run of n blocks, out of a model, and measure what is lost.

    For each task and seed a linear reader of the last layer is trained once, on the whole frozen model, and scored with
    each run of blocks left out; nothing is trained again. A model with an output over a vocabulary is asked for the
    tokens of `texts` too (of a masked model hidden ones). A causal one that generates also goes on from prompts, token
    by token the most likely one, with all blocks and without each run. Nothing is known of the family: a block that is
    out hands on the state that it was given.

    Measures: the task's metric, "perplexity" or "same_tokens" of the whole model (blocks 0) and without a run;
    "same_tokens" is the share of the whole model's continuation, from its first token on, that is written before the
    two first differ, from 0 to 1, the mean over prompts. "drop" is what is lost (for perplexity the rise of its
    logarithm), beside what each proxy foretold of it in "predicted"; and
    "rank_correlation" (Spearman) of the two over all runs, by the means of the seeds. Proxies, from before the first to
    after the last block of a run: "block_influence", 1 - the mean cosine of tokens' states; "cka_distance", 1 - CKA of
    the rows' vectors; "nu", by how much the variability within classes falls, for tasks of one class per row.

    Args:
        model: A model; or a folder or name, which each cell loads itself (as Ray needs).
        tasks: Name -> task, with train and validation parts.
        texts: For perplexity.
        prompts: To go on from; None: the first 8 tokens of each of up to 32 of the texts.
        new_tokens: That are written, at most; 0: nothing is.
        processor: Tokenizer or image processor; None: the one of the name.
        runs: Lengths of the runs of blocks that are taken out.
        seeds: Of the readers' start and the order of rows.
        epochs: Of the readers' training.
        batch_size: Of training; scores do not depend on it.
        learning_rate: Of the readers.
        max_length: As of `reinit`, and so are the options that follow.

    Returns:
        A study whose table has "task", "seed", "layer" (the first block that is out; 0: none), "blocks" (how many),
        "measure", "proxy", "predicted", "n" (runs of blocks, of a correlation), "p", "score" and, where something was
        written, "text", the first prompt and what was written behind it.

    Raises:
        ConfigError: If there is neither a task nor text, a run is not from 1 to the depth less 1, `new_tokens` is
            negative, or all cells failed.

    Source:
        Men et al. 2024, "ShortGPT", arXiv:2403.03853, for block influence, and Gromov et al. 2024, arXiv:2403.17887,
        for runs of blocks: both cut by the proxy; here it is held against what was measured. Xie et al. 2022,
        arXiv:2210.10041, for nu.
    """
    named, listed = named_tasks(tasks), list(texts or ())
    check_range(_OP, "new_tokens", new_tokens, 0)
    if not named and not listed and not prompts:
        raise ConfigError(f"{_OP}: there is no task and no text; at least one is needed to measure by.")
    edited = edited_stack(model, processor, stack, _OP)
    for length in runs:
        check_range(_OP, "runs", length, 1, edited.depth - 1)
    spans = [(first, length) for length in runs for first in range(1, edited.depth - length + 2)]
    training = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "max_length": max_length}
    base = partial(_Cell, model, processor, stack, spans, max_length)
    cells = [
        Cell({"task": name, "seed": "all"}, partial(_trained, base, task, list(seeds), training))
        for name, task in (named.items() if seeds else ())
    ]
    cells += [Cell({"task": name, "seed": None}, partial(_proxies, base, task)) for name, task in named.items()]
    if listed:
        cells.append(Cell({"task": LANGUAGE, "seed": None}, partial(_language, base, listed)))
    if new_tokens and (listed or prompts):
        work = partial(_generation, base, listed, prompts, new_tokens)
        cells.append(Cell({"task": GENERATION, "seed": None}, work))
    own = {
        "prompts": None if prompts is None else list(prompts),
        "new_tokens": new_tokens,
        "texts": len(listed),
        "runs": list(runs),
        "seeds": list(seeds),
    }
    settings = cell_settings(model, named, edited, training, **own)
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    conclusions: list[str] = []
    if len(table):
        table, conclusions = with_predictions(table)
    return study_of_cells(_OP, table, failures, settings, _figures(), conclusions)


class _Cell:
    """What every cell begins with: the model, and its runs of blocks."""

    def __init__(
        self, model: Any, processor: Any, stack: str | None, spans: list[tuple[int, int]], max_length: int | None
    ) -> None:
        self.model, self.processor = fresh_model(model, processor)
        self.stack = select_blocks(self.model, "all", stack, _OP)[0]
        self.spans, self.max_length = spans, max_length

    def without(self, measure: Any) -> list[Row]:
        """What `measure` gives of the whole model, and without each run of blocks."""
        rows = [{"layer": 0, "blocks": 0, **row} for row in measure()]
        loggers = [logging.getLogger(f"lamina.{room}") for room in ("train", "prediction")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)  # the same warnings were given for the whole model
        try:
            for first, length in self.spans:
                with skipping(self.model, self.stack, range(first, first + length), op=_OP):
                    rows += [{"layer": first, "blocks": length, **row} for row in measure()]
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
        return rows

    def proxies(self, inputs: Inputs, count: int) -> list[Row]:
        """Block influence and CKA of each run, on rows in random batches."""
        groups = row_groups(count, 32, 0)
        batches = [{k: v for k, v in inputs.batch(group).items() if k != "labels"} for group in groups]
        read = partial(similarity, self.model, batches=batches, stack=self.stack.name)
        cka = read(measures=["cka"], minibatch=64).table.set_index(["layer", "other_layer"])["score"]
        rows: list[Row] = []
        for length in dict.fromkeys(length for _, length in self.spans):
            for phase in range(length):
                layers = list(range(phase, self.stack.layers, length))
                if len(layers) > 1:
                    moved = read(measures=["block_influence"], layers=layers).table
                    pairs = zip(moved["other_layer"], moved["layer"], moved["score"], strict=True)
                    for below, above, score in pairs:
                        place = {"layer": int(below) + 1, "blocks": length}
                        rows.append({**place, "measure": "block_influence", "score": score})
                        rows.append({**place, "measure": "cka_distance", "score": 1 - cka[above, below]})
        return rows


def _trained(base: Any, task: Task, seeds: list[int], training: Mapping[str, Any]) -> list[Row]:
    """The readers of all seeds, each trained in an order of its own; what is left without a run is read in one pass."""
    cell: _Cell = base()
    bank = ReaderBank(cell.model, cell.processor)
    names = {f"seed{seed}": seed for seed in seeds}
    for name, seed in names.items():
        bank.add(name, linear_reader(task, seed=seed, stack=cell.stack.name))
        fit(bank, {name: task}, seed=seed, progress=False, **training)

    def measure() -> list[Row]:
        scores = evaluate(bank, dict.fromkeys(names, task))
        return [
            {"seed": seed, "measure": task.metric, "score": scores[name][task.metric]} for name, seed in names.items()
        ]

    return cell.without(measure)


def _proxies(base: Any, task: Task) -> list[Row]:
    cell: _Cell = base()
    kind = task.kind
    limit = kind.length_limit(cell.model, cell.processor, cell.max_length)
    part = task.split("validation")
    part = part.select_rows(range(min(len(part), _PROXY_ROWS)))
    inputs = kind.encode(part, cell.processor, EncodeOptions(part="predict", max_length=limit))
    rows = cell.proxies(inputs, len(part))
    if kind.single_label(task.problem_type):
        given = {"processor": cell.processor, "stack": cell.stack.name, "max_length": cell.max_length}
        nu = variability(cell.model, task, **given).table.set_index("layer")["score"]
        for first, length in cell.spans:
            falls = nu[first - 1] - nu[first + length - 1]
            rows.append({"layer": first, "blocks": length, "measure": "nu", "score": falls})
    return rows


def _language(base: Any, texts: list[Any]) -> list[Row]:
    cell: _Cell = base()
    if cell.model.get_output_embeddings() is None:
        return []

    def measure() -> list[Row]:
        score = perplexity(cell.model, texts, cell.processor, cell.stack.depth, cell.max_length)
        return [{"measure": "perplexity", "score": score}]

    inputs = text_inputs(cell.model, texts, cell.processor, cell.max_length, op=_OP)
    return [*cell.without(measure), *cell.proxies(inputs, len(texts))]


def _generation(base: Any, texts: list[Any], prompts: Sequence[str] | None, new_tokens: int) -> list[Row]:
    cell: _Cell = base()
    model, processor = cell.model, cell.processor
    if cell.stack.name != "main" or not can_generate(model) or not OutputHead(model, op=_OP).causal:
        return []
    given = prompts or [text for text in texts if isinstance(text, str)][:_PROMPTS]
    if not given:
        return []
    starts = prompt_ids(model, given, processor, tokens=None if prompts else _PROMPT_TOKENS, op=_OP)
    whole: list[list[int]] = []

    def measure() -> list[Row]:
        said = continuations(model, starts, processor, new_tokens=new_tokens, op=_OP)
        whole[:] = whole or said
        text = tokenizer_of(processor).decode([*starts[0].tolist(), *said[0]], skip_special_tokens=True)
        shares = [same_share(own, other) for own, other in zip(whole, said, strict=True)]
        return [{"measure": SAME, "score": fmean(shares), "text": text}]

    read = texts or given
    inputs = text_inputs(model, read, processor, cell.max_length, op=_OP)
    return [*cell.without(measure), *cell.proxies(inputs, len(read))]


def _figures() -> dict[str, Figure]:
    return {
        "predicted and measured": Figure(
            "scatter",
            x="predicted",
            colour="task",
            facet="proxy",
            where={"measure": "drop"},
            title="What was lost without blocks, by what a proxy foretold",
            x_title="predicted by the proxy",
            value_title="measured drop (of perplexity: rise of its logarithm; of generation: share of tokens)",
            note="A proxy to cut by would give a rising line.",
        ),
        "drop": Figure(
            "line",
            x="layer",
            colour="task",
            facet="blocks",
            where={"measure": "drop", "proxy": "block_influence"},
            title="What is lost without each run of blocks",
            x_title="first block that is out",
            value_title="drop",
            note="Low: the blocks that this task needs least.",
        ),
    }


SAME = "same_tokens"  # of a continuation, before it first differs from the whole model's
PROXIES = ("block_influence", "cka_distance", "nu")


def with_predictions(table: DataFrame) -> tuple[DataFrame, list[str]]:
    """Measured rows, drops beside each proxy's numbers, rank correlations; and sentences.

    `table` has the rows of the cells: "task", "seed", "layer", "blocks", "measure" and "score", perhaps "text".
    """
    proxies: Any = table[table["measure"].isin(PROXIES)]
    measured: Any = table[~table["measure"].isin(PROXIES)]
    drops = _drops(measured)
    rows = [measured.to_dict("records")]
    conclusions: list[str] = []
    for task, own in drops.groupby("task", sort=False):
        conclusions.append(_least(str(task), own))
        for proxy in PROXIES:
            foretold = proxies[(proxies["task"] == task) & (proxies["measure"] == proxy)]
            if not len(foretold):
                continue
            joined = own.merge(
                foretold[["layer", "blocks", "score"]].rename(columns={"score": "predicted"}), on=["layer", "blocks"]
            )
            rows.append(joined.assign(measure="drop", proxy=proxy).to_dict("records"))
            mean = joined.groupby(["layer", "blocks"])[["score", "predicted"]].mean()
            found = rank_correlation(mean["predicted"].tolist(), mean["score"].tolist())
            rows.append([{"task": task, "measure": "rank_correlation", "proxy": proxy, **found._asdict()}])
            conclusions.append(_sentence(str(task), proxy, found))
    columns = ["task", "seed", "layer", "blocks", "measure", "proxy", "predicted", "n", "p", "score"]
    columns += ["text"] * ("text" in table)
    whole = dict.fromkeys(("seed", "layer", "blocks", "n"), "Int64")
    return pd.DataFrame([row for part in rows for row in part], columns=columns).astype(whole), conclusions


def _drops(measured: Any) -> Any:
    """By how much each score is worse than that of the whole model, of the same task and seed."""
    parts = []
    for _, own in measured.groupby(["task", "seed"], sort=False, dropna=False):
        whole = float(own.loc[own["blocks"] == 0, "score"].iloc[0])
        out = own[own["blocks"] > 0].drop(columns="text", errors="ignore")
        if own["measure"].iloc[0] in LOWER:
            drop = out["score"].map(lambda score, whole=whole: math.log(score) - math.log(whole))
        else:
            drop = whole - out["score"]
        parts.append(out.assign(score=drop))
    return pd.concat(parts) if parts else measured


def _sentence(task: str, proxy: str, found: RankCorrelation) -> str:
    name, n = proxy.replace("_", " "), f"n = {pluralize(found.n, 'run')} of blocks"
    if math.isnan(found.score):
        return f"{task}: whether {name} foretells the measured drop cannot be said ({n})."
    facts = f"rank correlation {found.score:.2f}, p = {found.p:.2g}, {n}"
    if found.p > 0.05:
        return f"{task}: that {name} foretells the measured drop cannot be concluded ({facts})."
    return f"{task}: {name} {'foretells' if found.score > 0 else 'contradicts'} the measured drop ({facts})."


def _least(task: str, drops: Any) -> str:
    """Which run costs least."""
    mean = drops.groupby(["layer", "blocks"])["score"].mean()
    first, count = mean.idxmin()
    own = drops[(drops["layer"] == first) & (drops["blocks"] == count)]["score"].tolist()
    summary = summarise(own)
    seeds = "one value; no interval" if summary.interval is None else f"95 % ± {summary.interval:.3f}, n = {len(own)}"
    what = f"block {int(first)}" if count == 1 else f"blocks {int(first)} to {int(first + count - 1)}"
    measure = drops["measure"].iloc[0]
    kind = "rise of log perplexity" if measure in LOWER else "drop"
    kind += " of the share of same tokens" * (measure == SAME)
    return f"{task}: least is lost without {what}, a {kind} of {summary.mean:.3f} ({seeds})."


@contextmanager
def skipping(model: PreTrainedModel, stack: LayerStack, layers: Collection[int], *, op: str) -> Generator[None]:
    """Let blocks hand on the state that they were given, in passes of this thread.

    They still run, so that what they hand on besides (a cache, position biases) is there for the others. Where blocks
    share weights, block i is the i-th call. Norms after the last block stay.

    Raises:
        UnsupportedModelError: In a pass, if a block gives no state of the shape of one that it was given.
    """
    places: dict[nn.Module, set[int]] = {}
    for layer in layers:
        block = stack.blocks[layer - 1]
        places.setdefault(block, set()).add(stack.blocks[: layer - 1].count(block))
    thread, calls = get_ident(), dict.fromkeys(places, 0)

    def start(_module: nn.Module, _args: object) -> None:
        if get_ident() == thread:
            calls.update(dict.fromkeys(calls, 0))

    def skip(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        if get_ident() != thread:
            return None
        calls[block] += 1
        if calls[block] - 1 not in places[block]:
            return None
        single = isinstance(output, Tensor)
        state = output if single else output[0]
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        given = [value for value in given if value.shape == state.shape and value.dtype == state.dtype]
        if not given:
            reason = f"block {min(layers)} changes the shape of its state, and cannot be taken out"
            hint = "Use a model whose blocks keep it."
            raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=hint)
        return given[0] if single else (given[0], *output[1:])

    with ExitStack() as hooks:
        hooks.callback(stack.scope.register_forward_pre_hook(start, prepend=True).remove)
        for block in places:
            hooks.callback(block.register_forward_hook(skip, with_kwargs=True).remove)
        yield


_TOGETHER = 32  # prompts of one length that are continued in one call


def prompt_ids(
    model: PreTrainedModel, texts: Iterable[Any], processor: Any, *, tokens: int | None, op: str
) -> list[Tensor]:
    """Token ids `[tokens]` of prompts, up to `tokens` of each text, without special ones behind; none of no token.

    Raises:
        DataError: If no text has a token.
    """
    limit = length_limit(model, processor)
    inputs = text_inputs(model, texts, processor, limit if tokens is None else min(tokens, limit), op=op)
    prompts: list[Tensor] = []
    for row in range(len(inputs.lengths)):
        ids = inputs.batch([row])["input_ids"]
        places = is_text_token(ids, processor)[0].nonzero().flatten().tolist()
        if places:
            prompts.append(ids[0, : places[-1] + 1])
    if not prompts:
        raise DataError(f"{op}: no prompt has a token to go on from; give texts with words.")
    return prompts


def continuations(
    model: PreTrainedModel, prompts: Sequence[Tensor], processor: Any, *, new_tokens: int, op: str
) -> list[list[int]]:
    """The most likely next tokens, one by one, up to `new_tokens` or an end token, which is among them.

    Prompts are never padded: those of one length are continued together.

    Raises:
        ConfigError: If a prompt and its continuation are longer than the model reads.
    """
    longest = max(map(len, prompts))
    check_range(op, "new_tokens", new_tokens, 1, length_limit(model, processor) - longest)
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    end_tokens = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    search: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    search["pad_token_id"] = min(end_tokens, default=0)  # behind an end token, where nobody looks
    said: dict[int, list[int]] = {}
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    while rows:
        length = len(prompts[rows[0]])
        group = [row for row in rows[:_TOGETHER] if len(prompts[row]) == length]
        rows = rows[len(group) :]
        ids = torch.stack([prompts[row] for row in group]).to(model.device)
        with torch.no_grad(), evaluating(model):
            written: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **search)  # pyright: ignore
        for row, tokens in zip(group, written[:, length:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(tokens) if token in end_tokens), len(tokens))
            said[row] = tokens[:end]
    return [said[row] for row in range(len(prompts))]


def same_share(own: Sequence[int], other: Sequence[int]) -> float:
    """The share of a continuation's tokens, from its first on, that another has too before the two first differ."""
    equal = next((place for place, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(own), len(other)) if equal is None else equal) / len(own)
