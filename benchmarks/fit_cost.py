"""The cost of training readers as `fit` is called by default, over encoding the same texts once.

    python benchmarks/fit_cost.py [--data FOLDER] [--json]

One thread, MiniLM, 1,500 training rows and the rows to validate on, 3 epochs. `encode` is a pass of the model over all
rows, tokenised and sorted by length, in batches of 64. The others are calls of `lamina.fit` with default settings, for
one task and for three tasks over the same rows, and of `LaminaClassifier().fit` with 3 epochs. With --data, the folder
that contains `sst2` in its published format, the texts are those of SST-2; otherwise the demo makes them. Budgets:
`fit` at most 1.3, `LaminaClassifier` at most 1.25, three tasks at most 1.15 of one.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import report

import lamina
from lamina.demo.corpus import ACCEPTABILITY, SENTIMENTS, write
from lamina.demo.timing import in_turn, ratio
from lamina.store import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

TRAIN, EPOCHS = 1500, 3
BUDGETS = {"fit": 1.3, "LaminaClassifier": 1.25}


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with sst2/train.tsv and sst2/dev.tsv")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=3, help="number of measured runs (default 3)")
    return parser.parse_args()


def three_tasks(data: Path | None, folder: Path) -> dict[str, lamina.Task]:
    """Return three tasks over the same rows: SST-2 three times, or three columns of a file that the demo makes."""
    if data is not None:
        task = lamina.Task.preset("sst2", files=data / "sst2", limit=TRAIN)
        return {name: dataclasses.replace(task, name=name) for name in ("first", "second", "third")}
    files = write(folder, rows=TRAIN * 4 // 3)  # a quarter of the rows are for validation and test
    return {
        name: lamina.Task.from_files(
            "sequence_classification",
            train=files["train"],
            validation=files["validation"],
            text="text",
            label=column,
            labels=labels,
            positive=labels[1],
            name=name,
        )
        for name, column, labels in (
            ("first", "acceptability", ACCEPTABILITY),
            ("second", "sentiment", SENTIMENTS),
            ("third", "acceptability", ACCEPTABILITY),
        )
    }


def encode(model: PreTrainedModel, tokenizer: Any, texts: list[str]) -> None:
    """Run the model once over texts, sorted by length, in batches of 64."""
    order = sorted(texts, key=len)
    with torch.inference_mode():
        for start in range(0, len(order), 64):
            model(**tokenizer(order[start : start + 64], padding=True, truncation=True, return_tensors="pt"))


def fitted(model: PreTrainedModel, tokenizer: Any, tasks: dict[str, lamina.Task]) -> dict[str, float]:
    """Train a default reader for each task with the default settings of `fit`, and return the best scores."""
    bank = lamina.ReaderBank(model, tokenizer)
    for name, task in tasks.items():
        bank.add(name, task)
    return {
        name: scores[tasks[name].metric]
        for name, scores in lamina.fit(bank, tasks, epochs=EPOCHS, progress=False).best.items()
    }


def main() -> None:
    """Measure and print the table."""
    arguments = options()
    torch.set_num_threads(1)
    model, tokenizer = load("minilm")
    with tempfile.TemporaryDirectory() as folder:
        tasks = three_tasks(arguments.data, Path(folder))
        one = dict(list(tasks.items())[:1])
        train, validation = (next(iter(tasks.values())).split(part) for part in ("train", "validation"))
        texts = [*train.texts, *validation.texts]
        classifier = lamina.LaminaClassifier(epochs=EPOCHS)
        runs: dict[str, Callable[[], object]] = {
            "encode": lambda: encode(model, tokenizer, texts),
            "fit": lambda: fitted(model, tokenizer, one),
            "fit three tasks": lambda: fitted(model, tokenizer, tasks),
            "LaminaClassifier": lambda: classifier.fit(texts, [*train.labels, *validation.labels]),
        }
        taken = in_turn(runs, repeats=arguments.repeats)
    rows = [
        {
            "what": what,
            "rows": len(texts),
            "s": statistics.median(taken[what]),
            "over encode": ratio(taken, what, to="encode"),
            "over fit": ratio(taken, what, to="fit"),
            "budget": BUDGETS.get(what, "1.15 of fit" if what == "fit three tasks" else ""),
        }
        for what in runs
    ]
    report(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
