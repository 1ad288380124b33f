"""The study `removal`: what a model loses without some consecutive blocks, and whether cheap proxies predict it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple, cast

import pandas as pd
from torch import Tensor, nn

from lamina.bank import ReaderBank
from lamina.bank.listening import can_generate
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.roles import family_of
from lamina.layers.types import tokenizer_of
from lamina.prediction.evaluate import evaluate
from lamina.studies.passes import continuations, prompt_ids, same_share, text_inputs, unlabelled_batches
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
from lamina.studies.states.lens import OutputHead, perplexity
from lamina.studies.states.similarity import similarity
from lamina.studies.states.variability import variability
from lamina.studies.statistics import RankCorrelation, rank_correlation
from lamina.studies.study import Figure, rows_where
from lamina.tasks.metrics import LOWER
from lamina.train.fit import fit
from lamina.train.results import summarise, tied
from lamina.utils import JSON, Row, check_range, check_types, pluralize

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.passes import Text
    from lamina.studies.states.lens import BlockOutput
    from lamina.studies.study import Study
    from lamina.tasks.base import Inputs
    from lamina.tasks.task import Task

_OP = "removal"
LANGUAGE, GENERATION = "language model", "generation"  # values of "task" for a model's own output head
SAME = "same_tokens"  # measure of generated text
PROXIES = ("block_influence", "cka_distance", "nu")
_PROMPTS, _PROMPT_TOKENS = 32, 8  # maximum number of texts whose first tokens are prompts, and of these tokens
_LEAST = 1e-12  # a lower score has the logarithm of this one: mae can be 0
_PROXY_ROWS = 512  # maximum number of validation rows that proxies are measured on


class BlockRange(NamedTuple):
    """A range of consecutive blocks that are removed together.

    Attributes:
        first: Number of the first block, from 1. 0 with length 0 stands for the whole model.
        length: Number of blocks.
    """

    first: int
    length: int


@check_types("removal")
def removal(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel | str | Path,
    tasks: Mapping[str, Task] | Task | None = None,
    texts: Iterable[Text] | None = None,
    *,
    prompts: Sequence[str] | None = None,
    new_tokens: int = 32,
    processor: Processor | None = None,
    runs: Sequence[int] = (1,),
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
    """Remove each block, and each range of n consecutive blocks, from a model, and measure how much its scores fall.

    A removed block passes its input on unchanged, so that this works for every model family. Nothing is trained after a
    removal. Three things are scored, with all blocks and without each range:

    - Tasks: for each task and seed, a linear reader of the last layer is trained once, on the whole frozen model.
    - "perplexity" on `texts`, if the model has an output over a vocabulary (for a masked language model, the perplexity
      of masked tokens).
    - "same_tokens", if the model is causal and generates text: prompts are continued by greedy decoding, with and
      without the range. The score is the share (0 to 1) of the whole model's continuation before the first difference,
      as the mean over prompts.

    Rows of measure "drop" say how far a score fell (perplexity and mae: how far their logarithm rose, where a mae below
    1e-12 counts as 1e-12). Each drop has a row per proxy; "predicted" is the proxy's prediction. "rank_correlation" is
    Spearman's correlation of the drops (means over seeds) with the predictions; a range is ranked among those of equal
    length, and "n" counts the ranges of lengths that have two or more.

    A proxy compares the states before the first block of a range with those after its last block. "block_influence" is
    1 - the mean cosine similarity of the tokens' states; "cka_distance" is 1 - CKA of the mean state of each row; "nu",
    for tasks with one class per row, is the fall of the variability within the classes of the training rows.

    Args:
        model: A model, which is copied; or a folder or name, which each cell loads itself, as Ray requires.
        tasks: Task name -> task, with the splits "train" and "validation"; or a single task. None: no tasks.
        texts: Texts, or pairs of texts, to measure the perplexity on. None: it is not measured.
        prompts: Texts to continue. None or empty: the first 8 tokens of each of the first 32 of `texts`, without pairs.
        new_tokens: Maximum number of tokens to generate. 0: nothing is generated.
        processor: Tokenizer or image processor. None: the one saved with the model.
        runs: Values of n: lengths of the ranges, in blocks. A length that is named twice counts once.
        seeds: Each seed decides the readers' initial weights and the order of the rows.
        epochs: Number of epochs of the readers.
        batch_size: Rows per training step; scores do not depend on how rows are batched.
        learning_rate: Peak learning rate of the readers; it falls to 0 linearly.
        max_length: Maximum tokens per text. None: what the model allows.
        stack: Name of the stack. This and all further options are the same as in `reinit`.

    Returns:
        A study with the columns "task" ("language model" for perplexity, "generation" for generated text), "seed",
        "layer" (the first removed block; 0: none), "blocks" (number of removed blocks), "measure", "proxy",
        "predicted", "n" (number of ranges that a correlation is computed from), "p" and "score". If text was generated
        there is also a column "text": the first prompt and its continuation. Cells that raised an error have no rows;
        the study's `settings["failures"]` lists them.

    Raises:
        ConfigError: If there is no task, text or prompt, `runs` (or, with tasks, `seeds`) is empty, a length in `runs`
            is not between 1 and the depth minus 1, another option is out of range, the processor fits no task, the
            stack has no module per block, a task has recorded states, or every cell failed or measured nothing; if
            `resume` is set without `output`, or the cells in `output` were run with other settings, texts or library
            versions.
        UnknownNameError: If a task does not have both splits, or the stack does not exist.
        ModelNotFoundError: If `model` is a name and there is no such model.
        UnsupportedModelError: If the model's layers cannot be found.
        StoreError: If files of `model` are damaged, `output` cannot be written, or a finished cell in it is damaged.
        MissingExtraError: If `ray` is set and Ray is not installed.

    Source:
        Block influence: Men et al. 2024, "ShortGPT", arXiv:2403.03853. Ranges of blocks: Gromov et al. 2024,
        arXiv:2403.17887. nu: Xie et al. 2022, arXiv:2210.10041. The first two papers cut by the proxy; here its
        prediction is compared with the measured drop.
    """
    named, listed = named_tasks(_OP, tasks), [] if texts is None else list(texts)
    check_range(_OP, "new_tokens", new_tokens, 0)
    if not named and not listed and not prompts:
        raise ConfigError(f"{_OP}: there is no task and no text; at least one is needed to measure what is lost.")
    check_given(_OP, runs=runs)
    runs = list(dict.fromkeys(runs))
    if named:
        check_given(_OP, seeds=seeds)
    training = Training(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, max_length=max_length)
    inputs = CellInputs(model, processor, stack, training)
    options: dict[str, JSON] = {"prompts": None if prompts is None else list(prompts), "new_tokens": new_tokens}
    options["keep"] = "last"  # cells of earlier versions kept the best epoch
    edited, settings, head = inputs.check(_OP, named, seeds, **options, texts=len(listed), runs=runs)
    for length in runs:
        check_range(_OP, "runs", length, 1, edited.depth - 1)
    block_ranges = [BlockRange(first, length) for length in runs for first in range(1, edited.depth - length + 2)]
    new_model = partial(_CellModel, inputs, block_ranges)
    cells = [
        Cell({"task": name, "seed": "all"}, partial(_score_readers, new_model, task, list(seeds)))
        for name, task in named.items()
    ]
    cells += [
        Cell({"task": name, "seed": None}, partial(_task_proxies, new_model, task)) for name, task in named.items()
    ]
    read = whole_digests(head, listed)
    if listed:
        work = partial(_measure_perplexity, new_model, listed)
        cells.append(Cell({"task": LANGUAGE, "seed": None}, work, digests=read))
    if new_tokens and (listed or prompts):
        work = partial(_measure_generation, new_model, listed, prompts, new_tokens)
        cells.append(Cell({"task": GENERATION, "seed": None}, work, digests=read))
    table, failures = run_cells(cells, settings=settings, output=output, resume=resume, progress=progress, ray=ray)
    conclusions: list[str] = []
    if len(table):
        table, conclusions = with_predictions(table)
    return study_of_cells(_OP, table, failures, settings, _figures(), conclusions)


class _CellModel:
    """The model of one cell of the study, and measurements on it. It is copied or loaded when an instance is made.

    `inputs` is shared by all cells of the study. `block_ranges` are removed from the blocks of `stack`, one at a time.
    """

    def __init__(self, inputs: CellInputs, block_ranges: Sequence[BlockRange]) -> None:
        self.model, self.processor, self.stack = inputs.fresh(_OP)
        self.training, self._block_ranges = inputs.training, block_ranges

    def measure(self, score: Callable[[], list[Row]]) -> list[Row]:
        """Call `score` with the whole model, and once with each range of blocks removed; return the rows of all calls.

        `score` returns table rows. They get the columns "layer" (first block of the range) and "blocks" (its length);
        both are 0 for the whole model. Only the first call logs warnings. Raises UnsupportedModelError if a block
        cannot be removed.
        """
        rows: list[Row] = [{"layer": 0, "blocks": 0, **row} for row in score()]
        with without_warnings():  # they were already logged for the whole model
            for first, length in self._block_ranges:
                with skipping(self.model, self.stack, range(first, first + length), op=_OP):
                    rows += [{"layer": first, "blocks": length, **row} for row in score()]
        return rows

    def proxies(self, inputs: Inputs, count: int) -> list[Row]:
        """Return table rows: block influence and CKA distance of each range of blocks, on the first rows of `inputs`.

        `count` is the number of these rows. Raises the errors of `similarity`, such as ConfigError for fewer than 4.
        """
        batches = unlabelled_batches(inputs, count)
        read = partial(similarity, self.model, batches=batches, stack=self.stack.name)
        pairs = read(measures=["cka"], minibatch=64).table
        columns = (pairs[column] for column in ("layer", "other_layer", "score"))
        cka = {(layer, other): score for layer, other, score in zip(*columns, strict=True)}
        rows: list[Row] = []
        for length in dict.fromkeys(block_range.length for block_range in self._block_ranges):
            # the layers phase, phase + length, phase + 2 * length, ... bound ranges of this length; all phases
            # together give every range
            for phase in range(length):
                layers = list(range(phase, self.stack.layers, length))
                if len(layers) > 1:
                    moved = read(measures=["block_influence"], layers=layers).table
                    for below, above, score in zip(moved["other_layer"], moved["layer"], moved["score"], strict=True):
                        place = {"layer": int(below) + 1, "blocks": length}
                        rows.append({**place, "measure": "block_influence", "score": score})
                        rows.append({**place, "measure": "cka_distance", "score": 1 - cka[above, below]})
        return rows

    def nu_falls(self, task: Task) -> list[Row]:
        """Return table rows: how far nu, the variability within a task's classes, falls over each range of blocks.

        nu is measured on the training rows. Raises the errors of `variability`, such as DataError if all rows have one
        class.
        """
        options = {"processor": self.processor, "stack": self.stack.name, "max_length": self.training["max_length"]}
        table = variability(self.model, task, **options).table
        nu = dict(zip(table["layer"], table["score"], strict=True))
        return [
            {"layer": first, "blocks": length, "measure": "nu", "score": nu[first - 1] - nu[first + length - 1]}
            for first, length in self._block_ranges
        ]


def _score_readers(new_model: Callable[[], _CellModel], task: Task, seeds: list[int]) -> list[Row]:
    """Train one linear reader per seed on the whole model, and score the readers without each range of blocks.

    `new_model` makes the cell's model. Each reader is trained alone, in its own order of the rows; all are scored in
    the same passes. Returns a table row per seed and range, and one per seed for the whole model.
    """
    cell = new_model()
    bank = ReaderBank(cell.model, cell.processor)
    names = {f"seed{seed}": seed for seed in seeds}
    for name, seed in names.items():
        bank.add(name, linear_reader(task, seed=seed, stack=cell.stack.name))
        # the rows that are scored choose no epoch, which would favour the whole model
        fit(bank, {name: task.without_test()}, seed=seed, keep="last", progress=False, **cell.training)

    def score() -> list[Row]:
        scores = evaluate(bank, dict.fromkeys(names, task))
        return [
            {"seed": seed, "measure": task.metric, "score": scores[name][task.metric]} for name, seed in names.items()
        ]

    return cell.measure(score)


def _task_proxies(new_model: Callable[[], _CellModel], task: Task) -> list[Row]:
    """Return table rows of all proxies: cheap predictions of what removing each range of blocks costs a task.

    They are measured on up to 512 validation rows; "nu", if each row has one class, on all training rows. `new_model`
    makes the cell's model.
    """
    cell, validation = new_model(), task.split("validation")
    sample = validation.select_rows(range(min(len(validation), _PROXY_ROWS)))
    inputs = encode_rows(task, sample, cell.model, cell.processor, cell.training["max_length"])
    rows = cell.proxies(inputs, len(sample))
    return [*rows, *cell.nu_falls(task)] if task.kind.single_label(task.problem_type) else rows


def _measure_perplexity(new_model: Callable[[], _CellModel], texts: list[Text]) -> list[Row]:
    """Measure the perplexity of the whole model on texts, and without each range of blocks; and the proxies on them.

    `new_model` makes the cell's model. Returns table rows; [] if the model has no output over a vocabulary. Raises the
    errors of `lens` and `similarity`, such as ConfigError for fewer than 4 texts, and NotFiniteError for a NaN loss.
    """
    cell = new_model()
    max_length = cell.training["max_length"]
    if cell.model.get_output_embeddings() is None:
        return []

    def score() -> list[Row]:
        value = perplexity(cell.model, texts, cell.processor, cell.stack.depth, max_length)
        return [{"measure": "perplexity", "score": value}]

    inputs = text_inputs(cell.model, texts, cell.processor, max_length, op=_OP)
    return [*cell.measure(score), *cell.proxies(inputs, len(texts))]


def _measure_generation(
    new_model: Callable[[], _CellModel], texts: list[Text], prompts: Sequence[str] | None, new_tokens: int
) -> list[Row]:
    """Compare the text generated without each range of blocks with the text that the whole model generates.

    `new_model` makes the cell's model. Up to `new_tokens` tokens are generated. Without `prompts`, the first 8 tokens
    of up to 32 of `texts`, without pairs, are continued. Proxies are measured on `texts`, or on the prompts if there
    are no texts. Returns table rows of measure "same_tokens", whose column "text" has the first prompt and its
    continuation, and rows of the proxies; [] if the model does not generate text, is not causal, or there is no prompt.
    Raises DataError if no prompt has a token, and ConfigError if a prompt with `new_tokens` more tokens is longer than
    what the model allows.
    """
    cell = new_model()
    model = cell.model
    if cell.stack.name != "main" or not can_generate(model) or not OutputHead(model, op=_OP).causal:
        return []
    prompt_texts = prompts or [text for text in texts if isinstance(text, str)][:_PROMPTS]
    if not prompt_texts:
        return []
    read_texts: Sequence[Text] = texts or prompt_texts
    inputs = text_inputs(model, read_texts, cell.processor, cell.training["max_length"], op=_OP)
    processor: Processor = inputs.processor
    token_ids = prompt_ids(model, prompt_texts, processor, tokens=None if prompts else _PROMPT_TOKENS, op=_OP)
    of_whole_model: list[list[int]] = []

    def score() -> list[Row]:
        generated = continuations(model, token_ids, processor, new_tokens=new_tokens, op=_OP)
        of_whole_model[:] = of_whole_model or generated  # the first call is that of the whole model
        text = tokenizer_of(processor).decode([*token_ids[0].tolist(), *generated[0]], skip_special_tokens=True)
        shares = [same_share(whole, other) for whole, other in zip(of_whole_model, generated, strict=True)]
        return [{"measure": SAME, "score": fmean(shares), "text": text}]

    return [*cell.measure(score), *cell.proxies(inputs, len(read_texts))]


def _figures() -> dict[str, Figure]:
    return {
        "predicted and measured": Figure(
            "scatter",
            x="predicted",
            colour="task",
            facet="proxy",
            where={"measure": "drop"},
            title="Loss after cutting blocks: measured, and predicted by a cheap estimate (proxy)",
            x_title="predicted by the proxy",
            value_title="measured drop (of perplexity and mae: rise of the logarithm; of generation: share of tokens)",
            note="If points rise from left to right, this cheap estimate can choose the blocks to cut.",
        ),
        "drop": Figure(
            "line",
            x="layer",
            colour="task",
            facet="blocks",
            where={"measure": "drop", "proxy": "block_influence"},
            title="What is lost without each run of blocks",
            x_title="first block that is left out",
            value_title="drop",
            note="Lowest: the blocks that this task needs least.",
        ),
    }


class _Drop(NamedTuple):
    """How far a score falls without `block_range`; `seed` is None for measures without seeds.

    `value` is that fall or, where lower scores are better, how far the score's logarithm rises.
    """

    seed: int | None
    block_range: BlockRange
    value: float


def with_predictions(table: DataFrame) -> tuple[DataFrame, list[str]]:
    """Add rows for the drops and the rank correlations to the cells' table, and write the conclusions.

    Args:
        table: Rows of all cells, with the columns "task", "seed", "layer", "blocks", "measure" and "score", and "text"
            if text was generated.

    Returns:
        The study's table, and the conclusions. The table has the measured rows without the proxies' own rows, then rows
        of measure "drop" (one per task, proxy, seed and range) and "rank_correlation" (one per task and proxy).
    """
    is_proxy = table["measure"].isin(PROXIES)
    measured, proxies = table.loc[~is_proxy], table.loc[is_proxy]
    rows = cast("list[Row]", measured.to_dict("records"))
    conclusions: list[str] = []
    for task in measured["task"].unique():
        task_rows = rows_where(measured, {"task": task})
        drops = _drops(task_rows)
        conclusions.append(_least_loss(task, task_rows["measure"].iloc[0], drops))
        for proxy in PROXIES:
            predicted = _predicted(rows_where(proxies, {"task": task, "measure": proxy}))
            if not predicted:
                continue
            for seed, block_range, value in drops:
                if block_range in predicted:
                    place = {"task": task, "seed": seed, "layer": block_range.first, "blocks": block_range.length}
                    numbers = {"predicted": predicted[block_range], "score": value}
                    rows.append({**place, "measure": "drop", "proxy": proxy, **numbers})
            means = {block_range: mean for block_range, mean in _means(drops).items() if block_range in predicted}
            # longer runs cost more and are predicted to; a proxy must order runs of equal length
            correlation = rank_correlation(
                [predicted[block_range] for block_range in means],
                list(means.values()),
                [block_range.length for block_range in means],
            )
            rows.append({"task": task, "measure": "rank_correlation", "proxy": proxy, **correlation._asdict()})
            conclusions.append(_proxy_sentence(task, proxy, correlation))
    columns = ["task", "seed", "layer", "blocks", "measure", "proxy", "predicted", "n", "p", "score"]
    columns += ["text"] * ("text" in table)
    integers = dict.fromkeys(("seed", "layer", "blocks", "n"), "Int64")
    return pd.DataFrame(rows, columns=columns).astype(integers), conclusions


def _drops(rows: DataFrame) -> list[_Drop]:
    """Return how far a task's score falls below the whole model's, for each seed and range of blocks.

    For measures where lower is better, such as perplexity, the drop is the rise of the logarithm. `rows` are the task's
    table rows.
    """
    lower_is_better = rows["measure"].iloc[0] in LOWER

    def loss(value: float) -> float:
        return math.log(max(value, _LEAST)) if lower_is_better else -value

    columns = (rows[column] for column in ("seed", "layer", "blocks", "score"))
    scores: dict[int | None, dict[BlockRange, float]] = {}
    for seed, first, length, score in zip(*columns, strict=True):
        block_range = BlockRange(int(first), int(length))
        scores.setdefault(None if pd.isna(seed) else int(seed), {})[block_range] = float(score)
    drops: list[_Drop] = []
    for seed, by_range in scores.items():
        whole = by_range.pop(BlockRange(0, 0))
        for block_range, score in by_range.items():
            drops.append(_Drop(seed, block_range, loss(score) - loss(whole)))
    return drops


def _predicted(rows: DataFrame) -> dict[BlockRange, float]:
    columns = (rows[column] for column in ("layer", "blocks", "score"))
    return {BlockRange(int(first), int(length)): float(score) for first, length, score in zip(*columns, strict=True)}


def _means(drops: Sequence[_Drop]) -> dict[BlockRange, float]:
    """Return range of blocks -> mean drop over seeds, in ascending order of the ranges."""
    values: dict[BlockRange, list[float]] = {}
    for drop in drops:
        values.setdefault(drop.block_range, []).append(drop.value)
    return {block_range: fmean(values[block_range]) for block_range in sorted(values)}


def _proxy_sentence(task: str, proxy: str, correlation: RankCorrelation) -> str:
    """Return the sentence that says whether a proxy predicts a task's measured drops, or that this cannot be said."""
    name, end = proxy.replace("_", " "), "the measured drop"
    claim, counted = f"{name} predicts {end}", f"{pluralize(correlation.n, 'run')} of blocks, ranked within each length"
    return f"{task}: {correlation.sentence(claim, claim, f'{name} contradicts {end}', counted)}"


