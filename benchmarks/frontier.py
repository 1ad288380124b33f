"""Score against cost: the score of each way of adding a task to MiniLM, and its cost in parameters and time.

    python benchmarks/frontier.py --data ../shared/data [--output FOLDER] [--tasks cola rte] [--methods ...]
        [--seeds 0 1 2] [--rows 2000] [--scored 1000] [--epochs 3] [--states out/states] [--rates 1e-3] [--workers 8]
        [--picture frontier.svg] [--json]
    python benchmarks/frontier.py --recorded docs/results/frontier-all-rows.csv [--tasks cola] [--picture frontier.svg]
        [--json]

The tasks are sequence classification (CoLA, SST-2, IMDB), pairs of texts (MRPC, RTE, STS-B, QNLI) and token
classification (CoNLL-2003). Every method has a few variants (learning rates, layers). A tenth of the training rows is
held out: with the first seed it chooses the variant, and with every seed the epoch. The score is measured on the
published validation split. Each combination of task, method and seed is saved when it ends, and the same command
continues an interrupted run. With `--states`, hidden states stay in a folder, so that further seeds and methods need no
other pass of the model. `--workers` runs that many combinations at once, each in a process of its own; for a GPU, which
one of these small models leaves idle. `--recorded` trains nothing: it reads the scores of earlier runs from a file, and
measures only the time to answer. There are four tables:

1. The scores: mean over seeds, and half the width of the 95 % interval.
2. How far the default is ahead of each other method; with half the width of Welch's 95 % interval if both have at least
   three seeds. The rows that are scored are not drawn again.
3. The share of the gap between "last layer" and "fine-tuning" that each method closes. Tasks in which fine-tuning is no
   better have no share.
4. The cost, as the median over the tasks. For LoRA with a mixed batch (a copy of the batch per adapter, in one pass)
   only the time is measured. Columns:

    trained          number of trained parameters, classifier included; `MB` is the size stored for the task, in float32
    train s          seconds of training of the chosen variant alone; for readers, states of the frozen model are cached
    answer           time to answer eight tasks for one batch of 16 x 64 tokens, in passes of the model; the readers are
                     those of the tasks, in turn, so with four tasks two of each

`--json` prints a row per task and method.

The methods are readers and four others: a logistic (or ridge) regression on sentence embeddings, where each text of a
pair is embedded by itself; the same on the means of all layers side by side; LoRA (needs PEFT: `pip install peft`; rank
8 on queries and values); and fine-tuning of all weights. A regression draws nothing, so it runs with the first seed
only. "default" is trained with the default learning rate of `fit`, so that only the epoch is chosen. "default, tuned
rate" has the same grid of rates as the other readers. "default, tuned base" trains one model together with the default
readers of all tasks; they still share one pass, but the model changes. "default, inserted layers" trains layers that
are inserted into the model, and no other weights of it; merged at the end, they cost no time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from common import report, tokens
from frontier_tables import OURS, TUNED, recorded, summed, tables
from rivals import RATES as RIVAL_RATES
from rivals import embedded, fine_tuned, lora, lora_passes

import lamina
from lamina import Reader, SequenceClassification, Task, TokenClassification
from lamina.demo.timing import in_turn, ratio
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.concat import Concat
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.studies.runner import CELLS, Cell, run_cells

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from lamina.heads.base import HeadConfig

    Variants = dict[str, tuple[Reader, float]]

ALL = "all tasks"
EVERY = "all"  # as the number of rows: no limit
SHARED, INSERTED = "default, tuned base", "default, inserted layers"
TASKS = {
    "cola": {},
    "sst2": {"rows": 8000},
    "mrpc": {},
    "rte": {},
    "stsb": {},
    "qnli": {"rows": 8000},
    "imdb": {"length": 256},
    "conll2003": {"rows": 8000},
}
RATE, RATES = 1e-3, (3e-4, 1e-3, 3e-3, 1e-2)  # learning rates of readers: the default, and the grid
OURS_TUNED = "default, tuned rate"
PAIRS = ("mrpc", "rte", "stsb", "qnli")  # tasks of two texts
REGRESSIONS = ("embedding + regression", "all layers + regression")
BY_RATE = ("last layer", "scalar mix", "Concat", "DWAtt", OURS_TUNED)
GRIDS = dict.fromkeys(BY_RATE, RATES) | {OURS: (RATE,)}
EPOCHS = {"LoRA": 6, TUNED: 6, SHARED: 4, INSERTED: 4}  # number of epochs, of which the best is chosen
READER_EPOCHS = 8


def main() -> None:
    """Run the combinations that have not ended yet, and print the tables."""
    arguments = _options()
    if arguments.recorded is None:
        table = _results(arguments)
        times = _answering(arguments.methods, arguments.tasks, arguments.repeats) if arguments.repeats else {}
        rows = summed(table, times)
    else:
        table: Any = pd.read_csv(arguments.recorded)
        table = table[table["task"].isin(arguments.tasks) & table["method"].isin(arguments.methods)]
        if table.empty:
            raise SystemExit(f"frontier: {arguments.recorded} has no scores of these tasks and methods")
        methods, tasks = (list(table[column].unique()) for column in ("method", "task"))
        rows = recorded(table, _answering(methods, tasks, arguments.repeats) if arguments.repeats else {})
    for part in [rows] if arguments.json else tables(rows):
        report(part, as_json=arguments.json)
    if arguments.picture is not None:
        from frontier_picture import draw

        draw(pd.DataFrame(rows), arguments.picture)


def _results(arguments: argparse.Namespace) -> Any:
    """Run all combinations that have not ended yet, and return their results as a pandas table."""
    tried = _run(arguments, arguments.seeds[:1], {})
    first = tried.loc[tried.groupby(["task", "method"], sort=False)["held out"].idxmax()]
    chosen = {(row["task"], row["method"]): row["variant"] for _, row in first.iterrows()}
    return _run(arguments, arguments.seeds, chosen) if arguments.seeds[1:] else first


def _run(arguments: argparse.Namespace, seeds: list[int], chosen: dict[tuple[str, str], str]) -> Any:
    """Run all tasks and methods with some seeds, and return their results as a pandas table.

    Args:
        arguments: The command line.
        seeds: The seeds. With the first one all variants are tried, with the others only the chosen one.
        chosen: (task, method) -> the variant that the first seed chose.
    """

    def cells_of(task: str, method: str, seed: int) -> list[Cell]:
        best = chosen.get((arguments.tasks[0] if task == ALL else task, method))
        key = {"task": task, "method": method, "seed": seed, "epochs": _epochs(arguments, method)}
        if method in RIVAL_RATES:  # a cell per learning rate, so that they can run at once
            grid = arguments.rates or RIVAL_RATES[method]
            rates = [f"rate {rate:g}" for rate in grid] if best is None else [best]
            return [
                Cell({**key, "variant": rate}, partial(_cell, arguments, task, method, seed, rate)) for rate in rates
            ]
        run = partial(_shared, arguments) if task == ALL else partial(_cell, arguments, task)
        if task == ALL:
            key["of"] = " ".join(arguments.tasks)  # other tasks would make another shared model
        if method in GRIDS:
            key["rates"] = " ".join(f"{rate:g}" for rate in GRIDS[method])
        return [Cell(key, partial(run, method, seed, None if seed == seeds[0] else best))]

    pairs = [
        (task, method)
        for task in arguments.tasks
        for method in arguments.methods
        if method not in BASES and not (task == "conll2003" and method in REGRESSIONS)
    ]
    pairs += [(ALL, method) for method in arguments.methods if method in BASES]
    drawn = [(*pair, seed) for seed in seeds for pair in pairs if seed == seeds[0] or pair[1] not in REGRESSIONS]
    cells = [cell for each in drawn for cell in cells_of(*each)]
    settings = {"tasks": TASKS, "torch": torch.__version__, "rows": arguments.rows, "scored": arguments.scored}
    settings |= {"first": arguments.seeds[0]}
    with _processes(arguments.workers) as pool:
        if pool is not None:
            finished = {path.stem for path in (arguments.output / CELLS).glob("*.json")}
            cells = [
                cell if cell.file in finished else replace(cell, work=pool.submit(cell.work).result) for cell in cells
            ]
        table, failures = run_cells(cells, settings=settings, output=arguments.output, resume=True)
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    if table.empty:
        raise SystemExit("frontier: every run failed, as listed above, so there is no table")
    return table


def _processes(workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    """Return a pool of processes, which have imported what this module imports; for a single worker, None."""
    if workers == 1:
        return nullcontext()
    context = get_context("forkserver")  # a process that has a GPU open cannot be forked
    context.set_forkserver_preload(["frontier"])
    return ProcessPoolExecutor(workers, mp_context=context)


def _epochs(arguments: argparse.Namespace, method: str) -> int:
    """Return the number of epochs that a method trains for."""
    epochs = EPOCHS.get(method, READER_EPOCHS)
    return epochs if arguments.epochs is None else min(epochs, arguments.epochs)


def _options() -> argparse.Namespace:
    """Parse the command line; without PEFT installed, the method LoRA ends the process with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, help="folder with a subfolder per task, as for `lamina train`; needed without --recorded"
    )
    parser.add_argument("--recorded", type=Path, help="CSV file with scores of earlier runs (default: none)")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for results that have ended (default: by the limits of rows)",
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks (default: all)")
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES, help="methods (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default %(default)s)")
    parser.add_argument(
        "--rows", type=row_limit, help="maximum number of training rows, or 'all' (default: depends on the task)"
    )
    parser.add_argument("--scored", type=int, help="maximum number of rows to score on (default: all)")
    parser.add_argument("--epochs", type=int, help="maximum number of epochs (default: depends on the method)")
    parser.add_argument(
        "--rates", nargs="+", type=float, help="learning rates of LoRA and fine-tuning (default: the grid of each)"
    )
    parser.add_argument("--workers", type=int, default=1, help="number of processes (default %(default)s)")
    parser.add_argument("--states", type=Path, help="folder that keeps hidden states (default: none are kept)")
    parser.add_argument("--repeats", type=int, default=9, help="measured runs of the timing; 0: no timing (default 9)")
    parser.add_argument("--picture", type=Path, help="file to draw score against cost to")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    if (arguments.data is None) == (arguments.recorded is None):
        parser.error("give either --data, to run, or --recorded, to show the scores in a file")
    limits = [str(limit) for limit in (arguments.rows, arguments.scored) if limit]
    arguments.output = arguments.output or Path("out") / "-".join(["frontier", *limits])  # other limits, other results
    runs_lora = "LoRA" in arguments.methods and (arguments.recorded is None or arguments.repeats)
    if runs_lora and find_spec("peft") is None:
        instead = "" if arguments.recorded is None else ", or measure no times: --repeats 0"
        parser.error(f"LoRA needs PEFT: pip install peft, or name the other --methods{instead}")
    return arguments


