"""Few examples per class: Lamina's classifier beside SetFit and a regression on sentence embeddings, on the same rows.

    python benchmarks/few_shot.py --data ../shared/data [--tasks sst2 imdb] [--per-class 8 16] [--seeds 0 1 2]
        [--rows 400] [--output out/few-shot] [--json]

All start from MiniLM (all-MiniLM-L6-v2) and learn from so many rows of each class, drawn by the seed; there are no
others to choose by. Every task, size, method and seed is written when it ends; the same command goes on where it was
ended. Columns:

    accuracy, spread   on the same test rows: mean and sample standard deviation over the draws
    train s            of one draw, the model being loaded
    trained            parameters that learn

SetFit (`pip install setfit`) fine-tunes the whole model on pairs of sentences, then a logistic regression; its settings
are its own defaults.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch
from common import report
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import lamina
from lamina.store.models import source_of
from lamina.studies.runner import Cell, run_cells
from lamina.tasks.split import limited
from lamina.train.results import summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from lamina import Task

LENGTH = {"sst2": 128, "imdb": 64}  # tokens of a text that are read, by all
TASKS = {"sst2": "validation", "imdb": "test"}  # the published part that is scored
Learnt = tuple[Any, float, int]  # what has learnt, the seconds that it took, how many parameters learnt


def main() -> None:
    """Run what has not ended, and print."""
    asked = _options()
    cells = [
        Cell(
            {"task": task, "per class": size, "method": method, "seed": seed},
            partial(_cell, METHODS[method], asked, task, size, seed),
        )
        for task in asked.tasks
        for size in asked.per_class
        for method in asked.methods
        for seed in asked.seeds
    ]
    settings = {"rows": asked.rows, "length": LENGTH, "torch": torch.__version__}
    done: Any = run_cells(cells, settings=settings, output=asked.output, resume=True)
    table, failures = done
    for failure in failures:
        print(f"failed: {dict(failure.key)}: {failure.error}")
    rows = []
    for (task, size, method), part in table.groupby(["task", "per class", "method"], sort=False):
        summary = summarise(list(part["accuracy"]))
        row: dict[str, Any] = {"task": task, "per class": int(size), "method": method, "draws": summary.count}
        row |= {"accuracy": summary.mean, "spread": summary.spread}
        rows.append({**row, "train s": part["seconds"].median(), "trained": int(part["trained"].median())})
    report(rows, as_json=asked.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' folders, as of `lamina train`")
    parser.add_argument("--output", type=Path, default=Path("out/few-shot"), help="where ended cells are kept")
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="which of them (default: all)"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="which of them (default: all)"
    )
    parser.add_argument(
        "--per-class", nargs="+", type=int, default=[8, 16], help="labelled rows of a class (default %(default)s)"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the runs (default %(default)s)")
    parser.add_argument("--rows", type=int, default=400, help="test rows, drawn once (default 400)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    if "SetFit" in asked.methods and find_spec("setfit") is None:
        parser.error("SetFit is not installed: pip install setfit, or name the other --methods")
    return asked


def _cell(
    method: Callable[..., Learnt], asked: argparse.Namespace, name: str, size: int, seed: int
) -> list[dict[str, Any]]:
    """One method on one draw of rows."""
    task = lamina.Task.preset(name, files=asked.data / name)
    texts, labels = _columns(task.subsample(per_class=size, stratified=True, seed=seed), "train")
    classifier, seconds, trained = method(texts, labels, seed=seed, length=LENGTH[name])
    held, truth = _columns(task, TASKS[name], asked.rows)
    right = np.asarray(classifier.predict(held)) == truth
    return [{"accuracy": float(right.mean()), "seconds": seconds, "trained": trained}]


def _columns(task: Task, part: str, rows: int | None = None) -> tuple[list[str], np.ndarray]:
    split = limited(task.split(part), rows, seed=0)
    return list(split.texts), np.array([task.labels[number] for number in split.labels])


# The methods


def _reader(texts: list[str], labels: np.ndarray, *, seed: int, length: int, reader: Any = None) -> Learnt:
    lamina.LaminaTransformer().fit(texts)  # the model is loaded
    classifier = lamina.LaminaClassifier(reader=reader, max_length=length, random_state=seed)
    start = time.perf_counter()
    classifier.fit(texts, labels)
    return classifier, time.perf_counter() - start, classifier.bank_["reader"].size()


def _embedding(texts: list[str], labels: np.ndarray, *, seed: int, length: int) -> Learnt:
    """The mean of the last states, of length 1: what sentence-transformers makes of this model."""
    embed = lamina.LaminaTransformer(max_length=length).fit(texts)
    regression: Any = LogisticRegression(C=10.0, max_iter=2000, random_state=seed)
    classifier = make_pipeline(embed, Normalizer(), regression)
    start = time.perf_counter()
    classifier.fit(texts, labels)
    return classifier, time.perf_counter() - start, regression.coef_.size + regression.intercept_.size


def _setfit(texts: list[str], labels: np.ndarray, *, seed: int, length: int) -> Learnt:
    setfit: Any = import_module("setfit")
    model = setfit.SetFitModel.from_pretrained(source_of("minilm", None))
    model.model_body.max_seq_length = length
    rows = datasets.Dataset.from_dict({"text": texts, "label": labels.tolist()})
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"output_dir": folder, "save_strategy": "no", "report_to": "none"}
        trainer = setfit.Trainer(
            model=model,
            args=setfit.TrainingArguments(seed=seed, show_progress_bar=False, **options),
            train_dataset=rows,
        )
        start = time.perf_counter()
        with redirect_stdout(sys.stderr):  # it prints what it logs
            trainer.train()
        seconds = time.perf_counter() - start
    return model, seconds, sum(parameter.numel() for parameter in model.model_body.parameters())


METHODS: dict[str, Callable[..., Learnt]] = {
    "LaminaClassifier()": _reader,
    "reader=LastLayer()": partial(_reader, reader=lamina.fusion.LastLayer()),
    "embedding + regression": _embedding,
    "SetFit": _setfit,
}


if __name__ == "__main__":
    main()