def _least_loss(task: str, measure: str, drops: Sequence[_Drop]) -> str:
    """Return a sentence that names the ranges of blocks whose removal costs least: the smallest mean drop over seeds.

    With three seeds or more and a single range, it also says whether the 95 % interval of that drop allows to tell it
    from none.

    `measure` is what was scored (a metric, "perplexity" or "same_tokens"), and `drops` come from `_drops`.
    """
    means = _means(drops)
    least = min(means, key=lambda block_range: means[block_range])
    values = [drop.value for drop in drops if drop.block_range == least]
    summary = summarise(values)
    up, down = ("rise", "fall") if measure in LOWER else ("drop", "rise")
    score = f" of log {measure}" * (measure in LOWER) + " of the share of same tokens" * (measure == SAME)
    change = f"a {up if summary.mean >= 0 else down}{score} of {abs(summary.mean):.3f}"
    ranges = tied(means, means[least], ".3f")
    blocks = [
        f"block {first}" if length == 1 else f"blocks {first} to {first + length - 1}" for first, length in ranges
    ]
    start = f"{task}: least is lost without {' or '.join(blocks)}"
    if len(ranges) > 1:
        return f"{start}, {change} each ({'one value' if len(values) == 1 else f'{len(values)} values'} each)."
    half = summary.shown_interval
    if half is None:
        return f"{start}, {change} ({'one value' if len(values) == 1 else f'{len(values)} values'}; no interval)."
    facts = f"95 % ± {half:.3f}, n = {len(values)} seeds"
    if len(means) > 1:
        facts += f"; chosen by this score from {len(means)} runs of blocks"
    if abs(summary.mean) > half:
        return f"{start}, {change} ({facts})."
    return f"{start}; the score cannot be told apart from the whole model's: {change} ({facts})."