def row_limit(text: str) -> int | str:
    """Return the number of rows that an option names; the text "all" stays as it is."""
    return text if text == EVERY else int(text)


def limited(data: Path, name: str, *, rows: int | str | None, scored: int | None) -> Task:
    """Return a task with a limited number of rows.

    A tenth of the training rows becomes the validation split. The published validation split becomes the test split.

    Args:
        data: Folder with a subfolder per task.
        name: Name of the task.
        rows: Maximum number of training rows; "all" for no limit. None: the limit in `TASKS`, if there is one.
        scored: Maximum number of test rows. None: all.
    """
    task = Task.preset(name, files=data / name)
    most = rows if isinstance(rows, int) else math.inf
    count = most if rows == EVERY else min(TASKS[name].get("rows", most), most)
    if count < len(task.split("train")):
        task = task.subsample(rows=int(count), seed=0)
    task = task.held_out()
    published = task.split("test")
    if scored and scored < len(published):
        sample = sorted(random.Random(0).sample(range(len(published)), scored))
        task = replace(task, splits={**task.splits, "test": published.select_rows(sample)})
    return task


def _length(name: str) -> int:
    """Return the number of tokens to which the texts of a task are truncated."""
    return TASKS[name].get("length", 96)


def _cell(arguments: argparse.Namespace, name: str, method: str, seed: int, only: str | None) -> list[dict[str, Any]]:
    """Train and score one method on one task with one seed.

    Args:
        arguments: The command line.
        name: Name of the task.
        method: Name of the method.
        seed: The seed.
        only: Name of the only variant to train. None: train all, and keep the one that is best on held-out rows.

    Returns:
        A single row of results.
    """
    task = limited(arguments.data, name, rows=arguments.rows, scored=arguments.scored)
    options: dict[str, Any] = {"seed": seed, "max_length": _length(name), "only": only}
    if method not in REGRESSIONS:
        options["epochs"] = _epochs(arguments, method)
    if method in READERS:
        options["states"] = arguments.states
    return [{"metric": task.metric, **METHODS[method](task, **options)}]


