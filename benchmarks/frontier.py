"""Score against cost: what each way of adding a task to MiniLM gives, and what it takes.

    python benchmarks/frontier.py --data ../shared/data --output out/frontier [--tasks cola rte] [--methods ...]
        [--seeds 0 1 2] [--rows 2000] [--scored 1000] [--picture frontier.svg] [--json]

Whole texts (CoLA, SST-2, IMDB), pairs (MRPC, RTE, STS-B, QNLI) and tags (CoNLL-2003). Every method has a few variants
(rates, layers); a tenth of the training rows chooses the variant with the first seed, and the epoch with each; the
score is that on the published validation part. Each task, method and seed is written when it ends; the same
command goes on where it was ended. Three tables: the scores, mean over seeds and half the width of the 95 % interval;
the share of the way from "last layer" to "fine-tuning" that each method closes, none where fine-tuning is behind; and
what it takes, of the median task (of LoRA's mixed batch, a copy of the batch per adapter in one pass, the time alone):

    trained          parameters that learn, classifier included; `MB` is what is stored for the task, in float32
    train s          of the chosen variant alone; readers' states of the frozen model are cached
    answer           time to answer eight whole-text tasks for one batch of 16 x 64 tokens, over one pass of the model

`--json` prints a row per task and method.

Beside the readers stand a logistic (or ridge) regression on sentence embeddings, of a pair on each text's by itself;
LoRA (PEFT, which this asks for: `pip install peft`; rank 8 on queries and values) and fine-tuning of everything.
"default" is trained at `fit`'s own rate, with nothing to choose but the epoch; "default, tuned rate" has the grid of
the other readers. "default, tuned base" trains one model along with the default readers of all the tasks asked for,
which still share one pass: the model is no longer what it was. "default, inserted layers" trains layers that were
inserted into it, and nothing else of it; folded in at the end, they take no time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from common import report, tokens
from rivals import MIXED, embedded, fine_tuned, lora, lora_passes
from rivals import RATES as RIVAL_RATES

import lamina
from lamina import Reader, SequenceClassification, Task, TokenClassification
from lamina.demo.timing import in_turn, ratio
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.concat import Concat
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.studies.runner import Cell, run_cells
from lamina.train.results import summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from lamina.heads.base import HeadConfig

    Variants = dict[str, tuple[Reader, float]]

ALL, LAST, TUNED = "all tasks", "last layer", "fine-tuning"
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
RATE, RATES = 1e-3, (3e-4, 1e-3, 3e-3, 1e-2)  # of readers
OURS, OURS_TUNED = "default", "default, tuned rate"
BY_RATE = ("last layer", "scalar mix", "Concat", "DWAtt", OURS_TUNED)
GRIDS = dict.fromkeys(BY_RATE, RATES) | {OURS: (RATE,), "LoRA": RIVAL_RATES["lora"], TUNED: RIVAL_RATES["fine-tuning"]}
EPOCHS = {"LoRA": 6, TUNED: 6, SHARED: 4, INSERTED: 4}  # at most: the best is chosen
READER_EPOCHS = 8


def main() -> None:
    """Run what has not ended, and print."""
    asked = _options()
    first = _run(asked, asked.seeds[:1], {})
    chosen = {(row["task"], row["method"]): row["variant"] for _, row in first.iterrows()}
    table = _run(asked, asked.seeds, chosen) if asked.seeds[1:] else first
    rows = _summed(table, _answering(asked.methods, asked.repeats) if asked.repeats else {})
    for part in [rows] if asked.json else _tables(rows):
        report(part, as_json=asked.json)
    if asked.picture is not None:
        from frontier_picture import draw

        draw(pd.DataFrame(rows), asked.picture)


def _run(asked: argparse.Namespace, seeds: list[int], chosen: dict[tuple[str, str], str]) -> Any:
    """The rows of these seeds; what a first seed has chosen is the only variant of the others."""

    def cell(task: str, method: str, seed: int) -> Cell:
        only = None if seed == seeds[0] else chosen.get((asked.tasks[0] if task == ALL else task, method))
        run = partial(_shared, asked) if task == ALL else partial(_cell, asked, task)
        work = partial(run, method, seed, only)
        of = {"of": " ".join(asked.tasks)} if task == ALL else {}  # another choice of tasks is another model
        rates = {"rates": " ".join(f"{rate:g}" for rate in GRIDS[method])} if method in GRIDS else {}
        epochs = EPOCHS.get(method, READER_EPOCHS)
        return Cell({"task": task, "method": method, "seed": seed, "epochs": epochs, **rates, **of}, work)

    pairs = [
        (task, method)
        for task in asked.tasks
        for method in asked.methods
        if method not in BASES and not (task == "conll2003" and method == "embedding + regression")
    ]
    pairs += [(ALL, method) for method in asked.methods if method in BASES]
    cells = [cell(*pair, seed) for seed in seeds for pair in pairs]
    settings = {"tasks": TASKS, "torch": torch.__version__, "rows": asked.rows, "scored": asked.scored}
    settings |= {"first": asked.seeds[0]}
    table, failures = run_cells(cells, settings=settings, output=asked.output, resume=True)
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' folders, as of `lamina train`")
    parser.add_argument("--output", type=Path, default=Path("out/frontier"), help="where ended cells are kept")
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="which of them (default: all)"
    )
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES, help="which of them (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the runs (default %(default)s)")
    parser.add_argument("--rows", type=int, help="rows to learn from, at most; not given: the task's own number")
    parser.add_argument("--scored", type=int, help="rows of the published part to score by, at most")
    parser.add_argument("--repeats", type=int, default=9, help="turns of the timing; 0: none")
    parser.add_argument("--picture", type=Path, help="draw score against cost here")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    if "LoRA" in asked.methods and find_spec("peft") is None:
        parser.error("LoRA needs PEFT: pip install peft, or name the other --methods")
    return asked


def limited(data: Path, name: str, *, rows: int | None, scored: int | None) -> Task:
    """A task with so many rows, a tenth of them held out; its published part tests."""
    task = Task.preset(name, files=data / name)
    count = min(len(task.split("train")), TASKS[name].get("rows", rows or math.inf), rows or math.inf)
    if count < len(task.split("train")):
        task = task.subsample(rows=int(count), seed=0)
    task = task.held_out()
    published = task.split("test")
    if scored and scored < len(published):
        some = sorted(random.Random(0).sample(range(len(published)), scored))
        task = replace(task, splits={**task.splits, "test": published.select_rows(some)})
    return task


def _length(name: str) -> int:
    return TASKS[name].get("length", 96)


def _cell(asked: argparse.Namespace, name: str, method: str, seed: int, only: str | None) -> list[dict[str, Any]]:
    """One method on one task: the row of the variant that was best on held-out rows, or of the only one."""
    task = limited(asked.data, name, rows=asked.rows, scored=asked.scored)
    return [{"metric": task.metric, **METHODS[method](task, seed=seed, max_length=_length(name), only=only)}]


# Readers


def _variants(name: str, task: Task) -> Variants:
    """What a variant is called -> the reader and its rate."""

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
    """A linear head, and that of the AdaLayers paper."""
    if task.kind == "token_classification":
        encoder = TokenClassification(task.labels, feedforward=512)
        return TokenClassification(task.labels, encoder_layers=0, dropout=0.1), encoder
    problem: Any = task.problem_type
    linear = SequenceClassification(task.labels, pooling="mean", problem_type=problem)
    return linear, SequenceClassification(task.labels, problem_type=problem)


def _read(name: str, task: Task, *, seed: int, max_length: int, only: str | None) -> dict[str, Any]:
    """Train a method's readers, all in one pass; what the chosen one takes is that of its share of them."""
    bank = lamina.ReaderBank(*lamina.load("minilm"))
    rates, variants = {}, {}
    for number, (variant, (reader, rate)) in enumerate(_variants(name, task).items()):
        if only in (None, variant):
            bank.add(f"v{number}", Reader(reader.fusion, reader.head, seed=seed))
            rates[f"v{number}"], variants[f"v{number}"] = rate, variant
    options: dict[str, Any] = {"epochs": READER_EPOCHS, "learning_rate": rates, "seed": seed}
    options |= {"max_length": max_length, "cache": "auto", "test": True, "progress": False}
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
    lamina.insert_(model, position)
    lamina.freeze_(model, train="inserted")


