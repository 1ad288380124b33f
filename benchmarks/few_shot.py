"""Few examples per class: Lamina's classifier, SetFit and a regression on sentence embeddings, on the same rows.

    python benchmarks/few_shot.py --data ../shared/data [--tasks sst2 imdb] [--per-class 8 16] [--seeds 0 1 2]
        [--rows 400] [--output out/few-shot] [--json]

All methods start from MiniLM (all-MiniLM-L6-v2) and are trained on the same number of rows of each class, which the
seed draws. There is no validation split. Each combination of task, size, method and seed is saved when it ends, and the
same command continues an interrupted run. Columns:

    accuracy, spread   mean and sample standard deviation over the draws, on the same test rows
    train s            seconds of one training run, without loading the model
    trained            number of parameters that are trained

SetFit (`pip install setfit`) fine-tunes the whole model on pairs of sentences, then fits a logistic regression; it runs
with its default settings.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from common import report
from rivals import Trained, setfit
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import lamina
from lamina.studies.runner import Cell, run_cells
from lamina.tasks.split import limited
from lamina.train.results import summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from lamina import Task

LENGTH = {"sst2": 128, "imdb": 64}  # tokens to which every method truncates a text
TASKS = {"sst2": "validation", "imdb": "test"}  # task -> the published split that is scored


def main() -> None:
    """Run the combinations that have not ended yet, and print a row per task, size and method."""
    arguments = _options()
    cells = [
        Cell(
            {"task": task, "per class": size, "method": method, "seed": seed},
            partial(_cell, METHODS[method], arguments, task, size, seed),
        )
        for task in arguments.tasks
        for size in arguments.per_class
        for method in arguments.methods
        for seed in arguments.seeds
    ]
    settings = {"rows": arguments.rows, "length": LENGTH, "torch": torch.__version__}
    done: Any = run_cells(cells, settings=settings, output=arguments.output, resume=True)
    table, failures = done
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    rows = []
    for (task, size, method), part in table.groupby(["task", "per class", "method"], sort=False):
        summary = summarise(list(part["accuracy"]))
        row: dict[str, Any] = {"task": task, "per class": int(size), "method": method, "draws": summary.count}
        row |= {"accuracy": summary.mean, "spread": summary.spread}
        rows.append({**row, "train s": part["seconds"].median(), "trained": int(part["trained"].median())})
    report(rows, as_json=arguments.json)


def _options() -> argparse.Namespace:
    """Parse the command line; without SetFit installed, its method ends the process with an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with a subfolder per task, as for `lamina train`"
    )
    parser.add_argument("--output", type=Path, default=Path("out/few-shot"), help="folder for results that have ended")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks (default: all)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods (default: all)")
    parser.add_argument(
        "--per-class", nargs="+", type=int, default=[8, 16], help="training rows of each class (default %(default)s)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds (default %(default)s)")
    parser.add_argument("--rows", type=int, default=400, help="test rows, drawn once (default 400)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if "SetFit" in arguments.methods and find_spec("setfit") is None:
        parser.error("SetFit is not installed: pip install setfit, or name the other --methods")
    return arguments


def _cell(
    method: Callable[..., Trained], arguments: argparse.Namespace, name: str, size: int, seed: int
) -> list[dict[str, Any]]:
    """Train and score one method on one draw of rows.

    Args:
        method: Function that trains a classifier on texts and labels.
        arguments: The command line.
        name: Name of the task.
        size: Training rows of each class.
        seed: Seed of the draw and of the method.

    Returns:
        A single row with "accuracy", "seconds" (of training) and "trained" (number of parameters).
    """
    task = lamina.Task.preset(name, files=arguments.data / name)
    texts, labels = _columns(task.subsample(per_class=size, stratified=True, seed=seed), "train")
    classifier, seconds, trained = method(texts, labels, seed=seed, length=LENGTH[name])
    test_texts, truth = _columns(task, TASKS[name], arguments.rows)
    correct = np.asarray(classifier.predict(test_texts)) == truth
    return [{"accuracy": float(correct.mean()), "seconds": seconds, "trained": trained}]


def _columns(task: Task, part: str, rows: int | None = None) -> tuple[list[str], np.ndarray]:
    """Return the texts and labels of a split, or of `rows` rows that are drawn from it."""
    split = limited(task.split(part), rows, seed=0)
    return list(split.texts), np.array([task.labels[number] for number in split.labels])


# The methods. Each trains a classifier on texts and labels, with texts truncated to `length` tokens.


def _reader(texts: list[str], labels: np.ndarray, *, seed: int, length: int, reader: Any = None) -> Trained:
    """Train `LaminaClassifier`; `reader` is its fusion. None: the default reader."""
    lamina.LaminaTransformer().fit(texts)  # loads the model, so that the time of training does not include it
    classifier = lamina.LaminaClassifier(reader=reader, max_length=length, random_state=seed)
    start = time.perf_counter()
    classifier.fit(texts, labels)
    return classifier, time.perf_counter() - start, classifier.bank_["reader"].size()


def _embedding(texts: list[str], labels: np.ndarray, *, seed: int, length: int) -> Trained:
    """Train a logistic regression on sentence embeddings: the mean of the last layer's states, scaled to length 1.

    They are the embeddings that sentence-transformers computes with this model.
    """
    embed = lamina.LaminaTransformer(max_length=length).fit(texts)
    regression: Any = LogisticRegression(C=10.0, max_iter=2000, random_state=seed)
    classifier = make_pipeline(embed, Normalizer(), regression)
    start = time.perf_counter()
    classifier.fit(texts, labels)
    return classifier, time.perf_counter() - start, regression.coef_.size + regression.intercept_.size


METHODS: dict[str, Callable[..., Trained]] = {
    "LaminaClassifier()": _reader,
    "reader=LastLayer()": partial(_reader, reader=lamina.fusion.LastLayer()),
    "embedding + regression": _embedding,
    "SetFit": setfit,
}


if __name__ == "__main__":
    main()