# Readers


def _variants(name: str, task: Task) -> Variants:
    """Return name of a variant -> (reader, learning rate), for a method of readers; ValueError for another method."""

    def by_rate(reader: Reader) -> Variants:
        return {f"rate {rate:g}": (reader, rate) for rate in RATES}

    plain, encoder = _heads(task)
    match name:
        case "last layer":
            return by_rate(Reader(LastLayer(), plain))
        case "scalar mix":
            return by_rate(Reader(ScalarMix(), plain))
        case "best single layer":
            return {f"layer {layer}": (Reader(SingleLayer(layer, dim=64), encoder), RATE) for layer in range(7)}
        case "AdaLayers":
            return {f"alpha {alpha}": (Reader(AdaLayers(dim=64, alpha=alpha), encoder), RATE) for alpha in (1, 8, 64)}
        case "Concat":
            return by_rate(Reader(Concat(), plain))
        case "DWAtt":
            return by_rate(Reader(DWAtt(), plain))
        case "default":
            return {f"rate {RATE:g}": (Reader.default(task), RATE)}
        case "default, tuned rate":
            return by_rate(Reader.default(task))
        case _:
            raise ValueError(name)


READERS = ("last layer", "scalar mix", "best single layer", "AdaLayers", "Concat", "DWAtt", OURS, OURS_TUNED)