@contextmanager
def without_warnings() -> Generator[None]:
    """Log no warnings of training and scoring, in any thread, inside the `with` block: earlier calls logged them."""
    loggers = [logging.getLogger(f"lamina.{room}") for room in ("train", "prediction")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def skipping(model: PreTrainedModel, stack: LayerStack, layers: Collection[int], *, op: str) -> Generator[None]:
    """Make the blocks `layers` of a stack (1 is the first) return their input, inside the `with` block.

    Only forward passes of this thread are changed. The blocks are still computed, so that their other outputs (a cache,
    position biases) exist for the blocks after them. If blocks share weights, block i is the i-th call of their module.
    A norm after the last block is still applied. A forward pass raises UnsupportedModelError, which names the study
    `op`, if no input of a block has the shape and dtype of its output.
    """
    skipped_calls: dict[nn.Module, set[int]] = {}  # module of a block -> numbers of its calls that are skipped
    for layer in layers:
        block = stack.blocks[layer - 1]
        skipped_calls.setdefault(block, set()).add(stack.blocks[: layer - 1].count(block))
    thread, calls = get_ident(), dict.fromkeys(skipped_calls, 0)

    def start(_module: nn.Module, _args: object) -> None:
        if get_ident() == thread:
            calls.update(dict.fromkeys(calls, 0))

    def skip(
        block: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: BlockOutput
    ) -> BlockOutput | None:
        if get_ident() != thread:
            return None
        calls[block] += 1
        if calls[block] - 1 not in skipped_calls[block]:
            return None
        state = output if isinstance(output, Tensor) else output[0]
        received = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        received = [value for value in received if value.shape == state.shape and value.dtype == state.dtype]
        if not received:
            reason = f"block {min(layers)} changes the shape of its state, and cannot be left out"
            hint = "Use a model whose blocks do not change the shape."
            raise UnsupportedModelError(op=op, model_type=family_of(model), reason=reason, hint=hint)
        return received[0] if isinstance(output, Tensor) else (received[0], *output[1:])

    with ExitStack() as hooks:
        hooks.callback(stack.scope.register_forward_pre_hook(start, prepend=True).remove)
        for block in skipped_calls:
            hooks.callback(block.register_forward_hook(skip, with_kwargs=True).remove)
        yield