# Of a base that all tasks share: method -> variant -> what is done to it first, and its rate
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


def _shared(asked: argparse.Namespace, method: str, seed: int, only: str | None) -> list[dict[str, Any]]:
    """One model, trained along with the default readers of all tasks: a row per task, of the variant of best mean."""
    tasks = {name: limited(asked.data, name, rows=asked.rows, scored=asked.scored) for name in asked.tasks}
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
        options: dict[str, Any] = {"epochs": EPOCHS[method], "batch_size": 16, "warmup_ratio": 0.1}
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
    "LoRA": partial(lora, epochs=EPOCHS["LoRA"]),
    TUNED: partial(fine_tuned, epochs=EPOCHS[TUNED]),
}
NAMES = [*METHODS, *BASES]


# The table


def _answering(methods: list[str], repeats: int) -> dict[str, float]:
    """Method -> time to answer eight whole-text tasks for one batch, over one pass of the model."""
    model, tokenizer = lamina.load("minilm")
    inputs = tokens(model, 16, 64)
    runs: dict[str, Callable[[], object]] = {"base": lambda: model(**inputs)}
    rows = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    asked = Task.from_dataset("sequence_classification", {"train": rows}, text="text", label="label")
    for name in (name for name in READERS if name in methods and name != OURS_TUNED):
        bank = lamina.ReaderBank(model, tokenizer).eval()
        for number in range(8):
            bank.add(f"r{number}", next(iter(_variants(name, asked).values()))[0])
        runs[name] = partial(bank, main=True, **inputs)
    runs |= lora_passes(inputs, tasks=8) if "LoRA" in methods else {}
    runs[TUNED] = lambda: [model(**inputs) for _ in range(8)]
    with torch.no_grad():
        taken = in_turn(runs, repeats=repeats)
    answering = {name: ratio(taken, name, to="base") for name in runs}
    return answering | dict.fromkeys((OURS_TUNED, *BASES), answering[OURS]) if OURS in answering else answering