def _heads(task: Task) -> tuple[HeadConfig, HeadConfig]:
    """Return two heads for a task: a linear one, and the head of the AdaLayers paper."""
    if task.kind == "token_classification":
        encoder = TokenClassification(task.labels, feedforward=512)
        return TokenClassification(task.labels, encoder_layers=0, dropout=0.1), encoder
    problem: Any = task.problem_type
    linear = SequenceClassification(task.labels, pooling="mean", problem_type=problem)
    return linear, SequenceClassification(task.labels, problem_type=problem)


def _read(
    name: str, task: Task, *, seed: int, max_length: int, epochs: int, only: str | None, states: Path | None
) -> dict[str, Any]:
    """Train all variants of a method of readers in one pass, and return the row of the best one.

    Its "seconds" are the training time divided by the number of variants. The arguments are those of `_cell`, and the
    folder that keeps hidden states (None: they are not kept).
    """
    bank = lamina.ReaderBank(*lamina.load("minilm"))
    rates, variants = {}, {}
    for number, (variant, (reader, rate)) in enumerate(_variants(name, task).items()):
        if only in (None, variant):
            bank.add(f"v{number}", Reader(reader.fusion, reader.head, seed=seed))
            rates[f"v{number}"], variants[f"v{number}"] = rate, variant
    options: dict[str, Any] = {"epochs": epochs, "learning_rate": rates, "seed": seed}
    options |= {"max_length": max_length, "test": True, "progress": False}
    options |= {"cache": "auto"} if states is None else {"cache": "on", "cache_dir": states}
    result = lamina.fit(bank, dict.fromkeys(bank, task), **options)
    best = max(bank, key=lambda variant: result.best[variant][task.metric])
    return {
        "variant": variants[best],
        "score": result.test[best][task.metric],
        "held out": result.best[best][task.metric],
        "trained": bank[best].size(),
        "stored": bank[best].size(),
        "seconds": result.seconds / len(rates),
    }


def _inserted(position: Any, model: Any) -> None:
    """Insert layers into a model at a position ("attention" or "both"), and freeze all other weights."""
    lamina.insert_(model, position)
    lamina.freeze_(model, train="inserted")


# Methods in which all tasks share one trained base: method -> variant -> (change of the base, its learning rate)
BASES: dict[str, dict[str, tuple[Callable[[Any], object], float]]] = {
    SHARED: {
        "top 2 blocks, rate 1e-4": (lambda model: lamina.freeze_(model, "0-4"), 1e-4),
        "all, rate 1e-4": (lambda _model: None, 1e-4),
    },
    INSERTED: {
        f"{position}, rate {rate:g}": (partial(_inserted, position), rate)
        for position, rate in (("attention", 1e-3), ("both", 3e-4), ("both", 1e-3))
    },
}