def _summed(table: Any, answering: dict[str, float]) -> list[dict[str, Any]]:
    """A row per task and method, and one per method over all tasks."""
    means: dict[Any, float] = table.groupby(["task", "method"], sort=False)["score"].mean().to_dict()
    rows, shares = [], {}
    for (task, method), part in table.groupby(["task", "method"], sort=False):
        summary, low, high = summarise(list(part["score"])), means.get((task, LAST)), means.get((task, TUNED))
        share = (summary.mean - low) / (high - low) if low is not None and high is not None and high > low else None
        if share is not None:
            shares.setdefault(method, []).append(share)
        rows.append(
            {
                "task": task,
                "method": method,
                "metric": part["metric"].iloc[0],
                "variant": " ".join(dict.fromkeys(part["variant"])),
                "seeds": len(part),
                "score": summary.mean,
                "±": summary.interval or "",
                "closed": "" if share is None else share,
                "trained": int(part["trained"].median()),
                "MB": part["stored"].median() * 4 / 1e6,
                "train s": part["seconds"].median(),
                "answer": answering.get(str(method), ""),
            }
        )
    for method, some in shares.items() if table["task"].nunique() > 1 else ():
        mean = {"method": method, "closed": statistics.fmean(some), "answer": answering.get(str(method), "")}
        rows.append({**dict.fromkeys(rows[0], ""), "task": f"mean of {len(some)}", **mean})
    if MIXED in answering:
        rows.append({**dict.fromkeys(rows[0], ""), "method": MIXED, "answer": answering[MIXED]})
    return rows


def _tables(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Scores and shares with a row per method and a column per task; and what a method takes."""
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["task"]))
    tables: list[list[dict[str, Any]]] = [[], [], []]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = {row["task"]: row for row in rows if row["method"] == method}
        scored = {task: row for task, row in own.items() if row["score"] != ""}
        if not scored:  # only timed
            tables[2].append({**dict.fromkeys(tables[2][0], ""), "method": method, "answer": own[""]["answer"]})
            continue
        tables[0].append({"method": method} | {task: _said(scored.get(task)) for task in tasks if task in TASKS})
        tables[1].append({"method": method} | {task: own[task]["closed"] if task in own else "" for task in tasks})
        cost = {key: statistics.median(row[key] for row in scored.values()) for key in ("trained", "MB", "train s")}
        tables[2].append({"method": method, **cost, "answer": next(iter(own.values()))["answer"]})
    return tables


def _said(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['score']:.3f}" + (f" ± {row['±']:.3f}" if row["±"] != "" else "")


if __name__ == "__main__":
    main()