def _shared(arguments: argparse.Namespace, method: str, seed: int, only: str | None) -> list[dict[str, Any]]:
    """Train one model together with the default readers of all tasks, for each variant of a method.

    Returns:
        A row per task, of the variant whose mean score on held-out rows is the best.
    """
    tasks = {
        name: limited(arguments.data, name, rows=arguments.rows, scored=arguments.scored) for name in arguments.tasks
    }
    tried: list[list[dict[str, Any]]] = []
    for variant, (change, rate) in BASES[method].items():
        if only not in (None, variant):
            continue
        torch.manual_seed(seed)
        model, tokenizer = lamina.load("minilm")
        change(model)
        bank = lamina.ReaderBank(model, tokenizer, train_base=True)
        for name, task in tasks.items():
            reader = Reader.default(task)
            bank.add(name, Reader(reader.fusion, reader.head, seed=seed))
        options: dict[str, Any] = {"epochs": _epochs(arguments, method), "batch_size": 16, "warmup_ratio": 0.1}
        options |= {
            "learning_rate": RATE,
            "base_learning_rate": rate,
            "max_length": max(map(_length, tasks)),
            "seed": seed,
        }
        result = lamina.fit(bank, tasks, test=True, progress=False, **options)
        size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        tried.append(
            [
                {
                    "task": name,
                    "metric": task.metric,
                    "variant": variant,
                    "score": result.test[name][task.metric],
                    "held out": result.best[name][task.metric],
                    "trained": bank[name].size() + size,
                    "stored": bank[name].size() + size // len(tasks),
                    "seconds": result.seconds / len(tasks),
                }
                for name, task in tasks.items()
            ]
        )
    return max(tried, key=lambda rows: statistics.fmean(row["held out"] for row in rows))


METHODS: dict[str, Callable[..., dict[str, Any]]] = {
    **{name: partial(_read, name) for name in READERS},
    "embedding + regression": embedded,
    "all layers + regression": partial(embedded, layers=slice(None)),
    "LoRA": lora,
    TUNED: fine_tuned,
}
NAMES = [*METHODS, *BASES]


# The time to answer


def _answering(methods: list[str], names: list[str], repeats: int) -> dict[str, float]:
    """Return method -> time to answer eight tasks for one batch, divided by the time of one pass.

    The eight readers are those of the tasks `names`, in turn. `repeats` is the number of measured runs.
    """
    model, tokenizer = lamina.load("minilm")
    inputs = tokens(model, 16, 64)
    inputs["input_ids"][:, [31, -1]] = tokenizer.sep_token_id  # each row is a pair of texts
    runs: dict[str, Callable[[], object]] = {"base": lambda: model(**inputs)}
    tasks = [_stand_in(names[number % len(names)]) for number in range(8)]
    for name in (name for name in READERS if name in methods and name != OURS_TUNED):
        bank = lamina.ReaderBank(model, tokenizer).eval()
        for number, task in enumerate(tasks):
            bank.add(f"r{number}", next(iter(_variants(name, task).values()))[0])
        runs[name] = partial(bank, main=True, **inputs)
    runs |= lora_passes(inputs, tasks=8) if "LoRA" in methods else {}
    runs[TUNED] = lambda: [model(**inputs) for _ in range(8)]
    with torch.no_grad():
        seconds = in_turn(runs, repeats=repeats)
    answering = {name: ratio(seconds, name, to="base") for name in runs}
    return answering | dict.fromkeys((OURS_TUNED, *BASES), answering[OURS]) if OURS in answering else answering


def _stand_in(name: str) -> Task:
    """Return a task of a few rows whose readers have the kind and the size of those of the task `name`."""
    texts = [f"text {number}" for number in range(40)]
    if name == "conll2003":
        places = ("PER", "ORG", "LOC", "MISC")
        tags = [["O", *(f"{side}-{places[number % 4]}" for side in "BI")] for number in range(40)]
        rows = [{"tokens": [*text.split(), "end"], "tags": own} for text, own in zip(texts, tags, strict=True)]
        return Task.from_dataset("token_classification", {"train": rows}, text="tokens", label="tags")
    is_number, pair = name == "stsb", "second" if name in PAIRS else None
    labels = [number / 8 if is_number else str(number % 2) for number in range(40)]
    rows = [{"first": text, "second": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    options: dict[str, Any] = {"problem_type": "regression"} if is_number else {}
    return Task.from_dataset(
        "sequence_classification", {"train": rows}, text="first", text_pair=pair, label="label", **options
    )


if __name__ == "__main__":
    main()
